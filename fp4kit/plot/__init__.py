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

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_to_host
from fp4kit.formats import IF4_INTEGER_BIT, ElementFormat, IntegerOrFloat
from fp4kit.layouts import unpacked, unswizzle_scales
from fp4kit.ops.compare import RecipeComparison
from fp4kit.ops.explain import Explanation, explain
from fp4kit.ops.matmul import ErrorBudget
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.plot.style import BLUE, GREY, MARKS, ORANGE, axes, without_frame
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import on_host
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.reference.search import under_every_scale
from fp4kit.types import RecipeId

__all__ = [
    "block",
    "compare_recipes",
    "error_against_scale",
    "histogram",
    "layers",
    "number_line",
    "product",
]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no others."""
    return list(__all__)


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
    ax.set(xlabel=f"value of {element.name} (hatched: the largest)", ylabel="share of elements", title=q.recipe.id)
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
    values, inverse = np.unique(all_values, return_inverse=True)
    return values, np.bincount(inverse, counts, len(values)) / max(codes.size, 1)


def layers(ratios: Mapping[str, float], *, ax: Any = None) -> Any:
    """Draw the SQNR of layers as bars, the worst layer on top.

    SQNR is the signal-to-quantization-noise ratio: 6 dB more halves the error. The bars of layers more than 1 dB below
    the median are hatched.

    Args:
        ratios: {name of the layer: SQNR in dB}, such as {name: fp4kit.compare(x, q).sqnr}. A layer without an error
            (inf) or without a signal (-inf) has a label, but no bar.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes, with the layers from the worst to the best.

    Raises:
        ValueError: there are no layers, or a ratio is NaN.
    """
    if not ratios:
        raise ValueError("plot.layers: ratios is empty; needs at least one layer")
    if missing := [name for name, ratio in ratios.items() if np.isnan(ratio)]:
        raise ValueError(f"plot.layers: the ratio of {missing[0]} is NaN; needs a number")
    names = sorted(ratios, key=lambda name: ratios[name])
    heights = [ratios[name] if np.isfinite(ratios[name]) else 0.0 for name in names]
    limit = float(np.median([ratios[name] for name in names])) - 1
    ax = axes(ax, 8, 1.2 + 0.26 * len(names))
    _draw_bars(ax, heights, [f"{ratios[name]:.1f}" for name in names], [ratios[name] < limit for name in names], ORANGE)
    ax.set_yticks(np.arange(len(names)), names, fontsize=8)
    ax.set_xlabel("SQNR in dB (hatched: more than 1 dB below the median)")
    ax.margins(x=0.08)
    return ax


def _draw_bars(ax: Any, widths: Sequence[float], labels: Sequence[str], hatched: Sequence[bool], color: str) -> None:
    """Draw horizontal bars from top to bottom, some of them hatched in a color, with a label behind each."""
    bars = ax.barh(np.arange(len(widths)), widths, color=BLUE, edgecolor="black", linewidth=0.5)
    for bar, is_hatched in zip(bars, hatched, strict=True):
        if is_hatched:
            bar.set(hatch="///", facecolor=color)
    ax.bar_label(bars, labels, padding=3, fontsize=8)
    ax.invert_yaxis()
    without_frame(ax)


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


def number_line(element: ElementFormat, x: Any = None, *, ax: Any = None) -> Any:
    """Draw the values of an element format on a line, with arrows from given numbers to their rounded values.

    Args:
        element: the format, such as fp4kit.formats.E2M1.
        x: numbers on the scale of the format, of any shape. Each gets a mark, and an arrow to the value to which
            element.encode rounds it. None draws the values alone.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its first line holds the values. For up to 32 values, dotted lines mark the midpoints between them.

    Raises:
        TypeError: element is IF4, whose codes have no values without a block scale.
        ValueError: x holds a NaN or an infinity, or element is MX4 and x has an odd length.
    """
    if x is not None and not np.isfinite(np.asarray(x, np.float32)).all():
        raise ValueError("plot.number_line: x holds a NaN or an infinity; needs finite numbers")
    ax = axes(ax, 9, 2.2)
    values = np.unique(element.values[np.isfinite(element.values)])
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


def error_against_scale(
    x: Any, recipes: RecipeId | Recipe | Sequence[RecipeId | Recipe], *, tensor_amax: Any = None, ax: Any = None
) -> Any:
    """Draw the error of a block under each possible block scale, and mark the scales that recipes choose.

    The error is the mean squared error of the decoded values. For the curve, the first recipe quantizes the block once
    under every positive scale of its format. If its block scales are float32 or 16-bit numbers, the recipe instead
    quantizes the block under the scales that it computes from 256 amaxes per octave. With elements IF4, the recipe
    quantizes the block under each scale as E2M1 and as INT4, and the smaller error counts. If the recipe has levels of
    scales, or is computed by the specification alone, it quantizes the block under the amaxes from which the scales
    follow; exponent bits below a scale are chosen for it. The curve is drawn within a factor of 6 of the best scale.

    Args:
        x: one block: a float32, float16 or bfloat16 array of the block size.
        recipes: one or several recipes with equal element and scale formats, in blocks of one row.
        tensor_amax: the amax of the tensor that the block comes from, of its row for recipes with one tensor scale per
            row, or of its outer block for recipes with levels. None uses the amax of x. Other recipes ignore it.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. The first line is the curve, and the second is the smallest error. Each further line marks a recipe.

    Raises:
        TypeError: x is not an array of numbers, or a recipe is neither an id nor a Recipe.
        ValueError: x is not one block, is not finite, or consists of zeros.
        ValueError: recipes is empty, or the formats or blocks of two recipes differ.
        ValueError: a recipe is unknown, has no codes or no blocks, or has blocks of several rows.

    Examples:
        >>> import fp4kit.plot, numpy as np
        >>> nf4 = fp4kit.custom_recipe("my-nf4", fp4kit.formats.NF4, "bfloat16", block=64)
        >>> ax = fp4kit.plot.error_against_scale(np.linspace(-1, 2, 64, dtype=np.float32), nf4)
        >>> [line.get_label() for line in ax.lines]
        ['sampled scales', 'smallest error', 'my-nf4']
    """
    op = "plot.error_against_scale"
    given = [recipes] if isinstance(recipes, (str, Recipe)) else list(recipes)
    chosen = [recipe_of(op, r) for r in given]
    array = import_to_host(op, x=x)
    first = _same_formats(op, chosen)
    if array.shape != (first.block_size,):
        raise ValueError(f"{op}: x has shape {array.shape}; needs one block, ({first.block_size},)")
    if not np.isfinite(array).all() or not array.any():
        raise ValueError(f"{op}: x holds a NaN or an infinity, or only zeros; needs finite numbers")
    takes = [r.tensor_scaling in ("tensor", "row") or (r.levels and r.tensor_scaling == "block") for r in chosen]
    found = [quantize(array, r, tensor_amax=tensor_amax if t else None) for r, t in zip(chosen, takes, strict=True)]
    scales, values = _swept(array, first, found[0])
    errors = _mean_square(values, array)
    if isinstance(first.element, IntegerOrFloat):
        scales, errors = scales[: len(scales) // 2], errors.reshape(2, -1).min(axis=0)
    best = int(errors.argmin())
    order = np.argsort(scales)
    near = order[(scales[order] > scales[best] / 6) & (scales[order] < scales[best] * 6)]
    ax = axes(ax, 8, 4)
    label = "sampled scales" if first.scale is None else "every scale"
    ax.plot(scales[near], errors[near], "-", color=GREY, marker=".", label=label)
    ax.plot(scales[best], errors[best], "o", color="black", fillstyle="none", markersize=15, label="smallest error")
    for i, (r, q) in enumerate(zip(chosen, found, strict=True)):
        error = _mean_square(dequantize(q, np.float32), array)
        mark = {"marker": MARKS[i % len(MARKS)], "color": (BLUE, ORANGE)[i % 2], "markersize": 8}
        scale = 1.0 if q.tensor_scale is None else float(np.squeeze(q.tensor_scale))
        if r.scale is not None:
            scale *= abs(float(r.scale.values[int(q.block_scale.reshape(-1)[0])]))
        ax.plot(scale, error, linestyle="none", label=r.id, **mark)
    has_both = first.scale is not None and first.tensor_scaling != "none"
    label = "block scale × tensor scale" if has_both else "block scale"
    ax.set(xscale="log", yscale="log", xlabel=label, ylabel="mean squared error")
    ax.legend(frameon=False, fontsize=9)
    without_frame(ax)
    return ax


def _same_formats(op: str, recipes: list[Recipe]) -> Recipe:
    """Return the first recipe, after checking that all recipes can be drawn in one picture."""
    if not recipes:
        raise ValueError(f"{op}: recipes is empty; needs at least one recipe")
    first = recipes[0]
    for r in recipes:
        if r.fake_only or not r.block or r.block_rows > 1:
            has = "no codes" if r.fake_only else f"blocks of {r.block_rows} rows" if r.block else "no blocks"
            raise ValueError(f"{op}: {r.id} has {has}; needs a recipe with codes, in blocks of one row, like nvfp4-te")
        if (r.element, r.scale, r.block, r.levels) != (first.element, first.scale, first.block, first.levels):
            raise ValueError(f"{op}: {r.id} and {first.id} differ in format or block; draw them on two Axes")
    return first


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
    if r.specification_only:
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
    another, and the numbers that differ from those of the first recipe are bold and framed.

    Args:
        x: float32, float16 or bfloat16 array, quantized along its last axis.
        recipe: a recipe id, an alias or a Recipe with blocks; or several of them with blocks of equal length.
        index: the index of any element of the block.
        tensor_amax: as for fp4kit.quantize; None computes it from x.
        ax: the Axes to draw on; None makes a new figure.

    Returns:
        The Axes. Its image holds the magnitudes relative to the largest of their row; its texts are the numbers.

    Raises:
        ValueError, TypeError, IndexError: as for fp4kit.explain.
        ValueError: there is no recipe, a recipe has no blocks, or its blocks are not as long as those of the first.
    """
    op = "plot.block"
    recipes = [recipe_of(op, each) for each in ([recipe] if isinstance(recipe, (str, Recipe)) else recipe)]
    _check_blocks(op, recipes)
    array, size = import_to_host(op, x=x), recipes[0].block_size
    rows: dict[str, list[float]] = {}
    title, differs = [], []
    for r in recipes:
        left, shared, steps = _steps_of_block(array, r, index, tensor_amax)
        title.append(f"{r.id}\n{shared}")
        for name, numbers in steps.items():
            if name != "element" or not rows:
                first = rows.get(_label(name, recipes[0], recipes), numbers)
                rows[_label(name, r, recipes)] = numbers
                differs.append(np.not_equal(first, numbers))
    if len(recipes) > 1:
        title.append(f"bold in a frame: differs from {recipes[0].id}")
    ax = axes(ax, 1.6 + 0.62 * size, 1.6 + 0.36 * len(rows) + 0.3 * (len(recipes) - 1))
    _draw_rows(ax, np.array([*rows.values()]), np.array(differs))
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(size), [str(left + j) for j in range(size)])
    ax.set_xlabel("column of the element")
    ax.set_title("\n".join(title), fontsize=9, loc="left")
    return ax


