"""Convert block scales between the linear layout and the swizzled tiles that kernels read.

In an (R, C) array of block scales, with tiled_columns = ceil(C / 4), scale (r, c) lies at byte offset

    linear          r * C + c
    swizzled_128x4  ((r // 128) * tiled_columns + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    swizzled_8x4    ((r // 8) * tiled_columns + c // 4) * 32 + (r % 8) * 4 + c % 4

Swizzled layouts pad rows to a multiple of 128 or 8, and columns to a multiple of 4, with zeros. Sources: cuBLAS block
scaling factor layout (128x4); FlashInfer SfLayout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_shape, is_one_of
from fp4kit.layouts.nibbles import check_array, contiguous

SCALE_LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8}
TILE_COLUMNS = 4


def _ceil_to(n: int, multiple: int) -> int:
    """Return n rounded up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


def check_layout(op: str, layout: str) -> None:
    """Raise ValueError unless layout is "linear", "swizzled_128x4" or "swizzled_8x4". The message begins with op."""
    if not is_one_of(layout, SCALE_LAYOUTS):
        raise ValueError(f"{op}: scale_layout is {layout!r:.60}; needs one of {', '.join(SCALE_LAYOUTS)}")


def tile_rows(layout: str) -> int:
    """Return the number of rows of scales per tile of the layout: 128 or 8, or 1 for "linear", which has no tiles."""
    return _TILE_ROWS.get(layout, 1)


def padded_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return the shape of block scales in a layout, padding included.

    Args:
        shape: the shape (..., R, C) of the scales in linear layout.
        layout: "linear", "swizzled_128x4" or "swizzled_8x4".

    Returns:
        The shape with R rounded up to a multiple of 128 or 8 (as the name of the layout says), and C rounded up to a
        multiple of 4. For "linear", the shape itself, as a tuple.

    Raises:
        TypeError: shape is not a sequence of ints.
        ValueError: the layout is unknown, a length is negative, or a swizzled layout gets a shape of fewer than two
            axes.

    Examples:
        >>> from fp4kit import layouts
        >>> layouts.padded_shape((100, 6), "swizzled_128x4")
        (128, 8)
    """
    check_layout("padded_shape", layout)
    if not (isinstance(shape, tuple) and any(type(n).__module__ == "torch" for n in shape)):
        shape = as_shape("padded_shape", shape)  # not for PyTorch symbols: it would turn them into numbers
    if layout == "linear":
        return shape
    if len(shape) < 2:
        raise ValueError(
            f"padded_shape: shape is {tuple(shape)}; {layout} needs (..., R, C), the rows and columns of a matrix"
        )
    *lead, R, C = shape
    return (*lead, _ceil_to(R, _TILE_ROWS[layout]), _ceil_to(C, TILE_COLUMNS))


def swizzle_scales(scales: Any, layout: str) -> Any:
    """Convert linear block scales to another layout, such as those that GPU kernels read.

    Args:
        scales: a NumPy or CuPy array (..., R, C). Each (R, C) matrix is rearranged separately.
        layout: "linear", "swizzled_128x4" or "swizzled_8x4".

    Returns:
        A new array in the shape that padded_shape gives, whose padding is zero. For "linear", scales itself.

    Raises:
        TypeError: scales are not a NumPy or CuPy array.
        ValueError: the layout is unknown, or scales have fewer than two axes in a swizzled layout.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> scales = np.arange(16, dtype=np.uint8).reshape(2, 8)
        >>> layouts.swizzle_scales(scales, "swizzled_8x4").reshape(-1)[:8].tolist()
        [0, 1, 2, 3, 8, 9, 10, 11]
    """
    check_array("swizzle_scales", "scales", scales)
    padded = padded_shape(scales.shape, layout)
    if layout == "linear":
        return scales
    *lead, R, C = padded
    full = np.zeros_like(scales, shape=padded)
    full[..., : scales.shape[-2], : scales.shape[-1]] = scales
    if layout == "swizzled_8x4":
        tiles = full.reshape(*lead, R // 8, 8, C // 4, 4)
        return contiguous(tiles.swapaxes(-3, -2)).reshape(padded)
    tiles = full.reshape(*lead, R // 128, 4, 32, C // 4, 4)  # row = tile * 128 + quarter * 32 + lane
    order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
    return contiguous(tiles.transpose(order)).reshape(padded)


def unswizzle_scales(scales: Any, layout: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from a layout to linear order, and drop the padding. This is the inverse of swizzle_scales.

    Args:
        scales: a NumPy or CuPy array of any shape, with as many entries as the layout needs, padding included.
        layout: the layout of scales: "linear", "swizzled_128x4" or "swizzled_8x4".
        shape: the shape (..., R, C) of the result.

    Returns:
        An array of the shape `shape`. It is a new array, but for "linear" a view of scales if possible.

    Raises:
        TypeError: scales are not a NumPy or CuPy array, or shape is not a sequence of ints.
        ValueError: the layout is unknown, a length is negative, a swizzled layout gets a shape of fewer than two axes,
            or scales do not have the size that the layout needs.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> scales = np.arange(16, dtype=np.uint8).reshape(2, 8)
        >>> swizzled = layouts.swizzle_scales(scales, "swizzled_8x4")
        >>> np.array_equal(layouts.unswizzle_scales(swizzled, "swizzled_8x4", (2, 8)), scales)
        True
    """
    check_array("unswizzle_scales", "scales", scales)
    shape = as_shape("unswizzle_scales", shape)
    check_size(scales, layout, shape)
    if layout == "linear":
        return scales.reshape(shape)
    *lead, R, C = padded = padded_shape(shape, layout)
    if layout == "swizzled_8x4":
        full = scales.reshape(*lead, R // 8, C // 4, 8, 4).swapaxes(-3, -2).reshape(padded)
    else:
        tiles = scales.reshape(*lead, R // 128, C // 4, 32, 4, 4)
        order = (*range(len(lead)), *(len(lead) + i for i in (0, 3, 2, 1, 4)))
        full = tiles.transpose(order).reshape(padded)
    return contiguous(full[..., : shape[-2], : shape[-1]])


def check_size(scales: Any, layout: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``scales`` has as many entries as the layout needs, padding included.

    Also raise ValueError if the layout is unknown, if a length is negative, or if the layout is swizzled and the shape
    has fewer than two axes.

    shape: the shape (..., R, C) of the scales in linear layout. scales may have any shape.
    """
    if min(shape, default=0) < 0:
        raise ValueError(
            f"unswizzle: shape is {tuple(shape)}; needs lengths >= 0, the shape (..., R, C) of the linear scales"
        )
    padded = padded_shape(shape, layout)
    if scales.size != int(np.prod(padded)):
        raise ValueError(
            f"unswizzle: {tuple(scales.shape)} holds {scales.size} scales; "
            f"{layout} of {tuple(shape)} needs {padded}, padding included"
        )
