"use strict";
// The page of the explorer: reads the form, runs the engine, and shows tables and pictures.

const MAX_RECIPES = 4;
let drawnAmax = null; // the tensor amax that the page filled in with its numbers; it does not hold for other numbers
const FOUR_OVER_SIX = "nvfp4-te-4over6-mse-448"; // the recipe whose choice of scale the error picture marks
const BY_ID = new Map(RECIPES.map((recipe) => [recipe.id, recipe]));
// A block of a tensor whose amax is 0.0947, for which two widespread producers differ.
const EXAMPLE = {
  x: "0.00546 -0.00191 0.0124 0.0222 0.0161 -0.0068 0.00142 0.00513 0.0138 -0.0176 0.000557 0.0112 0.0422 0.0122 -0.0178 0.0197",
  recipes: "nvfp4-te,nvfp4-compressed-tensors",
  dtype: "bfloat16",
  amax: "0.0947",
};
const OWN_EXAMPLES = {
  nf4: "fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)",
  ue5m3: "ue5m3 = ElementFormat('UE5M3', 5, 3, 15, specials='nan', signed=False)\nfp4kit.custom_recipe('fp4-ue5m3', E2M1, ue5m3, block=16, scale_rounding='up')",
  ternary: "fp4kit.custom_recipe('ternary', Codebook([-1, 0, 1], name='Ternary'), 'bfloat16', block=32)",
};
const at = (id) => document.getElementById(id);
const selects = () => [...document.querySelectorAll("#recipes select")];
let engine;
let ownError = ""; // what is wrong in the field for own formats
let own = []; // the recipes that the field for own formats makes, which have entries in BY_ID too
let madeNumbers = null; // the numbers that the page filled in, which it may replace by more of them
let unknown = []; // what a link names that the page does not offer

// ---- numbers as text ----

/** Return the shortest decimal that is read back as the same float32 number. */
function decimal(x) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x < 0 ? "−∞" : "∞";
  if (Object.is(x, -0)) return "−0";
  for (let digits = 1; digits <= 9; ++digits) {
    const text = x.toPrecision(digits);
    if (Math.fround(Number(text)) === Math.fround(x)) return String(Number(text)).replace("-", "−");
  }
  return String(x).replace("-", "−");
}

/** Return an integer in binary, with leading zeros. */
const binary = (code, bits) => code.toString(2).padStart(bits, "0");

/** Return a byte in hexadecimal, such as 0x3A. */
const hex = (byte) => `0x${byte.toString(16).toUpperCase().padStart(2, "0")}`;

/** Return the number that a format gives to a code. */
function formatValue(format, code) {
  const value = FORMATS[format][code];
  return value === null ? NaN : Number(value);
}

// ---- the form ----

/** Return the numbers in a text. Throw an Error that says which item is no finite number. */
function parsed(text) {
  const items = text.replace(/\u2212/g, "-").split(/[\s,;[\]()]+/).filter(Boolean);
  return items.map((item) => {
    const x = Number(item);
    if (!Number.isFinite(x)) throw new Error(`"${item}" is no finite number.`);
    return x;
  });
}

/** Return what the form asks for. Throw an Error with a message for the user if it cannot be computed. */
function request() {
  at("count").textContent = "";
  const numbers = parsed(at("numbers").value);
  at("count").textContent = `${numbers.length} numbers`;
  const recipes = selects().map((one) => BY_ID.get(one.value)).filter(Boolean);
  if (!recipes.length) throw new Error("Choose a recipe.");
  if (ownError && recipes.some((recipe) => recipe.own)) throw new Error(`Your own format: ${ownError}`);
  const block = recipes.reduce((found, recipe) => lcm(found, recipe.block), 1);
  if (!numbers.length || numbers.length % block || numbers.length > MAX_BLOCK)
    throw new Error(`There are ${numbers.length} numbers; blocks of these recipes need ${block} or a multiple, at most ${MAX_BLOCK}.`);
  const dtype = at("dtype").value;
  const bits = numbers.map((x) => bitsOf(x, dtype));
  const rounded = bits.map((one) => valueOf(one, dtype));
  const large = rounded.findIndex((x) => !Number.isFinite(x));
  if (large >= 0) throw new Error(`${numbers[large]} is too large for ${dtype}.`);
  const text = at("amax").value.trim();
  const amax = text ? Math.fround(Number(text)) : null;
  if (amax !== null && !(amax >= 0 && amax < Infinity)) throw new Error(`The tensor amax is "${text}"; it must be 0 or a positive number.`);
  return { numbers, recipes, dtype, bits, rounded, amax };
}

