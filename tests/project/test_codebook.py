"""Test Codebook: which tables it accepts, and encoding and decoding against a search of all values."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from together import together

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, E2M1, NF4, Codebook, ElementFormat, is_same

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
