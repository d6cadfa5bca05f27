"""Define Panel: a title, facts, a table and a bar chart, as text for a terminal and as HTML for a notebook.

The HTML takes its colors from the surrounding text (currentColor), so it is readable on light and dark pages, whatever
the operating system prefers. It has no script, and all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

Row = tuple[str, ...]
_BAR = 32  # length of the longest bar, in characters
_STYLE = (
    ".fp4kit{color-scheme:light dark;color:inherit;font-size:13px;line-height:1.45;max-width:60em}"
    ".fp4kit-title{font-weight:600;border-bottom:1px solid;padding-bottom:2px;margin-bottom:4px;overflow-wrap:anywhere}"
    ".fp4kit table{border-collapse:collapse;margin:0 0 6px 0;color:inherit;background:transparent}"
    ".fp4kit tr,.fp4kit tr:hover,.fp4kit tr:nth-child(even){background:transparent}"
    # The class is repeated because JupyterLab's own rule for cells is more specific than one class.
    ".fp4kit.fp4kit th,.fp4kit.fp4kit td{text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:0}"
    ".fp4kit td{overflow-wrap:anywhere}"
    ".fp4kit .facts td:first-child{min-width:9em}"  # wide tables would otherwise break names within words
    ".fp4kit.fp4kit th{opacity:.7;font-weight:400}"
    ".fp4kit .n.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".fp4kit .bars td{padding-top:0;padding-bottom:0}"
    ".fp4kit .bar{height:.75em;min-width:1px;margin-top:.3em;background:currentColor;opacity:.55}"
)


@dataclass(frozen=True)
class Panel:
    """A title, facts, a table and a bar chart that can be rendered as text or HTML.

    Parts are left out if they are empty: a table without rows, and a bar chart without bars.

    Attributes:
        title: the first line.
        facts: (name, text) pairs, one line each.
        columns, rows: the titles and the rows of a table. Every column but the first is right-aligned.
        heading, bars: the heading and the (label, count) pairs of a bar chart.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: Row = ()
    rows: tuple[Row, ...] = ()
    heading: str = ""
    bars: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """Return the panel as plain text of several lines."""
        width = max((len(name) for name, _ in self.facts), default=0)
        lines = [self.title, *(f"  {name:{width}}  {text}" for name, text in self.facts)]
        if self.rows:
            lines += _aligned((self.columns, *self.rows))
        if self.bars:
            lines += [
                f"  {self.heading}",
                *_aligned([_bar(*bar, *self._totals()) for bar in self.bars], right=(0, 1, 2)),
            ]
        return "\n".join(line.rstrip() for line in lines)

    def html(self) -> str:
        """Return the panel as one HTML <div> element that contains its own style sheet."""
        parts = [f'<div class="fp4kit"><style>{_STYLE}</style><div class="fp4kit-title">{escape(self.title)}</div>']
        parts.append(_table(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.facts))
        if self.rows:
            head = "".join(f"<th{_right(i)}>{escape(name)}</th>" for i, name in enumerate(self.columns))
            parts.append(_table([f"<tr>{head}</tr>", *map(_html_row, self.rows)]))
        if self.bars:
            parts.append(f"<div>{escape(self.heading)}</div>")
            parts.append(_table((_html_bar(*bar, *self._totals()) for bar in self.bars), "bars"))
        return "".join(parts) + "</div>"

    def _totals(self) -> tuple[int, int]:
        """Return (largest, total): the largest count of a bar, and the sum of all counts."""
        counts = [count for _, count in self.bars]
        return max(counts), sum(counts)


def share(count: int, total: int) -> str:
    """Return ``count / total`` as text: a percentage with three significant digits."""
    if not 0 < count < total:
        return "100%" if count else "0%"
    percent = 100 * count / total
    return "< 0.001%" if percent < 0.001 else "> 99.9%" if percent > 99.9 else f"{percent:.3g}%"


def _aligned(rows: list[Row] | tuple[Row, ...], right: tuple[int, ...] | None = None) -> list[str]:
    """Return the rows of a table as lines of text that begin with two spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = tuple(range(1, len(widths))) if right is None else right
    cells = ([f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return ["  " + "  ".join(row) for row in cells]


def _bar(label: str, count: int, largest: int, total: int) -> Row:
    """Return a bar as cells of a text table: label, count, percentage of `total`, and a bar of block characters."""
    eighths = max(round(8 * _BAR * count / largest), 1) if count else 0
    return label, f"{count:,}", share(count, total), "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _html_bar(label: str, count: int, largest: int, total: int) -> str:
    """Return a bar of the chart as a row of an HTML table: label, count, percentage of `total`, and the bar."""
    bar = f'<div class="bar" style="width:{16 * count / largest:.2f}em"></div>' if count else ""
    cells = (label, f"{count:,}", share(count, total))
    return "<tr>" + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells) + f"<td>{bar}</td></tr>"


def _html_row(row: Row) -> str:
    """Return a row of a text table as a row of an HTML table, `<tr>` included. The texts of cells are escaped."""
    return "<tr>" + "".join(f"<td{_right(i)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"


def _right(column: int) -> str:
    """Return the HTML class attribute that aligns a cell of this column to the right; "" for column 0."""
    return ' class="n"' if column else ""


def _table(rows: Iterable[str], kind: str = "facts") -> str:
    """Return an HTML table of the given HTML rows, or an empty string if there are none. kind: its CSS class."""
    body = "".join(rows)
    return f'<table class="{kind}">{body}</table>' if body else ""
