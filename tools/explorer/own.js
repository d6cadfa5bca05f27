"use strict";
// Recipes of fp4kit.custom_recipe: reads the Python that makes them, and computes them as fp4kit's specification does.

const MAX_BLOCK = 256; // the most numbers that the page shows

// ---- formats ----

/** Return the exponent of a positive number: floor(log2(x)). */
function exponentOf(x) {
  scratch.setFloat64(0, x);
  const field = (scratch.getUint32(0) >> 20) & 2047;
  return field ? field - 1023 : exponentOf(x * 2 ** 52) - 52;
}

/** Return x >= 0 rounded to an integer, ties to even. */
function roundedEven(x) {
  const below = Math.floor(x);
  const rest = x - below;
  return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
}

const SCALE_ROUNDINGS = { nearest: roundedEven, up: Math.ceil, down: Math.floor };

/** An element or scale format, as fp4kit.formats.ElementFormat or, with a table, as Codebook. */
class Format {
  constructor(name, exponentBits, mantissaBits, bias, specials, signed, hasZero, table = null) {
    Object.assign(this, { name, exponentBits, mantissaBits, bias, specials, signed, hasZero, table });
    this.hasPairs = name === "MX4";
    this.isInteger = !table && exponentBits === 0;
    this.bits = table ? 4 : Number(signed) + exponentBits + mantissaBits;
    this.signBit = signed && !table ? 2 ** (this.bits - 1) : 0;
    this.emin = Number(hasZero) - bias;
    this.values = Array.from({ length: 2 ** this.bits }, (_, code) => this.valueOf(code));
    const positive = this.values.slice(0, this.signBit || undefined).map((x) => (table ? Math.abs(x) : x));
    this.largest = Math.max(...positive.filter(Number.isFinite));
    this.target = this.hasPairs ? 1 : this.largest; // what the amax of a block becomes
    if (table) {
      this.order = Array.from(table.keys()).sort((a, b) => table[a] - table[b] || a - b);
      this.midpoints = this.order.slice(1).map((code, i) => Math.fround((table[this.order[i]] + table[code]) / 2));
    }
  }

  valueOf(code) {
    if (this.hasPairs) {
      const value = ((code & 3) / 2) * (code & 8 ? 0.5 : 1);
      return code & 4 ? -value : value;
    }
    if (this.table) return this.table[Math.min(code, this.table.length - 1)];
    if (this.isInteger) return code & this.signBit ? code - 2 ** this.bits : code;
    const mantissa = code & (2 ** this.mantissaBits - 1);
    const top = 2 ** this.exponentBits - 1;
    const field = (code >> this.mantissaBits) & top;
    const sign = code & this.signBit ? -1 : 1;
    if (field === top && this.specials === "nan" && mantissa === 2 ** this.mantissaBits - 1) return NaN;
    if (field === top && this.specials === "ieee") return mantissa ? NaN : sign * Infinity;
    const hidden = field || !this.hasZero ? 2 ** this.mantissaBits : 0;
    return sign * (hidden + mantissa) * 2 ** (Math.max(field - this.bias, this.emin) - this.mantissaBits);
  }

  /** Return the code of a magnitude that is at most the largest value, rounded by a function to integers. */
  magnitudeCode(a, rounding) {
    const exponent = a ? Math.max(exponentOf(a), this.emin) : this.emin;
    const steps = rounding(a / 2 ** (exponent - this.mantissaBits));
    return (exponent - this.emin) * 2 ** this.mantissaBits + steps - (this.hasZero ? 0 : 2 ** this.mantissaBits);
  }

  /** Return the code of a block scale. */
  scaleCode(x, rounding) {
    const least = this.hasZero ? 0 : this.values[0];
    return this.magnitudeCode(Math.min(Math.max(x, least), this.largest), SCALE_ROUNDINGS[rounding]);
  }

  /** The code of NaN, which elements become if the tensor scale is infinite: the largest value's, or that of NaN. */
  get nanCode() {
    if (this.table) return this.order[this.order.length - 1];
    return this.specials === "none" ? this.values.indexOf(this.largest) : (this.signBit || 2 ** this.bits) - 1;
  }

