"""Print what a command has to say: results on stdout, as text or JSON; notes, progress and the last line on stderr."""

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
    """Signal that the command must end, because of a signal, or because nobody reads stdout any more (SIGPIPE).

    number: the signal. The class derives from BaseException, so that no ``except Exception`` swallows it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OutputError(OSError):
    """Report that standard output cannot be written to, for instance because the disk is full."""


@dataclass(frozen=True)
class Output:
    """Print what a command has to say, as far as the options --json and --quiet allow.

    command: the name of the command, which begins every note.
    json: print one JSON document instead of text.
    quiet: print no text, notes or progress.
    Progress appears on stderr, and only if stderr is a terminal.
    """

    command: str
    json: bool = False
    quiet: bool = False

    @property
    def text(self) -> bool:
        """True if text is printed, because neither --json nor --quiet was given."""
        return not (self.json or self.quiet)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, laid out by render.table; nothing if there are no rows."""
        if self.text and rows:
            width = _width()
            self._print(render.table(columns, rows, width, "…" if _encodes("…") else "..."))

    def line(self, text: str = "") -> None:
        """Print a line of text. If the terminal is narrower, the line is broken at spaces."""
        if self.text:
            self._print(render.wrapped(text, _width(), "  "))

    def verbatim(self, text: str) -> None:
        """Print text unchanged, such as a program."""
        if self.text:
            self._print([text])

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """Print ``body`` as the command's JSON document if --json was given; see render.document for ``schema``."""
        if self.json:
            self._print([render.document(schema, body).removesuffix("\n")])

    def note(self, text: str) -> None:
        """Print a remark on stderr, unless --quiet was given. A remark is not part of the result."""
        if not self.quiet:
            say(f"fp4kit {self.command}: {text}")

    def progress(self, what: str, total: int) -> AbstractContextManager[Tick]:
        """Return a context manager that gives a function to call with numbers of bytes done.

        The count is shown as a line of progress if stderr is a terminal.
        """
        return progress(what, total, not self.quiet and sys.stderr.isatty())

    def _print(self, lines: Sequence[str]) -> None:
        write("".join(f"{line}\n" for line in lines))


def write(text: str = "") -> None:
    """Write text to stdout and flush it. Without text, only flush.

    Raises Stopped if nobody reads stdout any more, and OutputError if it cannot be written to.
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
    """Write all bytes to the binary stream of stdout.

    The text stream is not used, because with an unbuffered stdout (python -u) it drops bytes that are not accepted at
    once.
    """
    while data:
        data = data[sys.stdout.buffer.write(data) :]


def say(text: str) -> None:
    """Write one line to stderr. Errors are ignored, because stderr may be closed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _width() -> int | None:
    """Return the width of the terminal in columns, at least 20, or None if stdout is no terminal."""
    return max(shutil.get_terminal_size().columns, 20) if sys.stdout.isatty() else None


def _encodes(text: str) -> bool:
    """Return whether the encoding of stdout can represent ``text``."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
