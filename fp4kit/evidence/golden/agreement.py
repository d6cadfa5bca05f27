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
    """Return the five arrays that recipes are compared on: weights, normal values, heavy tails, wide ranges and ties.

    Each array has shape (256, 512) and the given dtype. Every call returns equal values. They are finite, and none is
    0, -0 or a subnormal: numbers with a magnitude below 2^-13 are replaced by +2^-13.
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
    """Return groups of two or more recipe ids that give equal codes and block scales on ordinary_data(dtype).

    Groups and ids are in the order of RECIPES. The specification computes the result once per dtype; later calls return
    it from a cache. Recipes without block scales, fake quantizers and searches are in no group.
    """
    data = ordinary_data(dtype)
    with specification():
        return tuple(_agreeing(data))


def _agreeing(data: list[np.ndarray]) -> Iterator[tuple[str, ...]]:
    """Yield groups of two or more recipe ids that give the same bytes on all arrays of ``data``.

    Recipes are grouped by their codes and block scales for the first array. Each group is then split by those for the
    next array, and so on. Groups and ids are in the order of RECIPES.

    Three kinds of recipes are left out: those without block scales, those that only fake-quantize, and those with a
    search. No other recipe gives the bytes of a search, and searches take long.
    """
    groups = [[r for r in RECIPES.values() if not r.fake_only and r.scale is not None and not r.search]]
    order = {r.id: i for i, r in enumerate(groups[0])}
    for x in data:
        groups = [part for group in groups for part in _parts(group, x) if len(part) > 1]
    yield from sorted((tuple(r.id for r in group) for group in groups), key=lambda ids: order[ids[0]])


def _parts(group: list[Recipe], x: np.ndarray) -> list[list[Recipe]]:
    """Split a group of recipes into groups that give equal codes and block scales for ``x``.

    A group may have a single recipe. Recipes within a group keep their order, and groups are in the order of their
    first recipes.
    """
    found: dict[bytes, list[Recipe]] = {}
    for r in group:
        q = quantize(x, r)
        found.setdefault(b"".join(part.tobytes() for part in (q.packed, q.block_scale) if part is not None), []).append(
            r
        )
    return list(found.values())


def agreement_rows() -> list[tuple[str, ...]]:
    """Return the rows of a table with the header COLUMNS, one per group of recipes that give equal bytes.

    A row has the input dtypes that give equal bytes, and the ids of the recipes.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for name, dtype in DTYPES.items():
        for group in agreeing(dtype):
            found.setdefault(group, []).append(name)
    return [(", ".join(names), " = ".join(group)) for group, names in found.items()]
