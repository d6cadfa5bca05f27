"""Test the commands with output streams that fail: readers that go away, full disks, closed streams, narrow
terminals.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive, half
from processes import command, content, ended, environment, on_terminal, read_to_the_end, with_terminal

from fp4kit.checkpoint import convert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model `m` and its converted form `whole`."""
    folder = tmp_path_factory.mktemp("streams")
    synthetic.bert(folder / "m")
    convert(folder / "m", folder / "whole")
    return folder


def large(folder: Path) -> Path:
    """Write a checkpoint whose listing exceeds a pipe's buffer; return its path."""
    synthetic.write_file(
        folder / "large.safetensors", {f"layer.{i:04}.weight": np.zeros(1, np.float32) for i in range(4000)}
    )
    return folder / "large.safetensors"


READ = [(0, (), ""), (5000, ("--json",), "")]  # (bytes that are read, options, PYTHONUNBUFFERED)
READ += exhaustive([(1, (), "1"), (70000, (), ""), (0, ("--json",), "1"), (70000, ("--json",), "1")])


@pytest.mark.parametrize("case", READ, ids=str)
def test_a_reader_that_goes_away(tmp_path: Path, case: tuple[int, tuple[str, ...], str]) -> None:
    size, options, unbuffered = case
    process = command("inspect", large(tmp_path), *options, text=False, env=environment(PYTHONUNBUFFERED=unbuffered))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(size)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()


@pytest.mark.parametrize("arguments", [["recipes", "--json"], *exhaustive([["--help"], ["formats"]])], ids=" ".join)
def test_a_pipe_that_was_closed_before(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = ended(command(*arguments, stdout=writer))
    os.close(writer)
    assert (run.code, run.err) == (141, "")


def test_a_conversion_without_a_reader_is_complete(model: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = ended(command("convert", model / "m", tmp_path / "out", stdout=writer))
    os.close(writer)
    assert (run.code, run.err) == (141, f"fp4kit convert: standard output was closed; {tmp_path / 'out'} is complete\n")
    assert content(tmp_path / "out") == content(model / "whole")


def test_a_full_disk_behind_stdout(model: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = ended(command("convert", model / "m", tmp_path / "out", stdout=full))
        message = f"fp4kit convert: standard output: No space left on device; {tmp_path / 'out'} is complete\n"
        assert (run.code, run.err) == (2, message)
        run = ended(command("--help", stdout=full))
        assert (run.code, run.err) == (2, "fp4kit: standard output: No space left on device\n")


@pytest.mark.parametrize("closed", half(["1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>&-"]))
def test_streams_that_were_closed_before(model: Path, tmp_path: Path, closed: str) -> None:
    """If a standard stream is closed at the start, no output file may get its descriptor and receive messages."""
    script = f'exec "{sys.executable}" -m fp4kit convert "{model / "m"}" "{tmp_path / "out"}" {closed}'
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert content(tmp_path / "out") == content(model / "whole")


@pytest.mark.exhaustive
def test_a_terminal_of_60_columns(model: Path, tmp_path: Path) -> None:
    """On a narrow terminal, no line is too long, no name is cut, and the progress line is erased at the end."""
    synthetic.moe(tmp_path / "m")
    code, text = on_terminal(60, "convert", str(tmp_path / "m"), str(tmp_path / "out"))
    assert code == 0
    drawn = re.findall(r"\rconverting \d+%  [\d.]+ \w+ of [\d.]+ \w+[^\r]*", text)
    assert drawn and all(len(line) <= 60 for line in drawn)
    lines = text.replace("\r\n", "\n").rpartition("\r")[2].splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 60  # paths are not wrapped
    code, text = on_terminal(60, "convert", str(tmp_path / "m"), str(tmp_path / "new"), "--dry-run")
    lines = text.replace("\r\n", "\n").splitlines()
    assert code == 0 and max(map(len, lines)) <= 60 and "model.layers.1.mlp.experts.3.down_proj.weight" in lines
    code, text = on_terminal(60, "convert", str(tmp_path / "m"), str(tmp_path / "new"), "--dry-run", "--quiet")
    assert (code, text) == (0, "")


def test_interrupted_on_a_terminal(tmp_path: Path, model: Path) -> None:
    """Ctrl-C on a terminal ends the command with a last line that is true.

    Cursor and color of the terminal are unchanged.
    """
    x = {f"layers.{i}.weight": synthetic.random(str(i), (1024, 4096)) for i in range(6)}
    synthetic.write_model(tmp_path / "m", {}, x)
    process, other_end = with_terminal(80, "convert", tmp_path / "m", tmp_path / "out")
    written = b""
    while b"converting" not in written:
        written += os.read(other_end, 65536)
    os.write(other_end, b"\x03")
    written += read_to_the_end(other_end)
    assert process.wait(60) == 130
    assert b"\x1b" not in written and b"Traceback" not in written
    last, names = written.rpartition(b"\r ")[2], {path.name for path in tmp_path.iterdir()}
    assert f"interrupted; nothing was written as {tmp_path / 'out'}".encode() in last and names <= {"m", ".out.partial"}
