"""Test compare: it counts differences correctly for arrays and Quantized, and prints them."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import lcm

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive, half
from inputs import INPUTS, NAMES, ordinary
from together import together

import fp4kit
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.ops import compare as compare_values
from fp4kit.recipes import RECIPES

X = (np.random.default_rng(7).standard_normal((64, 128)) * 0.02).astype(ml_dtypes.bfloat16)


def test_equal() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    same = fp4kit.compare(q, fp4kit.swizzle(q, "swizzled_128x4"))
    assert same and same.equal and same.first is None and same.sqnr == np.inf
    assert same.codes == (0, X.size) and same.scales == (0, X.size // 16) and same.tensor_scales == (0, 1)
    assert str(same).startswith("a (nvfp4-te) and b (nvfp4-te): equal in every bit")


def test_equal_bits_whose_fields_differ_name_the_field() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    assert not fp4kit.compare(q, q).fields and q.equals(q)
    others = {
        "dtype": replace(q, dtype=np.dtype(np.float32)),
        "scale_layout": fp4kit.swizzle(q, "swizzled_128x4"),
        "recipe": replace(q, recipe=replace(q.recipe, rounding="rz")),
        "tensor_amax": fp4kit.quantize(X, "nvfp4-te", block_scale=q.block_scale, tensor_scale=q.tensor_scale),
    }
    for name, other in others.items():
        found = fp4kit.compare(q, other)
        assert found and not q.equals(other)
        assert [field.partition(":")[0] for field in found.fields] == [name]
        assert f"\n  {name:15}" in str(found) and str(found).endswith("which only a.equals(b) compares")


def test_one_code_and_one_scale() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    packed, scales = q.packed.copy(), q.block_scale.copy()
    packed[3, 5] ^= 0x10
    scales[9, 2] += 1
    other = replace(q, packed=packed, block_scale=scales)
    result = fp4kit.compare(q, other)
    assert result.codes[0] == 1 and result.scales[0] == 1 and not result
    a, b = fp4kit.dequantize(q, np.float32), fp4kit.dequantize(other, np.float32)
    assert result.values[0] == np.count_nonzero(a != b)
    assert result.first is not None and result.first[0] == (3, 11) and result.first[1:] == (a[3, 11], b[3, 11])
    assert result.sqnr == pytest.approx(
        10 * np.log10(np.sum(a.astype(float) ** 2) / np.sum((a.astype(float) - b) ** 2))
    )
    assert "different" in str(result) and "first          at (3, 11)" in str(result)


def test_arrays_ulp_nan_and_zero() -> None:
    a = np.array([1, 0.0, np.nan, -1], np.float32)
    b = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, np.nan, -1], np.float32)
    result = fp4kit.compare(a, b)
    assert result.values == (2, 4) and result.max_ulp == 1 and result.codes == (0, 0)
    assert "largest        1 ulp, |a - b| and SQNR are NaN, because a or b has a NaN" in str(result)
    assert "largest        |a - b| and SQNR are NaN" in str(fp4kit.compare(a, np.float32([1, 0.0, 2, -1])))
    wide = fp4kit.compare(np.float32([-1e-45]), np.float32([1e-45]))
    assert wide.max_ulp == 3  # -1, -0, +0, +1 in steps of the smallest subnormal


def test_formats_that_do_not_match_compare_values_only() -> None:
    result = fp4kit.compare(fp4kit.quantize(X, "nvfp4-te"), fp4kit.quantize(X, "mxfp4-ocp"))
    assert result.codes == (0, 0) and result.values[1] == X.size
    assert fp4kit.compare(fp4kit.quantize(X, "nvfp4-te-2d"), fp4kit.quantize(X, "nvfp4-te-2d", axis=0)).equal


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=re.escape("compare: a has shape (2,) and b (3,); needs the same shape")):
        fp4kit.compare(np.ones(2, np.float32), np.ones(3, np.float32))


FLOATS = "float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu float6_e2m3fn float4_e2m1fn >f4 >f8".split()


@together("dtype", FLOATS)
def test_narrow_floats_compare_as_numbers(dtype) -> None:
    """Each value of a narrow format equals the same value in float32 and float64, and is 1 ulp from its neighbor."""
    if dtype.startswith(">"):
        x = np.array([1.5, -3.0, np.inf, np.nan], dtype)
    else:
        dtype = np.dtype(dtype) if dtype == "float16" else np.dtype(getattr(ml_dtypes, dtype))
        x = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
        x = x[:16] if "float4" in dtype.name else x[:64] if "float6" in dtype.name else x
    for wide in (np.float32, np.float64):
        with np.errstate(invalid="ignore"):  # signaling NaN
            y = x.astype(wide)
        assert fp4kit.compare(x, y).equal and fp4kit.compare(y, x).equal
    shifted = np.roll(x, 1)
    a, b = x.astype(np.float32), shifted.astype(np.float32)
    assert fp4kit.compare(x, shifted).values[0] == np.count_nonzero(
        (a.view("i4") != b.view("i4")) & ~(np.isnan(a) & np.isnan(b))
    )


def test_float64_is_compared_in_its_own_precision() -> None:
    a = np.array([1.0, 1.0, 5e-324, -0.0, -1.5, 0.1])
    b = np.array([1.0, 1 + 2.0**-52, 0.0, 0.0, 1.5, np.float32(0.1)])
    result = fp4kit.compare(a, b)
    order = np.int64(np.float64(1.5).view(np.int64))
    assert result.values == (5, 6) and result.max_ulp == 2 * int(order) + 1 and result.max_error == 3
    assert result.first == ((1,), 1.0, 1 + 2.0**-52)
    assert "first          at (1,): 1 and 1.0000000000000002" in str(result)
    assert fp4kit.compare(np.array([0.1]), np.array([0.1], np.float32)).max_ulp == abs(
        int(np.float64(0.1).view(np.int64)) - int(np.float64(np.float32(0.1)).view(np.int64))
    )
    ends = fp4kit.compare(np.array([-np.inf]), np.array([np.inf]))
    assert ends.max_ulp == 2 * int(np.float64(np.inf).view(np.int64)) + 1  # more than an int64 holds


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-40, 1.0, 1e160, 1e300])
def test_sqnr_of_float64_of_any_size(size) -> None:
    """compare gives the right SQNR even if squares of the values, such as 1e-200 and 1e200, are beyond float64."""
    a = np.array([3.0, -4.0, 12.0]) * size
    b = a * (1 - 2.0**-10)
    signal, noise = (sum(Fraction(v) ** 2 for v in part.tolist()) for part in (a, a - b))
    expected = 10 * np.log10(float(signal / noise))
    assert fp4kit.compare(a, b).sqnr == pytest.approx(expected, rel=1e-12)


OTHERS = [np.zeros(3, t) for t in (np.int64, np.uint8, bool, complex, [("a", "f4")], ml_dtypes.int4, "M8[s]", "g")]


@together("x", [*OTHERS, np.array(["a"] * 3), np.array([None] * 3)], ids=lambda x: str(x.dtype))
def test_arrays_of_other_dtypes_are_rejected(x) -> None:
    q = fp4kit.quantize(np.zeros((1, 16), np.float32), "nvfp4-te")
    for a, b, name in ((x, np.zeros(3, np.float32), "a"), (np.zeros(3), x, "b"), (x, x, "a"), (q, x, "b")):
        with pytest.raises(TypeError, match=f"^{re.escape(f'compare: {name} is {x.dtype}; needs a Quantized, or')}"):
            fp4kit.compare(a, b)


def whole(x, y):
    """Return (differing values, first index or None, largest ulp, largest error, SQNR in dB) of two float32 arrays.

    They are computed on the whole arrays, whereas fp4kit.compare works box by box (a box is a part of the arrays).
    """
    differ = (x.view(np.uint32) != y.view(np.uint32)) & ~(np.isnan(x) & np.isnan(y))
    first = tuple(int(i) for i in np.argwhere(differ)[0]) if differ.any() else None
    key = [np.where(b < 0, -(b & 0x7FFFFFFF) - 1, b) for b in (v.view(np.int32).astype(np.int64) for v in (x, y))]
    with np.errstate(all="ignore"):
        error = np.abs(x.astype(np.float64) - y)
        sqnr = 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum(error**2))
    numbers = differ & ~np.isnan(x) & ~np.isnan(y)
    return (
        int(differ.sum()),
        first,
        int(np.abs(key[0] - key[1])[numbers].max(initial=0)),
        float(np.max(error)),
        float(sqnr),
    )


def assert_as_whole(result, x, y) -> None:
    """Assert that `result`, the comparison of x and y box by box, equals the comparison of the whole arrays."""
    differing, first, ulp, error, sqnr = whole(np.array(x, order="C"), np.array(y, order="C"))
    assert result.values == (differing, x.size) and result.max_ulp == ulp
    assert (result.first[0] if result.first else None) == first
    if differing:
        assert result.first[1:] == pytest.approx((x[first], y[first]), nan_ok=True)
        assert result.max_error == error or np.isnan([result.max_error, error]).all()
        assert result.sqnr == pytest.approx(sqnr, rel=1e-12, nan_ok=True)


@pytest.fixture(params=[7, *exhaustive([1, 64, 1000])], ids=lambda n: f"boxes of {n}")
def small_boxes(request, monkeypatch):
    monkeypatch.setattr(compare_values, "BOX_ELEMENTS", request.param)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (50,), (5, 33), (3, 0, 2), (4, 3, 17), (2, 3, 4, 5)])
def test_boxes_cover_everything_once(small_boxes, shape) -> None:
    for multiples in ([1] * len(shape), [3] * len(shape)):
        seen = np.zeros(shape, int)
        for box in compare_values.boxes(shape, multiples):
            seen[box] += 1
            assert all(part.start % m == 0 for part, m in zip(box, multiples, strict=True))
            assert seen[box].size <= max(compare_values.BOX_ELEMENTS, np.prod(multiples))
        assert (seen == 1).all()


@pytest.mark.parametrize("data", INPUTS)
def test_arrays_in_boxes(small_boxes, data) -> None:
    x = INPUTS[data].astype(np.float32)[:40, :48]
    y = x.copy()
    y[3, 5:9] += 1
    y[30:, ::7] *= -1.25
    for a, b in (
        (x, y),
        (x.T, y.T),
        (x[::-1, ::3], y[::-1, ::3]),
        (x.reshape(4, 10, 48), y.reshape(4, 10, 48)),
        (x[0], y[0]),
    ):
        assert_as_whole(fp4kit.compare(a, b), a, b)
    assert_as_whole(fp4kit.compare(x[3, 5], y[3, 5]), np.asarray(x[3, 5]), np.asarray(y[3, 5]))
    same = fp4kit.compare(x, x)
    assert same.equal and same.sqnr == np.inf and same.max_error == 0


@pytest.mark.parametrize("name", half(NAMES))
@pytest.mark.parametrize("small_boxes", [40, *exhaustive([1000])], indirect=True)
def test_quantized_in_boxes(small_boxes, name) -> None:
    """Comparing two Quantized box by box gives the result of comparing them at once.

    Any recipe, axis, layout and amax is tried.
    """
    r = RECIPES[name]
    unit = lcm(r.length_multiple, r.block_rows)
    x = np.resize(ordinary(5), (2, unit, 2 * unit) if unit > 2 else (2, 10, 34))
    options = [{"axis": -1}, {"axis": 1}, {"axis": -1, "scale_layout": "swizzled_128x4"}]
    if r.length_multiple == 1 or r.length_multiple == 2:
        options.append({"axis": 0})
    if r.tensor_scaling == "tensor":
        options.append({"axis": -1, "tensor_amax": np.float32([3, 50])})
    for o in options:
        if r.scale is None and "scale_layout" in o:
            continue
        q = fp4kit.quantize(x, name, **o)
        packed = q.packed.copy()
        packed[1, -1, 3:] ^= 1
        other = replace(q, packed=packed)
        a, b = fp4kit.dequantize(q, np.float32), fp4kit.dequantize(other, np.float32)
        result = fp4kit.compare(q, other)
        assert_as_whole(result, a, b)
        assert result.codes == (packed[1, -1, 3:].size, x.size)
        assert fp4kit.compare(q, a).equal and fp4kit.compare(b.astype(np.float64), other).equal
    rows, columns = fp4kit.quantize(x, name), fp4kit.quantize(x, name, axis=1)
    assert_as_whole(fp4kit.compare(rows, columns), *(fp4kit.dequantize(q, np.float32) for q in (rows, columns)))


def test_memory_is_bounded() -> None:
    """Comparing 2^21 values allocates less than 6 MiB.

    This holds for arrays, and for a Quantized with one long row, along axis 0 or with swizzled scales.
    """
    x = np.resize(X.astype(np.float32), (512, 4096))
    y = x * np.float32(1.001)
    half = x.astype(ml_dtypes.bfloat16)
    long = fp4kit.quantize(half.reshape(-1), "nvfp4-te")
    q, columns = fp4kit.quantize(half, "nvfp4-te"), fp4kit.quantize(half, "nvfp4-te", axis=0)
    pairs = {
        "arrays": (x, y),
        "transposed": (x.T, y.T),
        "float64": (x, half),
        "long": (long, half.reshape(-1)),
        "axes": (q, columns),
        "swizzled": (fp4kit.swizzle(q, "swizzled_128x4"), q),
    }
    for name, (a, b) in pairs.items():
        assert any(peak_of(lambda a=a, b=b: fp4kit.compare(a, b)) < 6 << 20 for _ in range(2)), name


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak number of bytes that Python and NumPy hold during the call.

    The count covers the whole process, so other threads of a test may add to it.
    """
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted({*NAMES} & {r.recipe for r in ROWS if not r.fake}))
def test_identify_finds_the_recipe(name) -> None:
    x = np.resize(X, (64, 128))
    found = fp4kit.identify(fp4kit.quantize(x, name), x)
    assert name in found.exact
    assert [m.equal for m in found] == sorted((m.equal for m in found), reverse=True)
    assert name in str(found) or f" or {len(found.exact) - 1} others that agree" in str(found)


