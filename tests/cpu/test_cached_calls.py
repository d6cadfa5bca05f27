"""Test repeated calls on NumPy arrays, which become single calls of the compiled library.

The cached call must be right for other values, outputs and arithmetic modes, and after errors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import COVERED, NEEDS_ENGINE, VIEWS, as_large_ones, assert_equal
from exhaustive import every, half
from float_modes import BITS, NEEDS_ENVIRONMENT, mode, tiny
from inputs import BF16, NAMES, ordinary

import fp4kit
from fp4kit.cpu import cached_calls, codec, library
from fp4kit.evidence.testing import SPECIFICATION
from fp4kit.formats import FLOATS
from fp4kit.ops import engines as call_cache
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
SHAPE = (32, 128)


@pytest.fixture(autouse=True)
def empty_call_cache(monkeypatch):
    """Start each test with an empty call cache."""
    monkeypatch.setattr(call_cache, "_CALLS", {})
    as_large_ones(monkeypatch)


def arrays(dtype):
    """Yield arrays of one shape and dtype with very different values, such as NaN, so that one cached call gets all."""
    x = ordinary(1, SHAPE, dtype)
    yield x
    yield np.zeros(SHAPE, dtype)
    yield tiny(dtype)
    yield ordinary(2, SHAPE, dtype)
    for value in (np.nan, np.inf, -np.inf, -0.0, 6e4):
        special = x.copy()
        special[9, 70] = value
        yield special
    yield np.full(SHAPE, np.nan, dtype)
    yield -x


def kept(op):
    """Return whether each cached call of an operation is one of the library, in the order in which they were made.

    op: the name of the operation. Other cached calls try one engine after the other.
    """
    return [call.__module__ == cached_calls.__name__ for key, call in call_cache._CALLS.items() if key[0] == op]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", half(NAMES))
def test_other_values(name, dtype):
    out = fp4kit.quantize(np.zeros(SHAPE, dtype), name)
    values = np.empty(SHAPE, np.float32)
    for x in arrays(dtype):
        q = SPECIFICATION.apply(fp4kit.quantize, x, name)
        assert_equal(fp4kit.quantize(x, name), q, "new")
        assert fp4kit.quantize(x, name, out=out) is out
        assert_equal(out, q, "out")
        assert_equal(fp4kit.fake_quantize(x, name), SPECIFICATION.apply(fp4kit.fake_quantize, x, name), "fake")
        for target in FLOATS:
            assert_equal(fp4kit.dequantize(q, target), SPECIFICATION.apply(fp4kit.dequantize, q, target), f"{target}")
        assert fp4kit.dequantize(q, np.float32, out=values) is values
        assert_equal(values, SPECIFICATION.apply(fp4kit.dequantize, q, np.float32), "values")
    covered = name in COVERED and RECIPES[name].tensor_scaling != "block" and not RECIPES[name].search
    assert kept("quantize") == [covered] * 2
    by_library = covered and codec.not_faked(RECIPES[name]) is None
    assert kept("fake_quantize") == [by_library]


def check_repeated(x, name, **options):
    """Assert that first calls, repeated calls and calls with out= give the results of the specification."""
    q = SPECIFICATION.apply(fp4kit.quantize, x, name, **options)
    values = SPECIFICATION.apply(fp4kit.fake_quantize, x, name, **options)
    out = fp4kit.quantize(x, name, **options)
    for _ in range(2):
        assert_equal(fp4kit.quantize(x, name, **options), q, "new")
        assert_equal(fp4kit.quantize(x, name, **options, out=out), q, "out")
        assert_equal(fp4kit.fake_quantize(x, name, **options), values, "fake")
        assert_equal(fp4kit.dequantize(q), SPECIFICATION.apply(fp4kit.dequantize, q), "values")


def are_by_library(name):
    """Return True if the cached calls are one library call per operation, or if the library lacks the recipe `name`."""
    kinds = {(op, True) for op in ("quantize", "fake_quantize", "dequantize")}
    found = {(op, is_one) for op, _ in kinds for is_one in kept(op)}
    return found == kinds or name not in COVERED or RECIPES[name].fake_rule is not None


KINDS = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te", "int8-modelopt")
MATRICES = (
    "whole",
    "rows backwards",
    "columns backwards",
    "transposed",
    "gaps",
    "every other row",
    "one column for all",
)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("view", MATRICES)
@pytest.mark.parametrize("name", KINDS)
def test_views_and_axes(name, view, axis):
    check_repeated(VIEWS[view](ordinary(4, (128, 256), BF16)), name, axis=axis)
    assert are_by_library(name)


def test_one_row_of_elements_apart():
    x = ordinary(4, (128, 256), BF16)
    for name in KINDS:
        check_repeated(VIEWS["one column"](x), name)
        assert are_by_library(name)


@pytest.mark.parametrize("axis", every(4, range(-3, 3)))
def test_axes_of_three_dimensions(axis):
    x = ordinary(4, (32, 64, 32), BF16)
    for name in ("nvfp4-te", "nvfp4-te-2d", "mxfp8-te"):
        check_repeated(x, name, axis=axis)
        check_repeated(x[:, ::2].transpose(2, 0, 1), name, axis=axis)


def amaxes(own):
    """Yield amaxes that a caller may pass in repeated calls. own: the amax of x, an array.

    The amaxes differ in value, type, dtype or strides. For some of them, such as infinity, there is no tensor scale.
    """
    for value in (1.0, 6.0, 448 * 6.0, 0.0, 1e-45, 1e-38, 3e38):
        yield np.full_like(own, value)
    spread = np.zeros((2 * own.size,), np.float32)
    spread[::2] = own.reshape(-1)
    yield from (
        own,
        own / 2,
        own.astype(np.float64),
        own.astype(BF16),
        np.full_like(own, np.inf),
        spread[::2].reshape(own.shape),
    )
    if own.size == 1:
        yield from (1.0, float(own), np.float32(own), -0.0, 1e-60, np.inf, 7, np.float64(2.5))


WITH_AMAX = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-te-rowscaled",
    "nvfp4-modelopt",
    "nvfp4-flashinfer",
    "int8-modelopt-channel",
)


@pytest.mark.parametrize("name", WITH_AMAX)
@pytest.mark.parametrize("axis", [0, 1])
def test_amaxes_that_are_given(name, axis):
    x = ordinary(5, (128, 64), BF16)
    for amax in amaxes(np.asarray(fp4kit.quantize(x, name, axis=axis).tensor_amax)):
        check_repeated(x, name, axis=axis, tensor_amax=amax)
    assert are_by_library(name)


@pytest.mark.parametrize(
    "kind", [float, np.float32, lambda amax: np.array(amax, np.float32)], ids=["float", "float32", "array"]
)
@pytest.mark.parametrize("function", [fp4kit.quantize, fp4kit.fake_quantize])
def test_a_wrong_amax_after_a_right_one(function, kind):
    x = ordinary(5, SHAPE)
    for wrong in (np.nan, -1.0, -1e-45, -np.inf, *[1e40] * (kind is float)):
        for _ in range(2):
            function(x, "nvfp4-te", tensor_amax=kind(1))
        with pytest.raises(ValueError, match=f"^{function.__name__}: tensor_amax holds 1"):
            function(x, "nvfp4-te", tensor_amax=kind(wrong))


def test_an_amax_that_is_written_to_by_its_own_call():
    x = ordinary(5, SHAPE)
    for _ in range(3):
        out = fp4kit.quantize(x, "nvfp4-te")
        out.tensor_amax[...] = 3
        fp4kit.quantize(x, "nvfp4-te", tensor_amax=out.tensor_amax, out=out)
        assert_equal(out, SPECIFICATION.apply(fp4kit.quantize, x, "nvfp4-te", tensor_amax=3.0))


def test_every_tensor_rule_writes_the_scale_of_the_tensor():
    """A cached call writes tensor scales by each compiled tensor rule, also by the first one."""
    x, by_index = ordinary(5, SHAPE), {}
    for name in COVERED:
        r = RECIPES[name]
        if r.tensor_scaling in ("tensor", "row") and not r.search:
            key = codec.tensor_key(r)
            by_index.setdefault(library.functions().fp4kit_tensor_rule(key.encode()), name)
    assert 1 in by_index and len(by_index) > 3
    for name in by_index.values():
        q, out = SPECIFICATION.apply(fp4kit.quantize, x, name), fp4kit.quantize(x, name)
        for part in (out.tensor_scale, out.tensor_amax):
            part[...] = 7
        assert_equal(fp4kit.quantize(x, name, out=out), q, name)
    assert all(kept("quantize"))


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf])
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-rowscaled", "int8-modelopt"])
def test_an_amax_in_the_memory_of_a_result(name, value):
    """The given amax may share memory with out=, and is used before it is overwritten.

    If the library declines the call, the amax is still unchanged for the next engine.
    """
    x = ordinary(5, SHAPE)
    q = fp4kit.quantize(x, name)
    for part in ("tensor_scale", "tensor_amax"):
        given = getattr(q, part).copy()
        other = x.copy()
        other[9, 70] = value
        wanted = SPECIFICATION.apply(fp4kit.quantize, other, name, tensor_amax=given)
        for _ in range(3):
            out = fp4kit.quantize(x, name)
            assert_equal(fp4kit.quantize(other, name, tensor_amax=getattr(out, part), out=out), wanted, part)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "int8-modelopt"])
def test_results_are_arrays_of_their_own(name):
    x = ordinary(3, SHAPE)
    first, second, third = (fp4kit.quantize(x, name) for _ in range(3))
    for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
        a, b, c = (getattr(q, part) for q in (first, second, third))
        if a is not None:
            assert not np.shares_memory(b, c) and b.strides == a.strides
            assert b.flags.writeable and b.flags.c_contiguous and b.flags.aligned
    replace(second)  # it is checked as any Quantized is
    assert_equal(second, first)


def test_the_specification_is_asked_when_it_is_wanted(monkeypatch):
    x = ordinary(3, SHAPE)
    for _ in range(2):
        q = fp4kit.quantize(x, "nvfp4-te")
        fp4kit.dequantize(q)
    seen = []
    for key, call in call_cache._CALLS.items():
        monkeypatch.setitem(call_cache._CALLS, key, lambda *a, call=call: (seen.append(1), call(*a))[1])
    with fp4kit.specification():
        fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-te"))
        assert seen == []
    fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-te"))
    assert len(seen) == 2


@NEEDS_ENVIRONMENT
@pytest.mark.parametrize("changed", BITS)
def test_a_call_that_was_right_in_another_mode(changed):
    x = tiny(np.dtype(np.float32))
    for name in ("mxfp4-ocp", "nvfp4-te", "mxfp8-te"):
        for _ in range(2):
            q = fp4kit.quantize(x, name)
            values = fp4kit.dequantize(q)
        with mode(changed):
            found = fp4kit.quantize(x, name), fp4kit.dequantize(q)
        assert_equal(found, (q, values), f"{name} {changed}")
        call_cache._CALLS.clear()
        with mode(changed):
            found = [(fp4kit.quantize(x, name), fp4kit.dequantize(q)) for _ in range(2)]
        assert_equal(found[1], (q, values), f"{name} {changed}, first there")


def test_scales_of_the_tensor_are_not_kept():
    """A repeated dequantize uses the scales that the Quantized holds now, not those of the first call."""
    q = fp4kit.quantize(ordinary(3, SHAPE), "nvfp4-te")
    for scale in (1.0, 0.5, 0.0, 1e-45, 3e38, np.inf, np.nan):
        for amax in (None, q.tensor_amax, np.float32(7).reshape(())):
            one = replace(q, tensor_scale=np.array(scale, np.float32), tensor_amax=amax)
            for _ in range(2):
                assert_equal(fp4kit.dequantize(one), SPECIFICATION.apply(fp4kit.dequantize, one), f"{scale} {amax}")


WRONG = {
    "a read-only out": (lambda x, q: {"out": frozen(q)}, ValueError, "read-only"),
    "an out of another shape": (lambda x, q: {"out": fp4kit.quantize(x[:16], "nvfp4-te")}, ValueError, "out has shape"),
    "another axis": (lambda x, q: {"axis": 2}, ValueError, "axis"),
    "an amax below zero": (lambda x, q: {"tensor_amax": -1.0}, ValueError, "tensor_amax"),
    "a layout of no name": (lambda x, q: {"scale_layout": "diagonal"}, ValueError, "layout"),
    "a seed without use": (lambda x, q: {"seed": 3}, ValueError, "seed"),
}


def frozen(q):
    packed = q.packed.copy()
    packed.setflags(write=False)
    return replace(q, packed=packed)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_after_a_right_one(name):
    of, kind, text = WRONG[name]
    x = ordinary(3, SHAPE)
    q = fp4kit.quantize(x, "nvfp4-te")
    for _ in range(3):
        fp4kit.quantize(x, "nvfp4-te", out=q)
        fp4kit.quantize(x, "nvfp4-te")
    for _ in range(2):
        with pytest.raises(kind, match=f"^quantize: .*{text}"):
            fp4kit.quantize(x, "nvfp4-te", **of(x, q))


def test_other_kinds_of_arrays_after_a_right_call():
    """A cached call is not used for another kind of array of equal shape.

    The arrays have another dtype, byte order, stride, type or alignment.
    """
    x = ordinary(3, SHAPE)
    expected = fp4kit.quantize(x, "mxfp4-ocp")
    fp4kit.quantize(x, "mxfp4-ocp")
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.ndarray(SHAPE, np.float32, memory, 1)
    unaligned[...] = x
    wide = np.zeros((32, 256), np.float32)
    wide[:, ::2] = x
    for same in (np.asfortranarray(x), unaligned, wide[:, ::2], x[::-1][::-1], x.astype(BF16).astype(np.float32)):
        found = fp4kit.quantize(same, "mxfp4-ocp")
        assert_equal(found, SPECIFICATION.apply(fp4kit.quantize, same, "mxfp4-ocp"))
    assert_equal(fp4kit.quantize(unaligned, "mxfp4-ocp"), expected)
    with pytest.raises(TypeError, match=r"^quantize: "):
        fp4kit.quantize(x.astype(np.float64), "mxfp4-ocp")


def test_more_calls_than_are_kept():
    for columns in range(32, 32 * (call_cache.MAX_CALLS + 40), 32):
        x = np.ones((1, columns), np.float32)
        assert (fp4kit.quantize(x, "mxfp4-ocp").packed == 0x66).all()  # 4 with a scale of 2^-2
    assert 0 < len(call_cache._CALLS) <= call_cache.MAX_CALLS
