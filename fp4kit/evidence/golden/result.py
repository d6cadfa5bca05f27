"""Define the result of a comparison with recorded arrays. A mask is a boolean array, True for elements whose
differences are excused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import bit_patterns

# (key, fp4kit's array, recorded array, mask of elements that are not compared)
Compared = tuple[str, Any, Any, Any]


class ArrayDifference(NamedTuple):
    """A recorded array that differs from fp4kit's result: its key, how many of its elements differ, and its size."""

    key: str
    differing: int
    size: int


class GoldenResult(NamedTuple):
    """The result of comparing the recorded arrays for a recipe or a GoldenRow.

    Attributes:
        recipe: id of the recipe.
        compared: number of arrays compared.
        differences: the arrays that differ.
        values: number of values in all compared arrays, excused elements included.
    """

    recipe: str
    compared: int
    differences: tuple[ArrayDifference, ...]
    values: int

    @property
    def equal(self) -> int:
        """Return the number of compared arrays without a difference."""
        return self.compared - len(self.differences)


def result_of(recipe: str, arrays: Iterable[tuple[str, Compared]]) -> GoldenResult:
    """Compare arrays and return the GoldenResult."""
    compared, values, differences = 0, 0, []
    for file, (key, ours, recorded, skip) in arrays:
        compared, values = compared + 1, values + np.size(recorded)
        different = _differs(ours, recorded)
        if np.shape(ours) == np.shape(recorded):
            different &= ~skip
        if different.any():
            differences.append(ArrayDifference(f"{file}: {key}", int(different.sum()), different.size))
    return GoldenResult(recipe, compared, tuple(differences), values)


def _differs(ours: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return a mask, in the shape of ``recorded``, of the elements whose bits differ in two arrays."""
    if ours.shape != recorded.shape or ours.dtype != recorded.dtype:
        return np.ones(recorded.shape, bool)
    bits = bit_patterns(ours) != bit_patterns(recorded)
    if ours.dtype == np.uint8:
        return bits
    return bits & ~(np.isnan(ours.astype(np.float32)) & np.isnan(recorded.astype(np.float32)))
