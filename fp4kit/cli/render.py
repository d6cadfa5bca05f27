"""Render results as text or JSON: tables that fit a terminal or a pipe, and one JSON document per command."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from fp4kit.storage.files import dump_object

NAME_WIDTH = 24  # if the name column would be narrower than this, each name gets a line of its own
Row = Sequence[str]


def table(columns: Row, rows: Sequence[Row], width: int | None = None, ellipsis: str = "…") -> list[str]:
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


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
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


def document(schema: str, body: Mapping[str, Any]) -> str:
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
    return [f"  {line}" for line in wrapped(text, width - 2)]


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
