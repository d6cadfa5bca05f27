"""Draw tables of numbers as heat maps: one block through the steps of its recipe, and pairs of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.ops.compare_recipes import RecipeComparison
from fp4kit.ops.explain import Explanation, explain
from fp4kit.plot.style import axes
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import recipe_of
from fp4kit.types import RecipeId

_MAP = "Greys"  # light for small magnitudes; it prints in grey


def block(
    x: Any,
    recipe: RecipeId | Recipe,
    index: Sequence[int],
    *,
    tensor_amax: Any = None,
    ax: Any = None,
) -> Any:
    """Draw one block through the steps of its recipe: a row per step, and a column per element.

    Steps that all elements of the block share, such as amaxes and scales, are in the title. Within a row, darker cells
    are larger magnitudes. The last row is the error, result minus element.

    Args:
        x: float32, float16 or bfloat16 array, quantized along its last axis.
        recipe: a recipe id, an alias or a Recipe with blocks.
        index: the index of any element of the block.
        tensor_amax: as for fp4kit.quantize; None computes it from x.
        ax: the Axes to draw on.

    Returns:
        The Axes. Its image holds the magnitudes relative to the largest of their row; its texts are the numbers.

    Raises:
        ValueError, TypeError, IndexError: as for fp4kit.explain; or the recipe has no blocks.
    """
    op = "plot.block"
    r = recipe_of(op, recipe)
    if r.block is None:
        raise ValueError(f"{op}: {r.id} has no blocks; needs a recipe such as nvfp4-te")
    found = explain(x, r, index, tensor_amax=tensor_amax)
    array = to_host(import_arrays(op, x=x)[0])
    left = found.index[-1] // r.block_size * r.block_size
    all_found = [
        explain(array, r, (*found.index[:-1], column), tensor_amax=tensor_amax)
        for column in range(left, left + r.block_size)
    ]
    shared, rows = _divided(all_found)
    numbers = np.array([*rows.values()])
    ax = axes(ax, 1.6 + 0.62 * r.block_size, 1.6 + 0.36 * len(rows))
    with np.errstate(all="ignore"):
        magnitudes = np.abs(numbers)
        shades = np.nan_to_num(magnitudes / magnitudes.max(axis=1, keepdims=True))
    ax.imshow(shades, cmap=_MAP, aspect="auto", vmin=0, vmax=2.4)
    for (i, j), number in np.ndenumerate(numbers):
        ax.text(j, i, f"{number:.2g}" if abs(number) < 1 else f"{number:.3g}", ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(r.block_size), [str(left + j) for j in range(r.block_size)])
    ax.set_xlabel("column of the element")
    ax.set_title(f"{r.id}\n{shared}", fontsize=9, loc="left")
    return ax


def _divided(found: list[Explanation]) -> tuple[str, dict[str, list[float]]]:
    """Return the steps that all elements share, as text, and the others as rows: {name: one number per element}.

    Steps that only some of the elements have are left out. The last row, "error", is result minus element.
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
        ax: the Axes to draw on.

    Returns:
        The Axes. Its image holds the shares in percent; NaN where two recipes cannot be compared.

    Raises:
        TypeError: found is no RecipeComparison.
        ValueError: part is another name.
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
