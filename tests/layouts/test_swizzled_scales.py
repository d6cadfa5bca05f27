"""Test the swizzled layouts of block scales against formulas of the position of each scale."""

import numpy as np
import pytest

from fp4kit import layouts

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
    for given in (stored, stored.reshape(*lead, -1, 4)):
        np.testing.assert_array_equal(layouts.unswizzle_scales(given, layout, shape), scales)
    written = layouts.swizzle_scales(scales, layout).reshape(*lead, padded)
    np.testing.assert_array_equal(written[..., place], scales)
    assert np.count_nonzero(written) <= scales.size  # the padding is zero
