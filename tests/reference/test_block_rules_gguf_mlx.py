"""Test cases of llama.cpp and MLX that are not recorded: decoding of all bytes, scale bytes that wrap, and edges of the
rules.

The producers' steps are restated here, one number at a time, from their sources.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from inputs import BF16

import fp4kit
from fp4kit.evidence.golden.check import all_bytes
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3, unsigned
from fp4kit.layouts import pack_gguf, pack_mlx, unpack_gguf, unpack_mlx
from fp4kit.recipes import RECIPES
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import decode, encode, first_of_least
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.tensor_rules import ONE, TensorScale

NONE = TensorScale(ONE, ONE, ONE)
F32 = np.dtype(np.float32)


def blocks_of(amaxes, name, dtype=np.float32):
    """Return one row per amax: the amax followed by zeros."""
    x = np.zeros((len(amaxes), RECIPES[name].length_multiple), dtype)
    x[:, 0] = amaxes
    return x


def first_codes(q):
    return fp4kit.unpack(q.packed)[:, 0] if q.recipe.is_packed else q.packed[:, 0]


def scale_codes(amaxes, name, dtype=np.float32):
    return fp4kit.quantize(blocks_of(amaxes, name, dtype), name).block_scale[:, 0].tolist()


def same_values(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


# ---- decoders, and bytes of files ----


@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu", "mxfp4-fouroversix-6"])
def test_float16_is_decoded_by_a_rule_of_its_own(name, golden, either_engine):
    """For recipes of MLX and fouroversix, decoding to float16 rounds the scale to float16 first.

    It becomes infinite from 2^16 on, and 0 below 2^-24.

    For such scales, rounding only the decoded value would give another result.
    """
    r, count = RECIPES[name], 2 ** RECIPES[name].element.bits
    q = all_bytes(r, np.dtype(np.float16))
    found = fp4kit.dequantize(q)[:, :count]
    if name == "mxfp4-mlx-cpu":  # its zeros also equal the recorded ones
        assert same_values(found, golden.get("mlx", "all_bytes/mxfp4/dequant_f16")).all()
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    with np.errstate(all="ignore"):
        once = dequantize_tile(codes, q.block_scale, replace(r, decode_rule="e8m0_mlx"), NONE)[:, :count].astype(
            np.float16
        )
    beyond = np.flatnonzero(~same_values(found, once).all(axis=1))
    assert {100, 101, 102, 143, 254} <= set(beyond.tolist()) and not set(range(103, 143)) & set(beyond.tolist())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize(
    "older", ["nvfp4-mlx-cpu-0322", "nvfp4-mlx-cpu-0322-global", "mxfp8-mlx-cpu-0322", "mxfp8-mlx-cpu-0321"]
)
def test_nan_codes_were_480_up_to_0_32_2(older, dtype, either_engine):
    """The decoders of MLX 0.32.1, 0.32.2 and 0.32.4 differ only for the E4M3 codes 7F and FF.

    These occur as scales or as elements.
    """
    r, newer = RECIPES[older], RECIPES[re.sub("-032.", "", older)]
    q = all_bytes(r, np.dtype(dtype))
    found, now = (fp4kit.dequantize(replace(q, recipe=recipe)) for recipe in (r, newer))
    codes = np.broadcast_to(q.block_scale, q.shape) if r.scale == E4M3 else q.packed
    is_nan, sign = codes & 0x7F == 0x7F, np.where(codes & 0x80, -1, 1).astype(np.float32)
    assert is_nan.any() and np.isnan(now[is_nan]).all() and same_values(found, now)[~is_nan].all()
    if r.scale == E4M3:
        expected = sign * 480 * decode(fp4kit.unpack(q.packed), E2M1)
    else:
        with np.errstate(over="ignore"):
            powers = np.ldexp(np.float32(1), q.block_scale.astype(np.int32) - 127).astype(dtype).astype(np.float32)
            expected = sign * 480 * np.repeat(powers, r.block_size, axis=1)
    with np.errstate(over="ignore"):
        assert same_values(found[is_nan], expected[is_nan].astype(dtype)).all()


@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu"])
def test_fake_values_of_float16_are_those_of_codes(name):
    x = np.exp2(np.random.default_rng(0).uniform(-24, 15.9, (64, 256))).astype(np.float16)
    assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(fp4kit.quantize(x, name)))


def test_bytes_of_files(golden):
    """All recorded GGUF blocks and MLX words are read and written with equal bytes.

    Some GGUF blocks were made by llama.cpp's converter from other producers' codes.
    """
    count = 0
    for file in ("gguf", "mlx"):
        for key in (key for key in golden.keys(file) if key.endswith("/raw")):
            raw, codes, scales = (
                golden.get(file, key.removesuffix("raw") + part) for part in ("raw", "codes", "scales")
            )
            format = "mxfp4" if "mxfp4" in key else "nvfp4"
            assert_same_bits(pack_gguf(codes, scales, format) if file == "gguf" else pack_mlx(codes), raw)
            found = unpack_gguf(raw, format) if file == "gguf" else (unpack_mlx(raw), scales)
            for ours, recorded in zip(found, (codes, scales), strict=True):
                assert_same_bits(ours, recorded)
            count += 1
    assert count == 76


# ---- the first of the nearest ----


def nearest_first(x, step, dtype=np.float32):
    """Return the code of x, by trying all 16 codes in order.

    The first code whose value times `step` has the smallest error, computed in `dtype`, is chosen.
    """
    best, least = 0, None
    for code, value in enumerate(E2M1.values):
        error = abs(dtype(dtype(value) * dtype(step)) - dtype(x))
        if least is None or error < least:
            best, least = code, error
    return best


HUGE = [2.0**k * f for k in range(30, 38) for f in (1, 1 + 2**-23, 1.25, 1.5, 1.99)]


@pytest.mark.parametrize("step", [448.0, 1.0, 2.0**-9, 2.0**125, 2.0**126])
def test_the_first_of_the_nearest(step):
    with np.errstate(all="ignore"):
        x = np.float32(np.append(HUGE, np.linspace(0, 7, 113)) * (step if step != 448 else 1))
        x = np.append(x, np.float32([0.0, np.inf, 3.4e38])).astype(np.float32)
        x = np.append(x, -x)
        ours = encode(x, E2M1, "first", "unsigned_zero", 0, np.float32(step))
        assert ours.tolist() == [nearest_first(value, step) for value in x]


def test_the_first_of_the_smallest_errors_rounds_ties_toward_zero():
    a = (
        np.random.default_rng(0)
        .integers(0, np.float32(2.0**20).view(np.int32), 50_000)
        .astype(np.int32)
        .view(np.float32)
    )
    assert_same_bits(first_of_least(a, E2M1, ONE), encode(a, E2M1, "rnz"))


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_errors_in_16_bits_give_the_same_codes(dtype):
    """MLX computes errors in the input dtype, which gives the codes of float32 for all numbers up to 8.5.

    No element exceeds that relative to the scale of its block.
    """
    top = int(np.array(8.5, dtype).view(np.uint16))
    y = np.arange(0, top + 1, 3, dtype=np.uint16).view(dtype)
    y = np.append(y, y[-3000:])
    table = np.abs(E2M1.values[:8].astype(dtype) - y[:, None])
    assert_same_bits(encode(y, E2M1, "first"), table.argmin(axis=1).astype(np.uint8))


# ---- llama.cpp ----


def ue4m3(d):
    """Return the unsigned E4M3 byte of the scale d, by the branches of llama.cpp's code; 0 for NaN and d <= 0."""
    if not d > 0:
        return 0
    d = min(d, np.float32(448))
    significand, exponent = np.frexp(d)
    field, mantissa = int(exponent) - 1 + 7, np.float32(significand * 2 - 1) * 8
    if field <= 0:
        return min(int(np.float32(d * np.float32(512)) + np.float32(0.5)), 7)
    code = (field << 3) + math.floor(mantissa + 0.5)
    return 0x7E if code >= 0x78 else code