/** Return the least common multiple of two positive integers. */
function lcm(a, b) {
  let [large, small] = [a, b];
  while (small) [large, small] = [small, large % small];
  return (a / large) * b;
}

/** Fill the form. given: its contents by name, as in EXAMPLE; absent ones are empty, float32 or the example's. */
function fill(given) {
  at("dtype").value = Object.hasOwn(DTYPES, given.dtype ?? "") ? given.dtype : "float32";
  at("amax").value = given.amax ?? "";
  drawnAmax = given === EXAMPLE ? EXAMPLE.amax : null;
  if (given !== EXAMPLE) at("own").value = given.own ?? "";
  at("own-part").open = Boolean(at("own").value);
  readOwn();
  const asked = (given.recipes ?? own.map((recipe) => recipe.id).join()).split(",").filter(Boolean);
  const ids = asked.filter((id) => BY_ID.has(id)).slice(0, MAX_RECIPES);
  unknown = asked.filter((id) => !ids.includes(id));
  if (given.dtype && !Object.hasOwn(DTYPES, given.dtype)) unknown.push(given.dtype);
  selects().forEach((select, i) => (select.value = ids[i] ?? (i ? "" : RECIPES[0].id)));
  madeNumbers = null;
  if (given.x === undefined) fillNumbers();
  else at("numbers").value = given.x;
  if (given.x === EXAMPLE.x) madeNumbers = given.x;
}

/**
 * Read the field for own formats, and offer its recipes in place of those that it made before. If it is wrong, show why
 * and keep the old ones, so that the boxes stay as they are; request() gives no results then.
 */
function readOwn() {
  const chosen = selects().map((select) => select.value);
  ownError = "";
  try {
    const made = ownRecipes(at("own").value);
    registerFormats(made);
    const before = own.map((recipe) => recipe.id);
    before.forEach((id) => BY_ID.delete(id));
    own = made;
    own.forEach((recipe) => BY_ID.set(recipe.id, recipe));
    selects().forEach((select, i) => {
      select.querySelector("optgroup[label='Your own']")?.remove();
      const part = Object.assign(document.createElement("optgroup"), { label: "Your own" });
      own.forEach((recipe) => part.append(new Option(recipe.id, recipe.id)));
      if (own.length) select.prepend(part);
      const renamed = own[before.indexOf(chosen[i])]?.id ?? chosen[i];
      select.value = BY_ID.has(renamed) ? renamed : i ? "" : RECIPES[0].id;
    });
  } catch (error) {
    ownError = error.message;
    at("own-part").open = true;
  }
  at("own-problem").textContent = ownError;
}

/** Enter the formats of own recipes into FORMATS. One that differs from a format of this name gets another name. */
function registerFormats(recipes) {
  const made = {};
  const enter = (format) => {
    const isKnown = Object.hasOwn(NAMED, format.name);
    const isSame = isKnown && NAMED[format.name].values.every((value, code) => Object.is(value, format.values[code]));
    const name = isKnown && !isSame ? `${format.name} (own)` : format.name;
    const other = made[name];
    needs(!other || other.every((value, code) => Object.is(value, format.values[code])), `two formats are called ${format.name}; needs different names`);
    made[name] = format.values;
    if (!isSame || !Object.hasOwn(FORMATS, name)) FORMATS[name] = format.values;
    return name;
  };
  for (const recipe of recipes) {
    recipe.element = enter(recipe.own.element);
    if (recipe.own.scale instanceof Format) recipe.scale = enter(recipe.own.scale);
  }
}

