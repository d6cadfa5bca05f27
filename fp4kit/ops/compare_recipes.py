"""Implement fp4kit.compare_recipes, which quantizes one array by several recipes and compares every pair of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.call.parse import any_call
from fp4kit.display.panel import Panel, share
from fp4kit.layouts import unpacked
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.fake_quantize import fake_quantize
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import recipe_of
from fp4kit.types import Array, RecipeId

OP = "compare_recipes"


@dataclass(frozen=True, eq=False)
class RecipeComparison:
    """The result of fp4kit.compare_recipes: how the results of several recipes differ. print() shows two tables.

    All attributes except `recipes` are arrays of shape (n, n) for n recipes. Entry [i, j] compares recipes i and j, and
    equals entry [j, i]. On the diagonal, shares are 0, and `first` is None.

    Attributes:
        recipes: the ids of the recipes.
        codes: float64, the share of element codes that differ, from 0 to 1. NaN if two recipes have different element
            formats, or if one of the two gives no codes.
        scales: float64, the share of block scales that differ. NaN if codes is NaN, if the scale formats or block sizes
            differ, or if there are no block scales.
        tensor_scales: float64, the share of tensor scales that differ in any bit. NaN if a recipe has none, or if the
            two recipes have different numbers of tensor scales, such as one per tensor and one per row.
        values: float64, the share of decoded values that differ in any bit; NaN equals NaN.
        first: array of objects. Each is the index in x, a tuple of ints, of the first element whose code differs. If
            all codes are equal or cannot be compared, it is the index of the first element whose value differs. It is
            None if all values are equal too.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
        >>> found = fp4kit.compare_recipes(x, ["mxfp4-ocp", "mxfp4-te"])
        >>> float(found.codes[0, 1]), found.first[0, 1]
        (0.0, None)
    """

    recipes: tuple[str, ...]
    codes: np.ndarray
    scales: np.ndarray
    tensor_scales: np.ndarray
    values: np.ndarray
    first: np.ndarray

    def __str__(self) -> str:
        """Return the table of _matrix (shares of differing codes), and below it the table of _pairs (all shares)."""
        return f"{self._matrix().text()}\n{self._pairs().text()}"

    def __repr__(self) -> str:
        """Return one line with the number of recipes and of pairs whose values are all equal."""
        pairs = np.triu_indices(len(self.recipes), 1)
        equal = int((self.values[pairs] == 0).sum())
        return f"RecipeComparison({len(self.recipes)} recipes; {equal} of {len(pairs[0])} pairs have equal values)"

    def _repr_html_(self) -> str:
        """Return the two tables that print() shows as HTML, for notebooks."""
        return self._matrix().html() + self._pairs().html()

    def _matrix(self) -> Panel:
        """Return a table of the shares of differing codes, with one row and one column per recipe."""
        # The diagonal shows "-", and a pair whose codes cannot be compared shows "n/a".
        rows = tuple(
            (f"{i + 1}  {id}", *("-" if i == j else _percent(self.codes[i, j]) for j in range(len(self.recipes))))
            for i, id in enumerate(self.recipes)
        )
        numbers = (str(i + 1) for i in range(len(self.recipes)))
        return Panel("Codes that differ", columns=("recipe", *numbers), rows=rows)

    def _pairs(self) -> Panel:
        """Return a table with one row per pair of recipes."""
        columns = ("recipes", "codes", "block scales", "tensor scales", "values", "first difference")
        rows = []
        for i, j in zip(*np.triu_indices(len(self.recipes), 1), strict=True):
            parts = (self.codes, self.scales, self.tensor_scales, self.values)
            first = "none" if self.first[i, j] is None else str(list(self.first[i, j]))
            rows.append((f"{i + 1} and {j + 1}", *(_percent(part[i, j]) for part in parts), first))
        return Panel("Shares that differ, per pair", columns=columns, rows=tuple(rows))


def _percent(fraction: float) -> str:
    """Return a share from 0 to 1 as text: a percentage such as "54.9%", or "n/a" for NaN."""
    return "n/a" if np.isnan(fraction) else share(round(fraction * 10**9), 10**9)


@ieee(OP)
def compare_recipes(
    x: Array, recipes: Sequence[RecipeId | Recipe], *, axis: int = -1, tensor_amax: Any = None
) -> RecipeComparison:
    """Quantize x by several recipes, and report for every pair what share of codes, scales and values differs.

    Args:
        x: float32, float16 or bfloat16 array, as for fp4kit.quantize. An array on a GPU is first copied to the host.
        recipes: at least two recipe ids, aliases or Recipes.
        axis: the axis along which blocks run.
        tensor_amax: as for fp4kit.quantize, for the recipes that have a tensor scale. None computes it from x.

    Returns:
        A RecipeComparison.

    Raises:
        TypeError: recipes is not a list or tuple of recipes, such as a single string, or x has an unsupported dtype.
        ValueError: there are fewer than two recipes, or x or tensor_amax does not fit one of them.

    Numerics:
        Values are those of fp4kit.dequantize in float32, or of fp4kit.fake_quantize for recipes that only
        fake-quantize. Codes are compared as bit patterns, so 0 and -0 differ.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> print(fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-flashinfer", "mxfp4"]))
        Codes that differ
          recipe                   1      2      3
          1  nvfp4-te              -     0%  54.9%
          2  nvfp4-flashinfer     0%      -  54.9%
          3  mxfp4-ocp         54.9%  54.9%      -
        Shares that differ, per pair
          recipes  codes  block scales  tensor scales  values  first difference
          1 and 2     0%            0%             0%   75.9%            [0, 0]
          1 and 3  54.9%           n/a            n/a   93.3%            [0, 2]
          2 and 3  54.9%           n/a            n/a   93.3%            [0, 2]
    """
    if not isinstance(recipes, (list, tuple)):
        raise TypeError(f"{OP}: recipes is {recipes!r}; needs a list of at least two recipes")
    if len(recipes) < 2:
        raise ValueError(f"{OP}: recipes has {len(recipes)} entries; needs at least two recipes")
    chosen = [recipe_of(OP, r) for r in recipes]
    (imported,) = import_arrays(OP, x=x)
    array: np.ndarray = to_host(imported)
    for r in chosen:
        any_call(OP, array, r, axis, tensor_amax=None if r.tensor_scaling == "none" else tensor_amax)
    results = [_RecipeResult(array, r, axis, tensor_amax) for r in chosen]
    n = len(chosen)
    shares = np.zeros((4, n, n))
    first = np.full((n, n), None, object)
    for i, a in enumerate(results):
        for j, b in enumerate(results[:i]):
            shares[:, i, j] = shares[:, j, i] = _shares(a, b)
            first[i, j] = first[j, i] = _first(a, b)
    codes, scales, tensor_scales, values = shares
    return RecipeComparison(tuple(r.id for r in chosen), codes, scales, tensor_scales, values, first)


class _RecipeResult:
    """The codes, scales and values that one recipe gives for x, as NumPy arrays. Parts that it does not give are None.

    - codes: the element codes, one per element, in the shape of x.
    - scales: the block scales.
    - tensor_scales, values: the bits of the tensor scales and of the decoded float32 values, as _bits returns them.

    A recipe that only fake-quantizes gives only values.
    """

    def __init__(self, x: np.ndarray, r: Recipe, axis: int, tensor_amax: Any) -> None:
        self.recipe = r
        self.codes, self.scales, self.tensor_scales = None, None, None
        given = None if r.tensor_scaling == "none" else tensor_amax
        if r.fake_only:
            values = np.asarray(fake_quantize(x, r, axis=axis, tensor_amax=given), np.float32)
        else:
            q: Quantized = quantize(x, r, axis=axis, tensor_amax=given)
            values = dequantize(q, np.float32)
            self.codes = np.moveaxis(unpacked(q.packed, r.element.packing), -1, q.axis)
            self.scales = q.block_scale
            self.tensor_scales = None if q.tensor_scale is None else _bits(q.tensor_scale)
        self.values = _bits(values)


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of float32 values as int32, with one common pattern for all NaNs."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def _shares(a: _RecipeResult, b: _RecipeResult) -> tuple[float, float, float, float]:
    """Return the shares of codes, block scales, tensor scales and values that differ, each from 0 to 1."""
    same_element = a.recipe.element == b.recipe.element
    same_scale = same_element and a.recipe.scale == b.recipe.scale and a.recipe.block_size == b.recipe.block_size
    return (
        _share(a.codes, b.codes, same_element),
        _share(a.scales, b.scales, same_scale),
        _share(a.tensor_scales, b.tensor_scales),
        _share(a.values, b.values),
    )


def _share(a: np.ndarray | None, b: np.ndarray | None, comparable: bool = True) -> float:
    """Return the share of entries that differ between a and b, from 0 to 1."""
    if not comparable or a is None or b is None or a.shape != b.shape:
        return float("nan")
    return np.count_nonzero(a != b) / max(a.size, 1)


def _first(a: _RecipeResult, b: _RecipeResult) -> tuple[int, ...] | None:
    """Return the index of the first element whose code differs, in row-major order."""
    # If all codes are equal, or if they cannot be compared, return the index of the first value that differs.
    # Codes cannot be compared if the element formats differ or if a recipe gives no codes.
    pairs = [(a.values, b.values)]
    if a.codes is not None and b.codes is not None and a.recipe.element == b.recipe.element:
        pairs.insert(0, (a.codes, b.codes))
    for one, other in pairs:
        differs = one != other
        if differs.any():
            return tuple(map(int, np.unravel_index(int(differs.argmax()), differs.shape)))
    return None
