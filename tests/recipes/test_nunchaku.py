"""Test the recipe of Nunchaku, which has no recorded outputs, against an independent statement of its kernel."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree

import fp4kit

E2M1 = (0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6)
E4M3 = [float(v) for v in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)]


def scale_of(amax):
    """Return min(amax * float32(1/6), 448) in float32, the scale before it is rounded to E4M3."""
    return min(np.float32(amax) * np.float32(1 / 6), np.float32(448))


def reciprocals_of(scale):
    """Return the float32 numbers that rcp.approx.ftz.f32 may give: those within 1 ulp of 1 / scale."""
    if scale < 2.0**-126:
        return [np.float32(np.inf)]
    near = np.float32(1) / scale
    return [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))]


def code_of(product):
    """Return the E2M1 code nearest to a float32 product, ties to the even code: cvt.rn.satfinite.e2m1x2."""
    if math.isnan(product):
        return 7
    magnitude = Fraction(min(abs(float(product)), 6.0))
    code = min(range(8), key=lambda c: (abs(E2M1[c] - magnitude), c % 2))
    return code | 8 * bool(np.signbit(product))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_codes_and_scales(dtype):
    """The block scales of the rows are from 0 to saturated. Each row's codes follow from one of its reciprocals."""
    rng = np.random.default_rng(33)
    x = rng.uniform(-1, 1, (48, 16)) * np.ldexp(6.0, np.arange(48) - 30)[:, None]
    x = np.clip(x, -60000, 60000).astype(dtype)
    x[3, 4] = -0.0
    x[0], x[1] = 0, x[1] * 0
    q = agree(fp4kit.quantize, x, "nvfp4-nunchaku")
    codes = fp4kit.unpack(q.packed)
    for row, scale_code, found in zip(x.astype(np.float32), q.block_scale[:, 0], codes, strict=True):
        scale = scale_of(np.abs(row).max())
        nearest = min(range(127), key=lambda c: (abs(E4M3[c] - float(scale)), c % 2))
        assert scale_code == nearest
        with np.errstate(invalid="ignore"):
            possible = [[code_of(v * r) for v in row] for r in reciprocals_of(scale)]
        assert any(np.array_equal(found, wanted) for wanted in possible)


def test_the_scale_is_not_rounded_before_its_reciprocal_is_taken():
    """The scale 6.5 / 6 = 1.083 rounds to the E4M3 value 1.125, by which 5.5 would be 4.89 and get the code of 4."""
    x = np.zeros((1, 16), np.float16)
    x[0, :2] = 6.5, 5.5
    q = agree(fp4kit.quantize, x, "nvfp4-nunchaku")
    assert q.block_scale.tolist() == [[0x39]]  # 1.125
    assert fp4kit.unpack(q.packed)[0, :2].tolist() == [7, 7]  # 5.5 / 1.083 = 5.08
    assert fp4kit.unpack(fp4kit.quantize(x, "nvfp4-torchao-single").packed)[0, :2].tolist() == [7, 6]
