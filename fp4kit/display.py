"""Show a Quantized or a Recipe as text and HTML: facts in rows, and bars for a histogram of the scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from html import escape
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, import_to_host, to_host
from fp4kit.formats import ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpack, unswizzle_scales
from fp4kit.quantized.container import PARTS, Quantized
from fp4kit.recipes import ALIASES, ALL_RECIPES, PRODUCER_ALIASES, Recipe
from fp4kit.recipes.schema import EVIDENCE
from fp4kit.recipes.table import is_listed
from fp4kit.reference.codec import exponent_bits

Row = tuple[str, ...]
_BAR = 32  # length of the longest bar, in characters
_MOST_BARS = 16
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
            bars: list[Row] = []
            for label, count, total, length in self._bars():
                eighths = max(round(8 * _BAR * length), 1) if count else 0
                bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
                bars.append((label, f"{count:,}", share(count, total), bar))
            lines += [f"  {self.heading}", *_aligned(bars, right=(0, 1, 2))]
        return "\n".join(line.rstrip() for line in lines)

    def html(self) -> str:
        """Return the panel as one HTML <div> element that contains its own style sheet."""
        parts = [f'<div class="fp4kit"><style>{_STYLE}</style><div class="fp4kit-title">{escape(self.title)}</div>']
        parts.append(_table(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.facts))
        if self.rows:
            parts.append(_table([_html_row(self.columns, "th"), *map(_html_row, self.rows)]))
        if self.bars:
            bars = []
            for label, count, total, length in self._bars():
                cells = "".join(f'<td class="n">{escape(t)}</td>' for t in (label, f"{count:,}", share(count, total)))
                bar = f'<div class="bar" style="width:{16 * length:.2f}em"></div>' if count else ""
                bars.append(f"<tr>{cells}<td>{bar}</td></tr>")
            parts += [f"<div>{escape(self.heading)}</div>", _table(bars, "bars")]
        return "".join(parts) + "</div>"

    def _bars(self) -> Iterator[tuple[str, int, int, float]]:
        """Yield (label, count, sum of all counts, length relative to the longest bar) for each bar."""
        counts = [count for _, count in self.bars]
        for label, count in self.bars:
            yield label, count, sum(counts), count / max(counts)


class Shown:
    """A result that print() shows as text, and a notebook as HTML: the panels that its method _panels returns."""

    def _panels(self) -> Iterable[Panel]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(panel.text() for panel in self._panels())

    def _repr_html_(self) -> str:
        return "".join(panel.html() for panel in self._panels())


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


def _html_row(row: Row, tag: str = "td") -> str:
    """Return a row of a text table as a row of an HTML table, with all columns but the first aligned to the right."""
    right = ' class="n"'
    cells = (f"<{tag}{right if i else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))
    return f"<tr>{''.join(cells)}</tr>"


def _table(rows: Iterable[str], kind: str = "facts") -> str:
    """Return an HTML table of the given HTML rows, or an empty string if there are none. kind: its CSS class."""
    body = "".join(rows)
    return f'<table class="{kind}">{body}</table>' if body else ""


CHUNK_BYTES = 1 << 20  # codes per chunk; with the int64 copy that bincount makes, a chunk takes 9 MiB


@dataclass(frozen=True)
class Statistics:
    """Statistics of the codes and scales of a Quantized.

    Attributes:
        values: number of values.
        saturated: values whose code has the largest magnitude of the format, or a larger one.
        nan: values whose code is NaN.
        blocks: number of blocks, 0 for a recipe without blocks.
        zero_blocks: blocks whose codes are all zero.
        scales: the distinct block scales as float32. For a recipe without block scales, the distinct tensor scales.
        counts: how often each scale occurs.
    """

    values: int
    saturated: int
    nan: int
    blocks: int
    zero_blocks: int
    scales: np.ndarray
    counts: np.ndarray


def statistics_of(q: Quantized) -> Statistics:
    """Return the statistics of a Quantized, counted over all of its codes and scales."""
    fmt, r = q.recipe.element, q.recipe
    (packed,) = import_arrays("statistics", packed=q.packed)
    of_rows = None
    if isinstance(fmt, IntegerOrFloat):  # its codes have no values without their scale
        stored = import_to_host("statistics", scales=q.block_scale)
        of_rows = unswizzle_scales(stored, q.scale_layout, q.scale_shape).reshape(-1, q.scale_shape[-1])
    by_byte, row, saturated, nan, blocks, zeros = np.zeros(256, np.int64), 0, 0, 0, 0, 0
    for chunk in _chunks(packed, r.block_rows):
        if of_rows is not None and isinstance(fmt, IntegerOrFloat):
            scales = of_rows[row : row + len(chunk)]
            values = fmt.values_of(unpack(chunk).reshape(*scales.shape, r.block_size), scales)
            saturated += int(np.count_nonzero(np.abs(values) >= fmt.max))
            row, empty = row + len(chunk), _zero_words(values, r)
        else:
            by_byte += np.bincount(chunk.reshape(-1), minlength=256)
            empty = _zero_blocks(chunk, r) if r.block else np.zeros(0, bool)
        blocks, zeros = blocks + empty.size, zeros + int(np.count_nonzero(empty))
    if of_rows is None:
        pairs = by_byte.reshape(16, 16)  # high nibble, low nibble
        by_code = by_byte[: 2**fmt.bits] if fmt.packing.codes == 1 else pairs.sum(0) + pairs.sum(1)
        saturated, nan = int(by_code[np.abs(fmt.values) >= fmt.max].sum()), int(by_code[np.isnan(fmt.values)].sum())
    return Statistics(prod(q.shape), saturated, nan, blocks, zeros, *_scales(q))


def _chunks(packed: Any, block_rows: int) -> Iterator[np.ndarray]:
    """Yield the stored codes in chunks (rows, bytes) of at most 1 MiB, as NumPy arrays."""
    *_, rows, width = packed.shape if packed.ndim > 1 else (1, *packed.shape)
    if not packed.size:
        return
    rows = packed.size // width if block_rows == 1 else rows
    step = max(CHUNK_BYTES // (width * block_rows), 1) * block_rows
    for matrix in packed.reshape(-1, rows, width):
        for start in range(0, rows, step):
            yield to_host(matrix[start : start + step])


def _zero_blocks(codes: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where a block has only zeros, of either sign."""
    fmt, byte = recipe.element, np.arange(256)
    used = np.resize(fmt.values != 0, 256)
    used = used if fmt.packing.codes == 1 else used[byte & 15] | used[byte >> 4]
    length = fmt.packing.length(recipe.block_size)
    words = used[codes].view(np.uint64 if length % 8 == 0 else bool)  # a block of NVFP4 is one 8-byte word
    return _zero_words(words.reshape(len(codes), -1, length // words.itemsize), recipe)


def _zero_words(words: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where every word of a block is 0 or False."""
    used = np.asarray(words.any(-1))
    if recipe.block_rows > 1:
        used = np.logical_or.reduceat(used, np.arange(0, len(used), recipe.block_rows), axis=0)
    return ~used


def _scales(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct block scales of q as float32, and how often each occurs."""
    part = import_to_host("statistics", scales=q.tensor_scale if q.block_scale is None else q.block_scale)
    if q.block_scale is None or q.recipe.scale is None:
        return np.unique(part, return_counts=True)
    linear = unswizzle_scales(part, q.scale_layout, q.scale_shape)[..., :: q.recipe.scale_bytes]
    if isinstance(q.recipe.element, IntegerOrFloat):
        linear = q.recipe.element.scale_codes(linear)
    counts = np.bincount(linear.reshape(-1), minlength=256)
    values = np.resize(q.recipe.scale.values, 256)
    return values[counts > 0], counts[counts > 0]


def by_exponent(scales: np.ndarray, counts: np.ndarray) -> tuple[tuple[str, int], ...]:
    """Return a histogram of the scales, grouped by floor(log2(|scale|)), as (label, count) bars in increasing order.

    If there would be more than 16 bars besides those of 0, infinity and NaN, neighboring exponents share a bar.
    """
    sizes = np.abs(scales)
    nonzero = (sizes > 0) & np.isfinite(sizes)
    exponents, place = np.unique(np.frexp(sizes[nonzero])[1] - 1, return_inverse=True)
    sums = np.zeros(len(exponents), np.int64)
    np.add.at(sums, place, counts[nonzero])
    special = {"0": sizes == 0, "inf": np.isinf(sizes), "NaN": np.isnan(sizes)}
    zero, inf, nan = ([(name, int(counts[where].sum()))] if where.any() else [] for name, where in special.items())
    width = 1
    while len({e // width for e in exponents}) > _MOST_BARS:
        width *= 2
    lows = sorted({int(e) // width * width for e in exponents})
    if lows and (lows[-1] - lows[0]) // width < _MOST_BARS:
        lows = list(range(lows[0], lows[-1] + 1, width))
    bars = []
    for low in lows:
        inside = (low <= exponents) & (exponents < low + width)
        bars.append((f"2^{low}" if width == 1 else f"2^{low} to 2^{low + width - 1}", int(sums[inside].sum())))
    return (*zero, *bars, *inf, *nan)


def quantized_panel(q: Quantized) -> Panel:
    """Read all codes and scales of a Quantized, and return its panel."""
    found = statistics_of(q)
    facts = [
        ("array", f"{q.shape} {q.dtype}, blocks along axis {q.axis}"),
        *((name, _held(getattr(q, name))) for name in PARTS if getattr(q, name) is not None),
        ("size", f"{q.nbytes:,} bytes, {q.bits_per_value:.3g} bits per value"),
    ]
    if q.block_scale is not None:
        rows, columns = q.recipe.block or (1, 1)
        facts.append(("block scales", f"{q.recipe.scale}, one per {rows} x {columns} elements, {q.scale_layout}"))
    facts += _other_levels(q) if q.recipe.levels and q.packed.size else []
    finite = found.scales[np.isfinite(found.scales)]
    if finite.size and found.counts.sum() > 1:
        facts.append(("scales", f"{finite.min():.6g} to {finite.max():.6g}"))
    largest = f"{found.saturated:,} of magnitude {q.recipe.element.max:g} or more"
    facts.append(("largest code", f"{share(found.saturated, found.values)} of values: {largest}"))
    if finite.size and not q.recipe.levels:
        factor = 1.0 if q.block_scale is None or q.tensor_scale is None else _largest(q.tensor_scale)
        bound = float(q.recipe.element.max) * float(np.abs(finite).max()) * factor
        facts.append(("bound", f"{bound:.4g}, the largest value that the scales allow"))
    if found.blocks:
        facts.append(
            ("zero blocks", f"{share(found.zero_blocks, found.blocks)}: {found.zero_blocks:,} of {found.blocks:,}")
        )
    if found.nan:
        facts.append(("NaN", f"{found.nan:,} codes"))
    kind = "tensor scales" if q.block_scale is None else "block scales"
    for where, what in ((~np.isfinite(found.scales), "NaN or infinite"), (found.scales < 0, "negative")):
        odd = int(found.counts[where].sum())
        if odd:
            facts.append(("note", f"{odd:,} of {int(found.counts.sum()):,} {kind} are {what}"))
    if q.block_scale is not None and q.tensor_scale is not None:
        outer = import_to_host("statistics", scales=q.tensor_scale)
        odd = int(np.count_nonzero(~np.isfinite(outer) | (outer == 0)))
        if odd:
            facts.append(("note", f"{odd:,} of {outer.size:,} tensor scales are NaN, infinite or 0"))
    if found.saturated and isinstance(q.tensor_amax, np.ndarray) and not q.tensor_amax.any():
        facts.append(("note", "codes are not zero although tensor_amax is 0: x holds NaN, or tensor_amax was passed"))
    bars = by_exponent(found.scales, found.counts) if found.counts.sum() > 1 else ()
    return Panel(f"Quantized {q.recipe.title}", tuple(facts), heading="scales by exponent", bars=bars)


def _largest(tensor_scale: Any) -> float:
    """Return the largest finite magnitude of tensor scales; 0 if there is none."""
    sizes = np.abs(import_to_host("statistics", scales=tensor_scale))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _other_levels(q: Quantized) -> list[tuple[str, str]]:
    """Return a (name, text) pair for each level of a hierarchical recipe other than the block scales."""
    r, facts = q.recipe, []
    if r.tensor_scaling == "block":
        outer = import_to_host("statistics", scales=q.tensor_scale)
        text = f"one per 1 x {r.tensor_columns} elements, {outer.min():.6g} to {outer.max():.6g}"
        facts.append(("outer scales", f"{r.levels[0].format}, {text}"))
    stored = import_to_host("statistics", scales=q.block_scale).reshape(-1, q.scale_shape[-1])
    for level, bits in zip(r.exponent_levels, exponent_bits(stored, r), strict=True):
        text = f"one per 1 x {level.columns} elements, {share(int(bits.sum()), bits.size)} set"
        facts.append(("exponent bits", text))
    return facts


def text_of(q: Quantized) -> str:
    """Return the panel of a Quantized as text, for print."""
    # If the arrays hold no values, for example because JAX traces them, return repr(q).
    panel = _panel_if_there(q)
    return repr(q) if panel is None else panel.text()


def html_of(q: Quantized) -> str | None:
    """Return the panel of a Quantized as HTML, for notebooks."""
    # If the arrays hold no values, for example because JAX traces them, return None; a notebook then shows repr(q).
    panel = _panel_if_there(q)
    return None if panel is None else panel.html()


def _panel_if_there(q: Quantized) -> Panel | None:
    """Return the panel of a Quantized, or None if its arrays hold no values."""
    try:
        q.imported()  # raises for traced arrays
        return quantized_panel(q)
    except (TypeError, ValueError, AttributeError, BufferError):
        return None


def _held(array: Any) -> str:
    """Return a description of an array: dtype, shape and library. For a scalar on the host, also its value."""
    place = f" in {type(array).__module__.partition('.')[0]}"
    value = f": {float(array):.9g}" if isinstance(array, np.ndarray) and not array.ndim else ""
    return f"{array.dtype} {tuple(array.shape)}{place}{value}"


# The fields that recipe_panel() describes in words or in the title, so that _rules leaves them out.
_DESCRIBED = ("id", "element", "scale", "block", "source", "exact", "versions", "tensor_scaling", "levels")


def recipe_panel(r: Recipe) -> Panel:
    """Return the panel of a recipe: its aliases, formats, rules and sources, and all other fields that are not
    default.
    """
    formulas = f"fp4kit.explain(x, {r.id!r}, index) applies them step by step" if is_listed(r) else ""
    is_variant = r.id in ALL_RECIPES and not is_listed(r)  # what is said of the producer does not hold for it
    names = [name for name, target in ALIASES.items() if target == r.id and not is_variant]
    kind = f"a variant of {r.id}, not in the table" if is_variant else "in the table" if is_listed(r) else "your own"
    facts = [
        ("recipe", f"{kind}, also called {', '.join(names)}" if names else kind),
        ("elements", f"{r.element}, {r.element.bits} bits, up to {r.element.max:g}"),
        ("scales", ", ".join(map(str, r.scale_levels))),
        *_rules(r),
        ("formulas", formulas),
        ("exact", r.exact),
        ("evidence", evidence_text(r) if is_listed(r) else ""),
        *(
            (alias.id, f"{alias.source}, {alias.exact}")
            for alias in PRODUCER_ALIASES.values()
            if alias.of == r.id and not is_variant
        ),
        ("source", r.source),
        *((("versions", str(r.versions)),) if r.versions else ()),
    ]
    return Panel(f"Recipe {r.title}", tuple(fact for fact in facts if fact[1]))


def format_panel(f: ElementFormat) -> Panel:
    """Return the panel of an element format: the columns of `fp4kit formats`."""
    nan = "-" if f.specials == "none" else hex(f.nan_code) + (" and others, inf" if f.specials == "ieee" else "")
    values = " ".join(f"{v:g}" for v in f.magnitudes) if len(f.magnitudes) <= 8 else f"{len(f.magnitudes)} magnitudes"
    normal = f"{f.min_normal:g}" if not f.is_integer else "-"
    facts = ("bits", str(f.bits)), ("largest", f"{f.max:g}"), ("smallest normal", normal)
    return Panel(f.name, (*facts, ("smallest", f"{f.min_subnormal:g}"), ("NaN", nan), ("values", values)))


def evidence_text(r: Recipe) -> str:
    """Return how it is known that a recipe of the table gives its producer's bits: "recorded on a CPU (ao)"."""
    found = (f"{EVIDENCE[kind]} ({', '.join(names)})" for kind, names in r.evidence.items())
    return ", ".join(found) or "derived from the producer's source code"


def _rules(r: Recipe) -> list[tuple[str, str]]:
    """Return (name of a field, its value as text) pairs: every rule, and every other field that is not its default."""
    shown = [field for field in fields(r) if field.name not in _DESCRIBED]
    rules = [field.name for field in shown if field.name.endswith("_rule")]
    names = [field.name for field in shown if field.name in rules or getattr(r, field.name) != field.default]
    return [(name.replace("_", " "), str(getattr(r, name))) for name in names if getattr(r, name) is not None]
