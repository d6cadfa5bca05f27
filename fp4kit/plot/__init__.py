"""Draw pictures of formats, blocks, recipes and layers with matplotlib. Import it by name: import fp4kit.plot.

Every function takes `ax`, the matplotlib Axes to draw on; None makes a new figure. It returns the Axes. The pictures
can be read without color: colors differ in brightness, and lines, bars and marks also differ in dashes, hatches and
shapes.

matplotlib comes with the extra `plot`: pip install "fp4kit[plot]".

Examples:
    >>> import fp4kit.plot, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    >>> ax = fp4kit.plot.block(x, "nvfp4-te", (0, 0))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fp4kit import formats
from fp4kit.arguments import as_index, as_mapping, explains_calls, only_public, written
from fp4kit.arrays.imports import import_to_host
from fp4kit.formats import IF4_INTEGER_BIT, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpacked, unswizzle_scales
from fp4kit.ops.compare import RecipeComparison, amax_for
from fp4kit.ops.explain import Explanation, checked_index, explain
from fp4kit.ops.matmul import ErrorBudget
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.plot.style import BLUE, GREEN, GREY, MARKS, ORANGE, STYLE, axes, without_frame
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import on_host
from fp4kit.recipes import Recipe, is_simple, recipe_of
from fp4kit.reference.search import under_every_scale
from fp4kit.types import RecipeId

__all__ = [
    "block",
    "compare_recipes",
    "dots",
    "elements",
    "error_against_scale",
    "histogram",
    "layers",
    "matrix",
    "memory",
    "number_line",
    "product",
    "use_style",
]

only_public(globals())


@explains_calls
def histogram(q: Quantized, *, ax: Any = None) -> Any:
    """Draw how often a quantized array uses each value of its element format.

    The bars of the largest magnitude, where elements may have been clipped, are hatched. Values that the array does not
    use have bars of height 0. Codes of NaN and infinity are left out.

    Args:
        q: the quantized array, such as the result of fp4kit.quantize.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with one bar per finite value of the format. The height of a bar is a share of all elements.

    Raises:
        TypeError: q is not a Quantized.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"plot.histogram: q is {type(q).__name__}; needs a Quantized, the result of fp4kit.quantize")
    element = q.recipe.element
    values, shares = _shares(on_host(q, "plot.histogram"))
    shares, values = shares[np.isfinite(values)], values[np.isfinite(values)]
    ax = axes(ax, 8, 3.5)
    positions, few = np.arange(len(values)), len(values) <= 32
    bars = ax.bar(positions, shares, width=0.85, color=BLUE, edgecolor="black", linewidth=0.5 if few else 0)
    top = np.abs(values).max()
    for bar, value in zip(bars, values, strict=True):
        if abs(value) == top:
            bar.set(hatch="///", facecolor=ORANGE)
    ticks = positions[:: 1 if few else len(values) // 12]
    ax.set_xticks(ticks, [f"{values[i]:.3g}" for i in ticks], rotation=90 if len(ticks) > 15 else 0)
    ax.set(xlabel=f"value of {element.name} (hatched: the largest)", ylabel="share of elements", title=q.recipe.title)
    without_frame(ax)
    return ax


def _shares(q: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, shares): the distinct values of the elements of q in ascending order, and the share of each."""
    element = q.recipe.element
    codes = unpacked(q.packed, element.packing)
    if isinstance(element, IntegerOrFloat) and q.block_scale is not None:
        scales = unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape)
        blocks = codes.reshape(*scales.shape, q.recipe.block_size)
        counts = np.bincount((blocks | (16 * element.are_integers(scales)[..., None])).reshape(-1), minlength=32)
        all_values = np.concatenate([element.values_under(False), element.values_under(True)])
    else:
        counts, all_values = np.bincount(codes.reshape(-1), minlength=2**element.bits), element.values
    values, inverse = np.unique(all_values + 0.0, return_inverse=True)
    return values, np.bincount(inverse, counts, len(values)) / max(codes.size, 1)


@explains_calls
def layers(ratios: Mapping[str, float] | Mapping[str, Mapping[str, float]], *, ax: Any = None) -> Any:
    """Draw the SQNR of layers: as bars with the worst layer on top, or as marks for several recipes.

    SQNR is the signal-to-quantization-noise ratio: 6 dB more halves the error. The bars of layers more than 1 dB below
    the median are hatched.

    Args:
        ratios: {name of the layer: SQNR in dB}, such as {name: fp4kit.compare(x, q).sqnr}. A layer without an error
            (inf) or without a signal (-inf) has a label, but no bar. Or {recipe: {name of the layer: SQNR in dB}}, with
            the same layers for every recipe; an infinite ratio then has no mark.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. For one recipe, it has the layers from the worst to the best as bars. For several recipes, it has one
        line of marks per recipe, with the layers from left to right in the order of the first recipe.

    Raises:
        ValueError: there are no layers, a ratio is NaN, or two recipes have different layers.
    """
    if not as_mapping("plot.layers", "ratios", ratios):
        raise ValueError("plot.layers: ratios is empty; needs at least one layer")
    per_recipe = {id: ratio for id, ratio in ratios.items() if isinstance(ratio, Mapping)}
    series: dict[str, Mapping[str, float]] = per_recipe or {"": ratios}  # type: ignore[dict-item]
    names = list(next(iter(series.values())))
    for id, found in series.items():
        if found.keys() != {*names}:
            raise ValueError(f"plot.layers: {id} and {next(iter(series))} have different layers; needs equal ones")
        if missing := [name for name, ratio in found.items() if np.isnan(ratio)]:
            raise ValueError(f"plot.layers: the ratio of {missing[0]} is NaN; needs a number")
    if per_recipe:
        ax = axes(ax, max(6, 2 + 0.2 * len(names)), 4.5)
        for i, (id, found) in enumerate(per_recipe.items()):
            ax.plot([found[name] for name in names], linestyle="none", label=id, **_mark(i))
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        ax.set_ylabel("SQNR in dB")
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        ax.grid(True, color="#eeeeee")
        without_frame(ax)
        return ax
    (found,) = series.values()
    names.sort(key=lambda name: found[name])
    heights = [found[name] if np.isfinite(found[name]) else 0.0 for name in names]
    limit = float(np.median([found[name] for name in names])) - 1
    ax = axes(ax, 8, 1.2 + 0.26 * len(names))
    _draw_bars(ax, heights, [f"{found[name]:.1f}" for name in names], [found[name] < limit for name in names], ORANGE)
    ax.set_yticks(np.arange(len(names)), names, fontsize=8)
    ax.set_xlabel("SQNR in dB (hatched: more than 1 dB below the median)")
    ax.margins(x=0.08)
    return ax


def _mark(i: int) -> dict[str, Any]:
    """Return the style of the marks of recipe number i: shapes differ first, then colors."""
    return {"marker": MARKS[i % len(MARKS)], "color": (BLUE, ORANGE, GREEN, GREY)[i % 4], "markeredgecolor": "black"}


@explains_calls
def dots(values: Mapping[str, float], *, reference: Mapping[str, float] | None = None, ax: Any = None) -> Any:
    """Draw named numbers, such as the SQNR of recipes, as one mark per row.

    Args:
        values: {name: number}, from top to bottom.
        reference: {name: number} of dashed vertical lines, such as the result of a baseline; None for no lines.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its first line holds the marks. Labels, limits and scales of the horizontal axis are the caller's.

    Raises:
        ValueError: values is empty.
    """
    if not as_mapping("plot.dots", "values", values):
        raise ValueError("plot.dots: values is empty; needs at least one number")
    ax = axes(ax, 8, 1 + 0.24 * len(values))
    ax.plot(list(values.values()), range(len(values)), "o", color=BLUE, zorder=3)
    ax.set_yticks(range(len(values)), list(values), fontsize=9)
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.grid(True, color="#eeeeee")
    for name, value in (reference or {}).items():
        ax.axvline(value, color=ORANGE, linestyle="--", linewidth=2)
        ax.text(value, 1.01, name, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
    without_frame(ax)
    return ax


@explains_calls
def elements(x: Any, result: Any = None, *, ax: Any = None) -> Any:
    """Draw the elements of a block as bars, and what they were rounded to as marks.

    Args:
        x: numbers, such as one block; its axes are flattened.
        result: as many numbers, such as fp4kit.fake_quantize(x, recipe). None draws the elements alone.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with one bar per element. Its last line holds the results.

    Raises:
        ValueError: result has another size than x.
    """
    numbers = _numbers("plot.elements", "x", x).reshape(-1)
    rounded = None if result is None else _numbers("plot.elements", "result", result).reshape(-1)
    ax = axes(ax, 6, 2.5)
    ax.bar(range(len(numbers)), numbers, color=GREY if result is None else BLUE)
    ax.axhline(0, color="black", linewidth=0.8)
    if rounded is not None:
        if len(rounded) != len(numbers):
            raise ValueError(f"plot.elements: result has {len(rounded)} numbers; needs {len(numbers)}, as x has")
        ax.plot(range(len(rounded)), rounded, "D", color=ORANGE, markeredgecolor="black", markersize=5)
    without_frame(ax)
    return ax


def _numbers(op: str, name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        text = f"{op}: {name} is {written(value)}; needs numbers, such as the result of fp4kit.fake_quantize"
        raise TypeError(text) from None


def _recipes(op: str, given: Any) -> list[Recipe]:
    is_one = isinstance(given, (str, Recipe)) or not isinstance(given, Iterable)
    return [recipe_of(op, one) for one in ([given] if is_one else given)]


_SHADES = ("#ffffff", "#bcd9ee", "#e9b44c", "#c9e8d9")  # neighbors differ in gray too


@explains_calls
def memory(
    pack: Callable[[np.ndarray, np.ndarray], Any],
    count: int,
    scales: int = 0,
    *,
    per_line: int = 8,
    group: int = 16,
    ax: Any = None,
) -> Any:
    """Draw where a layout stores 4-bit codes and scales: bytes as boxes of two nibbles, each with its element.

    `pack` is called three times, with codes and scales that number themselves.

    Args:
        pack: a function from codes, uint8 (count,) with values below 16, and scales, uint8 (scales,), to the bytes that
            store them. An example is lambda codes, scales: fp4kit.pack(codes).
        count: the number of elements, at most 256.
        scales: the number of scales, each of one byte, at most 255.
        per_line: the bytes of a line of the picture.
        group: elements of which group of this length get one shade.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its texts name the contents in the order of memory: the index of the element in the high nibble and in
        the low nibble of a byte, or "s0" for a byte with scale 0.

    Raises:
        ValueError: count is not from 1 to 256, or scales not from 0 to 255.
        ValueError: pack does not store every element in one nibble, and every scale in one byte.
    """
    count, scales = as_index("plot.memory", "count", count), as_index("plot.memory", "scales", scales)
    if not 1 <= count <= 256 or not 0 <= scales <= 255:
        raise ValueError(f"plot.memory: count is {count}, scales is {scales}; needs 1 to 256, and 0 to 255")
    index, zeros, no_scales = np.arange(count), np.zeros(count, np.uint8), np.zeros(scales, np.uint8)
    if not callable(pack):
        raise TypeError(f"plot.memory: pack is {written(pack)}; needs a function such as fp4kit.pack")
    calls = ((index % 16, no_scales), (index // 16, no_scales), (zeros, np.arange(1, scales + 1)))
    low, high, stored = (
        np.asarray(pack(codes.astype(np.uint8), numbers.astype(np.uint8))).view(np.uint8).reshape(-1).astype(int)
        for codes, numbers in calls
    )
    places = np.stack([(low >> 4) + (high >> 4 << 4), (low & 15) + ((high & 15) << 4)], axis=-1)
    elements = places[stored == 0].reshape(-1)
    if sorted(elements) != [*index] or sorted(stored[stored > 0]) != [*range(1, scales + 1)]:
        raise ValueError("plot.memory: pack must store every element in one nibble, and every scale in one byte")
    lines = -(-len(stored) // per_line)
    ax = axes(ax, 1.2 + per_line, 0.6 + 0.45 * lines)
    for byte, (scale, pair) in enumerate(zip(stored, places, strict=True)):
        x, y = byte % per_line, byte // per_line
        parts: list[Any] = [(x, 1, f"s{scale - 1}", "#4d4d4d", "white")] if scale else []
        for half, element in enumerate(() if scale else pair):
            parts.append((x + half / 2, 0.5, str(element), _SHADES[element // group % len(_SHADES)], "black"))
        for left, width, text, shade, color in parts:
            ax.bar(left, 1, width, y, align="edge", color=shade, edgecolor="#999999", linewidth=0.5)
            ax.text(left + width / 2, y + 0.5, text, color=color, ha="center", va="center", fontsize=8)
        ax.bar(x, 1, 1, y, align="edge", fill=False, edgecolor="black", linewidth=1.2)
    ax.set(xlim=(-0.05, per_line + 0.05), ylim=(lines + 0.05, -0.05))
    ax.set_xticks(np.arange(per_line) + 0.5, [str(i) for i in range(per_line)])
    ax.set_yticks(np.arange(lines) + 0.5, [f"byte {per_line * i}" for i in range(lines)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def use_style() -> None:
    """Set the matplotlib settings (rcParams) of fp4kit's notebooks: plain axes, titles on the left, no frames."""
    import matplotlib

    matplotlib.rcParams.update(STYLE)


def _draw_bars(ax: Any, widths: Sequence[float], labels: Sequence[str], hatched: Sequence[bool], color: str) -> None:
    """Draw horizontal bars from top to bottom, some of them hatched in a color, with a label behind each."""
    bars = ax.barh(np.arange(len(widths)), widths, color=BLUE, edgecolor="black", linewidth=0.5)
    for bar, is_hatched in zip(bars, hatched, strict=True):
        if is_hatched:
            bar.set(hatch="///", facecolor=color)
    ax.bar_label(bars, labels, padding=3, fontsize=8)
    ax.invert_yaxis()
    without_frame(ax)


@explains_calls
def product(budget: ErrorBudget, *, ax: Any = None) -> Any:
    """Draw the error sources of a quantized matrix product as bars, with the relative error of each source.

    Args:
        budget: the result of fp4kit.error_budget.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with one bar per source. The scale is logarithmic. Hatched bars are sums of other bars. A source
        without an error has the label "none" in place of a bar.

    Raises:
        TypeError: budget is not an ErrorBudget.
    """
    if not isinstance(budget, ErrorBudget):
        raise TypeError(f"plot.product: budget is {type(budget).__name__}; needs the result of fp4kit.error_budget")
    errors = [10 ** (-ratio / 20) for ratio in budget._sources().values()]
    names = [name.removeprefix("= ") + " (sum)" * name.startswith("= ") for name in budget._sources()]
    ax = axes(ax, 8, 3.2)
    labels = ["none" if error == 0 else f"{error:.1e}" for error in errors]
    _draw_bars(ax, errors, labels, [name.endswith("(sum)") for name in names], GREY)
    ax.set_yticks(np.arange(len(errors)), names)
    smallest = min([error for error in errors if error > 0], default=1e-8)
    ax.set(xscale="log", xlim=(smallest / 3, max([*errors, smallest]) * 8))
    ax.set_xlabel("relative error of the product (hatched: sums)")
    return ax


@explains_calls
def number_line(element: ElementFormat | str, x: Any = None, *, ax: Any = None) -> Any:
    """Draw the values of an element format on a line, with arrows from given numbers to their rounded values.

    Args:
        element: the format, such as fp4kit.formats.E2M1, or its name in any case, such as "E2M1".
        x: numbers on the scale of the format, of any shape. Each gets a mark, and an arrow to the value to which
            element.encode rounds it. None draws the values alone.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its first line holds the values. For up to 32 values, dotted lines mark the midpoints between them.

    Raises:
        TypeError: element is no format, or IF4, whose codes have no values without a block scale.
        ValueError: x holds a NaN or an infinity, or element is MX4 and x has an odd length.
    """
    named = {one.name: one for one in vars(formats).values() if isinstance(one, ElementFormat)}
    element = named.get(element.upper(), element) if isinstance(element, str) else element
    if not isinstance(element, ElementFormat):
        raise TypeError(f"plot.number_line: element is {element!r:.80}; needs a format, or one of {', '.join(named)}")
    if x is not None and not np.isfinite(_numbers("plot.number_line", "x", x)).all():
        raise ValueError("plot.number_line: x holds a NaN or an infinity; needs finite numbers")
    ax = axes(ax, 9, 2.2)
    values = np.unique(element.values[np.isfinite(element.values)]) + 0.0  # which zero is kept depends on the processor
    ax.plot(values, np.zeros(len(values)), "|", color="black", markersize=18, label=f"values of {element.name}")
    if len(values) <= 32:
        for lower, upper in pairwise(values):
            ax.plot([(lower + upper) / 2] * 2, [-0.12, 0.12], ":", color=GREY)
        ax.set_xticks(values, [f"{value:g}" for value in values], fontsize=8, rotation=90 if len(values) > 15 else 0)
    if x is not None:
        numbers = np.asarray(x, np.float32).reshape(-1)
        rounded = element.decode(element.encode(numbers))
        ax.plot(numbers, np.full(len(numbers), 0.6), "o", color=BLUE, markersize=6, label="numbers", clip_on=False)
        for number, value in zip(numbers, rounded, strict=True):
            ax.annotate("", (value, 0.15), (number, 0.52), arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 1.4})
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(ylim=(-0.5, 0.95), yticks=[], xlabel=f"value of {element.name} (dotted: midpoints, where ties lie)")
    without_frame(ax)
    ax.spines["left"].set_visible(False)
    return ax


