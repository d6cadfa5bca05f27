"""Show the result of a verification: a summary in words, and one self-contained HTML page. The page has a list of
issues, charts of quantities such as the SQNR (signal-to-noise ratio in decibels) over the layer number, and a table of
layers. It needs no network, no further files and no fonts; charts are SVG. All text from the checkpoint is escaped. The
Content-Security-Policy of the page allows only its own style and script, identified by their SHA-256.
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
from statistics import median
from typing import NamedTuple

from fp4kit import __version__
from fp4kit.checkpoint.model.statistics import StoredCounts, total
from fp4kit.checkpoint.verify.integrity import grouped
from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport
from fp4kit.storage.files import listed, shown, whole_file

DECIBELS = (
    "SQNR is the ratio of the squared weights to the squared errors. At 20 dB, the error is 10% of the weights; 6 dB"
    " more halve it. Weights with a normal distribution have about 20.4 dB in NVFP4, 18.9 dB in"
    " MXFP4, and 31.5 dB in FP8 or MXFP8."
)


def worst_first(report: VerifyReport) -> list[LayerReport]:
    """Return the layers sorted: those with errors first, then those with warnings, then all others."""
    ranks: dict[str, int] = {}
    for issue in report.issues:
        rank = 0 if issue.severity == "error" else 1
        ranks[issue.subject] = min(rank, ranks.get(issue.subject, 2))

    def key(layer: LayerReport) -> tuple[int, float]:
        db = layer.tally.sqnr_db
        return ranks.get(layer.name, 2), math.inf if db is None or math.isnan(db) else db

    return sorted(report.layers, key=key)


def error_of(db: float) -> str:
    """Return the root-mean-square error at a SQNR as a percentage of the weights, such as "9.4%"."""
    return f"{100 * 10 ** (-db / 20):.3g}%"


def median_and_worst(report: VerifyReport) -> tuple[float, float, str] | None:
    """Return (median SQNR, smallest SQNR, name of the layer with the smallest), both in decibels."""
    found = [(layer.tally.sqnr_db, layer.name) for layer in report.layers if layer.tally.sqnr_db is not None]
    finite = [(db, name) for db, name in found if math.isfinite(db)]
    return (median(db for db, _ in finite), *min(finite)) if finite else None


def summary_of(report: VerifyReport) -> Iterator[str]:
    """Yield one to three lines that summarize a report; none if it has no layers."""
    if not report.layers:
        return
    named = {issue.subject for issue in report.issues}
    total, faulty = len(report.layers), sum(layer.name in named for layer in report.layers)
    text = f"{total - faulty} of {_layers(total)} as expected"
    if faulty:
        worst = worst_first(report)[0]
        why = next(issue.sentence for issue in report.issues if issue.subject == worst.name)
        text += f"; the worst: {shown(worst.name)}: {shown(why)}"
    yield text
    found = median_and_worst(report)
    if found is not None:
        middle, least, name = found
        yield (
            f"SQNR: median {middle:.2f} dB, an error of {error_of(middle)} of the weights; worst {least:.2f} dB in"
            f" {shown(name)}"
        )
    if report.parallel is not None:
        yield report.parallel.line


def unchecked(report: VerifyReport) -> list[str]:
    """Return one text per thing that the verification did not check; [] if it checked everything that it can."""
    found = []
    if report.source is None and report.layers:
        found.append("the values, which need --source SRC")
    if report.manifest == "none":
        found.append("checksums of the files, because there is no manifest")
    if report.source is not None:
        alone = sum(not layer.compared for layer in report.layers)
        if alone:
            found.append(f"the bytes of {_layers(alone)}, which were not encoded again")
    return found


def _layers(count: int) -> str:
    """Return a number of layers as text, such as "1 layer" or "12 layers"."""
    return f"{count} layer{'s' * (count != 1)}"


# Sizes of a chart in pixels: width, height, left margin, and the margin on the other three sides.
_WIDTH, _HEIGHT, _LEFT, _EDGE = 900, 220, 48, 18


def write_report(report: VerifyReport, path: str | Path) -> None:
    """Write the HTML page of a report to ``path``."""
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(page(report).encode("utf-8"))


def page(report: VerifyReport) -> str:
    """Return the whole HTML page of a report. Equal reports give equal pages."""
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    columns = _columns(report)
    style += _labels(columns)
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    title = f"fp4kit verify: {report.path.name}"
    parts = [_head(report), _summary_list(report), _issues(report), *_charts(report), _table(report, columns)]
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
    facts += [("format", ", ".join(report.formats) or "unquantized"), ("recipe", report.recipe or "none recorded")]
    facts += [("scales", report.scales)] if report.scales else []
    facts += [("manifest", report.manifest), ("layers", len(report.layers))]
    if report.source is not None:
        facts.append(("tensors copied", report.copied))
        facts.append(
            ("differing bytes", sum(layer.differing for layer in report.layers) + sum(n for _, n in report.changed))
        )
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    return (
        f'<h1>{_text(report.path.name)}</h1>\n<p id="verdict" class="{verdict}">{word}'
        f'<span class="soft">, fp4kit {_text(__version__)}</span></p>\n<dl>{items}</dl>\n'
    )


def _summary_list(report: VerifyReport) -> str:
    """Return the HTML of the summary: how many layers are as expected, what the SQNR means, and what was not
    checked.
    """
    lines = [*summary_of(report)]
    if median_and_worst(report) is not None:
        lines.append(DECIBELS)
    missing = unchecked(report)
    lines += [f"Not checked: {'; '.join(missing)}"] if missing else []
    if not lines:
        return ""
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<h2>Summary</h2>\n<ul id="summary">{items}</ul>\n'


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
    """One point of the charts. It stands for all layers that have its layer number and its kind.

    number: the layer number, which is the first number in a layer's name.
    kind: the name of the layers without numbers, such as "mlp.up_proj".
    tally: the counts of stored values, summed over these layers.
    """

    number: int
    kind: str
    tally: StoredCounts


def _points(layers: Iterable[LayerReport]) -> tuple[list[_Point], int | None]:
    """Return the points of the charts, sorted by layer number, and the number that stands for layers without one."""
    found: dict[tuple[int | None, str], list[StoredCounts]] = defaultdict(list)
    for layer in layers:
        parts = layer.name.split(".")
        number = next((int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 7), None)
        if layer.tally.elements:
            found[number, ".".join(part for part in parts if not part.isdigit())].append(layer.tally)
    numbers = [number for number, _ in found if number is not None]
    if not numbers:
        return [], None
    other = max(numbers) + 1
    start = _common_start({kind for number, kind in found if number is not None})
    points = [
        _Point(other if number is None else number, kind if number is None else kind[start:], total(tallies))
        for (number, kind), tallies in found.items()
    ]
    return sorted(points, key=lambda point: point[:2]), other if len(numbers) < len(found) else None


def _common_start(names: Iterable[str]) -> int:
    """Return the length of the longest prefix of whole dotted parts that all names share, with its last dot."""
    # The last part of a name never belongs to the prefix.
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return sum(len(level[0]) + 1 for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _share(count: int, of: int) -> float:
    """Return ``count`` as a percentage of ``of``, from 0 to 100; 0 if ``of`` is 0."""
    return 100 * count / of if of else 0.0


def _charts(report: VerifyReport) -> Iterator[str]:
    """Yield the HTML of the legend, then of one chart per quantity, such as the SQNR."""
    points, other = _points(report.layers)
    if not points:
        return
    marks = _marks(dict.fromkeys(point.kind for point in points))
    keys = "".join(f"<li>{mark.sample()}{_text(kind)}</li>" for kind, mark in marks.items())
    note = "" if other is None else ' Layers without a number are at "other".'
    yield f'<h2>Layer by layer</h2>\n<ul class="legend">{keys}</ul>\n'
    yield f'<p class="soft">Horizontal axis: layer number.{note}</p>\n'
    for name, title, least, value in _VALUES:
        values = [value(point.tally) for point in points]
        known = [one for one in values if not math.isnan(one)]
        if len(set(known)) == 1 and len(points) > 1:
            yield f'<p id="same-{name}">{title}: {known[0]:.4g} in all layers</p>\n'
        elif known:
            yield _chart(name, title, points, values, marks, other, least)


_NAN = math.nan
# (end of the HTML id, caption, smallest span of the vertical axis, value)
_VALUES: tuple[tuple[str, str, float, Callable[[StoredCounts], float]], ...] = (
    ("sqnr", "SQNR, dB", 6.0, lambda t: _NAN if t.sqnr_db is None else t.sqnr_db),
    ("clipped", "Clipped values, %", 1.0, lambda t: _share(t.saturated, t.compared) if t.compared else _NAN),
    ("largest", "At the largest code, %", 1.0, lambda t: _NAN if t.compared else _share(t.at_max, t.elements)),
    ("zero", "Blocks of zeros, %", 1.0, lambda t: _share(t.zero_blocks, t.blocks)),
)


def _chart(
    name: str,
    title: str,
    points: Sequence[_Point],
    values: Sequence[float],
    marks: Mapping[str, _Mark],
    other: int | None,
    least: float,
) -> str:
    """Return the HTML of one chart, with one line per kind of layer and the layer numbers on the horizontal axis."""
    ticks = _ticks([value for value in values if math.isfinite(value)], least)
    numbers = sorted({point.number for point in points})
    place = _Scale(numbers[0], max(numbers[-1], numbers[0] + 1), ticks[0], ticks[-1])
    lines: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for point, value in zip(points, values, strict=True):
        if not math.isnan(value):
            lines[point.kind].append((place.x(point.number), place.y(value), _tip(point, value, other)))
    drawn = "".join(_line(lines[kind], mark) for kind, mark in marks.items())
    return (
        f'<figure id="chart-{name}"><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img"'
        f' aria-label="{title}">{_axes(place, numbers, ticks, other)}{drawn}</svg></figure>\n'
    )


def _tip(point: _Point, value: float, other: int | None) -> str:
    """Return the tooltip of a point, such as "mlp.up_proj 3: 20.4", with its kind, layer number and value."""
    number = "" if point.number == other else f" {point.number}"
    return f"{point.kind}{number}: {value:.4g}"


def _ticks(values: Sequence[float], least: float = 0.0) -> list[float]:
    """Return the numbers to label on a chart's vertical axis: two to six round, equally spaced numbers."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if values and high - low < least:
        low = max(low - (least - (high - low)) / 2, min(low, 0.0))
        high = max(high, low + least)
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


