"""Test recipes of activations and of weights quantized online against scalar statements of FlashInfer's arithmetic.

They are the recipes with one scale per token, those with a given input scale, and those by which vLLM and SGLang call
FlashInfer. The recorded outputs test the other recipes of FlashInfer.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import reciprocal_approx_ftz

F32 = np.float32
FLT_MAX = np.finfo(F32).max
BF16 = ml_dtypes.bfloat16


def rcp(x):
    """PTX rcp.approx.ftz.f32 of sm_90."""
    return F32(reciprocal_approx_ftz(np.array(x, F32)))


def mul(a, b):
    """PTX mul.ftz.f32. Operands here are far from the results that round up to the smallest normal number."""
    product = np.where(np.abs(a) < 2.0**-126, F32(0), a) * np.where(np.abs(b) < 2.0**-126, F32(0), b)
    return F32(np.where(np.abs(product) < 2.0**-126, F32(0), product))


def e4m3(x):
    """Round a float32 to E4M3, saturating. Return the value and the byte."""
    code = np.minimum(F32(x), F32(448)).astype(ml_dtypes.float8_e4m3fn)
    return F32(code), int(code.view(np.uint8))


def e2m1(x):
    """Round float32 numbers to E2M1 by comparisons, ties to even; 7 and 15 above 5, and 7 for NaN."""
    size = np.abs(x)
    steps = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
    return np.where(np.isnan(x), 7, np.sum(steps, axis=0) + 8 * np.signbit(x)).astype(np.uint8)


# Each function takes an amax, and returns the encode and the decode scale.
def token(amax):
    decode = mul(amax, F32(1) / F32(2688))
    return (rcp(decode) if decode else FLT_MAX), decode


def token_precise(amax):
    encode = min(F32(2688) / amax, FLT_MAX) if amax else FLT_MAX
    return encode, F32(1) / encode if amax else F32(0)


def multiplied(amax):
    scale = amax / F32(2688)  # the engine receives 1 / scale
    return F32(1) / scale, scale


def divided(amax):
    encode = F32(2688) * (F32(1) / amax)
    return encode, F32(1) / encode


def sglang_online(amax):
    scale = amax * (F32(1) / F32(2688)) if amax else F32(1)
    return F32(1) / scale, scale


def vllm_online(amax):
    encode = F32(1) / max(amax, F32(1e-8)) * F32(2688)
    return encode, F32(1) / encode


# Each function takes a block's amax and an encode scale, and returns the byte of the block scale and the factor.
def fast(amax, encode):
    scale, byte = e4m3(mul(encode, mul(amax, rcp(6))))
    return byte, rcp(mul(scale, rcp(encode))) if amax else F32(0)


def precise(amax, encode):
    if not amax:
        return 0, F32(0)
    scale, byte = e4m3(mul(amax, mul(encode, F32(1) / F32(6))))
    return byte, min(F32(1) / mul(scale, F32(1) / encode), FLT_MAX)


def vllm(amax, encode):
    scale, byte = e4m3(encode * (amax * rcp(6)))
    return byte, rcp(scale * rcp(encode)) if scale else F32(0)


STATED = {  # {recipe: (scales of a tensor or row, scale of a block)}
    "nvfp4-flashinfer-token": (token, fast),
    "nvfp4-flashinfer-token-precise": (token_precise, precise),
    "nvfp4-flashinfer-static": (multiplied, fast),
    "nvfp4-vllm-static": (multiplied, vllm),
    "nvfp4-vllm-static-divisor": (divided, vllm),
    "nvfp4-vllm-online": (vllm_online, fast),
    "nvfp4-sglang-online": (sglang_online, precise),
}
TOKENS = [name for name in fp4kit.recipes() if fp4kit.recipe(name).tensor_scaling == "row" and "token" in name]


@np.errstate(all="ignore")
def stated(x, name, amax=None):
    """Return (packed codes, block scales, tensor scales) of a matrix, block by block."""
    scales_of, block_of = STATED[name]
    x = x.astype(F32)
    codes, bytes_ = np.zeros(x.shape, np.uint8), np.zeros((len(x), x.shape[1] // 16), np.uint8)
    whole = np.abs(x).max() if amax is None else F32(amax)
    decodes = np.zeros(len(x), F32)
    for i, row in enumerate(x):
        encode, decodes[i] = scales_of(np.abs(row).max() if "token" in name else whole)
        for j, block in enumerate(row.reshape(-1, 16)):
            bytes_[i, j], factor = block_of(np.abs(block).max(), encode)
            codes[i, 16 * j : 16 * j + 16] = e2m1(block * factor)
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_, decodes if "token" in name else decodes[0]


def drawn(rng, dtype, spread=2.0):
    """Draw a matrix whose rows and blocks differ in size, with zeros, -0, a row of zeros, and elements at ties."""
    x = rng.standard_normal((24, 160)) * np.exp(spread * rng.standard_normal((24, 1)))
    x *= np.exp(rng.standard_normal((24, 10))).repeat(16, 1)
    x[3], x[5, :16], x[6, 1], x[7] = 0, 0, -0.0, np.arange(160) % 16 / 4
    return np.clip(x, -6e4, 6e4).astype(dtype)


def check(x, name, amax=None):
    """Assert that both CPU engines give the codes and scales of the statement for x."""
    expected = stated(x, name, amax)
    for q in (fp4kit.quantize(x, name, tensor_amax=amax), specified(x, name, amax)):
        for part, wanted in zip((q.packed, q.block_scale, q.tensor_scale), expected, strict=True):
            assert_same_bits(np.asarray(part), np.asarray(wanted))


def specified(x, name, amax=None):
    with fp4kit.specification():
        return fp4kit.quantize(x, name, tensor_amax=amax)


def test_recipes_equal_their_statement():
    rng = np.random.default_rng(3)
    for name in STATED:
        for dtype in (F32, np.float16, BF16):
            check(drawn(rng, dtype)[:8, 16:80], name)
        if "static" not in name:
            check(np.zeros((2, 32), F32), name)
        else:
            for amax in (0.37, 1e4):  # also smaller than the largest element, so that blocks saturate
                check(drawn(rng, dtype)[4:8, :48], name, amax)


def test_a_row_of_zeros_has_scale_zero_and_decodes_to_zeros():
    x = np.float32([[0.0, -0.0] * 16, [1.0, -2.0] * 16])
    for name in TOKENS:
        for q in (fp4kit.quantize(x, name), specified(x, name)):
            assert q.tensor_scale[0] == 0 < q.tensor_scale[1], name
            assert not q.block_scale[0].any() and not fp4kit.dequantize(q)[0].any(), name
            assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(q))


def test_the_reference_equals_the_row_scaled_recipe_of_te_but_for_the_scale_of_zeros():
    x = drawn(np.random.default_rng(4), BF16)
    a, b = (fp4kit.quantize(x, f"nvfp4-{name}") for name in ("flashinfer-token-reference", "te-rowscaled"))
    assert_same_bits(a.packed, b.packed)
    assert_same_bits(a.block_scale, b.block_scale)
    assert np.flatnonzero(a.tensor_scale != b.tensor_scale).tolist() == [3]


def test_the_direction_of_a_static_scale():
    x = np.random.default_rng(5).standard_normal((16, 64)).astype(F32)
    for amax in np.float32([0.3, 2.0, 7.7, 1e3]):
        for name in ("nvfp4-flashinfer-static", "nvfp4-vllm-static"):
            assert fp4kit.quantize(x, name, tensor_amax=amax).tensor_scale == input_scale(amax)
        q = fp4kit.quantize(x, "nvfp4-vllm-static-divisor", tensor_amax=amax)
        assert q.tensor_scale == F32(1) / input_global_scale(amax)


def test_tokens_sorted_by_expert():
    """A group of one call has one view per expert; with one scale per token, the order of tokens does not matter."""
    rng = np.random.default_rng(6)
    x, expert = drawn(rng, BF16), rng.integers(0, 5, 24)
    expert[expert == 2] = 3  # an expert without tokens
    order = np.argsort(expert, kind="stable")
    m_indptr = np.concatenate([[0], np.cumsum(np.bincount(expert, minlength=5))])
    tokens = x[order]
    groups = [tokens[a:b] for a, b in pairwise(m_indptr)]
    for name in ("nvfp4-flashinfer-token", "nvfp4-flashinfer-token-4over6-mse-256", "nvfp4-flashinfer-static"):
        is_static = "static" in name
        amaxes = [1.0, 2.0, 3.0, 4.0, 5.0] if is_static else None
        for layout in ("linear", "swizzled_128x4"):
            found = fp4kit.quantize_grouped(groups, name, tensor_amax=amaxes, scale_layout=layout)
            for i, (q, rows) in enumerate(zip(found, groups, strict=True)):
                amax = amaxes[i] if is_static else None
                assert_same_bits(q, fp4kit.quantize(rows, name, tensor_amax=amax, scale_layout=layout))
        if not is_static:
            whole, found = fp4kit.quantize(x, name), fp4kit.quantize_grouped(groups, name)
            for part in ("packed", "block_scale", "tensor_scale"):
                joined = np.concatenate([getattr(q, part) for q in found])
                assert_same_bits(joined, getattr(whole, part)[order])


@pytest.mark.exhaustive
def test_engines_agree_on_drawn_tokens():
    rng = np.random.default_rng(7)
    for name in (*TOKENS, *STATED):
        for _ in range(3):
            x = drawn(rng, rng.choice([F32, np.float16, BF16]), spread=6 * rng.random())
            if name in STATED:
                check(x, name)
            x.flat[rng.integers(x.size, size=2)] = rng.choice([np.inf, np.nan, 0, -0.0], 2)
            x = np.tile(x, (9, 1))  # large enough for the compiled engine
            a, b = fp4kit.quantize(x, name), specified(x, name)
            assert_same_bits(a, b, name)
            assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(b), name)
