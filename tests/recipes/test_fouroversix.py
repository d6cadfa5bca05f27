"""Test fouroversix: 4over6, IF4 and MS-EDEN, against independent statements."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace

import matplotlib
import ml_dtypes
import numpy as np
import pytest
import statements
from engine_cases import NEEDS_ENGINE, agree, as_large_ones, counted
from inputs import BF16, codes_of
from philox import triton_word
from recorded import groups
from wrapped import CODES, over_scales, tiny_scales

import fp4kit
from fp4kit import plot
from fp4kit.display import statistics_of as statistics
from fp4kit.evidence.golden.check import all_bytes
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.formats import E2M1, E4M3, FLOATS, IF4, is_same
from fp4kit.recipes import RECIPES
from fp4kit.recipes.table import as_data, from_data
from fp4kit.reference.arith import divide_full
from fp4kit.reference.codec import encode, nearest_unbounded

NAMES = [id for id, r in RECIPES.items() if r.producer == "fouroversix" and r.tensor_rule and not r.fake_only]
WRAPPED = [id for id in NAMES if RECIPES[id].rounding == "rnw"]
# {recipe: (code, block scales)} for two blocks. The first block has the amax 1. The second has the element 1.4 * 2^-9 /
# 448 and zeros, and `code` is the code of this element.
ONE_AND_TINY = {
    "nvfp4-fouroversix-6": (8, [126, 1]),
    "nvfp4-fouroversix-4": (7, [126, 1]),
    "nvfp4-fouroversix": (6, [120, 1]),
    "nvfp4-fouroversix-mae": (6, [120, 1]),
    "nvfp4-fouroversix-absmax": (6, [120, 1]),
    "nvfp4-fouroversix-triton-6": (7, [126, 1]),
}
# A block of these values, in units of 2^-9 / 2560, has the scale 2, and its first value becomes 8. If that value were
# clamped to 6, the scale 4 would be better.
TENTHS = (24, -12, 15, 12, 0, 18, 0, 0, 0, 21, -15, 3, -18, 0, -18, -18)
PACKED = "e8667000702e0fff"


@pytest.mark.parametrize("name", ONE_AND_TINY)
def test_the_code_of_an_element_of_eight_scales(name):
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 1, 1.4 * 2**-9 / 448
    q = fp4kit.quantize(x, name)
    assert (codes_of(q)[0, 16], q.block_scale.tolist()) == (ONE_AND_TINY[name][0], [ONE_AND_TINY[name][1]])
    assert (fp4kit.dequantize(q)[0, 16] == 0) == (ONE_AND_TINY[name][0] == 8)


@pytest.mark.parametrize("name", ["nvfp4-fouroversix", "nvfp4-fouroversix-mae", "nvfp4-fouroversix-absmax"])
def test_the_errors_of_unclamped_values_choose_the_scale(name):
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16:] = 1, np.float32(TENTHS) / 10 * np.float32(2.0**-9 / 256)
    q = fp4kit.quantize(x, name)
    assert q.block_scale.tolist() == [[120, 2]] and q.packed[0, 8:].tobytes().hex() == PACKED
    assert fp4kit.quantize(x, replace(RECIPES[name], rounding="rn")).block_scale.tolist() == [[120, 4]]


def test_codes_of_all_that_is_packed():
    assert encode(np.float32([*CODES]), E2M1, "rnw", "negative").tolist() == [*CODES.values()]
    q = fp4kit.quantize(over_scales(), "nvfp4-fouroversix-6", tensor_amax=2688)
    assert codes_of(q).reshape(-1, 16)[:, 3].tolist() == [*CODES.values()]


def test_values_go_on_in_steps_of_two():
    numbers = np.float32([0.25, 0.75, 3.5, 5, 7, 9, 9.5, 127, 2**24 + 2])
    assert nearest_unbounded(numbers).tolist() == [0, 1, 4, 4, 8, 8, 10, 128, 2**24 + 2]
    assert np.isnan(nearest_unbounded(np.float32([np.inf, np.nan]))).all()
    assert encode(np.float32([np.inf, -np.inf, np.nan]), E2M1, "rnw", "negative", 11).tolist() == [11, 11, 11]
    below = np.nextafter(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7]), np.float32(0))
    assert (encode(below, E2M1, "rnw") == encode(below, E2M1)).all()


def test_scales_that_are_nan():
    """In fouroversix's recipes, a block scale is NaN in two cases only.

    They are a block of zeros under an infinite encode scale, and a block with infinities.
    """
    for name in NAMES:
        assert not fp4kit.quantize(np.zeros((1, 32), np.float32), name).block_scale.any()
        x = np.zeros((1, 32), np.float32)
        x[0, 0] = 1e-40
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [[126, 127]] and (codes_of(q)[0, 16:] == RECIPES[name].nan_code).all()
        x[0, :17] = np.inf, *(16 * [1])
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [[127, 0]] and not codes_of(q)[0, 16:].any()


# ---- the compiled engine ----


@NEEDS_ENGINE
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine(name, monkeypatch):
    as_large_ones(monkeypatch)
    for dtype in FLOATS:
        x = tiny_scales(dtype, RECIPES[name].scale_max)
        with counted(monkeypatch) as left:
            q = fp4kit.quantize(x, name)
        assert left == [] and (name not in WRAPPED or name == "nvfp4-fouroversix-4" or (codes_of(q) == 8).sum() > 100)
        for tensor_amax in (None, x.max() / 3, x.max() / 100, 1e-30):
            q = agree(fp4kit.quantize, x, name, tensor_amax=tensor_amax)
            agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
            agree(fp4kit.fake_quantize, x, name, tensor_amax=tensor_amax)
        agree(fp4kit.requantize, q, "nvfp4-te")
    agree(fp4kit.quantize, over_scales(), name, tensor_amax=2688)
    agree(fp4kit.quantize, over_scales().repeat(64, axis=0) * np.float32(2.0**100), name, tensor_amax=2.0**-20)
    if RECIPES[name].four_over_six is None and not RECIPES[name].element.is_integer:
        searched = [{"search": "auto_round_percents"}] if RECIPES[name].block_rows == 1 else []
        for changes in (*searched, {"sign": "unsigned_zero"}, {"nan_code": 3}):
            agree(fp4kit.quantize, tiny_scales(np.dtype(np.float32), 448), replace(RECIPES[name], **changes))


matplotlib.use("Agg")
RULES = {"if4-fouroversix": "mse", "if4-fouroversix-mae": "mae", "if4-fouroversix-absmax": "max"}
NAMES_IF4 = [*RULES]
R = RECIPES["if4-fouroversix"]
ONE, SIX, RANGE = np.float32(1), np.float32(6), np.float32(2688)


def error_of(difference, rule):
    """Return the errors of blocks (rows, 16), added in eight lanes first, as PyTorch does on a CPU."""
    if rule == "max":
        return np.abs(difference).max(-1)
    terms = difference * difference if rule == "mse" else np.abs(difference)
    lanes = terms[:, :8] + terms[:, 8:]
    total = lanes[:, 0]
    for i in range(1, 8):
        total = total + lanes[:, i]
    return total


def stated(x, rule):
    """Return (codes, scales, values, float32 values) of blocks x (rows, 16), finite and not all zero.

    No scaled element may be 7 or more. The last two results are the decoded values of the two decode rules.
    """
    x = x.astype(np.float32)
    amax = np.abs(x).max()
    scales = statements.nearest(np.abs(x).max(-1) / SIX * (RANGE / amax), statements.E4M3)
    scale = statements.E4M3[scales][:, None]
    factor = np.where(scale == 0, 0, ONE / (ONE / (RANGE / amax) * np.where(scale == 0, ONE, scale)))
    y = x * factor.astype(np.float32)
    magnitudes = statements.nearest(np.abs(y), statements.E2M1)
    floats = statements.E2M1[magnitudes] * np.sign(y)
    integers = np.rint(np.clip(y * np.float32(7 / 6), -7, 7))
    step = np.float32(6 / 7)
    by_floats = error_of(floats * scale * amax / RANGE - x, rule)
    chosen = error_of(integers * scale * amax * step / RANGE - x, rule) < by_floats
    codes = np.where(chosen[:, None], integers.astype(int) & 15, magnitudes + 8 * (y < 0))
    half = np.where(chosen[:, None], (integers * step).astype(np.float16), floats)
    decoded = (half.astype(np.float32) * scale).astype(np.float16).astype(np.float32) * amax / RANGE
    wide = np.where(chosen[:, None], integers * step, floats) * scale * amax / RANGE
    return codes, np.where(chosen, scales + 128, scales), decoded, wide


def drawn(dtype, rows=400, seed=0):
    """Return blocks (rows, 16) of cubed normal and of uniform numbers, with amaxes from 2^-8 to 1. Row 0 is zero."""
    rng = np.random.default_rng(seed)
    x = np.where(np.arange(rows)[:, None] % 2, rng.standard_normal((rows, 16)) ** 3, rng.uniform(-1, 1, (rows, 16)))
    x = x / np.abs(x).max(-1, keepdims=True) * np.exp2(rng.uniform(-8, 0, (rows, 1)))
    x[0] = 0
    return x.astype(dtype)


def test_codes_and_values_are_those_of_an_independent_statement():
    for dtype in FLOATS:
        x = drawn(dtype)
        for name, rule in RULES.items():
            codes, scales, decoded, wide = stated(x, rule)
            q = agree(fp4kit.quantize, x, name)
            assert np.array_equal(fp4kit.unpack(q.packed), codes) and np.array_equal(q.block_scale[:, 0], scales)
            assert 50 < (scales >= 128).sum() < 350
            assert np.array_equal(agree(fp4kit.dequantize, q, np.float32), decoded)
            in_float32 = replace(q, recipe=replace(q.recipe, decode_rule="fouroversix_float32"))
            assert np.array_equal(agree(fp4kit.dequantize, in_float32, np.float32), wide)
            assert not np.array_equal(decoded, wide)


def test_a_tie_of_errors_gives_e2m1():
    q = fp4kit.quantize(np.zeros((2, 16), np.float32), R)
    assert not q.packed.any() and not q.block_scale.any() and not fp4kit.dequantize(q).any()
    x = np.zeros((1, 32), np.float32)
    x[0, 1], x[0, 16:18] = -0.0, (6, -6)
    q = fp4kit.quantize(x, R)
    assert q.block_scale.tolist() == [[0, 126]] and not q.packed[0, :8].any() and q.packed[0, 8] == 0xF7


def test_special_numbers():
    """A NaN scale has no bit 7. Codes that are NaN are 11 in E2M1, and 0 in INT4."""
    x = np.ones((1, 32), np.float32)
    for value, scales in ((np.inf, [[127, 0]]), (np.nan, [[127, 127]])):
        x[0, 0] = value
        for name in NAMES_IF4:
            q = agree(fp4kit.quantize, x, name)
            assert q.block_scale.tolist() == scales and fp4kit.unpack(q.packed)[0, 0] == 11
    given = {"block_scale": np.uint8([[0xFE, 0x7E]]), "tensor_scale": np.float32(2**-8)}
    x[0] = np.tile([np.nan, np.inf, -np.inf, -0.0, 100, -100, 0.3, -0.3], 4)
    codes = fp4kit.unpack(agree(fp4kit.quantize, x, R, **given).packed)[0]
    assert codes[:8].tolist() == [0, 7, 9, 0, 7, 9, 0, 0] and codes[16:24].tolist()[:4] == [11, 11, 11, 0]


def test_every_code_under_every_scale():
    """Bit 7 selects the format, and the other bits are the scale, in all decode rules. NaN and unknown amaxes too."""
    values = np.where(np.arange(256)[:, None] >= 128, IF4.values_under(True), IF4.values_under(False))
    scales = np.arange(256, dtype=np.uint8) & 127
    with np.errstate(all="ignore"):
        product = values * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    for rule in ("product", "fouroversix", "fouroversix_float32", "stored_divisor", "te", "modelopt", "gguf"):
        q = all_bytes(replace(R, decode_rule=rule), np.dtype(np.float32))
        found = agree(fp4kit.dequantize, q, np.float32)
        if rule in ("product", "stored_divisor"):
            assert np.array_equal(found, product, equal_nan=True)
        for scale in (np.float32(1.1e-3), np.float32(2**-3), np.float32(0)):
            for dtype in FLOATS:
                agree(fp4kit.dequantize, replace(q, tensor_scale=scale), dtype)
    assert IF4.values_under(True)[8] == np.float32(-8) * np.float32(6 / 7)


def test_given_scales_select_the_format():
    x = drawn(np.float32, 64)
    q = fp4kit.quantize(x, R)
    for scales in (q.block_scale, q.block_scale & 127, q.block_scale | 128):
        again = agree(fp4kit.quantize, x, R, block_scale=scales, tensor_scale=q.tensor_scale)
        same = (scales == q.block_scale)[:, 0]
        assert np.array_equal(again.packed[same], q.packed[same])
        assert np.abs(fp4kit.dequantize(again) - x).max() < 0.15


@NEEDS_ENGINE
def test_the_compiled_engine_computes_all_blocks(monkeypatch):
    as_large_ones(monkeypatch)
    for name in NAMES_IF4:
        for dtype in FLOATS:
            x = drawn(dtype, 512, seed=7).reshape(64, 128)
            with counted(monkeypatch) as left:
                q = fp4kit.quantize(x, name)
                fp4kit.fake_quantize(x, name)
                fp4kit.dequantize(q, np.float16)
            assert left == []
            agree(fp4kit.fake_quantize, x, name)
            agree(fp4kit.quantize, np.asfortranarray(x), name, axis=0, hadamard=True)
            agree(fp4kit.quantize, x[:, :32].reshape(32, 64), replace(RECIPES[name], tensor_scaling="row"))
            agree(fp4kit.quantize, x[:37], replace(RECIPES[name], block=(16, 16)))
            agree(fp4kit.quantize, tiny_scales(dtype, 448), replace(RECIPES[name], rounding="rn", sign="signbit"))
    agree(fp4kit.quantize, over_scales(), R, tensor_amax=2688)


# ---- what users meet ----


def test_the_format():
    for other in (pickle.loads(pickle.dumps(IF4)), copy.copy(IF4), copy.deepcopy(IF4), replace(IF4)):
        assert other == IF4 and hash(other) == hash(IF4) and is_same(other, IF4)
    assert IF4 != E2M1 and not is_same(IF4, E2M1) and not is_same(E2M1, IF4) and repr(IF4) == "IF4"
    assert (IF4.bits, IF4.max, IF4.packing, IF4.is_integer) == (4, 6, (2, 1), False)
    variant = replace(R, id="mine", scale_max=256)
    assert as_data(variant)["element"] == "IF4" and from_data(as_data(variant)) == variant
    assert pickle.loads(pickle.dumps(variant)) == variant and as_data(R) == "if4-fouroversix"


def test_results_of_functions(tmp_path):
    x = drawn(np.float32, 64).reshape(16, 64)
    q, other = fp4kit.quantize(x, R), fp4kit.quantize(x, "if4-fouroversix-absmax")
    values = fp4kit.dequantize(q)
    assert np.array_equal(fp4kit.fake_quantize(x, R), values) and np.array_equal(fp4kit.dequantize(q[4:8]), values[4:8])
    fp4kit.save(tmp_path / "q.safetensors", {"w": q})
    assert fp4kit.compare(fp4kit.load(tmp_path / "q.safetensors")["w"], q).equal
    swizzled = fp4kit.swizzle(q, "swizzled_128x4")
    assert np.array_equal(fp4kit.dequantize(swizzled), values) and statistics(swizzled).counts.sum() == 64
    found = fp4kit.compare(q, other)
    assert found.codes[0] > 0 and found.max_steps is None and "step" not in str(found)
    assert str(fp4kit.identify(other, x)).startswith("if4-fouroversix-absmax made these bytes")
    assert fp4kit.requantize(q, "nvfp4-te").quantized.recipe.id == "nvfp4-te"


def test_statistics_and_figures_tell_the_formats_apart():
    x = drawn(np.float32, 64)
    x[5] = 0
    q = fp4kit.quantize(x, R)
    elements = IF4.values_of(fp4kit.unpack(q.packed)[:, None], q.block_scale)[:, 0]
    found = statistics(q)
    assert (found.zero_blocks, found.blocks, found.values, found.nan) == (2, 64, 1024, 0)
    assert found.saturated == (np.abs(elements) >= 6).sum() and (found.scales >= 0).all()
    assert "largest code" in str(q) and statistics(fp4kit.quantize(x[:0], R)).blocks == 0
    ax = plot.histogram(q)
    heights = [bar.get_height() for bar in ax.patches]
    counts = np.unique(elements + np.float32(0), return_counts=True)[1]
    assert np.allclose(sorted(h for h in heights if h), sorted(counts / 1024))
    line, least, mark = plot.error_against_scale(x[7], [R]).lines[:3]
    assert mark.get_xdata()[0] > 0 and mark.get_ydata()[0] >= least.get_ydata()[0] == line.get_ydata().min()
    matplotlib.pyplot.close("all")


def test_explain_shows_both_formats():
    x = drawn(np.float32, 64)
    q = fp4kit.quantize(x, R)
    for integer in (True, False):
        row = int(np.flatnonzero((q.block_scale[:, 0] >= 128) == integer)[3])
        found = fp4kit.explain(x, R, (row, 5))
        assert found["code"].format == ("INT4" if integer else "E2M1")
        assert found["code"].bits == fp4kit.unpack(q.packed)[row, 5]
        assert found["block scale without bit 7"].bits == q.block_scale[row, 0] & 127
        assert found["block scale"].bits == q.block_scale[row, 0] and (found["block scale"].value < 0) == integer
        assert (found["error of the block as INT4"].value < found["error of the block as E2M1"].value) == integer
        assert found["result"].value == fp4kit.dequantize(q)[row, 5]


def test_functions_without_a_result_for_if4_name_it():
    x = drawn(np.float32, 64).reshape(16, 64)
    q = fp4kit.quantize(x, R)
    flat, packed = x.reshape(-1), np.zeros((16, 32), np.uint8)
    calls = {
        "if4-fouroversix has no stochastic rounding": lambda: fp4kit.quantize(x, R, rounding="stochastic", seed=1),
        "block_amax was given, but if4-fouroversix": lambda: fp4kit.quantize(x, R, block_amax=np.ones((16, 4))),
        "if4-fouroversix cannot be searched, because its element is IF4": lambda: fp4kit.search_scales(x, R),
        "a is if4-fouroversix, which no matrix unit multiplies": lambda: fp4kit.matmul(q, q, unit="sm100"),
        "if4-fouroversix has 1x16 blocks": lambda: fp4kit.transpose(q),
        "if4-fouroversix chooses scales from whole blocks": lambda: fp4kit.partial_cast(
            flat, packed, np.ones((16, 4), np.float32), (16, 64), 0, R
        ),
        "element is IF4; needs block_rule": lambda: fp4kit.custom_recipe("mine", IF4, E4M3, 16),
        "scale is IF4": lambda: fp4kit.custom_recipe("mine", E2M1, IF4, 16),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    for name in ("values", "encode", "decode"):
        with pytest.raises(TypeError, match=f"IF4.{name}: bit 7 of each block scale says whether codes are E2M1 or"):
            found = getattr(IF4, name)
            found([1])
    with pytest.raises(TypeError, match=r"IF4.values: bit 7"):
        plot.number_line(IF4)
    assert np.array_equal(fp4kit.matmul(q, q, unit="dequantized").shape, (16, 16))


NAMES_MS_EDEN = ("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden")
F32 = np.float32
E2M1_MS_EDEN, E4M3_MS_EDEN = statements.E2M1.tolist(), statements.E4M3.tolist()


def rand(seed, index):
    """Return the number of Triton's tl.rand(seed, index), from Philox4x32-10 in Python integers."""
    word = triton_word(seed, index, 10)
    return F32(word if word < 2**31 else 2**32 - 1 - word) * F32(4.6566127342e-10)


