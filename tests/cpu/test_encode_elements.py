"""Test the codes of elements at and next to midpoints of E2M1, times the divisor of their block.

The engine multiplies by a constant or by a reciprocal where that gives the code of a division, and divides otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree

import fp4kit
from fp4kit.formats import E2M1, E4M3, FLOATS
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
DIVIDING = ("nvfp4-modelopt", "nvfp4-compressed-tensors", "nvfp4-quark")
FULL = float(E2M1.max * E4M3.max)
AWAY = (-2, -1, 0, 1, 2)  # distances from a midpoint, in steps of the dtype
MOST_ELEMENTS = 1 << 14  # from this number of elements on, the engine uses multipliers
# With this amax the divisor of a block is 0x1.996664p-12. There are float16 numbers next to 5/4, 5/2 and 5 times this
# divisor (midpoints of E2M1), more than 1 float32 ulp away. Multiplying these numbers by the rounded reciprocal still
# gives another code than dividing them. No other significand of a divisor has this property.
NARROW = 1.0494872331619263


def last_significands(amaxes: np.ndarray) -> np.ndarray:
    """Return a mask of the amaxes for which some divisor has the largest significand, all ones.

    A divisor is the value of an E4M3 scale times the tensor scale, amax / FULL.
    """
    scales = amaxes.astype(np.float32) / np.float32(FULL)
    divisors = scales[:, None] * np.arange(8, 16, dtype=np.float32)
    return ((divisors.view(np.uint32) & 0x7FFFFF) == 0x7FFFFF).any(1)


def amaxes() -> list[float]:
    """Return tensor amaxes whose divisors expose wrong rounding, and random ones.

    - Some have few significant bits.
    - For NARROW, the product with a divisor's reciprocal is on the other side of a midpoint than the quotient.
    - For some, the tensor scale is a power of two, or 3, 5, 7, 15 or 35 times a power of two.
    - For some, a divisor has the largest significand.
    """
    drawn = np.random.default_rng(5)
    many = np.arange(1 << 21, dtype=np.uint32) + np.float32(1.5).view(np.uint32)
    few = [float(n) for n in (1.03125, 2.1875, 2.578125, 3.1875, 4.4375)]
    return (
        few
        + [NARROW]
        + [FULL / 2**k for k in (0, 9)]
        + [FULL * n / 4096 for n in (3, 5, 7, 15, 35)]
        + [
            *many.view(np.float32)[last_significands(many.view(np.float32))][:2].tolist(),
            *np.exp(drawn.normal(0, 3, 6)).astype(np.float32).tolist(),
        ]
    )


def stepped(values: np.ndarray, steps: int) -> np.ndarray:
    """Return positive values moved by `steps` steps of their dtype, down if `steps` is negative, but not below 0."""
    bits = np.dtype(f"u{values.itemsize}")
    return (np.maximum(values.view(bits).astype(np.int64) + steps, 0)).astype(bits).view(values.dtype)


def blocks_beside_midpoints(tensor_scale: float, dtype: np.dtype) -> np.ndarray:
    """Return rows of 16 elements for each scale code: its largest element, then elements at and next to midpoints.

    Zeros of both signs are included. The midpoints are those of E2M1 times the scale and `tensor_scale`.
    """
    codes = np.arange(1, 127, dtype=np.uint8)
    factors = E4M3.decode(codes).astype(np.float32) * np.float32(tensor_scale)
    midpoints = np.array(E2M1.midpoints, np.float32)
    rows = []
    for factor in factors:
        beside = [stepped((midpoints * factor).astype(dtype), steps) for steps in AWAY]
        signed = np.concatenate([*beside, *(-x for x in beside), np.array([0, -0.0], dtype)])
        padded = np.resize(signed, -(-len(signed) // 15) * 15).reshape(-1, 15)
        rows.append(
            np.concatenate([np.full((len(padded), 1), np.float32(6) * factor, np.float32).astype(dtype), padded], 1)
        )
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_beside_midpoints(dtype):
    for amax in amaxes():
        with np.errstate(over="ignore"):
            rows = blocks_beside_midpoints(amax / FULL, np.dtype(dtype))
        rows = rows[np.isfinite(rows.astype(np.float32)).all(1)]
        x = np.resize(rows, (2 * MOST_ELEMENTS // 16, 16))
        for name in DIVIDING:
            given = {} if RECIPES[name].tensor_scaling == "none" else {"tensor_amax": np.float32(amax)}
            agree(fp4kit.quantize, x, name, **given)
            agree(fp4kit.quantize, x[:256], name, **given)


def test_the_narrow_divisor_is_narrow():
    """For three float16 numbers, multiplying by the reciprocal of NARROW's divisor gives another code than dividing."""
    divisor = np.float32(NARROW) / np.float32(FULL)
    assert divisor == np.float32(float.fromhex("0x1.996664p-12"))
    x = np.arange(0x4900, dtype=np.uint16).view(np.float16).astype(np.float32) / 2**12
    wrong = E2M1.encode(x / divisor) != E2M1.encode(x * (np.float32(1) / divisor))
    assert (x[wrong] / divisor / np.float32(1.25)).round(5).tolist() == [1.0, 2.0, 4.0]


def test_the_largest_significand_is_tried():
    """The amaxes include some with a divisor of the largest significand.

    For these, a product with the reciprocal can be on a midpoint although the quotient is not.
    """
    assert last_significands(np.array(amaxes())).sum() == 2
