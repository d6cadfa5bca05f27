"""Test recipes with levels, and those that search whole arrays: of producers for Ascend NPUs."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from exhaustive import half

import fp4kit
from fp4kit.checkpoint.containers.configs import WRITTEN
from fp4kit.cuda.dispatch import check_formats
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.formats import E2M1, E6M2, ElementFormat
from fp4kit.ops import engines
from fp4kit.recipes.table import ALL_RECIPES, RECIPES, from_spec, to_spec
from fp4kit.reference.ascend import amax_of_ceil_x, ceil_x_exponent

OURS = [id for id in ALL_RECIPES if id not in RECIPES]
UE3M2 = ElementFormat("UE3M2", 3, 2, 3, signed=False)  # 5 bits, unlike the bytes of exponent bits
LEVELED = {
    **{id: fp4kit.recipe(id) for id in ("hif4-amct", "hifx5-hifloat4", "mxfp4-msmodelslim-dual")},
    "own-dual": fp4kit.custom_recipe("own-dual", E2M1, levels=[(512, "float16"), (32, "E8M0")]),
    "own-bits": fp4kit.custom_recipe("own-bits", E2M1, levels=[(64, UE3M2), (8, "exponent1")], tensor_scale=True),
}
X = np.random.default_rng(52).normal(size=(6, 1088)).astype(np.float32)


@pytest.mark.parametrize("id", OURS)
def test_recorded_arrays_are_equal(id, golden):
    result = check_recipe(id, golden)
    assert result.compared and not result.differences


def bf16(x):
    return float(np.float32(x).astype(ml_dtypes.bfloat16))


def stated_hif4(block, narrow, groups):
    """Return (codes, scale byte, bits, set bits per element) of finite floats, from the text of the format.

    groups: the lengths of the groups that share a bit, outermost first, such as (8, 4).
    """
    n, top = len(groups), max(map(abs, block))
    s = min(max(bf16(np.float32(top) * np.float32(bf16(1 / 7 * 4 / 2**n))), 2.0**-48), 49152.0)
    byte = min(range(255), key=lambda c: (abs(Fraction(s) - (4 + c % 4) * Fraction(2) ** (c // 4 - 50)), c % 2))
    i = bf16(np.float32(1) / np.float32((4 + byte % 4) * 2.0 ** (byte // 4 - 50)))
    bits, doubled = [], [0] * len(block)
    for k, group in enumerate(groups):
        for j in range(0, len(block), group):
            bits.append(max(map(abs, block[j : j + group])) * i / 2 ** doubled[j] >= 2 ** (n - k))
            doubled[j : j + group] = [d + bits[-1] for d in doubled[j : j + group]]
    codes = []
    for x, d in zip(block, doubled, strict=True):
        y = float(np.float32(abs(x) * i / 2**d))
        y = bf16(y) if narrow else y
        codes.append(min(int(np.float32(4 * y) + np.float32(0.5)), 7) + 8 * (x < 0))
    return codes, byte, bits, doubled


SIZES = [(64, 8, 4), (64, 16), (128, 32, 8, 2), (24, 12, 3), (256, 4), (8, 4, 2, 1)]  # columns of a block and of groups


@pytest.mark.parametrize(("id", "narrow"), [("hif4-amct", True), ("hif4-hifloat4", False)])
@pytest.mark.parametrize("sizes", half(SIZES), ids=str)
def test_hif4_as_its_format_says(id, narrow, sizes):
    """The first size is that of the producers. Recipes with other sizes are made by dataclasses.replace."""
    columns, *groups = sizes
    r = fp4kit.recipe(id)
    if sizes != SIZES[0]:
        levels = ((columns, "E6M2"), *((group, "exponent1") for group in groups))
        r = replace(r, id="mine", block=(1, columns), levels=levels)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(30, columns)) * 2.0 ** rng.integers(-60, 20, (30, 1))
    x[0], x[1, :8], x[2] = 0, [-0.0, 7, -7, 1.75, 0.125, -0.125, 0.375, 3.5], np.ldexp(np.arange(columns), -4)
    x = x.astype(np.float32)
    q = fp4kit.quantize(x, r)
    assert q.block_scale.shape == (30, r.scale_bytes)
    for row, codes, scales, found in zip(
        x.tolist(), fp4kit.unpack(q.packed), q.block_scale, q.dequantize(), strict=True
    ):
        wanted, byte, bits, doubled = stated_hif4(row, narrow, groups)
        assert codes.tolist() == wanted and scales.tolist() == [byte, *np.packbits(bits)]
        values = (1 - 2.0 * (codes > 7)) * (codes % 8) / 4 * 2.0 ** np.array(doubled) * E6M2.values[byte]
        assert np.array_equal(found, values)


CONSTANTS = np.arange(6, 12.1, 0.25)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_amax_gives_every_exponent_of_ceil_x(dtype):
    """The search passes exponents to the rule as amaxes. Zeros have the smallest exponent, and 125 is the largest."""
    zero = float(ceil_x_exponent(np.zeros(1, np.float32), 7.25, np.dtype(dtype))[0])
    exponents = np.arange(zero, 126 if dtype != np.float16 else 14, dtype=np.float32)
    exponents = np.append(exponents, np.float32(np.nan))
    found = ceil_x_exponent(amax_of_ceil_x(exponents), 7.25, np.dtype(dtype))
    assert np.array_equal(found, exponents, equal_nan=True) and zero == (-19 if dtype == np.float32 else -20)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_search_of_ceil_x_tries_each_constant_on_the_whole_array(dtype):
    id, found = "mxfp4-msmodelslim-ceil-x-search", set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = (rng.normal(size=(2, 3, 64)) * 2.0 ** rng.integers(-6, 6, (2, 3, 1))).astype(dtype)
        x[0, 0, :32] *= seed % 2
        means = []
        for c in CONSTANTS:  # the rule with another constant, in float64 from here on
            e = np.clip(
                ceil_x_exponent(np.abs(x.astype(np.float32)).reshape(-1, 32).max(-1), c, np.dtype(dtype)), -129, 125
            )
            y = np.abs(x.astype(np.float64)).reshape(-1, 32) / 2.0 ** e[:, None]
            k = np.clip(np.floor(np.log2(y + 9.6e-7)), 0, 2)
            dq = np.minimum(np.floor(2 * y / 2**k + 0.5) / 2 * 2**k, 6) * 2.0 ** e[:, None]
            error = (np.abs(x.astype(np.float64)).reshape(-1, 32) - dq).astype(dtype)
            squares = (error.astype(np.float32) ** 2).astype(dtype)
            means.append(np.float32(squares.astype(np.float64).mean()).astype(dtype))
        best = CONSTANTS[int(np.argmin(np.array(means, np.float64)))]
        found.add(float(best))
        exponents = ceil_x_exponent(np.abs(x.astype(np.float32)).reshape(2, 3, 2, 32).max(-1), best, np.dtype(dtype))
        q = fp4kit.quantize(x, id)
        assert np.array_equal(q.block_scale, exponents + 127)
        apart = np.ascontiguousarray(np.moveaxis(x, -1, 0))  # matrices that cannot be joined without a copy
        assert np.array_equal(fp4kit.quantize(np.moveaxis(apart, 0, -1), id).block_scale, q.block_scale)
        assert fp4kit.quantize(apart, id, axis=0).block_scale.tolist() == q.block_scale.tolist()
        if dtype == np.float32:
            assert np.array_equal(fp4kit.fake_quantize(x, id), q.dequantize())
    assert len(found) > 2


def test_the_bytes_of_amct_come_back():
    q = fp4kit.quantize(X, "hif4-amct")
    assert q.packed.shape == (6, 544) and q.block_scale.shape == (6, 68) and q.bits_per_value == 4.5
    assert fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe="hif4-amct", dtype="float32").equals(q)
    bad = X.copy()
    bad[1, 70], bad[2, 3] = np.inf, np.nan
    q = fp4kit.quantize(bad, "hif4-amct")
    assert np.isnan(q.dequantize()).sum() == 128 and (q.block_scale[:, ::4] == 255).sum() == 2


@pytest.mark.parametrize(("size", "block"), [(512, 32), (96, 32), (192, 64), (48, 16)])
def test_dual_level_mxfp4_with_an_incomplete_outer_block(size, block):
    """The first sizes are those of the producer. Recipes with other sizes are made by dataclasses.replace."""
    r, single = fp4kit.recipe("mxfp4-msmodelslim-dual"), fp4kit.recipe("mxfp4-msmodelslim")
    if size != 512:
        r = replace(r, block=(1, block), levels=((size, "float32"), (block, "E8M0")))
        single = replace(single, block=(1, block))
    q = fp4kit.quantize(X, r)
    outer = np.stack([np.abs(X[:, i : i + size]).max(1) for i in range(0, 1088, size)], 1) / np.float32(6)
    assert np.array_equal(q.tensor_scale, outer) and q.block_scale.shape == (6, 1088 // block)
    repeated = np.repeat(outer, size, 1)[:, :1088]
    inner = fp4kit.quantize(X / repeated, single)
    assert np.array_equal(q.packed, inner.packed) and np.array_equal(q.block_scale, inner.block_scale)
    assert np.array_equal(q.dequantize(), inner.dequantize() * repeated)


@pytest.mark.parametrize("id", LEVELED)
def test_what_works_with_several_levels(id, tmp_path):
    r, x = LEVELED[id], X[:, :1024]
    engines._CALLS.clear()
    first = fp4kit.quantize_grouped([x, x], r), fp4kit.fake_quantize_grouped([x, x], r)
    q = fp4kit.quantize(x, r)
    values = fp4kit.fake_quantize(x, r)
    assert np.array_equal(q.dequantize(), values) and from_spec(to_spec(replace(r, id="own"))) == replace(r, id="own")
    assert np.array_equal(fp4kit.quantize(x.T.copy(), r, axis=0).dequantize().T, values)
    assert np.array_equal(fp4kit.fake_quantize(x.reshape(2, 3, 1024), r).reshape(6, 1024), values)
    assert np.array_equal(q[2:5, 512:].dequantize(), values[2:5, 512:])
    assert fp4kit.quantize(x, r, out=fp4kit.quantize(-x, r)).equals(q)
    assert pickle.loads(pickle.dumps(q)).equals(q) and q.to("numpy").equals(q)
    for quantized, faked in first, (fp4kit.quantize_grouped([x, x], r), fp4kit.fake_quantize_grouped([x, x], r)):
        assert quantized[1].equals(q) and np.array_equal(faked[1], values)
    assert fp4kit.compare(q, values).max_error == 0
    fp4kit.save(tmp_path / "q.safetensors", {"w": q})
    assert fp4kit.load(tmp_path / "q.safetensors")["w"].equals(q)
    assert all(level.format in str(r) for level in r.levels) and re.search(r"\n  zero blocks +0%: 0 of ", str(q))
    best = fp4kit.identify(q, x).matches[0]
    assert fp4kit.identify(q, x).exact == (id,) and best.total == q.packed.size + q.block_scale.size
    changed = replace(q, packed=np.where(np.arange(q.packed.shape[1]) == 7, q.packed ^ 1, q.packed))
    found = fp4kit.identify(changed, x)
    assert not found.exact and (found.matches[0].recipe, found.matches[0].codes_differ) == (id, 6)


@pytest.mark.parametrize("id", [id for id in OURS if not fp4kit.recipe(id).fake_only])
def test_identify_tries_the_recipes_of_the_specification(id):
    q = fp4kit.quantize(X[:, :1024], id)
    assert id in fp4kit.identify(q, X[:, :1024]).exact
    is_mxfp4 = id.startswith("mxfp4-") and not q.recipe.levels
    assert ("mxfp4-msmodelslim-4over6" in {match.recipe for match in fp4kit.identify(q, X[:, :1024])}) == is_mxfp4
    changed = fp4kit.identify(replace(q, packed=q.packed ^ 1), X[:, :1024])
    assert not changed.exact and not changed.variations


REFUSED = {
    "matmul": lambda q: fp4kit.matmul(q, q),
    "transpose": fp4kit.transpose,
    "swizzle": lambda q: fp4kit.swizzle(q, "swizzled_128x4"),
    "requantize": lambda q: fp4kit.requantize(q, "mxfp4"),
    "amax": lambda q: fp4kit.amax(X, q.recipe),
    "Contract": lambda q: fp4kit.Contract(weights=q.recipe),
    "quantize": lambda q: fp4kit.quantize(X, q.recipe, block_scale=q.block_scale, tensor_scale=q.tensor_scale),
    "search_scales": lambda q: fp4kit.search_scales(X, q.recipe),
    "fake_quantize_backward": lambda q: fp4kit.fake_quantize_backward(X, X, q.recipe),
    "quantize: scale_layout": lambda q: fp4kit.quantize(X, q.recipe, scale_layout="swizzled_128x4"),
    "Quantized: scale_layout": lambda q: replace(q, scale_layout="swizzled_128x4"),
}


@pytest.mark.parametrize("id", LEVELED)
@pytest.mark.parametrize("op", REFUSED)
def test_other_operations_refuse_by_name(op, id):
    with pytest.raises(NotImplementedError, match=rf"{op}.*{id}"):
        REFUSED[op](fp4kit.quantize(X, LEVELED[id]))


@pytest.mark.parametrize("id", ["own-dual", "own-bits"])
def test_no_gpu_takes_them(id):
    with pytest.raises(NotImplementedError, match=f"{id} has rules of the specification alone"):
        check_formats(LEVELED[id])


def test_all_recipes_of_the_table_are_compiled():
    assert not any(r.specification_only for r in ALL_RECIPES.values())


@pytest.mark.parametrize("id", OURS)
def test_no_checkpoint_takes_them(id):
    assert not any(container.stores(ALL_RECIPES[id]) for container in WRITTEN)


def test_e6m2_rounds_to_nearest():
    x = np.exp2(np.random.default_rng(6).uniform(-50, 17, 2000))
    errors = np.abs(E6M2.values[:255].astype(np.float64) - x[:, None])
    assert np.array_equal(np.take_along_axis(errors, E6M2.encode(x)[:, None].astype(int), 1)[:, 0], errors.min(1))
    assert E6M2.encode([0, -1, np.nan, np.inf, 2.0**-48]).tolist() == [0, 255, 255, 254, 0]


@pytest.mark.parametrize("id", ["mxfp8-msmodelslim", "mxfp8-msmodelslim-mse"])
def test_infinite_values_of_msmodelslim_have_the_largest_code(id):
    """In float16, 2^-24 / 2^-32 is 2^-24 / 0. PyTorch's cast of infinity to E4M3 gives the largest value."""
    x = np.full((2, 32), 2.0**-24, np.float16)
    x[0, 1::2] *= -1
    q = fp4kit.quantize(x, id)
    assert q.packed[0].tolist() == [0x7E, 0xFE] * 16 and (q.packed[1] == 0x7E).all()
    x[1, 3] = np.nan
    assert (fp4kit.quantize(x, id).packed[1] & 0x7F == 0x7F).all()
