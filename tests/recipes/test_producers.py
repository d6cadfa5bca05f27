"""Test producers' recipes against independent statements of their arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, as_large_ones
from inputs import BF16, codes_of
from philox import triton_word
from rounding_cases import underflowing
from statements import E2M1, E4M3, e2m1, e4m3, nearest, rcp

import fp4kit
from fp4kit.arithmetic import exponent_field
from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.call.inputs import torch_words
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import encode

NAME = "nvfp4-comfy-kitchen-stochastic"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]
# {dtype: the smallest numbers a with floor(log2(a) + c) >= 1, 2 and 3}, for c = 1 and c = 1.1925, as PyTorch 2.13
# computes them in the dtype on a CPU
THRESHOLDS = {
    "float32": [(1, 2 - 2**-23, 4 - 2**-21), (0.8750879764556885, 1.750175952911377, 3.500351667404175)],
    "float16": [(1, 2 - 2**-10, 4 - 2**-8), (0.875, 1.75, 3.498046875)],
    "bfloat16": [(1, 2 - 2**-7, 4 - 2**-5), (0.875, 1.7421875, 3.46875)],
}
SECOND_ON_CUDA = (0.875, 1.75, 3.484375)  # for bfloat16 and c = 1.1925, as PyTorch 2.11 computes on an H200


def exponent(a, thresholds):
    """Return how many of the three thresholds a number reaches."""
    return np.sum([a >= np.asarray(limit, a.dtype) for limit in thresholds], axis=0)


def stated(x, tensor_scale, r, on_gpu=False):
    """Return (codes packed with the even element high, scale codes), every step an operation in the dtype of x.

    r: random numbers in the dtype of x. on_gpu: True for the results of PyTorch on a GPU.
    """
    T, rows = x.dtype.type, len(x)
    first, second = THRESHOLDS[str(x.dtype)]
    second = SECOND_ON_CUDA if on_gpu and x.dtype == BF16 else second
    with np.errstate(all="ignore"):
        s, blocks = np.float32(tensor_scale).astype(x.dtype), x.reshape(rows, -1, 16)
        amaxes = np.abs(blocks).max(axis=-1)
        sixths = amaxes * T(1 / 6) if on_gpu and x.dtype == np.float32 else amaxes / T(6)
        ratio = sixths / s
        scales = np.minimum(ratio, T(448)).astype(ml_dtypes.float8_e4m3fn)
        y = (blocks / (s * scales.astype(x.dtype))[..., None]).reshape(x.shape)
        largest = T(ml_dtypes.finfo(x.dtype).max)
        y = np.where(np.isnan(y), T(0), np.clip(y, -largest, largest)).astype(x.dtype)
        sign = np.signbit(y)
        power = np.asarray([0.25, 0.5, 1, 2], x.dtype)
        a = np.abs(y + (r - T(0.5)) * power[exponent(np.abs(y), first)] * T(1.25))
        e = exponent(a, second)
        n = np.rint(np.where(e > 0, (a / (power * T(2))[e] - T(1)) * T(2), a * T(2)))
    n = [255 if on_gpu and v >= 2**63 else int(v) % 256 for v in n.astype(np.float64).reshape(-1)]
    codes = sign.astype(np.uint8) << 3 | e.astype(np.uint8) << 1 | np.uint8(n).reshape(x.shape)
    assert a.dtype == y.dtype == x.dtype
    return codes[:, ::2] << 4 | codes[:, 1::2], scales.view(np.uint8)


def rows_of(dtype, seed):
    """Return an array (24, 64) of rows of different magnitude, with zeros of both signs, an infinity and a NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 64)) * np.exp(rng.uniform(-12, 9 if dtype == np.float16 else 40, (24, 1)))
    x[rng.random(x.shape) < 0.1] = rng.choice([0.0, -0.0])
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1, 0.9, 0.05, 1e-4, 1e-9, 20, 1e6], ids=str)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_every_step_rounds_to_the_dtype(dtype, factor, on_gpu):
    """A small tensor amax gives scaled elements above 6, whose bits reach the sign and the element before."""
    for seed in range(3):
        x = rows_of(dtype, seed)
        if factor == 1 and seed == 2:
            x[3, 5], x[9, 9] = np.inf, np.nan
        amax = np.float32(np.nanmax(np.where(np.isfinite(x), np.abs(x), 0))) * np.float32(factor)
        r = np.random.default_rng(seed).random(x.shape, np.float32).astype(dtype)
        r = np.where(r == 1, dtype.type(0), r)
        q = agree(fp4kit.quantize, x, NAME + "-cuda" * on_gpu, tensor_amax=amax, rounding="stochastic", seed=r)
        codes, scales = stated(x, q.tensor_scale, r, on_gpu)
        assert_same_bits(q.packed, codes << 4 | codes >> 4)
        is_nan = (q.block_scale & 0x7F == 0x7F) & (scales & 0x7F == 0x7F)
        assert ((q.block_scale == scales) | is_nan).all()


