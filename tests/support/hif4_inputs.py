"""Provide recipes with levels of scales (HiF4, dual-level MXFP4), and arrays, for tests of the compiled engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import fp4kit
from fp4kit.formats import ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import HIF4_LEVELS
from fp4kit.recipes.table import ALL_RECIPES


def dual(id: str, columns: int, block: int) -> Recipe:
    """Return msmodelslim's dual-level MXFP4 with other sizes."""
    r = fp4kit.recipe("mxfp4-msmodelslim-dual")
    return replace(r, id=id, block=(1, block), levels=((columns, "float32"), (block, "E8M0")))


COMPILED = [id for id, r in ALL_RECIPES.items() if r.levels and not r.specification_only]
CODED = [id for id in COMPILED if not ALL_RECIPES[id].fake_only]
VARIANTS = [
    replace(fp4kit.recipe("hif4-hifloat4"), id="codes-and-native-values", fake_rule="hif4_native"),
    replace(fp4kit.recipe("hif4-amct"), id="native-values", fake_rule="hif4_native", fake_only=True),
    replace(fp4kit.recipe("hif4-hifloat4"), id="six-bits", element=ElementFormat("E1M1", 1, 6, 1)),
    dual("dual-96", 96, 32),
    dual("dual-128", 128, 64),
    dual("dual-wide", 4096, 16),
]
OTHER_LEVELS = [
    replace(fp4kit.recipe("hif4-amct"), id="other-levels", levels=((64, "E6M2"), (16, "exponent1"), (4, "exponent1"))),
    replace(fp4kit.recipe("hif4-hifloat4"), id="one-level-of-bits", levels=((64, "E6M2"), (8, "exponent1"))),
    fp4kit.custom_recipe("own", fp4kit.formats.E1M2, levels=HIF4_LEVELS),
]
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan)


@np.errstate(all="ignore")
def drawn(seed: int, shape: tuple[int, ...], dtype: np.dtype, specials: bool = True) -> np.ndarray:
    """Return an array (..., a multiple of 64) whose blocks have several kinds.

    The kinds are normal numbers of many magnitudes, random bits, midpoints of codes and of exponent bits and their
    neighbors, sparse and tiny numbers, and, if `specials`, some zeros, infinities and NaN.
    """
    rng = np.random.default_rng(seed)
    whole = (*shape[:-1], shape[-1] // 64, 64)
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, whole, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    scales = (
        2.0 ** rng.integers(-14, 12, (*whole[:-1], 1)) * rng.choice([1, 1.25, 1.5, 1.75, 1.625], whole[:-1])[..., None]
    )
    ties = (rng.integers(-56, 57, whole) / rng.choice([2, 4, 8, 16], whole) * scales).astype(dtype)
    steps = rng.integers(-1, 2, whole).astype(f"i{dtype.itemsize}")
    near = np.where(ties == 0, ties, (ties.view(steps.dtype) + steps).view(dtype))
    wide = (rng.normal(size=whole) * 2.0 ** rng.integers(-60, 16, (*whole[:-1], 1))).astype(np.float32)
    kinds = [bits, ties, near, wide.astype(dtype), (rng.normal(size=whole) * scales).astype(dtype)]
    kinds.append(np.where(rng.random(whole) < 0.1, kinds[-1], 0).astype(dtype))
    kind = rng.integers(0, len(kinds), (*whole[:-1], 1))
    x = np.select([kind == i for i in range(len(kinds))], kinds).astype(dtype)
    if not specials:
        return np.where(np.isfinite(x.astype(np.float32)), x, np.asarray(0, dtype)).reshape(shape)
    special = np.asarray(SPECIAL, np.float32).astype(dtype)
    return np.where(rng.random(whole) < 0.003, rng.choice(special, whole), x).reshape(shape)
