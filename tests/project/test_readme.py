"""Test the README: its example prints what it shows, its tables match the code, and its links lead to files."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from tool_module import tool_module

from fp4kit.evidence.golden import check as agreement

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_generated_parts_and_what_the_example_prints_are_current(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "specification", nullcontext)  # the compiled engine gives the same table sooner
    module = tool_module("readme")
    for page in module.PAGES:
        assert module.rewritten(page.read_text()) == page.read_text(), f"{page.name}: run python tools/readme.py"


def test_stars_of_patterns_are_escaped_in_the_table_of_options() -> None:
    """Markdown would take two stars, as in model.layers.*.mlp.*, for the marks of emphasis."""
    table = re.sub(r"`[^`]*`", "", tool_module("readme").convert_options())
    assert re.findall(r"(?<!\\)\*", table) == [] and r"model.layers.\*.mlp.\*" in table


def test_the_readme_is_short() -> None:
    """Outside code and tables the README has at most 900 words."""
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\w[\w'-]*", prose)) <= 900


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", TEXT) if not link.startswith("https://")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


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
