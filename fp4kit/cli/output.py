"""Print the output of a command: results as text or JSON on stdout; notes, progress and the last line on stderr."""

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
    """The exception that ends a command, because a signal arrived or because nobody reads stdout any more (SIGPIPE).

    Stopped derives from BaseException, so that no ``except Exception`` catches it.

    number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OutputError(OSError):
    """The error that is raised if writing to standard output fails, for example because the disk is full."""


@dataclass(frozen=True)
class Output:
    """Print the output of a command in the form that the options --json and --quiet select.

    command: the name of the command, with which every note begins.
    json: True to print one JSON document instead of text.
    quiet: True to print no text, notes or progress. A JSON document is printed nevertheless.
    """

    command: str
    json: bool = False
    quiet: bool = False

    @property
    def text(self) -> bool:
        """True if text is printed, because neither --json nor --quiet was given."""
        return not (self.json or self.quiet)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table that fits the terminal."""
        if self.text and rows:
            width = _width()
            self._print(render.table(columns, rows, width, "…" if _encodes("…") else "..."))

    def line(self, text: str = "") -> None:
        """Print a line of text."""
        if self.text:
            self._print(render.wrapped(text, _width(), "  "))

    def verbatim(self, text: str) -> None:
        """Print text such as a program, without breaking its lines. Do nothing if --json or --quiet was given."""
        if self.text:
            self._print([text])

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """Print ``body`` as the command's JSON document if --json was given; otherwise do nothing."""
        if self.json:
            self._print([render.document(schema, body).removesuffix("\n")])

    def note(self, text: str) -> None:
        """Print a remark on stderr, unless --quiet was given. A remark is not part of the result."""
        if not self.quiet:
            say(f"fp4kit {self.command}: {text}")

    def progress(self, what: str, total: int) -> AbstractContextManager[Tick]:
        """Return a context manager that shows a line of progress and yields a function to call while work is done."""
        return progress(what, total, not self.quiet and sys.stderr.isatty())

    def _print(self, lines: Sequence[str]) -> None:
        write("".join(f"{line}\n" for line in lines))


def write(text: str = "") -> None:
    """Write text to stdout and flush it."""
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
    """Write all bytes to the binary stream of stdout."""
    # The text stream is not used, because an unbuffered stdout (python -u) drops bytes that the system does not accept
    # at once.
    while data:
        data = data[sys.stdout.buffer.write(data) :]


def say(text: str) -> None:
    """Write one line to stderr. Errors are ignored, because stderr may be closed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _width() -> int | None:
    """Return the width of the terminal in columns, at least 20, or None if stdout is not a terminal."""
    return max(shutil.get_terminal_size().columns, 20) if sys.stdout.isatty() else None


def _encodes(text: str) -> bool:
    """Return whether the encoding of stdout can represent ``text``. If stdout states no encoding, ASCII is assumed."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