  /** Return the codes of scaled elements. Element 2i and 2i + 1 of MX4 share a bit of exponent. */
  encoded(x) {
    if (this.hasPairs) return x.map((one, i) => this.pairedCode(one, Math.abs(one) < 1 && Math.abs(x[i ^ 1]) < 1));
    if (this.table) return x.map((one) => (Number.isNaN(one) ? this.nanCode : this.order[this.midpoints.filter((middle) => middle < one).length]));
    return x.map((one) => {
      if (Number.isNaN(one)) return this.nanCode;
      if (!this.isInteger) return this.magnitudeCode(Math.min(Math.abs(one), this.largest), roundedEven) | (one < 0 || Object.is(one, -0) ? this.signBit : 0);
      const size = roundedEven(Math.min(Math.abs(one), this.signBit));
      return (one < 0 ? -size : Math.min(size, this.largest)) & (2 ** this.bits - 1);
    });
  }

  pairedCode(x, isSmall) {
    if (Number.isNaN(x)) return 3;
    const sign = x < 0 || Object.is(x, -0) ? 4 : 0;
    return Math.min(roundedEven(Math.min(Math.abs(x), 2) * (isSmall ? 4 : 2)), 3) | sign | (isSmall ? 8 : 0);
  }
}

// ---- a recipe's arithmetic ----

/** Return 1 / scale in float32; scales below 1e-38 count as 1e-38. */
const reciprocalOf = (scale) => Math.fround(1 / (Math.abs(scale) < Math.fround(1e-38) ? Math.fround(1e-38) : scale));

/** Return x >= 0 rounded to a 16-bit type in a direction; beyond the largest number, that number. */
function narrowed(x, dtype, rounding) {
  const largest = valueOf(dtype === "float16" ? 0x7bff : 0x7f7f, dtype);
  const size = Math.min(x, largest);
  const bits = bitsOf(size, dtype);
  const error = valueOf(bits, dtype) - size;
  const step = rounding === "up" && error < 0 ? 1 : rounding === "down" && error > 0 ? -1 : 0;
  return valueOf(bits + step, dtype);
}

/** Quantize and dequantize one row by a recipe of custom_recipe. Arguments and result are those of Engine.explore. */
function exploreOwn(recipe, dtype, bits, amax) {
  const { element, scale, rounding } = recipe.own;
  const { Bits } = DTYPES[dtype];
  const f = Math.fround;
  const x = Array.from(bits, (one) => valueOf(one, dtype));
  const largestOf = (part) => part.reduce((largest, one) => Math.max(largest, Math.abs(one)), 0);
  const tensor = [1, 1, 1];
  if (recipe.tensorRule !== null) {
    tensor[2] = amax ?? largestOf(x);
    tensor[1] = f(tensor[2] / f(element.largest * scale.largest));
    tensor[0] = reciprocalOf(tensor[1]);
  }
  const [codes, values, scales] = [[], [], []];
  for (let start = 0; start < x.length; start += recipe.block) {
    const block = x.slice(start, start + recipe.block);
    const wanted = f(largestOf(block) / element.target);
    let stored = wanted; // what the page shows as the scale of the block: a number, or a code
    if (scale instanceof Format) stored = scale.scaleCode(f(wanted * tensor[0]), rounding);
    else if (scale !== "float32") stored = narrowed(wanted, scale, rounding);
    const size = sizeOfOwn(recipe, stored, tensor[1]);
    const factor = reciprocalOf(size);
    const found = element.encoded(block.map((one) => f(one * factor)));
    scales.push(stored);
    codes.push(...found);
    values.push(...found.map((code) => bitsOf(f(element.values[code] * size), dtype)));
  }
  recipe.own.decode = tensor[1]; // for valuesUnder
  return {
    packed: packedCodes(codes, recipe.codeBits),
    scales: scale instanceof Format ? Uint8Array.from(scales) : Float32Array.from(scales),
    tensor: Float32Array.from(tensor),
    values: Bits.from(values),
  };
}

/** Return what elements are multiplied by under a stored scale, a code or a number. */
function sizeOfOwn(recipe, stored, decode) {
  const { scale } = recipe.own;
  return scale instanceof Format ? Math.fround(scale.values[stored] * decode) : stored;
}

