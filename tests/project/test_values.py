"""Test that formats, recipes and Quantized behave as values: pickled, copied or sent to another process, they work as
before.
"""

import copy
import multiprocessing
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from inputs import ORDINARY
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BLOCK_FORMATS, E2M1, ELEMENT_FORMATS, ElementFormat
from fp4kit.quantized.container import assembled
from fp4kit.recipes import RECIPES

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
@pytest.mark.parametrize("method", METHODS)
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
        with pytest.raises(TypeError, match=r"Quantized\.__init__\(\) .*argument"):
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
