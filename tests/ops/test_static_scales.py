"""Test quantize_static against quantize with the amax, and against a statement of two kernels (vLLM, FlashInfer)."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import reciprocal_approx_ftz

F32 = np.float32
X = np.random.default_rng(0).standard_normal((128, 64)).astype(ml_dtypes.bfloat16)
MULTIPLIES = ("nvfp4-vllm-static", "nvfp4-flashinfer-static", "nvfp4-comfy-kitchen-static")


def test_the_scale_of_an_amax_equals_the_amax():
    """The amax itself need not be found, but every byte of the result must equal, in either direction."""
    amaxes = np.exp(np.random.default_rng(1).uniform(-8, 8, 25)).astype(np.float32)
    for amax in [*amaxes, F32(5.25), F32(448)]:
        for recipe in MULTIPLIES:
            q = fp4kit.quantize_static(X, recipe, input_scale=input_scale(amax))
            assert q.equals(fp4kit.quantize(X, recipe, tensor_amax=q.tensor_amax))
            assert_same_bits(q.packed, fp4kit.quantize(X, recipe, tensor_amax=amax).packed)
            assert q.tensor_scale == input_scale(amax)
        q = fp4kit.quantize_static(X, "nvfp4-vllm-static-divisor", input_global_scale=input_global_scale(amax))
        expected = fp4kit.quantize(X, "nvfp4-vllm-static-divisor", tensor_amax=amax)
        assert_same_bits(q.packed, expected.packed)
        assert_same_bits(q.block_scale, expected.block_scale)
        assert_same_bits(q.tensor_scale, expected.tensor_scale)


@np.errstate(all="ignore")
def stated(x, scale):
    """Return (codes, block scales) of rows as the kernels of vLLM and FlashInfer make them with the scale 1 / scale."""
    gs, blocks = F32(1) / scale, x.astype(np.float32).reshape(-1, 16)
    base = np.minimum(gs * (np.abs(blocks).max(1) * reciprocal_approx_ftz(F32(6))), F32(448))
    scales = base.astype(ml_dtypes.float8_e4m3fn)
    factor = reciprocal_approx_ftz(scales.astype(np.float32) * reciprocal_approx_ftz(gs))
    factor[scales == 0] = 0
    codes = np.clip(blocks * factor[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), -1), scales.view(np.uint8).reshape(len(x), -1)


def test_scales_that_no_amax_gives():
    """Between two quotients amax / 2688 lies a float32 number that no amax gives; it is used as it is."""
    scale = F32(1.9) / 1024
    amax = scale * F32(2688)
    near = {np.nextafter(amax, F32(end)) / F32(2688) for end in (0, 9)} | {amax / F32(2688)}
    scale = next(s for s in (scale, np.nextafter(scale, F32(0)), np.nextafter(scale, F32(9))) if s not in near)
    for recipe in MULTIPLIES[:2]:
        q = fp4kit.quantize_static(X, recipe, input_scale=scale)
        packed, scales = stated(X, scale)
        assert_same_bits(q.packed, packed)
        assert_same_bits(q.block_scale, scales)
        assert q.tensor_scale == scale
        assert q.tensor_amax is None
    whole = fp4kit.quantize_static(X, MULTIPLIES[0], input_scale=scale)
    again = fp4kit.quantize_static(X, MULTIPLIES[0], input_scale=scale, scale_layout="swizzled_128x4")
    assert_same_bits(again.block_scale.reshape(-1), fp4kit.swizzle(whole, "swizzled_128x4").block_scale.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_comfy_kitchen_uses_the_scale_as_it_is(dtype):
    """The scale is not rounded to the dtype of x for codes and block scales. Decoding rounds every step."""
    x = X.astype(dtype)
    for scale in F32([0.01, 0.0123, 1.9 / 1024, 3e-5, 7]):
        q = fp4kit.quantize_static(x, "nvfp4-comfy-kitchen-static", input_scale=scale)
        blocks = x.astype(np.float32).reshape(-1, 16)
        scales = np.minimum(np.abs(blocks).max(1) / F32(6) / scale, F32(448)).astype(ml_dtypes.float8_e4m3fn)
        assert_same_bits(q.block_scale, scales.view(np.uint8).reshape(len(x), -1))
        factors = scales.astype(np.float32) * scale
        with np.errstate(all="ignore"):
            y = np.where(factors[:, None] == 0, F32(0), blocks / factors[:, None])
        codes = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        assert_same_bits(q.packed, (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), -1))
        assert q.tensor_scale == scale
        products = (scale.astype(dtype) * scales.astype(dtype)).astype(dtype)
        values = (codes.view(ml_dtypes.float4_e2m1fn).astype(dtype) * products[:, None]).astype(dtype)
        assert_same_bits(fp4kit.dequantize(q), values.reshape(x.shape))


def test_the_library_of_the_result_is_that_of_x():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for scale in (0.001, torch.tensor([1.9 / 1024]), np.float32(0.25)):
        q = fp4kit.quantize_static(x, "nvfp4-vllm-static", input_scale=scale)
        assert isinstance(q.packed, torch.Tensor)
        expected = fp4kit.quantize_static(x.numpy(), "nvfp4-vllm-static", input_scale=float(scale))
        assert_same_bits(q.packed.numpy(), expected.packed)


MISTAKES = [
    (dict(), ValueError, "no scale was given; needs either input_scale or input_global_scale"),
    (dict(input_scale=1, input_global_scale=1), ValueError, "both scales were given"),
    (dict(input_global_scale=512.0), ValueError, "input_global_scale was given, but nvfp4-vllm-kv takes"),
    (dict(recipe="nvfp4-vllm-static-divisor", input_scale=1), ValueError, "takes input_global_scale; for"),
    (dict(recipe="nvfp4-flashinfer-token", input_scale=1), ValueError, "takes no static input scale; needs a recipe"),
    (dict(input_scale=0), ValueError, "input_scale is 0; needs a positive float32 number"),
    (dict(input_scale=float("nan")), ValueError, "input_scale is nan"),
    (dict(input_scale=1e60), ValueError, "input_scale is 1e+60"),
    (dict(input_scale="1"), TypeError, "input_scale is '1'; needs a number, or an array of one element"),
    (dict(input_scale=np.complex64(1)), TypeError, "input_scale is np.complex64(1+0j); needs a number"),
    (dict(input_scale=np.array(["1"])), TypeError, "needs a number, or an array of one element"),
    (dict(input_scale=10**400), ValueError, "input_scale is 1000"),
    (dict(input_scale=np.ones(2)), TypeError, "needs a number, or an array of one element"),
    (dict(recipe="nvfp4-vllm-static-divisor", input_global_scale=3e38), ValueError, "no amax gives the input_global"),
]


def test_mistakes_are_named():
    for changed, kind, message in MISTAKES:
        with pytest.raises(kind, match=re.escape(message)):
            fp4kit.quantize_static(X, **{"recipe": "nvfp4-vllm-static", **changed})