/** Choose the own recipes that are not chosen, in boxes that are free, and at last in the last box. */
function chooseOwn() {
  for (const { id } of own) {
    if (selects().some((select) => select.value === id)) continue;
    (selects().find((select) => !select.value) ?? selects()[MAX_RECIPES - 1]).value = id;
  }
  if (at("numbers").value === madeNumbers) fillNumbers(); // of the length that the blocks need
}

/** Fill the field of numbers with the example, repeated to the length that the blocks of the recipes need. */
function fillNumbers() {
  const blocks = selects().map((select) => BY_ID.get(select.value)?.block ?? 1);
  const [length, numbers] = [Math.min(blocks.reduce(lcm, 16), MAX_BLOCK), EXAMPLE.x.split(" ")];
  madeNumbers = at("numbers").value = Array.from({ length }, (_, i) => numbers[i % numbers.length]).join(" ");
}

/** Show what a link names that the page does not offer, and links to the documentation of the chosen recipes. */
function showAbout() {
  at("unknown").textContent = unknown.length ? `The link names ${unknown.join(", ")}, which this page does not offer.` : "";
  const chosen = [...new Set(selects().map((select) => select.value).filter((id) => BY_ID.has(id)))];
  const links = chosen.map((id) => {
    const page = BY_ID.get(id).page;
    return Object.assign(document.createElement("a"), { href: SITE + (page ?? "guides/own-format/"), textContent: id });
  });
  at("about").replaceChildren("Formulas and sources: ", ...links.flatMap((link, i) => (i ? [", ", link] : [link])));
}

/** Fill the form from the part of the address after #, or with the example if there is none. */
function readAddress() {
  fill(location.hash.length > 1 ? Object.fromEntries(new URLSearchParams(location.hash.slice(1))) : EXAMPLE);
}

/** Return the address of the page with the contents of the form. */
function address() {
  const ids = selects().map((one) => one.value).filter(Boolean);
  const parts = new URLSearchParams({ x: at("numbers").value.trim().split(/[\s,;]+/).join(" "), recipes: ids.join(","), dtype: at("dtype").value });
  if (at("amax").value.trim()) parts.set("amax", at("amax").value.trim());
  if (at("own").value.trim()) parts.set("own", at("own").value.trim());
  return `${location.href.split("#")[0]}#${parts}`;
}

/** Make the selection boxes of recipes, grouped by format and producer. */
function makeChoices() {
  for (let i = 0; i < MAX_RECIPES; ++i) {
    const label = document.createElement("label");
    label.textContent = i ? `Recipe ${i + 1} ` : "Recipe 1, to compare with ";
    const select = document.createElement("select");
    if (i) select.add(new Option("none", ""));
    for (const group of new Set(RECIPES.map((recipe) => recipe.group))) {
      const part = document.createElement("optgroup");
      part.label = group;
      RECIPES.filter((recipe) => recipe.group === group).forEach((recipe) => part.append(new Option(recipe.id, recipe.id)));
      select.append(part);
    }
    label.append(select);
    at("recipes").append(label);
  }
}

// ---- results ----

/**
 * Run a recipe on the numbers of a request. Return the result of Engine.explore with unpacked codes, and with values as
 * numbers. Return null if only fp4kit's specification can compute them.
 */
function run(asked, recipe) {
  const found = engine.explore(recipe, asked.dtype, asked.bits, 1, asked.bits.length, asked.amax);
  if (!found) return null;
  const values = Array.from(found.values, (bits) => valueOf(bits, asked.dtype));
  return { ...found, recipe, codes: unpackedCodes(found.packed, recipe.codeBits, values.length), values };
}

const sameBits = (a, b) => Object.is(a, b);

/** Return the scale of a block as a cell of a table: a code of its format, or a float32 number. */
function scaleCell({ recipe, scales }, index) {
  const stored = scales[index];
  const isCode = scales instanceof Uint8Array;
  const bits = isCode ? hex(stored) : `0x${float32Bits(stored).toString(16).padStart(8, "0")}`;
  return { text: decimal(isCode ? formatValue(recipe.scale, stored) : stored), bits: `${recipe.scale} ${bits}`, format: recipe.scale, key: stored };
}

