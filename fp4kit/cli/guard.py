"""Run a command so that signals, closed pipes and errors end it with an exit code and one line that says what happened.
This line is the last that the command writes to stderr, and is called the last line.

| exit code | meaning |
| --- | --- |
| 0 | done; compared checkpoints are equal |
| 1 | a difference was found |
| 2 | an error; one line on stderr says which |
| 129, 130, 143 | stopped by SIGHUP, SIGINT (Ctrl-C), SIGTERM |
| 141 | stopped because nobody reads standard output any more (SIGPIPE) |
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fp4kit.cli.output import OutputError, Stopped, say, write
from fp4kit.storage.files import shown

DONE, DIFFERENT, ERROR = 0, 1, 2
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_WORDS[signal.SIGPIPE] = "standard output was closed"
# A second signal within this many seconds is ignored, because a terminal and a parent process may each send a signal
# for a single Ctrl-C.
_REPEAT_WINDOW = 0.5


class GuardedCommand:
    """The name and destination of a running command, for the last line on stderr if the command fails.

    name: the name of the command; None before the arguments are parsed.
    destination: the directory or file that the command will create; None if it creates none.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.destination: Path | None = None

    def write_last_line(self, text: str) -> None:
        """Write the last line to stderr: "fp4kit", the command's name if it is known, and ``text``."""
        prefix = f"fp4kit {self.name}" if self.name else "fp4kit"
        say(f"{prefix}: {shown(' '.join(text.split()))}")

    def outcome(self, stopped: bool) -> str:
        """Return a clause for the last line that says what became of the destination of a command that ended early."""
        if self.destination is None:
            return ""
        from fp4kit.checkpoint import staging  # imported already by every command that has a destination

        if staging.is_published(self.destination):
            return f"; {self.destination} is complete"
        partial = staging.partial_of(self.destination)
        is_left = staging.is_partial(partial) and not staging.is_live(partial)
        remainder = f"; {partial} is left, {staging.recovery_advice(self.destination)}" if is_left else ""
        return f"; nothing was written as {self.destination}{remainder}" if stopped else remainder


class _Signals:
    """Handle SIGINT, SIGTERM and SIGHUP: raise Stopped if one of them arrives while a command runs.

    `install` begins to handle signals, and `fix_exit_code` marks the end of the command.

    keep_handling: True if the process ends with the command. A later signal then ends it with the command's exit code.
        False to restore the old handlers after the command.
    """

    def __init__(self, keep_handling: bool) -> None:
        self._keep_handling, self._process = keep_handling, os.getpid()
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook
        self._since = 0.0
        self._ignoring = False  # True while the last line on stderr is written
        self.number: int | None = None  # the first signal received
        self.code: int | None = None  # the exit code, once the command has ended

    def install(self) -> None:
        """Start to handle SIGINT, SIGTERM and SIGHUP, except those that the parent process ignores (as nohup does)."""
        if threading.current_thread() is not threading.main_thread():
            return
        sys.unraisablehook = self._unraisable
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)

    def stop_listening(self, number: int) -> int:
        """Ignore signals from now on, so that the last line can be written."""
        self._ignoring = True
        return self.number or number

    def fix_exit_code(self, code: int) -> None:
        """Store the exit code of the command."""
        self.code = code
        if not self._keep_handling:
            sys.unraisablehook = self._hook
            for number, before in self._before.items():
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal ``number``: raise Stopped while the command runs."""
        if os.getpid() != self._process:  # in a forked worker: die as without this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.code is not None:
            os._exit(self.code)
        now = time.monotonic()
        if not self._ignoring and (self.number is None or now - self._since > _REPEAT_WINDOW):
            self.number, self._since = self.number or number, now
            raise Stopped(number)

    def _unraisable(self, unraisable: Any) -> None:
        """Handle an exception that Python drops, such as an exception raised in a destructor."""
        # If the exception is Stopped, send the signal again, so that it is not lost.
        if isinstance(unraisable.exc_value, Stopped):
            self._since = -math.inf
            threading.Timer(0.01, os.kill, (self._process, unraisable.exc_value.number)).start()
        else:
            self._hook(unraisable)


def run(command: Callable[[GuardedCommand], int], process: bool) -> int:
    """Run ``command`` and return its exit code: 2 after an error, 128 + N after signal N, otherwise the command's
    own.
    """
    task, signals = GuardedCommand(), _Signals(process)
    try:
        signals.install()
        code = _run_command(command, task, signals)
        signals.fix_exit_code(code)
    except Stopped as stop:  # the signal came before or after the command, or while an error was being reported
        code = _stopped(task, signals, stop.number)
        signals.fix_exit_code(code)
    return code


def _run_command(command: Callable[[GuardedCommand], int], task: GuardedCommand, signals: _Signals) -> int:
    """Run the command and return its exit code."""
    try:
        code = command(task)
        write()  # flush what the command's libraries have printed
        return code
    except (Stopped, KeyboardInterrupt) as stop:
        return _stopped(task, signals, getattr(stop, "number", signal.SIGINT))
    except Exception as error:
        if signals.number is not None:  # the error is a consequence of the signal
            return _stopped(task, signals, signals.number)
        return _failed(task, signals, error)


def _stopped(task: GuardedCommand, signals: _Signals, number: int) -> int:
    """Write the last line about the signal that stopped a command, and return 128 + the number of the signal."""
    number = signals.stop_listening(number)
    if number == signal.SIGPIPE:
        _drop_stdout()
    if number != signal.SIGPIPE or task.destination is not None:
        task.write_last_line(_WORDS[signal.Signals(number)] + task.outcome(stopped=True))
    return 128 + number


def _failed(task: GuardedCommand, signals: _Signals, error: Exception) -> int:
    """Write the last line about the error that ended a command, and return 2, the exit code for errors."""
    signals.stop_listening(0)
    if isinstance(error, OutputError):
        _drop_stdout()
    if not isinstance(error, (OSError, ValueError, TypeError, MemoryError)):
        traceback.print_exception(error)
    message = _described(error)
    # Do not append outcome() to a message that recommends --remove-stale: outcome() would recommend --resume, which may
    # be what failed.
    has_advice = "--remove-stale" in message
    task.write_last_line(message if has_advice else message + task.outcome(stopped=False))
    return ERROR


def _described(error: Exception) -> str:
    """Return a sentence about an exception for the last line on stderr."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory; {error}".removesuffix("; ")
    if isinstance(error, (OSError, ValueError, TypeError)):
        return str(error)
    return f"a defect of fp4kit, please report it: {type(error).__name__}: {error}"


def _drop_stdout() -> None:
    """Redirect stdout to the null device after writing to it has failed."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
