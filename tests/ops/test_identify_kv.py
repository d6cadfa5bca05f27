"""Test identify_kv: it finds the layout of a KV cache from its bytes, and names the fault of an assumed one."""

from __future__ import annotations

import re
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every
from together import together

import fp4kit
from fp4kit.layouts import kv
from fp4kit.ops.kv_cache import FITS

SHAPE = kv.PageShape(pages=8, block_size=16, heads=4, head_dim=64)
SLOTS = np.random.default_rng(1).permutation(128)[:100]
NAMES = [*kv.KV_LAYOUTS]


def drawn(seed=0, outliers=False):
    """Draw keys and values. With outliers, block amaxes of values differ by orders of magnitude."""
    x = np.random.default_rng(seed).standard_normal((2, 100, 4, 64))
    if outliers:
        x *= np.exp(2 * np.random.default_rng(seed + 1).standard_normal((2, 100, 4, 4))).repeat(16, -1)
    return x.astype(np.float32)


def stored(name, keys, values, shape=SHAPE, **scales):
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
    keys, values = drawn(2, outliers)
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


def test_values_with_outliers_lose_most_of_their_norm_under_wrong_scales():
    keys, values = drawn(3, outliers=True)
    found = fp4kit.identify_kv(stored("vllm-hnd-swizzled", keys, values).arrays, keys, values, SLOTS, layout="vllm-hnd")
    wrong = next(m for m in found.matches if m.layout == "vllm-hnd")
    assert wrong.key_error < 0.12 and 0.6 < wrong.value_error
    assert re.fullmatch(
        r"the pages are not vllm-hnd \(relative error 0\.1. of keys and 1\... of values\) but vllm-hnd-swizzled \(rel"
        r"ative error 0\.1. of keys and 0\.1. of values\): the scales of V are swizzled, not linear",
        found.verdict,
    )


def test_values_without_outliers_are_told_apart_by_the_smallest_error():
    keys, values = np.random.default_rng(13).uniform(-1, 1, (2, 128, 4, 64)).astype(np.float32)
    cache, slots = kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE), np.arange(128)
    fp4kit.quantize_kv(cache, keys, values, slots, k_scale=0.001, v_scale=0.001)
    found = fp4kit.identify_kv(cache.arrays, keys, values, slots, k_scale=0.001, v_scale=0.001)
    wrong = next(m for m in found.matches if m.layout == "vllm-nhd-swizzled")
    assert found.layouts == ("vllm-nhd",) and wrong.error < FITS


def test_pages_shaped_for_another_layout_are_read_by_their_bytes():
    keys, values = drawn(4)
    pages = stored("vllm-nhd", keys, values).arrays[0]
    for shaped in (pages, pages.reshape(8, -1), pages.reshape(8, 2, 4, 16, 36)):
        assert fp4kit.identify_kv(shaped, keys, values, SLOTS).layouts == ("vllm-nhd",)
    arrays = [*stored("flashinfer-hnd-swizzled", keys, values).arrays]
    arrays[2] = arrays[2].view(ml_dtypes.float8_e4m3fn)
    assert fp4kit.identify_kv(arrays, keys, values, SLOTS).layouts == ("flashinfer-hnd-swizzled",)


def test_orders_that_are_the_same():
    keys, values = drawn(5)[:, :, :1]
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
    "nibbles": (
        lambda k, v: swapped_codes(stored("flashinfer-nhd", k, v)),
        "the codes of each byte are swapped (the even element is in the high nibble)",
    ),
    "k_scale": (lambda k, v: stored("vllm-nhd", k, v, k_scale=0.25), "k_scale is about 0.25, not 1"),
    "v_scale": (lambda k, v: stored("vllm-nhd", k, v, v_scale=1.25), "v_scale is about 1.2, not 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_faults_are_named(fault):
    keys, values = drawn(7)
    make, clause = FAULTS[fault]
    cache = make(keys, values)
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS)
    assert not found.layouts
    assert found.verdict.startswith(f"the pages fit {cache.layout.name} if {clause} (relative error 0.")
    assert clause in str(found) and clause in found._repr_html_()