/** Return a sentence that says in which step a result first differs from the first one. */
function firstDifference(first, other) {
  const [a, b] = [first.recipe, other.recipe];
  const names = `${a.id} and ${b.id}`;
  const differing = first.values.filter((value, i) => !sameBits(value, other.values[i])).length;
  const values = differing ? `${differing} of ${first.values.length} values differ.` : "All values are equal.";
  if (a.element !== b.element || a.scale !== b.scale || a.block !== b.block)
    return `${names} use different formats, so only their values can be compared. ${values}`;
  if (a.tensorRule !== null && b.tensorRule !== null && !sameBits(first.tensor[1], other.tensor[1]))
    return `${names} first differ in the tensor scale: ${decimal(first.tensor[1])} against ${decimal(other.tensor[1])}. ${values}`;
  const scale = first.scales.findIndex((code, i) => code !== other.scales[i]);
  if (scale >= 0) {
    const [p, q] = [first, other].map((result) => scaleCell(result, scale));
    const told = ({ text, bits }) => `${bits.split(" ").pop()} (${text})`;
    return `${names} first differ in the scale of block ${scale + 1}: ${told(p)} against ${told(q)}. ${values}`;
  }
  const element = first.codes.findIndex((code, i) => code !== other.codes[i]);
  if (element >= 0) {
    const told = (code) => `${binary(code, a.elementBits)} (${decimal(formatValue(a.element, code))})`;
    return `${names} have equal scales and first differ in element ${element + 1}: code ${told(first.codes[element])} against ${told(other.codes[element])}. ${values}`;
  }
  if (differing) return `${names} store equal bytes and decode them to different values. ${values}`;
  return `${names} agree in every bit here.`;
}

/**
 * Replace the contents of a table. The first cell of each row becomes the row's header.
 *
 * head: the cells of the header row. rows: lists of cells. A cell is a text, or {text, bits, differs, link}: bits is
 * shown after the text, differs marks the cell, and link is an address. starts: indices of the rows with which a block begins.
 */
function fillTable(table, head, rows, starts = []) {
  const cell = (content, tag) => {
    const { text, bits, differs, link } = typeof content === "string" ? { text: content } : content;
    const made = document.createElement(tag);
    made.append(link ? Object.assign(document.createElement("a"), { href: link, textContent: text }) : text);
    if (bits) {
      const part = document.createElement("span");
      part.className = "bits";
      part.textContent = ` ${bits}`;
      made.append(part);
    }
    if (differs) {
      made.className = "differs";
      made.setAttribute("aria-label", `differs: ${text} ${bits ?? ""}`);
    }
    return made;
  };
  const line = (cells, tag) => {
    const made = document.createElement("tr");
    cells.forEach((content, i) => {
      const one = cell(content, i ? tag : "th");
      if (one.tagName === "TH") one.scope = tag === "th" ? "col" : "row";
      made.append(one);
    });
    return made;
  };
  const [top, body] = [document.createElement("thead"), document.createElement("tbody")];
  top.append(line(head, "th"));
  rows.forEach((cells, i) => {
    const made = line(cells, "td");
    if (starts.includes(i)) made.className = "block-start";
    body.append(made);
  });
  table.replaceChildren(top, body);
}

