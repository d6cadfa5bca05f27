"""Show a Quantized or a Recipe as text and HTML: facts in rows, and bars for a histogram of the scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from html import escape
from math import prod
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.formats import Codebook, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpack, unswizzle_scales
from fp4kit.quantized.container import PARTS, Quantized
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, Recipe
from fp4kit.recipes.table import is_listed

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
    if isinstance(q.recipe.element, IntegerOrFloat):
        return _statistics_of_if4(q, q.recipe.element)
    (packed,) = import_arrays("statistics", packed=q.packed)
    by_byte, blocks, zeros = np.zeros(256, np.int64), 0, 0
    for chunk in _chunks(packed, q.recipe.block_rows):
        by_byte += np.bincount(chunk.reshape(-1), minlength=256)
        if q.recipe.block:
            empty = _zero_blocks(chunk, q.recipe)
            blocks, zeros = blocks + empty.size, zeros + int(np.count_nonzero(empty))
    by_code, values = _by_code(by_byte, q.recipe.element), q.recipe.element.values
    saturated, nan = int(by_code[np.abs(values) >= q.recipe.element.max].sum()), int(by_code[np.isnan(values)].sum())
    return Statistics(prod(q.shape), saturated, nan, blocks, zeros, *_scales(q))


def _statistics_of_if4(q: Quantized, fmt: IntegerOrFloat) -> Statistics:
    """Return the statistics of a Quantized with elements IF4."""
    packed, stored = import_arrays("statistics", packed=q.packed, scales=q.block_scale)
    scales = unswizzle_scales(to_host(stored), q.scale_layout, q.scale_shape).reshape(-1, q.scale_shape[-1])
    row = saturated = blocks = zeros = 0
    for chunk in _chunks(packed, q.recipe.block_rows):
        used = scales[row : row + len(chunk)]
        values = fmt.values_of(unpack(chunk).reshape(*used.shape, q.recipe.block_size), used)
        saturated += int(np.count_nonzero(np.abs(values) >= fmt.max))
        empty = _zero_words(values, q.recipe)
        blocks, zeros, row = blocks + empty.size, zeros + int(np.count_nonzero(empty)), row + len(chunk)
    return Statistics(prod(q.shape), saturated, 0, blocks, zeros, *_scales(q))


def _chunks(packed: Any, block_rows: int) -> Iterator[np.ndarray]:
    """Yield the stored codes in chunks (rows, bytes) of at most 1 MiB, as NumPy arrays."""
    *_, rows, width = packed.shape if packed.ndim > 1 else (1, *packed.shape)
    if not packed.size:
        return
    rows = packed.size // width if block_rows == 1 else rows
    matrices = packed.reshape(-1, rows, width)
    step = max(CHUNK_BYTES // (width * block_rows), 1) * block_rows
    for matrix in matrices:
        for start in range(0, rows, step):
            chunk = matrix[start : start + step]
            yield to_host(chunk)


def _by_code(by_byte: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """Convert counts per byte value (256 counts) to counts per element code of ``fmt``, in code order."""
    if fmt.packing.codes == 1:
        return by_byte[: 2**fmt.bits]
    pairs = by_byte.reshape(16, 16)  # high nibble, low nibble
    return pairs.sum(0) + pairs.sum(1)


def _zero_blocks(codes: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where a block has only zeros, of either sign."""
    fmt = recipe.element
    if isinstance(fmt, Codebook):
        pairs = np.array([fmt.values[byte & 15] != 0 or fmt.values[byte >> 4] != 0 for byte in range(256)])
        return _zero_words(pairs[codes].reshape(len(codes), -1, fmt.packing.length(recipe.block_size)), recipe)
    zero = 0xFF if fmt.is_integer else ~fmt.sign_bit & 0xFF
    mask = zero & 0x0F | (zero & 0x0F) << 4 if fmt.packing.codes > 1 else zero
    length = fmt.packing.length(recipe.block_size)
    wide = np.uint64 if length % 8 == 0 else np.uint8  # a block of NVFP4 is one 8-byte word
    words = np.ascontiguousarray(codes).view(wide) & np.array([mask] * np.dtype(wide).itemsize, np.uint8).view(wide)
    return _zero_words(words.reshape(len(codes), -1, length // words.itemsize), recipe)


def _zero_words(words: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return a bool array (rows of blocks, blocks per row): True where every word of a block is 0 or False."""
    used = np.asarray(words.any(-1))
    if recipe.block_rows > 1:
        used = np.logical_or.reduceat(used, np.arange(0, len(used), recipe.block_rows), axis=0)
    return ~used


def _scales(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct block scales of q as float32, and how often each occurs."""
    part = q.block_scale if q.block_scale is not None else q.tensor_scale
    (part,) = import_arrays("statistics", scales=part)
    part = to_host(part)
    if q.block_scale is None or q.recipe.scale is None:
        return np.unique(part, return_counts=True)
    linear = unswizzle_scales(part, q.scale_layout, q.scale_shape)
    if isinstance(q.recipe.element, IntegerOrFloat):
        linear = q.recipe.element.scale_codes(linear)
    counts = np.bincount(linear.reshape(-1), minlength=256)
    values = np.resize(q.recipe.scale.values, 256)
    return values[counts > 0], counts[counts > 0]


def by_exponent(scales: np.ndarray, counts: np.ndarray, max_bars: int = 16) -> tuple[tuple[str, int], ...]:
    """Return a histogram of the scales, grouped by floor(log2(|scale|)), as (label, count) bars in increasing order."""
    # If there would be more than ``max_bars`` bars besides those, neighboring exponents share a bar.
    sizes = np.abs(scales)
    nonzero = (sizes > 0) & np.isfinite(sizes)
    exponents, place = np.unique(np.frexp(sizes[nonzero])[1] - 1, return_inverse=True)
    sums = np.zeros(len(exponents), np.int64)
    np.add.at(sums, place, counts[nonzero])
    special = {"0": sizes == 0, "inf": np.isinf(sizes), "NaN": np.isnan(sizes)}
    zero, inf, nan = ([(name, int(counts[where].sum()))] if where.any() else [] for name, where in special.items())
    return (*zero, *_binned(dict(zip(exponents.tolist(), sums.tolist(), strict=True)), max_bars), *inf, *nan)


def _binned(counts: dict[int, int], max_bars: int) -> Iterator[tuple[str, int]]:
    """Yield the bars (label, count) of a histogram of exponents."""
    width = 1
    while len({e // width for e in counts}) > max_bars:
        width *= 2
    lows = sorted({e // width * width for e in counts})
    if lows and (lows[-1] - lows[0]) // width < max_bars:
        lows = list(range(lows[0], lows[-1] + 1, width))
    for low in lows:
        label = f"2^{low}" if width == 1 else f"2^{low} to 2^{low + width - 1}"
        yield label, sum(counts.get(e, 0) for e in range(low, low + width))


def quantized_panel(q: Quantized) -> Panel:
    """Read all codes and scales of a Quantized, and return its panel."""
    found = statistics_of(q)
    facts = [
        ("array", f"{q.shape} {q.dtype}, blocks along axis {q.axis}"),
        *((name, _held(getattr(q, name))) for name in PARTS if getattr(q, name) is not None),
        ("size", f"{q.nbytes:,} bytes, {q.bits_per_value:.3g} bits per value"),
        *_scale_facts(q, found),
        (
            "largest code",
            f"{share(found.saturated, found.values)} of values: {found.saturated:,} of magnitude {_largest(q)}",
        ),
    ]
    if found.blocks:
        facts.append(
            ("zero blocks", f"{share(found.zero_blocks, found.blocks)}: {found.zero_blocks:,} of {found.blocks:,}")
        )
    if found.nan:
        facts.append(("NaN", f"{found.nan:,} codes"))
    if found.saturated and isinstance(q.tensor_amax, np.ndarray) and not q.tensor_amax.any():
        facts.append(("note", "codes are not zero although tensor_amax is 0: x holds NaN, or tensor_amax was passed"))
    bars = by_exponent(found.scales, found.counts) if found.counts.sum() > 1 else ()
    return Panel(f"Quantized {q.recipe.id}", tuple(facts), heading="scales by exponent", bars=bars)


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


def _scale_facts(q: Quantized, found: Statistics) -> list[tuple[str, str]]:
    """Return (name, text) pairs about the scales of q, for its panel."""
    facts = (
        [] if q.block_scale is None else [("block scales", f"{q.recipe.scale}, one per {_block(q)}, {q.scale_layout}")]
    )
    finite = found.scales[np.isfinite(found.scales)]
    if finite.size and found.counts.sum() > 1:
        facts.append(("scales", f"{finite.min():.6g} to {finite.max():.6g}"))
    return facts


def _block(q: Quantized) -> str:
    """Return the size of a block of q's recipe as text, rows x columns: "1 x 32 elements"."""
    rows, columns = q.recipe.block or (1, 1)
    return f"{rows} x {columns} elements"


def _largest(q: Quantized) -> str:
    """Return text for the magnitudes that the row "largest code" counts, such as "6 or more" for E2M1."""
    return f"{q.recipe.element.max:g} or more"


# The fields that recipe_panel() describes in words or in the title, so that _rules leaves them out.
_DESCRIBED = (
    "id",
    "element",
    "scale",
    "block",
    "source",
    "exact",
    "versions",
    "tensor_scaling",
)


def recipe_panel(r: Recipe) -> Panel:
    """Return the panel of a recipe: its aliases, formats, rules and sources, and all other fields that are not
    default.
    """
    names = [name for name, target in ALIASES.items() if target == r.id]
    kind = "in the table" if is_listed(r) else "a variant, not in the table"
    facts = [
        ("recipe", f"{kind}, also called {', '.join(names)}" if names else kind),
        ("elements", f"{r.element}, {r.element.bits} bits, up to {r.element.max:g}"),
        ("scales", _scales_text(r)),
        *_rules(r),
        ("formulas", f"fp4kit.explain(x, {r.id!r}, index) applies them step by step" if is_listed(r) else ""),
        ("exact", r.exact),
        *((alias.id, f"{alias.source}, {alias.exact}") for alias in PRODUCER_ALIASES.values() if alias.of == r.id),
        ("source", r.source),
        *((("versions", str(r.versions)),) if r.versions else ()),
    ]
    return Panel(f"Recipe {r.id}", tuple(facts))


def _scales_text(r: Recipe) -> str:
    """Return the scales of a recipe as text, such as "E4M3 per 1 x 16 block, float32 per tensor"; "" for none."""
    block = f"{r.block[0]} x {r.block[1]} block" if r.block else "block"
    scales = [f"{r.scale} per {block}"] if r.scale else []
    covered = {
        "none": "",
        "tensor": "float32 per tensor",
        "row": "float32 per row",
        "block": f"float32 per {block}",
    }
    return ", ".join(filter(None, [*scales, covered[r.tensor_scaling]]))


def _rules(r: Recipe) -> list[tuple[str, str]]:
    """Return (name of a field, its value as text) pairs: every rule, and every other field that is not its default."""
    shown = [field for field in fields(r) if field.name not in _DESCRIBED]
    rules = [field.name for field in shown if field.name.endswith("_rule")]
    names = [field.name for field in shown if field.name in rules or getattr(r, field.name) != field.default]
    return [(name.replace("_", " "), str(getattr(r, name))) for name in names if getattr(r, name) is not None]
