"""Test Codebook, and MX4, the elements whose pairs share a microexponent."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, E2M1, E4M3, E8M0, MX4, NF4, Codebook, ElementFormat, is_same
from fp4kit.recipes.table import as_data, from_data

WRONG = {  # maps a case to the arguments, the error and its text
    "a number": ({"table": 3}, TypeError, "table is 3; needs two to sixteen numbers"),
    "text": ({"table": "01"}, TypeError, "table is '01'; needs two to sixteen numbers"),
    "bools": ({"table": [True, 1]}, TypeError, "table holds True; needs numbers"),
    "rows": ({"table": [[0, 1]]}, TypeError, r"table holds \[0, 1\]; needs numbers"),
    "one value": ({"table": [1]}, ValueError, "table has 1 values; needs two to sixteen"),
    "17 values": ({"table": range(17)}, ValueError, "table has 17 values; needs two to sixteen"),
    "zeros": ({"table": [0, -0.0]}, ValueError, "every value of table is 0"),
    "NaN": ({"table": [0, np.nan]}, ValueError, "table holds nan; needs 0, or magnitudes from 2"),
    "infinity": ({"table": [0, np.inf]}, ValueError, "table holds inf; needs 0, or magnitudes from 2"),
    "too small": ({"table": [1, 2.0**-101]}, ValueError, "needs 0, or magnitudes from 2"),
    "underflow": ({"table": [1, 1e-60]}, ValueError, "needs 0, or magnitudes from 2"),
    "too large": ({"table": [1, 2.0**101]}, ValueError, "needs 0, or magnitudes from 2"),
    "no identifier": ({"table": [0, 1], "name": "a b"}, ValueError, "name is 'a b'; needs an identifier"),
    "the name of a format": ({"table": [0, 1], "name": "E2M1"}, ValueError, "not the name of another format"),
    "the name of a codebook": ({"table": [0, 1], "name": "NF4"}, ValueError, "not the name of another format"),
    "a number as name": ({"table": [0, 1], "name": 4}, TypeError, "name is 4; needs a str"),
}
CODEBOOKS = (
    NF4,
    BNB_FP4,
    Codebook([3, -1, 0.5], name="Short"),
    Codebook([2.0**100, -(2.0**-100), 2.0**-100, 1, 1, 1], name="Wide"),
    Codebook(np.linspace(-1, 1, 16, dtype=np.float16)[::-1], name="Falling"),
)
by_name = pytest.mark.parametrize("book", CODEBOOKS, ids=repr)


@together("case", WRONG)
def test_wrong_tables(case):
    arguments, error, text = WRONG[case]
    with pytest.raises(error, match=f"^Codebook.*{text}"):
        Codebook(**arguments)


@by_name
def test_values(book):
    count = len(book.table)
    assert book.values.dtype == np.float32 and book.values.tolist()[:count] == [*book.table]
    assert set(book.values.tolist()[count:]) <= {book.table[-1]}
    assert book.max == np.abs(book.values).max() and book.bits == 4 and book.packing == (2, 1)
    assert not book.is_integer and book.sign_bit == 0
    for array in (book.values, book.order, book.midpoints, book.magnitudes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert_same_bits(book.decode(np.arange(16)), book.values)


@by_name
def test_encoding_is_to_the_nearest_value(book):
    """Every code, every midpoint and the float32 numbers beside them are encoded as a search of all values does."""
    v = book.values[: len(book.table)].astype(np.float64)
    means = ((v[:, None] + v) / 2).ravel().astype(np.float32)
    x = np.unique(_beside(means))
    codes = book.encode(x)
    assert codes.dtype == np.uint8 and codes.max() < len(v)
    with np.errstate(over="ignore"):
        distance = np.abs(v[codes] - x.astype(np.float64))
        least = np.abs(v[:, None] - x.astype(np.float64)).min(axis=0)
        mean_is_exact = np.isin(x, means)  # the mean is rounded to float32, so beside it either neighbor may be nearer
    assert (distance[~mean_is_exact] <= least[~mean_is_exact] * (1 + 2.0**-20)).all()
    assert (np.diff(v[codes]) >= 0).all()
    ascending = np.sort(v)
    for low, high in pairwise(ascending):
        if low < high:
            mean = np.float32((low + high) / 2)
            assert v[book.encode(mean)] == low and v[book.encode(np.nextafter(mean, np.float32(np.inf)))] == high


def _beside(numbers):
    """Return float32 numbers and their two neighbors."""
    infinity = np.float32(np.inf)
    return np.concatenate([numbers, np.nextafter(numbers, infinity), np.nextafter(numbers, -infinity)])


@by_name
def test_special_numbers(book):
    assert book.values[book.encode(np.inf)] == book.values.max() == book.values[book.encode(np.nan)]
    assert book.values[book.encode(-np.inf)] == book.values.min()
    assert book.encode(-0.0) == book.encode(0.0) and book.encode(np.nan) == book.nan_code == book.max_code


def test_equal_values_are_told_apart_by_the_order_of_codes():
    book = Codebook([0, 1, 0, 0])
    assert book.encode([-0.1, 0, -0.0, 1e-30, 0.5, 0.6]).tolist() == [0, 0, 0, 3, 3, 1]
    assert BNB_FP4.encode([0.0, 1e-9, -1e-9]).tolist() == [0, 8, 0]


def test_encode_takes_no_other_rounding():
    for options in ({"rounding": "rz"}, {"rounding": "rs", "random": np.zeros(1, np.uint8)}):
        with pytest.raises(ValueError, match=r"NF4.encode: NF4 is a table of values; needs rounding 'rn'"):
            NF4.encode([0.5], **options)
    with pytest.raises(TypeError, match=r"NF4.encode: saturate is 'yes'"):
        NF4.encode([0.5], saturate="yes")
    assert NF4.encode([0.5], saturate=False) == NF4.encode(0.5)


@by_name
def test_codebooks_are_values(book):
    copies = [pickle.loads(pickle.dumps(book, p)) for p in range(2, 6)]
    for other in (*copies, copy.copy(book), copy.deepcopy(book), Codebook(book.table, name=book.name), replace(book)):
        assert other == book and hash(other) == hash(book) and is_same(other, book)
        assert_same_bits(other.values, book.values)
    renamed = replace(book, name="Other")
    assert renamed != book and is_same(renamed, book) and not is_same(book, E2M1) and not is_same(E2M1, book)
    assert replace(book, table=(0, 1), name="Other") != renamed != ElementFormat("Other", 2, 1, 1)


R = fp4kit.custom_recipe("my-mx4", MX4, E8M0, block=16, scale_rounding="down")


def by_the_paper(x):
    """Return the values that "With Shared Microexponents" gives rows of blocks of 16, in float64: (rows, 16)."""
    pairs = x.astype(np.float64).reshape(len(x), 8, 2)
    pair, block = np.abs(pairs).max(2, keepdims=True), np.abs(pairs).max((1, 2), keepdims=True)
    exponent = np.frexp(block)[1] - 1
    microexponent = np.minimum(exponent - (np.frexp(pair)[1] - 1), 1)
    step = 2.0 ** (exponent - microexponent - 1)
    return np.copysign(np.minimum(np.rint(np.abs(pairs) / step), 3) * step, pairs).reshape(x.shape)


def test_values_are_those_of_the_paper():
    """Normal numbers, ties and zeros, in blocks whose exponents differ, at all sizes with scales from 2^-126 on."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, 16)) * 2.0 ** rng.integers(-3, 3, (2048, 16))
    x[::2] = np.round(x[::2] * 8) / 8
    x[::3] *= rng.random((len(x[::3]), 16)) < 0.5
    x[:, 0] = np.where(np.abs(x).max(1) > 0, x[:, 0], 1)
    x = (x * 2.0 ** rng.integers(-115, 115, (2048, 1))).astype(np.float32)
    q = fp4kit.quantize(x, R)
    assert_same_bits(fp4kit.dequantize(q), by_the_paper(x).astype(np.float32))
    assert_same_bits(fp4kit.fake_quantize(x, R), fp4kit.dequantize(q))
    microexponents = fp4kit.unpack(q.packed) >> 3
    assert np.array_equal(microexponents[:, ::2], microexponents[:, 1::2]) and 0 < microexponents.mean() < 1
    assert np.array_equal(q.block_scale[:, 0], np.frexp(np.abs(x).max(1))[1] + 126)


