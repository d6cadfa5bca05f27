"""Test that docs/command-line.md shows what the commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import synthetic

from fp4kit import cli
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.delta import diff
from fp4kit.cli import main
from fp4kit.cli.output import Output
from fp4kit.cli.recipes import report
from fp4kit.evidence import selftest
from fp4kit.evidence.golden import check as agreement

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
ROWS = {schema: keys for schema, keys in re.findall(r"^\| `fp4kit\.(.*?)` \| .*? \| (.*) \|$", TEXT, re.MULTILINE)}
COMMANDS = {
    "convert.plan/1": "convert m new --dry-run",
    "convert/1": "convert m new",
    "convert.stale/1": "convert --remove-stale new",
    "inspect/1": "inspect m",
    "compare/1": "compare m m",
    "parity/1": "parity q q",
    "contract/1": "contract q",
    "engines/1": "contract --list",
    "diff/1": "diff m m -o p.patch",
    "apply/1": "apply m p.patch new",
    "verify/1": "verify q --source m",
    "identify/1": "identify q --source m",
    "identify.stored/1": "identify q",
    "reconcile/1": "reconcile --dry-run q",
    "recipes/1": "recipes",
    "recipes.check/1": "recipes nvfp4 --check",
    "recipes.live/1": "recipes mxfp4-gguf --live --seconds 0.1",
    "recipes.versions/1": "recipes mxfp4-ocp --versions",
    "recipes.presets/1": "recipes --presets",
    "agreement/1": "recipes --agreement",
    "formats/1": "formats",
    "formats.values/1": "formats e6m2",
    "fuzz/1": "fuzz --cases 2 --operations pack --host",
}


def documented(schema: str) -> list[str]:
    return ["schema", *re.findall("`(.*?)`", ROWS[schema])]


def test_every_schema_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    assert set(ROWS) == {*COMMANDS, "selftest/1"} == set(re.findall(r'"([a-z.]+/\d+)"', source))


@pytest.mark.parametrize("schema", COMMANDS)
def test_documents_have_their_entries(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.bert(tmp_path / "m")
    if " q" in COMMANDS[schema]:
        convert(tmp_path / "m", tmp_path / "q")
    monkeypatch.chdir(tmp_path)
    if schema == "apply/1":
        diff("m", "m", "p.patch")
    # Replace the comparison of all recipes by a constant, because it is slow and cli/test_recipes.py tests it.
    monkeypatch.setattr(agreement, "agreeing", lambda dtype: (("nvfp4-te", "nvfp4-torchao"),))
    assert main([*COMMANDS[schema].split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == f"fp4kit.{schema}" and list(found) == documented(schema)


def test_the_document_of_the_selftest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [selftest.Task("part", "task", lambda: selftest.Outcome(5, skipped=("reason",)))]
    monkeypatch.setattr(selftest, "plan", lambda engine, golden, quick: tasks)
    assert report(selftest.ComparedEngine(None), None, True, Output("selftest", json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == documented("selftest/1") and found["values"] == 5 and found["left_out"] == ["reason"]


def test_exit_codes_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = re.findall(r"\b\d+\b", capsys.readouterr().out.partition("Exit codes:")[2])
    rows = re.findall(r"^\| ([\d, ]+) \|", TEXT, re.MULTILINE)
    assert sorted(told) == sorted(", ".join(rows).split(", "))
