"""Run the fp4kit command in separate processes: with signals at chosen moments, with pipes and on terminals.

An audit hook counts events in the process: files opened, modules imported, directories made and renamed. The hook sends
the signal to its own process at the event with a given number, so that every run is interrupted at the same moment.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from fp4kit.cli import main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
START = ("import", "fp4kit.ops")  # fp4kit.startup has been imported before this event
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


for _number in CODES:
    # A shell starts background jobs with ignored signals, and the tested command would inherit that.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL if _number != signal.SIGINT else signal.default_int_handler)


class Run(NamedTuple):
    """The exit code and the output of a process that has ended.

    Attributes:
        code: the exit code; -N if signal N ended the process.
        out: the text on stdout.
        err: the text on stderr.
    """

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that imports this checkout. `more` adds variables or overrides them."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def command(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start fp4kit with the arguments in a separate process. options: arguments of Popen."""
    words = [sys.executable, "-m", "fp4kit", *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(), **options}
    return subprocess.Popen(words, **given)  # type: ignore[call-overload, no-any-return]


def in_this_process(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Return a function that runs the fp4kit command in this process and returns a Run.

    This takes a tenth of the time of a separate process.
    """
    return lambda *arguments: Run(main([str(argument) for argument in arguments]), *capsys.readouterr())


def ended(process: subprocess.Popen[str]) -> Run:
    """Wait until a process has ended and return its exit code and output.

    Raise subprocess.TimeoutExpired after 60 seconds.
    """
    out, err = process.communicate(timeout=60)
    return Run(process.returncode, out, err)


MKDIR, RENAME = ("os.mkdir", ".out.partial"), ("os.rename", ".out.partial")


def signalled(
    folder: Path, last: int, number: int, *arguments: object, after: tuple[str, str] = START, log: str = ""
) -> Run:
    """Run fp4kit and send it the signal `number` at its event number ``last``; -1 for no signal.

    Args:
        folder: where to write the hook that counts events.
        arguments: the command line.
        last: the number of the event at which the signal is sent; -1 for no signal.
        number: the number of the signal.
        after: (name of the event that counts as event 1, a part of the first argument of this event).
        log: the path of a file to which all events are written, if given.
    """
    (folder / "hook").mkdir(exist_ok=True)
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    moment = {"FP4KIT_TEST_MOMENT": json.dumps([*after, last, number, log]), "PYTHONPATH": f"{folder / 'hook'}:{ROOT}"}
    return ended(command(*arguments, env=environment(**moment)))


def events(folder: Path, *arguments: object) -> list[str]:
    """Return the events of a process that runs fp4kit with these arguments, starting at the import of fp4kit.ops.

    No signal is sent. Raise AssertionError if the process fails.
    """
    run = signalled(folder, -1, 0, *arguments, log=str(folder / "log"))
    assert run.code == 0, run.err
    return (folder / "log").read_text().splitlines()


def content(folder: Path) -> dict[str, bytes]:
    """Return {relative path: bytes} of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# Make the terminal on stdin the controlling terminal of a new session, then become fp4kit.
EXECUTE_ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "fp4kit", *sys.argv[1:]])
"""


def with_terminal(columns: int, *arguments: object) -> tuple[subprocess.Popen[bytes], int]:
    """Start fp4kit with these arguments on a pseudo-terminal. Return the process and the terminal's other end.

    columns: the width of the terminal.

    The terminal is made without os.fork, because JAX forbids forks.
    """
    other_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-c", EXECUTE_ON_TERMINAL, *map(str, arguments)]
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=inherited)
    os.close(terminal)
    return process, other_end


def read_to_the_end(other_end: int) -> bytes:
    """Return everything that was written to a pseudo-terminal until its last process ended.

    Args:
        other_end: the file descriptor that with_terminal returned.
    """
    written = b""
    while True:
        try:
            piece = os.read(other_end, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            break
        if not piece:
            break
        written += piece
    os.close(other_end)
    return written


@cache
def on_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Run fp4kit on a pseudo-terminal of `columns` columns; return its exit code and its output.

    A call with arguments of an earlier call returns that call's result.
    """
    process, other_end = with_terminal(columns, *arguments)
    written = read_to_the_end(other_end)
    return process.wait(60), written.decode()
