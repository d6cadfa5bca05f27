"""Test the commands under real signals and with output streams that fail, such as full disks.

They print no traceback, exit with a documented code, and report truly what is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive, half
from processes import (
    CODES,
    MKDIR,
    RENAME,
    START,
    WORDS,
    Run,
    command,
    content,
    ended,
    environment,
    events,
    on_terminal,
    read_to_the_end,
    signalled,
    with_terminal,
)

from fp4kit import startup
from fp4kit.checkpoint import convert, staging

ONE = [signal.SIGINT, *exhaustive(number for number in CODES if number != signal.SIGINT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    synthetic.bert(folder / "m")
    return folder


@pytest.fixture(scope="module")
def moments(model: Path) -> list[str]:
    """Return the audit events of one undisturbed conversion, at which the tests send signals."""
    return events(model, "convert", model / "m", model / "whole")


def check_moment(model: Path, folder: Path, last: int, number: signal.Signals, after: tuple[str, str] = START) -> str:
    """Run a conversion that receives the signal `number` at event number `last`. Check its messages and files.

    Return "start" if the signal came before fp4kit had started, "nothing" if the run was not finished, "complete" if
    the result was complete at the signal, or "over" if the command ended before the signal.

    after: the event that counts as event 1 (see processes.signalled).
    """
    out = folder / "out"
    run = signalled(folder, last, number, "convert", model / "m", out, after=after)
    assert "Traceback" not in run.err and "ignored" not in run.err, run.err
    left = [path.name for path in folder.iterdir() if path.name.startswith((".out", "out"))]
    if run.code == 0:  # the command finished before the signal
        assert left == ["out"] and "wrote" in run.out and run.err == ""
        state = "over"
    elif run.code == -number:  # the signal ended Python while it started, before fp4kit handled signals
        assert left == [] and run.err == "" and number != signal.SIGINT
        state = "start"
    elif run.err == "fp4kit: interrupted while it started; nothing was written\n":
        assert left == [] and run.code == 130
        state = "start"
    elif run.err == f"fp4kit convert: {WORDS[number]}; {out} is complete\n":
        assert left == ["out"] and run.code == CODES[number]
        state = "complete"
    else:
        kept = f"; {folder / '.out.partial'} is left, {staging.recovery_advice(out)}" if left else ""
        words = (f"fp4kit convert: {WORDS[number]}; nothing was written as {out}{kept}\n", f"fp4kit: {WORDS[number]}\n")
        assert run.err in words and left in ([], [".out.partial"]) and run.code == CODES[number]
        state = "nothing"
    if "out" in left:
        assert content(out) == content(model / "whole")
    return state


PHASES = (  # the signal comes just before this audit event
    ("import", START, 1, "start"),
    ("parse", ("import", "locale"), 1, "nothing"),
    ("mkdir", MKDIR, 1, "nothing"),
    ("lock", MKDIR, 2, "nothing"),
    ("write", MKDIR, 12, "nothing"),
    ("rename", RENAME, 1, "nothing"),
    ("sync", RENAME, 2, "complete"),
)


@pytest.mark.parametrize(
    ("after", "last", "state"),
    [
        pytest.param(*phase, id=name, marks=pytest.mark.exhaustive if name in ("parse", "lock", "sync") else ())
        for name, *phase in PHASES
    ],
)
@pytest.mark.parametrize("number", ONE, ids=lambda n: n.name)
def test_signal_in_each_phase(
    model: Path,
    moments: list[str],
    tmp_path: Path,
    number: signal.Signals,
    after: tuple[str, str],
    last: int,
    state: str,
) -> None:
    assert check_moment(model, tmp_path, last, number, after) == state


def spread(moments: list[str], count: int) -> list[tuple[int, tuple[str, str]]]:
    """Return moments at which to send a signal, as (number of the event, event that counts as event 1).

    A quarter of `count` moments is evenly spaced over the start, and the rest over the work. All events from the final
    rename on are added.
    """
    work = next(i for i, event in enumerate(moments) if event.startswith("os.mkdir ")) - 40
    end = next(i for i, event in enumerate(moments) if event.startswith("os.rename "))
    drawn = (*np.linspace(1, work, count // 4, dtype=int), *np.linspace(work, end, count - count // 4, dtype=int))
    return [(int(last), START) for last in drawn] + [(last, RENAME) for last in range(1, len(moments) - end + 1)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM], ids=lambda n: n.name)
def test_signals_at_every_few_moments(model: Path, moments: list[str], tmp_path: Path, number: signal.Signals) -> None:
    found = set()
    for i, (last, after) in enumerate(spread(moments, 6)):
        (tmp_path / str(i)).mkdir()
        found.add(check_moment(model, tmp_path / str(i), last, number, after))
    assert {"start", "nothing", "complete"} <= found


def test_a_signal_that_the_parent_ignores_is_ignored(model: Path, moments: list[str], tmp_path: Path) -> None:
    """A signal that is ignored when the command starts, as under nohup, stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert check_moment(model, tmp_path, 1, signal.SIGHUP, MKDIR) == "over"
    finally:
        signal.signal(signal.SIGHUP, before)


DRIVER = """
import os, signal, sys, time
from fp4kit import startup
from fp4kit.cli import command as guard, convert, main
startup.COMMAND = True
{code}
status = main(sys.argv[1:])
{then}
sys.exit(status)
"""


def driven(code: str, *arguments: object, then: str = "") -> Run:
    """Run the command in a new process that executes the Python text `code` before it and `then` after it."""
    words = [sys.executable, "-c", DRIVER.format(code=code, then=then), *map(str, arguments)]
    process = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    return Run(process.returncode, process.stdout, process.stderr)