def _axes(place: _Scale, numbers: Sequence[int], ticks: Sequence[float], other: int | None) -> str:
    """Return the SVG of a chart's horizontal grid lines and of the labels of both axes."""
    found = []
    for tick in ticks:
        y = place.y(tick)
        found.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _EDGE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    plain = [number for number in numbers if number != other]
    labels = [(number, str(number)) for number in plain[:: -(-len(plain) // 24)]]
    for number, label in [*labels, *([] if other is None else [(other, "other")])]:
        found.append(f'<text x="{place.x(number):.1f}" y="{_HEIGHT - 3}" text-anchor="middle">{label}</text>')
    return "".join(found)


# Colors (distinct for color-blind readers), dashes, and shapes of points. Kinds of layers differ in all three.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c8c8c")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
_SHAPES = (
    "M{x:.1f} {y:.1f}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M{x:.1f} {y:.1f}m-3-3h6v6h-6z",
    "M{x:.1f} {y:.1f}m0-4l4 7h-8z",
    "M{x:.1f} {y:.1f}m0-4l4 4l-4 4l-4-4z",
    "M{x:.1f} {y:.1f}m0 4l4-7h-8z",
)


class _Mark(NamedTuple):
    """How the charts draw the line of one kind of layer: its color, its dashes, and the shape of its points.

    Dashes and shapes differ too, so that readers can tell lines apart without seeing colors.
    """

    color: str
    dash: str
    shape: str

    def sample(self) -> str:
        """Return the SVG of a short line with one point, for an entry of the legend."""
        return (
            f'<svg width="30" height="10"><g fill="{self.color}"><path class="line" stroke="{self.color}"'
            f' stroke-dasharray="{self.dash}" d="M0 5H30"/><path d="{self.shape.format(x=15, y=5)}"/></g></svg>'
        )


def _line(points: Sequence[tuple[float, float, str]], mark: _Mark) -> str:
    """Return the SVG of one line of a chart, with its points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<path class="point" data-y="{y:.1f}" d="{mark.shape.format(x=x, y=y)}"><title>{_text(t)}</title></path>'
        for x, y, t in points
    )
    line = f'<polyline points="{path}" stroke="{mark.color}" stroke-dasharray="{mark.dash}"/>'
    return f'<g fill="{mark.color}" stroke="none">{line}{dots}</g>'


def _marks(kinds: Iterable[str]) -> Mapping[str, _Mark]:
    """Give each kind of layer a mark (color, dashes and shape of points), and return a dict: kind -> mark."""
    return {
        kind: _Mark(_COLORS[i % len(_COLORS)], _DASHES[i % len(_DASHES)], _SHAPES[i % len(_SHAPES)])
        for i, kind in enumerate(kinds)
    }


def _decibels(value: float | None) -> str:
    """Return a number of decibels as text with two decimals, such as "20.41"; "-" for None."""
    return "-" if value is None else f"{value:.2f}"


class _Column(NamedTuple):
    """A column of the table of layers.

    name: the heading.
    cell: a function that returns the HTML of a layer's cell.
    """

    name: str
    cell: Callable[[LayerReport], str]


def _shape(layer: LayerReport) -> str:
    """Return the HTML of the table cell with the shape of a layer, which sorts by the number of elements."""
    return f'<td data-value="{math.prod(layer.shape)}">{"×".join(map(str, layer.shape))}</td>'


def _clipped(layer: LayerReport) -> str:
    """Return the HTML of the table cell with the share of clipped values, which is "-" without a source."""
    found = layer.tally
    return _number(_share(found.saturated, found.compared) if found.compared else None)


_COLUMNS = (
    _Column("layer", lambda layer: f"<td>{_text(layer.name)}</td>"),
    _Column("format", lambda layer: f'<td class="text">{_text(layer.format)}</td>'),
    _Column("shape", _shape),
    _Column("SQNR dB", lambda layer: _number(layer.tally.sqnr_db, _decibels(layer.tally.sqnr_db))),
    _Column("clipped %", _clipped),
    _Column("at the largest code %", lambda layer: _number(_share(layer.tally.at_max, layer.tally.elements))),
    _Column("zero blocks", lambda layer: _number(layer.tally.zero_blocks)),
    _Column("flushed blocks", lambda layer: _number(layer.tally.flushed_blocks if layer.tally.compared else None)),
    _Column("subnormal scales", lambda layer: _number(layer.tally.subnormal_scales)),
    _Column("tensor scale", lambda layer: _number(layer.tensor_scale)),
    _Column("differing bytes", lambda layer: _number(layer.differing if layer.compared else None)),
)


def _columns(report: VerifyReport) -> tuple[_Column, ...]:
    """Return the columns of the table: the layer's name, and columns of values."""
    if len(report.layers) < 2:
        return _COLUMNS
    name, *others = _COLUMNS
    return name, *(one for one in others if len({one.cell(layer) for layer in report.layers}) > 1)


def _labels(columns: Sequence[_Column]) -> str:
    """Return the CSS for narrow pages, which shows the heading of a column before the content of each of its cells."""
    rules = "".join(
        f'#layers td:nth-child({i + 1})::before{{content:"{column.name}"}}' for i, column in enumerate(columns) if i
    )
    return f"@media (max-width: 46rem) {{{rules}}}\n"


def _table(report: VerifyReport, columns: Sequence[_Column]) -> str:
    """Return the HTML table of layers, worst first, or an empty string if there are none."""
    if not report.layers:
        return ""
    heads = "".join(f'<th><button type="button">{column.name}</button></th>' for column in columns)
    layers = worst_first(report)
    rows = "".join(f"<tr>{''.join(column.cell(layer) for column in columns)}</tr>\n" for layer in layers)
    same = [f"{one.name} {_content(one.cell(layers[0]))}" for one in _COLUMNS if one not in columns]
    note = f'<p id="same">All layers: {"; ".join(same)}.</p>\n' if same else ""
    return (
        f'<h2>Layers, worst first</h2>\n{note}<p><label>Filter <input id="filter" type="search"></label> <span'
        ' id="shown" class="soft"></span></p>\n<div class="scroll"><table'
        f' id="layers"><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    )


def _content(cell: str) -> str:
    """Return the HTML between the opening and the closing tag of a table cell."""
    return cell[cell.index(">") + 1 : cell.rindex("<")]


def _number(value: float | None, text: str | None = None) -> str:
    """Return the HTML of a table cell that sorts as a number."""
    if value is None:
        return '<td data-value="NaN">-</td>'
    exact = str(value).replace("inf", "Infinity").replace("nan", "NaN")
    return f'<td data-value="{exact}">{text if text is not None else f"{value:.4g}" if isinstance(value, float) else value}</td>'  # noqa: E501
