"""Test requantize: MXFP4 to NVFP4 keeps every value if the exponents span at most 17, and reports whether it does."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import Quantized

TARGETS = (
    "nvfp4-te",
    "nvfp4-torchao",
    "nvfp4-flashinfer",
    "nvfp4-compressed-tensors",
    "nvfp4-te-4over6-mae-256",
)


def _mxfp4(scales: np.ndarray, seed: int = 0, fill: int | None = None) -> Quantized:
    """Return an MXFP4 Quantized with the given scale bytes (M, blocks).

    fill: a byte for all codes, or None for random codes.
    """
    M, blocks = scales.shape
    codes = np.random.default_rng(seed).integers(0, 256, (M, blocks * 16)).astype(np.uint8)
    codes = codes if fill is None else np.full_like(codes, fill)
    recipe = fp4kit.recipe("mxfp4-ocp")
    return Quantized(codes, scales.astype(np.uint8), None, None, (M, blocks * 32), np.float32, -1, recipe)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("top", [30, 100, 127, 200])
def test_spread_of_17_is_exact_and_18_is_not(target, top) -> None:
    scales = np.array([[top, top - 17, top - 5, top - 9]])
    result = fp4kit.requantize(_mxfp4(scales), target)
    assert result.exact and result.changed == 0
    assert_same_bits(fp4kit.dequantize(result.quantized), fp4kit.dequantize(_mxfp4(scales)))
    assert_same_bits(result.quantized.packed, _mxfp4(scales).packed)
    scales[0, 1] -= 1
    wide = fp4kit.requantize(_mxfp4(scales), target)
    before, after = fp4kit.dequantize(_mxfp4(scales)), fp4kit.dequantize(wide.quantized)
    assert wide.changed == np.count_nonzero(before.view(np.uint32) != after.view(np.uint32)) and not wide.exact


def test_a_target_without_a_negative_zero_is_not_exact_where_there_are_some() -> None:
    q = _mxfp4(np.array([[127, 120]]))
    result = fp4kit.requantize(q, "nvfp4-modelopt")
    zeros = np.count_nonzero(fp4kit.unpack(q.packed) == 8)
    assert zeros and result.changed == zeros and not result.exact
    assert_same_bits(result.quantized.packed, q.packed)
    assert fp4kit.requantize(_mxfp4(np.array([[127, 120]]), fill=0x7A), "nvfp4-modelopt").exact


def test_zero_blocks_do_not_count() -> None:
    q = _mxfp4(np.array([[127, 0, 3]]))
    q.packed[:, 16:] = 0x80  # zeros of both signs
    result = fp4kit.requantize(q, "nvfp4-te")
    assert result.exact and result.quantized.tensor_scale == 2.0**-8
    assert_same_bits(fp4kit.dequantize(result.quantized), fp4kit.dequantize(q))


def test_scales_of_zero_blocks_may_be_anything() -> None:
    q = _mxfp4(np.array([[105, 254, 103]]))
    q.packed[:, 16:32] = 0x88
    result = fp4kit.requantize(q, "nvfp4-te")
    assert result.exact and result.quantized.block_scale[0, 2:4].tolist() == [0, 0]


def test_all_zero_and_nan_scale() -> None:
    assert fp4kit.requantize(_mxfp4(np.full((2, 2), 127), fill=0), "nvfp4-te").exact
    nan = fp4kit.requantize(_mxfp4(np.array([[127, 255]])), "nvfp4-te")
    assert not nan.exact


def test_layout_axis_and_dtype_are_kept() -> None:
    x = np.random.default_rng(3).standard_normal((64, 40)).astype(np.float16)
    q = fp4kit.quantize(x, "mxfp4-flashinfer", axis=0, scale_layout="swizzled_128x4")
    result = fp4kit.requantize(q, "nvfp4-te").quantized
    assert (result.axis, result.scale_layout, result.dtype) == (0, "swizzled_128x4", np.float16)
    assert_same_bits(fp4kit.dequantize(result), fp4kit.dequantize(q))


@pytest.mark.parametrize("target", ["mxfp8-te", "mxfp4-ocp", "fp8-modelopt"])
def test_other_targets_quantize_the_values(target) -> None:
    x = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    q = fp4kit.quantize(x, "nvfp4-te")
    result = fp4kit.requantize(q, target)
    expected = fp4kit.quantize(fp4kit.dequantize(q, np.float32), target)
    assert_same_bits(result.quantized, expected)
    a, b = fp4kit.dequantize(q, np.float32), fp4kit.dequantize(expected, np.float32)
    assert result.changed == np.count_nonzero(a.view(np.uint32) != b.view(np.uint32))


def test_mxfp4_to_itself_and_to_mxfp8_is_exact() -> None:
    x = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    q = fp4kit.quantize(x, "mxfp4-ocp")
    assert fp4kit.requantize(q, "mxfp8-torchao-floor").exact


def test_fake_only_target_is_refused() -> None:
    with pytest.raises(ValueError, match="nvfp4-modelopt-fake is a fake quantizer"):
        fp4kit.requantize(_mxfp4(np.array([[127]])), "nvfp4-modelopt-fake")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_are_not_rounded_to_16_bits_between(dtype) -> None:
    """requantize computes in float32. dequantize(q) would round to q's dtype first and so give other codes."""
    differ = 0
    for seed in range(40):
        q = fp4kit.quantize(np.random.default_rng(seed).standard_normal((16, 64)).astype(dtype), "nvfp4-modelopt")
        result = fp4kit.requantize(q, "mxfp8-te").quantized
        assert result.dtype == dtype
        assert_same_bits(result.packed, fp4kit.quantize(fp4kit.dequantize(q, np.float32), "mxfp8-te").packed)
        differ += not np.array_equal(result.packed, fp4kit.quantize(fp4kit.dequantize(q), "mxfp8-te").packed)
    assert differ
