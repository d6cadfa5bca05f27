"""Test quantize and quantize_both for any axis, shape, strides, tiles and layout, and with given scales.

The bytes of an array are compared with those of an equal array in another view.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every
from inputs import BF16, FINITE, INPUTS, NAMES, ORDINARY, STOCHASTIC, as_strided, codes_of, extreme, nonfinite, ordinary
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E4M3
from fp4kit.layouts import padded_shape, swizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import ALIASES, RECIPES
from fp4kit.reference.quantize import encode_tile
from fp4kit.reference.tensor_rules import ONE, TensorScale, encodes_by_amax, encoding_scale, implied_amax, tensor_scale

recipes = pytest.mark.parametrize("name", NAMES)

# ---- axes and shapes ----


@recipes
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_axis_0_is_the_transpose(name, x):
    column, row = fp4kit.quantize(x, name, axis=0), fp4kit.quantize(np.ascontiguousarray(x.T), name)
    assert_same_bits(column, row)
    assert (column.shape, column.axis, column.dtype, column.recipe.id) == (x.shape, 0, x.dtype, name)
    assert_same_bits(fp4kit.dequantize(column), fp4kit.dequantize(row).T)


@recipes
def test_more_dimensions_are_a_stack_of_matrices(name):
    """In a stack, the blocks of a matrix depend only on the matrix and on the tensor_amax of the stack."""
    x = ordinary(4, (2, 3, 32, 128))
    q = fp4kit.quantize(x, name)
    whole = q.tensor_amax if RECIPES[name].tensor_scaling == "tensor" else None
    for i, j in np.ndindex(2, 3):
        part = fp4kit.quantize(x[i, j], name, tensor_amax=whole)
        assert_same_bits(q.packed[i, j], part.packed)
        if q.block_scale is not None:
            assert_same_bits(q.block_scale[i, j], part.block_scale)
        if whole is None and q.tensor_scale is not None:
            assert_same_bits(q.tensor_scale[i, j], part.tensor_scale)
            assert_same_bits(q.tensor_amax[i, j], part.tensor_amax)
    assert_same_bits(fp4kit.dequantize(q)[1, 2], fp4kit.dequantize(part))
    for view in ("strided", "reversed", "transposed"):
        assert_same_bits(fp4kit.quantize(VIEWS[view](x), name), q)


@recipes
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_in_the_middle_is_moved_last(name, axis):
    x = np.moveaxis(ordinary(5, (2, 32, 128)), -1, axis)
    q = fp4kit.quantize(x, name, axis=axis)
    moved = fp4kit.quantize(np.ascontiguousarray(np.moveaxis(x, axis, -1)), name)
    assert_same_bits(q, moved)
    assert q.shape == x.shape and q.moved_shape == moved.shape
    assert_same_bits(fp4kit.dequantize(q), np.moveaxis(fp4kit.dequantize(moved), -1, axis))


@recipes
def test_one_dimension_and_one_row(name):
    one, row = fp4kit.quantize(ORDINARY[7], name), fp4kit.quantize(ORDINARY[7:8], name)
    assert_same_bits(one.packed, row.packed[0])
    if one.block_scale is not None:
        assert_same_bits(one.block_scale, row.block_scale[0])
    assert (one.shape, row.shape) == ((128,), (1, 128))
    assert_same_bits(fp4kit.dequantize(one), fp4kit.dequantize(row)[0])


@recipes
@pytest.mark.parametrize("shape", every(3, [(0,), (0, 128), (4, 0), (2, 0, 128), (0, 3, 128), (2, 3, 0)]), ids=str)
def test_zero_size(name, shape):
    q = fp4kit.quantize(np.empty(shape, BF16), name)
    assert q.packed.size == 0 and q.shape == shape
    assert q.tensor_amax is None or not q.tensor_amax.any()
    y = fp4kit.dequantize(q)
    assert (y.shape, y.dtype) == (shape, BF16)


# ---- strides ----


def as_reversed(x):
    return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]


def as_unaligned(x):
    buffer = np.empty(x.nbytes + 1, np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


VIEWS = {
    "strided": as_strided,
    "reversed": as_reversed,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "fortran": np.asfortranarray,
    "unaligned": as_unaligned,
    "subclass": lambda x: x.view(np.memmap),
}


@recipes
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides_do_not_matter(name, view):
    for x in (ORDINARY, INPUTS["nonfinite"], FINITE["bf16"]):
        seen = view(x)
        assert np.array_equal(np.asarray(seen).view(np.ndarray), x, equal_nan=x.dtype != BF16)
        assert_same_bits(fp4kit.quantize(seen, name), fp4kit.quantize(x, name))
        assert_same_bits(fp4kit.quantize(seen, name, axis=0), fp4kit.quantize(x, name, axis=0))


@recipes
def test_a_broadcast_row_is_every_row(name):
    q = fp4kit.quantize(np.broadcast_to(ORDINARY[9], (32, 128)), name)
    assert_same_bits(q, fp4kit.quantize(np.repeat(ORDINARY[9:10], 32, axis=0), name))


@recipes
def test_the_input_is_not_modified(name):
    for x in INPUTS.values():
        writable = x.copy()
        q = fp4kit.quantize(writable, name)
        fp4kit.dequantize(q)
        assert_same_bits(writable, x)
        assert not np.shares_memory(q.packed, writable)


# ---- dtypes ----


# Parts of the names of recipes that round intermediate results to the dtype of x, so that float32 gives other codes.
IN_THE_DTYPE = ("compressed-tensors", "quark-floor", "quark-ceil", "sglang", "qwix", "mlx-cpu")
IN_THE_DTYPE += ("fp8-comfy-kitchen", "nvfp4-comfy-kitchen", "mxfp8-jax-011", "mxfp8-jax-gpu")


@pytest.mark.parametrize("name", [name for name in NAMES if not any(part in name for part in IN_THE_DTYPE)])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_inputs_are_widened_exactly(name, dtype):
    x = FINITE[dtype]
    q = fp4kit.quantize(x, name)
    assert_same_bits(q, fp4kit.quantize(x.astype(np.float32), name))
    assert q.dtype == x.dtype and fp4kit.dequantize(q).dtype == x.dtype


# ---- quantize_both, out, layouts ----


@recipes
def test_quantize_both(name):
    for x in (ORDINARY, ordinary(12, (3, 128, 128)), INPUTS["nonfinite"]):
        row, column = fp4kit.quantize_both(x, name)
        assert_same_bits(row, fp4kit.quantize(x, name))
        assert_same_bits(column, fp4kit.quantize(x, name, axis=-2))
        assert (row.axis, column.axis) == (x.ndim - 1, x.ndim - 2)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "mxfp4-ocp", "mxfp8-te"])
def test_quantize_both_with_options(name):
    amax = {"tensor_amax": 100.0} if RECIPES[name].tensor_scaling == "tensor" else {}
    row, column = fp4kit.quantize_both(
        ORDINARY, name, **amax, scale_layout="swizzled_128x4", rounding="stochastic", seed=5, hadamard=True
    )
    options = {**amax, "scale_layout": "swizzled_128x4", "rounding": "stochastic"}
    assert_same_bits(row, fp4kit.quantize(ORDINARY, name, **options, seed=5))
    assert_same_bits(column, fp4kit.quantize(ORDINARY, name, axis=0, **options, seed=6, hadamard=True))


def empty_like(q):
    def garbage(a):
        return None if a is None else np.full_like(a, 0x2A)  # 0x2A fits in 6 bits, as codes of FP6 must

    parts = (garbage(part) for part in (q.packed, q.block_scale, q.tensor_scale, q.tensor_amax))
    return Quantized(*parts, q.shape, q.dtype, q.axis, q.recipe, q.scale_layout)


@recipes
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
def test_out(name, layout):
    if RECIPES[name].scale is None and layout != "linear":
        pytest.skip("no block scales to lay out")
    for axis in (0, 1):
        q = fp4kit.quantize(ORDINARY, name, axis=axis, scale_layout=layout)
        out = empty_like(q)
        arrays = [out.packed, out.block_scale, out.tensor_scale, out.tensor_amax]
        assert fp4kit.quantize(ORDINARY, name, axis=axis, scale_layout=layout, out=out) is out
        assert all(
            a is b
            for a, b in zip(arrays, [out.packed, out.block_scale, out.tensor_scale, out.tensor_amax], strict=True)
        )
        assert_same_bits(out, q)


@recipes
def test_out_of_any_strides(name):
    """The arrays of out= may be strided views of larger arrays, so that a caller can fill a stack expert by expert."""
    x = ordinary(13, (3, 16, 128))
    q = fp4kit.quantize(x, name)
    packed = np.zeros((3, 32, q.packed.shape[-1]), np.uint8)[:, :16]
    scales = None if q.block_scale is None else np.zeros((3, 32, q.block_scale.shape[-1]), np.uint8)[:, 16:]
    out = replace(empty_like(q), packed=packed, block_scale=scales)
    fp4kit.quantize(x, name, out=out)
    assert_same_bits(out, q)


@recipes
def test_dequantize_out(name):
    q = fp4kit.quantize(ORDINARY, name, axis=0)
    out = np.full((128, 256), 7, np.float32)[:, ::2]
    assert fp4kit.dequantize(q, out=out) is out
    assert_same_bits(np.ascontiguousarray(out), np.ascontiguousarray(fp4kit.dequantize(q)))


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].scale is not None])
@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("shape", [(128, 128), (2, 3, 40, 96)], ids=str)
def test_scale_layouts(name, layout, shape):
    x = ordinary(14, shape)
    linear, q = fp4kit.quantize(x, name), fp4kit.quantize(x, name, scale_layout=layout)
    assert q.scale_layout == layout and q.block_scale.shape == padded_shape(linear.block_scale.shape, layout)
    assert_same_bits(q.block_scale, swizzle_scales(linear.block_scale, layout))
    assert_same_bits(q.packed, linear.packed)
    assert_same_bits(fp4kit.dequantize(q), fp4kit.dequantize(linear))


# ---- tiles ----


def cases_for_tiles(name):
    """Yield (array, options of quantize) for a comparison of the bytes of the recipe `name` under two tile sizes."""
    r = RECIPES[name]
    x = ORDINARY[:32]
    yield x, {}
    yield INPUTS["nonfinite"][32:64], {}
    yield ORDINARY[:, 32:64], {"axis": 0}
    yield FINITE["bf16"][:32], {"hadamard": True}
    if name in STOCHASTIC:
        yield x, {"rounding": "stochastic", "seed": 11}
        yield x, {"rounding": "stochastic", "seed": np.random.default_rng(0).integers(0, 256, x.shape, np.uint8)}
    if r.static:
        yield x, {"block_amax": np.abs(x).reshape(len(x), -1, 16).max(axis=-1) / 2}


@recipes
def test_tiles_do_not_matter(name, monkeypatch):
    """Computing in tiles of 64 elements gives the bytes, amaxes and values that tiles of the usual size give."""
    for x, options in cases_for_tiles(name):
        monkeypatch.undo()
        q = fp4kit.quantize(x, name, **options)
        values = fp4kit.dequantize(q)
        monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", 64)
        assert_same_bits(fp4kit.quantize(x, name, **options), q)
        assert_same_bits(fp4kit.dequantize(q), values)


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "mxfp8-te-2d", "nvfp4-te-4over6-mse-448-2d"])
@pytest.mark.parametrize("rows", [1, 15, 17, 40])
def test_a_last_row_of_blocks_may_be_short(name, rows, monkeypatch):
    """If the last row of blocks is incomplete, it is quantized as if it were padded with zeros."""
    x = ordinary(15, (rows, 96))
    height = RECIPES[name].block[0]
    padded = np.pad(x, ((0, -rows % height), (0, 0)))
    whole = fp4kit.quantize(padded, name)
    for elements in (1 << 18, 64):
        monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", elements)
        q = fp4kit.quantize(x, name)
        assert_same_bits(q.packed, whole.packed[:rows])
        assert_same_bits(q.block_scale, whole.block_scale[:rows])


@recipes
def test_blocks_are_independent(name):
    """With a given tensor amax, blocks of x that are quantized alone get the codes and scales that they have in x."""
    r = RECIPES[name]
    whole = fp4kit.quantize(ORDINARY, name)
    rows, columns = slice(32, 96), slice(0, 128) if r.block_size in (1, 128) else slice(32, 96)
    blocks = slice(columns.start // r.block_size, columns.stop // r.block_size)
    cut = {"tensor": (), "row": (rows,), "block": (rows, blocks)}.get(r.tensor_scaling)
    amax = None if cut is None else whole.tensor_amax[cut]
    part = fp4kit.quantize(ORDINARY[rows, columns], name, tensor_amax=amax)
    assert_same_bits(codes_of(part), codes_of(whole)[rows, columns])
    if whole.block_scale is not None:
        assert_same_bits(part.block_scale, whole.block_scale[rows, blocks])


# ---- variants ----


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].scale is not None])
@pytest.mark.parametrize("block", [(1, 8), (1, 64), (16, 16), (32, 8), (1, 128)], ids=str)
def test_other_block_sizes(name, block):
    """With another block size, a block gets the bytes that it gets alone under the same tensor amax."""
    height, width = block
    try:
        r = replace(RECIPES[name], block=block)
    except ValueError:  # tests/recipes checks which sizes are allowed
        return
    q = fp4kit.quantize(ORDINARY, r)
    assert q.recipe.block == block and q.block_scale.shape == (128, 128 // width)
    assert np.array_equal(q.block_scale, np.repeat(q.block_scale[::height], height, axis=0))
    rows = slice(64, 64 + height)
    amax = q.tensor_amax[rows] if r.tensor_scaling == "row" else q.tensor_amax
    one = fp4kit.quantize(ORDINARY[rows, 128 - width :], r, tensor_amax=amax)
    assert_same_bits(one.block_scale[:, 0], q.block_scale[rows, -1])
    assert_same_bits(codes_of(one), codes_of(q)[rows, 128 - width :])
    assert fp4kit.dequantize(q).shape == ORDINARY.shape


@together("alias", ALIASES)
def test_an_alias_is_its_recipe(alias):
    assert_same_bits(fp4kit.quantize(ORDINARY, alias), fp4kit.quantize(ORDINARY, ALIASES[alias]))
    assert fp4kit.quantize(ORDINARY, alias).recipe is RECIPES[ALIASES[alias]]


names = pytest.mark.parametrize("name", NAMES)
# For these rules, a stored decode scale may not determine the encode scale, because both are computed from the amax:
# decode = 1 / encode, or decode = amax / max and encode = max / amax.
AMBIGUOUS = ("nvfp4-flashinfer", "nvfp4-compressed-tensors", "fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt")
AMBIGUOUS += ("nvfp4-mlx-cpu-global", "nvfp4-mlx-cpu-0322-global", "nvfp4-mlx-metal-global")


def again(x, q, name=None, **options):
    """Return x quantized with the scales, axis and layout of q.

    name: the recipe, or None for that of q.
    options: further arguments of quantize.
    """
    with np.errstate(all="ignore"):
        r, given = name or q.recipe, {"block_scale": q.block_scale, "tensor_scale": q.tensor_scale}
        return fp4kit.quantize(x, r, axis=q.axis, scale_layout=q.scale_layout, **given, **options)


def assert_same(found, expected):
    assert_same_bits(found, replace(expected, tensor_amax=None))
    assert found.tensor_amax is None and found.recipe == expected.recipe and found.axis == expected.axis


@names
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("make", [ordinary, extreme, nonfinite])
def test_own_scales_give_the_same_codes(name, dtype, make):
    with np.errstate(all="ignore"):
        x = make().astype(dtype)
        for axis in (-1, 0):
            q = fp4kit.quantize(x, name, axis=axis)
            assert_same(again(x, q), q)


@names
def test_elements_are_coded_under_the_scales_that_are_given(name, either_engine):
    """Elements are encoded with the given block scales, not with those that the recipe would compute.

    The given scales are about twice the recipe's (one code higher in E8M0, eight in E4M3), so the codes differ but the
    error stays small.
    """
    x, r = ordinary(), RECIPES[name]
    if r.scale is not None:
        q = fp4kit.quantize(x, name)
        more, most = (8, 126) if r.scale == E4M3 else (1, 254)
        larger = np.minimum(q.block_scale.astype(int) + more, most).astype(np.uint8)
        found = fp4kit.quantize(x, name, block_scale=larger, tensor_scale=q.tensor_scale)
        errors = [np.linalg.norm(fp4kit.dequantize(one) - x) / np.linalg.norm(x) for one in (q, found)]
        assert errors[1] < max(0.3, 2 * errors[0]) and not np.array_equal(found.packed, q.packed)


@names
def test_layouts_strides_and_stacks(name):
    x = np.asfortranarray(np.stack([ordinary(seed, (64, 96)) for seed in range(3)]))[:, ::-1]
    for axis in (-1, 1, -2) if RECIPES[name].block_size <= 32 else ():
        options = {"axis": axis, "scale_layout": "swizzled_128x4" if RECIPES[name].scale else "linear"}
        q = fp4kit.quantize(x, name, **options)
        assert_same(again(x, q), q)
    if RECIPES[name].tensor_scaling == "tensor" and RECIPES[name].block_size <= 32:
        q = fp4kit.quantize(x, name, tensor_amax=np.array([3.0, 7.5, 0.1], np.float32))
        assert q.tensor_scale.shape == (3,)
        assert_same(again(x, q), q)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_and_transformed(name):
    x = ordinary(4, dtype=BF16)
    seeded = {"rounding": "stochastic", "seed": 7}
    for options in (seeded, {"hadamard": True}, seeded | {"hadamard": "no_signs"}):
        q = fp4kit.quantize(x, name, **options)
        assert_same(again(x, q, **options), q)
    random = np.random.default_rng(0).integers(0, 256, x.shape, np.uint8)
    q = fp4kit.quantize(x, name, rounding="stochastic", seed=random)
    assert_same(again(x, q, rounding="stochastic", seed=random), q)


@names
def test_a_code_depends_on_its_element_and_its_scales_alone(name):
    """With given scales, any part of x gets its part of the codes, whatever the rest of x contains.

    GPTQ, which quantizes column by column, needs this.
    """
    r, x = RECIPES[name], ordinary(5)
    q = fp4kit.quantize(x, name)
    if r.block is None or r.block_rows > 1:
        return
    first, last = r.block_size, 3 * r.block_size if r.block_size < 128 else r.block_size
    part = x[16:48, first:last] if last > first else x[16:48]
    cut = slice(first, last) if last > first else slice(None)
    blocks = slice(cut.start // r.block_size, cut.stop // r.block_size) if last > first else slice(None)
    given = {"block_scale": None if q.block_scale is None else q.block_scale[16:48, blocks]}
    tensor, rows = q.tensor_scale, slice(16, 48)
    whole = tensor is None or not tensor.ndim
    given["tensor_scale"] = tensor if whole else tensor[rows, blocks] if tensor.ndim == 2 else tensor[rows]
    found = fp4kit.quantize(part, name, **given)
    assert_same_bits(unpacked(found), unpacked(q)[16:48, cut])


def unpacked(q):
    return fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed


# ---- which part of the tensor scale a rule reads ----


@names
def test_only_named_rules_read_the_encode_scale(name):
    """encode_tile reads only the parts of the tensor scale that its recipe needs: NaN in other parts changes no code.

    If the recipe reads the encode scale, NaN there does change codes.
    """
    r, x = RECIPES[name], np.ascontiguousarray(ordinary(3)[:32])
    amax = np.float32(5.5) if r.tensor_scaling != "row" else np.full((32, 1), 5.5, np.float32)
    scale = tensor_scale(amax, r, x.dtype)
    tensor = TensorScale(*(np.reshape(part, (-1, 1)) for part in scale))
    scales = None if r.scale is None else np.full((32, 128 // r.block_size), 0x38 if r.scale == E4M3 else 127, np.uint8)
    poison = np.full((1, 1), np.nan, np.float32)
    unread = {"amax": poison} if encodes_by_amax(r) or r.tensor_rule is None else {"amax": poison, "encode": poison}
    read = tensor._replace(**unread)
    with np.errstate(all="ignore"):
        expected, found = (encode_tile(x, r, t, x.dtype, scales, None) for t in (tensor, read))
        assert_same_bits(found, expected)
        if encodes_by_amax(r):
            assert (encode_tile(x, r, tensor._replace(encode=poison), x.dtype, scales, None) != expected).any()


@pytest.mark.parametrize("name", ["mxfp8-mlx-cpu", "mxfp4-quark-floor", "mxfp4-auto-round", "mxfp4-sglang-kv"])
def test_tall_blocks_whose_amax_is_read(name):
    """Tiles of the CPU engine may end within a block of several rows, but the amax is that of the whole block."""
    base = RECIPES[name]
    r = replace(base, id="mine", block=(16, base.block_size))
    x = np.ones((2048, 96), np.float32)
    x[::16], x[5::16, 1] = np.inf, np.nan
    q = fp4kit.quantize(x, r)
    assert_same_bits(fp4kit.quantize(x, r, block_scale=q.block_scale).packed, q.packed)


def test_the_encode_scale_of_a_stored_scale_that_no_amax_gives():
    """If no amax gives a stored tensor scale, the encode scale is its reciprocal.

    In compressed-tensors, no float16 amax gives 2^-100, because its encode scale would be infinite.
    """
    r, scale = RECIPES["nvfp4-compressed-tensors"], np.float32(2.0**-100)
    assert implied_amax(scale, r, np.dtype(np.float16)) == -1
    assert encoding_scale(scale, r, np.dtype(np.float16)).encode == ONE / scale
    assert encoding_scale(None, r, np.dtype(np.float16)).encode == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in AMBIGUOUS and RECIPES[name].tensor_rule])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_no_other_recipe_has_two_encode_scales_that_its_codes_tell_apart(name, dtype):
    r, f = RECIPES[name], np.dtype(dtype)
    if not encodes_by_amax(r) or (r.element.is_integer and f == np.float32):
        return
    bits = np.random.default_rng(1).integers(1, 0x7F7FFFFF, 20_000).astype(np.int32)
    amaxes = (
        bits.view(np.float32) if f == np.float32 else np.random.default_rng(2).uniform(1e-4, 200, 20_000).astype(dtype)
    )
    with np.errstate(all="ignore"):
        true = tensor_scale(amaxes.astype(np.float32), r, f)
        implied = encoding_scale(true.decode, r, f)
        same = (true.encode == implied.encode) | (1 / true.encode == 1 / implied.encode)
    is_flushed = (true.decode == 0) & (name == "nvfp4-flashinfer-token-precise")  # any small amax gives the scale 0
    assert (same | is_flushed).all()


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_elements_of_16_bits_tell_the_encode_scale(name, dtype):
    """For 16-bit dtypes, the amax that is implied by the tensor scale gives the true encode scale.

    This holds for every amax of these dtypes, subnormal and infinite ones included.
    """
    r = RECIPES[name]
    top = 0x7C00 if dtype == np.float16 else 0x7F80
    amaxes = np.arange(1, top + 1, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        true = tensor_scale(amaxes, r, np.dtype(dtype))
        assert_same_bits(encoding_scale(true.decode, r, np.dtype(dtype)).encode, true.encode)


# ---- scales of every kind ----


def codes_under(name, x, scale, tensor=None, **options):
    x = np.asarray(x, np.float32).reshape(1, -1)
    scales = np.full((1, x.shape[1] // RECIPES[name].block_size), scale, np.uint8)
    with np.errstate(all="ignore"):
        return unpacked(fp4kit.quantize(x, name, block_scale=scales, tensor_scale=tensor, **options))[0].tolist()


def test_scales_by_hand():
    x = [0.0, -0.0, 1, -1, 3, 100, -100, 0.25] * 4
    assert codes_under("mxfp4-ocp", x, 127)[:8] == [0, 8, 2, 10, 5, 7, 15, 0]  # 0.25 ties to even; 100 saturates
    assert codes_under("mxfp4-ocp", x, 128)[:8] == [0, 8, 1, 9, 3, 7, 15, 0]
    # Under a NaN scale all scaled elements are NaN, which are encoded as the largest code.
    assert codes_under("mxfp4-ocp", x, 255)[:8] == [7] * 8
    one, zero, nan = 0x38, 0x00, 0x7F
    assert codes_under("nvfp4-te", x[:16], one, 1.0)[:8] == [0, 8, 2, 10, 5, 7, 15, 0]
    assert codes_under("nvfp4-te", x[:16], one, 0.5)[:8] == [0, 8, 4, 12, 7, 7, 15, 1]
    assert codes_under("nvfp4-te", x[:16], zero, 1.0)[:8] == [0, 8, 7, 15, 7, 7, 15, 7]  # the factor is FLT_MAX
    assert codes_under("nvfp4-te", x[:16], 0xB8, 1.0)[:4] == [8, 0, 10, 2]  # -1
    assert codes_under("nvfp4-modelopt", x[:16], nan, 1.0)[:8] == [7] * 8
    assert codes_under("nvfp4-te-reference", x[:16], nan, 1.0)[:8] == [0] * 8
    assert codes_under("nvfp4-flashinfer", [0.0] * 16, zero, 1.0) == [0] * 16  # a block of zeros
    assert codes_under("nvfp4-flashinfer", x[:16], zero, 1.0)[:4] == [7, 7, 7, 15]  # otherwise 0 * inf would be NaN


def test_dtypes_of_scales():
    x = ordinary(0, (4, 64))
    q = fp4kit.quantize(x, "nvfp4-te")
    scales = q.block_scale.view(ml_dtypes.float8_e4m3fn)
    found = fp4kit.quantize(x, "nvfp4-te", block_scale=scales, tensor_scale=float(q.tensor_scale))
    assert_same(found, q)
    q = fp4kit.quantize(x, "mxfp4-ocp")
    assert_same(fp4kit.quantize(x, "mxfp4-ocp", block_scale=q.block_scale.view(ml_dtypes.float8_e8m0fnu)), q)
    assert_same(fp4kit.quantize(x, "mxfp4-ocp", block_scale=np.asfortranarray(q.block_scale)), q)


def test_the_result_holds_copies():
    x = ordinary(0, (4, 64))
    q = fp4kit.quantize(x, "nvfp4-te")
    found = again(x, q)
    for part in ("block_scale", "tensor_scale"):
        assert not np.shares_memory(getattr(found, part), getattr(q, part))
    q.block_scale.setflags(write=False)
    assert_same(again(x, q), q)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "fp8-modelopt-channel"])
def test_out_with_scales(name):
    x = ordinary(0, (4, 64))
    q = fp4kit.quantize(x, name)
    out = replace(fp4kit.quantize(2 * x + 1, name), tensor_amax=None)
    assert again(x, q, out=out) is out
    assert_same(out, q)
    strided = replace(out, packed=np.zeros((4, 2 * q.packed.shape[1]), np.uint8)[:, ::2])
    assert_same(again(x, q, out=strided), q)


@names
def test_empty_arrays(name):
    r = RECIPES[name]
    for shape in ((0, 128), (3, 0)):
        q = fp4kit.quantize(np.zeros(shape, np.float32), r)
        found = again(np.zeros(shape, np.float32), q)
        assert_same(found, q)


X = ordinary(0, (4, 64))
SCALES, MX = np.zeros((4, 4), np.uint8), np.zeros((4, 2), np.uint8)
F8 = ml_dtypes.float8_e4m3fn
TE, FAKE = {"block_scale": SCALES, "tensor_scale": 1.0}, {"block_scale": MX}
ERRORS = [
    ("nvfp4-te", {"block_scale": SCALES}, ValueError, "block_scale was given without tensor_scale; nvfp4-te has"),
    ("nvfp4-te", {"tensor_scale": 1.0}, ValueError, "tensor_scale was given without block_scale; nvfp4-te has both"),
    ("mxfp4-ocp", FAKE | {"tensor_scale": 1.0}, ValueError, "tensor_scale was given, but mxfp4-ocp has none; leave"),
    ("mxfp4-ocp", {"tensor_scale": 1.0}, ValueError, "tensor_scale was given, but mxfp4-ocp has none; leave it out"),
    ("fp8-modelopt", {"block_scale": MX}, ValueError, "block_scale was given, but fp8-modelopt has none; leave it out"),
    ("fp8-modelopt", FAKE | {"tensor_scale": 1.0}, ValueError, "block_scale was given, but fp8-modelopt has none"),
    ("nvfp4-te", TE | {"tensor_amax": 2.0}, ValueError, "tensor_amax was given together with scales; needs either"),
    ("nvfp4-te", TE | {"block_amax": SCALES}, ValueError, "block_amax was given together with scales"),
    ("mxfp4-ocp", {"block_scale": MX.astype(np.int8)}, TypeError, "block_scale is int8; mxfp4-ocp needs"),
    ("mxfp4-ocp", {"block_scale": MX.view(F8)}, TypeError, "block_scale is float8_e4m3fn; mxfp4-ocp needs uint8"),
    ("mxfp4-ocp", {"block_scale": 3}, TypeError, "block_scale is int; mxfp4-ocp needs"),
    ("mxfp4-ocp", {"block_scale": SCALES}, ValueError, "block_scale has shape (4, 4); mxfp4-ocp of (4, 64) needs"),
    ("mxfp4-ocp", FAKE | {"scale_layout": "swizzled_8x4"}, ValueError, "block_scale has shape (4, 2); mxfp4-ocp of"),
    ("nvfp4-te", TE | {"tensor_scale": -1.0}, ValueError, "tensor_scale holds 1 negative value(s) of 1; needs"),
    ("nvfp4-te-2d", TE | {"tensor_scale": np.nan}, ValueError, "tensor_scale holds 1 NaN value(s) of 1"),
    ("nvfp4-te", TE | {"tensor_scale": np.nan}, ValueError, "tensor_scale holds NaN, although x is finite; needs tens"),
    ("nvfp4-te", TE | {"tensor_scale": np.ones(3)}, ValueError, "tensor_scale has shape (3,); nvfp4-te needs ()"),
    ("nvfp4-te", TE | {"tensor_scale": "a"}, TypeError, "tensor_scale is <U1; needs a real number or a float array"),
    ("nvfp4-te", TE | {"seed": 3}, ValueError, "seed was given with rounding='nearest'"),
    ("mxfp4-modelopt-fake", FAKE, ValueError, "mxfp4-modelopt-fake is a fake quantizer"),
    ("nvfp4-te", TE | {"out": fp4kit.quantize(X, "nvfp4-te")}, ValueError, "out has a tensor_amax, which a given"),
]


@together("name, given, kind, message", ERRORS)
def test_errors(name, given, kind, message):
    with pytest.raises(kind, match=re.escape(f"quantize: {message}")):
        fp4kit.quantize(X, name, **given)
