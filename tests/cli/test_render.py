"""Test the output of commands: tables, names, JSON documents, the progress line, and docs/command-line.md."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import synthetic
from rich.cells import cell_len
from together import together

from fp4kit import cli
from fp4kit.checkpoint import convert
from fp4kit.checkpoint.delta import diff
from fp4kit.cli import main
from fp4kit.cli import output as render
from fp4kit.cli.output import Output
from fp4kit.cli.recipes import report
from fp4kit.evidence import selftest
from fp4kit.evidence.golden import check as agreement

COLUMNS = ("tensor", "dtype", "#bytes")
ROWS = [(f"model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "BF16", str(10**i)) for i in range(2) for e in (0, 127)]


def test_a_narrow_terminal_gets_shorter_names() -> None:
    assert render.table_lines(COLUMNS, ROWS[:2]) == [
        "tensor                                           dtype  bytes",
        "model.layers.0.mlp.experts.0.gate_proj.weight    BF16       1",
        "model.layers.0.mlp.experts.127.gate_proj.weight  BF16       1",
    ]
    assert render.table_lines(COLUMNS, ROWS[:2], 56) == [
        "tensor                                      dtype  bytes",
        "model.layers.0.m…xperts.0.gate_proj.weight  BF16       1",
        "model.layers.0.m…erts.127.gate_proj.weight  BF16       1",
    ]


def test_names_that_would_be_alike_stand_on_lines_of_their_own() -> None:
    """If shortened names would look alike, each name gets a line of its own.

    A table of 44 columns leaves 30 for names of 41 characters, which differ only in the middle.
    """
    rows = [("a" * 20 + str(i) + "b" * 20, "BF16", "1") for i in range(3)]
    assert render.table_lines(COLUMNS, rows, 44) == [
        "tensor",
        "  dtype  bytes",
        "aaaaaaaaaaaaaaaaaaaa0bbbbbbbbbbbbbbbbbbbb",
        "  BF16       1",
        "aaaaaaaaaaaaaaaaaaaa1bbbbbbbbbbbbbbbbbbbb",
        "  BF16       1",
        "aaaaaaaaaaaaaaaaaaaa2bbbbbbbbbbbbbbbbbbbb",
        "  BF16       1",
    ]


def test_cells_that_do_not_fit_are_wrapped_with_their_titles() -> None:
    rows = [("lm_head.weight", "BF16", "shares its tensor amax with others"), ("norm.weight", "", "1-D")]
    assert render.table_lines(("tensor", "dtype", "reason"), rows, 30) == [
        "lm_head.weight",
        "  dtype BF16, reason shares",
        "  its tensor amax with others",
        "norm.weight",
        "  reason 1-D",
    ]


def drawn_rows(generator: random.Random) -> list[tuple[str, ...]]:
    letters = "ab.·層…😀e\u0301_ "
    columns = generator.randint(1, 5)

    def cell() -> str:
        return "".join(generator.choices(letters, k=generator.choice((0, 1, 5, 30, 90)))).strip()

    return [tuple(cell() for _ in range(columns)) for _ in range(generator.randint(1, 6))]


@together("seed", range(300))
def test_drawn_tables_fit(seed: int) -> None:
    """For random cells, wide characters included, no line of a table is too wide, ends in a space or is empty."""
    generator = random.Random(seed)
    rows = drawn_rows(generator)
    columns = tuple(generator.choice(("", "#")) + f"title {i}" for i in range(len(rows[0])))
    for width, ellipsis in itertools.product((20, 40, 60, 100), ("…", "...")):
        lines = render.table_lines(columns, rows, width, ellipsis)
        assert all(cell_len(line) <= width and line == line.rstrip() for line in lines)
    whole = render.table_lines(columns, rows)
    assert len(whole) == len(rows) + 1
    assert all(cell in line for row, line in zip(rows, whole[1:], strict=True) for cell in row)
    assert render.table_lines(columns, rows, 10_000) == whole


@together("width", range(1, 60))
def test_shortened(width: int) -> None:
    name = "model.layers.12.mlp.experts.127.gate_proj.weight"
    text = render.shortened(name, width)
    assert len(text) == min(width, len(name))
    head, _, tail = text.partition("…")
    assert (
        text == name
        if width >= len(name)
        else (name.startswith(head) and name.endswith(tail) and len(tail) >= len(head))
    )
    assert cell_len(render.shortened("層" * 40, width)) <= width
    assert cell_len(render.shortened(name, width, "...")) <= width


def test_wrapped() -> None:
    assert render.wrapped_lines("one two three", 8, "  ") == ["one two", "  three"]
    assert render.wrapped_lines("a/path/that/is/long and more", 10, "  ") == ["a/path/that/is/long", "  and more"]
    assert render.wrapped_lines("one two three", None) == ["one two three"]


def test_the_document() -> None:
    body = {
        "path": Path("a/b"),
        "sqnr": [np.inf, -np.inf, np.nan, np.float32(1.5)],
        "shape": (np.int64(2), 3),
        "no": None,
    }
    text = render.document_text("compare/1", {**body, "name": "\x1b[2J层\udcff"})
    found = json.loads(text)
    assert next(iter(found)) == "schema" and found["schema"] == "fp4kit.compare/1"
    assert found["sqnr"] == ["Infinity", "-Infinity", "NaN", 1.5] and [float(x) for x in found["sqnr"][:2]] == [
        np.inf,
        -np.inf,
    ]
    assert (found["path"], found["shape"], found["no"], found["name"]) == ("a/b", [2, 3], None, "\x1b[2J层\udcff")
    assert text.isascii() and "\x1b" not in text and text.endswith("}\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00 min"),
        (3599, "59:59 min"),
        (3600, "1:00 h"),
        (90000, "25:00 h"),
        (3e6, "34 days"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_text_of_the_progress_meter() -> None:
    meter = render.Meter("converting", 10**10, 0.0)
    assert meter.text(0.0) == "converting 0%  0 bytes of 10.0 GB"
    meter.add(37 * 10**8)
    assert meter.text(3.0) == "converting 37%  3.7 GB of 10.0 GB  1.2 GB/s  5 s left"
    assert meter.text(20.0) == "converting 37%  3.7 GB of 10.0 GB", "nothing came for longer than the window"
    meter.add(63 * 10**8)
    assert meter.text(21.0) == "converting 100%  10.0 GB of 10.0 GB  6.3 GB/s  0 s left"
    assert render.Meter("comparing", 0, 0.0).text(1.0) == "comparing 100%  0 bytes of 0 bytes"


def test_options_decide_what_goes_out(capsys: pytest.CaptureFixture[str]) -> None:
    for options, out, err in (
        ({}, "line\nname\na\n", "fp4kit x: note\n"),
        ({"json": True}, '{\n  "schema": "fp4kit.x/1"\n}\n', "fp4kit x: note\n"),
        ({"quiet": True}, "", ""),
        ({"json": True, "quiet": True}, '{\n  "schema": "fp4kit.x/1"\n}\n', ""),
    ):
        output = Output("x", **options)  # type: ignore[arg-type]
        output.line("line")
        output.table(("name",), [("a",)])
        output.table(("name",), [])
        output.document("x/1", {})
        output.note("note")
        assert capsys.readouterr() == (out, err)


TEXT = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
DOCUMENTED = {
    schema: keys for schema, keys in re.findall(r"^\| `fp4kit\.(.*?)` \| .*? \| (.*) \|$", TEXT, re.MULTILINE)
}
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
    "recipes.check/1": "recipes nvfp4-te --check",
    "recipes.live/1": "recipes mxfp4-gguf --live --seconds 0.1",
    "recipes.versions/1": "recipes mxfp4-ocp --versions",
    "recipes.presets/1": "recipes --presets",
    "agreement/1": "recipes --agreement",
    "formats/1": "formats",
    "formats.values/1": "formats e6m2",
    "fuzz/1": "fuzz --cases 2 --operations pack --host",
}


def documented(schema: str) -> list[str]:
    return ["schema", *re.findall("`(.*?)`", DOCUMENTED[schema])]


def test_every_schema_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    assert set(DOCUMENTED) == {*COMMANDS, "selftest/1"} == set(re.findall(r'"([a-z.]+/\d+)"', source))


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
