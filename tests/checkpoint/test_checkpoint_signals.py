"""Real signals and real pipes: no traceback, an exit code that is documented, a last word that is true.

A hook for audit events (files opened, modules imported, directories made and renamed) sends the signal to its own process at the
event of a given number, so that moments are the same in every run.
"""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import synthetic

from fp4kit import startup
from fp4kit.checkpoint import convert, leftovers, staging

ROOT = Path(__file__).resolve().parents[2]
START = ("import", "fp4kit.ops")  # by then fp4kit.startup has been imported
HOOK = """
import json, os, sys
first, text, last, number, log = json.loads(os.environ["FP4KIT_TEST_MOMENT"])
log = log and os.open(log, os.O_WRONLY | os.O_CREAT)
count = 0
def hook(event, arguments):
    global count
    count += bool(count) or (event == first and text in str(arguments[0]))
    if count and log:
        os.write(log, f"{event} {arguments[:1]}\\n".encode())
    if count == last:
        count += 1
        os.kill(os.getpid(), number)
sys.addaudithook(hook)
"""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Run(NamedTuple):
    """What came of a process."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def command(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start fp4kit in a process of its own."""
    words = [sys.executable, "-m", "fp4kit", *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(), **options}
    return subprocess.Popen(words, **given)  # type: ignore[call-overload, no-any-return]


def ended(process: subprocess.Popen[str]) -> Run:
    out, err = process.communicate(timeout=60)
    return Run(process.returncode, out, err)


def signalled(folder: Path, last: int, number: int, *arguments: object, after: tuple[str, str] = START, log: str = "") -> Run:
    """Run fp4kit with a signal at its event of number ``last``; 1 is the first of ``after``, an event and what it is about."""
    (folder / "hook").mkdir(exist_ok=True)
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    moment = {"FP4KIT_TEST_MOMENT": json.dumps([*after, last, number, log]), "PYTHONPATH": f"{folder / 'hook'}:{ROOT}"}
    return ended(command(*arguments, env=environment(**moment)))


def events(folder: Path, *arguments: object) -> list[str]:
    """The events of a run without a signal, from the start of the imports on."""
    run = signalled(folder, -1, 0, *arguments, log=str(folder / "log"))
    assert run.code == 0, run.err
    return (folder / "log").read_text().splitlines()


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    synthetic.bert(folder / "m")
    return folder


@pytest.fixture(scope="module")
def moments(model: Path) -> list[str]:
    """The events of one conversion; its result is what every whole result must equal."""
    return events(model, "convert", model / "m", model / "whole")


def check_moment(model: Path, folder: Path, last: int, number: signal.Signals, after: tuple[str, str] = START) -> str:
    """Convert with a signal at one moment; return what became of the destination."""
    out = folder / "out"
    run = signalled(folder, last, number, "convert", model / "m", out, after=after)
    assert "Traceback" not in run.err and "ignored" not in run.err, run.err
    left = [path.name for path in folder.iterdir() if path.name.startswith((".out", "out"))]
    if run.code == 0:  # the command was over
        assert left == ["out"] and "wrote" in run.out and run.err == ""
        state = "over"
    elif run.code == -number:  # the system's own way, while Python starts
        assert left == [] and run.err == "" and number != signal.SIGINT
        state = "start"
    elif run.err == "fp4kit: interrupted while it started; nothing was written\n":
        assert left == [] and run.code == 130
        state = "start"
    elif run.err == f"fp4kit convert: {WORDS[number]}; {out} is complete\n":
        assert left == ["out"] and run.code == CODES[number]
        state = "complete"
    else:
        words = (f"fp4kit convert: {WORDS[number]}; nothing was written as {out}\n", f"fp4kit: {WORDS[number]}\n")
        assert run.err in words and left == [] and run.code == CODES[number]
        state = "nothing"
    if "out" in left:
        assert content(out) == content(model / "whole")
    return state