def test_every_code_is_decoded_and_encoded_again():
    values = MX4.decode(np.arange(16))
    assert values.tolist() == [*MX4.table] and np.signbit(values[[4, 12]]).all()
    assert MX4.max == 1.5 and MX4.amax_target == 1 and MX4.bits == 4 and E2M1.amax_target == E2M1.max
    low, high = np.meshgrid(np.arange(8), np.arange(8))
    for first in (0, 8):
        pairs = np.stack([low.ravel(), high.ravel()], -1) + first
        is_reached = (np.abs(values[pairs]) >= 1).any(1) if first == 0 else slice(None)
        assert np.array_equal(MX4.encode(values[pairs][is_reached]), pairs[is_reached])


def test_special_numbers_of_mx4():
    pairs = [[np.nan, 0.3], [np.inf, -0.3], [-np.inf, np.nan], [-0.0, 0.0], [3e38, -1e-30], [-np.nan, 0.1]]
    assert MX4.encode(pairs).tolist() == [[3, 1], [3, 5], [7, 3], [12, 8], [3, 4], [3, 0]]
    x = np.zeros((1, 16), np.float32)
    assert fp4kit.quantize(x, R).block_scale.tolist() == [[0]] and not fp4kit.fake_quantize(x, R).any()


def test_the_format_is_a_value_and_is_stored_by_name(tmp_path):
    for other in (pickle.loads(pickle.dumps(MX4)), copy.copy(MX4), copy.deepcopy(MX4), replace(MX4)):
        assert other == MX4 and hash(other) == hash(MX4) and is_same(other, MX4)
    assert Codebook(MX4.table) != MX4 and repr(MX4) == "MX4"
    assert as_data(R)["element"] == "MX4" and from_data(as_data(R)) == R
    q = fp4kit.quantize(np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32), R)
    fp4kit.save(tmp_path / "q.safetensors", {"w": q})
    again = fp4kit.load(tmp_path / "q.safetensors")["w"]
    parts = fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe=R, dtype=np.float32)
    assert again.recipe == R and np.array_equal(again.packed, q.packed)
    assert_same_bits(fp4kit.dequantize(parts), fp4kit.dequantize(again))