def test_a_value_of_six_may_become_four():
    """The code of 6 plus noise of 1 or more is that of 4, because n is 2."""
    x = np.full((1, 16), 6, np.float32)
    codes = {
        float(r): agree(
            fp4kit.quantize, x, NAME, tensor_amax=2688, rounding="stochastic", seed=np.full(x.shape, r, np.float32)
        ).packed[0, 0]
        for r in (0, 0.25, 0.5, 0.875, 0.9375)
    }
    assert codes == {0: 0x66, 0.25: 0x77, 0.5: 0x77, 0.875: 0x77, 0.9375: 0x66}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_seed_gives_the_numbers_of_torch(dtype):
    torch = pytest.importorskip("torch", minversion="2.13")  # PyTorch 2.11 gives other numbers in 16 bits
    x = rows_of(dtype, 5)
    for seed in (0, 1234, 2**40 + 7):
        generator = torch.Generator().manual_seed(seed)
        r = torch.rand(x.shape, dtype=getattr(torch, str(dtype)), generator=generator).float().numpy().astype(dtype)
        q = fp4kit.quantize(x, NAME, rounding="stochastic", seed=seed)
        assert_same_bits(q, fp4kit.quantize(x, NAME, rounding="stochastic", seed=r))


def test_the_numbers_follow_their_elements():
    """Along axis 0, and in more dimensions, the numbers of a seed are in the order of x."""
    x = rows_of(BF16, 8)[:16].reshape(2, 16, 32)
    r = torch_words(3, x.size).reshape(x.shape) & 0xFFFFFF
    r = r.astype(np.float32) * np.float32(2**-24)
    for axis in (-1, 1):
        by_seed = agree(fp4kit.quantize, x, NAME, axis=axis, rounding="stochastic", seed=3)
        assert_same_bits(fp4kit.quantize(x, NAME, axis=axis, rounding="stochastic", seed=r), by_seed)


def test_variants():
    """A variant with other scales rounds stochastically in the same way; other elements are refused."""
    x = rows_of(np.dtype(np.float16), 9)
    for fields in ({"block": (1, 32)}, {"block_rule": "te", "apply": "multiply"}, {"round_scaled": False}):
        agree(fp4kit.quantize, x, replace(RECIPES[NAME], **fields), rounding="stochastic", seed=4)
    with pytest.raises(ValueError, match="stochastic is 'comfyui_nvfp4'; needs E2M1, whose codes it computes"):
        replace(RECIPES["mxfp8-te"], stochastic="comfyui_nvfp4")


def exponent_of(amax):
    """Return the exponent of max(amax, 6 * 2^-126) * float32(1/6), rounded to float32 and then up to a power of two."""
    product = np.float32(max(float(amax), 6 * 2.0**-126)) * np.float32(1 / 6)
    significand, exponent = math.frexp(float(product))
    return exponent - (significand == 0.5)


def code_of(x, scale):
    """Return the E2M1 code nearest to x / scale, ties to the even code, in exact arithmetic."""
    return nearest_code(min(abs(Fraction(min(max(float(x), -1e300), 1e300))) / scale, Fraction(6))) | 8 * bool(
        np.signbit(x)
    )


def nearest_code(magnitude):
    """Return the E2M1 code nearest to a magnitude up to 6, ties to the even code, in exact arithmetic."""
    return min(range(8), key=lambda c: (abs(Fraction(float(E2M1[c])) - magnitude), c % 2))


def fp8_of(quotient):
    """Return the E4M3 codes nearest to float32 quotients, ties to the even code, saturated at 448."""
    return nearest(np.abs(quotient), E4M3) | 128 * np.signbit(quotient)


def rows_of_deepseek(amaxes, columns):
    """Return rows of random elements of both signs, float32 (len(amaxes), columns), whose amaxes are given."""
    x = np.random.default_rng(34).uniform(-1, 1, (len(amaxes), columns)).astype(np.float32)
    x *= np.float32(amaxes)[:, None]
    x[:, 3] = amaxes
    return x


def test_the_kv_cache():
    """The scale is E4M3(max(amax, 6 * 2^-9) / 6), by whose value elements are divided."""
    x = rows_of_deepseek([0, 1e-3, 6 * 2.0**-9, 0.0125, 0.3, 1, 5.9, 6, 77, 2688, 3000], 16)
    q = agree(fp4kit.quantize, x, "nvfp4-deepseek-v4")
    scales = fp8_of(np.maximum(np.abs(x).max(axis=1), np.float32(6 * 2.0**-9)) / np.float32(6))
    assert q.block_scale[:, 0].tolist() == scales.tolist() and scales[0] == 1
    wanted = [[code_of(np.float32(v) / np.float32(E4M3[s]), 1) for v in row] for row, s in zip(x, scales, strict=True)]
    assert fp4kit.unpack(q.packed).tolist() == wanted


def test_fp8_with_float32_scales():
    """The scale is max(amax, 1e-4) * float32(1/448), by which elements are divided."""
    x = rows_of_deepseek([0, 1e-6, 1e-4, 0.3, 448, 1e30], 128)
    q = agree(fp4kit.quantize, x, "fp8-deepseek-v4")
    scales = np.maximum(np.abs(x).max(axis=1), np.float32(1e-4)) * np.float32(1 / 448)
    assert q.tensor_scale.reshape(-1).tolist() == scales.tolist()
    assert q.packed.tolist() == fp8_of(x / scales[:, None]).tolist()


