"""Every block amax of float16 and bfloat16, under the rules of producers that compute in these dtypes.

The producers' steps are stated here anew, from their sources.
"""

from __future__ import annotations

import numpy as np
import pytest
from inputs import BF16

import fp4kit
from fp4kit.recipes import RECIPES

F16 = np.dtype(np.float16)


def every_amax(dtype) -> np.ndarray:
    """All positive finite numbers of a dtype of 16 bits, ascending."""
    return np.arange(1, int(np.array(np.inf, dtype).view(np.uint16)), dtype=np.uint16).view(dtype)


def blocks_of(amaxes: np.ndarray) -> np.ndarray:
    """A block of 32 elements per amax: the amax, fractions of it of both signs, and zeros."""
    rng = np.random.default_rng(8)
    x = (rng.uniform(-1, 1, (len(amaxes), 32)) * amaxes.astype(np.float64)[:, None]).astype(amaxes.dtype)
    x[:, :4] = np.stack([amaxes, -amaxes, 0 * amaxes, -0 * amaxes], axis=1)
    return x


# ---- compressed-tensors ---------------------------------------------------------------------------------------------------


def masked_scales(amaxes: np.ndarray, element) -> np.ndarray:
    """round_to_power_2 and generate_mx_scales, by the bits of the dtype: exponents of scales, and 0 where the scale is 0."""
    dtype = amaxes.dtype
    mantissa = {F16: 10, BF16: 7}[dtype]
    add = 1 << mantissa - (3 if element.bits == 6 else 1) - 1
    rounded = ((amaxes.view(np.uint16) + add) >> mantissa << mantissa).astype(np.uint16).view(dtype).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.maximum(np.floor(np.log2(rounded)) - element.emax, -127)
    is_zero = np.exp2(exponents).astype(dtype) == 0
    return np.where(is_zero, 0, exponents)  # a scale of 0 is replaced by 1


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_scales_of_compressed_tensors(bits, dtype, either_engine):
    name = f"mxfp{bits}-compressed-tensors"
    amaxes, r = every_amax(dtype), RECIPES[name]
    amaxes = amaxes[amaxes < (1.9375 if bits == 6 else 1.75) * 2.0 ** (15 if dtype == F16 else 127)]
    q = fp4kit.quantize(blocks_of(amaxes), name)
    exponents = masked_scales(amaxes, r.element)
    np.testing.assert_array_equal(q.block_scale[:, 0], exponents + 127)
    if dtype == F16:
        is_lost = amaxes < (1 - 2.0 ** -(4 if bits == 6 else 2)) * 2.0**-14
        assert (q.block_scale[is_lost] == 127).all() and is_lost.sum() == (959 if bits == 6 else 767)
        codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
        assert bits == 8 or not (codes[is_lost] & (r.element.sign_bit - 1)).any()
