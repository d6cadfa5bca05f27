"""Provide names of recipes and arrays for tests of the operations.

Arrays have the shape (128, 128), so that they consist of whole blocks along both axes.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.formats import E2M1, E2M3, E3M2, E4M3, E5M2, IF4, INT4
from fp4kit.layouts import unpacked
from fp4kit.recipes import RECIPES

BF16 = np.dtype(ml_dtypes.bfloat16)
ML_DTYPES = {  # element format -> the same format in ml_dtypes
    E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
NAMES = [r.id for r in RECIPES.values() if not (r.fake_only or r.stochastic_only)]  # recipes with codes, without a seed
# Recipes that round stochastically by random bytes
STOCHASTIC = [name for name in NAMES if not (RECIPES[name].element.is_integer or RECIPES[name].four_over_six)]
SEEDED = [r.id for r in RECIPES.values() if r.stochastic_only and not r.fake_only]  # recipes with codes for a seed


def seeded(recipe, x, seed=7):
    """Return rounding and seed for calls with x; {} for a recipe that rounds to nearest."""
    r = fp4kit.recipe(recipe) if isinstance(recipe, str) else recipe
    if r.stochastic == "comfyui_nvfp4_cuda":  # it accepts no int
        seed = np.random.default_rng(seed).random(x.shape, np.float32)
    return {"rounding": "stochastic", "seed": seed} if r.stochastic_only else {}


def ordinary(seed=0, shape=(128, 128), dtype=np.float32):
    """Return random normal values of the given shape and dtype, determined by ``seed``.

    Rows differ in magnitude. There are zeros of both signs, and the first 32 elements are zeros.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.02] = 0
    x[rng.random(shape) < 0.01] = -0.0
    x[..., :1, :32] = 0
    return x.astype(dtype)


def extreme():
    """Return finite edge cases: ties, boundaries of scales, subnormals, and the largest values."""
    return np.concatenate([adversarial_blocks(np.float32, seed=seed) for seed in range(3)])[:128]


def nonfinite():
    """Return ordinary values with some infinities and NaN. One block holds only NaN, another only infinities."""
    x = ordinary(3)
    x[5, 7], x[40, 64], x[41, 65], x[100, 3], x[100, 4] = np.inf, -np.inf, np.nan, np.nan, np.inf
    x[60, 32:64], x[61, 96:128] = np.nan, np.inf
    return x


ORDINARY = ordinary()
FINITE = {
    "ordinary": ORDINARY,
    "extreme": extreme(),
    "bf16": ordinary(1, dtype=BF16),
    "f16": ordinary(2, dtype=np.float16),
}
INPUTS = FINITE | {"nonfinite": nonfinite()}
for _x in INPUTS.values():
    _x.setflags(write=False)


def as_strided(x):
    """Return a view with equal values that is not contiguous: other elements lie between its rows and columns."""
    big = np.full((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1]), 7, x.dtype)
    big[..., ::2, 1::3] = x
    return big[..., ::2, 1::3]


def codes_of(q):
    """Return the unpacked codes of a Quantized, one per element, in the shape q.moved_shape."""
    return unpacked(q.packed, q.recipe.element.packing)


def element_values(q):
    """Return the float32 values of the codes of a Quantized before any scale is applied, in the shape q.moved_shape."""
    codes = codes_of(q)
    if q.recipe.element != IF4:
        return q.recipe.element.values[codes]
    integers = np.repeat(q.block_scale >= 128, q.recipe.block_size, axis=-1)
    return np.where(integers, INT4.values[codes] * np.float32(6 / 7), E2M1.values[codes])


def scale_values(q):
    """Return the float32 values of the linear block scales of a Quantized, in their shape."""
    return q.recipe.scale.values[q.block_scale & 127 if q.recipe.element == IF4 else q.block_scale]


def in_float32(r):
    """Return r, but for elements IF4 with the decode rule that does not round products to float16."""
    return replace(r, decode_rule="fouroversix_float32") if r.element == IF4 else r
