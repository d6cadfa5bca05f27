"""One guard around every command: signals, closed pipes and errors become an exit code and a last word that is true.

| code | |
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

from fp4kit.checkpoint.run import staging
from fp4kit.cli.output import OutputError, Stopped, say, write
from fp4kit.storage.errors import shown

DONE, DIFFERENT, ERROR = 0, 1, 2
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_WORDS[signal.SIGPIPE] = "standard output was closed"
_TWICE = 0.5  # seconds in which a signal is taken for the same one again: a terminal and a parent process both send it


class GuardedCommand:
    """What the guard knows of the command: its name, and the directory or file that it is to make (None: it makes
    none).
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.destination: Path | None = None

    def says(self, text: str) -> None:
        """Say how the command ended."""
        prefix = f"fp4kit {self.name}" if self.name else "fp4kit"
        say(f"{prefix}: {shown(' '.join(text.split()))}")

    def outcome(self, stopped: bool) -> str:
        """What has become of the destination."""
        if self.destination is None:
            return ""
        if staging.is_published(self.destination):
            return f"; {self.destination} is complete"
        partial = staging.partial_of(self.destination)
        is_left = staging.is_partial(partial) and not staging.is_live(partial)
        left = f"; {partial} is left, {staging.ways_on(self.destination)}" if is_left else ""
        return f"; nothing was written as {self.destination}{left}" if stopped else left


class _Signals:
    """Turns signals into Stopped while a command runs, and into a quiet exit once it is over."""

    def __init__(self, stays: bool) -> None:
        self._stays, self._process = stays, os.getpid()
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook
        self._since = 0.0
        self._deaf = False  # while the last word is said
        self.number: int | None = None  # of the first that came
        self.code: int | None = None  # of the command, once it is over

    def install(self) -> None:
        """Handle all signals but those that the parent process chose to ignore, as nohup does."""
        if threading.current_thread() is not threading.main_thread():
            return
        sys.unraisablehook = self._unraisable
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)

    def ending(self, number: int) -> int:
        """Hear no more signals until settle; return the first that came, ``number`` if none did."""
        self._deaf = True
        return self.number or number

    def settle(self, code: int) -> None:
        """Let no signal change the exit code any more; give the handlers back where the process is to go on."""
        self.code = code
        if not self._stays:
            sys.unraisablehook = self._hook
            for number, before in self._before.items():
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker, which dies as it would without handlers
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.code is not None:
            os._exit(self.code)
        now = time.monotonic()
        if not self._deaf and (self.number is None or now - self._since > _TWICE):
            self.number, self._since = self.number or number, now
            raise Stopped(number)

    def _unraisable(self, unraisable: Any) -> None:
        """Python drops what is raised in a destructor or a callback: send the signal again, for the code that
        follows.
        """
        if isinstance(unraisable.exc_value, Stopped):
            self._since = -math.inf
            threading.Timer(0.01, os.kill, (self._process, unraisable.exc_value.number)).start()
        else:
            self._hook(unraisable)


def run(command: Callable[[GuardedCommand], int], process: bool) -> int:
    """Run ``command`` and return its exit code; whatever ends it, say so in one line.

    process: whether the process ends with the command: then signals stay handled, lest one that comes while Python
    shuts down
        leaves a traceback.
    """
    task, signals = GuardedCommand(), _Signals(process)
    try:
        signals.install()
        code = _ended(command, task, signals)
        signals.settle(code)
    except Stopped as stop:  # it came before or after the command, or while an error was dealt with
        code = _stopped(task, signals, stop.number)
        signals.settle(code)
    return code


def _ended(command: Callable[[GuardedCommand], int], task: GuardedCommand, signals: _Signals) -> int:
    """Run the command; return its exit code."""
    try:
        code = command(task)
        write()  # whatever others have printed
        return code
    except (Stopped, KeyboardInterrupt) as stop:
        return _stopped(task, signals, getattr(stop, "number", signal.SIGINT))
    except Exception as error:
        if signals.number is not None:  # what broke because of the signal
            return _stopped(task, signals, signals.number)
        return _failed(task, signals, error)


def _stopped(task: GuardedCommand, signals: _Signals, number: int) -> int:
    """Say what a signal stopped, and what there is now. A reader that went away wants to hear nothing but that."""
    number = signals.ending(number)
    if number == signal.SIGPIPE:
        _drop_stdout()
    if number != signal.SIGPIPE or task.destination is not None:
        task.says(_WORDS[signal.Signals(number)] + task.outcome(stopped=True))
    return 128 + number


def _failed(task: GuardedCommand, signals: _Signals, error: Exception) -> int:
    """Say what went wrong; what users cannot cause is a defect, and shown with its traceback."""
    signals.ending(0)
    if isinstance(error, OutputError):
        _drop_stdout()
    if not isinstance(error, (OSError, ValueError, TypeError, MemoryError)):
        traceback.print_exception(error)
    said = _described(error)
    advised = "--remove-stale" in said  # of what is left: outcome's advice, to go on with it, may be what was refused
    task.says(said if advised else said + task.outcome(stopped=False))
    return ERROR


def _described(error: Exception) -> str:
    """One error in words."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory; {error}".removesuffix("; ")
    if isinstance(error, (OSError, ValueError, TypeError)):
        return str(error)
    return f"a defect of fp4kit, please report it: {type(error).__name__}: {error}"


def _drop_stdout() -> None:
    """Send what is still to be written to the null device: Python tries once more when it exits."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
