"""Test dequantize and requantize."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BF16, FINITE, NAMES, ORDINARY, codes_of, element_values, in_float32, scale_values
from together import together

import fp4kit
from fp4kit.evidence.golden.check import all_bytes
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E4M3, E5M2, E8M0, ElementFormat
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.codec import decode
from fp4kit.reference.dequantize import may_keep_codes

HALF = {name for name in NAMES if RECIPES[name].decode_rule == "e8m0_float16"}
MX = [name for name in NAMES if RECIPES[name].scale is E8M0 and name not in HALF]
recipes = pytest.mark.parametrize("name", NAMES)


def same_values(a, b):
    """Return whether two arrays are equal as numbers: -0 equals +0, and NaN equals NaN."""
    return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), equal_nan=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HALF])
@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE)
def test_values_are_code_times_scales(name, x):
    """dequantize returns decode(code) * block_scale * tensor_scale, up to the roundings of the decode rule.

    x is divided by 4096, because some intermediate products overflow for large amaxes:

    - fouroversix computes code * block_scale * tensor_amax, which overflows for an amax above FLT_MAX / 2688.
    - TE computes tensor_amax * block_scale, which overflows for an amax above FLT_MAX / 448.
    """
    r = in_float32(RECIPES[name])
    q = fp4kit.quantize(x.astype(np.float32) / 4096, r)
    exact = element_values(q).astype(np.float64)
    if r.scale is not None:
        scales = scale_values(q).astype(np.float64)
        if name == "mxfp8-comfy-kitchen":  # scale code 0 stands for 0
            scales[q.block_scale == 0] = 0
        if r.decode_rule == "e8m0_nncf":  # scales from 2^16 on are infinite in float16
            with np.errstate(over="ignore"):
                scales = scales.astype(np.float16).astype(np.float64)
        with np.errstate(invalid="ignore"):
            exact *= np.repeat(scales, r.block_size, axis=1)
    ours = fp4kit.dequantize(q)
    if q.tensor_scale is None:
        assert same_values(ours, exact.astype(np.float32))  # one product, exact or rounded once
        return
    scale = np.asarray(q.tensor_scale, np.float64)
    scale = {"tensor": scale, "row": scale.reshape(-1, 1)}.get(r.tensor_scaling, scale)
    exact *= np.repeat(scale, r.block_size, axis=1) if r.tensor_scaling == "block" else scale
    normal = np.abs(exact) >= 2.0**-100
    assert normal.mean() > 0.05
    assert np.all(np.abs(ours - exact)[normal] <= 4 * 2.0**-24 * np.abs(exact)[normal])  # at most four roundings


def test_the_order_of_decoding():
    """dequantize multiplies in float32 in the order of each producer, which decides the last bit of a value."""

    def parts(name):
        q = fp4kit.quantize(ORDINARY, name)
        values = decode(codes_of(q), q.recipe.element)
        scales = (
            None
            if q.block_scale is None
            else np.repeat(decode(q.block_scale, q.recipe.scale), q.recipe.block_size, axis=1)
        )
        return fp4kit.dequantize(q), values, scales, q.tensor_amax, q.tensor_scale

    y, values, scales, amax, _ = parts("nvfp4-te")
    assert_same_bits(y, values * (scales * amax * (np.float32(1) / np.float32(2688))))
    y, values, scales, _, tensor_scale = parts("nvfp4-modelopt")
    assert_same_bits(y, (values + np.float32(0)) * (scales * tensor_scale))  # code 8 is +0
    y, values, scales, amax, _ = parts("nvfp4-compressed-tensors")
    assert_same_bits(y, values * (scales / (np.float32(1) / amax * np.float32(2688))))
    y, values, _, amax, _ = parts("int8-modelopt")
    assert_same_bits(y, values / (np.float32(127) / amax))
    y, values, _, amax, _ = parts("fp8-modelopt")
    assert_same_bits(y, values * (np.float32(1) / (np.float32(448) / amax)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("variant", ["", "-static", "-static-4over6", "-mse"])
def test_code_8_is_a_plain_zero_in_nvfp4_of_modelopt(variant, dtype, either_engine):
    """With the decode rule "modelopt", code 8 decodes as +0 * scale, as in NVFP4QTensor.dequantize.

    Other rules decode it as -0 * scale, so the sign of the result is opposite. All other codes are unaffected.
    """
    r = RECIPES[f"nvfp4-modelopt{variant}"]
    q = all_bytes(r, np.dtype(dtype))
    found, product = (
        fp4kit.dequantize(replace(q, recipe=replace(r, decode_rule=rule))) for rule in ("modelopt", "product")
    )
    assert r.decode_rule == "modelopt"
    is_eight = fp4kit.unpack(q.packed) == 8
    assert_same_bits(found[~is_eight], product[~is_eight])
    is_number = ~np.isnan(product[is_eight].astype(np.float32))
    assert (np.signbit(found[is_eight]) != np.signbit(product[is_eight]))[is_number].all() and is_number.sum() == 254


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("bits", [4, 8])
def test_byte_255_is_infinite_in_mx_of_modelopt(bits, dtype, either_engine):
    """Scale byte 255 is infinite, because exp2(255 - 127) overflows float32; 0 times it is NaN.

    In MXFP4QTensor, code 8 stays -0.
    """
    q = all_bytes(RECIPES[f"mxfp{bits}-modelopt"], np.dtype(dtype))
    found, ocp = (
        fp4kit.dequantize(replace(q, recipe=replace(q.recipe, decode_rule=rule))) for rule in ("e8m0_infinite", "e8m0")
    )
    assert q.recipe.decode_rule == "e8m0_infinite"
    assert same_values(found[:255], ocp[:255]) and (bits == 8 or np.signbit(found[127, 8]))
    values = decode(codes_of(q), q.recipe.element)[255]
    expected = np.where(values == 0, np.float32(np.nan), np.copysign(np.float32(np.inf), values))
    assert same_values(found[255], np.where(np.isnan(values), values, expected))


@recipes
def test_dequantize_to_other_dtypes_rounds_the_float32_value(name):
    """Recipes with decode rules for 16-bit results round the scales first, to the dtype of the result."""
    q = fp4kit.quantize(ORDINARY, name)
    exact = fp4kit.dequantize(q)
    assert exact.dtype == np.float32
    for dtype in (np.float16, BF16):
        if DECODE_RULES[q.recipe.decode_rule].bfloat16:
            scales = q.tensor_scale.astype(dtype).astype(np.float32)
            if q.block_scale is not None:
                scales = (decode(q.block_scale, q.recipe.scale) * scales).astype(dtype).astype(np.float32)
                scales = np.repeat(scales, q.recipe.block_size, axis=1)
            exact = decode(codes_of(q), q.recipe.element) * scales
        with np.errstate(over="ignore"):
            assert_same_bits(fp4kit.dequantize(q, dtype), exact.astype(dtype))


# These recipes raise amaxes below a smallest value, so tiny inputs do not scale with their amax.
WITH_SMALLEST_AMAX = (
    *("mxfp4-sglang-kv", "mxfp4-deepgemm", "mxfp8-deepgemm", "mxfp4-qwix", "mxfp8-qwix"),
    *("mxfp8-deepseek-v4", "mxfp4-fp-quant-quest"),
)


@pytest.mark.parametrize("name", [name for name in MX if name not in WITH_SMALLEST_AMAX])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_powers_of_two_shift_mx_scales_only(name, seed):
    x = np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)
    k = np.arange(-60, 61)[:, None, None]
    q, scaled = fp4kit.quantize(x, name), fp4kit.quantize(np.ldexp(x, k), name)
    assert_same_bits(scaled.packed, np.broadcast_to(q.packed, scaled.packed.shape))
    assert_same_bits(scaled.block_scale, (q.block_scale.astype(int) + k).astype(np.uint8))
    assert_same_bits(fp4kit.dequantize(scaled), np.ldexp(fp4kit.dequantize(q), k))


# Recipes with a tensor scale whose codes stay if x is scaled by a power of two. Those with a smallest scale are left
# out. Amaxes below must exceed 2^-24, the smallest amax of Model-Optimizer's FP8 and INT rules.
WITH_SMALLEST_SCALE = ("int4-qat", "fp8-deepseek-v4", "fp8-deepgemm-block")
SHIFTABLE = [name for name in NAMES if RECIPES[name].tensor_scaling != "none" and name not in WITH_SMALLEST_SCALE]


@pytest.mark.parametrize("name", SHIFTABLE)
@settings(max_examples=10)
@given(k=st.integers(-10, 60), seed=st.integers(0, 2**32))
def test_powers_of_two_shift_tensor_scales_only(name, k, seed):
    x = np.random.default_rng(seed).standard_normal((32, max(32, RECIPES[name].block_size))).astype(np.float32)
    q, scaled = fp4kit.quantize(x, name), fp4kit.quantize(np.ldexp(x, k), name)
    assert_same_bits(scaled.packed, q.packed)
    assert_same_bits(scaled.tensor_amax, np.ldexp(q.tensor_amax, k))
    assert same_values(fp4kit.dequantize(scaled), np.ldexp(fp4kit.dequantize(q), k))
    if q.block_scale is not None:
        assert_same_bits(scaled.block_scale, q.block_scale)


TARGETS = ("nvfp4-te", "nvfp4-torchao", "nvfp4-flashinfer", "nvfp4-compressed-tensors", "nvfp4-te-4over6-mae-256")


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


# ---- blocks out of range ----

KEEPING = [
    name
    for name, r in RECIPES.items()
    if may_keep_codes(_mxfp4(np.array([[127]])), r) and "fake" not in name and not (r.fake_only or r.stochastic_only)
]


def _drawn(seed: int) -> Quantized:
    """Return an MXFP4 array of random bytes with blocks of zeros, zeros of both signs and blocks out of range."""
    rng = np.random.default_rng(seed)
    top = int(rng.integers(30, 240))
    q = _mxfp4(rng.integers(max(top - int(rng.choice([18, 20, 24, 40])), 0), top + 1, (16, 6)), seed)
    q.block_scale[0, 0] = top
    q.packed[rng.random(q.packed.shape) < 0.2] = rng.choice([0x80, 0x08, 0x88])
    q.packed[3], q.packed[5, 16:32] = 0, 0x88
    return q


def _ranges(q: Quantized) -> tuple[np.ndarray, int]:
    """Return (mask of the blocks of q that are in range, exponent m of the tensor scale 2^m).

    A block is in range if all its codes are zero, or if its NVFP4 scale 2^(k - m) is at least 2^-9.
    """
    k = q.block_scale.astype(int) - 127
    holds = (fp4kit.unpack(q.packed).reshape(*k.shape, 32) & 7).any(axis=-1)
    m = k[holds].max() - 8
    return ~holds | (k - m >= -9), m


@together("seed", range(4))
@together("target", KEEPING)
def test_only_blocks_out_of_range_change(target, seed) -> None:
    """Blocks in range keep their codes and values. The target quantizes other blocks under the tensor scale 2^m."""
    q = _drawn(seed)
    result, exact, changed, largest_error = fp4kit.requantize(q, target)
    in_range, m = _ranges(q)
    assert result.tensor_scale == np.float32(2.0**m)
    values = fp4kit.dequantize(q)
    own = fp4kit.quantize(values, target, tensor_amax=result.tensor_amax)
    assert own.tensor_scale == result.tensor_scale
    codes = np.repeat(in_range, 16, axis=1)
    expected = q.packed.copy()
    expected[~codes] = own.packed[~codes]
    assert_same_bits(result.packed, expected)
    scales = np.repeat(in_range, 2, axis=1)
    assert_same_bits(result.block_scale[~scales], own.block_scale[~scales])
    after = fp4kit.dequantize(result)
    differ = values.view(np.uint32) != after.view(np.uint32)
    assert changed == np.count_nonzero(differ) and exact == (changed == 0)
    assert_same_bits(np.asarray(largest_error), np.asarray(np.abs(after - values).max()))
    values_in_range = np.repeat(in_range, 32, axis=1)
    assert np.array_equal(values[values_in_range], after[values_in_range])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("target", TARGETS)
def test_shapes_and_layouts_with_blocks_out_of_range(target, layout, dtype) -> None:
    """requantize gives the same blocks for a matrix, for a stack of its rows, along axis 0, and for swizzled scales."""
    q = replace(_drawn(1), dtype=np.dtype(dtype))
    result = fp4kit.requantize(q, target)
    assert result.changed
    shapes = {"stack": (2, 8, 192), "axis 0": (192, 16)}
    for name, shape in shapes.items():
        lead = shape[:-1] if name == "stack" else (16,)
        parts = {"packed": q.packed.reshape(*lead, -1), "block_scale": q.block_scale.reshape(*lead, -1)}
        other = replace(q, **parts, shape=shape, axis=-1 if name == "stack" else 0)
        found = fp4kit.requantize(fp4kit.swizzle(other, layout), target)
        assert found.quantized.scale_layout == layout and found[1:] == result[1:]
        linear = fp4kit.unswizzle(found.quantized)
        assert_same_bits(linear.packed.reshape(16, -1), result.quantized.packed)
        assert_same_bits(linear.block_scale.reshape(16, -1), result.quantized.block_scale)
        assert_same_bits(linear.tensor_scale, result.quantized.tensor_scale)


@pytest.mark.parametrize("change", [{"block": (1, 32)}, {"block": (1, 8)}, {"scale_max": 256}], ids=str)
def test_variants_with_blocks_out_of_range(change) -> None:
    target: Recipe = replace(fp4kit.recipe("nvfp4-torchao"), **change)
    q = _drawn(2)
    in_range = np.repeat(_ranges(q)[0], 32, axis=1)
    found = fp4kit.requantize(q, target)
    before, after = fp4kit.dequantize(q), fp4kit.dequantize(found.quantized)
    assert not in_range.all() and np.array_equal(before[in_range], after[in_range])
    assert found.changed == np.count_nonzero(before.view(np.uint32) != after.view(np.uint32))


@pytest.mark.parametrize("scales", [[[127, 255, 60]], [[125, 100, 125]], [[254, 253, 252]]], ids=str)
def test_the_whole_tensor_is_quantized_again_without_a_tensor_scale_or_with_nan(scales) -> None:
    q = _mxfp4(np.array(scales) + (127 if scales[0][0] == 125 else 0))
    found = fp4kit.requantize(q, "nvfp4-te")
    with np.errstate(all="ignore"):
        values = fp4kit.dequantize(q, np.float32)
        assert_same_bits(found.quantized, fp4kit.quantize(values, "nvfp4-te"))
        after = fp4kit.dequantize(found.quantized)
    assert not found.exact and np.isnan(found.largest_error) == np.any(np.isnan(values) != np.isnan(after))


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


def test_fake_only_target_is_refused() -> None:
    with pytest.raises(ValueError, match="nvfp4-modelopt-fake is a fake quantizer"):
        fp4kit.requantize(_mxfp4(np.array([[127]])), "nvfp4-modelopt-fake")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_are_not_rounded_to_16_bits_between(dtype) -> None:
    """requantize quantizes float32 values, also if q was made from 16-bit values.

    Values that are rounded to the 16-bit dtype first would give other codes.
    """
    differ = 0
    for seed in range(40):
        q = fp4kit.quantize(np.random.default_rng(seed).standard_normal((16, 64)).astype(dtype), "nvfp4-modelopt")
        result = fp4kit.requantize(q, "mxfp8-te").quantized
        assert result.dtype == dtype
        assert_same_bits(result.packed, fp4kit.quantize(fp4kit.dequantize(q, np.float32), "mxfp8-te").packed)
        differ += not np.array_equal(result.packed, fp4kit.quantize(fp4kit.dequantize(q), "mxfp8-te").packed)
    assert differ


# ---- powers of two as scales of FP8 and MXFP8 ----

FLOAT8 = [
    name
    for name, r in RECIPES.items()
    if r.element.bits == 8 and not r.element.is_integer and not r.fake_only and r.element in (E4M3, E5M2)
]
ELEMENT_VALUES = {
    element: set(np.abs(element.values[np.isfinite(element.values)]).tolist()) for element in (E4M3, E5M2)
}


def _fits(values: np.ndarray, element: ElementFormat) -> bool:
    """Return whether one power of two makes all values exact in the element format, by trying all that might."""
    numbers = np.unique(np.abs(values[values != 0])).astype(np.float64)
    around = np.floor(np.log2(numbers.max())).astype(int) if numbers.size else 0
    return any(set((numbers / 2.0**m).tolist()) <= ELEMENT_VALUES[element] for m in range(around - 20, around + 20))


@pytest.mark.parametrize("target", ["fp8-transformers-block", "fp8-deepseek-v4"])
def test_every_pair_of_codes_and_every_span_of_exponents(target) -> None:
    """A block of FP8 is exact if and only if some power of two makes all its values FP8 numbers: by brute force.

    For spans up to 14 it always is, for spans from 21 never. In between, the codes decide.
    """
    always, never = [], []
    spans = [14, 15, 20, 21] if RECIPES[target].block == (128, 128) else range(23)
    for span in spans:
        pairs = np.array([(a, b) for a in range(1, 8) for b in range(1, 8)], np.uint8)
        codes = np.zeros((len(pairs), 128), np.uint8)
        codes[:, 0], codes[:, 32] = pairs.T
        scales = np.tile(np.array([[127, 127 - span, 0, 254]], np.uint8), (len(pairs), 1))  # two blocks of zeros
        codes = np.repeat(codes, 128, axis=0) if RECIPES[target].block == (128, 128) else codes
        scales = np.repeat(scales, 128, axis=0) if RECIPES[target].block == (128, 128) else scales
        q = Quantized.from_parts(fp4kit.pack(codes), scales, recipe="mxfp4-ocp", dtype=np.float32)
        values, new = fp4kit.dequantize(q), fp4kit.requantize(q, target).quantized
        after = fp4kit.dequantize(new)
        assert np.all(np.frexp(new.tensor_scale)[0] == 0.5)
        step = len(values) // len(pairs)
        exact = [np.array_equal(values[i : i + step], after[i : i + step]) for i in range(0, len(values), step)]
        assert exact == [_fits(values[i], E4M3) for i in range(0, len(values), step)]
        always += [span] * all(exact)
        never += [span] * (not any(exact))
    assert always == [n for n in spans if n <= 14] and never == [n for n in spans if n > 20]


@pytest.mark.parametrize("target", FLOAT8)
def test_every_exponent_and_code_is_exact_in_fp8(target) -> None:
    """A block of 32 with any scale and any codes is exact in every FP8 and MXFP8 recipe with blocks of one row.

    The exceptions are subnormal results of the smallest scales, and values above float32's largest number. Other
    recipes hold the values of one exponent, so each exponent makes one array.
    """
    r = RECIPES[target]
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 16))
    for k in range(255) if r.scale is None or r.block == (32, 32) else [None]:
        scales = np.arange(255, dtype=np.uint8)[:, None] if k is None else np.full((1, 1), k, np.uint8)
        packed = fp4kit.pack(np.repeat(codes, len(scales), 0))
        q = Quantized.from_parts(packed, np.repeat(scales, 8, 1), recipe="mxfp4-ocp", dtype=np.float32)
        with np.errstate(over="ignore"):
            before = fp4kit.dequantize(q)
            found = fp4kit.requantize(q, target)
            after = fp4kit.dequantize(found.quantized)
        if k is None:
            finite = np.isfinite(before).all(axis=1)
            assert finite.sum() >= 253 and np.array_equal(before[finite].view(np.uint32), after[finite].view(np.uint32))
        elif np.isfinite(before).all():
            assert found.exact, k


WITH_POWERS = ("fp8-deepgemm-block", "fp8-deepseek-v4", "fp8-modelopt-channel", "fp8-comfy-kitchen-e5m2")
WITH_POWERS += ("mxfp8-te-2d", "mxfp8-deepgemm")


@together("seed", range(8))
@together("target", WITH_POWERS)
def test_blocks_are_exact_wherever_a_power_of_two_makes_them_so(target, seed) -> None:
    """All axes, stacks, row counts and layouts. Blocks that cannot be exact are rounded under the same power of two,
    or are those of the recipe if the element has too few significant bits.
    """
    rng, r = np.random.default_rng(seed), RECIPES[target]
    shape, axis = [((256, 128), 1), ((3, 64, 128), 2), ((128, 200), 0), ((1, 256), 1)][seed % 4]
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    if moved[-2] % 32 and r.block == (32, 32):
        return
    source = ("mxfp4-ocp", "mxfp8-te")[seed // 4]
    codes = rng.integers(0, 16, moved).astype(np.uint8) if source == "mxfp4-ocp" else rng.integers(0, 120, moved)
    packed = fp4kit.pack(codes) if source == "mxfp4-ocp" else codes.astype(np.uint8)
    scales = rng.integers(127 - rng.integers(2, 16), 128, (*moved[:-1], moved[-1] // 32)).astype(np.uint8)
    q = Quantized.from_parts(packed, scales, recipe=source, dtype=np.float32, axis=axis, shape=shape)
    found = fp4kit.requantize(fp4kit.swizzle(q, ("linear", "swizzled_8x4")[seed % 2]), target)
    assert found.quantized.scale_layout == ("linear", "swizzled_8x4")[seed % 2]
    before = np.moveaxis(fp4kit.dequantize(q), axis, -1)
    after = np.moveaxis(fp4kit.dequantize(found.quantized), axis, -1)
    own = np.moveaxis(fp4kit.dequantize(fp4kit.quantize(fp4kit.dequantize(q), target, axis=axis)), axis, -1)
    assert found.changed == np.count_nonzero(before.view(np.uint32) != after.view(np.uint32))
    height, width = r.block or (1, moved[-1])
    whole = r.block is None and r.tensor_scaling == "tensor"
    boxes = (
        [(slice(None),) * len(moved)]
        if whole
        else [
            (*lead, slice(i, i + height), slice(j, j + width))
            for lead in np.ndindex(moved[:-2])
            for i in range(0, moved[-2], height)
            for j in range(0, moved[-1], width)
        ]
    )
    for box in boxes:
        same = np.array_equal(before[box].view(np.uint32), after[box].view(np.uint32))
        assert same or not _fits(before[box], r.element)
        if not same and not (r.element == E5M2 and source == "mxfp8-te"):
            m = np.ceil(np.log2(np.abs(before[box]).max() / r.element.max))
            dtype = ml_dtypes.float8_e5m2 if r.element == E5M2 else ml_dtypes.float8_e4m3fn
            assert np.array_equal(after[box], (before[box] / 2.0**m).astype(dtype).astype(np.float64) * 2.0**m)
        assert same or r.element != E5M2 or source != "mxfp8-te" or np.array_equal(after[box], own[box])