/** Fill the table of scales. */
function showScales(asked, results) {
  const rows = [];
  const add = (name, cells) => rows.push([name, ...cells.map((one, i) => ({ ...one, differs: i > 0 && one.key !== undefined && cells[0].key !== undefined && one.format === cells[0].format && one.key !== cells[0].key }))]);
  const tensor = (i) => results.map(({ recipe, tensor: t }) => (recipe.tensorRule === null ? { text: "–" } : { text: decimal(t[i]), key: t[i] }));
  add("Tensor amax", tensor(2));
  add("Tensor scale, to encode", tensor(0));
  add("Tensor scale, to decode", tensor(1));
  const smallest = Math.min(...results.map(({ recipe }) => recipe.block));
  for (let start = 0; start < asked.bits.length; start += smallest) {
    const inBlock = results.map(({ recipe }) => (start % recipe.block ? null : start / recipe.block));
    const name = `block ${start / smallest + 1}`;
    add(`Amax of ${name}`, results.map(({ recipe }, i) => {
      if (inBlock[i] === null || recipe.scale === null) return { text: "–" };
      const amax = Math.max(...asked.rounded.slice(start, start + recipe.block).map(Math.abs));
      return { text: decimal(amax) };
    }));
    add(`Scale of ${name}`, results.map((result, i) => (inBlock[i] === null || result.recipe.scale === null ? { text: "–" } : scaleCell(result, inBlock[i]))));
  }
  const errors = results.map(({ values }) => values.map((value, i) => Math.abs(value - asked.rounded[i])));
  const energy = (numbers) => numbers.reduce((sum, x) => sum + x * x, 0);
  add("SQNR of these numbers, dB", errors.map((one) => ({ text: decimal(Number((10 * Math.log10(energy(asked.rounded) / energy(one))).toFixed(2))) })));
  add("Largest error", errors.map((one) => ({ text: decimal(Number(Math.max(...one).toPrecision(4))) })));
  fillTable(at("steps"), ["", ...results.map(({ recipe }) => ({ text: recipe.id, link: SITE + (recipe.page ?? "guides/own-format/") }))], rows);
}

/** Fill the table of elements: each number with its code and value under each recipe. */
function showElements(asked, results) {
  const head = ["Element", "Number", ...results.flatMap(({ recipe }) => [`${recipe.id}: code`, "value"])];
  const first = results[0];
  const block = first.recipe.block;
  const rows = asked.rounded.map((x, i) => [
    String(i + 1),
    decimal(x),
    ...results.flatMap(({ recipe, codes, values }, k) => {
      const sameFormat = recipe.element === first.recipe.element;
      return [
        { text: decimal(formatValue(recipe.element, codes[i])), bits: binary(codes[i], recipe.elementBits), differs: k > 0 && sameFormat && codes[i] !== first.codes[i] },
        { text: decimal(values[i]), differs: k > 0 && !sameBits(values[i], first.values[i]) },
      ];
    }),
  ]);
  fillTable(at("elements"), head, rows, asked.rounded.map((_, i) => i).filter((i) => i && i % block === 0));
}

// ---- pictures ----

/** Return an SVG element with attributes and children. */
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...children);
  return made;
}

/** Return the width of a picture: that of the page, so that its text keeps its size on small screens. */
const pictureWidth = () => Math.max(300, Math.min(1080, document.querySelector("main").clientWidth - 32));

/** Return a mark at (x, y) whose shape tells recipes apart: circle, square, triangle, diamond. */
function mark(kind, x, y, size = 5) {
  const shapes = [
    () => svg("circle", { cx: x, cy: y, r: size }),
    () => svg("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size }),
    () => svg("path", { d: `M${x} ${y - size * 1.2}L${x + size * 1.2} ${y + size}H${x - size * 1.2}Z` }),
    () => svg("path", { d: `M${x} ${y - size * 1.4}L${x + size * 1.4} ${y}L${x} ${y + size * 1.4}L${x - size * 1.4} ${y}Z` }),
  ];
  const made = shapes[kind]();
  made.setAttribute("class", `s${kind}`);
  return made;
}

/**
 * Return the float32 values of all codes in block `index` of a result. Return null if the recipe has no block scales, or
 * if the engine cannot decode them.
 */
function tableOf(result, asked, index) {
  engine.explore(result.recipe, "float32", asked.rounded.map(float32Bits), 1, asked.bits.length, asked.amax);
  return result.recipe.scale === null ? null : engine.valuesUnder(result.recipe, result.scales[index]);
}

/** Draw the numbers of a block, and below them the values that each recipe can give in this block. */
function drawLine(asked, results, start, length) {
  const width = pictureWidth();
  const height = 50 + 46 * results.length;
  const numbers = asked.rounded.slice(start, start + length);
  const values = results.map((result) => result.values.slice(start, start + length));
  const largest = Math.max(...numbers.map(Math.abs), ...values.flat().filter(Number.isFinite).map(Math.abs)) || 1;
  const place = (x) => width / 2 + (x / largest) * (width / 2 - 30);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "line-caption" });
  numbers.forEach((x) => picture.append(svg("circle", { cx: place(x), cy: 24, r: 4, class: "number" })));
  picture.append(svg("text", { x: 6, y: 14 }, "numbers"));
  results.forEach((result, k) => {
    const y = 66 + 46 * k;
    const table = tableOf(result, asked, Math.floor(start / result.recipe.block));
    picture.append(svg("line", { x1: 0, x2: width, y1: y, y2: y, class: "axis" }));
    (table ?? []).filter((value) => Math.abs(value) <= largest * 1.05).forEach((value) =>
      picture.append(svg("line", { x1: place(value), x2: place(value), y1: y - 6, y2: y + 6, class: "axis" })));
    numbers.forEach((x, i) => picture.append(svg("line", { x1: place(x), y1: k ? y - 20 : 28, x2: place(values[k][i]), y2: y, class: "grid" })));
    values[k].forEach((value) => picture.append(mark(k, place(value), y, 4)));
    picture.append(svg("text", { x: 6, y: y - 10 }, result.recipe.id));
  });
  at("line").replaceChildren(picture);
  at("line-caption").textContent =
    `Top: the ${numbers.length} numbers, from ${decimal(-largest)} to ${decimal(largest)}. Below: a tick per value that a recipe can represent in this block, and a mark at each value to which a number is rounded.`;
}