def test_scales_of_nvfp4_in_gguf(either_engine):
    d = [2.0**k * (1 + i / 16) for k in range(-12, 10) for i in range(16)]
    d += [value * (1 + s * 2.0**-22) for value in (248, 256, 7.5 / 512, 0.5 / 512, 2.0**-6, 447) for s in (-1, 0, 1)]
    amaxes = np.float32(d) * np.float32(6)
    expected = [ue4m3(np.float32(amax / np.float32(6))) for amax in amaxes]
    assert scale_codes(amaxes, "nvfp4-gguf") == expected
    assert {0x77, 0x7E} < set(expected) and not {*range(0x78, 0x7E)} & set(expected)


def test_huge_elements_of_nvfp4_in_gguf(either_engine):
    x = np.float32([2.0**33, 1.5 * 2.0**34, 1.5 * 2.0**35, 1.5 * 2.0**36, 3e38])
    q = fp4kit.quantize(blocks_of(x, "nvfp4-gguf"), "nvfp4-gguf")
    assert first_codes(q).tolist() == [7, 5, 7, 0, 0] and set(q.block_scale[:, 0].tolist()) == {0x7E}


ROUNDED_UP = {
    -1: 0,
    0: 0,
    1: 0,
    2: 0,
    -2: 1,
    -3: 1,
    3: 1,
    4: 1,
    -5: 2,
    -4: 2,
    5: 2,
    8: 2,
    -8: 5,
    9: 5,
    16: 5,
    -16: 11,
    17: 11,
    32: 11,
    -32: 22,
    33: 22,
    64: 22,
    65: 44,
    -64: 44,
    127: 44,
    -120: 44,
}