def test_explain_shows_the_microexponent():
    x = np.array([[1.5, 0, 0.4, 0.7] * 4], np.float32)
    text = str(fp4kit.explain(x, R, (0, 3)))
    assert "microexponent of the pair" in text and "1011" in text


def test_what_does_not_fit_is_refused_by_name():
    x = np.ones((16, 32), np.float32)
    q = fp4kit.quantize(x, R)
    for call, text in {
        lambda: fp4kit.custom_recipe("mine", MX4, E4M3, 16): "scale is E4M3; needs E8M0 for elements MX4",
        lambda: fp4kit.custom_recipe("mine", MX4, "float32", 16): "scale is None; needs E8M0 for elements MX4",
        lambda: fp4kit.custom_recipe("mine", MX4, E8M0, (16, 16)): "needs blocks of one row, in which pairs",
        lambda: replace(fp4kit.recipe("mxfp4-ocp"), element=MX4): "element is MX4; is a table of values",
        lambda: MX4.encode([1.0]): r"MX4.encode: x has shape \(1,\); needs pairs",
        lambda: MX4.encode(1.0): r"MX4.encode: x has shape \(\); needs pairs",
        lambda: MX4.encode([1.0, 2.0], "rz"): "needs rounding 'rn' and no random bits",
        lambda: fp4kit.quantize(x, R, rounding="stochastic", seed=1): "has no stochastic rounding",
        lambda: fp4kit.partial_cast(
            x.ravel(), q.packed.copy(), np.ones((16, 2), np.float32), x.shape, 0, R
        ): "partial_cast: pairs of MX4 elements share a bit; use quantize on the whole matrix",
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