/** Return the float32 values of all codes under a stored scale and the tensor scale of the last call. */
function ownValuesUnder(recipe, stored) {
  const size = sizeOfOwn(recipe, stored, recipe.own.decode);
  return Float32Array.from(recipe.own.element.values, (value) => value * size);
}

// ---- Python ----

/** Throw an Error unless a condition holds. */
function needs(condition, message) {
  if (!condition) throw new Error(message);
}

/** Return a value as Python shows it, shortened. */
function shown(value) {
  if (value instanceof Format) return value.name;
  if (typeof value === "string") return `'${value}'`.slice(0, 60);
  if (Array.isArray(value)) return `[${value.map(shown).join(", ")}]`.slice(0, 60);
  return value === null ? "None" : value === true ? "True" : value === false ? "False" : String(value);
}

const isWhole = (value) => typeof value === "number" && Number.isInteger(value);
const isIdentifier = (text) => /^[A-Za-z_]\w*$/.test(text);

/** Return the arguments of a call by name. given: {positions: [...], names: {...}}. defaults: {name: default}. */
function boundArguments(function_, given, defaults, positional) {
  const bound = {};
  const all = Object.keys(defaults);
  needs(given.positions.length <= positional, `${function_}: got ${given.positions.length} positional arguments; needs at most ${positional}`);
  given.positions.forEach((value, i) => (bound[all[i]] = value));
  for (const [name, value] of Object.entries(given.names)) {
    needs(all.includes(name), `${function_}: there is no argument ${name}; needs ${all.join(", ")}`);
    needs(!(name in bound), `${function_}: ${name} is given twice`);
    bound[name] = value;
  }
  for (const name of all) {
    if (!(name in bound)) bound[name] = defaults[name];
    needs(bound[name] !== undefined, `${function_}: ${name} is missing`);
  }
  return bound;
}

function makeElementFormat(given) {
  const defaults = { name: undefined, exponent_bits: undefined, mantissa_bits: undefined, bias: 0, specials: "none", signed: true, has_zero: true };
  const { name, exponent_bits: e, mantissa_bits: m, bias, specials, signed, has_zero: hasZero } = boundArguments("ElementFormat", given, defaults, 7);
  needs(typeof name === "string" && isIdentifier(name), `ElementFormat: name is ${shown(name)}; needs an identifier, such as 'E2M1'`);
  const op = `ElementFormat ${name}`;
  for (const [what, value] of Object.entries({ exponent_bits: e, mantissa_bits: m, bias }))
    needs(isWhole(value), `${op}: ${what} is ${shown(value)}; needs an int`);
  for (const [what, value] of Object.entries({ signed, has_zero: hasZero }))
    needs(typeof value === "boolean", `${op}: ${what} is ${shown(value)}; needs True or False`);
  const bits = Number(signed) + e + m;
  needs(e >= 0 && m >= 0 && bits >= 1 && bits <= 8, `${op}: exponent_bits is ${e}, mantissa_bits is ${m}; needs both >= 0, and 1 to 8 bits including the sign`);
  needs(["none", "nan", "ieee"].includes(specials), `${op}: specials is ${shown(specials)}; needs 'none', 'nan' or 'ieee'`);
  if (e === 0) {
    needs(signed && m > 0 && bias === 0 && specials === "none" && hasZero, `${op}: an integer needs a sign, mantissa_bits > 0, bias 0, specials 'none' and has_zero True`);
  } else {
    const lacksZero = [[8, 0, 127], [6, 2, 48]].some((one) => one.join() === [e, m, bias].join()) && specials === "nan" && !signed;
    needs(hasZero || lacksZero, `${op}: has_zero is False; needs True for every format but E8M0 and E6M2`);
    needs(specials !== "ieee" || (m >= 1 && e >= 2), `${op}: specials is 'ieee'; needs mantissa_bits >= 1 and exponent_bits >= 2`);
    needs(!hasZero || (1 - bias - m >= -149 && 2 ** e - 1 - bias <= 127), `${op}: bias is ${bias}, so some values are not float32 numbers; needs exponents from -149 to 127`);
  }
  const made = new Format(name, e, m, bias, specials, signed, hasZero);
  needs(made.largest > 0, `${op}: zero is the only finite value; needs more exponent or mantissa bits`);
  return made;
}