def test_log2_rounds_up_a_few_ulp_below_powers_of_two(either_engine):
    for k, ulps in ROUNDED_UP.items():
        below = np.float32(2.0**k).view(np.int32) - np.int32([ulps + 1, max(ulps, 1), 0])
        codes = scale_codes(below.view(np.float32), "mxfp4-gguf")
        assert codes == [k - 1 + 125, k + 125 - (ulps == 0), k + 125], k


def test_log2_of_the_kernels_is_that_of_the_specification():
    """The compiled engine's formula for log2 equals the specification's.

    All powers of two and 60 floats on either side are tried.
    """
    bits = np.float32(2.0 ** np.arange(-149, 128)).view(np.int32)[:, None] + np.arange(-60, 61)
    amaxes = bits[(bits > 0) & (bits < 0x7F800000)].astype(np.int32).view(np.float32)
    rule, r = BLOCK_RULES["e8m0_gguf"], RECIPES["mxfp4-gguf"]
    with np.errstate(all="ignore"):
        assert scale_codes(amaxes, r.id) == rule.code(amaxes, NONE, r, F32).tolist()


def test_wrapped_bytes_of_gguf_are_blocks_of_zeros(either_engine):
    amaxes = np.float32(2.0 ** np.arange(-149, -125))
    q = fp4kit.quantize(blocks_of(amaxes, "mxfp4-gguf"), "mxfp4-gguf")
    assert q.block_scale[:, 0].tolist() == list(range(232, 256)) and not q.packed.any()
    assert not fp4kit.dequantize(q).any()


def test_products_that_overflow_are_not_near(either_engine):
    """A candidate whose value overflows is never nearest.

    With the scale 2^126, the values 4 and 6 are infinite, so 3 is chosen.

    Next to 2^128, log2 rounds up to this scale.
    """
    q = fp4kit.quantize(blocks_of([np.finfo(np.float32).max], "mxfp4-gguf"), "mxfp4-gguf")
    assert (q.block_scale[0, 0], first_codes(q)[0]) == (253, 5)


# ---- MLX ----


def exponent_of_mlx(amax, largest, dtype, old):
    """Return the exponent n of MLX's scale: the integer nearest to log2(s) for s = amax / largest in the input dtype.

    largest: the largest value of an element.
    old: True for MLX before 0.32.2; later versions add 1 if 2^n < s.
    """
    s = dtype(dtype(amax) / dtype(largest))
    if s == 0:
        return 0
    n = int(np.rint(np.float32(dtype(np.float32(np.log2(np.float64(s)))))))
    return n + (not old and 2.0**n < float(s))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
