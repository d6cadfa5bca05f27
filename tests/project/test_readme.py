"""Test the README, the examples of docstrings, and the documentation site, which `.ci/run` builds."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from package_modules import MODULES
from products import of_cards, of_tcgen05
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit import attention, calibration, checkpoint, cuda, plot, testing
from fp4kit.evidence.golden import check as agreement
from fp4kit.recipes import ALL_RECIPES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_generated_parts_and_what_the_example_prints_are_current(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "specification", nullcontext)  # the compiled engine gives the same table sooner
    module = tool_module("readme")
    for page in module.PAGES:
        assert module.rewritten(page.read_text()) == page.read_text(), f"{page.name}: run python tools/readme.py"


@pytest.mark.parametrize("page", tool_module("readme").REFERENCE, ids=lambda page: page.stem)
def test_tables_of_the_reference_are_current(page: Path) -> None:
    if page.stem in ("torch", "jax"):
        pytest.importorskip(page.stem)
    assert tool_module("readme").with_names(page.read_text()) == page.read_text(), "run python tools/readme.py"


def test_each_example_has_its_own_output() -> None:
    page = "<!-- example -->\n```python\nprint({})\n```\nText:\n\n<!-- output -->\n```text\n{}\n```\n"
    stale, current = (page.format(1, x) + page.format(2, y) for x, y in (("x", "x"), (1, 2)))
    assert tool_module("readme").with_output(stale) == current
    for wrong in (
        page.format(1, 1).partition("<!-- output")[0] + page.format(2, 2),
        page.format(1, 1) + "<!-- output -->",
    ):
        with pytest.raises(ValueError, match="examples and outputs do not alternate"):
            tool_module("readme").with_output(wrong)


def test_shares_of_other_codes_are_those_of_the_index() -> None:
    """Codes that differ from Transformer Engine's: 20% for llama.cpp, 28 to 40% for 4over6 that chooses by errors."""
    w = (np.random.default_rng(0).standard_normal((1024, 1024)) * 0.02).astype(ml_dtypes.bfloat16)
    te = fp4kit.quantize(w, "nvfp4-te")

    def share(id: str) -> float:
        differing, total = fp4kit.compare(te, fp4kit.quantize(w, id)).codes
        return round(100 * differing / total)

    by_error = r"nvfp4-((te|flashinfer)-4over6-.*(?<!-2d)|fouroversix(-triton)?(-mae)?)"
    shares = [share(id) for id in ALL_RECIPES if re.fullmatch(by_error, id)]
    assert (min(shares), max(shares)) == (28, 40) and len(shares) > 10
    assert share("nvfp4-gguf") == 20


def test_counts_of_sums_of_gpus_add_up() -> None:
    """The README of the recordings has the totals. The table of units has a part of them in each row."""
    data = (ROOT / "tests" / "data" / "matmul" / "README.md").read_text()
    published, words = re.search(r"all (\d+) \|", data), re.search(r"([\d,]+)\npublished ones, ([\d,]+) of", data)
    assert published and words
    cells = tool_module("readme").units().replace("only NaN: two published words", "2 published words")
    found = {what: [_number(n) for n in re.findall(rf"([\d,]+) published {what}", cells)] for what in ("sums", "words")}
    assert sum(found["sums"]) == _number(words[1]) and sum(found["words"]) == _number(published[1])
    total = _number(words[1]) + _number(words[2]) + _number(published[1])
    held = sum(case.d.size for case in (*of_cards(), *of_tcgen05()))
    assert f"all {total:,} recorded sums" in TEXT and f"[{held:,} of them]" in TEXT
    assert f"Of the {total:,}, this folder has {held:,}." in data


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_guide_says_how_many_recipes_there_are() -> None:
    assert f"fp4kit has {len(ALL_RECIPES)} recipes," in (ROOT / "docs" / "guides" / "choose.md").read_text()


def test_rates_of_recipes_are_those_of_the_record() -> None:
    record = (ROOT / "benchmarks" / "results" / "cpu.md").read_text()
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    slowest = re.search(r"the slowest recipe\s+\(`([\w-]+)`\) runs at ([\d.]+) GB/s", text)
    rates = {
        name: float(rate) for name, rate in re.findall(r"^\| quantize \| (\S+) \| bf16 \| ([\d.]+) \|", record, re.M)
    }
    assert slowest and min(rates.items(), key=lambda row: row[1]) == (slowest[1], float(slowest[2]))
    large = dict(re.findall(r"^\| (\S+) \| 1 GiB \|(?:[^|]*\|){5} ([\d.]+) \|", record, re.M))
    found = re.search(r"at ([\d.]+) \(`([\w-]+)`\) or ([\d.]+) GB/s\s+\(`([\w-]+)`\)", text)
    assert found
    for rate, name in (found.groups()[:2], found.groups()[2:]):
        assert round(float(large[name]), 1) == float(rate)


