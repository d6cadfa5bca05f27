"""Test the explorer page in a browser: its results equal those of the package, and people can use it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

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
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}

# Run a recipe on matrices and return a digest of all results, and the numbers of matrices that gave none.
SCRIPT = """
(async () => {
  await ready;
  const recipe = RECIPES.find((one) => one.id === %(recipe)s);
  const bytes = window.inputs.%(dtype)s;
  const { Bits } = DTYPES.%(dtype)s;
  const count = %(elements)d, rows = recipe.blockRows, size = count * Bits.BYTES_PER_ELEMENT, declined = [], parts = [];
  for (let i = 0; i * size < bytes.length; ++i) {
    const x = new Bits(bytes.buffer, i * size, count);
    const found = engine.explore(recipe, "%(dtype)s", x, rows, count / rows);
    if (!found) { declined.push(i); continue; }
    parts.push(found.packed, found.scales, new Uint8Array(found.values.buffer));
    if (recipe.tensorRule !== null) parts.push(new Uint8Array(found.tensor.buffer, 4));
  }
  const all = new Uint8Array(await new Blob(parts).arrayBuffer());
  const digest = await crypto.subtle.digest("SHA-256", all);
  return { declined, digest: Array.from(new Uint8Array(digest), (b) => b.toString(16).padStart(2, "0")).join("") };
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield a browser that shows the page."""
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "explorer.html").write_text(explorer.page())
    with browser(folder / "profile") as opened:
        opened.open((folder / "explorer.html").as_uri())
        awaited(opened, "ready")
        yield opened


def awaited(tab: Page, expression: str) -> Any:
    """Return the value of a promise in the page."""
    found = tab.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in found, found
    return found["result"].get("value")


def drawn(count: int, dtype: str) -> np.ndarray:
    """Return `count` matrices of ELEMENTS finite numbers, of many kinds: (count, ELEMENTS) in a dtype."""
    rng = np.random.default_rng(20261126)
    x = rng.standard_normal((count, ELEMENTS))
    x *= 2.0 ** rng.integers(-30, 12, (count, 1))
    kinds = rng.integers(0, 6, count)
    x[kinds == 1] = np.round(x[kinds == 1] * 64) / 64  # many ties
    x[kinds == 2] *= 2.0 ** rng.integers(-12, 6, (int((kinds == 2).sum()), ELEMENTS))
    x[kinds == 3] *= rng.random((int((kinds == 3).sum()), ELEMENTS)) < 0.02  # zeros of both signs, blocks of zeros
    outliers = np.flatnonzero(kinds == 4)
    x[outliers, rng.integers(0, ELEMENTS, len(outliers))] *= 3000
    grid = np.float64([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    codes = rng.integers(0, 16, (int((kinds == 5).sum()), ELEMENTS))
    x[kinds == 5] = grid[codes] * rng.choice([-1, 1], codes.shape)  # values and midpoints of E2M1
    return np.clip(x, -6e4, 6e4).astype(explorer.DTYPES[dtype])


def expected(x: np.ndarray, recipe: str, declined: list[int]) -> str:
    """Return the digest that the page must give for the matrices x, without those that gave no result."""
    found, rows = hashlib.sha256(), RECIPES[recipe].block_rows
    for i in sorted(set(range(len(x))) - set(declined)):
        q = fp4kit.quantize(x[i].reshape(rows, -1), recipe)
        parts = [q.packed, q.block_scale, fp4kit.dequantize(q), q.tensor_scale, q.tensor_amax]
        for part in (part for part in parts if part is not None):
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def send_inputs(tab: Page, dtype: str, x: np.ndarray) -> None:
    """Give matrices to the page, as the variable window.inputs."""
    text = base64.b64encode(x.tobytes()).decode()
    tab.run(f'window.inputs = {{}}; inputs.{dtype} = Uint8Array.from(atob("{text}"), (c) => c.charCodeAt(0)); 0')


CASES = [
    pytest.param("float32", 3),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (("float32", 150), ("float16", 30), ("bfloat16", 30))
    ),
]


@needs_browser
@pytest.mark.parametrize(("dtype", "count"), CASES)
def test_results_are_those_of_the_package(tab: Page, dtype: str, count: int) -> None:
    """The page gives the package's results for all recipes. 150 matrices have over 18,000 blocks.

    The engine declines some matrices with blocks of zeros, or with factors that are not finite.
    """
    x = drawn(count, dtype)
    send_inputs(tab, dtype, x)
    for entry in explorer.offered():
        facts = {"recipe": json.dumps(entry["id"]), "dtype": dtype, "elements": ELEMENTS}
        found = awaited(tab, SCRIPT % facts)
        assert (count - len(found["declined"])) * ELEMENTS // entry["block"] > 60 * count, (
            entry["id"],
            found["declined"],
        )
        assert found["digest"] == expected(x, entry["id"], found["declined"]), entry["id"]


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
