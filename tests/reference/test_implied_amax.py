"""Test tensor scales that are given without an amax: which amax a scale implies, and how operations use it."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from inputs import BF16, NAMES, ORDINARY, element_values, in_float32, scale_values
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference.tensor_rules import (
    FAR,
    NEAR,
    UNKNOWN,
    amax_interval,
    covered_range,
    implied_amax,
    same_scale,
    tensor_scale,
)

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
WITH_TENSOR = [name for name in NAMES if RECIPES[name].tensor_rule]
BY_RULE = {(r.tensor_rule, float(covered_range(r))): r for r in (RECIPES[name] for name in WITH_TENSOR)}
DTYPES = {True: (F32, F16, BF16), False: (F32,)}  # key: whether the tensor rule rounds to the dtype
CASES = [(r, dtype) for r in BY_RULE.values() for dtype in DTYPES[r.tensor_rule == "compressed_tensors"]]
cases = pytest.mark.parametrize(("r", "dtype"), CASES, ids=[f"{r.id}-{dtype}" for r, dtype in CASES])
EVERY_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)  # 0 to inf, and a NaN
EVERY_F16 = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
RANDOM = np.random.default_rng(2).integers(0, 0x7F800001, 100_000).astype(np.int32).view(np.float32)
AMAXES = {"bfloat16": EVERY_BF16, "float16": EVERY_F16, "float32": RANDOM}


def decode_scale(amax, r, dtype=F32):
    return np.asarray(tensor_scale(np.asarray(amax, np.float32), r, dtype).decode, np.float32)


def significant(amax):
    """Return the number of significant bits of each positive float32 number: from the highest to the lowest set bit."""
    bits = amax.view(np.int32) & 0x7FFFFF | np.where(amax < 2.0**-126, 0, 1 << 23)
    return (
        24
        - np.log2(bits & -bits).astype(int)
        - np.where(amax < 2.0**-126, 23 - np.log2(np.maximum(bits, 1)).astype(int), 0)
    )


# Tensor rules with a smallest scale, which many amaxes give.
FLOORED = ("int4_qat", "nncf_medium", "nncf_small")


@cases
@pytest.mark.parametrize("amaxes", AMAXES.values(), ids=AMAXES)
def test_an_amax_is_found_if_one_exists(r, dtype, amaxes):
    """The implied amax gives the tensor scale, bit for bit.

    Every bfloat16 and float16 amax, and random float32 amaxes, are tried. A scale of 0 is left out if only tiny amaxes
    give it, because then no amax is implied.
    """
    scale = decode_scale(amaxes, r, dtype)
    scale = scale[(scale != 0) | (decode_scale(0, r, dtype) == 0)]
    found = implied_amax(scale, r, dtype)
    assert found.dtype == np.float32 and found.shape == scale.shape
    assert not np.any(found == UNKNOWN)
    assert np.all(same_scale(decode_scale(found, r, dtype), scale))


@cases
def test_the_implied_amax_has_the_fewest_significant_bits(r, dtype):
    """No amax within FAR steps of scale * covered_range gives the scale with fewer significant bits."""
    amaxes = np.concatenate([RANDOM[:40], EVERY_BF16[5000:25000:997]])
    scale = decode_scale(amaxes, r, dtype)
    found = implied_amax(scale, r, dtype)
    usual = (scale > 0) & np.isfinite(scale) & (found > 0) & np.isfinite(found)
    center = np.minimum(scale * covered_range(r), np.finfo(np.float32).max)[usual].view(np.int32).astype(np.int64)
    offsets = np.arange(-(1 << 12), 1 << 12)
    near = np.clip(center[:, None] + offsets, 1, 0x7F7FFFFF).astype(np.int32).view(np.float32)
    gives = decode_scale(near, r, dtype) == scale[usual][:, None]
    fewest = np.where(gives, significant(near), 99).min(axis=1)
    assert np.all(significant(found[usual]) <= fewest)


@cases
def test_the_interval_holds_all_amaxes_of_a_scale(r, dtype):
    """amax_interval returns all amaxes that give a tensor scale.

    Both ends and the middle of the interval give the scale, and the neighbors outside do not. Intervals that reach FAR
    steps from scale * covered_range, where the search ends, are not checked.
    """
    scale = decode_scale(np.exp2(np.random.default_rng(3).uniform(-12, 12, 2000)), r, dtype)
    scale = scale[(scale > 0) & np.isfinite(scale)]
    first, last = amax_interval(scale, r, dtype)
    some = first <= last
    floats = lambda bits: bits.astype(np.int32).view(np.float32)  # noqa: E731
    for bits in (first, last, (first + last) // 2):
        assert np.all(same_scale(decode_scale(floats(bits), r, dtype), scale)[some])
    center = (scale * covered_range(r)).view(np.int32)
    inner = some & (first > center - FAR) & (last < center + FAR)
    for bits in (first - 1, last + 1):
        assert not np.any(same_scale(decode_scale(floats(bits), r, dtype), scale)[inner])
    if dtype == F32:
        assert np.all((last < center + NEAR) & (first > center - NEAR) | (r.tensor_rule in FLOORED))


@cases
def test_few_scales_give_what_many_give(r, dtype):
    """Up to FEW scales are searched in another way than more of them."""
    scale = decode_scale(RANDOM[:300], r, dtype)
    scale = np.concatenate([scale, np.nextafter(scale, np.float32(0)), np.float32([0, np.inf, np.nan])])
    assert_same_bits(
        np.concatenate([implied_amax(few, r, dtype) for few in np.split(scale, 9)]), implied_amax(scale, r, dtype)
    )
    usual = scale[(scale > 0) & np.isfinite(scale)]
    few = (amax_interval(part, r, dtype, NEAR) for part in np.array_split(usual, 10))
    assert np.array_equal(np.concatenate([*few], axis=1), amax_interval(usual, r, dtype, NEAR))


@pytest.mark.parametrize("name", WITH_TENSOR)
def test_bfloat16_amaxes_come_back(name):
    """A bfloat16 amax is implied by its own scale, because no other bfloat16 gives this scale."""
    r = RECIPES[name]
    amax = ((1 + np.arange(128) / 128) * np.exp2(np.arange(-12, 30, 3))[:, None]).astype(np.float32)
    assert_same_bits(implied_amax(decode_scale(amax, r), r, F32), amax)


def test_scales_that_no_amax_gives():
    r = RECIPES["int8-modelopt"]
    scale = np.random.default_rng(4).uniform(1e-3, 1, 20_000).astype(np.float32)
    found = implied_amax(scale, r, F32)
    unknown = found == UNKNOWN
    assert 100 < np.count_nonzero(unknown) < 1000
    near = (scale * covered_range(r)).view(np.int32)[:, None] + np.arange(-100, 100)
    gives = decode_scale(near.astype(np.int32).view(np.float32), r) == scale[:, None]
    assert np.array_equal(gives.any(axis=1), ~unknown)


def without(q):
    return replace(q, tensor_amax=None)


@together("name", WITH_TENSOR)
@together("dtype", [F32, F16, BF16])
def test_decoding_needs_no_amax(name, dtype):
    """Data in bfloat16 decodes to equal bits without the amax, because the scale implies its bfloat16 amax."""
    x = ORDINARY.astype(BF16).astype(dtype)
    q = fp4kit.quantize(x, name)
    assert_same_bits(fp4kit.dequantize(without(q)), fp4kit.dequantize(q))


@together("name", WITH_TENSOR)
def test_decoding_follows_the_tensor_scale(name):
    """Decoding uses the tensor scale, even if a tensor_amax contradicts it."""
    q = fp4kit.quantize(ORDINARY.astype(BF16), name)
    wrong = replace(q, tensor_amax=q.tensor_amax * np.float32(3))
    assert_same_bits(fp4kit.dequantize(wrong, F32), fp4kit.dequantize(without(q), F32))
    double = replace(q, tensor_scale=q.tensor_scale * np.float32(2))
    assert_same_bits(fp4kit.dequantize(double, F32), 2 * fp4kit.dequantize(without(q), F32))


@pytest.mark.parametrize("name", [name for name in WITH_TENSOR if DECODE_RULES[RECIPES[name].decode_rule].needs_amax])
def test_scales_without_an_amax_decode_as_a_product(name):
    """If no amax gives a scale, a value is decode(code) * (block_scale * tensor_scale).

    Other rows or blocks of the array may have a scale that an amax gives.
    """
    r = in_float32(RECIPES[name])
    q = without(fp4kit.quantize(ORDINARY, r))
    rng = np.random.default_rng(5)
    for scale in (np.asarray(rng.uniform(1e-3, 1, q.tensor_scale.shape), np.float32) for _ in range(20)):
        found = implied_amax(scale, r, F32)
        values = element_values(q).reshape(128, -1, r.block_size if r.block else 128)
        by_element = {"tensor": scale, "row": scale.reshape(-1, 1)}.get(r.tensor_scaling, scale)
        factors = by_element[..., None] if q.block_scale is None else (scale_values(q) * by_element)[..., None]
        product = (values * factors).reshape(128, 128)
        ours = fp4kit.dequantize(replace(q, tensor_scale=scale))
        unknown = np.broadcast_to(np.reshape(found == UNKNOWN, by_element.shape)[..., None], values.shape).reshape(
            128, 128
        )
        assert_same_bits(ours[unknown], product[unknown])
        # TE's values are rounded six times (encode and decode scale, 1 / range, three products), and values of the
        # product rule twice. So they differ by at most 8 roundings.
        assert np.all(np.abs(ours - product) <= 8 * 2.0**-24 * np.abs(product))


@pytest.mark.parametrize("name", WITH_TENSOR)
def test_every_function_takes_a_scale_without_an_amax(name):
    x = ORDINARY.astype(BF16)
    q = fp4kit.quantize(x, name)
    bare, target = without(q), "nvfp4-modelopt"
    compared = fp4kit.compare(q, bare)
    counted = compared.scales if q.block_scale is None and q.tensor_scale.ndim == 2 else compared.tensor_scales
    assert fp4kit.compare(bare, q) and counted == (0, q.tensor_scale.size)
    a, b = fp4kit.requantize(bare, target), fp4kit.requantize(q, target)
    assert_same_bits(a.quantized, b.quantized)
    assert (a.exact, a.changed) == (b.exact, b.changed)
    if q.block_scale is not None:
        assert_same_bits(fp4kit.unswizzle(fp4kit.swizzle(bare, "swizzled_8x4")), bare)
    if RECIPES[name].block_rows > 1 and q.block_scale is not None:
        turned = fp4kit.transpose(bare)
        assert turned.tensor_amax is None
        assert_same_bits(fp4kit.dequantize(turned), fp4kit.dequantize(q))
    assert name in fp4kit.identify(bare, x).exact


def under(name, amax, x):
    """Return x quantized by the recipe `name` with the given tensor amax, which is then removed from the result."""
    r = RECIPES[name]
    shape = {"row": x.shape[:1], "block": (len(x), x.shape[1] // r.block_size)}.get(r.tensor_scaling, ())
    return without(fp4kit.quantize(x, name, tensor_amax=np.full(shape, amax, np.float32)))


@pytest.mark.exhaustive
def test_identify_finds_every_bfloat16_amax():
    x = ORDINARY[:4, :64].astype(BF16)
    for amax in (1 + np.arange(128) / 128) * 2.0**-5:
        assert "nvfp4-te" in fp4kit.identify(under("nvfp4-te", amax, x), x).exact


NOT_OF_X = *(np.float32([1.0, 1.4140625, 1.9921875]) * np.float32([[64], [3000]])).flat, 77.123456, 1234.5677


@pytest.mark.parametrize("amaxes", [NOT_OF_X[1::5], *exhaustive([NOT_OF_X])], ids=len)
@pytest.mark.parametrize("name", WITH_TENSOR)
def test_identify_finds_amaxes_that_are_not_of_x(name, amaxes):
    """identify recognizes codes made under another amax than that of x, in bfloat16 or float32.

    Several float32 amaxes may give one scale.
    """
    x = ORDINARY[:16].astype(BF16)
    for amax in amaxes:
        assert name in fp4kit.identify(under(name, amax, x), x).exact, amax


def test_identify_takes_each_recipe_s_own_amax():
    """identify derives the amax from the scale by each recipe's rule.

    It ignores an amax that contradicts the scale.
    """
    x = ORDINARY.astype(BF16)
    q = fp4kit.quantize(x, "nvfp4-torchao")
    assert (
        fp4kit.identify(replace(q, tensor_amax=np.float32(1e-3)), x).matches == fp4kit.identify(without(q), x).matches
    )
    experts = fp4kit.quantize(np.stack([x, x]), "nvfp4-te", tensor_amax=[100.0, 1.5])
    assert "nvfp4-te" in fp4kit.identify(without(experts), np.stack([x, x])).exact