@pytest.mark.parametrize("name", ["mxfp4-mlx-cpu", "mxfp8-mlx-cpu", "mxfp4-mlx-cpu-0321", "mxfp8-mlx-cpu-0321"])
def test_scales_of_mlx(name, dtype, either_engine):
    """quantize gives the scale bytes of MLX's steps, also if the exponent wraps around in the byte.

    Wrapping does not affect the largest element's code.
    """
    scalar, largest = np.dtype(dtype).type, RECIPES[name].element.max
    top = {4: 120.0, 2: 15.0 if dtype == np.float16 else 120.0}[np.dtype(dtype).itemsize]
    amaxes = np.exp2(np.random.default_rng(2).uniform(-24 if dtype == np.float16 else -148, top, 300)).astype(dtype)
    edges = (largest * 2.0 ** np.arange(-12, 7)).astype(dtype)  # s is a power of two or next to one
    bits = edges.view(unsigned(edges.dtype))
    amaxes = np.concatenate([amaxes, edges, (bits + 1).view(dtype), (bits - 1).view(dtype)])
    exponents = [exponent_of_mlx(amax, largest, scalar, name.endswith("0321")) for amax in amaxes]
    q = fp4kit.quantize(blocks_of(amaxes, name, dtype), name)
    assert q.block_scale[:, 0].tolist() == [n + 127 & 0xFF for n in exponents]
    scaled = np.ldexp(amaxes.astype(np.float64), -np.array(exponents)).astype(np.float32)
    rounding = "first" if RECIPES[name].is_packed else "rn"
    assert_same_bits(first_codes(q), encode(scaled, RECIPES[name].element, rounding))
    assert dtype == np.float16 or any(n < -127 for n in exponents)


def test_zero_blocks_of_mlx(either_engine):
    x = np.zeros((2, 32), np.float32)
    x[:, ::2] = -0.0
    assert fp4kit.quantize(x, "mxfp4-mlx-cpu").block_scale.tolist() == [[127], [127]]
    assert set(fp4kit.quantize(x, "mxfp8-mlx-cpu").packed.reshape(-1).tolist()) == {0, 0x80}
    q = fp4kit.quantize(x, "nvfp4-mlx-cpu-global")
    assert set(q.block_scale.reshape(-1).tolist()) == {0xFE} and not q.packed.any()


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_nvfp4_of_mlx_rounds_twice_in_16_bits(dtype, either_engine):
    """In 16-bit dtypes T, MLX rounds twice: s = T(amax / 6), y = f32(T(x / scale) * S_enc).

    Multiplying x by one float32 factor would give other codes.
    """
    x = np.random.default_rng(4).standard_normal((512, 64)).astype(dtype)
    amax = np.abs(x.astype(np.float32)).max()
    enc = np.float32(2688) / amax
    q = fp4kit.quantize(x, "nvfp4-mlx-cpu-global")
    s = (np.abs(x).reshape(512, 4, 16).max(axis=2) / np.dtype(dtype).type(6)).astype(dtype).astype(np.float32) * enc
    assert_same_bits(q.block_scale, encode(s, E4M3))
    scales = np.repeat(E4M3.decode(q.block_scale), 16, axis=1).astype(dtype)
    y = (x / scales).astype(dtype).astype(np.float32) * enc
    assert_same_bits(fp4kit.unpack(q.packed), encode(y, E2M1, "first", "unsigned_zero"))
    wide = fp4kit.quantize(x.astype(np.float32), "nvfp4-mlx-cpu-global")
    assert 0 < np.count_nonzero(wide.packed != q.packed) < 0.05 * q.packed.size


def test_global_scale_is_the_tensors_amax():
    x = np.float32([[3.0] * 16, [-5.0] * 16])
    for name in ("nvfp4-mlx-cpu-global", "nvfp4-mlx-metal-global"):
        q = fp4kit.quantize(x, name)
        assert (q.tensor_amax, q.tensor_scale) == (5, np.float32(5) / np.float32(2688))
    assert fp4kit.quantize(x, "nvfp4-mlx-cpu").tensor_scale is None


def test_names_of_metal():
    assert (
        fp4kit.recipe("mxfp4-mlx-metal").id == "mxfp4-torchao-rceil"
        and fp4kit.recipe("mxfp8-mlx-metal").id == "mxfp8-te"
    )


def test_a_transform_decides_whether_a_byte_has_wrapped(either_engine):
    """With given scales, the amax of the transformed block decides whether a byte has wrapped.

    Here it is 2^-124, from elements of 2^-126.
    """
    x, scales = np.full((1, 32), 2.0**-126, np.float32), np.full((1, 1), 250, np.uint8)
    assert fp4kit.quantize(x, "mxfp4-mlx-cpu", block_scale=scales).packed.any()
    assert not fp4kit.quantize(x, "mxfp4-mlx-cpu", block_scale=scales, hadamard="no_signs").packed.any()
