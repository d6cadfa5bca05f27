"""Print the output of a command: results as text or JSON on stdout; notes, progress and the last line on stderr."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.filesize import decimal

from fp4kit.display import format_panel
from fp4kit.formats import BLOCK_FORMATS, BNB_FP4, ELEMENT_FORMATS, MX4, NF4, ElementFormat
from fp4kit.recipes import ALIASES, ALL_RECIPES, PRODUCER_ALIASES, Recipe, recipe
from fp4kit.storage.files import dump_object, shown

NAME_WIDTH = 24  # if the name column would be narrower than this, each name gets a line of its own
Row = Sequence[str]


def table_lines(columns: Row, rows: Sequence[Row], width: int | None = None, ellipsis: str = "…") -> list[str]:
    """Return the lines of a table that fits a terminal."""
    # If a name would get fewer than 24 terminal columns, or if two names would look alike, each name gets a line of its
    # own above its further cells.
    titles = tuple(title.removeprefix("#") for title in columns)
    right = tuple(title.startswith("#") for title in columns)
    grid = [titles, *map(tuple, rows)]
    widths = [max(map(columns_of, column)) for column in zip(*grid, strict=True)]
    if width is None or _total(widths) <= width:
        return [_aligned(row, widths, right) for row in grid]
    narrow = _narrowed(grid, width - _total(widths[1:]) - 2, ellipsis)
    if narrow is not None:
        widths[0] = max(columns_of(row[0]) for row in narrow)
        return [_aligned(row, widths, right) for row in narrow]
    return _stacked(grid, widths, right, width, ellipsis)


def shortened(text: str, width: int, ellipsis: str = "…") -> str:
    """Return ``text`` if it fits in ``width`` terminal columns, otherwise a shortened text that fits."""
    if columns_of(text) <= width:
        return text
    room = max(width - columns_of(ellipsis), 0)
    tail = _fitting(text[::-1], room - room * 2 // 5)[::-1]
    return (_fitting(text, room - columns_of(tail)) + ellipsis + tail) if room else ellipsis[:width]


def wrapped_lines(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return ``text`` as lines of at most ``width`` terminal columns, broken at spaces only."""
    if width is None:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and columns_of(lines[-1]) + 1 + columns_of(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(indent * bool(lines) + word)
    return lines


def document_text(schema: str, body: Mapping[str, Any]) -> str:
    """Return ``body`` as the text of a JSON document whose first entry is ``"schema": "fp4kit.<schema>"``."""
    return dump_object({"schema": f"fp4kit.{schema}", **_plain(body)}).decode("ascii")


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as one word, such as ``[64,96]``."""
    return "[" + ",".join(map(str, shape)) + "]"


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a printable text needs; wide characters need two."""
    return len(text) if text.isascii() else cell_len(text)


def duration(seconds: float) -> str:
    """Return a time as text in a readable unit."""
    # The time must be at least 0, and is rounded to whole seconds.
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h" if whole < 2 * 86400 else f"{whole // 86400} days"


def _plain(value: Any) -> Any:
    """Return a copy of ``value`` with types that JSON has, converted as ``document`` describes."""
    # Values of types that ``document`` does not mention are returned unchanged, so that JSON may reject them later.
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if isinstance(value, Path) else value


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table whose columns have the given widths, with two spaces between columns."""
    return sum(widths) + 2 * max(len(widths) - 1, 0)


def _aligned(row: Row, widths: Sequence[int], numeric: Sequence[bool]) -> str:
    """Return one row of a table as a line: cells padded to the widths of their columns, with two spaces between
    them.
    """
    pads = (" " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True))
    cells = (pad + cell if at_right else cell + pad for cell, pad, at_right in zip(row, pads, numeric, strict=True))
    return "  ".join(cells).rstrip()


def _narrowed(grid: list[tuple[str, ...]], room: int, ellipsis: str) -> list[tuple[str, ...]] | None:
    """Return the rows of a table with their names (first cells) shortened to ``room`` terminal columns."""
    if room < NAME_WIDTH:
        return None
    names = [shortened(row[0], room, ellipsis) for row in grid]
    if len(set(names)) < len({row[0] for row in grid}):
        return None
    return [(name, *row[1:]) for name, row in zip(names, grid, strict=True)]


def _stacked(
    grid: list[tuple[str, ...]], widths: list[int], right: Sequence[bool], width: int, ellipsis: str
) -> list[str]:
    """Return the lines of a table in which each name has a line of its own, above the further cells of its row."""
    fits = _total(widths[1:]) + 2 <= width
    lines = []
    for row in grid if fits else grid[1:]:
        lines.append(shortened(row[0], width, ellipsis))
        if fits:
            lines.append(f"  {_aligned(row[1:], widths[1:], right[1:])}")
        else:
            lines += _facts(grid[0][1:], row[1:], width, ellipsis)
    return [line.rstrip() for line in lines if line.strip()]


def _facts(titles: Row, cells: Row, width: int, ellipsis: str) -> list[str]:
    """Return the cells of one row as lines of "title cell" pairs that fit ``width``."""
    facts = (f"{title} {cell}" for title, cell in zip(titles, cells, strict=True) if cell)
    text = " ".join(shortened(word, width - 2, ellipsis) for word in ", ".join(facts).split())
    return [f"  {line}" for line in wrapped_lines(text, width - 2)]


def _fitting(text: str, width: int) -> str:
    """Return the longest prefix of ``text`` that needs at most ``width`` terminal columns."""
    if text.isascii():
        return text[:width]
    used = 0
    for index, character in enumerate(text):
        used += columns_of(character)
        if used > width:
            return text[:index]
    return text


Tick = Callable[[int], None]
_INTERVAL = 0.1  # minimum number of seconds between two drawings of the line
_WINDOW = 10.0  # the speed is averaged over this many seconds
_ENOUGH = 0.02  # the time left is shown after this share of the bytes, or after _WINDOW seconds: the first may be slow


class Meter:
    """Count the bytes that are done, and describe the progress in one line.

    what: the name of the activity, such as "converting".
    total: the number of bytes to do.
    now: the start time in seconds, of any clock.
    """

    def __init__(self, what: str, total: int, now: float) -> None:
        self._what, self._total, self._done = what, total, 0
        self._past, self._start = deque([(now, 0)]), now

    def add(self, count: int) -> None:
        """Add ``count`` to the number of bytes done."""
        self._done += count

    def text(self, now: float) -> str:
        """Return a line such as ``converting 37% 3.7 GB of 10.0 GB 1.2 GB/s 5 s left``."""
        self._past.append((now, self._done))
        while len(self._past) > 2 and now - self._past[0][0] > _WINDOW:
            self._past.popleft()
        start, before = self._past[0]
        share = 100 * self._done // self._total if self._total else 100
        line = f"{self._what} {share}%  {decimal(self._done)} of {decimal(self._total)}"
        if now <= start or self._done == before:
            return line
        rate = (self._done - before) / (now - start)
        line += f"  {decimal(int(rate))}/s"
        if self._done < _ENOUGH * self._total and now - self._start < _WINDOW:
            return line
        return f"{line}  {duration(max(self._total - self._done, 0) / rate)} left"


def _draw(line: str) -> None:
    """Replace the line of progress on stderr by ``line``; "" clears it."""
    width = max(shutil.get_terminal_size().columns - 1, 1)
    while len(line) > width and "  " in line:
        line = line.rpartition("  ")[0]
    with suppress(OSError, ValueError):
        sys.stderr.write(f"\r{shortened(line, width, '...'):<{width}}" + ("\r" if not line else ""))
        sys.stderr.flush()


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
            self._print(table_lines(columns, rows, width, "…" if _encodes("…") else "..."))

    def records(self, records: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
        """Print a table with a row per record. ``columns`` maps a title to a format string over the record's keys."""
        rows = [tuple(text.format_map(_texts(record)) for text in columns.values()) for record in records]
        self.table(tuple(columns), rows)

    def line(self, text: str = "") -> None:
        """Print a line of text."""
        self.lines([text])

    def lines(self, texts: Iterable[str]) -> None:
        """Print lines of text."""
        if self.text:
            for text in texts:
                self._print(wrapped_lines(text, _width(), "  "))

    def verbatim(self, text: str) -> None:
        """Print text such as a program, without breaking its lines. Do nothing if --json or --quiet was given."""
        if self.text:
            self._print([text])

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """Print ``body`` as the command's JSON document if --json was given; otherwise do nothing."""
        if self.json:
            self._print([document_text(schema, body).removesuffix("\n")])

    def note(self, text: str) -> None:
        """Print a remark on stderr, unless --quiet was given. A remark is not part of the result."""
        if not self.quiet:
            say(f"fp4kit {self.command}: {text}")

    @property
    def draws(self) -> bool:
        """True if progress is drawn on stderr."""
        return not self.quiet and sys.stderr.isatty()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Tick]:
        """Yield a function that counts bytes and draws a line of progress on stderr, at most ten times per second."""
        meter, drawn = Meter(what, total, time.monotonic()), 0.0

        def tick(count: int) -> None:
            nonlocal drawn
            meter.add(count)
            now = time.monotonic()
            if now - drawn >= _INTERVAL:
                drawn = now
                _draw(meter.text(now))

        if not self.draws:
            yield lambda count: None
            return
        try:
            yield tick
        finally:
            _draw("")

    def _print(self, lines: Sequence[str]) -> None:
        write("".join(f"{line}\n" for line in lines))


def _texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with texts that are safe to print, and shapes as words."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        is_shape = isinstance(value, (tuple, list))
        found[key] = shape_text(value) if is_shape else shown(value) if isinstance(value, str) else value
    return found


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


RECIPE_COLUMNS = ("recipe", "block", "scale rule", "equal bit for bit to", "evidence", "versions", "source")
SHORT_COLUMNS = tuple(title for title in RECIPE_COLUMNS if title not in ("equal bit for bit to", "source"))
FORMAT_COLUMNS = ("format", *(title for title, _ in format_panel(NF4).facts))
# ELEMENT_FORMATS, the codebooks, and the other elements of hierarchical formats
LISTED_FORMATS = tuple(
    dict.fromkeys((*ELEMENT_FORMATS, NF4, BNB_FP4, MX4, *(r.element for r in ALL_RECIPES.values() if r.levels)))
)
BLOCK_COLUMNS = ("block format", "element", "scale", "block", "tensor scale", "bits per value")
LEVEL_COLUMNS = ("hierarchical format", "element", "levels of scales", "bits per value")
VALUE_COLUMNS = ("code", "bits", "value")


def block_text(r: Recipe) -> str:
    """Return a recipe's block shape as text: the number of rows, "x" and the number of columns, such as "1x16"."""
    if r.block is None:
        return {"tensor": "tensor", "row": "row"}[r.tensor_scaling]
    return f"{r.block[0]}x{r.block[1]}"


def rule_text(r: Recipe) -> str:
    """Return the name of the rule by which a recipe computes its scales, with spaces in place of underscores."""
    rule = r.fake_rule if r.fake_only else r.block_rule or r.tensor_rule
    return (rule or "").replace("_", " ") + ", searched" * bool(r.search)


def recipe_rows(ids: Iterable[str] = tuple(ALL_RECIPES)) -> list[tuple[str, ...]]:
    """Return the table of recipes, one row per id."""
    return [
        (
            _names(r),
            block_text(r),
            rule_text(r),
            _exact(r),
            ", ".join(r.evidence) or "derived",
            str(r.versions),
            r.source,
        )
        for r in map(recipe, ids)
    ]


def short_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows of the table of recipes with the columns SHORT_COLUMNS, which fit a terminal of 80 columns."""
    return [
        (name, block, shortened(rule, 28, "..."), evidence, versions)
        for name, block, rule, _, evidence, versions, _ in rows
    ]


def _exact(r: Recipe) -> str:
    """Return text that says which producer a recipe equals bit for bit."""
    others = (f"; {alias.id} {alias.exact}" for alias in PRODUCER_ALIASES.values() if alias.of == r.id)
    return r.exact + " (values only)" * r.fake_only + "".join(others)


def _names(r: Recipe) -> str:
    """Return the recipe's id followed by its aliases, after " = " or, if they differ for some inputs, " ~ "."""
    found = [alias for alias, target in ALIASES.items() if target == r.id]
    differs = {id for id, alias in PRODUCER_ALIASES.items() if "except" in alias.exact}
    return "".join([r.id, *(f" {'~' if alias in differs else '='} {alias}" for alias in found)])


SOME_DIFFER = (
    "~: the second name is of a producer that differs for some inputs and has its own evidence; --long says which"
)


def grouped_recipe_rows() -> list[tuple[str, ...]]:
    """Return the table of recipes with one row per group of recipes that differ only in id and block shape."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in recipe_rows():
        groups.setdefault(row[2:], []).append(row)
    joined = ", ".join
    return [
        (joined(r[0] for r in rows), joined(dict.fromkeys(r[1] for r in rows)), *shared)
        for shared, rows in groups.items()
    ]


def format_rows() -> list[tuple[str, ...]]:
    """Return the table of element and scale formats, one row per format, with the columns FORMAT_COLUMNS."""
    return [(f.name, *(text for _, text in format_panel(f).facts)) for f in LISTED_FORMATS]


def block_rows() -> list[tuple[str, ...]]:
    """Return the table of block formats, one row per format, with the columns BLOCK_COLUMNS."""
    return [
        (
            b.name,
            b.element.name,
            b.scale.name,
            str(b.block_size),
            "float32" if b.has_tensor_scale else "-",
            f"{b.bits_per_value:g}",
        )
        for b in BLOCK_FORMATS
    ]


def level_rows() -> list[tuple[str, ...]]:
    """Return the table of hierarchical formats, one row per format, with the columns LEVEL_COLUMNS."""
    rows = []
    for r in ALL_RECIPES.values():
        if r.levels:
            bits = r.element.bits + 8 * r.scale_bytes / r.block_size
            bits += 32 / r.tensor_columns if r.tensor_scaling == "block" else 0
            rows.append((r.format_name, r.element.name, ", ".join(map(str, r.scale_levels)), f"{bits:g}"))
    return list(dict.fromkeys(rows))


def value_rows(f: ElementFormat) -> list[tuple[str, ...]]:
    """Return the table of the codes of a format, with the columns VALUE_COLUMNS."""
    return [(str(code), f"{code:0{f.bits}b}", str(value)) for code, value in enumerate(f.values)]


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in GitHub's Markdown as one text, without a final newline."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