def divide(a, b):
    """Return a / b as div.full.f32 computes it."""
    return divide_full(np.asarray([a], F32), np.asarray([b], F32))[0]


def element(y):
    """Return y rounded to E2M1, ties away from zero."""
    i = max(range(8), key=lambda i: (-abs(E2M1_MS_EDEN[i] - abs(float(y))), E2M1_MS_EDEN[i]))
    return F32(E2M1_MS_EDEN[i]) * F32(1 if y > 0 else -1)


def integer(y):
    """Return the value of y in IF4's integers."""
    return F32(np.rint(np.clip(y * F32(7 / 6), F32(-7), F32(7)))) * F32(6 / 7)


def summed(terms):
    """Return the sum of float32 terms, added in order."""
    total = terms[0]
    for term in terms[1:]:
        total = F32(total + term)
    return total


def rounded(scale, number):
    """Return a block scale rounded to E4M3, stochastically with a number, or to nearest if that is None."""
    if number is None:
        return statements.E4M3[statements.nearest(scale, statements.E4M3)]
    if scale >= 448:
        return F32(448)
    lower = max(v for v in E4M3_MS_EDEN if v <= scale)
    upper = E4M3_MS_EDEN[E4M3_MS_EDEN.index(lower) + 1]
    return F32(upper if number < divide(F32(scale - F32(lower)), F32(upper - lower)) else lower)


