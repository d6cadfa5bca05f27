"""Test quantize_kv and dequantize_kv against scalar statements of the stores of vLLM and FlashInfer."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every
from statements import e2m1, e4m3, rcp
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E4M3
from fp4kit.layouts import kv
from fp4kit.ops.kv_cache import FITS

F32 = np.float32
SHAPE = kv.PageShape(pages=4, block_size=8, heads=2, head_dim=64)
LAYOUTS = {"nvfp4-vllm-kv": "vllm-hnd", "nvfp4-flashinfer-kv": "flashinfer-nhd", "nvfp4-flashinfer-kv-page": "vllm-nhd"}
SCALES = [1.0, 0.0123, 1 / 3, 448.0, 1.9e-5, 7.3e4]


def store_vllm(amax, g):
    gs = F32(1) / g
    c, byte = e4m3(gs * (amax * rcp(F32(6))))
    return byte, rcp(c * rcp(gs)) if c else F32(0)


def store_flashinfer(amax, g):
    c, byte = e4m3(rcp(g) * (amax * rcp(F32(6))))
    return byte, rcp(c * g) if amax else F32(0)


def store_page(amax, g):
    c, byte = e4m3(amax * rcp(F32(6) * g))
    return byte, rcp(c * g) if c else F32(0)


STORES = {"nvfp4-vllm-kv": store_vllm, "nvfp4-flashinfer-kv": store_flashinfer, "nvfp4-flashinfer-kv-page": store_page}


@np.errstate(all="ignore")
def stated(x, recipe, g):
    """Return the packed codes and scales of x (tokens, heads, head_dim), block by block."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    codes, scales = np.zeros(blocks.shape, np.uint8), np.zeros(len(blocks), np.uint8)
    for i, block in enumerate(blocks):
        scales[i], factor = STORES[recipe](np.abs(block).max(), F32(g))
        codes[i] = e2m1(block * factor)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1)


def fused(a, b, c):
    """Return a * b + c of finite numbers, rounded once to float32, nearest even, by comparing exact fractions."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F32(float(exact))
    around = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
    return min(around, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1))


def four_over_six(block, g):
    """Return the scale byte and the codes of a block as vLLM's kernel with 4over6 computes them."""
    gs, best = F32(1) / g, None
    for top in (6, 4):
        c, byte = e4m3(gs * (np.abs(block).max() * rcp(F32(top))))
        factor = rcp(c * rcp(gs)) if c else F32(0)
        codes, error, d = e2m1(block * factor), F32(0), block
        if factor:
            q = [F32((-1 if code & 8 else 1) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7]) for code in codes]
            d = [fused(value, rcp(factor), -x) for value, x in zip(q, block, strict=True)]
        for i in range(0, 16, 2):
            error = error + fused(d[i], d[i], d[i + 1] * d[i + 1])
        if best is None or error < best[0]:
            best = error, byte, codes
    return best[1:]


# Blocks, in units of 112, whose two errors under g = 448 differ by the last bit, or not at all.
CLOSE = [
    [-18, 18, 0, -3, -6, -3, -3, 9, 12, -3, 3, -15, -6, 9, 18, 3],
    [-6, -6, 18, -6, -18, 36, 6, 30, 0, 12, 24, -12, 0, -6, 18, 6],
    [-9, -3, 9, -9, 15, 0, 3, 6, 3, -3, -18, -3, -6, 18, -3, 12],
    [16, 16, -12, 4, 20, 0, 20, -12, -16, -24, 8, -24, -16, 4, -4, -16],
]