/** Return the root mean square of the differences of two lists. */
const rms = (a, b) => Math.sqrt(a.reduce((sum, x, i) => sum + (x - b[i]) ** 2, 0) / a.length);

/**
 * Return [{code, size, error}, ...] for a block: scale codes of the first recipe, the largest value under each scale, and
 * the smallest error that codes under it give. The list is sorted by size. It has only scales between about a quarter
 * and four times the block's own scale, and is empty if that scale is 0 or cannot be decoded.
 */
function errorCurve(asked, first, start) {
  const { recipe } = first;
  const numbers = asked.rounded.slice(start, start + recipe.block);
  const own = reach(tableOf(first, asked, start / recipe.block));
  if (!own) return [];
  const curve = [];
  const scales = FORMATS[recipe.scale]?.map((value, code) => [Number(value), code]) ?? sampledScales(first.scales[start / recipe.block]);
  for (const [value, code] of scales) {
    if (!(value > 0) || !Number.isFinite(value)) continue;
    const values = engine.valuesUnder(recipe, code);
    const size = reach(values);
    if (!(size >= own / 4.01 && size <= own * 4.01)) continue;
    const table = Array.from(values).filter(Number.isFinite);
    const nearest = numbers.map((x) => table.reduce((best, v) => (Math.abs(v - x) < Math.abs(best - x) ? v : best)));
    curve.push({ code, size, error: rms(numbers, nearest) });
  }
  return curve.sort((a, b) => a.size - b.size);
}

/** Return the largest magnitude in a table of values under a scale, which compares scales of all formats. */
const reach = (table) => Math.max(...Array.from(table ?? []).filter(Number.isFinite).map(Math.abs), 0);

/** Return [scale, scale] of float32 scales from a quarter to four times a scale, 64 per octave. */
const sampledScales = (own) => Array.from({ length: 257 }, (_, i) => Math.fround(own * 2 ** ((i - 128) / 64))).map((x) => [x, x]);