def stated_of_ms_eden(x, has_integers, seed, amax):
    """Return the values of finite rows x, whose length is a multiple of 32."""
    top = F32(6 / (17 / 16 * 0.93))
    tensor = F32(1) if amax == 0 else divide(divide(amax, 255.99), top)
    out, index = [], 0
    for unit in x.astype(F32).reshape(-1, 32) + F32(0):
        scales, ys, qs = [], [], []
        for block in unit.reshape(2, 16):
            scale = rounded(divide(divide(np.abs(block).max(), top), tensor), None) or F32(1)
            y = [divide(v, F32(scale * tensor)) for v in block]
            q = [element(v) for v in y]
            if has_integers:
                i = [integer(v) for v in y]
                errors = [summed([F32((v - w) * (v - w)) for v, w in zip(y, p, strict=True)]) for p in (i, q)]
                q = i if errors[0] < errors[1] else q
            scales, ys, qs = [*scales, scale], [*ys, *y], [*qs, *q]
        products = summed([F32(v * w) for v, w in zip(ys, qs, strict=True)])
        k = F32(1) if products == 0 else divide(summed([F32(v * v) for v in ys]), products)
        for b in range(2):
            scale = rounded(F32(scales[b] * k), rand(seed, index))
            out += [F32(F32(q * scale) * tensor) for q in qs[16 * b : 16 * b + 16]]
            index += 1
    return np.asarray(out, F32).reshape(x.shape).astype(x.dtype)


