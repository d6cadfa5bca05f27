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
        for case in (("float32", 100_000), ("float16", 10_000), ("bfloat16", 10_000))
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
        ("1 2 3", "There are 3 numbers; blocks of these recipes need 16 or a multiple, at most 64."),
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