def test_vllm_store_with_4over6():
    rng, chosen = np.random.default_rng(9), set()
    for g, dtype in ((F32(0.0123), ml_dtypes.bfloat16), (F32(1 / 3), np.float16), (F32(448), np.float32)):
        keys = drawn(rng, 4, dtype, spread=1)
        keys[3, 0] = 112 * np.float32(CLOSE).reshape(-1)
        cache = kv.KV_LAYOUTS["vllm-hnd-swizzled"].zeros(SHAPE)
        fp4kit.quantize_kv(cache, keys, keys, np.arange(4), k_scale=g, v_scale=g, four_over_six=True)
        parts, plain = cache.read(np.arange(4)), stated(keys, "nvfp4-vllm-kv", g)
        blocks = keys.astype(np.float32).reshape(-1, 16)
        with np.errstate(all="ignore"):
            scales, codes = zip(*(four_over_six(block, g) for block in blocks), strict=True)
        codes = np.array(codes, np.uint8)
        for got in (parts.k_scales, parts.v_scales):
            assert_same_bits(got.reshape(-1), np.array(scales, np.uint8))
        for got in (parts.k_codes, parts.v_codes):
            assert_same_bits(got.reshape(-1, 8), codes[:, 0::2] | codes[:, 1::2] << 4)
        chosen |= {*(parts.k_scales != plain[1]).reshape(-1).tolist()}
    assert chosen == {False, True}, "needs blocks of both scales"


def test_vllm_store_with_4over6_equals_the_compiled_kernel(golden):
    name, compared = "nvfp4-vllm-kv-4over6", 0
    for key in golden.variants("producers_compiled")[name]:
        x = golden.input(key)
        codes, scales, scale = (
            golden.get("producers_compiled", f"{key}/{name}/{part}") for part in ("codes", "scales", "tensor_scale")
        )
        if not (np.isfinite(scale) and scale > 0):
            continue  # quantize_kv refuses such a scale
        shape = kv.PageShape(pages=len(x), block_size=1, heads=1, head_dim=x.shape[1])
        cache = kv.KV_LAYOUTS["vllm-hnd"].zeros(shape)
        keys, slots = x[:, None], np.arange(len(x))
        fp4kit.quantize_kv(cache, keys, keys, slots, k_scale=scale, v_scale=scale, four_over_six=True)
        parts = cache.read(slots)
        assert_same_bits(parts.k_codes[:, 0], codes)
        assert_same_bits(parts.k_scales[:, 0], scales)
        compared += 1
    assert compared > 15


def test_4over6_chooses_the_smaller_error_and_leaves_nan_at_six():
    """The error of most blocks with amax 4 falls; a block with NaN keeps the scale of the plain store."""
    rng = np.random.default_rng(10)
    keys = rng.standard_normal((32, 2, 64)).astype(np.float32)
    keys[0, 0, 5], keys[1, 1, 17] = np.nan, np.inf
    caches = [kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE) for _ in range(2)]
    for cache, four in zip(caches, (False, True), strict=True):
        fp4kit.quantize_kv(cache, keys, keys, np.arange(32), k_scale=0.01, v_scale=0.01, four_over_six=four)
    plain, searched = (cache.read() for cache in caches)
    for token, block in ((0, (0, 0)), (1, (1, 1))):
        assert searched.k_scales[token][block] == plain.k_scales[token][block]
    errors = [
        np.nansum((fp4kit.dequantize_kv(cache, k_scale=0.01, v_scale=0.01)[0][2:] - keys[2:]) ** 2) for cache in caches
    ]
    assert errors[1] < 0.95 * errors[0]