def test_sides_swapped_with_their_scales_or_without():
    keys, values = drawn(7)
    for k_scale, v_scale in ((0.01, 0.02), (0.02, 0.01)):  # the scales of the stored keys and values
        cache = stored("vllm-hnd", values, keys, k_scale=k_scale, v_scale=v_scale)
        found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, k_scale=0.01, v_scale=0.02)
        assert found.verdict.startswith("the pages fit vllm-hnd if K and V are swapped (")


def test_a_negative_scale_is_no_explanation():
    keys, values = drawn(7)
    found = fp4kit.identify_kv(stored("vllm-hnd", keys, values).arrays, -keys, values, SLOTS)
    assert found.verdict.startswith("no known layout fits")


def test_views_with_permuted_axes():
    keys, values = drawn(3)
    pages = stored("vllm-hnd", keys, values).arrays[0]
    for view in (pages, pages.transpose(0, 1, 3, 2, 4)):
        assert fp4kit.identify_kv(view, keys, values, SLOTS).layouts == ("vllm-hnd",)


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
    keys, values = drawn(8)
    cache = stored("vllm-nhd", keys, values, k_scale=0.02, v_scale=0.02)
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS, k_scale=50, v_scale=0.02)
    assert "if k_scale is about 0.02, its reciprocal, not 50 (" in found.verdict


def test_pages_of_other_keys():
    keys, values = drawn(9)
    found = fp4kit.identify_kv(stored("vllm-nhd", *drawn(10)).arrays, keys, values, SLOTS)
    assert found.verdict.startswith("no known layout fits; the nearest is vllm-") and not found.layouts
    assert len(found.matches) == 4
    shifted = fp4kit.identify_kv(stored("vllm-nhd", keys, values).arrays, keys, values, (SLOTS + 1) % 128)
    assert shifted.verdict.startswith("no known layout fits")


def test_garbage_is_no_fit():
    keys, values = drawn(11)
    cache = kv.KV_LAYOUTS["flashinfer-nhd"].zeros(SHAPE)
    for array in cache.arrays:
        array[:] = 0xFF  # NaN scales
    found = fp4kit.identify_kv(cache.arrays, keys, values, SLOTS)
    assert found.verdict.startswith("no known layout fits") and found.matches[0].error == float("inf")
    zeros = fp4kit.identify_kv(kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE).arrays, keys, values, SLOTS)
    assert zeros.verdict.startswith("no known layout fits") and zeros.matches[0].error == 1


def test_padding_and_large_caches_are_sampled():
    rng = np.random.default_rng(12)
    keys, values = rng.standard_normal((2, 1024, 8, 64), dtype=np.float32)
    slots = np.where(np.arange(1024) % 3, rng.permutation(1024), -1)
    cache = kv.KV_LAYOUTS["vllm-nhd"].zeros(kv.PageShape(64, 16, 8, 64))
    fp4kit.quantize_kv(cache, keys, values, slots)
    keys[slots < 0] = 1e6
    assert fp4kit.identify_kv(cache.arrays, keys, values, slots).layouts == ("vllm-nhd",)


KEYS, VALUES = drawn()
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
def test_mistakes_are_named(changed, message):
    given = {"arrays": PAGES, "keys": KEYS, "values": VALUES, "slots": SLOTS, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        fp4kit.identify_kv(given.pop("arrays"), given.pop("keys"), given.pop("values"), given.pop("slots"), **given)


def test_wrong_type():
    for keys in (KEYS.astype(np.complex64), KEYS.astype("M8[s]")):
        with pytest.raises(TypeError, match=r"identify_kv: keys (are|is) "):
            fp4kit.identify_kv(PAGES, keys, VALUES, SLOTS)
    with pytest.raises(TypeError, match="identify_kv: arrays are float32; needs uint8"):
        fp4kit.identify_kv(PAGES.astype(np.float32), KEYS, VALUES, SLOTS)
