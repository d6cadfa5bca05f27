"""What a comparison with recorded arrays found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import bit_patterns

Compared = tuple[str, Any, Any, Any]  # key, ours, recorded, mask of what is not compared


class ArrayDifference(NamedTuple):
    """An array that is not equal: its key, and how many of its values differ."""

    key: str
    differing: int
    size: int


class GoldenResult(NamedTuple):
    """Outcome of one recipe or row: arrays compared, those that differ, and how many values the arrays hold."""

    recipe: str
    compared: int
    differences: tuple[ArrayDifference, ...]
    values: int

    @property
    def equal(self) -> int:
        return self.compared - len(self.differences)


def result_of(recipe: str, arrays: Iterable[tuple[str, Compared]]) -> GoldenResult:
    """Of arrays, each with its file."""
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
    if ours.shape != recorded.shape or ours.dtype != recorded.dtype:
        return np.ones(recorded.shape, bool)
    bits = bit_patterns(ours) != bit_patterns(recorded)
    if ours.dtype == np.uint8:
        return bits
    return bits & ~(np.isnan(ours.astype(np.float32)) & np.isnan(recorded.astype(np.float32)))