def drawn(rng, tokens, dtype, spread=3.0):
    """Draw keys whose blocks differ in size, with zeros, -0, equal magnitudes and small blocks among them."""
    x = rng.standard_normal((tokens, SHAPE.heads, SHAPE.head_dim)) * np.exp(
        spread * rng.standard_normal((tokens, SHAPE.heads, SHAPE.head_dim // 16)).repeat(16, -1)
    )
    x[0, 0, :16], x[0, 0, 16:32], x[1, 1, 3] = 0, -0.0, -0.0
    x[1, 0, :16] = np.arange(16) / 4
    return np.clip(x, -6e4, 6e4).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("recipe", STORES)
def test_stores_equal_their_statement(recipe, dtype):
    rng = np.random.default_rng(3)
    for g in SCALES:
        keys, values = drawn(rng, 5, dtype), drawn(rng, 5, dtype)
        cache = kv.KV_LAYOUTS[LAYOUTS[recipe]].zeros(SHAPE)
        slots = rng.permutation(32)[:5]
        assert fp4kit.quantize_kv(cache, keys, values, slots, recipe=recipe, k_scale=g, v_scale=2 * g) is cache
        parts = cache.read(slots)
        for got, expected in zip(parts, stated(keys, recipe, g) + stated(values, recipe, 2 * g), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("recipe", STORES)
def test_block_scales_at_ties(recipe):
    """Amaxes within 3 ulp of a tie between two block scales show the order of the products and quotients."""
    ties = (E4M3.magnitudes[1:-1].astype(np.float64) + E4M3.magnitudes[2:]) / 2
    keys = np.zeros((len(ties), 7, 16), np.float32)
    slots = np.arange(len(ties))
    for g in SCALES[1:3]:
        center = (ties * 6 * float(F32(g))).astype(np.float32).view(np.int32)
        keys[:, :, 5] = (center[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
        cache = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(kv.PageShape(1, len(ties), 7, 16))
        fp4kit.quantize_kv(cache, keys, keys, slots, recipe=recipe, k_scale=g, v_scale=g)
        with fp4kit.specification():
            again = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(cache.shape)
            fp4kit.quantize_kv(again, keys, keys, slots, recipe=recipe, k_scale=g, v_scale=g)
        for got, same, expected in zip(cache.read(), again.read(), 2 * stated(keys, recipe, g), strict=True):
            assert_same_bits(got, expected)
            assert_same_bits(same, expected)


@pytest.mark.parametrize("recipe", STORES)
def test_values_are_rounded_once(recipe):
    """Code times block scale is exact, so the product with the tensor scale is the only rounding."""
    rng = np.random.default_rng(4)
    cache = kv.KV_LAYOUTS["vllm-nhd-swizzled"].zeros(SHAPE)
    parts = kv.KVParts(*(rng.integers(0, 127, (32, 2, n), np.uint8) for n in (32, 4, 32, 4)))
    cache.write(np.arange(32), parts)
    got = fp4kit.dequantize_kv(cache, recipe=recipe, k_scale=1 / 3, v_scale=0.7)
    with fp4kit.specification():
        again = fp4kit.dequantize_kv(cache, recipe=recipe, k_scale=1 / 3, v_scale=0.7)
    for a, b in zip(again, got, strict=True):
        assert_same_bits(a, b)
    for values, codes, scales, g in zip(got, parts[::2], parts[1::2], (1 / 3, 0.7), strict=True):
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(32, 2, 64)
        exact = table[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
        exact = exact * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, -1) * float(F32(g))
        assert_same_bits(values, exact.astype(np.float32))


def test_the_usual_recipe_is_that_of_the_kernel():
    keys = drawn(np.random.default_rng(5), 8, np.float32)
    usual = {"vllm-hnd": "nvfp4-vllm-kv", "vllm-nhd-swizzled": "nvfp4-vllm-kv"}
    usual |= {"flashinfer-nhd": "nvfp4-flashinfer-kv-page", "flashinfer-hnd-swizzled": "nvfp4-flashinfer-kv"}
    for name, recipe in usual.items():
        caches = [kv.KV_LAYOUTS[name].zeros(SHAPE) for _ in range(2)]
        fp4kit.quantize_kv(caches[0], keys, keys, np.arange(8), k_scale=0.013, v_scale=0.017)
        fp4kit.quantize_kv(caches[1], keys, keys, np.arange(8), recipe=recipe, k_scale=0.013, v_scale=0.017)
        for a, b in zip(caches[0].arrays, caches[1].arrays, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", kv.KV_LAYOUTS)
def test_what_is_stored_is_read_back(name):
    rng = np.random.default_rng(7)
    keys, values = rng.standard_normal((2, 20, 2, 64), dtype=np.float32)
    slots = rng.permutation(32)[:20]
    slots[3] = -1
    cache = kv.KV_LAYOUTS[name].zeros(SHAPE)
    fp4kit.quantize_kv(cache, keys, values, slots, k_scale=0.01, v_scale=0.02)
    kept = slots >= 0
    got = fp4kit.dequantize_kv(cache, slots[kept], k_scale=0.01, v_scale=0.02, dtype=ml_dtypes.bfloat16)
    for read, reference in zip(got, (keys[kept], values[kept]), strict=True):
        assert read.dtype == ml_dtypes.bfloat16
        error = np.linalg.norm(read.astype(np.float32) - reference) / np.linalg.norm(reference)
        assert 0.05 < error < 0.12
    everything = fp4kit.dequantize_kv(cache, k_scale=0.01, v_scale=0.02)
    assert not np.delete(everything[0], slots[kept], axis=0).any()


def test_a_recipe_without_tensor_scale():
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((4, 2, 64), dtype=np.float32)
    cache = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(SHAPE)
    fp4kit.quantize_kv(cache, keys, keys, [0, 1, 2, 3], recipe="mxfp4-sglang-kv")
    got, _ = fp4kit.dequantize_kv(cache, [0, 1, 2, 3], recipe="mxfp4-sglang-kv")
    assert_same_bits(got, fp4kit.fake_quantize(keys, "mxfp4-sglang-kv"))


X = np.ones((2, 2, 64), np.float32)
VALUE_ERRORS = [
    (dict(keys=X[:, :1]), "quantize_kv: keys have shape (2, 1, 64); needs (2, 2, 64), that is (tokens, heads, hea"),
    (dict(slots=[0]), "keys have shape (2, 2, 64); needs (1, 2, 64)"),
    (dict(slots=[0, 32]), "quantize_kv: slot 32 is out of range"),
    (dict(slots=[4, 4]), "quantize_kv: slot 4 occurs twice"),
    (dict(k_scale=0), "quantize_kv: k_scale is 0; needs a positive float32 number"),
    (dict(v_scale=float("nan")), "v_scale is nan"),
    (dict(v_scale=1e60), "v_scale is 1e+60"),
    (dict(v_scale=10**400), "v_scale is 1000"),
    (dict(recipe=replace(fp4kit.recipe("nvfp4-vllm-kv"), tensor_scaling="row")), "does not fit a KV cache"),
    (
        dict(
            recipe=replace(fp4kit.recipe("nvfp4-vllm-kv"), tensor_scaling="none", tensor_rule=None), four_over_six=True
        ),
        "only vLLM's store has",
    ),
    (dict(recipe="nvfp4-te"), "nvfp4-te does not fit a KV cache"),
    (dict(recipe="mxfp4"), "mxfp4-ocp does not fit a KV cache"),
    (dict(recipe="nvfp4-flashinfer-kv", four_over_six=True), "four_over_six is True for nvfp4-flashinfer-kv; only"),
    (dict(recipe="nvfp4-kv"), "quantize_kv: no recipe is called 'nvfp4-kv'"),
    (dict(recipe="mxfp4-sglang-kv", k_scale=2), "k_scale is 2; mxfp4-sglang-kv has no tensor scale"),
]


def call(**changed):
    cache = changed.pop("cache", kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE))
    fp4kit.quantize_kv(cache, **{"keys": X, "values": X, "slots": [0, 1], **changed})


TYPE_ERRORS = [
    (dict(cache=np.zeros(3)), "cache is an ndarray; needs a fp4kit.layouts.kv.KVCache"),
    (dict(values=X.astype(np.float64)), "quantize_kv: values is float64; needs float32, float16 or bfloat16"),
    (dict(slots=[0.5, 1]), "slots are float64"),
]
ERRORS = [(ValueError, *row) for row in VALUE_ERRORS] + [(TypeError, *row) for row in TYPE_ERRORS]


@together("kind, changed, message", ERRORS)
def test_mistakes_are_named(kind, changed, message):
    with pytest.raises(kind, match=re.escape(message)):
        call(**changed)


def test_a_refused_call_writes_nothing():
    cache = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(SHAPE)
    with pytest.raises(ValueError, match="v_scale"):
        call(cache=cache, v_scale=-1)
    assert not any(array.any() for array in cache.arrays)


SHAPE_IDENTIFY = kv.PageShape(pages=8, block_size=16, heads=4, head_dim=64)
SLOTS = np.random.default_rng(1).permutation(128)[:100]
NAMES = [*kv.KV_LAYOUTS]


def drawn_of_identify(seed=0, outliers=False):
    """Draw keys and values. With outliers, block amaxes of values differ by orders of magnitude."""
    x = np.random.default_rng(seed).standard_normal((2, 100, 4, 64))
    if outliers:
        x *= np.exp(2 * np.random.default_rng(seed + 1).standard_normal((2, 100, 4, 4))).repeat(16, -1)
    return x.astype(np.float32)


def stored(name, keys, values, shape=SHAPE_IDENTIFY, **scales):
    cache = kv.KV_LAYOUTS[name].zeros(shape)
    return fp4kit.quantize_kv(cache, keys, values, SLOTS, **scales)


def difference(found, assumed):
    (_, *found), (_, *assumed) = found.split("-"), assumed.split("-")
    clauses = []
    if found[0] != assumed[0]:
        clauses.append(f"the order is {found[0]}, not {assumed[0]}")
    if found[1:] != assumed[1:]:
        swizzled = ("swizzled", "linear") if found[1:] else ("linear", "swizzled")
        clauses.append("the scales of V are {}, not {}".format(*swizzled))
    return " and ".join(clauses)


@pytest.mark.parametrize("case", every(2, zip(NAMES, cycle([False, True, True]), strict=False)), ids=str)
def test_every_layout_is_found_and_told_from_every_other(case):
    name, outliers = case
    keys, values = drawn_of_identify(2, outliers)
    scales = {"k_scale": np.abs(keys).max() / 2688, "v_scale": np.abs(values).max() / 2688}
    cache = stored(name, keys, values, **scales)
    arguments = cache.arrays, keys, values, SLOTS
    found = fp4kit.identify_kv(*arguments, **scales)
    assert found.layouts == (name,) and found.matches[0].layout == name and len(found.matches) == 4
    assert 0.05 < found.matches[0].error < 0.13 and found.verdict.startswith(f"the pages fit {name} (relative error 0.")
    for assumed in NAMES:
        if assumed.split("-")[0] == name.split("-")[0]:
            verdict = fp4kit.identify_kv(*arguments, layout=assumed, **scales).verdict
            if assumed == name:
                assert verdict == found.verdict
            else:
                assert verdict.startswith(f"the pages are not {assumed} (relative error")
                assert verdict.endswith(f": {difference(name, assumed)}")


def test_values_without_outliers_are_told_apart_by_the_smallest_error():
    keys, values = np.random.default_rng(13).uniform(-1, 1, (2, 128, 4, 64)).astype(np.float32)
    cache, slots = kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE_IDENTIFY), np.arange(128)
    fp4kit.quantize_kv(cache, keys, values, slots, k_scale=0.001, v_scale=0.001)
    found = fp4kit.identify_kv(cache.arrays, keys, values, slots, k_scale=0.001, v_scale=0.001)
    wrong = next(m for m in found.matches if m.layout == "vllm-nhd-swizzled")
    assert found.layouts == ("vllm-nhd",) and wrong.error < FITS


def test_pages_shaped_for_another_layout_are_read_by_their_bytes():
    keys, values = drawn_of_identify(4)
    pages = stored("vllm-nhd", keys, values).arrays[0]
    for shaped in (pages, pages.reshape(8, -1), pages.reshape(8, 2, 4, 16, 36), pages.transpose(0, 1, 3, 2, 4)):
        assert fp4kit.identify_kv(shaped, keys, values, SLOTS).layouts == ("vllm-nhd",)
    arrays = [*stored("flashinfer-hnd-swizzled", keys, values).arrays]
    arrays[2] = arrays[2].view(ml_dtypes.float8_e4m3fn)
    assert fp4kit.identify_kv(arrays, keys, values, SLOTS).layouts == ("flashinfer-hnd-swizzled",)


def test_orders_that_are_the_same():
    keys, values = drawn_of_identify(5)[:, :, :1]
    cache = stored("vllm-nhd", keys, values, kv.PageShape(8, 16, 1, 64))
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS)
    assert set(found.layouts) == {"vllm-nhd", "vllm-hnd"} and "which are the same for these sizes" in found.verdict
    assert "fit vllm-hnd (" in fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, layout="vllm-hnd").verdict


def test_head_dims_that_no_swizzle_supports():
    keys, values = np.random.default_rng(6).standard_normal((2, 100, 2, 48), dtype=np.float32)
    cache = stored("vllm-hnd", keys, values, kv.PageShape(8, 16, 2, 48))
    assert fp4kit.identify_kv(cache.arrays, keys, values, SLOTS).layouts == ("vllm-hnd",)
    with pytest.raises(ValueError, match=r"vllm-hnd-swizzled fits 1 array\(s\) .* needs one of vllm-nhd, vllm-hnd$"):
        fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, layout="vllm-hnd-swizzled")
    with pytest.raises(ValueError, match="flashinfer-hnd fits 1 array"):
        fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, layout="flashinfer-hnd")


