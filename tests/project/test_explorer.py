"""Test the explorer page in a browser: its results equal those of the package, and people can use it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from browser import Page, binary, browser
from exhaustive import exhaustive
from tool_module import tool_module

import fp4kit
from fp4kit.recipes import RECIPES

explorer = tool_module("build_explorer")
needs_browser = pytest.mark.skipif(binary() is None, reason="needs chromium: apt-get install -y chromium")
ELEMENTS = 4096  # of a matrix, the most that the page's engine takes
KINDS = np.repeat(np.arange(10), (8, 8, 8, 6, 6, 8, 3, 2, 1, 8))  # the share of each kind of matrix, see `drawn`
TALL = 4  # every matrix whose index is a multiple has the rows of a block; the others have one row, as in the page

# Functions that the tests add to the page.
SCRIPT = """
const ELEMENTS = %(elements)d, TALL = %(tall)d, store = new Uint8Array(1 << 26);
const recipeOf = (id) => RECIPES.find((recipe) => recipe.id === id);
const rowsOf = (recipe, i) => (i %% TALL ? 1 : recipe.blockRows);
const chooser = document.createElement("input");
chooser.type = "file";

/** Read the drawn matrices from the chooser's file. A negative amax means that none is given. */
async function load(dtype, amaxes) {
  window.drawn = { dtype, amaxes, bytes: await chooser.files[0].arrayBuffer() };
}

/** Return the results of matrix i as a list of [name, bytes], or null if the page's engine gives none. */
function partsOf(recipe, i) {
  const { Bits } = DTYPES[drawn.dtype];
  const x = new Bits(drawn.bytes, i * ELEMENTS * Bits.BYTES_PER_ELEMENT, ELEMENTS);
  const rows = rowsOf(recipe, i), amax = drawn.amaxes[i] < 0 ? null : drawn.amaxes[i];
  const found = engine.explore(recipe, drawn.dtype, x, rows, ELEMENTS / rows, amax);
  if (!found) return null;
  const tensor = found.tensor.slice(1, recipe.tensorRule === null ? 1 : 3); // decode scale, amax
  const parts = { tensor, scales: found.scales, codes: found.packed, values: found.values };
  return Object.entries(parts).map(([name, part]) => [name, new Uint8Array(part.buffer)]);
}