def test_fp8_with_powers_of_two():
    """The scale max(amax, 1e-4) * float32(1/448) is rounded up to a power of two; amaxes are next to 448 * 2^k."""
    near = np.float32([448 * 2.0**k for k in range(-20, 100, 12)])
    x = rows_of_deepseek(
        [0, 1e-6, *near, *np.nextafter(near, np.float32(0)), *np.nextafter(near, np.float32(np.inf))], 128
    )
    q = agree(fp4kit.quantize, x, replace(RECIPES["mxfp8-deepseek-v4"], block=(1, 128)))
    products = np.maximum(np.abs(x).max(axis=1), np.float32(1e-4)) * np.float32(1 / 448)
    exponents = [exponent - (m == 0.5) for m, exponent in (math.frexp(float(p)) for p in products)]
    assert q.block_scale[:, 0].tolist() == [e + 127 for e in exponents]
    assert q.packed.tolist() == fp8_of(x / np.float32(2.0 ** np.array(exponents))[:, None]).tolist()


def test_codes_and_scales():
    """Blocks with amaxes over the range of float32, among them those next to 6 * 2^k."""
    rng = np.random.default_rng(33)
    x = rng.uniform(-1, 1, (96, 32)).astype(np.float32)
    amaxes = np.float32([6 * 2.0**k for k in range(-128, 122, 8)])
    amaxes = np.concatenate([np.nextafter(amaxes, np.float32(0)), amaxes, np.nextafter(amaxes, np.float32(np.inf))])
    x *= np.resize(amaxes, 96)[:, None]
    x[:, 5] = np.resize(amaxes, 96)
    x[-1] = 0
    q = agree(fp4kit.quantize, x, "mxfp4-deepseek-v4")
    exponents = [exponent_of(np.abs(row).max()) for row in x]
    assert q.block_scale[:, 0].tolist() == [e + 127 for e in exponents]
    wanted = [[code_of(v, Fraction(2) ** e) for v in row] for row, e in zip(x, exponents, strict=True)]
    assert fp4kit.unpack(q.packed).tolist() == wanted


F32 = np.float32
FLT_MAX = np.finfo(F32).max


def mul(a, b):
    """PTX mul.ftz.f32. Operands here are far from the results that round up to the smallest normal number."""
    product = np.where(np.abs(a) < 2.0**-126, F32(0), a) * np.where(np.abs(b) < 2.0**-126, F32(0), b)
    return F32(np.where(np.abs(product) < 2.0**-126, F32(0), product))


# Each function takes an amax, and returns the encode and the decode scale.
def token(amax):
    decode = mul(amax, F32(1) / F32(2688))
    return (rcp(decode) if decode else FLT_MAX), decode


def token_precise(amax):
    encode = min(F32(2688) / amax, FLT_MAX) if amax else FLT_MAX
    return encode, F32(1) / encode if encode <= 2.0**126 else F32(0)


def multiplied(amax):
    scale = amax / F32(2688)  # the engine receives 1 / scale
    return F32(1) / scale, scale


def divided(amax):
    encode = F32(2688) * (F32(1) / amax)
    return encode, F32(1) / encode


def sglang_online(amax):
    scale = amax * (F32(1) / F32(2688)) if amax else F32(1)
    return F32(1) / scale, scale


def hf_kernels(amax):
    encode = F32(1) / max(amax, F32(1e-12)) * F32(2688)
    return encode, F32(1) / encode


def vllm_online(amax):
    encode = F32(1) / max(amax, F32(1e-8)) * F32(2688)
    return encode, F32(1) / encode


# Each function takes a block's amax, an encode scale and the elements, and returns the scale's byte and the factor.
def fast(amax, encode, block):
    scale, byte = e4m3(mul(encode, mul(amax, rcp(6))))
    return byte, rcp(mul(scale, rcp(encode))) if amax else F32(0)


def precise(amax, encode, block):
    if not amax:
        return 0, F32(0)
    scale, byte = e4m3(mul(amax, mul(encode, F32(1) / F32(6))))
    return byte, min(F32(1) / mul(scale, F32(1) / encode), FLT_MAX)


def cute(amax, encode, block):
    """The arithmetic of FlashInfer's cute-dsl kernel without fast math, which keeps subnormals."""
    scale, byte = e4m3(amax * (encode * (F32(1) / F32(6))))
    return byte, min(F32(1) / (scale * (F32(1) / encode)), FLT_MAX) if amax else F32(0)


def vllm(amax, encode, block):
    scale, byte = e4m3(encode * (amax * rcp(6)))
    return byte, rcp(scale * rcp(encode)) if scale else F32(0)


def best_of_two(amax, encode, block):
    """The arithmetic of FlashInfer's cute-dsl kernel: errors before the tensor scale, in float16 and float32."""
    if not amax:
        return 0, F32(0)
    found = []
    for base in (amax / F32(6) * encode, amax / F32(6) * encode * F32(1.5)):
        scale, byte = e4m3(base)
        factor = min(F32(1) / (scale * (F32(1) / encode)), FLT_MAX)
        codes, error = e2m1(block * factor), F32(0)
        values = np.float32(E2M1)[codes & 7] * np.where(codes & 8, F32(-1), F32(1))
        for difference in (values * scale).astype(np.float16).astype(F32) - block * encode:
            error = error + difference * difference
        found.append((error, byte, factor))
    return min(found, key=lambda candidate: candidate[0])[1:]  # the first of equal errors