@explains_calls
def error_against_scale(
    x: Any, recipes: RecipeId | Recipe | Sequence[RecipeId | Recipe], *, tensor_amax: Any = None, ax: Any = None
) -> Any:
    """Draw the error of a block under each possible block scale, and mark the scales that recipes choose.

    The error is the mean squared error of the decoded values. For the curve, the first recipe of a format quantizes the
    block once under every positive scale of its format. If its block scales are float32 or 16-bit numbers, the recipe
    instead quantizes the block under the scales that it computes from 256 amaxes per octave. With elements IF4, the
    recipe quantizes the block under each scale as E2M1 and as INT4, and the smaller error counts. If the recipe has
    levels of scales, or is computed by the specification alone, it quantizes the block under the amaxes from which the
    scales follow; exponent bits below a scale are chosen for it. The curve is drawn within a factor of 6 of the best
    scale.

    Recipes may differ in format and block size. Then every format has a curve for each of its blocks in x. If element
    formats differ, scales are multiplied by the largest element, which makes them comparable.

    Args:
        x: one block: a float32, float16 or bfloat16 array of the block size, or of the largest block size, which the
            other block sizes must divide.
        recipes: one or several recipes, in blocks of one row.
        tensor_amax: the amax of the tensor that the block comes from, of its row for recipes with one tensor scale per
            row, or of its outer block for recipes with levels. None uses the amax of x. Other recipes ignore it.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its first lines are a curve per format and block, each with its smallest error as the next line. Each
        further line marks the scale of a recipe in a block. Blocks of zeros are left out.

    Raises:
        TypeError: x is not an array of numbers, or a recipe is neither an id nor a Recipe.
        ValueError: x is not one block, is not finite, or consists of zeros.
        ValueError: recipes is empty, or a block size does not divide the largest one.
        ValueError: a recipe is unknown, has no codes or no blocks, or has blocks of several rows.

    Examples:
        >>> import fp4kit.plot, numpy as np
        >>> nf4 = fp4kit.custom_recipe("my-nf4", fp4kit.formats.NF4, "bfloat16", block=64)
        >>> ax = fp4kit.plot.error_against_scale(np.linspace(-1, 2, 64, dtype=np.float32), nf4)
        >>> [line.get_label() for line in ax.lines]
        ['sampled scales', 'smallest error', 'my-nf4']
    """
    op = "plot.error_against_scale"
    chosen = _recipes(op, recipes)
    array = import_to_host(op, x=x)
    _check_one_block(op, chosen, array)
    formats = {(r.element, r.scale, r.block, r.levels): r for r in reversed(chosen)}  # format -> its first recipe
    is_scaled = len({r.element for r in chosen}) > 1
    curves, marks = [], []
    for i, r in enumerate(chosen):
        takes = r.tensor_scaling in ("tensor", "row") or (r.levels and r.tensor_scaling == "block")
        amax = tensor_amax if takes else None
        if amax is None and takes and r.block_size < array.size:
            amax = np.float32(np.abs(array).max())
        largest = float(r.element.max) if is_scaled else 1.0
        for block in filter(np.any, array.reshape(-1, r.block_size)):
            q = quantize(block, r, tensor_amax=amax)
            if formats[r.element, r.scale, r.block, r.levels] == r and r not in chosen[:i]:
                curves.append((r, *_curve(block, r, q, largest)))
            scale = 1.0 if q.tensor_scale is None else float(np.squeeze(q.tensor_scale))
            if r.scale is not None:
                scale *= abs(float(r.scale.values[int(q.block_scale.reshape(-1)[0])]))
            marks.append((i, scale * largest, float(_mean_square(dequantize(q, np.float32), block))))
    ax = axes(ax, 8, 4)
    drawn = list(dict.fromkeys(r for r, *_ in curves))
    for r, scales, errors in curves:
        label = "sampled scales" if r.scale is None else "every scale"
        label += f" of {r.element} in blocks of {r.block_size}" * (len(drawn) > 1)
        style, best = ("-", "--", ":", "-.")[drawn.index(r) % 4], int(errors.argmin())
        ax.plot(scales, errors, style, color=GREY, marker=".", label=label)
        ax.plot(scales[best], errors[best], "o", color="black", fillstyle="none", markersize=15, label="smallest error")
    for i, scale, error in marks:
        ax.plot(scale, error, linestyle="none", label=chosen[i].id, markersize=8, **_mark(i))
    has_both = any(r.scale is not None and r.tensor_scaling != "none" for r in chosen)
    label = "block scale" + " × tensor scale" * has_both + " × largest element" * is_scaled
    ax.set(xscale="log", yscale="log", xlabel=label, ylabel="mean squared error")
    entries = {line.get_label(): line for line in ax.lines}
    ax.legend(entries.values(), entries, frameon=False, fontsize=9)
    without_frame(ax)
    return ax