def _check_blocks(op: str, recipes: Sequence[Recipe]) -> None:
    """Raise ValueError unless there is a recipe, and all recipes have blocks of equal length."""
    if not recipes:
        raise ValueError(f"{op}: recipe is empty; needs a recipe id, or several")
    for r in recipes:
        if r.block is None:
            raise ValueError(f"{op}: {r.id} has no blocks; needs a recipe such as nvfp4-te")
        if r.block_size != recipes[0].block_size:
            needed = f"needs blocks of {recipes[0].block_size}, as {recipes[0].id} has"
            raise ValueError(f"{op}: {r.id} has blocks of {r.block_size}; {needed}")


def _label(name: str, r: Recipe, recipes: Sequence[Recipe]) -> str:
    """Return the label of a row in a table of steps: the name of the step, and the recipe if there are several."""
    # The row "element" never names a recipe, because all recipes share that row.
    return name if len(recipes) == 1 or name == "element" else f"{name}, {r.id}"


def _steps_of_block(
    x: np.ndarray, r: Recipe, index: Sequence[int], tensor_amax: Any
) -> tuple[int, str, dict[str, list[float]]]:
    """Explain every element of the block that holds ``index``, and return (first column of the block, text, rows)."""
    found = explain(x, r, index, tensor_amax=tensor_amax)
    left = found.index[-1] // r.block_size * r.block_size
    columns = range(left, left + r.block_size)
    return left, *_divided([explain(x, r, (*found.index[:-1], j), tensor_amax=tensor_amax) for j in columns])