STATED = {  # {recipe: (scales of a tensor or row, scale of a block)}
    "nvfp4-flashinfer-token": (token, fast),
    "nvfp4-flashinfer-token-precise": (token_precise, precise),
    "nvfp4-flashinfer-static": (multiplied, fast),
    "nvfp4-vllm-static": (multiplied, vllm),
    "nvfp4-vllm-static-divisor": (divided, vllm),
    "nvfp4-vllm-online": (vllm_online, fast),
    "nvfp4-sglang-online-a022252": (sglang_online, cute),
    "nvfp4-sglang-online": (sglang_online, best_of_two),
    "nvfp4-hf-kernels": (hf_kernels, vllm),
}
TOKENS = [name for name in fp4kit.recipes("nvfp4") if fp4kit.recipe(name).tensor_scaling == "row" and "token" in name]


@np.errstate(all="ignore")
def stated_of_flashinfer(x, name, amax=None):
    """Return (packed codes, block scales, tensor scales) of a matrix, block by block."""
    scales_of, block_of = STATED[name]
    x = x.astype(F32)
    codes, bytes_ = np.zeros(x.shape, np.uint8), np.zeros((len(x), x.shape[1] // 16), np.uint8)
    whole = np.abs(x).max() if amax is None else F32(amax)
    decodes = np.zeros(len(x), F32)
    for i, row in enumerate(x):
        encode, decodes[i] = scales_of(np.abs(row).max() if "token" in name else whole)
        for j, block in enumerate(row.reshape(-1, 16)):
            bytes_[i, j], factor = block_of(np.abs(block).max(), encode, block)
            cleared = name == "nvfp4-sglang-online" and not block.any()
            codes[i, 16 * j : 16 * j + 16] = 0 if cleared else e2m1(block * factor)
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_, decodes if "token" in name else decodes[0]


def drawn(rng, dtype, spread=2.0):
    """Draw a matrix whose rows and blocks differ in size, with zeros, -0, a row of zeros, and elements at ties."""
    x = rng.standard_normal((24, 160)) * np.exp(spread * rng.standard_normal((24, 1)))
    x *= np.exp(rng.standard_normal((24, 10))).repeat(16, 1)
    x[3], x[5, :16], x[6, 1], x[7] = 0, 0, -0.0, np.arange(160) % 16 / 4
    return np.clip(x, -6e4, 6e4).astype(dtype)


def check(x, name, amax=None):
    """Assert that both CPU engines give the codes and scales of the statement for x."""
    expected = stated_of_flashinfer(x, name, amax)
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
        if name == "nvfp4-sglang-online":  # blocks of zeros lose their signs, but no others do
            check(np.float32([[-0.0] * 16 + [-0.0, 1e-40] * 8 + [-0.0, 1e4] * 8, [-1e-40] * 48]), name)
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


@pytest.mark.parametrize(
    "name, row, codes, block_scales, tensor_scale",
    [
        ("nvfp4-hf-kernels", [1.0, *[0] * 15, *[2.0**-30] * 16], [7, *[0] * 31], [126, 0], F32(1 / 2688)),
        ("nvfp4-sglang-online-a022252", [2.0**-128] * 16, [2] * 16, [126], F32(2.0**-128) * F32(1 / 2688)),
        ("nvfp4-flashinfer-token-precise", [1e-36] * 16, [7] * 16, [102], 0),
        ("mxfp8-mlx-metal-0321", [np.inf, -np.inf, np.nan, *[1.0] * 29], [126] * 3 + [0] * 29, [255], None),
        ("mxfp4-mlx-metal-0321", [np.inf, -np.inf, np.nan, *[1.0] * 29], [7] * 3 + [0] * 29, [255], None),
    ],
)
def test_extreme_blocks_as_compiled_kernels_gave_them(name, row, codes, block_scales, tensor_scale):
    """Blocks whose scale underflows or is infinite, for which kernels differ in one operation or its flags."""
    x = np.array([row], BF16)
    for q in (fp4kit.quantize(x, name), specified(x, name)):
        assert codes_of(q).ravel().tolist() == codes
        assert q.block_scale.view(np.uint8).ravel().tolist() == block_scales
        assert q.tensor_scale is tensor_scale or np.ravel(q.tensor_scale) == tensor_scale


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


NAME_MSLK = "mxfp4-mslk-stochastic"


def randint(seed, offset):
    """Return the word of Triton's tl.randint(seed, offset, n_rounds=7)."""
    return triton_word(seed, offset, 7)


def scale_of(amax, word):
    """Return the E8M0 byte of a block: the exponent of the amax whose bits are increased by 22 random bits."""
    bits = int(np.float32(amax or 2.0**-126).view(np.int32)) + (word & 0x3FFFFF)
    return min(max((bits >> 23) - 127 - 2, -127), 125) + 127


def code_of_mslk(x, scale, word):
    """Return the code of x: noise is added to the bits of the scaled element, which is then rounded to nearest even."""
    y = np.float32(np.float64(x) / 2.0 ** (scale - 127))
    bits = 0x7FFFFFFF if np.isnan(y) else int(y.view(np.int32))
    noisy = (bits + (word & 0x3FFFFF) - 0x1FFFFF) & 0xFFFFFFFF
    sign, magnitude = noisy >> 31, noisy & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 7
    value = 6 if magnitude == 0x7F800000 else min(Fraction(float(np.uint32(magnitude).view(np.float32))), 6)
    return nearest_code(value) | sign << 3


def stated_of_mslk(x, seed, size):
    """Return (scales, codes) of the rows of x, with blocks of `size` elements."""
    blocks = x.astype(np.float32).reshape(-1, size)
    with np.errstate(all="ignore"):
        amaxes = [np.nanmax(np.abs(b)) if not np.isnan(b).all() else 0 for b in blocks]
    scales = [scale_of(amax, randint(seed, i)) for i, amax in enumerate(amaxes)]
    with np.errstate(all="ignore"):
        codes = [
            code_of_mslk(v, scales[i // size], randint(seed ^ 0x5A5A5A5A, i)) for i, v in enumerate(blocks.reshape(-1))
        ]
    rows = x.reshape(-1, x.shape[-1]).shape[0]
    return np.uint8(scales).reshape(rows, -1), np.uint8(codes).reshape(rows, -1)


def rows_of_mslk(dtype, shape):
    """Return rows of different magnitude, with zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-10, 8, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.2] = rng.choice([0.0, -0.0])
    x[(0,) * (x.ndim - 2)][1, 3], x[(0,) * (x.ndim - 2)][2, 40:43] = np.inf, (np.nan, -np.nan, -np.inf)
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("size, seed", [(32, 0), (16, 2**40 + 3)])
def test_scales_and_codes(dtype, size, seed):
    x, r = rows_of_mslk(dtype, (12, 64)), replace(RECIPES[NAME_MSLK], block=(1, size))
    q = agree(fp4kit.quantize, x, r, rounding="stochastic", seed=seed)
    scales, codes = stated_of_mslk(x, seed, size)
    assert q.block_scale.tolist() == scales.tolist()
    assert fp4kit.unpack(q.packed).tolist() == codes.tolist()


def test_the_words_run_through_all_dimensions():
    """Elements and blocks are counted in x with the quantized axis last."""
    x = rows_of_mslk(BF16, (2, 4, 64))
    q = agree(fp4kit.quantize, x, NAME_MSLK, rounding="stochastic", seed=5)
    scales, codes = stated_of_mslk(x, 5, 32)
    assert q.block_scale.reshape(8, -1).tolist() == scales.tolist()
    assert fp4kit.unpack(q.packed).reshape(8, -1).tolist() == codes.tolist()
    columns = agree(fp4kit.quantize, np.moveaxis(x, -1, 0), NAME_MSLK, axis=0, rounding="stochastic", seed=5)
    assert_same_bits(columns.packed, q.packed)


def test_about_half_of_all_zeros_become_six():
    x = np.zeros((64, 64), np.float16)
    x[:, 0] = x[:, 32] = 1
    codes = fp4kit.unpack(fp4kit.quantize(x, NAME_MSLK, rounding="stochastic", seed=1).packed)[x == 0]
    assert set(codes.tolist()) == {0, 7} and 0.45 < (codes == 7).mean() < 0.55


@pytest.mark.parametrize("name, dtype", [(NAME, np.float32), (NAME_MSLK, np.float16)])
def test_other_operations(name, dtype):
    """Other operations give the codes of quantize, and so do engines that fall back to the specification."""
    x, options = rows_of_mslk(dtype, (16, 64)), {"rounding": "stochastic", "seed": 9}
    q = agree(fp4kit.quantize, x, name, **options)
    assert_same_bits(agree(fp4kit.fake_quantize, x, name, **options), fp4kit.dequantize(q))
    assert_same_bits(fp4kit.quantize_grouped([x, x], name, **options)[1], q)
    given = {part: getattr(q, part) for part in ("block_scale", "tensor_scale") if getattr(q, part) is not None}
    assert_same_bits(fp4kit.quantize(x, name, **given, **options).packed, q.packed)
    assert ("random number" if name == NAME else "with noise") in str(fp4kit.explain(x, name, (3, 5), **options))
    finite = np.where(np.isfinite(x), x, dtype(1))
    assert not fp4kit.identify(fp4kit.quantize(finite, name, **options), finite).variations


@pytest.mark.parametrize("index", [(0, 0), (5, 63), (7, 20)], ids=str)
def test_explained_codes(index):
    """The code that explain shows is the code of quantize, also in later rows and blocks."""
    x, options = rows_of_mslk(np.float16, (8, 64)), {"rounding": "stochastic", "seed": 3}
    expected = fp4kit.unpack(fp4kit.quantize(x, NAME_MSLK, **options).packed)[index]
    steps = fp4kit.explain(x, NAME_MSLK, index, **options)
    assert f"{expected:04b}" in next(line for line in str(steps).splitlines() if line.strip().startswith("code"))


def test_errors():
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=f"^quantize: seed is an array; {NAME_MSLK} needs an int, because"):
        fp4kit.quantize(x, NAME_MSLK, rounding="stochastic", seed=np.zeros(x.shape, np.uint8))
    with pytest.raises(ValueError, match=r"^quantize: stochastic rounding needs seed: an int$"):
        fp4kit.quantize(x, NAME_MSLK, rounding="stochastic")
    for fields in ({"block": (2, 32)}, {"element": fp4kit.formats.E2M3}):
        with pytest.raises(ValueError, match="stochastic is 'mslk'; needs elements E2M1 and E8M0 scales of blocks of"):
            replace(RECIPES[NAME_MSLK], **fields)


def scale_of_nunchaku(amax):
    """Return min(amax * float32(1/6), 448) in float32, the scale before it is rounded to E4M3."""
    return min(np.float32(amax) * np.float32(1 / 6), np.float32(448))


def reciprocals_of(scale):
    """Return the float32 numbers that rcp.approx.ftz.f32 may give: those within 1 ulp of 1 / scale."""
    if scale < 2.0**-126:
        return [np.float32(np.inf)]
    near = np.float32(1) / scale
    return [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))]


def code_of_nunchaku(product):
    """Return the E2M1 code nearest to a float32 product, ties to the even code: cvt.rn.satfinite.e2m1x2."""
    return 7 if math.isnan(product) else code_of(product, 1)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_codes_and_scales_of_nunchaku(dtype):
    """The block scales of the rows are from 0 to saturated. Each row's codes follow from one of its reciprocals."""
    rng = np.random.default_rng(33)
    x = rng.uniform(-1, 1, (48, 16)) * np.ldexp(6.0, np.arange(48) - 30)[:, None]
    x = np.clip(x, -60000, 60000).astype(dtype)
    x[3, 4] = -0.0
    x[0], x[1] = 0, x[1] * 0
    q = agree(fp4kit.quantize, x, "nvfp4-nunchaku")
    codes = fp4kit.unpack(q.packed)
    for row, scale_code, found in zip(x.astype(np.float32), q.block_scale[:, 0], codes, strict=True):
        scale = scale_of_nunchaku(np.abs(row).max())
        assert scale_code == nearest(scale, E4M3)
        with np.errstate(invalid="ignore"):
            possible = [[code_of_nunchaku(v * r) for v in row] for r in reciprocals_of(scale)]
        assert any(np.array_equal(found, wanted) for wanted in possible)


def test_the_scale_is_not_rounded_before_its_reciprocal_is_taken():
    """The scale 6.5 / 6 = 1.083 rounds to the E4M3 value 1.125, by which 5.5 would be 4.89 and get the code of 4."""
    x = np.zeros((1, 16), np.float16)
    x[0, :2] = 6.5, 5.5
    q = agree(fp4kit.quantize, x, "nvfp4-nunchaku")
    assert q.block_scale.tolist() == [[0x39]]  # 1.125
    assert fp4kit.unpack(q.packed)[0, :2].tolist() == [7, 7]  # 5.5 / 1.083 = 5.08
    assert fp4kit.unpack(fp4kit.quantize(x, "nvfp4-torchao-single").packed)[0, :2].tolist() == [7, 6]


NAMES = ("nvfp4-quark", "nvfp4-quark-file2file")


def test_a_scale_that_underflows_is_stored_as_zero_by_file_to_file():
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 16:20], x[0, 48] = 1.04e-6, [2.5e-15, -2.5e-15, 1e-15, -1e-16], 1e-9
    for name, scales in zip(NAMES, ([126, 56, 56, 46], [126, 0, 122, 46]), strict=True):
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [scales], name
        assert codes_of(q)[0, [0, 48]].tolist() == [7, 7] and np.count_nonzero(codes_of(q)) == 2, name


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_divided_by_the_epsilon_where_the_product_of_scales_is_zero(name):
    x = np.zeros((1, 32), np.float32)
    x.view(np.uint32)[0, [14, 16]] = 1, 0x11DB
    q = fp4kit.quantize(x, name)
    assert codes_of(q)[0].tolist() == [0] * 16 + [7] + [0] * 15
    assert name != "nvfp4-quark" or q.block_scale.tolist() == [[27, 124]]


@NEEDS_ENGINE
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine(name, monkeypatch):
    as_large_ones(monkeypatch)
    for factor in (1, 2.0**-20, 2.0**-125, 2.0**-137, 2.0**-145):
        x = (underflowing() * factor).astype(np.float32)
        q = agree(fp4kit.quantize, x, name)
        agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)


# ---- MX: decoding rounds scales to the dtype of the weight; the fake quantizer does not ----


@pytest.mark.parametrize(
    "name", ["mxfp4-quark-even", "mxfp4-quark-floor", "mxfp6-quark-e2m3-even", "mxfp6-quark-e3m2-even"]
)
def test_float16_is_decoded_by_scales_of_float16(name, monkeypatch):
    as_large_ones(monkeypatch)
    x = np.float16(np.random.default_rng(1).standard_normal((256, 32)))
    q = fp4kit.quantize(x, name)
    scales = np.arange(256, dtype=np.uint8)[:, None]
    q = fp4kit.Quantized.from_parts(q.packed, scales, recipe=name, shape=x.shape, dtype=x.dtype)
    found, exact = fp4kit.dequantize(q), fp4kit.dequantize(q, np.float32)
    assert not found[: 127 - 24].any() and np.isinf(found[143:]).any() and (found[143:] != 0).all()
    between = slice(127 - 24, 127 + 10)
    assert (found[between] == exact[between].astype(np.float16)).all() and found[between].any(axis=1).all()
    assert exact[1].any() and np.isinf(exact[255]).any()


@pytest.mark.parametrize("name", ["mxfp4-quark-even", "mxfp6-quark-e2m3-even"])
def test_its_fake_quantizer_keeps_values_under_scales_that_float16_does_not_hold(name, monkeypatch):
    as_large_ones(monkeypatch)
    x = np.float16(np.random.default_rng(2).integers(-3, 4, (64, 64)) * 2.0**-24)
    faked = agree(fp4kit.fake_quantize, x, name)
    assert (faked == x).mean() > 0.9
    assert not fp4kit.dequantize(fp4kit.quantize(x, name)).any()
    assert not agree(fp4kit.dequantize, fp4kit.quantize(x, name)).any()


RELEASE = [name for name in RECIPES if name.endswith("-018")]
MODES = ("floor", "rceil", "ceil", "even")


def development(name):
    """Return the recipe of torchao 0.19 that makes the call of `name`, a recipe of torchao 0.18."""
    return fp4kit.recipe(name.removesuffix("-018"))


def amaxes():
    """Return amaxes at which rounding matters.

    They are bfloat16 numbers of small, middle and large exponents, infinity and NaN, and float32 numbers a few ulp
    above max * 2^k.
    """
    codes = np.append(np.arange(0x7F81, dtype=np.uint16), np.uint16(0x7FC0))
    numbers = codes.view(ml_dtypes.bfloat16).astype(np.float32)
    field = exponent_field(numbers)
    largest = np.float32([6, 7.5, 28, 448, 57344])[:, None] * np.float32(2) ** np.float32(
        [-140, -127, -64, -3, 0, 5, 100]
    )
    near = largest.reshape(-1, 1).view(np.int32) + np.int32([-1, 0, 1, 2, 9])
    return np.concatenate(
        [numbers[(field < 18) | (abs(field - 127) < 4) | (field > 238)], near.view(np.float32).ravel()]
    )


def stated_of_torchao(amax, mode, element):
    """Return (scale byte of a block, factor of its elements), by the steps of torchao 0.18.0's mx_tensor.py.

    amax: the amax of the block.
    mode: the scale mode, such as "floor".
    element: the element format.
    """
    if math.isnan(amax):
        return 255, math.nan if mode == "rceil" else 0.0
    if mode == "rceil":
        descale = np.float32(amax) / np.float32(element.max)
        log2 = -math.inf if descale == 0 else math.inf if np.isinf(descale) else float(np.float32(math.log2(descale)))
        byte = 254 if log2 == math.inf else 0 if log2 == -math.inf else min(max(math.ceil(log2), -127), 127) + 127
        return byte, 2.0 ** (127 - byte) if byte else 1.0
    bits = int(np.float32(amax).view(np.int32)) + (1 << 22 - element.mantissa_bits) * (mode == "even")
    exponent = (bits >> 23) - 127 + (mode == "ceil" and bits & 0x7FFFFF != 0)
    byte = min(max(exponent - element.emax, -127), 128) + 127
    return byte, 2.0 ** (127 - max(byte, 1)) if byte < 255 else 0.0


def test_every_mode_of_the_release_has_recipes():
    assert len(RELEASE) == 16 and {RECIPES[name].block_rule for name in RELEASE} == {
        f"e8m0_{mode}_018" for mode in MODES
    }
    assert all(RECIPES[name].versions == ("0.18.0", "0.18.0") for name in RELEASE)
    assert RECIPES["nvfp4-torchao"].versions.first == RECIPES["nvfp4-torchao-single"].versions.first == "0.18.0"


@pytest.mark.parametrize("name", RELEASE)
def test_scales_and_codes_are_those_of_its_steps(name, either_engine):
    r, found = RECIPES[name], amaxes()
    mode = r.block_rule.split("_")[1]
    x = found[:, None] * np.resize(np.float32([1, -0.75, 0.3, 0.125, -0.01, 0.5]), r.block_size)
    bytes_, factors = (
        np.array(part)
        for part in zip(*(stated_of_torchao(amax, mode, r.element) for amax in found.tolist()), strict=True)
    )
    q = fp4kit.quantize(x, r)
    assert q.block_scale[:, 0].tolist() == bytes_.tolist()
    with np.errstate(all="ignore"):
        codes = encode(x * factors.astype(np.float32)[:, None], r.element)
    known = bytes_ != 255
    assert (fp4kit.unpack(q.packed) if r.is_packed else q.packed)[known].tolist() == codes[known].tolist()


@pytest.mark.parametrize("name", RELEASE)
def test_release_and_development_version_differ_only_where_documented(name, either_engine):
    r, other = RECIPES[name], development(name)
    x = np.zeros((len(amaxes()), 32), np.float32)
    x[:, 0] = amaxes()
    ours, theirs = (fp4kit.quantize(x, recipe) for recipe in (r, other))
    differ = (ours.packed != theirs.packed).any(axis=1) | (ours.block_scale != theirs.block_scale)[:, 0]
    tiny = theirs.block_scale[:, 0] == 0
    rounds_to_inf = (
        x[:, 0] >= (2 - 2.0 ** -(r.element.mantissa_bits + 1)) * 2.0**127 if "even" in name else np.isinf(x[:, 0])
    )
    ratio = x[:, 0].astype(np.float64) / float(r.element.max)
    above = ratio / 2.0 ** np.floor(np.log2(np.where(np.isfinite(ratio) & (ratio > 0), ratio, 1)))
    near = (1 < above) & (above < 1 + 1e-5) if "rceil" in name else np.zeros(len(x), bool)
    usual = ~(tiny | rounds_to_inf | near | np.isnan(x[:, 0]))
    assert usual.any() and not differ[usual].any()
    for where in (tiny & (x[:, 0] > 2.0**-140), np.isinf(x[:, 0]), rounds_to_inf, *([near] if near.any() else [])):
        assert differ[where].any()


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_values_under_byte_0_come_back_halved(mode, either_engine):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 2.0**-126
    assert fp4kit.fake_quantize(x, f"mxfp4-torchao-{mode}-018")[0, 0] == 2.0**-127
    assert fp4kit.fake_quantize(x, f"mxfp4-torchao-{mode}")[0, 0] == 2.0**-126


def test_rceil_of_the_release_flushes_tiny_blocks_and_saturates_near_powers(either_engine):
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[1, 0] = 2.0**-126, np.nextafter(np.float32(6 * 2.0**64), np.float32(np.inf))
    ours, theirs = (fp4kit.quantize(x, f"mxfp4-torchao-rceil{release}") for release in ("-018", ""))
    assert ours.block_scale[:, 0].tolist() == [0, 127 + 64] and theirs.block_scale[:, 0].tolist() == [0, 127 + 65]
    assert fp4kit.dequantize(ours)[:, 0].tolist() == [0, 6 * 2.0**64]
    assert fp4kit.dequantize(theirs)[0, 0] == 2.0**-126


def test_the_release_is_not_the_development_version_on_recorded_inputs(golden):
    """The two versions differ on the recorded inputs, so the recordings can tell their recipes apart."""
    for name in ("mxfp4-torchao-floor-018", "mxfp8-torchao-rceil-018"):
        r = RECIPES[name]
        assert not check_recipe(name, golden).differences
        variant = "mxfp4_floor" if "mxfp4" in name else "mxfp8_e4m3_rceil"
        x = golden.input("near_largest__f32", "ao_018")
        recorded = [golden.get("ao_018", f"near_largest__f32/{variant}/{part}") for part in ("scales", "codes")]
        for recipe, equal in ((r, True), (development(name), False)):
            q = fp4kit.quantize(x, recipe)
            assert all(np.array_equal(a, b) for a, b in zip((q.block_scale, q.packed), recorded, strict=True)) == equal


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_other_elements_of_a_block_with_nan_become_zeros(mode, either_engine):
    """In a block with NaN, other elements get code 0, because the NaN scale byte counts as infinity in the division.

    All values still decode to NaN.
    """
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = np.nan, 1, -2
    q = fp4kit.quantize(x, f"mxfp4-torchao-{mode}-018")
    assert q.block_scale.tolist() == [[255]] and fp4kit.unpack(q.packed)[0, 1:4].tolist() == [0, 8, 0]
    assert np.isnan(fp4kit.dequantize(q)).all()


E4M3_SCALE_ORDER = ml_dtypes.float8_e4m3fn
TENSOR_AMAX = np.float32(7.3)
SIX, SIXTH = np.float32(6), np.float32(1) / np.float32(6)


def amaxes_of_scale_order():
    """Return float32 amaxes whose block scales are next to a midpoint of two E4M3 values, below TENSOR_AMAX."""
    values = np.arange(8, 126, dtype=np.uint8).view(E4M3_SCALE_ORDER).astype(np.float32)
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
    found = amaxes_of_scale_order()
    x = np.zeros((len(found), 16), np.float32)
    x[:, 3] = -found
    scales = agree(fp4kit.quantize, x, name, tensor_amax=TENSOR_AMAX).block_scale[:, 0]
    right, other = (statement(found).astype(E4M3_SCALE_ORDER).view(np.uint8) for statement in STATEMENTS[name])
    assert np.array_equal(scales, right)
    assert not np.array_equal(right, other)


def test_powers_of_two():
    """nvfp4-mslk-power rounds amax / 4 * encode up to a power of two if its mantissa is above 1.75, otherwise down."""
    mantissas = np.float32([1, 1.5, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 1.9])
    x = np.zeros((5, 16), np.float32)
    x[:, 0] = mantissas * 4
    q = agree(fp4kit.quantize, x, "nvfp4-mslk-power", tensor_amax=np.float32(2688))
    assert q.block_scale[:, 0].view(E4M3_SCALE_ORDER).astype(np.float32).tolist() == [1, 1, 1, 2, 2]


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