def test_identify_tells_apart_and_survives_a_missing_amax() -> None:
    q = replace(fp4kit.quantize(X, "nvfp4-compressed-tensors"), tensor_amax=None)
    assert fp4kit.identify(q, X).matches[0].recipe == "nvfp4-compressed-tensors"
    q = replace(fp4kit.quantize(X, "nvfp4-modelopt", scale_layout="swizzled_8x4", tensor_amax=1.0), tensor_amax=None)
    assert "nvfp4-modelopt" in fp4kit.identify(q, X).exact


def test_the_truth_of_an_identification_is_that_of_exact() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    assert fp4kit.identify(q, X) and not fp4kit.identify(q, X * 2)


def test_identify_needs_the_array() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    with pytest.raises(
        ValueError,
        match=re.escape("identify: x has shape (64, 64) and q (64, 128); needs the array that q was made from"),
    ):
        fp4kit.identify(q, X[:, :64])


# ---- steps of the element format ----


@pytest.mark.parametrize(
    "name", ["nvfp4-te", "mxfp6-torchao-floor-e2m3", "mxfp8-te", "mxfp8-te-e5m2", "int8-modelopt", "int4-modelopt"]
)
def test_steps_between_every_pair_of_codes(name) -> None:
    """The distance of two codes is that of their values in the sorted list of the format's numbers.

    In this list, -0 equals 0.
    """
    r = RECIPES[name]
    numbers = sorted({float(v) for v in r.element.values if not np.isnan(v)})
    place = [None if np.isnan(v) else numbers.index(float(v)) for v in r.element.values]
    x = np.zeros((2**r.element.bits, 32), np.float32)
    q = fp4kit.quantize(x, r)

    def with_code(code):
        codes = np.zeros(x.shape, np.uint8)
        codes[1, 7] = code
        return replace(q, packed=fp4kit.pack(codes) if r.is_packed else codes)

    for a in range(2**r.element.bits)[:: 1 if r.is_packed else 7]:
        for b in range(2**r.element.bits)[:: 1 if r.is_packed else 5]:
            result = fp4kit.compare(with_code(a), with_code(b))
            known = None not in (place[a], place[b])
            assert result.max_steps == (abs(place[a] - place[b]) if known else 0)


