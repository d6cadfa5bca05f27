"""Test the documentation site: pictures are current, every public name has a page, and the navigation has every page.

`.ci/run` builds the site and fails if a link or a name leads nowhere.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit import attention, calibration, checkpoint, cuda, plot, testing

ROOT = Path(__file__).resolve().parents[2]
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