def swapped_codes(cache):
    for codes in cache.arrays[:2]:
        codes[:] = codes << 4 | codes >> 4
    return cache


FAULTS = {
    "swapped sides": (lambda k, v: stored("vllm-hnd", v, k), "K and V are swapped"),
    "nibbles": (lambda k, v: swapped_codes(stored("flashinfer-nhd", k, v)), "the codes of each byte are swapped"),
    "k_scale": (lambda k, v: stored("vllm-nhd", k, v, k_scale=0.25), "k_scale is about 0.25, not 1"),
    "v_scale": (lambda k, v: stored("vllm-nhd", k, v, v_scale=1.25), "v_scale is about 1.2, not 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_faults_are_named(fault):
    keys, values = drawn_of_identify(7)
    make, clause = FAULTS[fault]
    cache = make(keys, values)
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS)
    assert not found.layouts
    assert found.verdict.startswith(f"the pages fit {cache.layout.name} if {clause}")
    assert clause in str(found) and clause in found._repr_html_()


def test_sides_swapped_with_their_scales_or_without():
    keys, values = drawn_of_identify(7)
    for k_scale, v_scale in ((0.01, 0.02), (0.02, 0.01)):  # the scales of the stored keys and values
        cache = stored("vllm-hnd", values, keys, k_scale=k_scale, v_scale=v_scale)
        found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, k_scale=0.01, v_scale=0.02)
        assert found.verdict.startswith("the pages fit vllm-hnd if K and V are swapped (")