def test_steps_are_printed_where_codes_differ() -> None:
    q = fp4kit.quantize(X, "nvfp4-te")
    packed, scales = q.packed.copy(), q.block_scale.copy()
    scales[9, 2] += 1
    text = str(fp4kit.compare(q, replace(q, block_scale=scales)))
    assert re.search(r"largest        [\d,]+ ulp, ", text) and "step" not in text
    packed[3, 5] = packed[3, 5] & 0xF0 | 0x0
    other = replace(q, packed=packed & 0x0F | 0x10)
    result = fp4kit.compare(q, other)
    assert f"largest        {result.max_steps} steps of E2M1, |a - b| = " in str(result) and "ulp" not in str(result)
    assert result.max_steps > 1 and result.max_ulp > 10**6
    assert fp4kit.compare(X, X).max_steps is None and fp4kit.compare(q, q).max_steps == 0
    assert fp4kit.compare(q, fp4kit.quantize(X, "mxfp4-ocp")).max_steps is None


IDS = ["nvfp4-te", "nvfp4-compressed-tensors", "nvfp4-modelopt-fake", "mxfp4-ocp", "nvfp4-te"]


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)


@pytest.mark.parametrize("axis", [-1, 0])
def test_shares_are_those_of_compare(x, axis):
    found = fp4kit.compare_recipes(x, IDS, axis=axis)
    kinds = [fp4kit.recipe(id).fake_only for id in IDS]
    results = [
        fp4kit.fake_quantize(x, id, axis=axis) if fake else fp4kit.quantize(x, id, axis=axis)
        for id, fake in zip(IDS, kinds, strict=True)
    ]
    for i, a in enumerate(results):
        assert found.codes[i, i] == found.values[i, i] == 0 and found.first[i, i] is None
        for j, b in enumerate(results[:i]):
            pair = fp4kit.compare(a, b)
            for shares, (differ, of) in (
                (found.codes, pair.codes if a is not b else (0, 1)),
                (found.scales, pair.scales),
                (found.values, pair.values),
            ):
                assert np.array_equal(shares, shares.T, equal_nan=True)
                if of:
                    assert shares[i, j] == differ / of, (IDS[i], IDS[j])
            assert (found.first[i, j] is None) == (pair.values[0] == 0)
    assert found.first[0, 4] is None and np.isnan(found.codes[0, 2]) and np.isnan(found.scales[0, 3])


