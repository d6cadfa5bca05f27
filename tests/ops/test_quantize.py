"""Test quantize and quantize_both: properties of every recipe for any axis, shape, strides, tiles and layout.

The bytes of an array are compared with those of an equal array in another view. tests/evidence/golden/test_check.py
compares the bytes with the producers'.
"""

from dataclasses import replace

import numpy as np
import pytest
from exhaustive import every
from inputs import BF16, FINITE, INPUTS, NAMES, ORDINARY, STOCHASTIC, as_strided, codes_of, ordinary
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import padded_shape, swizzle_scales
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import ALIASES, RECIPES

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