function makeCodebook(given) {
  const { table, name } = boundArguments("Codebook", given, { table: undefined, name: "Codebook" }, 1);
  needs(typeof name === "string" && isIdentifier(name), `Codebook: name is ${shown(name)}; needs an identifier`);
  needs(Array.isArray(table) && table.every((one) => typeof one === "number"), `Codebook ${name}: table is ${shown(table)}; needs two to sixteen numbers`);
  needs(table.length >= 2 && table.length <= 16, `Codebook ${name}: table has ${table.length} values; needs two to sixteen`);
  const bad = table.find((one) => one !== 0 && !(Math.abs(Math.fround(one)) >= 2 ** -100 && Math.abs(Math.fround(one)) <= 2 ** 100));
  needs(bad === undefined, `Codebook ${name}: table holds ${bad}; needs 0, or magnitudes from 2^-100 to 2^100`);
  needs(table.some((one) => one !== 0), `Codebook ${name}: every value of table is 0; needs one that is not 0`);
  const values = table.map((one) => Math.fround(one) + 0);
  const isTaken = RESERVED.includes(name) || (Object.hasOwn(NAMED, name) && String(NAMED[name].table) !== String(values));
  needs(!isTaken, `Codebook: name is '${name}'; needs an identifier that is not the name of another format`);
  return new Format(name, 0, 0, 0, "none", true, true, values);
}

/** Return an entry of RECIPES for the arguments of fp4kit.custom_recipe. It has the further field `own`. */
function makeRecipe(given) {
  const defaults = { id: undefined, element: undefined, scale: null, block: null, scale_rounding: "nearest", tensor_scale: false, levels: null };
  const bound = boundArguments("custom_recipe", given, defaults, 4);
  const { id, scale_rounding: rounding, tensor_scale: hasTensor } = bound;
  const [element, scale] = [bound.element, bound.scale ?? "float32"].map((one) => (typeof one === "string" && Object.hasOwn(NAMED, one) ? NAMED[one] : one));
  const block = bound.block ?? 32;
  const check = (condition, name, value, needed) => needs(condition, `custom_recipe: ${name} is ${shown(value)}; needs ${needed}`);
  check(typeof id === "string" && id !== "", "id", id, "a name");
  check((!BY_ID.has(id) || BY_ID.get(id).own) && !TAKEN.includes(id), "id", id, "a name that is not the id of a producer's recipe");
  check(element instanceof Format, "element", element, "a format, such as fp4kit.formats.E2M1 or Codebook([-1, 0, 1])");
  check(bound.levels === null, "levels", bound.levels, "None, because this page computes one level of scales");
  const floats = ["float32", "float16", "bfloat16"];
  check(scale instanceof Format || floats.includes(scale), "scale", scale, "a format, such as fp4kit.formats.E4M3, or 'float32', 'float16' or 'bfloat16'");
  check(typeof rounding === "string" && Object.hasOwn(SCALE_ROUNDINGS, rounding), "scale_rounding", rounding, "'nearest', 'up' or 'down'");
  check(typeof hasTensor === "boolean", "tensor_scale", hasTensor, "True or False");
  const [rows, columns] = Array.isArray(block) && block.length === 2 ? block : [1, block];
  check(isWhole(rows) && isWhole(columns) && rows > 0 && columns > 0, "block", block, "a positive int, or (rows, columns)");
  check(columns <= MAX_BLOCK, "block", block, `at most ${MAX_BLOCK} columns for this page`);
  check(element.bits !== 4 || columns % 2 === 0, "block", block, `an even number of columns, because two codes of ${element.name} share a byte`);
  check(element.signed && element.hasZero, "element", element, "a format with a sign and a zero");
  check(element.table || element.isInteger || element.emin - element.mantissaBits >= -126, "element", element, "values that are normal in float32");
  if (scale instanceof Format) {
    check(!scale.isInteger && !scale.table, "scale", scale, "a float format, such as E4M3");
    const [same, fields] = [Object.hasOwn(NAMED, scale.name) && NAMED[scale.name], (one) => JSON.stringify(one, ["exponentBits", "mantissaBits", "bias", "specials", "signed", "hasZero"])];
    check(!same || fields(same) === fields(scale), "scale", scale, "another name, because a format of fp4kit has this name");
    check(element.name !== scale.name || (!element.table && fields(element) === fields(scale)), "element", element, "another name than the scale format has");
    const fits = scale.emin - (scale.hasZero ? scale.mantissaBits : 0) >= -100 && exponentOf(scale.largest) <= 100;
    check(scale.name === "E8M0" || fits, "scale", scale, "a format with values from 2^-100 to 2^100, or E8M0");
    check(!hasTensor || scale.largest <= 2 ** 100, "tensor_scale", hasTensor, `False, because ${scale.name} leaves no range to a tensor scale`);
  } else {
    check(!hasTensor, "tensor_scale", hasTensor, `a scale format of at most 8 bits; scale is '${scale}'`);
    check(scale !== "float32" || rounding === "nearest", "scale_rounding", rounding, "'nearest' for float32 scales");
  }
  check(element.target * (hasTensor ? scale.largest : 1) <= 2 ** 127, "element", element, "at most 2^127 as its largest value, times the largest scale");
  check(!element.hasPairs || (scale instanceof Format && scale.name === "E8M0" && rows === 1), "element", element, "scale E8M0 and blocks of one row");
  return {
    id,
    group: "Your own",
    page: null,
    element: element.name,
    elementBits: element.bits,
    codeBits: element.bits === 4 ? 4 : 8,
    scale: scale instanceof Format ? scale.name : scale,
    block: columns,
    blockRows: rows,
    tensorRule: hasTensor ? "amax" : null,
    own: { element, scale, rounding },
  };
}