MKDIR, RENAME = ("os.mkdir", ".out.partial-"), ("os.rename", ".out.partial-")
PHASES = (  # the signal comes before the event of the audit takes place
    ("import", START, 1, "start"),
    ("parse", ("import", "locale"), 1, "start"),
    ("mkdir", MKDIR, 1, "nothing"),
    ("claim", MKDIR, 2, "nothing"),
    ("write", MKDIR, 4, "nothing"),
    ("rename", RENAME, 1, "nothing"),
    ("sync", RENAME, 2, "complete"),
)


@pytest.mark.parametrize(("after", "last", "state"), [phase[1:] for phase in PHASES], ids=[phase[0] for phase in PHASES])
@pytest.mark.parametrize("number", CODES, ids=lambda n: n.name)
def test_signal_in_each_phase(
    model: Path, moments: list[str], tmp_path: Path, number: signal.Signals, after: tuple[str, str], last: int, state: str
) -> None:
    assert check_moment(model, tmp_path, last, number, after) == state


def spread(moments: list[str], count: int) -> list[int]:
    """Moments evenly among the events of the start, and of the work."""
    work = next(i for i, event in enumerate(moments) if event.startswith("os.mkdir ")) - 40
    start, rest = np.linspace(1, work, count // 4, dtype=int), np.linspace(work, len(moments), count - count // 4, dtype=int)
    return [int(last) for last in (*start, *rest)]


def test_signals_at_many_moments(model: Path, moments: list[str], tmp_path: Path) -> None:
    signals = list(CODES)
    for i, last in enumerate(spread(moments, 18)):
        (tmp_path / str(i)).mkdir()
        check_moment(model, tmp_path / str(i), last, signals[i % 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", CODES, ids=lambda n: n.name)
def test_signals_at_every_few_moments(model: Path, moments: list[str], tmp_path: Path, number: signal.Signals) -> None:
    found = set()
    for i, last in enumerate(spread(moments, 160)):
        (tmp_path / str(i)).mkdir()
        found.add(check_moment(model, tmp_path / str(i), last, number))
    assert {"start", "nothing", "complete"} <= found


def test_a_signal_that_the_parent_ignores_is_ignored(model: Path, moments: list[str], tmp_path: Path) -> None:
    """As nohup does it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert check_moment(model, tmp_path, 1, signal.SIGHUP, MKDIR) == "over"
    finally:
        signal.signal(signal.SIGHUP, before)


DRIVER = """
import os, signal, sys, time
from fp4kit import startup
from fp4kit.cli import convert, guard, main
startup.COMMAND = True
{code}
sys.exit(main(sys.argv[1:]))
"""


def driven(code: str, *arguments: object) -> Run:
    """Run the command in a process that does ``code`` first."""
    words = [sys.executable, "-c", DRIVER.format(code=code), *map(str, arguments)]
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
    return execute(*arguments)
convert.execute = replaced
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    assert (run.code, run.err) == (130, f"fp4kit convert: interrupted; nothing was written as {tmp_path / 'out'}\n")


def test_a_second_signal_breaks_off_the_cleaning_up_and_says_what_is_left(model: Path, tmp_path: Path) -> None:
    code = """
import shutil
rmtree = shutil.rmtree
def slow(*arguments, **options):
    time.sleep(0.7)  # beyond what is taken for the same signal
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
shutil.rmtree = slow
from fp4kit.checkpoint import staging
staging.sync_directory = lambda path: (os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGINT), time.sleep(5))
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    assert (run.code, run.err) == (
        130,
        f"fp4kit convert: interrupted; nothing was written as {tmp_path / 'out'}; {left} is left, "
        f"fp4kit convert --remove-stale {tmp_path / 'out'} removes it\n",
    )
    run = ended(command("convert", "--remove-stale", tmp_path / "out"))
    assert run.code == 0 and not list(tmp_path.iterdir())


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
    assert driven(code, "convert", model / "m", tmp_path / "out") == (2, "", "fp4kit convert: the worker ended by -15\n")


def test_a_broken_pipe_elsewhere_is_an_error(model: Path, tmp_path: Path) -> None:
    code = """
def broken(*arguments):
    raise BrokenPipeError(32, "Broken pipe")
convert.execute = broken
"""
    run = driven(code, "convert", model / "m", tmp_path / "out")
    assert (run.code, run.err) == (2, "fp4kit convert: [Errno 32] Broken pipe\n")


def test_a_defect_is_no_difference(model: Path) -> None:
    """Exit code 1 would say that something differs."""
    code = """
from fp4kit.cli import inspect
inspect._print = lambda *arguments: 1 / 0
"""
    run = driven(code, "inspect", model / "m")
    assert run.code == 2 and "Traceback" in run.err
    assert run.err.endswith("fp4kit inspect: a defect of fp4kit, please report it: ZeroDivisionError: division by zero\n")


def large(folder: Path) -> Path:
    """A file whose listing is longer than a pipe holds."""
    synthetic.write_file(folder / "large.safetensors", {f"layer.{i:04}.weight": np.zeros(1, np.float32) for i in range(4000)})
    return folder / "large.safetensors"


@pytest.mark.parametrize("size", [0, 1, 5000, 70000])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_goes_away(tmp_path: Path, size: int, options: list[str]) -> None:
    process = command("inspect", large(tmp_path), *options, text=False)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(size)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()


@pytest.mark.parametrize("arguments", [["--help"], ["formats"], ["recipes", "--json"]], ids=" ".join)
def test_a_pipe_that_was_closed_before(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = ended(command(*arguments, stdout=writer))
    os.close(writer)
    assert (run.code, run.err) == (141, "")


def test_a_conversion_without_a_reader_is_complete(model: Path, moments: list[str], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("closed", ["1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", "2>&-"])
def test_streams_that_were_closed_before(model: Path, moments: list[str], tmp_path: Path, closed: str) -> None:
    """As if they were /dev/null: no file of the result takes their place."""
    script = f'exec "{sys.executable}" -m fp4kit convert "{model / "m"}" "{tmp_path / "out"}" {closed}'
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert content(tmp_path / "out") == content(model / "whole")


@cache
def on_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Exit code, and what the command writes on a terminal of so many columns."""
    code = f"import os, sys; os.set_blocking(1, True); os.execv(sys.executable, {[sys.executable, '-m', 'fp4kit', *arguments]!r})"
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
        os.environ.pop("COLUMNS", None)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execv(sys.executable, [sys.executable, "-c", code])
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode()


def test_a_terminal_of_60_columns(model: Path, tmp_path: Path) -> None:
    """Every line fits, every name is whole, and progress leaves an empty line."""
    synthetic.moe(tmp_path / "m")
    code, text = on_terminal(60, "convert", str(tmp_path / "m"), str(tmp_path / "out"))
    assert code == 0
    drawn = re.findall(r"\rconverting \d+%  [\d.]+ \w+ of [\d.]+ \w+[^\r]*", text)
    assert drawn and all(len(line) <= 60 for line in drawn)
    lines = text.replace("\r\n", "\n").rpartition("\r")[2].splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 60  # a path is not broken
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in lines
    code, text = on_terminal(60, "convert", str(tmp_path / "m"), str(tmp_path / "new"), "--dry-run", "--quiet")
    assert (code, text) == (0, "")


def test_interrupted_on_a_terminal(tmp_path: Path, model: Path) -> None:
    """Ctrl-C goes to the process from the terminal, and the terminal is left as it was: no cursor hidden, no colour."""
    x = {f"layers.{i}.weight": synthetic.random(str(i), (1024, 4096)) for i in range(6)}
    synthetic.write_model(tmp_path / "m", {}, x)
    child, terminal = pty.fork()
    if not child:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "fp4kit", "convert", str(tmp_path / "m"), str(tmp_path / "out")])
    written = b""
    while b"converting" not in written:
        written += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    os.close(terminal)
    assert b"\x1b" not in written and b"Traceback" not in written
    assert written.rpartition(b"\r ")[2].strip().endswith(f"interrupted; nothing was written as {tmp_path / 'out'}".encode())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


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
)  # fmt: skip
def test_what_is_the_command(argv: list[str], original: list[str], expected: bool) -> None:
    assert startup.is_command(argv, original) is expected


# ---- what killed runs leave ---------------------------------------------------------------------------------------------


def killed(model: Path, folder: Path) -> Path:
    """The partial directory that a killed run leaves."""
    run = signalled(folder, 1, signal.SIGKILL, "convert", model / "m", folder / "out", after=RENAME)
    assert run.code == -signal.SIGKILL
    (left,) = folder.glob(".out.partial-*")
    return left


def test_what_a_killed_run_left_is_reported_and_removable(model: Path, tmp_path: Path) -> None:
    left = killed(model, tmp_path)
    run = ended(command("convert", model / "m", tmp_path / "out", "--dry-run"))
    line = rf"fp4kit convert: {re.escape(str(left))} \([\d.]+ kB, \d+ s old\) was left by a killed run; to remove it: "
    assert re.fullmatch(line + re.escape(f"fp4kit convert --remove-stale {tmp_path / 'out'}") + "\n", run.err)
    assert run.code == 0 and left.exists()
    run = ended(command("convert", model / "m", tmp_path / "out", "--quiet"))
    assert run == (0, "", "") and left.exists()  # a run in spite of it
    run = ended(command("convert", "--remove-stale", tmp_path / "out", "--json"))
    assert run.code == 0 and not left.exists() and "removed" in run.err and str(left) in run.out
    assert (tmp_path / "out").exists() and ended(command("convert", "--remove-stale", tmp_path / "out")) == (0, "", "")


def test_directories_of_live_processes_are_let_alone(model: Path, tmp_path: Path) -> None:
    """By the lock that a run holds, and by the process in the name."""
    out, live = tmp_path / "out", subprocess.Popen(["sleep", "60"])
    named = tmp_path / f".out.partial-{live.pid}"
    named.mkdir()
    locked = tmp_path / ".out.partial-x"
    locked.mkdir()
    (tmp_path / ".out.partial-link").symlink_to(model)
    (tmp_path / ".out2.partial-1").mkdir()
    with leftovers.claimed(locked, out):
        assert leftovers.leftovers(out) == ()
        assert ended(command("convert", "--remove-stale", out)) == (0, "", "")
    live.kill()
    live.wait()
    assert [left.path for left in leftovers.leftovers(out)] == [named, locked]
    run = ended(command("convert", "--remove-stale", out))
    assert run.code == 0 and run.err.count("removed") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial-link", ".out2.partial-1"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a run on another machine cannot be told from a killed one: said, and not removed."""
    (tmp_path / ".out.partial-x").mkdir()

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(leftovers.fcntl, "flock", no_locks)
    (left,) = leftovers.leftovers(tmp_path / "out")
    assert left.kind == "unlockable"
    with synthetic.refused("a running process may be filling it; remove it yourself if none is"):
        leftovers.remove(left)
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")  # converting needs none
    assert leftovers.complete(tmp_path / "out")


def test_a_directory_taken_for_stale_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may lock it between its creation and the lock of its owner."""
    partial = tmp_path / ".out.partial-x"
    partial.mkdir()
    with leftovers.claimed(partial, tmp_path / "out"), synthetic.refused("another process has taken it for stale; run again"):
        with leftovers.claimed(partial, tmp_path / "out"):
            pass


def test_complete_is_what_this_process_renamed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out):
        assert not leftovers.complete(out)
    assert leftovers.complete(out) and leftovers.complete(Path(os.path.relpath(out)))
    out.rename(tmp_path / "away")
    out.mkdir()
    assert not leftovers.complete(out)


def test_age_and_size(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial-x"
    (left / "a").mkdir(parents=True)
    (left / "a" / "b").write_bytes(b"12345")
    for path in (left / "a" / "b", left / "a", left):
        os.utime(path, (0, time.time() - 7000))
    (found,) = leftovers.leftovers(tmp_path / "out")
    assert found.nbytes == 5 and 6999 < found.age < 7100