def test_the_count_of_recipes_at_the_speed_of_a_copy_is_that_of_the_record() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())["rows"]
    best: dict[str, float] = {}
    for row in rows:
        plain = re.fullmatch("quantize( per token| 16x16)?(, amax given)?", row["operation"])
        if plain and row["efficiency"] and row["dtype"] == "bfloat16":
            best[row["recipe"]] = max(best.get(row["recipe"], 0), row["efficiency"])
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    most = sum(e >= 1 / 1.05 for e in best.values())
    said = (
        f"Of {len(best)} recipes, {most} quantize bfloat16 in at most 1.05 times the time of a copy if the tensor amax"
    )
    assert said in text and "Others take up to 1.5 times" in text
    searches = {"mxfp8-msmodelslim-mse", "mxfp4-msmodelslim-4over6", "nvfp4-modelopt-mse"}
    times = sorted(1 / best[name] for name in searches)
    assert (round(times[0]), round(times[-1])) == (2, 5) and "and searches of scales 2 to 5 times" in text
    assert round(max(1 / e for name, e in best.items() if name not in searches), 1) == 1.5


def test_stars_of_patterns_are_escaped_in_the_table_of_options() -> None:
    """Markdown would take two stars, as in model.layers.*.mlp.*, for the marks of emphasis."""
    table = re.sub(r"`[^`]*`", "", tool_module("readme").convert_options())
    assert re.findall(r"(?<!\\)\*", table) == [] and r"model.layers.\*.mlp.\*" in table


