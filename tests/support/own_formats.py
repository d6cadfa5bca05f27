"""Draw random recipes with user-defined formats, and compare the compiled engine with the specification on them."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from engine_cases import agree

import fp4kit
from fp4kit.formats import (
    BNB_FP4,
    E1M2,
    E2M1,
    E2M3,
    E3M0,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FLOATS,
    INT4,
    INT8,
    MX4,
    NF4,
    Codebook,
    ElementFormat,
)

UE5M3 = ElementFormat("UE5M3", 5, 3, 15, specials="nan", signed=False)
ELEMENTS = (NF4, BNB_FP4, E2M1, E1M2, E3M0, INT4, INT8, E4M3, E5M2, E2M3, E3M2)
SCALES = (UE5M3, E4M3, E8M0, E3M2, E5M2, "float32", "float16", "bfloat16")


def drawn_element(rng):
    """Return an element format: one of ELEMENTS, or a random Codebook that may repeat values or lack a zero."""
    if rng.random() < 0.6:
        return ELEMENTS[rng.integers(len(ELEMENTS))]
    table = rng.standard_normal(rng.integers(2, 17)) * 2.0 ** rng.integers(-20, 20)
    table[0] = 0 if rng.random() < 0.5 else table[-1]
    return Codebook(table, name="Drawn")


def drawn_scale(rng):
    """Return a scale format: one of SCALES, or a random float format, with or without a sign."""
    if rng.random() < 0.7:
        return SCALES[rng.integers(len(SCALES))]
    if rng.random() < 0.5:
        return ElementFormat("Biased", 4, 3, int(rng.integers(-3, 20)), str(rng.choice(["none", "nan", "ieee"])))
    bits = int(rng.integers(2, 7)), int(rng.integers(0, 3))
    return ElementFormat("Unsigned", *bits, int(rng.integers(0, 30)), signed=False)


def drawn_recipe(rng):
    """Return a random recipe with amax rules, which are the rules for user-defined formats."""
    if rng.random() < 0.1:
        return drawn_microexponents(rng)
    element, scale, rounding = drawn_element(rng), drawn_scale(rng), str(rng.choice(["nearest", "up", "down"]))
    columns = int(rng.choice([2, 16, 32, 64, 96, 128]))
    if isinstance(scale, str):
        rounding = "nearest" if scale == "float32" else rounding
        r = fp4kit.custom_recipe("mine", element, scale, columns, scale_rounding=rounding)
    else:
        block, has_tensor_scale = (
            (int(rng.choice([1, 1, 1, 4, 16])), columns),
            bool(rng.random() < 0.3 and scale != E8M0),
        )
        r = fp4kit.custom_recipe("mine", element, scale, block, scale_rounding=rounding, tensor_scale=has_tensor_scale)
        if has_tensor_scale and block[0] == 1 and rng.random() < 0.5:
            r = replace(r, tensor_scaling="row")
    changes = {"amax_nan": str(rng.choice(["propagate", "ignore"]))}
    if element.is_integer:
        changes["narrow"] = bool(rng.random() < 0.5)
    elif not isinstance(element, Codebook):
        changes |= {
            "rounding": str(rng.choice(["rn", "rz", "rna", "rnz"])),
            "sign": str(rng.choice(["signbit", "negative", "not_positive", "unsigned_zero"])),
        }
    return replace(r, **changes)


def drawn_microexponents(rng):
    """Return a random recipe with the element format MX4 and E8M0 scales."""
    columns, rounding = int(rng.choice([2, 16, 32, 96])), str(rng.choice(["nearest", "up", "down"]))
    r = fp4kit.custom_recipe("mine", MX4, E8M0, columns, scale_rounding=rounding)
    return replace(r, amax_nan=str(rng.choice(["propagate", "ignore"])))


def pairs_at_bounds(dtype):
    """Return a matrix (57, 208) that tests MX4 in blocks of 16 with the scale 1.

    Its pairs are all pairs of the numbers at which codes change, with both signs: the midpoints, 1, and the numbers of
    `dtype` beside them.
    """
    at = np.array([0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75], dtype)
    numbers = np.concatenate([at, np.nextafter(at, at[:1]), np.nextafter(at, dtype.type(2))])
    numbers = np.concatenate([numbers, -numbers])
    pairs = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1, 2)
    x = np.zeros((57 * 13, 8, 2), dtype)
    x[:, 0, 0] = 1  # the first pair keeps the block scale at 1, if scales are rounded down
    x[:, 1:] = np.resize(pairs, (57 * 13, 7, 2))
    return x.reshape(57, 208)


def drawn_array(rng, r):
    """Return a random matrix. It may have rows of very different magnitudes, zeros, -0, ties, NaN and infinities."""
    dtype = FLOATS[rng.integers(3)]
    rows, columns, reach = int(rng.choice([1, 3, 16, 33])), int(rng.integers(1, 7)) * r.block_size, 40
    reach = 10 if dtype == np.float16 else reach
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-reach, reach, (rows, 1))
    if rng.random() < 0.3:
        x[rng.random(x.shape) < 0.3] *= rng.choice([0.0, -0.0])
    if rng.random() < 0.3:
        x *= rng.random((rows, 1)) < 0.5
    if rng.random() < 0.3:
        x = np.round(x * 4) / 4
    x = x.astype(dtype)
    if rng.random() < 0.2:
        x[rng.random(x.shape) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
    if rng.random() < 0.2:
        x[0] = ml_dtypes.finfo(dtype).max if rng.random() < 0.5 else ml_dtypes.finfo(dtype).smallest_subnormal
    return x


def check_drawn_calls(seed):
    """Draw a recipe and an array, and compare all operations of the engine with the specification."""
    rng = np.random.default_rng(seed)
    r = drawn_recipe(rng)
    with np.errstate(all="ignore"):
        x = drawn_array(rng, r)
        q = agree(fp4kit.quantize, x, r)
        agree(fp4kit.dequantize, q)
        agree(fp4kit.dequantize, q, dtype=np.float16)
        agree(fp4kit.fake_quantize, x, r)
        packed = rng.integers(0, 256 if r.element.bits in (4, 8) else 64, q.packed.shape, dtype=np.uint8)
        other = replace(q, packed=packed)
        if q.block_scale is not None:
            codes = rng.integers(0, 2**r.scale.bits, q.block_scale.shape, dtype=np.uint8)
            other = replace(other, block_scale=codes)
        agree(fp4kit.dequantize, other)
        agree(fp4kit.quantize, x, r, block_scale=other.block_scale, tensor_scale=other.tensor_scale)
        if r.block_rule and r.block_rows == 1:
            amax = rng.random(q.block_scale.shape, np.float32) * np.float32(3)
            agree(fp4kit.quantize, x, r, block_amax=amax)
