"""Write the report of a verification as one self-contained HTML page.

The page needs no network, no further files and no fonts; charts are SVG. All text from the checkpoint is escaped. The
page's Content-Security-Policy allows only its own style and script, identified by their SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from fp4kit import __version__
from fp4kit.checkpoint.model.statistics import StoredCounts, total
from fp4kit.checkpoint.verify.integrity import grouped
from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport
from fp4kit.storage.errors import listed, shown
from fp4kit.storage.whole_file import whole_file

# Sizes of a chart in pixels: width, height, left margin, and the margin on the other three sides.
_WIDTH, _HEIGHT, _LEFT, _EDGE = 900, 220, 48, 18
_DOT = 2.5  # radius of a point of a chart, in pixels


def write_report(report: VerifyReport, path: str | Path) -> None:
    """Write the HTML page of a report to ``path``. The file appears only when it is complete."""
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(page(report).encode("utf-8"))


def page(report: VerifyReport) -> str:
    """Return the whole HTML page of a report. Equal reports give equal pages."""
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    title = f"fp4kit verify: {report.path.name}"
    parts = [_head(report), _issues(report), *_charts(report), _table(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{''.join(parts)}<script>{script}</script>\n</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    """Return the SHA-256 of a text in the form of a Content-Security-Policy: "sha256-" and base64."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _text(value: object) -> str:
    """Return a value as text that is escaped for HTML."""
    return escape(shown(str(value)))


def _head(report: VerifyReport) -> str:
    """Return the HTML of the page's top: title, number of errors and warnings, and facts about the verification."""
    verdict = "clean" if report.clean else "error"
    warnings = len(report.issues) - report.errors
    word = f"{_counted('error', report.errors)}, {_counted('warning', warnings)}"
    facts: list[tuple[str, object]] = [("checkpoint", report.path), ("source", report.source or "none given")]
    facts += [("format", ", ".join(report.formats) or "numbers"), ("recipe", report.recipe or "none recorded")]
    facts += [("scales", report.scales)] if report.scales else []
    facts += [("manifest", report.manifest), ("layers", len(report.layers))]
    if report.source is not None:
        facts += [("SQNR", f"{_decibels(report.total.sqnr_db)} dB"), ("tensors copied", report.copied)]
        facts.append(
            ("differing bytes", sum(layer.differing for layer in report.layers) + sum(n for _, n in report.changed))
        )
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    return (
        f'<h1>{_text(report.path.name)}</h1>\n<p id="verdict" class="{verdict}">{word}'
        f'<span class="soft">, fp4kit {_text(__version__)}</span></p>\n<dl>{items}</dl>\n'
    )


