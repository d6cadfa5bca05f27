"""Test that formats, recipes and Quantized behave as values, and the formats Codebook and MX4."""

import copy
import multiprocessing
import pickle
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from exhaustive import half
from inputs import ORDINARY
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import (
    BLOCK_FORMATS,
    BNB_FP4,
    E2M1,
    E4M3,
    E8M0,
    ELEMENT_FORMATS,
    MX4,
    NF4,
    Codebook,
    ElementFormat,
    is_same,
)
from fp4kit.quantized.container import assembled
from fp4kit.recipes import RECIPES
from fp4kit.recipes.table import as_data, from_data

PICKLES = {f"protocol {p}": lambda a, p=p: pickle.loads(pickle.dumps(a, p)) for p in range(2, 6)}
COPIES = PICKLES | {"copy": copy.copy, "deepcopy": copy.deepcopy}
METHODS = [m for m in ("spawn", "fork", "forkserver") if m in multiprocessing.get_all_start_methods()]
VARIANT = replace(RECIPES["mxfp4-ocp"], id="mine", block=(1, 16), element=ElementFormat("Mine", 2, 1, 1))
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@copies
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS + BLOCK_FORMATS, ids=str)
def test_formats(fmt, copied):
    other = copied(fmt)
    assert other == fmt and hash(other) == hash(fmt) and {fmt: 1}[other] == 1 and not other != fmt
    for name in ("values", "magnitudes", "midpoints") if isinstance(fmt, ElementFormat) else ():
        assert_same_bits(getattr(other, name), getattr(fmt, name))
        with pytest.raises(ValueError, match="read-only"):
            getattr(other, name)[0] = 1


def test_equal_fields_are_an_equal_format():
    assert ElementFormat("E2M1", 2, 1, 1) == E2M1 and hash(ElementFormat("E2M1", 2, 1, 1)) == hash(E2M1)
    assert ElementFormat("E2M1", 2, 1, 2) != E2M1 != ElementFormat("E2M1b", 2, 1, 1)
    assert len(pickle.dumps(E2M1)) < 200  # no arrays are pickled


@copies
@together("r", [*RECIPES.values(), VARIANT], ids=lambda r: r.id)
def test_recipes(r, copied):
    other = copied(r)
    assert other == r and hash(other) == hash(r) and {r: 1}[other] == 1 and repr(other) == repr(r)
    assert (other is r) == (r is not VARIANT)


def test_a_recipe_of_the_table_pickles_small():
    assert max(len(pickle.dumps(r)) for r in RECIPES.values()) < 100
    r = replace(RECIPES["nvfp4-te"], sign="negative")  # another recipe with an existing id
    assert pickle.loads(pickle.dumps(r)) == r != RECIPES["nvfp4-te"]


def rebuilt(r):
    """Return a recipe that equals r but shares no object with it."""
    again = {f.name: getattr(r, f.name) for f in fields(r)}
    formats = {name: ElementFormat(**vars_of(again[name])) for name in ("element", "scale") if again[name] is not None}
    return type(r)(**again | formats)


def vars_of(fmt):
    return {f.name: getattr(fmt, f.name) for f in fields(fmt)}


def works(q, x):
    """Return {operation: whether it works on q}, for six operations that compare or store recipes.

    x: the array that q was quantized from.
    """
    mx = q if q.recipe.format_name == "MXFP4" else fp4kit.quantize(x, "mxfp4-ocp")
    found = fp4kit.requantize(mx, "nvfp4-te")
    comparison = fp4kit.compare(q, fp4kit.quantize(x, q.recipe.id))
    return {
        "identify": q.recipe.id in fp4kit.identify(q, x).exact,
        "requantize": bool(found.exact) and found.changed == 0,
        "compare": bool(comparison) and comparison.codes[1] == x.size and comparison.scales[1] > 0,
        "dequantize": np.array_equal(fp4kit.dequantize(q), fp4kit.dequantize(fp4kit.quantize(x, q.recipe.id))),
        "swizzle": fp4kit.unswizzle(fp4kit.swizzle(q, "swizzled_128x4")).recipe == q.recipe,
        "out": fp4kit.quantize(x, q.recipe.id, out=q) is q,
    }


@copies
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "nvfp4-te-2d", "mxfp4-flashinfer"])
def test_quantized(name, copied):
    q = fp4kit.quantize(ORDINARY, name)
    other = copied(q)
    assert_same_bits(other, q)
    facts = ("shape", "dtype", "axis", "recipe", "scale_layout")
    assert [getattr(other, f) for f in facts] == [getattr(q, f) for f in facts]
    if q.packed.flags.writeable and other.packed is q.packed:
        other = copy.deepcopy(other)  # a shallow copy would share the arrays
    assert all(works(other, ORDINARY).values()), works(other, ORDINARY)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp"])