const NAMED = Object.fromEntries(Object.entries(NAMED_FORMATS).map(([name, fields]) => [name, new Format(name, ...fields)]));
const FUNCTIONS = { custom_recipe: makeRecipe, ElementFormat: makeElementFormat, Codebook: makeCodebook };
const TOKEN = /\s*(?:(#[^\n]*)|(\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_][\w.]*)|("[^"\n]*"|'[^'\n]*')|(\*\*|[-+*/()[\],=]))/y;

/** Return the statements of a Python text, each a list of tokens [kind, text]. Brackets may span lines. */
function statements(text) {
  const found = [[]];
  let depth = 0;
  let at = 0;
  while (at < text.length) {
    const separator = /[ \t\r]*([\n;,])/y;
    separator.lastIndex = at;
    const end = depth ? null : separator.exec(text);
    if (end) {
      found.push([]);
      at = separator.lastIndex;
      continue;
    }
    TOKEN.lastIndex = at;
    const match = TOKEN.exec(text);
    if (!match) {
      needs(!text.slice(at).trim(), `"${text.slice(at).trim().slice(0, 20)}" is not understood here; needs a call such as ${EXAMPLE_OWN}`);
      break;
    }
    at = TOKEN.lastIndex;
    const kind = ["comment", "number", "name", "string", "sign"][match.slice(1).findIndex((one) => one !== undefined)];
    const token = match[1] ?? match[2] ?? match[3] ?? match[4] ?? match[5];
    if ("([".includes(token)) depth += 1;
    if (")]".includes(token)) depth -= 1;
    if (kind !== "comment") found[found.length - 1].push([kind, token]);
  }
  return found.filter((one) => one.length);
}

const EXAMPLE_OWN = "fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)";

/** Evaluates an expression of numbers, strings, lists, formats and calls of FUNCTIONS. Nothing else is run. */
class Reader {
  constructor(tokens, variables) {
    Object.assign(this, { tokens, variables, at: 0 });
  }

  peek(text) {
    return this.at < this.tokens.length && this.tokens[this.at][1] === text && this.tokens[this.at][0] === "sign";
  }

  take(text) {
    needs(this.peek(text), `"${this.tokens[this.at]?.[1] ?? "the end"}" is not understood; needs "${text}"`);
    this.at += 1;
  }

  /** Return operand (sign operand)..., applied from the left. */
  chain(operand, signs) {
    let value = operand();
    for (let sign; (sign = signs.find((one) => this.peek(one))); ) {
      this.take(sign);
      const other = operand();
      needs(typeof value === "number" && typeof other === "number", `"${sign}" needs numbers`);
      value = sign === "+" ? value + other : sign === "-" ? value - other : sign === "*" ? value * other : value / other;
    }
    return value;
  }

  expression() {
    return this.chain(() => this.chain(() => this.unary(), ["*", "/"]), ["+", "-"]);
  }

  unary() {
    for (const sign of ["-", "+"]) {
      if (!this.peek(sign)) continue;
      this.take(sign);
      const value = this.unary();
      needs(typeof value === "number", `"${sign}" needs a number`);
      return sign === "-" ? -value : value;
    }
    const base = this.atom();
    if (!this.peek("**")) return base;
    this.take("**");
    const power = this.unary();
    needs(typeof base === "number" && typeof power === "number", '"**" needs numbers');
    return base ** power;
  }

  atom() {
    const [kind, text] = this.tokens[this.at] ?? ["end", "the end"];
    if (kind === "sign" && (text === "(" || text === "[")) return this.list(text === "(" ? ")" : "]");
    this.at += 1;
    if (kind === "number") return Number(text.replaceAll("_", ""));
    if (kind === "string") return text.slice(1, -1);
    needs(kind === "name", `"${text}" is not understood here`);
    if (this.peek("(")) {
      const name = text.split(".").pop();
      needs(Object.hasOwn(FUNCTIONS, name), `${text} is not called here; needs custom_recipe, ElementFormat or Codebook`);
      return FUNCTIONS[name](this.arguments());
    }
    return this.named(text);
  }

  named(text) {
    if (Object.hasOwn(CONSTANTS, text)) return CONSTANTS[text];
    if (Object.hasOwn(this.variables, text)) return this.variables[text];
    const name = text.replace(/^(fp4kit\.)?(formats\.)?/, "");
    needs(Object.hasOwn(NAMED, name), `${text} is not known here; needs one of ${Object.keys(NAMED).join(", ")}, or a name that was assigned before`);
    return NAMED[name];
  }

  /** Return the items in brackets: a list or, for a single item in round brackets, the item. */
  list(end) {
    this.at += 1;
    const items = [];
    let commas = 0;
    while (!this.peek(end)) {
      items.push(this.expression());
      if (this.peek(end)) break;
      this.take(",");
      commas += 1;
    }
    this.take(end);
    return end === ")" && items.length === 1 && !commas ? items[0] : items;
  }

  arguments() {
    const found = { positions: [], names: Object.create(null) };
    this.take("(");
    while (!this.peek(")")) {
      const [kind, name] = this.tokens[this.at] ?? ["end", ""];
      if (kind === "name" && this.tokens[this.at + 1]?.[1] === "=") {
        this.at += 2;
        needs(!(name in found.names), `${name} is given twice`);
        found.names[name] = this.expression();
      } else {
        needs(!Object.keys(found.names).length, "an argument without a name follows one with a name");
        found.positions.push(this.expression());
      }
      if (!this.peek(")")) this.take(",");
    }
    this.take(")");
    return found;
  }
}

const CONSTANTS = { True: true, False: false, None: null };

/**
 * Return the recipes that a Python text makes by fp4kit.custom_recipe, as entries of RECIPES. The text may define
 * formats and variables first. In place of a call, it may list the arguments: element=E2M1, scale=E4M3, block=16.
 * Throw an Error that says what is needed if the text does anything else.
 */
function ownRecipes(text) {
  const [found, variables] = [[], Object.create(null)];
  for (const tokens of statements(text)) {
    if (["import", "from"].includes(tokens[0][1])) continue;
    const reader = new Reader(tokens, variables);
    const name = tokens[0][0] === "name" && tokens[1]?.[1] === "=" ? tokens[0][1] : null;
    if (name) reader.at = 2;
    const value = reader.expression();
    needs(reader.at === tokens.length, `"${tokens[reader.at]?.[1]}" is not understood here`);
    if (name) variables[name] = value;
    else needs(value?.own, `a line gives ${shown(value)}; needs a call such as ${EXAMPLE_OWN}`);
    if (value?.own) found.push(value);
  }
  const fields = ["id", "element", "scale", "block", "scale_rounding", "tensor_scale", "levels"].filter((name) => name in variables);
  if (!found.length && text.trim())
    found.push(makeRecipe({ positions: [], names: { id: "own", ...Object.fromEntries(fields.map((name) => [name, variables[name]])) } }));
  found.forEach((one, i) => needs(!found.slice(0, i).some((other) => other.id === one.id), `two recipes are called ${one.id}; needs different names`));
  return found;
}