def _check_one_block(op: str, recipes: list[Recipe], x: np.ndarray) -> None:
    """Raise ValueError unless all recipes can be drawn in one picture, and x is one block of them."""
    if not recipes:
        raise ValueError(f"{op}: recipes is empty; needs at least one recipe")
    for r in recipes:
        if r.fake_only or not r.block or r.block_rows > 1:
            has = "no codes" if r.fake_only else f"blocks of {r.block_rows} rows" if r.block else "no blocks"
            raise ValueError(f"{op}: {r.id} has {has}; needs a recipe with codes, in blocks of one row, like nvfp4-te")
    longest = max(recipes, key=lambda r: r.block_size)
    for r in recipes:
        if longest.block_size % r.block_size:
            needed = f"needs a divisor of {longest.block_size}, the block size of {longest.id}"
            raise ValueError(f"{op}: {r.id} has blocks of {r.block_size}; {needed}")
    if x.shape != (longest.block_size,):
        raise ValueError(f"{op}: x has shape {x.shape}; needs one block, ({longest.block_size},)")
    if not np.isfinite(x).all() or not x.any():
        raise ValueError(f"{op}: x holds a NaN or an infinity, or only zeros; needs finite numbers")


def _curve(x: np.ndarray, r: Recipe, q: Any, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scales times a factor in ascending order, within a factor of 6 of the best, and the error under each."""
    scales, values = _swept(x, r, q)
    errors = _mean_square(values, x)
    if isinstance(r.element, IntegerOrFloat):
        scales, errors = scales[: len(scales) // 2], errors.reshape(2, -1).min(axis=0)
    best, order = scales[errors.argmin()], np.argsort(scales)
    near = order[(scales[order] > best / 6) & (scales[order] < best * 6)]
    return scales[near] * factor, errors[near]


def _swept(x: np.ndarray, r: Recipe, q: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return many possible scales of a block, and the block's decoded values under each scale."""
    if r.scale is None:
        amaxes = np.float64(q.tensor_amax) * np.exp2(np.arange(-768, 769) / 256)
        amaxes = np.minimum(amaxes, np.finfo(np.float32).max).astype(np.float32)
        swept = quantize(np.broadcast_to(x, (len(amaxes), len(x))), r, tensor_amax=amaxes[:, None])
        scales, places = np.unique(swept.tensor_scale, return_index=True)
        return scales.astype(np.float64), dequantize(swept, np.float32)[places]
    codes = np.flatnonzero((r.scale.values > 0) & np.isfinite(r.scale.values)).astype(np.uint8)
    tensor = 1 if q.tensor_scale is None else float(np.squeeze(q.tensor_scale))
    if not is_simple(r):
        codes, values = under_every_scale(x, r, q.tensor_scale)
        return r.scale.values[codes].astype(np.float64) * tensor, values
    if isinstance(r.element, IntegerOrFloat):
        codes = np.concatenate([codes, codes | IF4_INTEGER_BIT])
    rows = np.broadcast_to(x, (len(codes), len(x)))
    given = q.tensor_scale
    if r.tensor_scaling == "row":
        given = np.broadcast_to(given, (len(codes), 1))
    swept = quantize(rows, r, block_scale=codes[:, None], tensor_scale=given)
    return np.abs(r.scale.values[codes].astype(np.float64)) * tensor, dequantize(swept, np.float32)


def _mean_square(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the mean squared difference between values (..., n) and x (n,) along the last axis, as float64 (...)."""
    return np.asarray(np.square(values.astype(np.float64) - x.astype(np.float64)).mean(axis=-1))


_MAP = "Greys"  # light for small magnitudes; it prints in grey
_DARKEST = 2.4  # the largest magnitude is 1, and so is never too dark for a black text


@explains_calls
def block(
    x: Any,
    recipe: RecipeId | Recipe | Sequence[RecipeId | Recipe],
    index: Sequence[int],
    *,
    tensor_amax: Any = None,
    ax: Any = None,
) -> Any:
    """Draw how a recipe quantizes one block, with one row per step and one column per element.

    Steps that all elements of the block share, such as amaxes and scales, are in the title. Within a row, darker cells
    are larger magnitudes. The last row is the error, result minus element. With several recipes, their rows follow one
    another, and the numbers that differ from those of the first recipe are bold and framed. If element formats differ,
    only results and errors are compared.

    If block sizes differ, the columns are the elements of the largest block. The scales of recipes with smaller blocks
    then get rows of their own. A recipe without blocks can be drawn beside one with blocks.

    Args:
        x: float32, float16 or bfloat16 array, quantized along its last axis.
        recipe: a recipe id, an alias or a Recipe; or several of them. At least one must have blocks.
        index: the index of any element of the block.
        tensor_amax: as for fp4kit.compare_recipes; None computes it from x.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its image holds the magnitudes relative to the largest of their row; its texts are the numbers.

    Raises:
        ValueError, TypeError, IndexError: as for fp4kit.explain.
        ValueError: there is no recipe, or none of the recipes has blocks.
    """
    op = "plot.block"
    recipes = _recipes(op, recipe)
    if not recipes:
        raise ValueError(f"{op}: recipe is empty; needs a recipe id, or several")
    sizes = [r.block_size for r in recipes if r.block]
    if not sizes:
        raise ValueError(f"{op}: {recipes[0].id} has no blocks; needs a recipe such as nvfp4-te")
    array = import_to_host(op, x=x)
    at = checked_index(op, index, array.shape)
    columns = range(min(at[-1] // n * n for n in sizes), max(at[-1] // n * n + n for n in sizes))
    rows: dict[str, list[float]] = {}
    title, differs = [], []
    for r in recipes:
        amax = amax_for(r, tensor_amax)
        shared, steps = _divided([explain(array, r, (*at[:-1], j), tensor_amax=amax) for j in columns])
        title.append(f"{r.title}\n{shared}")
        for name, numbers in steps.items():
            if name != "element" or not rows:
                first = rows.get(_label(name, recipes[0], recipes), numbers)
                rows[_label(name, r, recipes)] = numbers
                is_comparable = r.element == recipes[0].element or name in ("result", "error")
                differs.append(np.not_equal(first, numbers) & is_comparable)
    if len(recipes) > 1:
        title.append(f"bold in a frame: differs from {recipes[0].id}")
    is_long = len(columns) > 32  # then numbers are upright, in narrower columns
    height = (0.62 if is_long else 0.36) * len(rows)
    ax = axes(ax, 1.6 + (0.26 if is_long else 0.62) * len(columns), 1.6 + height + 0.3 * (len(recipes) - 1))
    _draw_rows(ax, np.array([*rows.values()]), np.array(differs), 90 if is_long else 0)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(len(columns)), [str(j) for j in columns], rotation=90 if is_long else 0)
    ax.set_xlabel("column of the element")
    ax.set_title("\n".join(title), fontsize=9, loc="left")
    return ax


def _label(name: str, r: Recipe, recipes: Sequence[Recipe]) -> str:
    """Return the label of a row in a table of steps: the name of the step, and the recipe if there are several."""
    # The row "element" never names a recipe, because all recipes share that row.
    return name if len(recipes) == 1 or name == "element" else f"{name}, {r.title}"


def _draw_rows(ax: Any, numbers: np.ndarray, differs: np.ndarray, rotation: int) -> None:
    """Draw numbers as a heat map on ``ax``."""
    with np.errstate(all="ignore"):
        magnitudes = np.abs(numbers)
        shades = np.nan_to_num(magnitudes / magnitudes.max(axis=1, keepdims=True))
    ax.imshow(shades, cmap=_MAP, aspect="auto", vmin=0, vmax=_DARKEST)
    for (i, j), number in np.ndenumerate(numbers):
        style = {"weight": "bold", "bbox": {"fill": False, "edgecolor": ORANGE, "pad": 2}} if differs[i, j] else {}
        text = f"{number:.2g}" if abs(number) < 1 else f"{number:.3g}"
        ax.text(j, i, text, ha="center", va="center", fontsize=8, rotation=rotation, **style)


def _divided(found: list[Explanation]) -> tuple[str, dict[str, list[float]]]:
    """Divide the steps of a block into those with one number for all elements, and those with one number per
    element.
    """
    shared, rows = [], {}
    for name in found[0].names:
        steps = [one[name] for one in found if name in one.names]
        if len(steps) < len(found):
            continue
        is_element = name in ("element", "code", "result", "decoded value") or name.startswith(("element ", "scaled"))
        if is_element or len({step.bits for step in steps}) > 1:
            rows[name] = [step.value for step in steps]
        else:
            shared.append(f"{name} {steps[0].value:.6g}")
    rows["error"] = [b - a for a, b in zip(rows["element"], rows["result"], strict=True)]
    lines = [",  ".join(shared[i : i + 3]) for i in range(0, len(shared), 3)]
    return "\n".join(lines), rows


@explains_calls
def compare_recipes(found: RecipeComparison, part: str = "codes", *, ax: Any = None) -> Any:
    """Draw the share of codes, scales or values that differ between recipes, as a matrix.

    Args:
        found: the result of fp4kit.compare_recipes.
        part: "codes", "scales", "tensor_scales" or "values".
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its image holds the shares in percent; NaN where two recipes cannot be compared.

    Raises:
        TypeError: found is not a RecipeComparison.
        ValueError: part is none of these names.
    """
    op = "plot.compare_recipes"
    if not isinstance(found, RecipeComparison):
        raise TypeError(f"{op}: found is {type(found).__name__}; needs the result of fp4kit.compare_recipes")
    if part not in ("codes", "scales", "tensor_scales", "values"):
        raise ValueError(f"{op}: part is {part!r}; needs 'codes', 'scales', 'tensor_scales' or 'values'")
    shares = 100 * getattr(found, part)
    n = len(found.recipes)
    texts = [["n/a" if np.isnan(share) else "0" if share == 0 else f"{share:.2g}" for share in row] for row in shares]
    for i in range(n):
        texts[i][i] = ""
    ax = matrix(shares, texts, rows=found.recipes, columns=found.recipes, ax=axes(ax, 3.5 + 0.7 * n, 2 + 0.5 * n))
    for text, share in zip(ax.texts, shares.flat, strict=True):
        text.set_weight("bold" if share > 0 else "normal")
    ax.set_title(f"{part.replace('_', ' ')} that differ, in percent", fontsize=10, loc="left")
    return ax


@explains_calls
def matrix(
    values: Any, texts: Any = None, *, rows: Sequence[str] = (), columns: Sequence[str] = (), ax: Any = None
) -> Any:
    """Draw a matrix as a heat map, darker for larger magnitudes, with a text in each cell.

    Args:
        values: a matrix of numbers, such as errors or scales. NaN cells stay white.
        texts: a matrix of texts with the shape of values, or None for no texts.
        rows, columns: labels of the rows and of the columns; empty for their numbers.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its image holds the magnitudes; its texts are in row-major order.

    Raises:
        ValueError: values is not a matrix, or texts, rows or columns do not have its shape.
    """
    numbers = _numbers("plot.matrix", "values", values)
    if numbers.ndim != 2:
        raise ValueError(f"plot.matrix: values has shape {numbers.shape}; needs a matrix")
    wanted = {"texts": numbers.shape, "rows": numbers.shape[:1], "columns": numbers.shape[1:]}
    for (name, shape), given in zip(wanted.items(), (texts, rows, columns), strict=True):
        if given is not None and len(given) and np.shape(given) != shape:
            raise ValueError(f"plot.matrix: {name} has shape {np.shape(given)}; needs {shape}")
    ax = axes(ax, 2 + 0.7 * numbers.shape[1], 1.5 + 0.5 * numbers.shape[0])
    largest = float(np.max(np.abs(numbers), initial=1e-9, where=np.isfinite(numbers)))
    ax.imshow(np.abs(numbers), cmap=_MAP, vmin=0, vmax=_DARKEST * largest, aspect="auto")
    for (i, j), text in np.ndenumerate(np.empty((0, 0)) if texts is None else np.array(texts, object)):
        ax.text(j, i, text, ha="center", va="center", fontsize=9)
    if len(columns):
        ax.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    if len(rows):
        ax.set_yticks(range(len(rows)), rows)
    return ax