/** Run a recipe until it has `wanted` blocks. Return a digest of all results, and which matrices it covers. */
async function digestOf(recipe, wanted) {
  const declined = [];
  let place = 0, blocks = 0, i = 0;
  for (; blocks < wanted && i < drawn.amaxes.length; ++i) {
    const parts = partsOf(recipe, i);
    if (!parts) { declined.push(i); continue; }
    for (const [, bytes] of parts) {
      store.set(bytes, place);
      place += bytes.length;
    }
    blocks += ELEMENTS / recipe.block / rowsOf(recipe, i);
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", store.subarray(0, place)));
  return { blocks, declined, matrices: i, digest: Array.from(digest, (b) => b.toString(16).padStart(2, "0")).join("") };
}

/** Begin to compute digestOf for every recipe. `results` then has a promise for each recipe. */
function start(wanted) {
  window.results = {};
  let last = Promise.resolve();
  for (const recipe of RECIPES) results[recipe.id] = last = last.then(() => digestOf(recipe, wanted));
}
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield a browser that shows the page."""
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "explorer.html").write_text(explorer.page())
    with browser(folder / "profile") as opened:
        opened.open((folder / "explorer.html").as_uri())
        awaited(opened, "ready")
        opened.run(SCRIPT % {"elements": ELEMENTS, "tall": TALL})
        yield opened


def awaited(tab: Page, expression: str) -> Any:
    """Return the value of a promise in the page."""
    found = tab.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in found, found
    return found["result"].get("value")


def drawn(count: int, dtype: str) -> np.ndarray:
    """Return `count` matrices of ELEMENTS numbers, of many kinds: (count, ELEMENTS) in a dtype.

    Kinds 0 to 5 are common numbers, ties, wide ranges, sparse matrices with zeros of both signs, outliers, and the
    values and midpoints of E2M1. Kind 6 is near the smallest subnormal number, and kind 7 near the largest number.
    Kind 8 has one NaN or infinity. Kind 9 has block maxima near powers of two, see `near_thresholds`.
    """
    rng, limits = np.random.default_rng(20261126), ml_dtypes.finfo(explorer.DTYPES[dtype])
    smallest, largest = float(limits.smallest_subnormal), float(limits.max)
    kinds = rng.permutation(np.resize(KINDS, count))
    power = rng.integers(-30, 12, count)
    power = np.where(kinds == 6, power % 16 + math.log2(smallest), power)
    power = np.where(kinds == 7, math.log2(largest) - power % 8, power)
    x = rng.standard_normal((count, ELEMENTS)) * 2.0 ** power[:, None]
    x[kinds == 1] = np.round(x[kinds == 1] * 64) / 64  # many ties
    x[kinds == 2] *= 2.0 ** rng.integers(-12, 6, (int((kinds == 2).sum()), ELEMENTS))
    x[kinds == 3] *= rng.random((int((kinds == 3).sum()), ELEMENTS)) < 0.02  # zeros of both signs, blocks of zeros
    outliers = np.flatnonzero(kinds == 4)
    x[outliers, rng.integers(0, ELEMENTS, len(outliers))] *= 3000
    grid = np.float64([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    codes = rng.integers(0, 16, (int((kinds == 5).sum()), ELEMENTS))
    x[kinds == 5] = grid[codes] * rng.choice([-1, 1], codes.shape)  # values and midpoints of E2M1
    x[kinds == 9] = near_thresholds(rng, int((kinds == 9).sum()), limits)
    x = np.clip(x, -largest, largest)
    strange = np.flatnonzero(kinds == 8)
    x[strange, rng.integers(0, ELEMENTS, len(strange))] = np.resize([np.nan, np.inf, -np.inf], len(strange))
    return x.astype(explorer.DTYPES[dtype])


def near_thresholds(rng: np.random.Generator, count: int, limits: ml_dtypes.finfo) -> np.ndarray:
    """Return matrices of random magnitude in which every 16 numbers have the maximum m * 2^e * (1 + k * eps).

    m is 1, 1.25, 1.5 or 1.75, and k is an integer from -32 to 32. The rules of power-of-two scales have their
    thresholds there.
    """
    shape = count, ELEMENTS // 16, 1
    smallest, largest = int(limits.minexp), min(int(limits.maxexp) - 1, 90)
    power = rng.integers(max(smallest, -90), largest, (count, 1, 1)) - rng.integers(0, 6, shape)
    maxima = rng.choice([1, 1.25, 1.5, 1.75], shape) * (1 + rng.integers(-32, 33, shape) * float(limits.eps))
    x = rng.uniform(-0.75, 0.75, (*shape[:2], 16))
    np.put_along_axis(x, rng.integers(0, 16, shape), 1, -1)
    return (x * maxima * 2.0**power).reshape(count, ELEMENTS)


def larger_amaxes(x: np.ndarray) -> np.ndarray:
    """Return a tensor amax for every eighth matrix, as if it were part of a larger tensor, and -1 for the others."""
    amax = np.minimum(np.abs(x.astype(np.float64)).max(-1) * 1.75, np.finfo(np.float32).max).astype(np.float32)
    return np.where((np.arange(len(x)) % 8 == 5) & ~np.isnan(amax), amax, np.float32(-1))


def parts_of(x: np.ndarray, recipe: str, i: int, amax: np.float32) -> dict[str, np.ndarray]:
    """Return the bytes of all results of matrix i by name, as partsOf in SCRIPT must give them."""
    r, is_given = RECIPES[recipe], amax >= 0
    given = {"tensor_amax": amax} if is_given and r.tensor_scaling != "none" else {}
    q = fp4kit.quantize(x.reshape(1 if i % TALL else r.block_rows, -1), recipe, **given)
    tensor = np.float32([]) if q.tensor_scale is None else np.float32([q.tensor_scale, q.tensor_amax])
    scales = np.uint8([]) if q.block_scale is None else q.block_scale
    parts = {"tensor": tensor, "scales": scales, "codes": q.packed, "values": fp4kit.dequantize(q)}
    return {name: part.view(np.uint8).reshape(-1) for name, part in parts.items()}


def expected(x: np.ndarray, amaxes: np.ndarray, recipe: str, found: dict[str, Any]) -> str:
    """Return the digest that digestOf in SCRIPT must give for the matrices that it covers."""
    digest = hashlib.sha256()
    for i in covered(found):
        for part in parts_of(x[i], recipe, i, amaxes[i]).values():
            digest.update(part)
    return digest.hexdigest()


def covered(found: dict[str, Any]) -> list[int]:
    """Return the indices of the matrices for which the page gave results."""
    return sorted(set(range(found["matrices"])) - set(found["declined"]))


def first_difference(tab: Page, x: np.ndarray, amaxes: np.ndarray, recipe: str, found: dict[str, Any]) -> str:
    """Return a sentence that names the first byte in which the results of the page and of the package differ.

    The page's results are those of its variable `recipe`.
    """
    for i in covered(found):
        results = tab.run(f"partsOf(recipe, {i}).map(([name, bytes]) => [name, Array.from(bytes)])")
        wanted = parts_of(x[i], recipe, i, amaxes[i])
        for name, got in results:
            assert len(got) == wanted[name].size, f"{recipe}: {name} of matrix {i} has {len(got)} bytes in the page"
            wrong = np.flatnonzero(wanted[name] != np.uint8(got))
            if wrong.size:
                at = wrong[0]
                return f"{recipe}: {name} of matrix {i}, byte {at}: {got[at]} in the page, {wanted[name][at]} in fp4kit"
    return f"{recipe}: the results are equal"


def give_matrices(tab: Page, folder: Path, dtype: str, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Give drawn matrices to the page, enough for this many blocks of every recipe. Return them and their amaxes.

    They go through a file, because a text in Base64 takes many times as long.
    """
    x = drawn(16 + blocks // 30, dtype)  # a third of the matrices have NaN if elements do not saturate, as in oneDNN
    amaxes = larger_amaxes(x)
    (folder / "matrices").write_bytes(x.tobytes())
    chooser = tab.send("Runtime.evaluate", expression="chooser")["result"]["objectId"]
    tab.send("DOM.setFileInputFiles", files=[str(folder / "matrices")], objectId=chooser)
    awaited(tab, f"load({json.dumps(dtype)}, {amaxes.tolist()})")
    return x, amaxes


CASES = [
    pytest.param("float32", 1500),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (("float32", 30_000), ("float16", 10_000), ("bfloat16", 10_000))
    ),
]


@needs_browser
@pytest.mark.parametrize(("dtype", "blocks"), CASES)
def test_results_are_those_of_the_package(tab: Page, dtype: str, blocks: int, tmp_path: Path) -> None:
    """The page gives the package's codes, scales and values, in every bit, for every recipe that it offers.

    Exhaustive runs compare at least 100,000 blocks of float32 per recipe, and 10,000 each of float16 and bfloat16.
    Matrices without a result do not count: those with NaN or an infinity, and for some recipes those with blocks of
    zeros, or with factors that are tiny or infinite. For recipes with blocks of several rows, most matrices have one
    row, as in the page, so most blocks are 1 x 16 or 1 x 32 parts of a block.
    """
    x, amaxes = give_matrices(tab, tmp_path, dtype, blocks)
    tab.run(f"start({blocks})")
    for entry in explorer.offered():
        found = awaited(tab, f"results[{json.dumps(entry['id'])}]")
        assert found["blocks"] >= blocks, (entry["id"], found["blocks"], found["declined"])
        if found["digest"] != expected(x, amaxes, entry["id"], found):
            tab.run(f"window.recipe = recipeOf({json.dumps(entry['id'])}); 0")
            pytest.fail(first_difference(tab, x, amaxes, entry["id"], found))


@needs_browser
def test_a_wrong_rule_is_noticed(tab: Page, tmp_path: Path) -> None:
    """With a rule of another recipe, the digest of nvfp4-te differs, and the difference is named."""
    x, amaxes = give_matrices(tab, tmp_path, "float32", 4000)
    for fact, other, part in (
        ("tensorRule", "nvfp4-compressed-tensors", "tensor"),
        ("blockRule", "nvfp4-modelopt", "scales"),
        ("arithmetic", "nvfp4-gguf", "codes"),
        ("decoders", "nvfp4-modelopt", "values"),
    ):
        tab.run(f"window.recipe = {{ ...recipeOf('nvfp4-te'), {fact}: recipeOf('{other}').{fact} }}; 0")
        found = awaited(tab, "digestOf(recipe, 4000)")
        assert found["digest"] != expected(x, amaxes, "nvfp4-te", found), fact
        assert first_difference(tab, x, amaxes, "nvfp4-te", found).startswith(f"nvfp4-te: {part} of matrix "), fact


OWN_NAMES = {name: getattr(fp4kit.formats, name) for name in explorer.named_formats()}
OWN_NAMES |= {name: getattr(fp4kit.formats, name) for name in ("ElementFormat", "Codebook")}
OWN_NAMES |= {"fp4kit": fp4kit, "custom_recipe": fp4kit.custom_recipe}
NANS = {
    dtype: int(np.array(np.nan, kind).view(f"u{np.dtype(kind).itemsize}")) for dtype, kind in explorer.DTYPES.items()
}
EXPLORE = """
((NANS) => (cases) => cases.map(([line, dtype, bits, amax]) => {
  const found = engine.explore(ownRecipes(line)[0], dtype, bits, 1, bits.length, amax);
  found.values.forEach((one, i) => { if (Number.isNaN(valueOf(one, dtype))) found.values[i] = NANS[dtype]; });
  const words = (part) => Array.from(part instanceof Float32Array ? new Uint32Array(part.buffer) : part);
  return [found.packed, found.scales, found.tensor.subarray(1), found.values].map((part) => words(part.slice()));
}))
"""


def drawn_line(rng: np.random.Generator) -> str:
    """Return a random call of custom_recipe as text."""
    element = str(rng.choice(["NF4", "BNB_FP4", "E2M1", "E1M2", "E3M0", "INT4", "INT8", "E4M3", "E5M2", "E2M3", "own"]))
    if element == "own":
        table = rng.standard_normal(int(rng.integers(2, 17))) * 2.0 ** rng.integers(-20, 20)
        table[0] = 0 if rng.random() < 0.5 else table[-1]
        element = f"Codebook({table.tolist()}, name='Drawn')"
    rounding = str(rng.choice(["nearest", "up", "down"]))
    columns = int(rng.choice([2, 16, 24, 32, 64]))
    if rng.random() < 0.15:
        return f"custom_recipe('mine', MX4, E8M0, {columns}, scale_rounding='{rounding}')"
    scale = str(
        rng.choice(
            [
                "'float32'",
                "'float16'",
                "'bfloat16'",
                "E4M3",
                "E5M2",
                "E3M2",
                "E8M0",
                "E6M2",
                "UE5M3",
                "biased",
                "unsigned",
            ]
        )
    )
    if scale.startswith("'"):
        rounding = "nearest" if scale == "'float32'" else rounding
        return f"custom_recipe('mine', {element}, {scale}, {columns}, scale_rounding='{rounding}')"
    if scale == "biased":
        specials = rng.choice(["none", "nan", "ieee"])
        scale = f"ElementFormat('Biased', 4, 3, {rng.integers(-3, 20)}, '{specials}')"
    if scale == "unsigned":
        bits = f"{rng.integers(2, 7)}, {rng.integers(0, 3)}, {rng.integers(0, 30)}"
        scale = f"ElementFormat('Unsigned', {bits}, signed=False)"
    has_tensor = bool(rng.random() < 0.4 and scale != "E8M0")
    block = f"({rng.choice([1, 4])}, {columns})"
    return f"custom_recipe('mine', {element}, {scale}, {block}, scale_rounding='{rounding}', tensor_scale={has_tensor})"


@needs_browser
@pytest.mark.parametrize("count", [300, *exhaustive([2000])])
def test_own_formats_give_the_bits_of_the_package(tab: Page, count: int) -> None:
    """Random lines of Python are read and computed as Python does: codes, scales, tensor scale and values."""
    rng, cases, wanted = np.random.default_rng(5), [], []
    for i in range(count):
        line, dtype = drawn_line(rng), rng.choice([*explorer.DTYPES])
        r = eval(line, dict(OWN_NAMES))
        x = drawn(1, dtype)[0] if i % 40 == 0 else rng.standard_normal(96) * 2.0 ** rng.integers(-30, 12)
        x = np.resize(x * (rng.random(x.shape) > 0.2), 2 * r.block_size)
        x[:: int(rng.integers(1, 5))] *= np.exp2(rng.integers(-10, 3))
        if i % 10 == 7:  # the ends of float32: scales near 1e-38, and beyond 16-bit types
            x = x / np.abs(x).max() * float(r.element.amax_target) * rng.choice([1.04e-38, 9.9e-39, 1e37, 1e5])
        largest = float(ml_dtypes.finfo(explorer.DTYPES[dtype]).max)
        x = np.clip(np.round(x * 64) / 64 if rng.random() < 0.3 else x, -largest, largest)[None]
        x = x.astype(explorer.DTYPES[dtype])
        bits = x.view(np.uint32 if dtype == "float32" else np.uint16)
        amax = np.float32(min(float(np.abs(x).max()) * 1.75, 3e38)) if rng.random() < 0.5 else None
        given = {"tensor_amax": amax} if amax is not None and r.tensor_scaling == "tensor" else {}
        q = fp4kit.quantize(x, r, **given)
        is_tensor = r.tensor_scaling == "tensor"
        tensor = np.float32([q.tensor_scale, q.tensor_amax] if is_tensor else [1, 1])
        scales = q.tensor_scale.view(np.uint32) if q.block_scale is None else q.block_scale
        cases.append([line, dtype, bits[0].tolist(), None if amax is None else float(amax)])
        values = fp4kit.dequantize(q)
        values[np.isnan(values)] = np.nan  # an infinite tensor scale gives NaN of either sign
        parts = q.packed, scales, tensor.view(np.uint32), values.view(bits.dtype)
        wanted.append([part.reshape(-1).tolist() for part in parts])
    for case, got, expected in zip(cases, tab.run(f"({EXPLORE})({NANS})({json.dumps(cases)})"), wanted, strict=True):
        assert got == expected, case[0]


@needs_browser
def test_values_of_named_formats_are_those_of_the_package(tab: Page) -> None:
    found = tab.run(
        "Object.entries(NAMED).map(([n, f]) => [n, f.values.map((x) => float32Bits(x)), f.largest, f.bits])"
    )
    assert [name for name, *_ in found] == [*explorer.named_formats()]
    for name, bits, largest, width in found:
        f, values = OWN_NAMES[name], np.uint32(bits).view(np.float32)
        assert np.array_equal(np.isnan(values), np.isnan(f.values)), name
        assert np.array_equal(values.view(np.uint32)[~np.isnan(values)], f.values.view(np.uint32)[~np.isnan(values)])
        assert (largest, width) == (float(f.max), f.bits), name


GOOD_LINES = [
    "fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)",
    'mine = custom_recipe("a", element=formats.E2M1, scale=E4M3, block=16, tensor_scale=True)  # mine',
    "from fp4kit.formats import E2M1\nue5m3 = ElementFormat('UE5M3', 5, 3, 15, specials='nan', signed=False)\n"
    "mine = fp4kit.custom_recipe(\n    'b', E2M1, ue5m3, block=(1, 16), scale_rounding='up',\n)",
    "custom_recipe('c', Codebook([0, 1, -1, 1 / 3, -1 / 3, 2**-3, +.5e0, (1 + 2) * 2], name='Thirds'))",
    "n = 1_6; custom_recipe('d', INT8, 'bfloat16', n * 2)",
    "element=E2M1, scale=E8M0, block=32",
    "custom_recipe('f', E1M2, None, None, levels=None)",
    "custom_recipe('g', 'NF4', 'UE5M3', 16)",
    "id = 'e'\nelement = NF4\nscale = 'float16'",
]
OWN_FIELDS = ("id", "element", "scale", "block", "scale_rounding", "tensor_scale")


@needs_browser
@pytest.mark.parametrize("text", GOOD_LINES)
def test_python_is_read_as_python_reads_it(tab: Page, text: str) -> None:
    names = dict(OWN_NAMES, formats=fp4kit.formats, made=[])
    names["custom_recipe"] = lambda *given, **more: names["made"].append(fp4kit.custom_recipe(*given, **more))
    source = text.replace("fp4kit.custom_recipe", "custom_recipe").replace(", scale=E8M0, block", "; scale=E8M0; block")
    exec(source, names)
    if not names["made"]:
        names["custom_recipe"](**{"id": "own"} | {name: names[name] for name in OWN_FIELDS if name in names})
    (r,) = names["made"]
    facts = "r.id, r.own.element.values.map(String), r.block, r.blockRows, r.own.rounding, r.tensorRule"
    found = tab.run(f"(([r]) => [{facts}, r.element, r.scale])(ownRecipes({json.dumps(text)}))")
    scale = r.scale.name if r.scale else (r.tensor_rule or "").removeprefix("amax").strip("_") or "float32"
    rounding = {"up": "up", "down": "down"}.get((r.block_rule or "amax").rpartition("_")[2], "nearest")
    assert found[:1] + found[2:] == [
        r.id, r.block_size, r.block_rows, rounding, r.tensor_rule if r.scale else None, r.element.name, scale,
    ]  # fmt: skip
    assert [float(value.replace("Infinity", "inf")) for value in found[1]] == pytest.approx(
        r.element.values.tolist(), rel=0, abs=0, nan_ok=True
    )


# Texts that fp4kit refuses, and texts that are no calls of custom_recipe: (text, part of the message of the page)
BAD_LINES = [
    ("custom_recipe('a', E2M1, E4M3, block=0)", "block is 0; needs a positive int"),
    ("custom_recipe('a', E2M1, E4M3, block=15)", "block is 15; needs an even number"),
    ("custom_recipe('a', E2M1, E4M3, block=(0, 16))", "block is [0, 16]; needs a positive int, or (rows, columns)"),
    ("custom_recipe('a', E2M1, E4M3, block=True)", "block is True"),
    ("custom_recipe('nvfp4-te', E2M1)", "id is 'nvfp4-te'; needs a name that is not the id of a producer's recipe"),
    ("custom_recipe('nvfp4', E2M1)", "id is 'nvfp4'; needs a name that is not"),
    ("custom_recipe('hif4-amct', E2M1)", "id is 'hif4-amct'; needs a name that is not"),
    ("custom_recipe('', E2M1)", "id is ''; needs a name"),
    ("custom_recipe(1, E2M1)", "id is 1; needs a name"),
    ("custom_recipe('a')", "element is missing"),
    ("custom_recipe('a', 'E2M9')", "element is 'E2M9'; needs a format, such as"),
    ("custom_recipe('a', E2M1, E4M3, 16, 'up')", "got 5 positional arguments; needs at most 4"),
    ("custom_recipe('a', E2M1, size=16)", "there is no argument size; needs id, element"),
    ("custom_recipe('a', E2M1, E4M3, scale=E4M3)", "scale is given twice"),
    ("custom_recipe('a', E2M1, 'float64')", "scale is 'float64'; needs a format, such as fp4kit.formats.E4M3, or"),
    ("custom_recipe('a', E2M1, INT8)", "scale is INT8; needs a float format"),
    ("custom_recipe('a', E2M1, NF4)", "scale is NF4; needs a float format"),
    ("custom_recipe('a', E8M0)", "element is E8M0; needs a format with a sign and a zero"),
    ("custom_recipe('a', MX4, E4M3, 16)", "element is MX4; needs scale E8M0"),
    ("custom_recipe('a', MX4, E8M0, (2, 16))", "element is MX4; needs scale E8M0 and blocks of one row"),
    ("custom_recipe('a', E2M1, E8M0, tensor_scale=True)", "tensor_scale is True; needs False, because E8M0"),
    ("custom_recipe('a', E2M1, 'float32', tensor_scale=True)", "needs a scale format of at most 8 bits"),
    ("custom_recipe('a', E2M1, 'float32', scale_rounding='up')", "scale_rounding is 'up'; needs 'nearest' for float32"),
    (
        "custom_recipe('a', E2M1, E4M3, scale_rounding='toString')",
        "scale_rounding is 'toString'; needs 'nearest', 'up'",
    ),
    ("custom_recipe('a', E2M1, E4M3, tensor_scale=1)", "tensor_scale is 1; needs True or False"),
    ("custom_recipe('a', E2M1, ElementFormat('E4M3', 4, 3, 8))", "scale is E4M3; needs another name"),
    (
        "custom_recipe('a', ElementFormat('X', 2, 1, 1), ElementFormat('X', 4, 3, 8))",
        "element is X; needs another name",
    ),
    ("custom_recipe('a', ElementFormat('X', 5, 2, -96), E4M3, 16, tensor_scale=True)", "needs at most 2^127 as its"),
    ("custom_recipe('a', E2M1, ElementFormat('X', 8, 0, 127, 'nan', False, False))", "needs a format with values from"),
    ("custom_recipe('a', E2M1, ElementFormat('X', 5, 2, 120))", "needs a format with values from 2^-100 to 2^100"),
    ("custom_recipe('a', ElementFormat('X', 4, 3, 130))", "element is X; needs values that are normal in float32"),
    ("custom_recipe('a', ElementFormat('X', 8, 3))", "needs both >= 0, and 1 to 8 bits"),
    ("custom_recipe('a', ElementFormat('X', 2, 1, 200))", "bias is 200, so some values are not float32 numbers"),
    ("custom_recipe('a', ElementFormat('X', 2, 0, 1, 'ieee'))", "needs mantissa_bits >= 1 and exponent_bits >= 2"),
    ("custom_recipe('a', ElementFormat('X', 0, 3, 1))", "an integer needs a sign, mantissa_bits > 0, bias 0"),
    ("custom_recipe('a', ElementFormat('X', 1, 0, 1, 'nan'))", "zero is the only finite value"),
    ("custom_recipe('a', E2M1, ElementFormat('X', 4, 3, has_zero=False))", "has_zero is False; needs True for every"),
    ("custom_recipe('a', ElementFormat('a b', 2, 1, 1))", "name is 'a b'; needs an identifier"),
    ("custom_recipe('a', Codebook([1]))", "table has 1 values; needs two to sixteen"),
    ("custom_recipe('a', Codebook([0, 0]))", "every value of table is 0"),
    ("custom_recipe('a', Codebook([0, 1e-40]))", "table holds 1e-40; needs 0, or magnitudes from"),
    ("custom_recipe('a', Codebook([0, 1], name='E2M1'))", "name is 'E2M1'; needs an identifier that is not the name"),
    ("custom_recipe('a', Codebook([0, 1], name='NVFP4'))", "name is 'NVFP4'; needs an identifier that is not the name"),
    ("custom_recipe('a', Codebook([0, 'x']))", "table is [0, 'x']; needs two to sixteen numbers"),
]
NOT_READ = [
    (
        "custom_recipe('a', E2M1, levels=[(64, 'E6M2'), (8, 'exponent1')])",
        "levels is [[64, 'E6M2'], [8, 'exponent1']]; needs None, because this page computes one level of scales",
    ),
    ("custom_recipe('a', E2M1, E4M3, 512)", "block is 512; needs at most 256 columns for this page"),
    ("custom_recipe('a', IF4)", "IF4 is not known here; needs one of E2M1, E1M2"),
    ("custom_recipe('a', E2M1) + custom_recipe('b', E2M1)", '"+" needs numbers'),
    ("custom_recipe('a', E2M1)\ncustom_recipe('a', NF4)", "two recipes are called a; needs different names"),
    ("custom_recipe('a', Codebook([0, 1]))\ncustom_recipe('b', Codebook([0, 2]))", "two formats are called Codebook"),
    ("__import__('os').system('x')", "is not understood here; needs a call such as"),
    ("constructor", "constructor is not known here"),
    ("custom_recipe('a', constructor)", "constructor is not known here"),
    ("custom_recipe('a', __proto__=1)", "there is no argument __proto__"),
    ("fetch('x')", "fetch is not called here"),
    ("custom_recipe('a', E2M1", '"the end" is not understood; needs ","'),
    ("custom_recipe('a', E2M1))", '")" is not understood here'),
    ("1 + 1", "a line gives 2; needs a call such as fp4kit.custom_recipe('my-nf4'"),
    ("alert(1)", "alert is not called here"),
    ("x = $y", '"$y" is not understood here; needs a call such as'),
    ("blocks = 16", "custom_recipe: element is missing"),
]


@needs_browser
def test_what_the_package_refuses_is_refused_by_name(tab: Page) -> None:
    read = (
        "(text) => { try { registerFormats(ownRecipes(text)); return null; } catch (error) { return error.message; } }"
    )
    found = tab.run(f"{json.dumps([text for text, _ in (*BAD_LINES, *NOT_READ)])}.map({read})")
    for (text, part), message in zip((*BAD_LINES, *NOT_READ), found, strict=True):
        assert message is not None and part in message, (text, message)
    for text, _ in BAD_LINES:
        with pytest.raises((TypeError, ValueError)):
            eval(text, dict(OWN_NAMES))


@needs_browser
def test_own_formats_are_compared_and_shared(tab: Page) -> None:
    """A format of the field is chosen, computed and kept in the link; wrong text hides results until it is mended."""
    tab.run(
        'document.querySelector("[data-example=example]").click(); document.querySelector("[data-own=nf4]").click()'
    )
    state = "[selects().map((one) => one.value), at('verdict').textContent, at('own').value, at('numbers').value]"
    before = tab.run(state)
    assert before[0] == ["nvfp4-te", "nvfp4-compressed-tensors", "my-nf4", ""] and len(before[3].split()) == 64
    assert "nvfp4-te and my-nf4 use different formats, so only their values can be compared." in before[1]
    link, typed = tab.run("location.href"), 'at("own").dispatchEvent(new Event("input", {bubbles: true}))'
    hidden = '[...document.querySelectorAll("main > section")].every((one) => !one.offsetHeight)'
    message = "[at('problem').textContent, at('own-problem').textContent]"
    wrong = "custom_recipe: block is 15; needs an even number of columns, because two codes of NF4 share a byte"
    tab.run(f'at("own").value = at("own").value.replace("64", "15"); {typed}; 0')
    assert tab.run(message) == [f"Your own format: {wrong}", wrong] and tab.run(hidden)
    tab.run(f'at("own").value = at("own").value.replace("15", "32").replace("my-nf4", "nf4-32"); {typed}; 0')
    assert tab.run(message) == ["", ""] and not tab.run(hidden) and tab.run(state)[0][2] == "nf4-32"
    tab.run("document.querySelector(\"[data-own='']\").click(); 0")
    assert tab.run("[...selects()].map((one) => one.value)") == ["nvfp4-te", "nvfp4-compressed-tensors", "", ""]
    tab.run(f"location.hash = new URL({json.dumps(link)}).hash; readAddress(); update(); 0")
    assert tab.run(state) == before and tab.run("at('own-part').open")
    assert not tab.events_of("Runtime.exceptionThrown")
    tab.run("document.querySelector(\"[data-own='']\").click(); 0")


@needs_browser
def test_a_link_names_what_the_page_does_not_offer(tab: Page) -> None:
    tab.run("fill({ recipes: 'nvfp4-te,no-such,hif4-amct', dtype: 'float64' }); update(); 0")
    names = "The link names no-such, hif4-amct, float64, which this page does not offer."
    assert tab.run("at('unknown').textContent") == names and tab.run("at('problem').textContent") == ""
    tab.run("at('recipes').dispatchEvent(new Event('input', {bubbles: true})); 0")
    assert tab.run("at('unknown').textContent") == ""


@needs_browser
def test_recipes_lead_to_their_documentation(tab: Page) -> None:
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    links = tab.run("[...document.querySelectorAll('#about a, #steps a')].map((one) => one.href)")
    pages = [
        f"{explorer.SITE}producers/te/#nvfp4-te",
        f"{explorer.SITE}producers/compressed-tensors/#nvfp4-compressed-tensors",
    ]
    assert links == [*pages, *pages]


@needs_browser
def test_errors_of_recipes_are_those_of_compare(tab: Page) -> None:
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    rows = tab.run(
        "[...document.querySelectorAll('#steps tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    x = np.array([float(part) for part in tab.run("at('numbers').value").split()], ml_dtypes.bfloat16)
    for column, id in enumerate(("nvfp4-te", "nvfp4-compressed-tensors"), 1):
        found = fp4kit.compare(x, fp4kit.fake_quantize(x, id, tensor_amax=np.float32(0.0947)))
        assert [rows[-2][column], float(rows[-1][column])] == [f"{found.sqnr:.2f}", float(f"{found.max_error:.4g}")]


def test_the_module_was_compiled_from_the_present_sources() -> None:
    """After changes of the engine, run `python tools/build_explorer.py --compile`."""
    assert explorer.DIGEST.read_text().split() == explorer.sources_digest().split()


def test_every_recipe_is_offered_or_named() -> None:
    offered = {entry["id"] for entry in explorer.offered()}
    assert len(offered) > 120
    assert all(one in explorer.left_out() for one in RECIPES.keys() - offered)
    assert not any(f"{one}," in explorer.left_out() for one in offered)


@needs_browser
def test_the_example_shows_the_first_difference(tab: Page) -> None:
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    text = tab.run('document.getElementById("verdict").textContent')
    assert text.startswith("nvfp4-te and nvfp4-compressed-tensors first differ in the tensor scale: "), text
    assert tab.run('document.querySelectorAll("#elements tbody tr").length') == 16
    assert tab.run('document.querySelectorAll("#line svg, #error svg").length') == 2
    assert not tab.events_of("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    asked = [event["request"]["url"] for event in tab.events_of("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@needs_browser
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("1 2 x", '"x" is no finite number.'),
        ("1 2 3", "There are 3 numbers; blocks of these recipes need 16 or a multiple, at most 256."),
        ("nan " * 16, '"nan" is no finite number.'),
        ("1e39 " * 16, "1e+39 is too large for bfloat16."),
    ],
)
def test_bad_input_is_named(tab: Page, numbers: str, message: str) -> None:
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    tab.run(f'document.getElementById("numbers").value = {json.dumps(numbers)}; update(); 0')
    assert tab.run('document.getElementById("problem").textContent') == message
    hidden = '[...document.querySelectorAll("main > section")].every((one) => !one.offsetHeight)'
    assert tab.run(hidden) and not tab.run(f'document.querySelector("[data-example=example]").click(); {hidden}')


@needs_browser
def test_typed_numbers_do_not_keep_the_amax_of_an_example(tab: Page) -> None:
    assert tab.run('document.querySelector("[data-example=outlier]").click(); at("amax").value') == "24"
    typed = 'at("numbers").dispatchEvent(new Event("input")); at("amax").value'
    assert tab.run(typed) == "" and tab.run(f'at("amax").value = "3"; {typed}') == "3"
    assert tab.run(f'document.querySelector("[data-example=example]").click(); {typed}') == ""
    tab.run('document.querySelector("[data-example=outlier]").click(); 0')
    event = "const data = new DataTransfer(); data.setData('text', '1 '.repeat(16)); const event"
    drop = f"(async () => {{ {event} = new DragEvent('drop', {{ dataTransfer: data, cancelable: true }});"
    awaited(tab, f"{drop} at('numbers').dispatchEvent(event); await new Promise((done) => setTimeout(done, 50)); }})()")
    assert tab.run("[at('numbers').value.trim().split(' ').length, at('amax').value]") == [16, ""]


@needs_browser
def test_a_link_restores_the_page(tab: Page) -> None:
    tab.run('document.querySelector("[data-example=outlier]").click(); 0')
    state = "[address(), document.getElementById('verdict').textContent]"
    before = tab.run(state)
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    assert tab.run(state) != before
    tab.run(f"location.hash = new URL({json.dumps(before[0])}).hash; readAddress(); update(); 0")
    assert tab.run(state) == before


@needs_browser
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_are_rounded_once(tab: Page, dtype: str) -> None:
    """Decimal numbers become the nearest 16-bit numbers, ties to even, without a rounding to float32 between."""
    kind = np.dtype(explorer.DTYPES[dtype])
    bits = np.random.default_rng(1).integers(0, 0x7BFF, 300).astype(np.uint16)
    low, high = bits.view(kind).astype(np.float64), (bits + np.uint16(1)).view(kind).astype(np.float64)
    middle = (low + high) / 2
    x = np.concatenate([low, middle, np.nextafter(middle, low), np.nextafter(middle, high), -low])
    even = np.where(bits % 2, bits + np.uint16(1), bits)
    wanted = np.concatenate([bits, even, bits, bits + np.uint16(1), bits | np.uint16(0x8000)])
    found = tab.run(f"{json.dumps(x.tolist())}.map((x) => bitsOf(x, '{dtype}'))")
    is_zero = x == 0  # JSON keeps -0.0, but a sum of codes does not matter here
    assert np.array_equal(np.array(found)[~is_zero], wanted[~is_zero])


@needs_browser
@pytest.mark.parametrize("width", [400, *exhaustive([1200])])
@pytest.mark.parametrize("scheme", ["dark", *exhaustive(["light"])])
def test_small_screens_and_screen_readers(tab: Page, width: int, scheme: str) -> None:
    """The page does not scroll sideways; every control has a name, and every picture a description."""
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.run('document.querySelector("[data-example=example]").click(); 0')
    assert tab.run("document.documentElement.scrollWidth") <= width
    controls = 'document.querySelectorAll("input, select, textarea")'
    assert tab.run(f"[...{controls}].filter((one) => !one.labels.length).length") == 0
    assert tab.run('[...document.querySelectorAll("button")].every((one) => one.textContent.trim())')
    assert tab.run('[...document.querySelectorAll("svg")].every((one) => one.getAttribute("aria-labelledby"))')