def rows_of(dtype, shape):
    """Return rows of different magnitude, with zeros of both signs and whole blocks of zeros."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-9, 3, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.1] = rng.choice([0.0, -0.0])
    x.reshape(-1, 16)[rng.random(x.size // 16) < 0.1] = -0.0
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES_MS_EDEN)
def test_values(name, dtype):
    for shape, seed in (((6, 64), 7), ((2, 3, 32), 2**40 + 1), ((5, 96), 3), ((1, 32), 0)):
        x = rows_of(dtype, shape)
        found = agree(fp4kit.fake_quantize, x, name, rounding="stochastic", seed=seed)
        assert_same_bits(
            found, stated_of_ms_eden(x, "if4" in name, seed, np.abs(x.astype(F32)).max()), str((shape, seed))
        )


@pytest.mark.parametrize("name", NAMES_MS_EDEN)
def test_given_amaxes_saturate_and_underflow(name):
    x = rows_of(np.float32, (4, 64))
    for amax in (1e-3, 0.5, 1e6, 1e30):
        found = agree(fp4kit.fake_quantize, x, name, tensor_amax=amax, rounding="stochastic", seed=3)
        assert_same_bits(found, stated_of_ms_eden(x, "if4" in name, 3, F32(amax)), str(amax))


@pytest.mark.parametrize("name", NAMES_MS_EDEN)
def test_numbers_that_are_not_finite(name):
    """An infinity or a NaN makes its 32 elements NaN, and through the tensor amax everything."""
    x = rows_of(np.float32, (4, 64))
    x[1, 40], x[2, 3] = np.inf, np.nan
    found = fp4kit.fake_quantize(x, name, tensor_amax=4.0, rounding="stochastic", seed=3)
    expected = np.zeros(x.shape, bool)
    expected[1, 32:] = expected[2, :32] = True
    assert (np.isnan(found) == expected).all()
    assert np.isnan(fp4kit.fake_quantize(x, name, rounding="stochastic", seed=3)).all()
    agree(fp4kit.fake_quantize, adversarial_blocks(np.float32)[:, :32], name, rounding="stochastic", seed=1)


@pytest.mark.parametrize("name", NAMES_MS_EDEN)
def test_float32_is_truncated_to_tf32(name, golden):
    """Elements without their 13 low bits give the recorded values, with the amax of the original elements."""
    end = f"__f32/fouroversix_ms_eden_{name.split('-')[0]}_seed7"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 12
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        truncated = statements.tf32(x)
        amax = np.abs(x).max()
        options = {"rounding": "stochastic", "seed": 7} | ({} if np.isnan(amax) else {"tensor_amax": amax})
        found = fp4kit.fake_quantize(truncated, name, **options)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        ours, theirs = (np.where(np.isnan(a), np.float32(np.nan), a) for a in (found, recorded))
        assert_same_bits(ours, theirs, prefix)


@pytest.mark.parametrize("name", NAMES_MS_EDEN)
def test_the_recorded_amax_of_the_next_step(name, golden):
    """fouroversix also returns the amax of the transformed elements, which leaves out NaN.

    In the product with an identity matrix, an infinity makes the other elements of its 32 NaN, because inf * 0 is NaN.
    """
    end = f"fouroversix_ms_eden_{name.split('-')[0]}_seed7"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/next_amax") if prefix.endswith(end)]
    assert len(prefixes) == 33
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        wide = x.astype(np.float32)
        if x.dtype == np.float32:
            wide = statements.tf32(x)
        with np.errstate(invalid="ignore"):
            transformed = wide.reshape(-1, 32) @ np.eye(32, dtype=np.float32)
        known = np.where(np.isnan(transformed), np.float32(0), transformed)
        assert_same_bits(fp4kit.amax(known), golden.get("triton_h100", f"{prefix}/next_amax")[0], prefix)


def test_the_mean_is_unbiased():
    """The mean over seeds approaches x more closely than rounding to nearest does."""
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    means = np.mean(
        [
            fp4kit.fake_quantize(x, NAMES_MS_EDEN[0], rounding="stochastic", seed=s).astype(np.float64)
            for s in range(64)
        ],
        axis=0,
    )
    # Along x, the projection of the result is x itself, up to the noise of rounding scales.
    assert abs((means * x).sum() / (x.astype(np.float64) ** 2).sum() - 1) < 2e-3
    plain = fp4kit.fake_quantize(x, "nvfp4-fouroversix-6").astype(np.float64)
    assert abs((plain * x).sum() / (x.astype(np.float64) ** 2).sum() - 1) > 4e-3


def test_errors():
    x = np.zeros((4, 48), np.float32)
    with pytest.raises(ValueError, match=r"axis -?1 has length 48; nvfp4-fouroversix-ms-eden needs a multiple of 32"):
        fp4kit.fake_quantize(x, NAMES_MS_EDEN[0], rounding="stochastic", seed=1)
    x = np.zeros((4, 64), np.float32)
    with pytest.raises(ValueError, match=r"stochastic rounding needs seed: an int$"):
        fp4kit.fake_quantize(x, NAMES_MS_EDEN[0], rounding="stochastic")
    with pytest.raises(ValueError, match=r"seed is an array; .* needs an int, because scales are random too"):
        fp4kit.fake_quantize(x, NAMES_MS_EDEN[0], rounding="stochastic", seed=np.zeros((4, 64), np.uint8))
    r = RECIPES[NAMES_MS_EDEN[0]]
    with pytest.raises(ValueError, match="'ms_eden' and fake_rule 'ms_eden' or 'ms_eden_if4' need each other"):
        replace(r, stochastic="te")
    with pytest.raises(ValueError, match="'ms_eden' and fake_rule"):
        replace(RECIPES["nvfp4-te"], stochastic="ms_eden")
    for fields in ({"fake_only": False}, {"block": (1, 64)}, {"block": (1, 24)}):
        with pytest.raises(ValueError, match="needs fake_only and a number of columns that divides 32"):
            replace(r, **fields)