def test_a_signal_in_a_destructor_is_not_lost(model: Path, tmp_path: Path) -> None:
    code = """
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
execute = convert.execute
def replaced(*arguments):
    Late()
    time.sleep(2)  # the signal comes again before that
    return execute(*arguments)
convert.execute = replaced
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    assert run.code == 130
    assert run.err.startswith(f"fp4kit convert: interrupted; nothing was written as {tmp_path / 'out'}")


@pytest.mark.exhaustive
def test_a_second_signal_breaks_off_the_cleaning_up_and_says_what_is_left(model: Path, tmp_path: Path) -> None:
    # The first signal comes while the result is flushed, the others during the cleaning up.
    code = """
from fp4kit.checkpoint import staging
def slow(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)  # within _REPEAT_WINDOW (0.5 s): counts as the first signal
    print("goes on", flush=True)
    time.sleep(0.7)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
staging.Stage.is_kept_after = slow
staging.sync_directory = lambda path: os.kill(os.getpid(), signal.SIGINT)
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.partial"
    assert run.out.endswith("goes on\n")
    assert (run.code, run.err) == (
        130,
        (
            f"fp4kit convert: interrupted; nothing was written as {tmp_path / 'out'}; {left} is left, "
            f"{staging.recovery_advice(tmp_path / 'out')}\n"
        ),
    )
    run = ended(command("convert", "--remove-stale", tmp_path / "out"))
    assert run.code == 0 and not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", ONE, ids=lambda n: n.name)
def test_a_signal_while_python_shuts_down_changes_nothing(model: Path, number: signal.Signals) -> None:
    code = f"import atexit; atexit.register(os.kill, os.getpid(), {int(number)})"
    run = driven(code, "compare", model / "m", model / "m")
    assert (run.code, run.err) == (0, "") and run.out.endswith("equal\n")
    kill = f"os.kill(os.getpid(), {int(number)})"
    assert driven("", "compare", model / "m", model / "m", then=kill)[0::2] == (0, "")
    assert driven("", "inspect", "nowhere", then=kill).code == 2


def test_a_forked_worker_dies_of_the_signal_in_silence(model: Path, tmp_path: Path) -> None:
    code = """
def forked(*arguments):
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    raise ValueError(f"the worker ended by {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
convert.execute = forked
"""
    assert driven(code, "convert", model / "m", tmp_path / "out") == (
        2,
        "",
        "fp4kit convert: the worker ended by -15\n",
    )


def test_a_broken_pipe_elsewhere_is_an_error(model: Path, tmp_path: Path) -> None:
    code = """
def broken(*arguments):
    raise BrokenPipeError(32, "Broken pipe")
convert.execute = broken
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    assert (run.code, run.err) == (2, "fp4kit convert: [Errno 32] Broken pipe\n")


def test_a_defect_is_no_difference(model: Path) -> None:
    """An internal error must not exit with code 1, which means that checkpoints differ."""
    code = """
from fp4kit.cli import identify
identify._print_checkpoint = lambda *arguments: 1 / 0
"""
    run = driven(code, "inspect", model / "m")
    assert run.code == 2 and "Traceback" in run.err
    assert run.err.endswith(
        "fp4kit inspect: a defect of fp4kit, please report it: ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["-m"], ["python", "-m", "fp4kit", "inspect"], True),
        (["-m"], ["python", "-X", "dev", "-mfp4kit"], True),
        (["/venv/bin/fp4kit"], ["/venv/bin/python", "/venv/bin/fp4kit", "inspect"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["/venv/bin/fp4kit"], ["python", "-c", "from multiprocessing.spawn import spawn_main"], False),
        (["train.py", "fp4kit"], ["python", "train.py", "fp4kit"], False),
        ([], [], False),
    ],
)
def test_processes_that_count_as_the_command(argv: list[str], original: list[str], expected: bool) -> None:
    assert startup.is_command(argv, original) is expected


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    process = command(
        "inspect", large(tmp_path), "--all", *options, text=False, env=environment(PYTHONUNBUFFERED=unbuffered)
    )
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


def test_a_conversion_without_a_reader_is_complete(converted: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = ended(command("convert", converted / "m", tmp_path / "out", stdout=writer))
    os.close(writer)
    assert (run.code, run.err) == (141, f"fp4kit convert: standard output was closed; {tmp_path / 'out'} is complete\n")
    assert content(tmp_path / "out") == content(converted / "whole")


def test_a_full_disk_behind_stdout(converted: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = ended(command("convert", converted / "m", tmp_path / "out", stdout=full))
        message = f"fp4kit convert: standard output: No space left on device; {tmp_path / 'out'} is complete\n"
        assert (run.code, run.err) == (2, message)
        run = ended(command("--help", stdout=full))
        assert (run.code, run.err) == (2, "fp4kit: standard output: No space left on device\n")


@pytest.mark.parametrize("closed", half(["1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>&-"]))
def test_streams_that_were_closed_before(converted: Path, tmp_path: Path, closed: str) -> None:
    """If a standard stream is closed at the start, no output file may get its descriptor and receive messages."""
    script = f'exec "{sys.executable}" -m fp4kit convert "{converted / "m"}" "{tmp_path / "out"}" {closed}'
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert content(tmp_path / "out") == content(converted / "whole")


@pytest.mark.exhaustive
def test_a_terminal_of_60_columns(converted: Path, tmp_path: Path) -> None:
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


def test_interrupted_on_a_terminal(tmp_path: Path, converted: Path) -> None:
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
