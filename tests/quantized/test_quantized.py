"""Test Quantized: the checks when one is made, slices, equality, pickles and copies."""

import copy
import pickle
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, INPUTS, NAMES, ORDINARY, SEEDED, seeded
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.quantized.container import PARTS, Quantized
from fp4kit.recipes import RECIPES

F32 = np.float32


FIELDS = ("packed", "block_scale", "tensor_scale", "tensor_amax", "shape", "dtype", "axis", "recipe")


def parts(name="nvfp4-te", rows=4, **changes):
    """Return {field: value} of a valid Quantized of (rows, 64) zeros, with the fields in `changes` replaced."""
    q = fp4kit.quantize(np.zeros((rows, 64), F32), name)
    return {field: getattr(q, field) for field in FIELDS} | changes


class Device:
    """Stand in for a CuPy array, with the attributes that Quantized reads."""

    def __init__(self, shape, dtype, device=0):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), SimpleNamespace(device_id=device)

    def __getattr__(self, name):
        raise AssertionError(f"{name} of a device array was read")


Device.__module__ = "cupy"


def on_device(**changes):
    device = {"packed": Device((4, 32), np.uint8), "block_scale": Device((4, 4), np.uint8)}
    return parts(**device | {"tensor_scale": Device((), F32), "tensor_amax": Device((), F32)} | changes)


V, T = ValueError, TypeError
BYTES = {"packed": np.zeros((3, 4, 32), np.uint8), "block_scale": np.zeros((3, 4, 4), np.uint8)}
EXPERTS = parts(shape=(3, 4, 64), axis=2, tensor_scale=np.ones(4, F32), **BYTES)
WRONG = [  # arguments, the error and its text after "Quantized: "
    (parts(recipe=None), T, "recipe is a NoneType; needs an id such as 'nvfp4-te' or a Recipe"),
    (parts(recipe="nvfp4-tee"), V, "no recipe is called 'nvfp4-tee'; did you mean 'nvfp4-te'"),
    (parts(dtype=np.int32), T, "dtype is int32; needs float32, float16 or bfloat16, the dtype of x"),
    (parts(dtype=">f4"), T, "dtype is >f4; needs float32, float16 or bfloat16, the dtype of x"),
    (parts(shape=(4.0, 64)), T, "shape is (4.0, 64); needs a tuple of ints, the shape of x"),
    (parts(shape=4), T, "shape is 4; needs a tuple of ints, the shape of x"),
    (parts(shape=(-4, 64)), V, "shape is (-4, 64); needs lengths >= 0"),
    (parts(shape=()), V, "axis 1 is out of range for a 0-d array; needs 0 to -1"),
    (parts(axis=-3), V, "axis -3 is out of range for a 2-d array; needs -2 to 1"),
    (parts(axis=1.0), T, "axis is 1.0; needs an int"),
    (parts(shape=(64,), axis=0, scale_layout="swizzled_8x4"), V, "scale_layout is 'swizzled_8x4' of a 1-d array"),
    (parts(packed=[1]), T, "packed is a builtins.list; needs a NumPy or CuPy array"),
    (parts(packed=None), V, "packed is None; nvfp4-te of (4, 64) needs uint8 (4, 32)"),
    (parts("fp8-modelopt", block_scale=np.zeros((4, 4), np.uint8)), V, "block_scale is uint8 (4, 4); fp8-modelopt of"),
    (parts(tensor_scale=None), V, "tensor_scale is None; nvfp4-te of (4, 64) needs float32 ()"),
    (parts(tensor_scale=np.ones(7, F32)), V, "tensor_scale is float32 (7,); nvfp4-te of (4, 64) needs float32 ()"),
    (parts("nvfp4-te-rowscaled", tensor_scale=F32(1)), V, "tensor_scale is float32 (); nvfp4-te-rowscaled of (4, 64)"),
    (parts("int4-modelopt", tensor_scale=np.ones((4, 4), F32)), V, "tensor_scale is float32 (4, 4); int4-modelopt of"),
    (EXPERTS, V, "tensor_scale is float32 (4,); nvfp4-te of (3, 4, 64) needs float32 () or float32 (3,)"),
    (parts(tensor_amax=np.ones(1, F32)), V, "tensor_amax is float32 (1,); nvfp4-te of (4, 64) needs float32 ()"),
    (parts(tensor_scale=np.float64(1)), T, "tensor_scale is float64; needs float32; convert it with"),
    (parts(tensor_amax=np.ones(())), T, "tensor_amax is float64; needs float32; convert it with"),
    (parts(tensor_scale=1.0), T, "tensor_scale is a builtins.float; needs a NumPy or CuPy array"),
    (parts("mxfp4-ocp", tensor_scale=F32(1)), V, "tensor_scale is float32 (); mxfp4-ocp of (4, 64) needs None, as it"),
    (parts("mxfp4-ocp", tensor_amax=F32(1)), V, "tensor_amax is float32 (); mxfp4-ocp of (4, 64) needs None, as it"),
    (parts(tensor_scale=F32(-1)), V, "tensor_scale is negative; needs tensor_scale >= 0: the sign of a value is in"),
    (parts("nvfp4-te-rowscaled", tensor_amax=F32([1, 2, -1, np.nan])), V, "tensor_amax is negative; needs tensor_amax"),
    (parts("nvfp4-te-2d", rows=16, tensor_scale=F32(np.nan)), V, "tensor_scale is NaN; nvfp4-te-2d gives no such"),
    (parts(tensor_amax=F32(np.nan)), V, "tensor_amax is NaN where tensor_scale is a number; None stands for an"),
    (on_device(block_scale=np.zeros((4, 4), np.uint8)), T, "block_scale is a numpy.ndarray; needs a CuPy array, as"),
    (on_device(tensor_scale=F32(1)), T, "tensor_scale is a numpy.float32; needs a CuPy array, as packed is"),
    (parts(block_scale=Device((4, 4), np.uint8)), T, "block_scale is a cupy.Device; needs a NumPy array, as packed is"),
    (on_device(tensor_amax=Device((), F32, device=1)), V, "tensor_amax is on device 1 and packed on 0; move all parts"),
    (on_device(tensor_scale=Device((), np.float64)), T, "tensor_scale is float64; needs float32; convert it with"),
]


