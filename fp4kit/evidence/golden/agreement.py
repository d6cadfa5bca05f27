"""Find which recipes give the same bytes on ordinary data, for each input dtype.
Ordinary data is finite and contains no -0 and no subnormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe

COLUMNS = ("input", "recipes that give the same codes and block scales")
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def ordinary_data(dtype: Any) -> list[np.ndarray]:
    """Return the five arrays that recipes are compared on: weights, normal values, heavy tails, wide ranges and
    ties.
    """
    rng = np.random.default_rng(20)
    shape = (256, 512)
    normal = rng.standard_normal(shape)
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    arrays = (normal * 0.02, normal, rng.standard_t(2, shape).clip(-1e3, 1e3), wide)
    steps = 2.0 ** -rng.integers(0, 6, shape) * rng.integers(1, 13, shape) / 4  # full of ties
    smallest = 2.0**-13
    return [np.where(np.abs(a) < smallest, smallest, a).astype(dtype) for a in (*arrays, steps)]


@cache
def agreeing(dtype: Any) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more recipe ids that give equal codes and block scales on ordinary_data(dtype)."""
    data = ordinary_data(dtype)
    with specification():
        return tuple(_agreeing(data))


def _agreeing(data: list[np.ndarray]) -> Iterator[tuple[str, ...]]:
    """Yield groups of two or more recipe ids that give the same bytes on all arrays of ``data``."""
    groups = [[r for r in RECIPES.values() if not r.fake_only and r.scale is not None and not r.search]]
    order = {r.id: i for i, r in enumerate(groups[0])}
    for x in data:
        groups = [part for group in groups for part in _parts(group, x) if len(part) > 1]
    yield from sorted((tuple(r.id for r in group) for group in groups), key=lambda ids: order[ids[0]])


def _parts(group: list[Recipe], x: np.ndarray) -> list[list[Recipe]]:
    """Split a group of recipes into groups that give equal codes and block scales for ``x``."""
    found: dict[bytes, list[Recipe]] = {}
    for r in group:
        q = quantize(x, r)
        found.setdefault(b"".join(part.tobytes() for part in (q.packed, q.block_scale) if part is not None), []).append(
            r
        )
    return list(found.values())


def agreement_rows() -> list[tuple[str, ...]]:
    """Return the rows of a table with the header COLUMNS, one per group of recipes that give equal bytes."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, dtype in DTYPES.items():
        for group in agreeing(dtype):
            found.setdefault(group, []).append(name)
    return [(", ".join(names), " = ".join(group)) for group, names in found.items()]
