"""Draw number lines, and the error of a block against its scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.formats import IF4_INTEGER_BIT, ElementFormat, IntegerOrFloat
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.plot.style import BLUE, GREY, MARKS, ORANGE, axes, without_frame
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import recipe_of
from fp4kit.types import RecipeId


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
        ax.set_xticks(values, [f"{value:g}" for value in values], fontsize=8, rotation=90 if len(values) > 16 else 0)
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
    quantizes the block under each scale as E2M1 and as INT4, and the smaller error counts. The curve is drawn within a
    factor of 6 of the best scale.

    Args:
        x: one block: a float32, float16 or bfloat16 array of the block size.
        recipes: one or several recipes with equal element and scale formats, in blocks of one row.
        tensor_amax: the amax of the tensor that the block comes from, or of its row for recipes with one tensor scale
            per row. None uses the amax of x. Recipes without a tensor scale per tensor or row ignore it.
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
    array = to_host(import_arrays(op, x=x)[0])
    first = _same_formats(op, chosen)
    if array.shape != (first.block_size,):
        raise ValueError(f"{op}: x has shape {array.shape}; needs one block, ({first.block_size},)")
    if not np.isfinite(array).all() or not array.any():
        raise ValueError(f"{op}: x holds a NaN or an infinity, or only zeros; needs finite numbers")
    found = [_quantized(array, r, tensor_amax) for r in chosen]
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
        ax.plot(_scale_of(q, r), error, linestyle="none", label=r.id, **mark)
    ax.set(xscale="log", yscale="log", xlabel=_scale_name(first), ylabel="mean squared error")
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
        if (r.element, r.scale, r.block) != (first.element, first.scale, first.block):
            raise ValueError(f"{op}: {r.id} and {first.id} differ in format or block; draw them on two Axes")
    return first


def _quantized(x: np.ndarray, r: Recipe, tensor_amax: Any) -> Any:
    """Quantize one block x by recipe r, and return a Quantized."""
    return quantize(x, r, tensor_amax=tensor_amax if r.tensor_scaling in ("tensor", "row") else None)


def _swept(x: np.ndarray, r: Recipe, q: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return many possible scales of a block, and the block's decoded values under each scale."""
    if r.scale is None:
        amaxes = np.float64(q.tensor_amax) * np.exp2(np.arange(-768, 769) / 256)
        amaxes = np.minimum(amaxes, np.finfo(np.float32).max).astype(np.float32)
        swept = quantize(np.broadcast_to(x, (len(amaxes), len(x))), r, tensor_amax=amaxes[:, None])
        scales, places = np.unique(swept.tensor_scale, return_index=True)
        return scales.astype(np.float64), dequantize(swept, np.float32)[places]
    codes = np.flatnonzero((r.scale.values > 0) & np.isfinite(r.scale.values)).astype(np.uint8)
    if isinstance(r.element, IntegerOrFloat):
        codes = np.concatenate([codes, codes | IF4_INTEGER_BIT])
    rows = np.broadcast_to(x, (len(codes), len(x)))
    given = q.tensor_scale
    if r.tensor_scaling == "row":
        given = np.broadcast_to(given, (len(codes), 1))
    swept = quantize(rows, r, block_scale=codes[:, None], tensor_scale=given)
    tensor = 1 if q.tensor_scale is None else float(np.squeeze(q.tensor_scale))
    return np.abs(r.scale.values[codes].astype(np.float64)) * tensor, dequantize(swept, np.float32)


def _scale_of(q: Any, r: Recipe) -> float:
    """Return the scale of the only block of q: the number by which decoding multiplies the values of its codes."""
    tensor = 1.0 if q.tensor_scale is None else float(np.squeeze(q.tensor_scale))
    return tensor if r.scale is None else abs(float(r.scale.values[int(q.block_scale.reshape(-1)[0])])) * tensor


def _scale_name(r: Recipe) -> str:
    """Return the label of the horizontal axis."""
    return "block scale × tensor scale" if r.scale is not None and r.tensor_scaling != "none" else "block scale"


def _mean_square(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the mean squared difference between values (..., n) and x (n,) along the last axis, as float64 (...)."""
    return np.asarray(np.square(values.astype(np.float64) - x.astype(np.float64)).mean(axis=-1))