@together("arguments, kind, text", WRONG)
def test_invalid_parts_are_rejected(arguments, kind, text):
    with pytest.raises(kind, match=f"^Quantized: {re.escape(text)}"):
        Quantized(**arguments)


def test_an_id_is_looked_up_and_numbers_become_plain():
    q = Quantized(**parts(recipe="nvfp4", shape=[np.int64(4), 64], axis=np.int64(-1), dtype="bfloat16"))
    assert q.recipe is RECIPES["nvfp4-te"] and q.shape == (4, 64) and q.axis == 1 and q.dtype == ml_dtypes.bfloat16
    assert all(type(n) is int for n in (*q.shape, q.axis))


def test_a_scalar_becomes_an_array():
    q = Quantized(**parts(tensor_scale=F32(2), tensor_amax=F32(5376)))
    assert type(q.tensor_scale) is type(q.tensor_amax) is np.ndarray and q.tensor_scale.shape == ()


def test_a_device_s_values_are_not_read():
    q = Quantized(**on_device())
    assert q.tensor_amax.shape == () and Quantized(**on_device(tensor_amax=None)).tensor_amax is None


@pytest.mark.parametrize("name", NAMES)
def test_results_of_quantize_are_valid(name):
    """The checks accept every result of quantize.

    Arrays of zeros, infinities and NaN are among the inputs, because their tensor scales are unusual.
    """
    for value in (0.0, np.inf, np.nan, -np.nan):
        x = np.full((32, 128), value, F32)
        x[16:] = ORDINARY[:16]
        with np.errstate(all="ignore"):
            q = fp4kit.quantize(x, name)
        assert_same_bits(replace(q), q)
        assert replace(q, tensor_amax=None).tensor_amax is None


def test_empty_arrays():
    for shape in ((0, 64), (4, 0), (0, 0), (3, 0, 64)):
        q = fp4kit.quantize(np.zeros(shape, F32), "nvfp4-te")
        assert fp4kit.dequantize(replace(q, tensor_amax=None)).shape == shape
        assert q.bits_per_value == 0 and q.nbytes > 0  # the tensor scale remains


def test_surplus_and_masked_parts():
    codes, scales = np.zeros((2, 16), np.uint8), np.full((2, 1), 127, np.uint8)

    def made(packed=codes, block_scale=scales, tensor_scale=None, tensor_amax=None):
        return fp4kit.Quantized(packed, block_scale, tensor_scale, tensor_amax, (2, 32), "float32", -1, "mxfp4-ocp")

    for fields, kind in (({"tensor_scale": 1.0}, "float"), ({"tensor_amax": [1.0]}, "list")):
        with pytest.raises(ValueError, match=f"is of type {kind}; mxfp4-ocp of .* needs None"):
            made(**fields)
    for name, part in (("packed", codes), ("block_scale", scales)):
        with pytest.raises(TypeError, match=f"Quantized: {name} is a masked array, whose mask would be ignored"):
            made(**{name: np.ma.masked_array(part, True)})


