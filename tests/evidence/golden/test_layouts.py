"""Test that layouts of scales and of rows equal those that producers recorded."""

import numpy as np
import pytest
from recorded import groups
from together import together

from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import pad, shuffle_rows, swizzle_scales, unswizzle_scales

LAYOUT_SHAPES = ["1x1", "3x5", "8x4", "120x4", "128x4", "129x8", "200x16", "256x3", "300x33"]


@pytest.mark.parametrize("shape", [*LAYOUT_SHAPES, "3x130x6"])
def test_block_scale_interleave(shape, golden):
    scales = golden.get("layouts", f"block_scale_interleave/{shape}/in")
    swizzled = swizzle_scales(scales, "swizzled_128x4")
    assert_same_bits(swizzled.reshape(-1), golden.get("layouts", f"block_scale_interleave/{shape}/out"))
    assert_same_bits(unswizzle_scales(swizzled, "swizzled_128x4", scales.shape), scales)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
@pytest.mark.parametrize("shape", LAYOUT_SHAPES)
def test_offsets_of_scales(shape, layout, golden):
    """Each scale (r, c) is at the recorded offset, and all padding is zero."""
    offsets = golden.get("layouts", f"offset_{layout}/{shape}")
    numbers = np.arange(1, offsets.size + 1).reshape(offsets.shape)
    flat = swizzle_scales(numbers, f"swizzled_{layout}").reshape(-1)
    assert np.array_equal(flat[offsets], numbers)
    assert np.count_nonzero(flat) == numbers.size
    rows = {"128x4": 128, "8x4": 8}[layout]
    assert flat.size == -(-numbers.shape[0] // rows) * rows * -(-numbers.shape[1] // 4) * 4


@pytest.mark.parametrize("M", [128, 256])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_shuffled_rows(M, tile, golden):
    assert_same_bits(shuffle_rows(M, tile), golden.get("layouts", f"shuffle_matrix_a_rows/M{M}_tile{tile}"))


@together("tile", [1, 16, 64, 127, 192, 320, 128, 256, 384])
def test_tiles_of_shuffled_rows(tile):
    """Shuffled blocks have 32 rows if the tile is a multiple of 128, else 16.

    FlashInfer's get_shuffle_block_size gives the same numbers.
    """
    block = 16 if tile % 128 else 32
    rows = [start + block // 8 * j + i for start in range(0, 64, block) for i in range(block // 8) for j in range(8)]
    assert shuffle_rows(64, tile).tolist() == rows
    with pytest.raises(ValueError, match=f"needs a multiple of {block} for epilogue tile {tile}"):
        shuffle_rows(block + 8, tile)


def test_shuffled_scales(golden):
    scales = golden.get("layouts", "shuffle_matrix_sf_a/in")
    shuffled = swizzle_scales(scales[shuffle_rows(len(scales), 128)], "swizzled_128x4")
    assert_same_bits(shuffled.reshape(-1), golden.get("layouts", "shuffle_matrix_sf_a/out_tile128"))


def test_layouts_of_modelopt(golden):
    prefixes = groups(golden, "modelopt", "/cutlass")
    assert len(prefixes) == 9
    for prefix in prefixes:
        scales = golden.get("modelopt", f"{prefix}/scales")
        swizzled = swizzle_scales(scales, "swizzled_128x4")
        assert_same_bits(swizzled.reshape(-1), golden.get("modelopt", f"{prefix}/cutlass"), prefix)
        assert_same_bits(swizzled, golden.get("modelopt", f"{prefix}/modelopt_swizzle"), prefix)
        assert_same_bits(pad(scales, 16, 0), golden.get("modelopt", f"{prefix}/pad_row_scale"), prefix)
        assert_same_bits(pad(pad(scales, 16, 0), 16), golden.get("modelopt", f"{prefix}/pad_row_col_scale"), prefix)


def test_layouts_of_torchao(golden):
    prefixes = groups(golden, "ao", "/to_blocked/input")
    assert len(prefixes) == 11
    for prefix in prefixes:
        scales = golden.get("ao", f"{prefix}/to_blocked/input")
        recorded = golden.get("ao", f"{prefix}/to_blocked/output")
        assert_same_bits(swizzle_scales(scales, "swizzled_128x4").reshape(-1), recorded, prefix)
        assert_same_bits(unswizzle_scales(recorded, "swizzled_128x4", scales.shape), scales, prefix)