/** Draw the error of a block against its scale, with the scales of the recipes and the best scale. */
function drawError(asked, results, start) {
  const first = results[0];
  const { recipe } = first;
  const show = (caption, ...content) => {
    at("error").replaceChildren(...content);
    at("error-caption").textContent = caption;
  };
  if (recipe.scale === null) return show(`${recipe.id} has no block scales.`);
  const curve = errorCurve(asked, first, start);
  if (!curve.length) return show("All numbers of this block are zero, or its scale is.");
  const marked = [...results];
  const four = BY_ID.get(FOUR_OVER_SIX);
  if (recipe.element === "E2M1" && recipe.scale === "E4M3" && four && !results.some((one) => one.recipe === four) && marked.length < 4 && asked.bits.length % four.block === 0) {
    const found = run(asked, four);
    if (found) marked.push(found);
  }
  const points = marked.map((result) => {
    const index = Math.floor(start / result.recipe.block);
    const size = result.recipe.scale === null ? undefined : reach(tableOf(result, asked, index));
    const own = start - (start % result.recipe.block);
    const error = rms(asked.rounded.slice(own, own + result.recipe.block), result.values.slice(own, own + result.recipe.block));
    return { size, error };
  });
  const best = curve.reduce((a, b) => (b.error < a.error ? b : a));
  const [width, left, bottom, above] = [pictureWidth(), 76, 44, 46 + 18 * marked.length];
  const height = 240 + above;
  const low = Math.log2(curve[0].size);
  const high = Math.log2(curve[curve.length - 1].size);
  const top = Math.max(...curve.map((p) => p.error), ...points.map((p) => p.error)) || 1;
  const across = (size) => left + ((Math.log2(size) - low) / (high - low || 1)) * (width - left - 20);
  const up = (error) => height - bottom - (error / top) * (height - bottom - above);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "error-caption" });
  picture.append(svg("path", { d: `M${left} ${above - 8}V${height - bottom}H${width - 16}`, class: "axis" }));
  [0, 0.5, 1].forEach((share) => picture.append(svg("text", { x: left - 6, y: up(share * top) + 4, "text-anchor": "end" }, decimal(Number((share * top).toPrecision(3))))));
  [curve[0], curve[curve.length >> 1], curve[curve.length - 1]].forEach((p) =>
    picture.append(svg("text", { x: Math.min(across(p.size), width - 40), y: height - bottom + 18, "text-anchor": "middle" }, decimal(Number(p.size.toPrecision(3))))));
  picture.append(svg("text", { x: width / 2, y: height - 6, "text-anchor": "middle" }, width < 500 ? "largest value, logarithmic" : "largest value under the scale of the block, logarithmic"));
  picture.append(svg("text", { x: 6, y: above - 14 }, "root mean square error"));
  picture.append(svg("path", { d: `M${curve.map((p) => `${across(p.size)} ${up(p.error)}`).join("L")}`, class: "curve" }));
  picture.append(svg("path", { d: `M${across(best.size)} ${up(best.error)}V${height - bottom}`, class: "grid", "stroke-dasharray": "4 3" }));
  picture.append(svg("text", { x: Math.min(across(best.size), width - 46), y: height - bottom - 4, "text-anchor": "middle" }, "searched"));
  points.forEach((p, k) => {
    if (p.size >= curve[0].size && p.size <= curve[curve.length - 1].size) picture.append(mark(k, across(p.size), up(p.error), 6));
    picture.append(mark(k, 14, 16 + 18 * k), svg("text", { x: 26, y: 20 + 18 * k }, marked[k].recipe.id));
  });
  const own = points[0].error;
  const gain = best.error < own ? `A search would choose ${recipe.own && !(recipe.own.scale instanceof Format) ? decimal(best.code) : hex(best.code)}, with an error of ${decimal(Number(best.error.toPrecision(4)))} instead of ${decimal(Number(own.toPrecision(4)))}.` : "No other scale gives a smaller error.";
  show(`Curve: for ${FORMATS[recipe.scale] ? "each" : "64 per octave of the"} ${recipe.scale} ${FORMATS[recipe.scale] ? "scale" : "scales"}${recipe.tensorRule === null ? "" : ` under the tensor scale of ${recipe.id}`}, the smallest error that codes can give. Marks: what recipes choose. ${gain}`, picture);
}

// ---- the page ----

/** Fill the box of blocks for a number of elements and a block length, and return the start of the chosen block. */
function chosenBlock(length, block) {
  const box = at("block");
  const count = length / block;
  if (box.options.length !== count)
    box.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`${i + 1}: elements ${i * block + 1} to ${(i + 1) * block}`, String(i))));
  return Number(box.value || 0) * block;
}