def test_first_is_the_first_element_whose_code_differs(x):
    x = x.astype(ml_dtypes.bfloat16)  # compressed-tensors rounds its tensor scale to this dtype
    found = fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-compressed-tensors"], axis=0)
    a, b = (fp4kit.unpack(fp4kit.quantize(x, id, axis=0).packed).T for id in found.recipes)
    assert found.first[0, 1] == tuple(np.argwhere(a != b)[0]) and found.codes[0, 1] == np.mean(a != b) > 0


def test_codes_that_are_equal_leave_the_first_value():
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    found = fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-torchao"])
    assert found.codes[0, 1] == 0 < found.values[0, 1] and found.first[0, 1] == (0, 0)


def test_a_given_amax_reaches_recipes_with_a_tensor_scale(x):
    given = fp4kit.compare_recipes(x, ["nvfp4-te", "mxfp4-ocp", "nvfp4-flashinfer"], tensor_amax=np.float32(100))
    amax = fp4kit.quantize(x, "nvfp4-te", tensor_amax=np.float32(100))
    other = fp4kit.quantize(x, "nvfp4-flashinfer", tensor_amax=np.float32(100))
    assert given.codes[0, 2] == np.mean(fp4kit.unpack(amax.packed) != fp4kit.unpack(other.packed))


