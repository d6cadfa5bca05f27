"""Draw tables of numbers as heat maps: one block through the steps of its recipe, and pairs of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.ops.compare import RecipeComparison
from fp4kit.ops.explain import Explanation, explain
from fp4kit.plot.style import ORANGE, axes
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import recipe_of
from fp4kit.types import RecipeId

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
    array, size = to_host(import_arrays(op, x=x)[0]), recipes[0].block_size
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