def _draw_rows(ax: Any, numbers: np.ndarray, differs: np.ndarray) -> None:
    """Draw numbers as a heat map on ``ax``."""
    with np.errstate(all="ignore"):
        magnitudes = np.abs(numbers)
        shades = np.nan_to_num(magnitudes / magnitudes.max(axis=1, keepdims=True))
    ax.imshow(shades, cmap=_MAP, aspect="auto", vmin=0, vmax=2.4)
    for (i, j), number in np.ndenumerate(numbers):
        style = {"weight": "bold", "bbox": {"fill": False, "edgecolor": ORANGE, "pad": 2}} if differs[i, j] else {}
        text = f"{number:.2g}" if abs(number) < 1 else f"{number:.3g}"
        ax.text(j, i, text, ha="center", va="center", fontsize=8, **style)


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
    ax = axes(ax, 3.5 + 0.7 * n, 2 + 0.5 * n)
    largest = max(float(np.nanmax(np.append(shares, 0))), 1e-9)
    ax.imshow(shares, cmap=_MAP, vmin=0, vmax=2.4 * largest, aspect="auto")
    for (i, j), percent in np.ndenumerate(shares):
        text = "" if i == j else "n/a" if np.isnan(percent) else "0" if percent == 0 else f"{percent:.2g}"
        ax.text(j, i, text, ha="center", va="center", fontsize=9, weight="bold" if percent > 0 else "normal")
    ax.set_xticks(range(n), found.recipes, rotation=30, ha="right")
    ax.set_yticks(range(n), found.recipes)
    ax.set_title(f"{part.replace('_', ' ')} that differ, in percent", fontsize=10, loc="left")
    return ax
