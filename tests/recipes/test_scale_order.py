"""Test in which order block scales are computed: amaxes at which another order of operations gives another scale.

Recorded inputs have few such amaxes, so the recipes are compared with statements of their formulas here.
"""

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree

import fp4kit

E4M3 = ml_dtypes.float8_e4m3fn
TENSOR_AMAX = np.float32(7.3)
SIX, SIXTH = np.float32(6), np.float32(1) / np.float32(6)


def amaxes():
    """Return float32 amaxes whose block scales are next to a midpoint of two E4M3 values, below TENSOR_AMAX."""
    values = np.arange(8, 126, dtype=np.uint8).view(E4M3).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2 * SIX * (TENSOR_AMAX / np.float32(2688))
    near = middles.view(np.int32)[:, None] + np.arange(-8, 9, dtype=np.int32)
    return near.reshape(-1).astype(np.int32).view(np.float32)


ENCODE, DECODE = np.float32(2688) / TENSOR_AMAX, TENSOR_AMAX / np.float32(2688)
STATEMENTS = {
    "nvfp4-comfy-kitchen": (lambda a: a / SIX / DECODE, lambda a: a / (SIX * DECODE)),
    "nvfp4-mslk": (lambda a: a / SIX * ENCODE, lambda a: a * SIXTH * ENCODE),
    "nvfp4-mslk-fast": (lambda a: a * SIXTH * ENCODE, lambda a: a / SIX * ENCODE),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_block_scales_next_to_midpoints(name):
    """The scales are those of the first statement. Those of the second statement, another order, differ somewhere."""
    found = amaxes()
    x = np.zeros((len(found), 16), np.float32)
    x[:, 3] = -found
    scales = agree(fp4kit.quantize, x, name, tensor_amax=TENSOR_AMAX).block_scale[:, 0]
    right, other = (statement(found).astype(E4M3).view(np.uint8) for statement in STATEMENTS[name])
    assert np.array_equal(scales, right)
    assert not np.array_equal(right, other)


def test_powers_of_two():
    """nvfp4-mslk-power rounds amax / 4 * encode up to a power of two if its mantissa is above 1.75, otherwise down."""
    mantissas = np.float32([1, 1.5, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 1.9])
    x = np.zeros((5, 16), np.float32)
    x[:, 0] = mantissas * 4
    q = agree(fp4kit.quantize, x, "nvfp4-mslk-power", tensor_amax=np.float32(2688))
    assert q.block_scale[:, 0].view(E4M3).astype(np.float32).tolist() == [1, 1, 1, 2, 2]


def test_mx4_scales_of_mslk():
    """Amaxes of exactly 1.75 * 2^k, of about sqrt(2) * 2^k, and near the largest float32."""
    above = np.nextafter(np.float32(1.75), np.float32(2))
    x = np.zeros((6, 32), np.float32)
    x[:, 7] = [1.75 * 4, above * np.float32(4), 1.4140625 * 4, 1.4150390625 * 4, 1.5 * 2.0**127, 0]
    for name, wanted in (
        ("mxfp4-mslk", [128, 128, 128, 128, 252, 0]),
        ("mxfp4-mslk-even", [127, 128, 127, 127, 252, 0]),
        ("mxfp4-mslk-nearest", [128, 128, 127, 128, 252, 0]),
    ):
        assert agree(fp4kit.quantize, x, name).block_scale[:, 0].tolist() == wanted, name