def test_no_comparison_is_by_identity(name):
    """Two equal recipes or formats count as equal in every function, even if they are different objects."""
    q = fp4kit.quantize(ORDINARY, name)
    other = replace(q, recipe=rebuilt(q.recipe), packed=q.packed.copy())
    assert other.recipe is not q.recipe and other.recipe.element is not q.recipe.element
    assert all(works(other, ORDINARY).values()), works(other, ORDINARY)


def in_a_worker(q, x):
    return works(copy.deepcopy(q), x), fp4kit.quantize(x, q.recipe), q.recipe, q.recipe.element


# JAX warns about forks if an earlier test has used it.
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")
@pytest.mark.parametrize("method", half(METHODS))
def test_worker_processes(method):
    """A worker process can use the objects that it is sent, and the objects that it sends back work here."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        for name in ("nvfp4-te", "mxfp4-ocp"):
            q = fp4kit.quantize(ORDINARY, name)
            there, made, recipe, element = pool.apply(in_a_worker, (q, ORDINARY))
            assert all(there.values()), there
            assert recipe == q.recipe and element == q.recipe.element
            assert_same_bits(made, q)
            assert all(works(made, ORDINARY).values())
        sent = pool.apply(copy.copy, (VARIANT,))
        assert sent == VARIANT and sent.element == VARIANT.element


# ---- changed after pickling ----

STATES = {  # maps a case to the changed fields of a Quantized of (4, 32) by mxfp4-ocp, and the error
    "too few codes": ({"packed": np.zeros((4, 8), np.uint8)}, ValueError, r"packed is uint8 \(4, 8\)"),
    "flat": (
        {"shape": (128,), "axis": 0},
        ValueError,
        r"packed is uint8 \(4, 16\); mxfp4-ocp of \(128,\) needs uint8 \(64,\)",
    ),
    "wider": ({"shape": (4, 64)}, ValueError, r"mxfp4-ocp of \(4, 64\) needs uint8 \(4, 32\)"),
    "no scales": ({"block_scale": None}, ValueError, "block_scale is None"),
    "dtype": ({"dtype": np.dtype(np.float64)}, TypeError, "dtype is float64"),
    "axis": ({"axis": 2}, ValueError, "axis 2 is out of range for a 2-d array"),
    "bool": ({"axis": True}, TypeError, "axis is True"),
    "layout": ({"scale_layout": "rows"}, ValueError, "scale_layout is 'rows'"),
    "recipe": ({"recipe": RECIPES["nvfp4-te"]}, ValueError, "needs uint8"),
    "another scale": ({"tensor_scale": np.ones((), np.float32)}, ValueError, "tensor_scale is float32"),
    "a list": ({"packed": [1, 2]}, TypeError, "packed is a"),
}


def with_state(q, changes):
    """Return q with some fields changed without any check, as an unpickled Quantized might have them.

    changes: {field: new value}.
    """
    return assembled(vars(q) | changes)


@copies
@pytest.mark.parametrize("wrong", STATES)
def test_a_quantized_is_checked_when_it_comes_back(wrong, copied):
    changes, error, text = STATES[wrong]
    q = fp4kit.quantize(np.ones((4, 32), np.float32), "mxfp4-ocp")
    with pytest.raises(error, match=f"^Quantized: .*{text}"):
        copied(with_state(q, changes))


def test_invalid_fields_are_rejected():
    q = fp4kit.quantize(np.ones((4, 32), np.float32), "mxfp4-ocp")
    without = assembled({name: value for name, value in vars(q).items() if name != "axis"})
    for wrong in (without, with_state(q, {"more": 1})):
        with pytest.raises(TypeError, match=r"Quantized: (axis is missing|there is no argument more); "):
            pickle.loads(pickle.dumps(wrong))


def test_a_block_format_is_checked_when_it_comes_back():
    wrong = copy.copy(BLOCK_FORMATS[0])
    object.__setattr__(wrong, "block_size", 0)
    with pytest.raises(ValueError, match="block_size is 0; needs a positive int"):
        pickle.loads(pickle.dumps(wrong))


@pytest.mark.parametrize("name", ["mxfp6-torchao-floor-e2m3", "mxfp6-torchao-floor-e3m2"])
def test_codes_of_six_bits(name):
    """A byte above 63 is rejected as a six-bit code, because it has no value and engines would not agree on one."""
    q = fp4kit.quantize(ORDINARY, name)
    packed = q.packed.copy()
    packed[-1, -1] = 63
    right = replace(q, packed=packed)
    packed = packed.copy()
    packed[-1, -1] = 64
    makes = [
        lambda: replace(q, packed=packed),
        lambda: pickle.loads(pickle.dumps(with_state(q, {"packed": packed}))),
        lambda: fp4kit.Quantized(packed, *(getattr(q, f.name) for f in fields(q)[1:])),
    ]
    for make in makes:
        with pytest.raises(
            ValueError, match=r"^Quantized: packed holds bytes above 63; needs one code of 6 bits a byte"
        ):
            make()
    assert np.isfinite(right.dequantize()[-1, -1])
    assert replace(q, packed=packed[:0], block_scale=q.block_scale[:0], shape=(0, q.shape[1])).shape[0] == 0


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