def test_the_readme_is_short() -> None:
    """Outside code and tables the README has at most 900 words."""
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\w[\w'-]*", prose)) <= 900


BUILT = ("explorer.html",)  # pages that only the site has


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_linked_files_exist(page: Path) -> None:
    """Links lead to files of the repository, so that they also work on its web page."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if not link.startswith("https://") and Path(link).name.partition("#")[0] not in BUILT:
            assert (page.parent / link).exists(), link


PAGES = TEXT + "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
EXECUTED = re.findall(r"<!-- executed -->\n```python\n(.*?)```", PAGES, re.DOTALL)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by PyTorch about its own code
@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=pytest.mark.exhaustive if "torch.compile" in code else ()) for code in EXECUTED]
)
def test_other_examples_run(code, tmp_path, monkeypatch) -> None:
    """The other examples of the README run without an error. One calls torch.compile and is slow."""
    for optional in ("torch", "jax", "peft"):
        if re.search(rf"^(import|from) .*\b{optional}\b", code, re.MULTILINE):
            pytest.importorskip(optional)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_all_examples_are_found() -> None:
    assert len(EXECUTED) == PAGES.count("<!-- executed -->") >= 10


DOCS = ROOT / "docs"
REFERENCE = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
DOCUMENTED = set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))


PICTURES = tool_module("pictures").PICTURES


@together("name", PICTURES)
def test_pictures_are_current(name: str) -> None:
    path = DOCS / "images" / f"{name}.svg"
    assert path.read_text() == PICTURES[name](), "run python tools/pictures.py"


PLOTS = tool_module("plots")


@pytest.mark.parametrize("name", PLOTS.PLOTS)
def test_plots_are_current(name: str) -> None:
    text = (DOCS / "images" / f"plot-{name}.svg").read_text()
    assert PLOTS.digest(PLOTS.PLOTS[name]()) in text, "run python tools/plots.py"


@pytest.mark.parametrize("module", [fp4kit, attention, calibration, checkpoint, cuda, plot, testing])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    assert {f"{module.__name__}.{name}" for name in module.__all__} <= DOCUMENTED


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_calls_without_arguments_say_what_is_needed(name: str) -> None:
    """Each public function names the missing argument and what it needs, in words other than Python's own."""
    parent, _, attribute = name.rpartition(".")
    if (framework := parent.rpartition(".")[2]) in ("torch", "jax"):
        pytest.importorskip(framework)
    function = getattr(importlib.import_module(parent), attribute, None)
    if inspect.isfunction(function):
        needed = inspect.signature(function).parameters.values()
        if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
            with pytest.raises(TypeError, match=rf"^{attribute}: \w+ is missing; needs "):
                function()


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_reference_of_a_framework_has_its_public_names(name: str) -> None:
    """These modules are read, not imported, because their frameworks are optional."""
    names = re.findall(r'^    "(\w+)",$', (ROOT / "fp4kit" / name / "__init__.py").read_text(), re.MULTILINE)
    assert {*names} == {*re.findall(rf"^::: fp4kit\.{name}\.(\w+)$", REFERENCE, re.MULTILINE)}


def test_names_in_the_reference_exist() -> None:
    for name in (each for each in DOCUMENTED if not each.startswith(("fp4kit.torch", "fp4kit.jax"))):
        module, _, attribute = name.rpartition(".")
        assert attribute in dir(importlib.import_module(module)) or importlib.import_module(name), name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    for path in DOCS.rglob("*.md"):
        assert path.relative_to(DOCS).as_posix() in navigation, path


def test_pages_begin_with_what_the_reader_gets() -> None:
    """Every page has a title and then a paragraph, before any section or table."""
    for path in DOCS.rglob("*.md"):
        lines = [line for line in path.read_text().splitlines() if line]
        assert lines[0].startswith("# "), path
        assert re.match(r"[A-Z`]", lines[1]), f"{path}: {lines[1]}"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return {producer: generated page} for two producers.

    The counts of recorded arrays are replaced by 1, because only CI computes them.
    """
    module = tool_module("producer_pages")
    module._recorded = lambda r: (1, 1)
    return {name: module.page(name, module.producers()[name]) for name in ("te", "gguf")}


def test_pages_of_producers_have_formula_and_a_block(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert "def code_" in text and "| element |" in text and "←" in text, name


def test_every_producer_has_a_title() -> None:
    module = tool_module("producer_pages")
    assert set(module.PRODUCERS) == set(module.producers())


NOT_RUN = ("fp4kit.__main__",)  # a command
FLAGS = doctest.ELLIPSIS


def examples(module):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize(
    "module", [name for name, path in MODULES.items() if name not in NOT_RUN and ">>>" in path.read_text()]
)
def test_examples(module):
    if module.startswith(("fp4kit.torch", "fp4kit.jax")):
        pytest.importorskip(module.split(".")[1])
    tests = examples(module)
    assert tests, "a >>> that doctest does not find"
    for test in tests:
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
        assert result.failed == 0, f"{test.name}: see above"


EXAMPLES = {
    "fp4kit.quantized.container": ("from_parts", "dequantize", "equals", "__getitem__"),
    "fp4kit.storage.quantized_file": ("save", "load"),
}


def test_every_public_function_has_an_example():
    functions = {name: getattr(fp4kit, name) for name in fp4kit.__all__}
    assert [name for name, f in functions.items() if inspect.isfunction(f) and ">>> " not in (f.__doc__ or "")] == []


@pytest.mark.parametrize("module", EXAMPLES)
def test_named_functions_have_an_example(module):
    assert {test.name.rpartition(".")[2] for test in examples(module)} >= set(EXAMPLES[module])


def others_are_zero(y: np.ndarray) -> bool:
    return bool(np.isposinf(y[0, 5]) and np.isfinite(y).sum() == y.size - 1 and np.count_nonzero(y[0, :32]) == 1)


SPECIALS = {  # what docs/guides/train.md says of one NaN or infinity, the element [0, 5] -> a check of the values
    "the largest value under the scale of its block": lambda y: (
        np.isfinite(y).all() and y[0, 5] == abs(y[0, :16]).max()
    ),
    "all values are infinite or NaN": lambda y: not np.isfinite(y).any(),
    "all values are finite": lambda y: np.isfinite(y).all(),
    "all values are NaN": lambda y: np.isnan(y).all(),
    "all values are 0": lambda y: not y.any(),
    "its block of 32 is NaN": lambda y: np.isnan(y[0, :32]).all() and np.isnan(y).sum() == 32,
    "it stays, alone": lambda y: np.isnan(y[0, 5]) and np.isnan(y).sum() == 1,
    "it stays, and the rest of its block is 0": others_are_zero,
}


def test_the_table_of_nan_and_infinities() -> None:
    rows = re.findall(r"^\| (`.*`) \| (.*) \| (.*) \| (all .*) \|$", (ROOT / "docs/guides/train.md").read_text(), re.M)
    assert len(rows) == 6
    for recipes, *texts in rows:
        for recipe in re.findall("`(.*?)`", recipes):
            for value, at, text in zip((np.nan, np.inf, np.nan), ((0, 5), (0, 5), ...), texts, strict=True):
                x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
                x[at] = value
                assert SPECIALS[text](fp4kit.fake_quantize(x, recipe)), (recipe, text)