STACK = np.stack([ORDINARY, ORDINARY[::-1] * 3, -ORDINARY])
VARIANT = replace(RECIPES["mxfp4-ocp"], id="mxfp4-mine", block=(1, 16), source="<here>")


def quantized(x, name, **options):
    with np.errstate(all="ignore"):
        return fp4kit.quantize(x, name, **seeded(name, x), **options)


def values(q):
    with np.errstate(all="ignore"):
        return fp4kit.dequantize(q, F32)


# ---- slices ----


@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_swizzled_slices(layout):
    """A Quantized with swizzled scales can be sliced between tiles, as a view, and between the matrices of a stack.

    For other cuts, the error says to slice linear scales.
    """
    x = np.resize(ORDINARY, (300, 128))
    tile = 128 if layout == "swizzled_128x4" else 8
    q = fp4kit.quantize(x, "nvfp4-te", scale_layout=layout)
    for a, b in ((tile, 2 * tile), (2 * tile, 300), (0, tile), (0, 300), (tile, tile)):
        part = q[a:b]
        assert part.scale_layout == layout
        assert part.equals(fp4kit.quantize(x[a:b], "nvfp4-te", tensor_amax=q.tensor_amax, scale_layout=layout))
        assert a == b or np.shares_memory(part.block_scale, q.block_scale)
    text = (
        f"Quantized: q[16:33] cuts tiles of {layout} scales, which cover multiples of {tile} along axis 0; slice linear"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        q[16:33]
    assert_same_bits(values(fp4kit.unswizzle(q)[16:33]), values(q)[16:33])
    along = fp4kit.quantize(x[:128], "nvfp4-te", axis=0, scale_layout=layout)
    assert_same_bits(values(along[:64]), values(along)[:64])
    with pytest.raises(ValueError, match=r"^Quantized: q\[0:32\] cuts tiles of .* multiples of 64 along axis 0; slice"):
        along[:32]
    assert along[:] is along and along[...] is along and along[:, :] is along and along[()] is along
    stack = fp4kit.quantize(STACK, "nvfp4-te", scale_layout=layout)
    assert_same_bits(values(stack[1:2]), values(stack)[1:2])


def test_swizzled_blocks_of_several_rows():
    q = fp4kit.quantize(ORDINARY, "nvfp4-te-2d", scale_layout="swizzled_8x4")
    assert_same_bits(values(q[16:48]), values(q)[16:48])
    with pytest.raises(ValueError, match=r"^Quantized: q\[8:16\] cuts blocks of 16 along axis 0; needs multiples of"):
        q[8:16]


@together("shape", [(0, 64), (4, 0), (0, 0), (3, 0, 64), (0, 4, 64)])
@together("name", ["nvfp4-te", "nvfp4-te-rowscaled", "int4-modelopt", "mxfp8-te", "int8-modelopt"])
def test_slices_of_nothing(name, shape):
    q = fp4kit.quantize(np.zeros(shape, F32), name)
    for rows in (slice(0, 0), slice(None), slice(0, 1), slice(5, 9)):
        assert q[rows].shape == np.zeros(shape)[rows].shape


@together("index", [0, -1, np.int64(2), (slice(0, 2), 0), (..., ...), None, "a", [0, 1], np.arange(3), (None,)])
def test_invalid_slices_are_rejected(index):
    q = fp4kit.quantize(ORDINARY, "nvfp4-te-2d")
    text = r"^Quantized: q\[.*\] is not a slice; needs slices of whole blocks, as q\[0:16(, 0:16)?\]$"
    with pytest.raises(TypeError, match=text) as error:
        q[index]
    assert "slice(" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (np.s_[:, 0:232], r"q\[:, 0:232\] cuts blocks of 16 along axis 1; .* the nearest allowed bounds are 224 and"),
        (np.s_[..., 8:232], r"q\[:, 8:232\] .* bounds are 0 and 16 for 8, 224 and 240 for 232$"),
        (np.s_[:, -7:], r"q\[:, 249:256\] .* the nearest allowed bounds are 240 and 256$"),
        (np.s_[3:299, 0:16], r"q\[3:299, 0:16\] .* along axis 0; .* bounds are 0 and 16 for 3, 288 and 300 for 299$"),
        (np.s_[:, ::2], r"q\[:, ::2\] has a step of 2; needs steps of 1; quantize x\[:, ::2\] instead$"),
        (np.s_[:, ::-1], r"q\[:, ::-1\] has a step of -1; needs steps of 1; quantize x\[:, ::-1\] instead$"),
        (np.s_[0:16, 0:16, 0:16], r"q\[0:16, 0:16, 0:16\] has 3 slices; needs at most 2, one per axis"),
    ],
)
def test_refused_slices_name_the_allowed_ends(index, text):
    q = fp4kit.quantize(np.ones((300, 256), F32), "nvfp4-te-2d")
    with pytest.raises(ValueError, match=f"^Quantized: {text}") as error:
        q[index]
    assert "slice(" not in str(error.value)


