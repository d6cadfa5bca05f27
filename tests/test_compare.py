"""compare counts what differs and prints it; identify names the recipe."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.evidence.rows import ROWS

X = (np.random.default_rng(7).standard_normal((64, 128)) * 0.02).astype(ml_dtypes.bfloat16)


def test_equal() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    same = fp4kit.compare(q, fp4kit.swizzle(q, "swizzled_128x4"))
    assert same and same.equal and same.first is None and same.sqnr == np.inf
    assert same.codes == (0, X.size) and same.scales == (0, X.size // 16) and same.tensor_scales == (0, 1)
    assert str(same).startswith("a (nvfp4-te) and b (nvfp4-te): equal in every bit")


def test_one_code_and_one_scale() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    packed, scales = q.packed.copy(), q.block_scale.copy()
    packed[3, 5] ^= 0x10
    scales[9, 2] += 1
    other = replace(q, packed=packed, block_scale=scales)
    result = fp4kit.compare(q, other)
    assert result.codes[0] == 1 and result.scales[0] == 1 and not result
    a, b = fp4kit.dequantize(q, np.float32), fp4kit.dequantize(other, np.float32)
    assert result.values[0] == np.count_nonzero(a != b)
    assert result.first is not None and result.first[0] == (3, 11) and result.first[1:] == (a[3, 11], b[3, 11])
    assert result.sqnr == pytest.approx(10 * np.log10(np.sum(a.astype(float) ** 2) / np.sum((a.astype(float) - b) ** 2)))
    assert "different" in str(result) and "first          at (3, 11)" in str(result)


def test_arrays_ulp_nan_and_zero() -> None:
    a = np.array([1, 0.0, np.nan, -1], np.float32)
    b = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, np.nan, -1], np.float32)
    result = fp4kit.compare(a, b)
    assert result.values == (2, 4) and result.max_ulp == 1 and result.codes == (0, 0)
    wide = fp4kit.compare(np.float32([-1e-45]), np.float32([1e-45]))
    assert wide.max_ulp == 3  # -1, -0, +0, +1 in steps of the smallest subnormal


def test_formats_that_do_not_match_compare_values_only() -> None:
    result = fp4kit.compare(fp4kit.quantize(X, "nvfp4-te"), fp4kit.quantize(X, "mxfp4-ocp"))
    assert result.codes == (0, 0) and result.values[1] == X.size
    assert fp4kit.compare(fp4kit.quantize(X, "nvfp4-te-2d"), fp4kit.quantize(X, "nvfp4-te-2d", axis=0)).equal


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=re.escape("compare: a has shape (2,) and b (3,); needs the same shape")):
        fp4kit.compare(np.ones(2, np.float32), np.ones(3, np.float32))


@pytest.mark.parametrize("name", sorted({row.recipe for row in ROWS if not row.fake}))
def test_identify_finds_the_recipe(name) -> None:
    x = np.resize(X, (64, 128))
    found = fp4kit.identify(fp4kit.quantize(x, name), x)
    assert name in found.exact
    assert [m.equal for m in found] == sorted((m.equal for m in found), reverse=True)
    assert name in str(found)


def test_identify_tells_apart_and_survives_a_missing_amax() -> None:
    q = replace(fp4kit.quantize(X, "nvfp4-compressed-tensors"), tensor_amax=None)
    assert fp4kit.identify(q, X).matches[0].recipe == "nvfp4-compressed-tensors"
    q = replace(fp4kit.quantize(X, "nvfp4-modelopt", scale_layout="swizzled_8x4", tensor_amax=1.0), tensor_amax=None)
    assert "nvfp4-modelopt" in fp4kit.identify(q, X).exact


def test_identify_needs_the_array() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    with pytest.raises(
        ValueError, match=re.escape("identify: x has shape (64, 64) and q (64, 128); needs the array that q was made from")
    ):
        fp4kit.identify(q, X[:, :64])