def test_distances_from_x_and_bits(x):
    nf4 = fp4kit.custom_recipe("my-nf4", fp4kit.formats.NF4, "bfloat16", block=64)
    found = fp4kit.compare_recipes(x, ["mxfp4-ocp", nf4, "mxfp4-fp-quant"])
    for i, r in enumerate(("mxfp4-ocp", nf4, "mxfp4-fp-quant")):
        expected = fp4kit.compare(x, fp4kit.fake_quantize(x, r))
        assert found.max_error[i] == expected.max_error and found.sqnr[i] == pytest.approx(expected.sqnr, abs=1e-9)
        assert found.relative_error[i] == pytest.approx(10 ** (-expected.sqnr / 20))
    assert found.bits_per_value[:2].tolist() == [4.25, 4.25] and np.isnan(found.bits_per_value[2])


def test_own_formats_and_block_sizes(x):
    """Codes are compared if the element formats are equal, and scales if the blocks are, whatever the block sizes."""
    f = fp4kit.formats
    made = [
        fp4kit.custom_recipe("nf4-64", f.NF4, "bfloat16", 64),
        fp4kit.custom_recipe("nf4-32", f.NF4, "float32", 32),
        fp4kit.custom_recipe("nf4-32-half", f.NF4, "float16", 32),
        fp4kit.custom_recipe("e2m1-tile", f.E2M1, f.E4M3, (4, 16), tensor_scale=True),
        fp4kit.custom_recipe("mx4", f.MX4, f.E8M0, 16, scale_rounding="down"),
        "nvfp4-te",
        "fp8-modelopt",
        "hif4-amct",
    ]
    found = fp4kit.compare_recipes(x, made, tensor_amax=np.float32(8))
    results = []
    for i, r in enumerate(map(fp4kit.recipe, made)):
        amax = {"tensor_amax": np.float32(8)} if r.tensor_scaling == "tensor" else {}
        results.append(fp4kit.quantize(x, r, **amax))
        expected = fp4kit.compare(x, results[i])
        assert found.sqnr[i] == pytest.approx(expected.sqnr, abs=1e-9) and found.max_error[i] == expected.max_error
        assert found.bits_per_value[i] == results[i].bits_per_value
    comparable = ~np.isnan(found.codes)
    groups = [(0, 1, 2), (3, 5), (4,), (6,), (7,)]
    assert np.argwhere(comparable).tolist() == sorted([i, j] for group in groups for i in group for j in group)
    assert found.codes[0, 1] == np.mean(fp4kit.unpack(results[0].packed) != fp4kit.unpack(results[1].packed)) > 0
    # Float32 block scales count as block scales, as explain names them. Two block sizes are not compared.
    assert found.scales[1, 2] == np.mean(results[1].tensor_scale != results[2].tensor_scale) > 0.5
    assert np.isnan(found.tensor_scales[1, 2]) and np.isnan(found.scales[0, 1]) and found.tensor_scales[3, 6] > 0
    pair = fp4kit.compare(results[1], results[2])
    assert pair.scales[0] / pair.scales[1] == found.scales[1, 2] and pair.tensor_scales == (0, 0)
    assert "  block scales" in str(pair) and "tensor scales" not in str(pair)
    assert fp4kit.compare(results[6], results[6]).tensor_scales == (0, 1)