@together("name", NAMES)
@together("axis", [-1, -2])
def test_an_int_selects_a_matrix_of_a_stack(name, axis):
    x = (np.random.default_rng(3).standard_normal((2, 3, 128, 128)) * 0.02).astype(BF16)
    q = fp4kit.quantize(x, name, axis=axis)
    whole = q.dequantize()
    for index in (1, -2, (1, 2), (slice(None), 0), (..., 1, slice(None), slice(0, 128)), (np.int64(0), slice(1, 3))):
        assert_same_bits(q[index].dequantize(), whole[index])
    first = fp4kit.quantize(np.moveaxis(x, -1, 0), name, axis=0)  # the quantized axis comes before those of the stack
    assert_same_bits(first[:, 1, 2].dequantize(), first.dequantize()[:, 1, 2])
    assert [part.shape for part in q[0]] == [(128, 128)] * 3
    assert q[1].axis == axis + 3 and q[1, 2].equals(q[1:, 2:][0][0])
    if q.recipe.tensor_scaling == "tensor":  # a stack may have one tensor scale per matrix
        scales = replace(q, tensor_scale=F32([2, 3]), tensor_amax=None)
        assert (
            scales[1].tensor_scale == 3 and scales[1].tensor_scale.shape == () and scales[:, 0].tensor_scale.size == 2
        )
    for wrong, error in ((2, IndexError), (-3, IndexError), ((0, 0, 0), TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^Quantized: "):
            q[wrong]


@together("name", NAMES)
def test_concatenate_undoes_slices(name):
    for shape, quantized in (((256, 256), -1), ((256, 256), 0), ((4, 128, 128), -1), ((4, 128, 128), 1)):
        x = (np.random.default_rng(3).standard_normal(shape) * 0.02).astype(BF16)
        q = fp4kit.quantize(x, name, axis=quantized)
        for axis in range(len(shape)):
            lead = (slice(None),) * axis
            try:
                parts = [q[(*lead, slice(0, shape[axis] // 2))], q[(*lead, slice(shape[axis] // 2, None))]]
            except ValueError:  # the middle cuts a block
                continue
            assert fp4kit.concatenate(parts, axis).equals(q) and fp4kit.concatenate(parts, axis - len(shape)).equals(q)


A, B = (fp4kit.quantize(np.full((n, 64), n, F32), "nvfp4-te", tensor_amax=32) for n in (16, 32))
CONCATENATE = {
    "empty": ([], {}, "qs is empty; needs at least one Quantized"),
    "axis": ([A, A], {"axis": 2}, "axis 2 is out of range for 2-d arrays"),
    "shape": ([A, B], {"axis": 1}, "qs[1] has shape (32, 64), and qs[0] (16, 64); only axis 1 may differ"),
    "dimensions": ([A, fp4kit.quantize(np.ones((2, 2, 64), F32), "nvfp4-te")], {}, "qs[1].axis 2"),
    "recipe": ([A, fp4kit.quantize(np.ones((16, 64), F32), "mxfp4")], {}, "and qs[1].recipe Recipe('mxfp4-ocp')"),
    "dtype": ([A, replace(A, dtype=np.dtype(BF16))], {}, "qs[1].dtype dtype(bfloat16); needs equal ones"),
    "layout": ([fp4kit.swizzle(B, "swizzled_128x4")] * 2, {}, "needs fp4kit.unswizzle(q)"),
    "scale": ([A, fp4kit.quantize(np.ones((16, 64), F32), "nvfp4-te")], {}, "quantize them with one tensor_amax"),
    "amax": ([A, replace(A, tensor_amax=None)], {}, "qs[1].tensor_amax None; quantize them with one tensor_amax"),
    "blocks": ([fp4kit.quantize(np.ones((8, 64), F32), "nvfp4-te-2d")] * 2, {}, "needs a multiple of 16"),
}


@pytest.mark.parametrize("case", CONCATENATE)
def test_concatenate_refuses_what_does_not_fit(case):
    qs, options, text = CONCATENATE[case]
    with pytest.raises(ValueError, match="^concatenate: .*" + re.escape(text)):
        fp4kit.concatenate(qs, **options)
    with pytest.raises(TypeError, match=r"^concatenate: q is ndarray; needs a Quantized"):
        fp4kit.concatenate([A, np.ones(3)])


def test_ends_must_be_ints():
    for index in (np.s_["a":3], np.s_[:, 1.5:], np.s_[:, :True], np.s_[:, ::0.5]):
        with pytest.raises(TypeError, match=r"^Quantized: (an end|the step) of the slice is .*; needs an int$"):
            fp4kit.quantize(ORDINARY, "nvfp4-te")[index]


def test_a_quantized_is_no_array_and_no_sequence():
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    with pytest.raises(TypeError, match=r"^Quantized: q\[0\] is not a slice"):
        list(q)
    for spread in (np.asarray, np.abs, lambda q: np.zeros(128) + q):
        with pytest.raises(TypeError, match=r"^Quantized: is not an array of numbers; call q.dequantize\(\) for its"):
            spread(q)
    assert q == q and q != 3 and q is not None and {q: 1}[q] == 1
    for compared in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a in [b]):
        with pytest.raises(TypeError, match=r"^Quantized: q == other is not defined; call q.equals\(other\)"):
            compared(q, fp4kit.quantize(ORDINARY, "nvfp4-te"))


def _multiples(q):
    """Return the multiple at which each axis of q may be cut, tiles of swizzled scales included."""
    last = max((i for i in range(len(q.shape)) if i != q.axis), default=-1)
    found = [1] * len(q.shape)
    found[q.axis] = q.recipe.length_multiple
    if last >= 0:
        found[last] = q.recipe.block_rows
    if q.scale_layout != "linear" and q.block_scale is not None:
        found[q.axis] = np.lcm(found[q.axis], 4 * q.recipe.block_size)
        found[last] = np.lcm(found[last], int(q.scale_layout[9:].split("x")[0]))
    return [int(n) for n in found]


def _drawn(rng, length, multiple):
    """Return a slice of an axis that cuts no block, written in one of the ways that mean the same."""
    ends = [*range(0, length, multiple), length]
    a, b = (int(n) for n in rng.choice(ends, 2))
    start = [a, np.int64(a), a - length if a < length else a, None if a == 0 else a][rng.integers(4)]
    stop = [b, b - length if 0 < b < length else b, None if b == length else b][rng.integers(3)]
    return slice(start, stop, [None, 1][rng.integers(2)])


LAYOUT_SHAPES = {(256,): 0, (300, 384): 1, (384, 300): 0, (3, 272, 256): 2, (3, 256, 272): 1, (256, 2, 144): 0}


@pytest.mark.parametrize("name", NAMES)
def test_every_axis_can_be_sliced_in_whole_blocks(name):
    """q[i, j, ...].dequantize() is q.dequantize()[i, j, ...] in every bit: each recipe, axis, layout, spelling."""
    rng = np.random.default_rng(len(name))
    for shape, axis in LAYOUT_SHAPES.items():
        x = np.resize(INPUTS["nonfinite"] if len(shape) == 2 else ORDINARY, shape)
        if shape[axis] % RECIPES[name].length_multiple:
            continue
        for layout in SCALE_LAYOUTS if RECIPES[name].scale is not None and len(shape) > 1 else SCALE_LAYOUTS[:1]:
            experts = len(shape) == 3 and axis and RECIPES[name].tensor_scaling == "tensor"
            q = quantized(x, name, axis=axis, scale_layout=layout, tensor_amax=[300.0, 2.0, 7.0] if experts else None)
            everything, multiples = values(q), _multiples(q)
            for _ in range(3):
                index = tuple(_drawn(rng, n, m) for n, m in zip(shape, multiples, strict=True))
                if rng.integers(4) == 0:
                    index = (..., index[-1])
                part = q[index]
                assert (part.recipe, part.axis, part.scale_layout, part.dtype) == (q.recipe, axis, layout, q.dtype)
                assert_same_bits(values(part), everything[index])
                assert not part.packed.size or np.shares_memory(part.packed, q.packed)


def test_slices_in_other_libraries():
    torch = pytest.importorskip("torch")
    x = np.resize(ORDINARY, (256, 256))
    for layout in SCALE_LAYOUTS:
        q = fp4kit.quantize(x, "nvfp4-te", scale_layout=layout)
        for name in ("torch", "jax"):
            if name == "jax":
                pytest.importorskip("jax")
            part = q.to(name)[128:, 64:192]
            assert type(part.packed) is type(q.to(name).packed)
            assert_same_bits(np.asarray(values(part)), values(q)[128:, 64:192])
    assert torch.is_tensor(fp4kit.quantize(torch.ones(4, 32), "mxfp4")[:, :0].packed)


# ---- equality, copies ----


def everything():
    """Yield a Quantized of every recipe and of every scale layout.

    Some have NaN, one tensor scale per expert, no amax, blocks along axis 0, a variant of a recipe, or no rows.
    """
    for name in (*NAMES, *SEEDED):
        yield quantized(INPUTS["nonfinite"], name)
    for layout in SCALE_LAYOUTS:
        yield fp4kit.quantize(ORDINARY[:100], "nvfp4-te", scale_layout=layout)
    yield fp4kit.quantize(ORDINARY, "mxfp4-ocp", axis=0)
    yield fp4kit.quantize(STACK.astype(BF16), "nvfp4-te", tensor_amax=[1.0, 2.0, 3.0])
    yield replace(fp4kit.quantize(ORDINARY, "nvfp4-te"), tensor_amax=None)
    yield fp4kit.quantize(np.zeros((0, 64), F32), "nvfp4-te")
    yield fp4kit.quantize(ORDINARY, VARIANT)


def pickled(q):
    return pickle.loads(pickle.dumps(q))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies(copied):
    for q in everything():
        other = copied(q)
        assert other.equals(q) and q.equals(other) and other is not q
        assert type(other) is fp4kit.Quantized and other.recipe == q.recipe
        assert_same_bits(values(other), values(q))
        assert (other.packed is q.packed) == (copied is copy.copy)


def test_equality_sees_every_bit_of_every_part():
    for q in everything():
        for part in PARTS:
            array = getattr(q, part)
            if array is None or not array.size:
                continue
            for byte in {0, array.nbytes // 2, array.nbytes - 1}:
                changed = array.copy()
                changed.reshape(-1).view(np.uint8)[byte] ^= 1
                other = copy.copy(q)
                object.__setattr__(other, part, changed)  # Quantized may reject the changed values
                assert not q.equals(other) and not other.equals(q), part
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(F32)
    q = replace(fp4kit.quantize(ORDINARY, "nvfp4-te"), tensor_scale=nan[0], tensor_amax=None)
    assert q.equals(copy.deepcopy(q)) and not q.equals(replace(q, tensor_scale=nan[1]))


def test_equality_sees_every_field():
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    square = fp4kit.quantize(np.ones((64, 64), F32), "mxfp4-ocp")
    pairs = [
        (q, replace(q, dtype=BF16)),
        (q, replace(q, recipe="nvfp4-flashinfer")),
        (q, replace(q, tensor_amax=None)),
        (q, replace(q, recipe=replace(q.recipe, exact="other"))),
        (square, replace(square, axis=0)),
        (q, q[:64]),
        (fp4kit.swizzle(q, "swizzled_8x4"), q),
    ]
    for a, b in pairs:
        assert a.equals(a) and not a.equals(b) and not b.equals(a)


@pytest.mark.parametrize("other", [None, 1, ORDINARY, "q"])
def test_equality_with_something_else(other):
    with pytest.raises(TypeError, match=r"^equals: other is .*; needs a Quantized; to compare with an array of"):
        fp4kit.quantize(ORDINARY, "nvfp4-te").equals(other)


def test_dequantize_is_the_function():
    q = fp4kit.quantize(ORDINARY.astype(BF16), "nvfp4-te")
    for dtype in (None, F32, np.float16, BF16):
        assert_same_bits(q.dequantize(dtype), fp4kit.dequantize(q, dtype))
    with pytest.raises(TypeError, match=r"^dequantize: dtype is int8"):
        q.dequantize(np.int8)
