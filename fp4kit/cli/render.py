"""Text and JSON of results: tables that fit a terminal or a pipe, names shortened in the middle, one JSON document a
command.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from fp4kit.storage.json_object import dump_object

NAME_WIDTH = 24  # a name column narrower than this gives way to names on lines of their own
Row = Sequence[str]


def table(columns: Row, rows: Sequence[Row], width: int | None = None, ellipsis: str = "…") -> list[str]:
    """Return the lines of a table of at most ``width`` columns; None: as wide as its cells need.

    columns: titles; a leading ``#`` marks numbers, which are aligned at the right. The first column holds names: where
    the
        table is too wide, they are shortened in the middle, and where that leaves too little of them or makes two of
        them alike, they stand on lines of their own above the other cells. A cell is one line of text, a line never
        ends in a space.
    """
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
    """Return ``text`` in at most ``width`` columns: what is too long loses its middle, and keeps more of its end."""
    if columns_of(text) <= width:
        return text
    room = max(width - columns_of(ellipsis), 0)
    tail = _fitting(text[::-1], room - room * 2 // 5)[::-1]
    return (_fitting(text, room - columns_of(tail)) + ellipsis + tail) if room else ellipsis[:width]


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken at spaces only, all but the first behind
    ``indent``.
    """
    if width is None:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and columns_of(lines[-1]) + 1 + columns_of(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(indent * bool(lines) + word)
    return lines


def document(schema: str, body: Mapping[str, Any]) -> str:
    """Return ``body`` as JSON whose first entry is ``"schema": "fp4kit.<schema>"``; a schema ends in its version:
    ``compare/1``.

    Tuples become lists, paths strings, NumPy scalars numbers. JSON has no NaN or infinity: they become the strings
    "NaN", "Infinity" and "-Infinity", which Python's float and JavaScript's Number read.
    """
    return dump_object({"schema": f"fp4kit.{schema}", **_plain(body)}).decode("ascii")


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as one word: ``[64,96]``."""
    return "[" + ",".join(map(str, shape)) + "]"


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a printable text takes."""
    return len(text) if text.isascii() else cell_len(text)


def duration(seconds: float) -> str:
    """Return a time in words for people: ``42 s``, ``3:05 min``, ``2:10 h``, ``3 days``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h" if whole < 2 * 86400 else f"{whole // 86400} days"


def _plain(value: Any) -> Any:
    """Return ``value`` in the types of JSON."""
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
    """Columns of a line of cells, two spaces between them."""
    return sum(widths) + 2 * max(len(widths) - 1, 0)


def _aligned(row: Row, widths: Sequence[int], right: Sequence[bool]) -> str:
    """One line of a table."""
    pads = (" " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True))
    cells = (pad + cell if at_right else cell + pad for cell, pad, at_right in zip(row, pads, right, strict=True))
    return "  ".join(cells).rstrip()


def _narrowed(grid: list[tuple[str, ...]], room: int, ellipsis: str) -> list[tuple[str, ...]] | None:
    """The rows with names of at most ``room`` columns, or None if that says too little."""
    if room < NAME_WIDTH:
        return None
    names = [shortened(row[0], room, ellipsis) for row in grid]
    if len(set(names)) < len({row[0] for row in grid}):
        return None
    return [(name, *row[1:]) for name, row in zip(names, grid, strict=True)]


def _stacked(
    grid: list[tuple[str, ...]], widths: list[int], right: Sequence[bool], width: int, ellipsis: str
) -> list[str]:
    """Names on lines of their own, shortened only if a line is too short for one; below each its other cells."""
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
    """The cells of one row with their titles, in lines of their own."""
    facts = (f"{title} {cell}" for title, cell in zip(titles, cells, strict=True) if cell)
    text = " ".join(shortened(word, width - 2, ellipsis) for word in ", ".join(facts).split())
    return [f"  {line}" for line in wrapped(text, width - 2)]


def _fitting(text: str, width: int) -> str:
    """The longest beginning of ``text`` that takes at most ``width`` columns."""
    if text.isascii():
        return text[:width]
    used = 0
    for index, character in enumerate(text):
        used += columns_of(character)
        if used > width:
            return text[:index]
    return text