def test_an_amax_per_row_reaches_recipes_with_scales_per_row(x):
    amax = np.abs(x).max(axis=-1) * 2
    found = fp4kit.compare_recipes(x, ["nvfp4-te-rowscaled", "mxfp4-ocp"], tensor_amax=amax)
    q = fp4kit.quantize(x, "nvfp4-te-rowscaled", tensor_amax=amax)
    assert found.sqnr[0] == pytest.approx(fp4kit.compare(x, q).sqnr, abs=1e-9)


def test_a_large_distance_in_ulp_is_not_printed(x):
    assert "ulp" not in str(fp4kit.compare(x, fp4kit.quantize(x, "nvfp4-te")))
    assert "1 ulp, |a - b|" in str(fp4kit.compare(np.float32([1]), np.nextafter(np.float32([1]), np.float32(2))))


def test_it_prints_a_matrix_and_a_table(x):
    found = fp4kit.compare_recipes(x, IDS[:2])
    assert str(found).startswith("Distance from x")
    assert "Codes that differ" in str(found) and "1 and 2" in str(found) and "<table" in found._repr_html_()
    assert repr(found) == "RecipeComparison(2 recipes; 0 of 1 pairs have equal values)"


def test_errors(x):
    with pytest.raises(TypeError, match="recipes is 'nvfp4-te'; needs a list of at least two recipes"):
        fp4kit.compare_recipes(x, "nvfp4-te")
    with pytest.raises(ValueError, match="recipes has 1 entries; needs at least two"):
        fp4kit.compare_recipes(x, ["nvfp4-te"])
    with pytest.raises(ValueError, match=r"compare_recipes: .*nvfp4"):
        fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-tea"])