def test_layouts_that_fit_about_equally_well():
    """Values of nearly equal magnitudes have nearly equal scales; the better layout is named first."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((32, 2, 128)).astype(np.float32)
    values = (rng.choice([-1, 1], keys.shape) * (1 + 0.03 * rng.standard_normal(keys.shape))).astype(np.float32)
    scale, slots = float(np.abs(values).max() / 2688), np.arange(32)
    cache = kv.KV_LAYOUTS["vllm-hnd-swizzled"].zeros(kv.PageShape(2, 16, 2, 128))
    fp4kit.quantize_kv(cache, keys, values, slots, v_scale=scale)
    found = fp4kit.identify_kv(cache.arrays, keys, values, slots, v_scale=scale)
    assert found.verdict.startswith("the pages fit vllm-hnd-swizzled (")
    assert found.verdict.endswith("; vllm-hnd cannot be excluded") and "the same" not in found.verdict
    found = fp4kit.identify_kv(cache.arrays, keys, values, slots, v_scale=scale, layout="vllm-hnd")
    assert " less well than vllm-hnd-swizzled (" in found.verdict
    assert found.verdict.endswith("the scales of V are swizzled, not linear")


def test_inverted_scale():
    keys, values = drawn_of_identify(8)
    cache = stored("vllm-nhd", keys, values, k_scale=0.02, v_scale=0.02)
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, k_scale=50, v_scale=0.02)
    assert "if k_scale is about 0.02, its reciprocal, not 50 (" in found.verdict


def test_pages_that_no_layout_explains():
    keys, values = drawn_of_identify(9)
    pages, zeros = stored("vllm-nhd", keys, values).arrays, kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE_IDENTIFY).arrays
    flashinfer = [np.full_like(a, 0xFF) for a in stored("flashinfer-nhd", keys, values).arrays]  # NaN scales
    cases = [
        ("other keys", stored("vllm-nhd", *drawn_of_identify(10)).arrays, keys, SLOTS, None),
        ("shifted", pages, keys, (SLOTS + 1) % 128, None),
        ("negative", pages, -keys, SLOTS, None),
        ("NaN", flashinfer, keys, SLOTS, float("inf")),
        ("zeros", zeros, keys, SLOTS, 1),
    ]
    for name, arrays, reference, slots, error in cases:
        found = fp4kit.identify_kv(arrays, reference, values, slots)
        nearest = "flashinfer-" if name == "NaN" else "vllm-"
        assert found.verdict.startswith(f"no known layout fits; the nearest is {nearest}"), name
        assert not found.layouts and len(found.matches) == 4 and error in (None, found.matches[0].error), name


def test_padding_and_large_caches_are_sampled():
    rng = np.random.default_rng(12)
    keys, values = rng.standard_normal((2, 1024, 8, 64), dtype=np.float32)
    slots = np.where(np.arange(1024) % 3, rng.permutation(1024), -1)
    cache = kv.KV_LAYOUTS["vllm-nhd"].zeros(kv.PageShape(64, 16, 8, 64))
    fp4kit.quantize_kv(cache, keys, values, slots)
    keys[slots < 0] = 1e6
    assert fp4kit.identify_kv(cache.arrays, keys, values, slots).layouts == ("vllm-nhd",)


KEYS, VALUES = drawn_of_identify()
PAGES = np.zeros((8, 2, 16, 4, 36), np.uint8)
MISTAKES = [
    (dict(arrays=(PAGES, PAGES)), "identify_kv: got 2 arrays; needs 1, vLLM's pages, or 4"),
    (dict(arrays=PAGES[..., :35]), "do not hold a whole number of tokens per page for 4 heads and head_dim 64"),
    (dict(arrays=[PAGES] * 4), "do not hold a whole number of tokens"),
    (dict(keys=KEYS[0]), "keys have shape (4, 64); needs (tokens, heads, head_dim)"),
    (dict(keys=KEYS[:, :2]), "keys have shape (100, 2, 64) and values (100, 4, 64); needs equal shapes"),
    (dict(values=VALUES * np.float32(np.inf)), "values are not finite, or all zero"),
    (dict(keys=0 * KEYS), "keys are not finite, or all zero"),
    (dict(slots=[0]), "got 1 slots for 100 tokens"),
    (dict(slots=SLOTS + 1000), "out of range"),
    (dict(slots=np.full(100, -1)), "all slots are negative"),
    (dict(layout="hnd"), "identify_kv: layout is 'hnd'; needs one of vllm-nhd"),
    (dict(k_scale=-1), "k_scale is -1; needs a positive"),
]


@together("changed, message", MISTAKES)
def test_mistakes_of_identify_are_named(changed, message):
    given = {"arrays": PAGES, "keys": KEYS, "values": VALUES, "slots": SLOTS, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        fp4kit.identify_kv(given.pop("arrays"), given.pop("keys"), given.pop("values"), given.pop("slots"), **given)


def test_wrong_type():
    for keys in (KEYS.astype(np.complex64), KEYS.astype("M8[s]")):
        with pytest.raises(TypeError, match=r"identify_kv: keys (are|is) "):
            fp4kit.identify_kv(PAGES, keys, VALUES, SLOTS)
    with pytest.raises(TypeError, match="identify_kv: arrays are float32; needs uint8"):
        fp4kit.identify_kv(PAGES.astype(np.float32), KEYS, VALUES, SLOTS)
