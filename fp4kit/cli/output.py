"""Where the results of a command go: text or JSON on stdout, notes and progress on stderr, and the last word."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from fp4kit.cli import render
from fp4kit.cli.progress import Tick, progress


class Stopped(BaseException):
    """A signal, or a reader of stdout that went away (SIGPIPE), ends the command. No Exception: nothing is to swallow
    it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OutputError(OSError):
    """Standard output cannot be written to, because of a full disk for instance."""


@dataclass(frozen=True)
class Output:
    """What the options --json and --quiet leave of a command's output.

    command: its name, with which notes begin. Text goes out without either option, a JSON document with --json;
    progress and
        notes go to stderr unless --quiet, progress only where that is a terminal.
    """

    command: str
    json: bool = False
    quiet: bool = False

    @property
    def text(self) -> bool:
        """Whether text is wanted."""
        return not (self.json or self.quiet)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, see render.table; nothing if it has no rows."""
        if self.text and rows:
            width = _width()
            self._print(render.table(columns, rows, width, "…" if _encodes("…") else "..."))

    def line(self, text: str = "") -> None:
        """Print a line of text, broken at spaces where the terminal is narrower."""
        if self.text:
            self._print(render.wrapped(text, _width(), "  "))

    def verbatim(self, text: str) -> None:
        """Print text as it is, such as a program."""
        if self.text:
            self._print([text])

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """With --json, print ``body`` as the one document of the command; see render.document."""
        if self.json:
            self._print([render.document(schema, body).removesuffix("\n")])

    def note(self, text: str) -> None:
        """Say something on stderr that is no result."""
        if not self.quiet:
            say(f"fp4kit {self.command}: {text}")

    def progress(self, what: str, total: int) -> AbstractContextManager[Tick]:
        """Yield a function that counts bytes, which are shown on a terminal."""
        return progress(what, total, not self.quiet and sys.stderr.isatty())

    def _print(self, lines: Sequence[str]) -> None:
        write("".join(f"{line}\n" for line in lines))


def write(text: str = "") -> None:
    """Write to stdout, and flush it. Raises Stopped if nobody reads it any more, OutputError if it cannot be
    written.
    """
    try:
        sys.stdout.flush()
        if hasattr(sys.stdout, "buffer"):
            _write_all(text.encode(sys.stdout.encoding, sys.stdout.errors or "strict"))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise Stopped(signal.SIGPIPE) from None
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from None


def _write_all(data: bytes) -> None:
    """Write below the text layer of stdout, which drops what an unbuffered one (python -u) does not take at once."""
    while data:
        data = data[sys.stdout.buffer.write(data) :]


def say(text: str) -> None:
    """Write one line to stderr, if that is still there."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _width() -> int | None:
    """Columns of the terminal that stdout is, or None."""
    return max(shutil.get_terminal_size().columns, 20) if sys.stdout.isatty() else None


def _encodes(text: str) -> bool:
    """Whether stdout can write ``text``."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