def _counted(word: str, count: int) -> str:
    """Return a count with its noun, such as "1 error" or "2 errors"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _issues(report: VerifyReport) -> str:
    """Return the HTML table of issues, or an empty string if there are none."""
    if not report.issues:
        return ""
    rows = "".join(
        f'<tr><td class="{issue.severity}">{issue.severity}</td><td class="text">{_text(issue.loader or "-")}</td>'
        f'<td class="text">{_text(listed(subjects))}</td><td class="text">{_text(issue.sentence)}</td></tr>\n'
        for issue, subjects in grouped(report.issues)
    )
    heads = "".join(f'<th class="text">{name}</th>' for name in ("severity", "loader", "subject", "what"))
    body = f'<table id="issues"><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table>'
    return f'<h2>Findings</h2>\n<div class="scroll">{body}</div>\n'


class _Point(NamedTuple):
    """Hold one point of the charts: the summed counts of all layers with one layer number and one kind.

    For the definition of number and kind, see _points.
    """

    number: int
    kind: str
    tally: StoredCounts


def _points(layers: Iterable[LayerReport]) -> list[_Point]:
    """Return the points of the charts, sorted by layer number.

    A layer's number is the first number in its name. Its kind is its name without numbers and without the prefix that
    all names share. Layers without a number or without counted elements have no point.
    """
    found: dict[tuple[int, str], list[StoredCounts]] = defaultdict(list)
    for layer in layers:
        parts = layer.name.split(".")
        number = next((int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 7), None)
        if number is not None and layer.tally.elements:
            found[number, ".".join(part for part in parts if not part.isdigit())].append(layer.tally)
    start = _common_start({kind for _, kind in found})
    return [_Point(number, kind[start:], total(tallies)) for (number, kind), tallies in sorted(found.items())]


def _common_start(names: Iterable[str]) -> int:
    """Return the length of the longest prefix of whole dotted parts that all names share, with its last dot.

    The last part of a name never belongs to the prefix. Return 0 if nothing is shared.
    """
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return sum(len(level[0]) + 1 for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _share(count: int, of: int) -> float:
    """Return ``count`` as a percentage of ``of``, or 0 if ``of`` is 0."""
    return 100 * count / of if of else 0.0


def _charts(report: VerifyReport) -> Iterator[str]:
    """Yield the HTML of the legend, then of each chart that has values.

    Yield nothing if no layer name has a number.
    """
    points = _points(report.layers)
    if not points:
        return
    colors = _colors(dict.fromkeys(point.kind for point in points))
    keys = "".join(f"<li>{_patch(color)}{_text(kind)}</li>" for kind, color in colors.items())
    yield f'<h2>Layer by layer</h2>\n<ul class="legend">{keys}</ul>\n'
    for name, title, value in _VALUES:
        values = [value(point.tally) for point in points]
        if not all(map(math.isnan, values)):
            yield _chart(name, title, points, values, colors)


def _patch(color: str) -> str:
    """Return the SVG of a small square in a color, for an entry of the legend."""
    return f'<svg width="12" height="9"><rect width="9" height="9" fill="{color}"/></svg>'


_NAN = math.nan
_VALUES: tuple[tuple[str, str, Callable[[StoredCounts], float]], ...] = (
    ("sqnr", "SQNR, dB", lambda t: _NAN if t.sqnr_db is None else t.sqnr_db),
    ("saturated", "Saturated values, %", lambda t: _share(t.saturated, t.compared) if t.compared else _NAN),
    ("largest", "Codes of the largest magnitude, %", lambda t: _NAN if t.compared else _share(t.at_max, t.elements)),
    ("zero", "Blocks of zeros, %", lambda t: _share(t.zero_blocks, t.blocks)),
)


def _chart(name: str, title: str, points: Sequence[_Point], values: Sequence[float], colors: Mapping[str, str]) -> str:
    """Return the HTML of one chart, with one line per kind of layer and the layer numbers on the horizontal axis.

    name: the end of the chart's HTML id.
    title: the caption.
    points: the points; their kinds and layer numbers are used.
    values: the value of each point, drawn as its height. A point whose value is NaN is not drawn.
    colors: kind of layer -> color.
    """
    ticks = _ticks([value for value in values if math.isfinite(value)])
    numbers = sorted({point.number for point in points})
    place = _Scale(numbers[0], max(numbers[-1], numbers[0] + 1), ticks[0], ticks[-1])
    lines: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for point, value in zip(points, values, strict=True):
        if not math.isnan(value):
            lines[point.kind].append(
                (place.x(point.number), place.y(value), f"{point.kind} {point.number}: {value:.4g}")
            )
    drawn = "".join(_line(lines[kind], color) for kind, color in colors.items())
    return (
        f'<figure id="chart-{name}"><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img"'
        f' aria-label="{title}">{_axes(place, numbers, ticks)}{drawn}</svg></figure>\n'
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """Return the numbers to label on a chart's vertical axis: at least two, usually about six.

    They are round and equally spaced, and enclose all values.

    values: finite numbers; if there are none, the axis is made for the value 0.
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    rough = (high - low or abs(high) / 10 or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


class _Scale(NamedTuple):
    """Map layer numbers and values to positions in a chart. Infinities are placed at the top and bottom edges.

    left, right: the layer numbers at the left and right edges.
    low, high: the values at the bottom and top edges.
    """

    left: int
    right: int
    low: float
    high: float

    def x(self, number: float) -> float:
        """Return the distance of a layer number from the left side of the chart, in pixels."""
        return _LEFT + (_WIDTH - _LEFT - _EDGE) * (number - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the distance of a value from the top of the chart, in pixels."""
        inside = min(max(value, self.low), self.high)
        return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (inside - self.low) / (self.high - self.low)


def _axes(place: _Scale, numbers: Sequence[int], ticks: Sequence[float]) -> str:
    """Return the SVG of a chart's horizontal grid lines and of the labels of both axes.

    place: maps numbers and values to positions.
    numbers: the layer numbers; at most 24 of them are labelled.
    ticks: the values that get a grid line and a label.
    """
    found = []
    for tick in ticks:
        y = place.y(tick)
        found.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _EDGE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for number in numbers[:: -(-len(numbers) // 24)]:
        found.append(f'<text x="{place.x(number):.1f}" y="{_HEIGHT - 3}" text-anchor="middle">{number}</text>')
    return "".join(found)


def _line(points: Sequence[tuple[float, float, str]], color: str) -> str:
    """Return the SVG of one line of a chart with its points. A point is (x, y, tooltip text), in pixels."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}"><title>{_text(t)}</title></circle>' for x, y, t in points
    )
    return f'<g fill="{color}" stroke="none"><polyline points="{path}" stroke="{color}"/>{dots}</g>'


def _colors(kinds: Iterable[str]) -> Mapping[str, str]:
    """Return kind of layer -> CSS color. Successive kinds have very different hues."""
    return {kind: f"hsl({i * 137.508 % 360:.0f} 60% 48%)" for i, kind in enumerate(kinds)}


def _decibels(value: float | None) -> str:
    """Return a number of decibels as text, or "-" if it is unknown."""
    return "-" if value is None else f"{value:.2f}"


_COLUMNS = (
    "layer",
    "format",
    "shape",
    "SQNR dB",
    "saturated %",
    "largest code %",
    "zero blocks",
    "flushed blocks",
    "subnormal scales",
    "tensor scale",
    "differing bytes",
)


def _table(report: VerifyReport) -> str:
    """Return the HTML table of layers, or an empty string if there are none."""
    if not report.layers:
        return ""
    heads = "".join(f'<th><button type="button">{name}</button></th>' for name in _COLUMNS)
    rows = "".join(_row(layer) for layer in report.layers)
    return (
        '<h2>Layers</h2>\n<p><label>Filter <input id="filter" type="search"></label> <span id="shown"'
        ' class="soft"></span></p>\n<div class="scroll"><table'
        f' id="layers"><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    )


def _row(layer: LayerReport) -> str:
    """Return the HTML of the row of one layer in the table of layers."""
    found = layer.tally
    cells = [
        _number(found.sqnr_db, _decibels(found.sqnr_db)),
        _number(_share(found.saturated, found.compared) if found.compared else None),
        _number(_share(found.at_max, found.elements)),
        _number(found.zero_blocks),
        _number(found.flushed_blocks if found.compared else None),
        _number(found.subnormal_scales),
        _number(layer.tensor_scale),
        _number(layer.differing if layer.compared else None),
    ]
    shape = "×".join(map(str, layer.shape))
    size = math.prod(layer.shape)
    begin = f'<tr><td>{_text(layer.name)}</td><td>{_text(layer.format)}</td><td data-value="{size}">{shape}</td>'
    return f"{begin}{''.join(cells)}</tr>\n"


def _number(value: float | None, text: str | None = None) -> str:
    """Return the HTML of a table cell that sorts as a number. None is shown as "-" and sorts last.

    text: the text to show instead of the number; None to show the number, a float with four digits.
    """
    if value is None:
        return '<td data-value="NaN">-</td>'
    exact = str(value).replace("inf", "Infinity").replace("nan", "NaN")
    return f'<td data-value="{exact}">{text if text is not None else f"{value:.4g}" if isinstance(value, float) else value}</td>'  # noqa: E501
