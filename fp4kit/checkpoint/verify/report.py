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
from fp4kit.checkpoint.findings import grouped
from fp4kit.checkpoint.model.statistics import StoredCounts, total
from fp4kit.checkpoint.verify.verify import LayerReport, VerifyReport
from fp4kit.storage.files import counted, listed, shown, whole_file

DECIBELS = (
    "SQNR is the ratio of the squared weights to the squared errors. At 20 dB, the relative rms error is 10%; 6 dB"
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


def _decibels_of(report: VerifyReport) -> list[tuple[float, str]]:
    """Return (SQNR in decibels, layer) of all layers with a finite SQNR."""
    found = [(layer.tally.sqnr_db, layer.name) for layer in report.layers]
    return [(db, name) for db, name in found if db is not None and math.isfinite(db)]


def summary_of(report: VerifyReport) -> Iterator[str]:
    """Yield one to three lines that summarize a report; none if it has no layers."""
    if not report.layers:
        return
    named = {issue.subject for issue in report.issues}
    total, sound = len(report.layers) + len(report.unread), sum(layer.name not in named for layer in report.layers)
    text = f"{sound} of {counted(total, 'layer')} as expected"
    if report.source is not None and not any(layer.compared for layer in report.layers):
        text = (
            f"{sound} of {counted(total, 'layer')} without a fault; no bytes were compared: name the recipe by"
            " --recipe, which fp4kit identify finds"
        )
    if report.source is None:
        text = f"names, shapes and dtypes of {text}; values were not compared: give --source SRC"
    if report.unread:
        text += f"; not read: {listed(report.unread)}"
    if sound < len(report.layers):
        worst = worst_first(report)[0]
        why = next(issue.sentence for issue in report.issues if issue.subject == worst.name)
        text += f"; the worst: {shown(worst.name)}: {shown(why.partition('; ')[0])}"
    yield text
    if found := _decibels_of(report):
        middle, (least, name) = median(db for db, _ in found), min(found)
        error = f"a relative rms error of {100 * 10 ** (-middle / 20):.3g}%"
        yield f"SQNR: median {middle:.2f} dB, {error}; worst {least:.2f} dB in {shown(name)}"
    if report.parallel is not None and report.clean:
        yield report.parallel.line


def unchecked(report: VerifyReport) -> list[str]:
    """Return one text per thing that the verification did not check; [] if it checked everything that it can."""
    found = []
    if report.source is None and report.layers:
        found.append("the values, which need --source SRC")
    if report.manifest == "none":
        found.append("checksums of the files, because there is no manifest")
    if report.source is not None:
        if alone := sum(not layer.compared for layer in report.layers):
            found.append(f"the bytes of {counted(alone, 'layer')}, which were not encoded again")
    found += filter(None, [report.uncompared])
    if report.unmeasured:
        found.append(f"the input scales of {counted(report.unmeasured, 'layer')}, which need --activations FILE")
    return found


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
    # On narrow pages, the heading of a column is shown before the content of each of its cells.
    heads = (f'#layers td:nth-child({i + 1})::before{{content:"{name}"}}' for i, name in enumerate(columns) if i)
    style += f"@media (max-width: 46rem) {{{''.join(heads)}}}\n"
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
    word = f"{counted(report.errors, 'error')}, {counted(warnings, 'warning')}"
    facts: dict[str, object] = {
        "checkpoint": report.path,
        "source": report.source or "none given",
        "format": ", ".join(report.formats) or "unquantized",
        "recipe": report.recipe or "none recorded",
        **({"scales": report.scales} if report.scales else {}),
        "manifest": report.manifest,
        "layers": len(report.layers),
    }
    if report.source is not None:
        facts["tensors copied"] = report.copied
        counts = (*(layer.differing for layer in report.layers), *(n for _, n in report.changed))
        facts["differing bytes"] = sum(counts)
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    return (
        f'<h1>{_text(report.path.name)}</h1>\n<p id="verdict" class="{verdict}">{word}'
        f'<span class="soft">, fp4kit {_text(__version__)}</span></p>\n<dl>{items}</dl>\n'
    )


def _summary_list(report: VerifyReport) -> str:
    """Return the HTML of the summary: how many layers are as expected, what the SQNR means, and what was not
    checked.
    """
    lines = [*summary_of(report)]
    if _decibels_of(report):
        lines.append(DECIBELS)
    missing = unchecked(report)
    lines += [f"Not checked: {'; '.join(missing)}"] if missing else []
    if not lines:
        return ""
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<h2>Summary</h2>\n<ul id="summary">{items}</ul>\n'


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
    left, low, high = numbers[0], ticks[0], ticks[-1]
    right = max(numbers[-1], left + 1)

    def x(number: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _EDGE) * (number - left) / (right - left)

    def y(value: float) -> float:
        """Infinities are placed at the edges."""
        return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (min(max(value, low), high) - low) / (high - low)

    drawn = []
    for tick in ticks:
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _EDGE}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    plain = [number for number in numbers if number != other]
    labels: list[tuple[int, object]] = [(number, number) for number in plain[:: -(-len(plain) // 24)]]
    for number, label in [*labels, *([] if other is None else [(other, "other")])]:
        drawn.append(f'<text x="{x(number):.1f}" y="{_HEIGHT - 3}" text-anchor="middle">{label}</text>')
    lines: dict[str, list[tuple[float, float, str]]] = {kind: [] for kind in marks}
    for point, value in zip(points, values, strict=True):
        if not math.isnan(value):
            tip = f"{point.kind}{'' if point.number == other else f' {point.number}'}: {value:.4g}"
            lines[point.kind].append((x(point.number), y(value), tip))
    drawn += [marks[kind].line(line) for kind, line in lines.items()]
    return (
        f'<figure id="chart-{name}"><figcaption>{title}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{title}">{"".join(drawn)}</svg></figure>\n'
    )


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

    def line(self, points: Sequence[tuple[float, float, str]]) -> str:
        """Return the SVG of one line of a chart, with its points (x, y, tooltip)."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        dots = "".join(
            f'<path class="point" data-y="{y:.1f}" d="{self.shape.format(x=x, y=y)}"><title>{_text(t)}</title></path>'
            for x, y, t in points
        )
        line = f'<polyline points="{path}" stroke="{self.color}" stroke-dasharray="{self.dash}"/>'
        return f'<g fill="{self.color}" stroke="none">{line}{dots}</g>'


def _marks(kinds: Iterable[str]) -> Mapping[str, _Mark]:
    """Give each kind of layer a mark (color, dashes and shape of points), and return a dict: kind -> mark."""
    return {
        kind: _Mark(_COLORS[i % len(_COLORS)], _DASHES[i % len(_DASHES)], _SHAPES[i % len(_SHAPES)])
        for i, kind in enumerate(kinds)
    }


def _shape(layer: LayerReport) -> str:
    """Return the HTML of the table cell with the shape of a layer, which sorts by the number of elements."""
    return f'<td data-value="{math.prod(layer.shape)}">{"×".join(map(str, layer.shape))}</td>'


def _clipped(layer: LayerReport) -> str:
    """Return the HTML of the table cell with the share of clipped values, which is "-" without a source."""
    found = layer.tally
    return _number(_share(found.saturated, found.compared) if found.compared else None)


_Cell = Callable[[LayerReport], str]
# heading -> a function that returns the HTML of a layer's cell
_COLUMNS: dict[str, _Cell] = {
    "layer": lambda layer: f"<td>{_text(layer.name)}</td>",
    "format": lambda layer: f'<td class="text">{_text(layer.format)}</td>',
    "shape": _shape,
    "SQNR dB": lambda layer: _number(layer.tally.sqnr_db, ".2f"),
    "clipped %": _clipped,
    "at the largest code %": lambda layer: _number(_share(layer.tally.at_max, layer.tally.elements)),
    "zero blocks": lambda layer: _number(layer.tally.zero_blocks, "d"),
    "flushed blocks": lambda layer: _number(layer.tally.flushed_blocks if layer.tally.compared else None, "d"),
    "subnormal scales": lambda layer: _number(layer.tally.subnormal_scales, "d"),
    "tensor scale": lambda layer: _number(layer.tensor_scale),
    "differing bytes": lambda layer: _number(layer.differing if layer.compared else None, "d"),
}


def _columns(report: VerifyReport) -> dict[str, _Cell]:
    """Return the columns of the table whose cells, such as the layers' names, are not equal in all layers."""
    if len(report.layers) < 2:
        return _COLUMNS
    return {name: cell for name, cell in _COLUMNS.items() if len({cell(layer) for layer in report.layers}) > 1}


def _table(report: VerifyReport, columns: Mapping[str, _Cell]) -> str:
    """Return the HTML table of layers, worst first, or an empty string if there are none."""
    if not report.layers:
        return ""
    heads = "".join(f'<th><button type="button">{name}</button></th>' for name in columns)
    layers = worst_first(report)
    rows = "".join(f"<tr>{''.join(cell(layer) for cell in columns.values())}</tr>\n" for layer in layers)
    cells = {name: cell(layers[0]) for name, cell in _COLUMNS.items() if name not in columns}
    same = [f"{name} {cell[cell.index('>') + 1 : cell.rindex('<')]}" for name, cell in cells.items()]
    note = f'<p id="same">All layers: {"; ".join(same)}.</p>\n' if same else ""
    return (
        f'<h2>Layers, worst first</h2>\n{note}<p><label>Filter <input id="filter" type="search"></label> <span'
        ' id="shown" class="soft"></span></p>\n<div class="scroll"><table'
        f' id="layers"><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    )


def _number(value: float | None, shown_as: str = ".4g") -> str:
    """Return the HTML of a table cell that sorts as a number."""
    if value is None:
        return '<td data-value="NaN">-</td>'
    exact = str(value).replace("inf", "Infinity").replace("nan", "NaN")
    return f'<td data-value="{exact}">{value:{shown_as}}</td>'
