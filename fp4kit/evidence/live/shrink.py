"""Shrink an array on which a producer (a library that quantizes) and fp4kit differ, down to one block with few nonzero
elements if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fp4kit.evidence.fuzz import shrink as fuzz_shrink
from fp4kit.formats import bit_patterns

MAX_ONE_BY_ONE = 40  # limit on elements simplified one by one, and on blocks removed one by one


def shrink(x: np.ndarray, rows: int, columns: int, differs: Callable[[np.ndarray], bool], seconds: float) -> np.ndarray:
    """Return the simplest array found within ``seconds`` for which ``differs`` holds, or x itself if none is found."""

    def holds(candidate: np.ndarray) -> bool:
        try:
            return differs(candidate)
        except Exception:  # the producer may reject a candidate
            return False

    return fuzz_shrink.shrink(x, lambda a: simpler(a, rows, columns), holds, seconds)


def simpler(x: np.ndarray, rows: int, columns: int) -> Iterator[np.ndarray]:
    """Yield arrays that are simpler than x: first with fewer blocks, then with more zeros, then with simpler
    elements.
    """
    for axis, unit in ((0, rows), (1, columns)):
        for blocks in _block_subsets(x.shape[axis] // unit):
            index = (blocks[:, None] * unit + np.arange(unit)).reshape(-1)
            yield np.ascontiguousarray(np.take(x, index, axis))
    (nonzero,) = np.nonzero(bit_patterns(x).reshape(-1))
    size = len(nonzero)
    while size:
        for start in range(0, len(nonzero), size):
            yield _with_value(x, nonzero[start : start + size], np.zeros((), x.dtype))
        size //= 2
    if len(nonzero) <= MAX_ONE_BY_ONE:
        yield from _simpler_elements(x, nonzero)


def _block_subsets(blocks: int) -> Iterator[np.ndarray]:
    """Yield the subsets of blocks to try while shrinking: each half of ``blocks`` blocks, then all blocks but one."""
    every = np.arange(blocks)
    if blocks > 1:
        yield every[: blocks // 2]
        yield every[blocks // 2 :]
        for i in range(min(blocks, MAX_ONE_BY_ONE)):
            yield np.delete(every, i)


def _simpler_elements(x: np.ndarray, nonzero: np.ndarray) -> Iterator[np.ndarray]:
    """Yield copies of x in which one element is made positive, or the lower half of its bits is cleared."""
    flat = x.reshape(-1)
    for i in nonzero:
        bits = int(bit_patterns(flat[i : i + 1])[0])
        width = 8 * x.dtype.itemsize
        for plain in (bits & ~(1 << (width - 1)), bits >> (width // 2) << (width // 2)):
            if plain not in (bits, 0):
                number = np.array([plain], bit_patterns(x).dtype).view(x.dtype)[0]
                yield _with_value(x, np.array([i]), number)


def _with_value(x: np.ndarray, at: np.ndarray, value: np.generic | np.ndarray) -> np.ndarray:
    """Return a copy of x with ``value`` at the flat indices ``at``."""
    changed = x.copy()
    changed.reshape(-1)[at] = value
    return changed
