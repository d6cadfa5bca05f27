"""Test swizzle, unswizzle, pack and unpack: bytes are at the documented offsets, and inverses undo each other."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16, ordinary
from rotations import SIZES, orthogonal
from together import together

import fp4kit
import fp4kit.layouts
from fp4kit import layouts
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.stochastic import hadamard_blocks

TILED = layouts.SCALE_LAYOUTS[1:]


def _offset(layout: str, r: int, c: int, columns: int) -> int:
    tiles = -(-columns // 4)
    if layout == "swizzled_8x4":
        return (r // 8 * tiles + c // 4) * 32 + r % 8 * 4 + c % 4
    return (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


@given(layout=st.sampled_from(TILED), lead=st.sampled_from([(), (2,)]), R=st.integers(1, 300), C=st.integers(1, 20))
def test_offsets_and_padding(layout, lead, R, C) -> None:
    scales = np.random.default_rng(R * 31 + C).integers(1, 256, (*lead, R, C)).astype(np.uint8)
    swizzled = fp4kit.swizzle(scales, layout)
    flat = swizzled.reshape(*lead, -1)
    expected = np.zeros_like(flat)
    r, c = np.mgrid[:R, :C]
    expected[..., np.vectorize(_offset)(layout, r, c, C)] = scales
    assert_same_bits(flat, expected)
    assert_same_bits(fp4kit.unswizzle(swizzled, layout, scales.shape), scales)
    assert_same_bits(fp4kit.unswizzle(swizzled.reshape(-1), layout, scales.shape), scales)


@pytest.mark.parametrize("layout", layouts.SCALE_LAYOUTS)
def test_quantized_between_any_layouts(layout) -> None:
    x = np.random.default_rng(9).standard_normal((2, 40, 96)).astype(np.float32)
    linear = fp4kit.quantize(x, "nvfp4-te")
    q = fp4kit.quantize(x, "nvfp4-te", scale_layout=layout)
    assert_same_bits(fp4kit.unswizzle(q), linear)
    for other in layouts.SCALE_LAYOUTS:
        assert_same_bits(fp4kit.swizzle(q, other), fp4kit.quantize(x, "nvfp4-te", scale_layout=other))
    assert_same_bits(fp4kit.dequantize(q), fp4kit.dequantize(linear))


@given(st.integers(0, 60), st.integers(0, 5))
def test_pack_and_unpack(half, rows) -> None:
    codes = np.random.default_rng(half).integers(0, 16, (rows, 2 * half)).astype(np.uint8)
    packed = fp4kit.pack(codes)
    assert packed.shape == (rows, half)
    assert_same_bits(fp4kit.unpack(packed), codes)
    assert_same_bits(packed & 15, codes[:, 0::2])
    assert_same_bits(packed >> 4, codes[:, 1::2])


def test_pad() -> None:
    x = np.ones((3, 5), np.float32)
    assert layouts.pad(x, 5) is x
    padded = layouts.pad(x, 16)
    assert padded.shape == (3, 16) and padded[:, 5:].sum() == 0 and padded.sum() == 15
    assert layouts.pad(x, 4, axis=0).shape == (4, 5)


BYTES, LINE = np.zeros(9, np.uint8), np.ones(32, np.float32)
Q = fp4kit.quantize(LINE[None], "nvfp4-te")
ERRORS_OF_LAYOUTS = [
    (lambda: fp4kit.pack(BYTES[:3]), ValueError, "pack: the last axis has length 3; two codes"),
    (lambda: fp4kit.pack(np.full(2, 16, np.uint8)), ValueError, "pack: codes hold 16; needs 4-bit codes, 0 to"),
    (lambda: fp4kit.pack(np.zeros(2, int)), TypeError, "pack: codes are int64; needs uint8"),
    (lambda: fp4kit.unpack(np.uint8(3)), ValueError, "unpack: codes are 0-d; needs at least one axis"),
    (lambda: fp4kit.swizzle(BYTES.reshape(3, 3), "128x4"), ValueError, "swizzle: layout is '128x4'; needs"),
    (lambda: fp4kit.swizzle(np.zeros((2, 2)), TILED[0]), TypeError, "swizzle: scales are float64; needs uint8"),
    (lambda: fp4kit.swizzle(BYTES, TILED[0]), ValueError, "swizzle: scales are 1-d; needs"),
    (lambda: fp4kit.unswizzle(BYTES), ValueError, "unswizzle: layout or shape is missing; an"),
    (lambda: fp4kit.unswizzle(BYTES, TILED[0], (3, 3)), ValueError, "unswizzle: (9,) holds 9"),
    (lambda: fp4kit.swizzle(fp4kit.quantize(LINE, "fp8-modelopt"), TILED[0]), ValueError, "has no block scales"),
    (lambda: fp4kit.swizzle(fp4kit.quantize(LINE, "nvfp4-te"), TILED[0]), ValueError, "swizzle: q is 1-d; swizz"),
    (lambda: fp4kit.unswizzle(Q, "linear"), ValueError, "unswizzle: layout or shape was given for a Quantized, which"),
    (lambda: fp4kit.unswizzle(Q, None, (1, 2)), ValueError, "unswizzle: layout or shape was given for a Quantized, wh"),
    (lambda: layouts.shuffle_rows(20, 64), ValueError, "shuffle_rows: M is 20; needs a multiple of 16"),
]


@together("call, error, message", ERRORS_OF_LAYOUTS)
def test_errors(call, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


ROWS = np.ones((3, 3), np.uint8)
OF_A_LAYOUT = {"padded_shape": {"shape": (3, 3)}, "swizzle": {"q_or_scales": Q}, "swizzle_scales": {"scales": ROWS}}
OF_A_LAYOUT |= {
    "unswizzle": {"q_or_scales": ROWS, "shape": (3, 3)},
    "unswizzle_scales": {"scales": ROWS, "shape": (3, 3)},
}


def test_an_unknown_layout_is_called_what_the_function_calls_it() -> None:
    exported = [getattr(module, name) for module in (fp4kit, layouts) for name in module.__all__]
    found = {f.__name__: f for f in exported if inspect.isfunction(f) and "layout" in inspect.signature(f).parameters}
    others = {"identify_kv", "check_layout", "check_size", "tile_rows"}  # of KV caches; called by fp4kit alone
    assert found.keys() - others == OF_A_LAYOUT.keys()
    for name, arguments in OF_A_LAYOUT.items():
        with pytest.raises(ValueError, match=f"^{name}: layout is 'tiled'; needs"):
            found[name](layout="tiled", **arguments)


def test_unswizzle_from_linear_is_a_reshape() -> None:
    scales = np.arange(24, dtype=np.uint8)
    assert_same_bits(fp4kit.unswizzle(scales, "linear", (2, 3, 4)), scales.reshape(2, 3, 4))
    assert_same_bits(fp4kit.unswizzle(scales.reshape(6, 4), "linear", (6, 4)), scales.reshape(6, 4))


SQUARE = ("nvfp4-te-2d", "nvfp4-te-reference-2d", "nvfp4-te-4over6-mae-256-2d", "mxfp8-te-2d")


@given(
    name=st.sampled_from(SQUARE),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    layout=st.sampled_from(fp4kit.layouts.SCALE_LAYOUTS),
    axis=st.sampled_from([-1, -2]),
    seed=st.integers(0, 9),
)
def test_equals_quantizing_the_other_axis(name, lead, rows, columns, layout, axis, seed) -> None:
    size = fp4kit.recipe(name).block_size
    x = np.random.default_rng(seed).standard_normal((*lead, rows * size, columns * size)).astype(np.float32)
    q = fp4kit.quantize(x, name, axis=axis, scale_layout=layout)
    other = fp4kit.transpose(q)
    expected = fp4kit.quantize(x, name, axis=-3 - axis, scale_layout=layout)
    assert other.axis == expected.axis and other.scale_layout == layout
    assert_same_bits(other, expected)
    assert_same_bits(fp4kit.transpose(other), q)


def test_tall_matrix_is_cut_into_columns(monkeypatch) -> None:
    monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", 100)
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    assert_same_bits(fp4kit.transpose(fp4kit.quantize(x, "nvfp4-te-2d")), fp4kit.quantize(x, "nvfp4-te-2d", axis=0))


@pytest.mark.parametrize(
    ("name", "shape", "axis", "message"),
    [
        ("nvfp4-te", (32, 32), -1, "transpose: nvfp4-te has 1x16 blocks; needs square blocks, such as"),
        ("fp8-modelopt", (32, 32), -1, "transpose: fp8-modelopt has 1x1 blocks; needs square blocks"),
        ("fp8-deepgemm-block", (128, 128), -1, "transpose: fp8-deepgemm-block has float32 scales; needs block"),
        ("nvfp4-te-2d", (16, 32, 32), 0, "transpose: q has axis 0 of a 3-d array; needs one of the last two axes"),
        ("nvfp4-te-2d", (32,), 0, "transpose: q has axis 0 of a 1-d array; needs one of the last two axes"),
        ("nvfp4-te-2d", (40, 32), -1, "transpose: the other axis has length 40; needs a multiple of 16"),
    ],
)
def test_errors_of_transpose(name, shape, axis, message) -> None:
    q = fp4kit.quantize(np.ones(shape, np.float32), name, axis=axis)
    with pytest.raises(ValueError, match=re.escape(message)):
        fp4kit.transpose(q)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 32, 32), (2, 0, 16)])
def test_transpose_of_empty_arrays(shape) -> None:
    x = np.zeros(shape, np.float32)
    q = fp4kit.quantize(x, "nvfp4-te-2d", scale_layout="swizzled_8x4")
    assert_same_bits(fp4kit.transpose(q), fp4kit.quantize(x, "nvfp4-te-2d", axis=-2, scale_layout="swizzled_8x4"))


def test_needs_a_quantized() -> None:
    with pytest.raises(
        TypeError, match=re.escape("transpose: q is ndarray; needs a Quantized, as fp4kit.quantize returns")
    ):
        fp4kit.transpose(np.ones(3))


F32 = np.dtype(np.float32)
X = ordinary(4, (6, 1024), F32)


def test_inverses_undo_the_transform():
    """For sizes that are powers of 4, the factor is a power of two, and transforms of small integers are exact."""
    integers = np.random.default_rng(0).integers(-9, 10, (6, 1024)).astype(F32)
    for size in SIZES:
        y = fp4kit.hadamard(integers, size, seed=9)
        back = fp4kit.hadamard(y, size, seed=9, inverse=True)
        assert (y != integers).any()
        if size in (16, 64, 256):
            assert (back == integers).all()
            assert (fp4kit.hadamard(fp4kit.hadamard(integers, size), size) == integers).all()
        # Without signs and rounding, both transforms have norm 1. Each of the 2 log2(size) + 2 steps rounds an element
        # by at most 2^-24 of it, and the norm of a block is at most 9 sqrt(size).
        assert np.abs(back - integers).max() <= (2 * np.log2(size) + 2) * 2.0**-24 * 9 * np.sqrt(size)


def test_rotations_are_undone():
    matrices = orthogonal(np.random.default_rng(1), 16, 64)
    for m in (matrices, matrices[0]):
        y = fp4kit.rotate(X, m, signs=fp4kit.random_signs(64, 2))
        back = fp4kit.rotate(y, m, signs=fp4kit.random_signs(64, 2), inverse=True)
        assert np.abs(back - X).max() < 1e-3 < np.abs(y - X).max()


def test_axes_are_transposed_calls():
    x = ordinary(5, (32, 64, 48), BF16)
    matrix = orthogonal(np.random.default_rng(2), 1, 16)[0]
    for axis in (0, 1, 2, -1, -3):
        moved = np.moveaxis(x, axis, -1)
        for function, argument in ((fp4kit.hadamard, 16), (fp4kit.rotate, matrix)):
            expected = function(np.ascontiguousarray(moved), argument)
            assert_same_bits(function(x, argument, axis=axis), np.ascontiguousarray(np.moveaxis(expected, -1, axis)))
            assert_same_bits(function(moved, argument), expected)


def test_a_matrix_of_hadamard_rotates_as_hadamard_does():
    """Sums of integers are exact, so their order does not matter."""
    x = np.random.default_rng(3).integers(-9, 10, (4, 128)).astype(np.float16)
    matrix = fp4kit.hadamard(np.eye(64, dtype=F32), 64)
    signs = [(-1) ** (i % 3) for i in range(128)]
    assert_same_bits(fp4kit.rotate(x, matrix, signs=signs), fp4kit.hadamard(x, 64, signs=signs))
    blocks = fp4kit.rotate(x, np.stack([matrix, matrix]), signs=signs[:64])  # signs of a block, a matrix per block
    assert_same_bits(blocks, fp4kit.hadamard(x, 64, signs=signs[:64]))


def test_te_signs_give_the_transform_of_te_for_exact_sums():
    x = np.random.default_rng(4).integers(-255, 256, (8, 64)).astype(BF16)
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert_same_bits(fp4kit.hadamard(x, 16, signs=signs), hadamard_blocks(x))


def test_tensors():
    torch = pytest.importorskip("torch")
    y = fp4kit.hadamard(torch.from_numpy(X), 128, signs=torch.ones(128), seed=None)
    assert_same_bits(y.numpy(), fp4kit.hadamard(X, 128))


def hadamard(**changed):
    return lambda: fp4kit.hadamard(**{"x": X, "size": 16} | changed)


def rotate(**changed):
    return lambda: fp4kit.rotate(**{"x": X, "matrices": np.eye(16, dtype=F32)} | changed)


ERRORS = [
    (hadamard(size=48), ValueError, "hadamard: size is 48; needs 16, 32, 64, 128, 256 or 512"),
    (hadamard(size=17), ValueError, "hadamard: size is 17; needs 16, 32, 64, 128, 256 or 512"),
    (hadamard(size=16.0), TypeError, "hadamard: size is 16.0; needs an int"),
    (hadamard(x=X[:, :40], size=32), ValueError, "hadamard: axis 1 has length 40; blocks of 32 need a multiple of"),
    (hadamard(axis=2), ValueError, "hadamard: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (hadamard(x=X.astype(np.float64)), TypeError, "hadamard: x is float64; needs float32, float16 or bfloat16;"),
    (hadamard(signs=[1] * 17), ValueError, "hadamard: signs has shape (17,); needs (16,) for every block or"),
    (hadamard(signs=[1] * 15 + [2]), ValueError, "hadamard: signs holds 2; needs 1 or -1"),
    (hadamard(signs=[1] * 15 + [np.nan]), ValueError, "hadamard: signs holds nan; needs 1 or -1"),
    (hadamard(signs="wrong"), ValueError, "hadamard: signs is 'wrong'; needs numbers, each 1 or -1"),
    (hadamard(signs=[1] * 16, seed=1), ValueError, "hadamard: both signs and seed are given; needs one of them,"),
    (hadamard(seed=-1), ValueError, "hadamard: seed is -1; needs 0 to 2^64 - 1"),
    (hadamard(inverse="yes"), TypeError, "hadamard: inverse is 'yes'; needs True or False"),
    (rotate(matrices=np.eye(16, 15, dtype=F32)), ValueError, "rotate: matrices has shape (16, 15); needs (n, n) or"),
    (rotate(matrices=np.eye(256, dtype=F32)), ValueError, "rotate: matrices has shape (256, 256); needs (n, n) or"),
    (rotate(matrices=np.tile(np.eye(16, dtype=F32), (3, 1, 1))), ValueError, "rotate: matrices has 3 matrices of"),
    (rotate(matrices=np.eye(16, dtype=F32) * np.float32(1.01)), ValueError, "rotate: matrices is not orthogonal:"),
    (rotate(matrices=np.eye(16, dtype=F32) * np.float32(np.nan)), ValueError, "rotate: matrices is not orthogonal:"),
    (rotate(matrices=np.eye(100, dtype=F32)), ValueError, "rotate: axis 1 has length 1024; blocks of 100 need a"),
    (rotate(matrices=np.eye(16)), TypeError, "rotate: matrices is float64; needs float32, float16 or bfloat16;"),
    (lambda: fp4kit.random_signs(-1, 0), ValueError, "random_signs: size is -1; needs 0 or more"),
    (lambda: fp4kit.random_signs(4, 2**64), ValueError, "random_signs: seed is 18446744073709551616; needs 0 to"),
]


def test_errors_of_rotate():
    for call, kind, text in ERRORS:
        with pytest.raises(kind, match=f"^{re.escape(text)}"):
            call()
            pytest.fail(text)


def test_matrices_rounded_to_bfloat16_are_accepted():
    for n in (1, 2, 3, 7, 128):
        m = orthogonal(np.random.default_rng(n), 2, n).astype(BF16)
        fp4kit.rotate(np.zeros((1, 2 * n), F32), m)


# layout -> (rows of a tile, position within a tile of the scale in row r and column c of the tile). Tiles have four
# columns, and follow one another along the columns. Source for 128x4: cuBLAS, 1D block scaling factors layout.
FORMULAS = {
    "swizzled_128x4": (128, lambda r, c: r % 32 * 16 + r // 32 * 4 + c),
    "swizzled_8x4": (8, lambda r, c: r * 4 + c),
}


def positions(layout, R, C):
    """Return the position in the layout of each scale of an R x C matrix."""
    height, within = FORMULAS[layout]
    r, c = np.indices((R, C))
    return (r // height * -(-C // 4) + c // 4) * height * 4 + within(r % height, c % 4)


@pytest.mark.parametrize("layout", FORMULAS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (8, 4), (128, 4), (129, 8), (300, 13), (2, 3, 130, 5)], ids=str)
def test_scales_are_read_and_written_at_their_positions(layout, shape):
    *lead, R, C = shape
    height = FORMULAS[layout][0]
    place = positions(layout, R, C)
    padded = -(-R // height) * height * -(-C // 4) * 4
    stored = np.random.default_rng(0).permutation(np.arange(int(np.prod(lead)) * padded, dtype=np.uint32))
    scales = stored.reshape(*lead, padded)[..., place]
    for each in (stored, stored.reshape(*lead, -1, 4)):
        np.testing.assert_array_equal(layouts.unswizzle_scales(each, layout, shape), scales)
    written = layouts.swizzle_scales(scales, layout).reshape(*lead, padded)
    np.testing.assert_array_equal(written[..., place], scales)
    assert np.count_nonzero(written) <= scales.size  # the padding is zero