/** Compute and show everything anew, or a message if the form cannot be computed. */
function update() {
  const problem = at("problem");
  problem.textContent = "";
  showAbout();
  history.replaceState(null, "", address()); // wrong input too, so that a reload restores it
  try {
    const asked = request();
    const results = asked.recipes.map((recipe) => [recipe, run(asked, recipe)]);
    const missing = results.filter(([, result]) => !result).map(([recipe]) => recipe.id);
    if (missing.length)
      throw new Error(`A scale of ${missing.join(", ")} is beyond what this page computes; fp4kit.quantize in Python computes it.`);
    const found = results.map(([, result]) => result);
    hideResults(false); // before drawing, because a hidden picture has no width
    const lines = found.length > 1 ? found.slice(1).map((other) => firstDifference(found[0], other)) : ["Choose a second recipe to compare."];
    at("verdict").replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
    showScales(asked, found);
    showElements(asked, found);
    const block = found[0].recipe.scale === null ? asked.bits.length : found[0].recipe.block;
    const start = chosenBlock(asked.bits.length, block);
    drawLine(asked, found, start, block);
    drawError(asked, found, start);
  } catch (error) {
    hideResults(true);
    problem.textContent = error.message;
  }
}

/** Hide or show the results. Those of other numbers would mislead below an error. */
function hideResults(hidden) {
  document.querySelectorAll("main > section").forEach((section) => (section.hidden = hidden));
}

/** Put numbers into the form. kind: the example, random numbers, or random numbers of which one is large. */
function example(kind) {
  if (kind === "example") return fill(EXAMPLE);
  const length = Math.min(selects().map((one) => BY_ID.get(one.value)?.block ?? 1).reduce(lcm, 16), MAX_BLOCK);
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  const numbers = Array.from({ length }, () => Number(normal().toPrecision(5)));
  if (kind === "outlier") numbers[5] = 24;
  at("numbers").value = numbers.join(" ");
  at("amax").value = kind === "outlier" ? "24" : "5"; // 5: usual for a tensor of a million normal numbers
  drawnAmax = at("amax").value;
  madeNumbers = null;
}

/** Clear the tensor amax of random numbers, because other numbers are in the field now. */
function forgetAmax() {
  if (at("amax").value === drawnAmax) at("amax").value = "";
  drawnAmax = null;
}

/** Start the page: load the engine, fill the form, and react to it. */
async function start() {
  engine = await Engine.load(WASM, RECIPROCALS);
  makeChoices();
  readAddress();
  at("offered").textContent = `${RECIPES.length} recipes are offered. ${LEFT_OUT}`;
  at("numbers").addEventListener("input", forgetAmax);
  at("own").addEventListener("input", () => { readOwn(); chooseOwn(); });
  at("recipes").addEventListener("input", () => (unknown = []));
  document.querySelectorAll("[data-own]").forEach((button) =>
    button.addEventListener("click", () => {
      at("own").value = OWN_EXAMPLES[button.dataset.own] ?? "";
      readOwn();
      chooseOwn();
      update();
    }));
  at("form").addEventListener("input", update);
  at("form").addEventListener("submit", (event) => event.preventDefault());
  at("block").addEventListener("input", update);
  window.addEventListener("resize", update);
  window.addEventListener("hashchange", () => { readAddress(); update(); });
  document.querySelectorAll("[data-example]").forEach((button) =>
    button.addEventListener("click", () => { example(button.dataset.example); update(); }));
  at("link").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(address());
      at("copied").textContent = "Copied.";
    } catch {
      at("copied").textContent = "The address of this page is the link.";
    }
  });
  const field = at("numbers");
  field.addEventListener("dragover", (event) => { event.preventDefault(); field.classList.add("over"); });
  field.addEventListener("dragleave", () => field.classList.remove("over"));
  field.addEventListener("drop", async (event) => {
    event.preventDefault();
    field.classList.remove("over");
    const [file] = event.dataTransfer.files;
    field.value = file ? await file.text() : event.dataTransfer.getData("text");
    forgetAmax();
    update();
  });
  update();
}

const ready = start();
