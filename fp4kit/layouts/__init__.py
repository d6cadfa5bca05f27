"""Convert between memory layouts of codes and scales: nibble order, scale swizzles, file formats, KV caches, padding.

The functions rearrange the bytes of NumPy and CuPy arrays. They do not change any value. The module kv handles the
pages of KV caches, and the module aiter the order of codes and scales that aiter's kernels read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import a_type, as_index, as_shape, index_of, is_one_of, only_public
from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import returns_in_library
from fp4kit.formats import MXFP4, NVFP4, Packing

__all__ = [
    "GGUF_BLOCKS",
    "MLX_WORD",
    "SCALE_LAYOUTS",
    "TILE_COLUMNS",
    "GgufBlock",
    "aiter",
    "check_layout",
    "check_pairs",
    "check_size",
    "kv",
    "pack",
    "pack_gguf",
    "pack_mlx",
    "packed",
    "pad",
    "padded_shape",
    "shuffle_rows",
    "swizzle_scales",
    "tile_rows",
    "unpack",
    "unpack_gguf",
    "unpack_mlx",
    "unpacked",
    "unswizzle_scales",
]

only_public(globals())


_NIBBLES = Packing(codes=2, bytes=1)


def pack(codes: Any) -> Any:
    """Pack 4-bit codes, two per byte.

    Code 2j goes to the low nibble of byte j, and code 2j + 1 to the high nibble. fp4kit.pack does the same for arrays
    of any library.

    Args:
        codes: uint8 (..., K), a NumPy or CuPy array with one code below 16 per byte. K is even. Codes are not checked.

    Returns:
        A new uint8 array (..., K/2).

    Raises:
        TypeError: codes are not a NumPy or CuPy array of uint8.
        ValueError: K is odd, or codes are 0-d.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> [hex(byte) for byte in layouts.pack(np.uint8([1, 2, 3, 4]))]
        ['0x21', '0x43']
    """
    check_bytes("pack", codes)
    check_pairs(codes.shape)
    return _NIBBLES.pack(codes)


def check_pairs(shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the last length of `shape`, the shape of 4-bit codes, is even: two share a byte."""
    if shape[-1] % 2:
        raise ValueError(f"pack: the last axis has length {shape[-1]}; two codes share a byte, so it must be even")


def check_array(op: str, name: str, array: Any) -> None:
    """Raise TypeError unless `array` is a NumPy array or scalar, or a CuPy array."""
    if not isinstance(array, (np.ndarray, np.generic)) and type(array).__module__ != "cupy":
        raise TypeError(f"{op}: {name} are {a_type(array, module=True)}; needs an array of NumPy or CuPy")


def check_bytes(op: str, codes: Any, name: str = "codes") -> None:
    """Raise TypeError unless `codes` is a NumPy or CuPy array of uint8, and ValueError if it is 0-d."""
    check_array(op, name, codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"{op}: {name} are {codes.dtype}; needs uint8")
    if not codes.ndim:
        raise ValueError(f"{op}: {name} are 0-d; needs at least one axis")


def unpack(packed: Any) -> Any:
    """Unpack 4-bit codes, two per byte. This is the inverse of pack.

    Args:
        packed: uint8 (..., K/2), a NumPy or CuPy array.

    Returns:
        A new uint8 array (..., K) with one code per byte.

    Raises:
        TypeError: packed is not a NumPy or CuPy array of uint8.
        ValueError: packed is 0-d.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> layouts.unpack(np.uint8([0x21, 0x43])).tolist()
        [1, 2, 3, 4]
    """
    check_bytes("unpack", packed)
    return _NIBBLES.unpack(packed)


def packed(codes: Any, packing: Packing) -> Any:
    """Return codes as their element format stores them. 4-bit codes are packed into a new array, two per byte.

    Wider codes are stored one per byte, so `codes` itself is returned.

    codes: uint8 (..., K), one code per byte. packing: ElementFormat.packing.
    """
    return codes if packing.codes == 1 else pack(codes)


def unpacked(stored: Any, packing: Packing) -> Any:
    """Return stored codes with one code per byte: the inverse of `packed`.

    Bytes that hold two 4-bit codes are unpacked to a new array. If each byte holds one code, `stored` itself is
    returned.

    stored: uint8, the codes as their element format stores them.
    packing: ElementFormat.packing.
    """
    return stored if packing.codes == 1 else unpack(stored)


def contiguous(a: Any) -> Any:
    """Return a NumPy or CuPy array unchanged if it is contiguous, otherwise a contiguous copy."""
    return a if a.flags.c_contiguous else a.copy()


SCALE_LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8}
TILE_COLUMNS = 4


def _ceil_to(n: int, multiple: int) -> int:
    """Return n rounded up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


def check_layout(op: str, layout: str, name: str = "scale_layout") -> None:
    """Raise ValueError unless layout is "linear", "swizzled_128x4" or "swizzled_8x4". The message begins with op, and
    calls the argument `name`.
    """
    if not is_one_of(layout, SCALE_LAYOUTS):
        raise ValueError(f"{op}: {name} is {layout!r:.60}; needs one of {', '.join(SCALE_LAYOUTS)}")


def check_axis(op: str, axis: int, ndim: int) -> int:
    """Return an axis of an array with `ndim` axes, counted from its end if negative, as a number from 0."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for a {ndim}-d array; needs {-ndim} to {ndim - 1}")
    return axis % ndim


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
    check_layout("padded_shape", layout, "layout")
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
    check_layout("swizzle_scales", layout, "layout")
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
    check_layout("unswizzle_scales", layout, "layout")
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


class GgufBlock(NamedTuple):
    """The layout of a block in a GGUF format: first the scales, one byte each, and then the codes, two per byte.

    Attributes:
        scales: the number of scales in a block.
        group: the number of elements per scale.
    """

    scales: int
    group: int

    @property
    def elements(self) -> int:
        """The number of elements per block, scales * group.

        A row of a GGUF tensor consists of whole blocks, so its length is a multiple of this number.
        """
        return self.scales * self.group

    @property
    def bytes(self) -> int:
        """The number of bytes per block: its scales and codes."""
        return self.scales * (1 + self.group // 2)


GGUF_BLOCKS = {"mxfp4": GgufBlock(1, MXFP4.block_size), "nvfp4": GgufBlock(4, NVFP4.block_size)}


def pack_gguf(packed: Any, scales: Any, format: str) -> Any:
    """Convert packed codes and block scales to the bytes of a GGUF tensor, which are stored block by block.

        mxfp4, 17 bytes for 32 elements:   s          then              | c0 c16 | c1 c17 | ... | c15 c31 |
        nvfp4, 36 bytes for 64 elements:   s s s s    then per scale    | c0 c8 | c1 c9 | ... | c7 c15 |

    Here s is a scale byte, and | a b | is a byte with code a in the low nibble and code b in the high nibble. Scale
    bytes are copied unchanged. llama.cpp decodes some scale bytes differently from the OCP and NVIDIA formats; the
    recipes mxfp4-gguf and nvfp4-gguf model this.

    Args:
        packed: uint8 (..., K/2), two codes per byte as in Quantized.packed. K is a multiple of 32 (mxfp4) or 64
            (nvfp4).
        scales: uint8 (..., K/32) for mxfp4 or (..., K/16) for nvfp4, in linear layout.
        format: "mxfp4" or "nvfp4".

    Returns:
        A new uint8 array (..., K/32*17) for mxfp4 or (..., K/64*36) for nvfp4, in the library of packed.

    Raises:
        TypeError: packed or scales are not uint8.
        ValueError: the format is unknown, K is not a multiple of 32 (mxfp4) or 64 (nvfp4), or the shapes do not fit
            together.

    Exact:
        unpack_gguf is the inverse.

    Source:
        llama.cpp 0c1e57098, ggml-common.h block_mxfp4 and block_nvfp4.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> packed = layouts.pack(np.arange(32, dtype=np.uint8)[None] % 16)
        >>> layouts.pack_gguf(packed, np.uint8([[127]]), "mxfp4")[0, :5]
        array([127,   0,  17,  34,  51], dtype=uint8)
    """
    block = _gguf_block("pack_gguf", format)
    check_bytes("pack_gguf", packed)
    check_bytes("pack_gguf", scales, "scales")
    _check_multiple(
        "pack_gguf", "packed", packed, block.elements // 2, f"{format} has blocks of {block.elements} elements"
    )
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // block.group)
    if scales.shape != expected:
        raise ValueError(
            f"pack_gguf: scales are {scales.shape}; packed {packed.shape} of {format} needs linear scales {expected}"
        )
    lead, blocks = packed.shape[:-1], packed.shape[-1] * 2 // block.elements
    raw = np.empty_like(packed, shape=(*lead, blocks, block.bytes))
    raw[..., : block.scales] = scales.reshape(*lead, blocks, block.scales)
    halves = packed.reshape(*lead, blocks, block.scales, 2, block.group // 4)
    low, high = halves[..., 0, :], halves[..., 1, :]
    pairs = np.empty_like(packed, shape=(*low.shape, 2))
    pairs[..., 0], pairs[..., 1] = low & 0xF | high << 4, low >> 4 | high & 0xF0
    raw[..., block.scales :] = pairs.reshape(*lead, blocks, block.bytes - block.scales)
    return raw.reshape(*lead, blocks * block.bytes)


def unpack_gguf(raw: Any, format: str) -> tuple[Any, Any]:
    """Convert the bytes of a GGUF tensor to packed codes and block scales: the inverse of pack_gguf.

    Args:
        raw: uint8 (..., K/32*17) for mxfp4 or (..., K/64*36) for nvfp4, such as the data of a tensor that
            gguf.GGUFReader has read.
        format: "mxfp4" or "nvfp4".

    Returns:
        The pair (packed, scales). packed is uint8 (..., K/2) with two codes per byte, as in Quantized.packed. scales
        is uint8 (..., K/32) for mxfp4 or (..., K/16) for nvfp4, in linear layout.

    Raises:
        TypeError: raw is not uint8.
        ValueError: the format is unknown, or the length of raw is not a whole number of blocks.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> packed, scales = layouts.unpack_gguf(np.arange(36, dtype=np.uint8), "nvfp4")
        >>> packed.shape, scales
        ((32,), array([0, 1, 2, 3], dtype=uint8))
    """
    block = _gguf_block("unpack_gguf", format)
    check_bytes("unpack_gguf", raw, "bytes")
    _check_multiple("unpack_gguf", "raw", raw, block.bytes, f"a block of {format} has {block.bytes} bytes")
    lead, blocks = raw.shape[:-1], raw.shape[-1] // block.bytes
    each = raw.reshape(*lead, blocks, block.bytes)
    scales = each[..., : block.scales].copy().reshape(*lead, blocks * block.scales)
    pairs = each[..., block.scales :].reshape(*lead, blocks, block.scales, block.group // 4, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    packed = np.empty_like(raw, shape=(*lead, blocks, block.scales, 2, block.group // 4))
    packed[..., 0, :] = even & 0xF | odd << 4
    packed[..., 1, :] = even >> 4 | odd & 0xF0
    return packed.reshape(*lead, blocks * block.elements // 2), scales


def _gguf_block(op: str, format: str) -> GgufBlock:
    """Return the GgufBlock of a GGUF format, "mxfp4" or "nvfp4"."""
    if not is_one_of(format, GGUF_BLOCKS):
        raise ValueError(f"{op}: format is {format!r:.60}; needs one of {', '.join(GGUF_BLOCKS)}, llama.cpp's formats")
    return GGUF_BLOCKS[format]


def _check_multiple(op: str, name: str, array: Any, multiple: int, why: str) -> None:
    """Raise ValueError unless the length of the last axis of array is a multiple of `multiple`."""
    if array.shape[-1] % multiple:
        raise ValueError(
            f"{op}: the last axis of {name} has length {array.shape[-1]}; {why}; needs a multiple of {multiple}"
        )


MLX_WORD = np.dtype("<u4")  # MLX stores codes in little-endian 32-bit words


def pack_mlx(packed: Any) -> Any:
    """Convert packed codes to MLX's 32-bit words, without a copy if packed is contiguous.

        4-bit codes:  bits 0..3 c0 | 4..7 c1 | ... | 28..31 c7
        8-bit codes:  bits 0..7 c0 | 8..15 c1 | 16..23 c2 | 24..31 c3

    Scales need no conversion, because MLX's scales are uint8 (..., blocks) in linear layout.

    Args:
        packed: uint8 (..., n), 4-bit or 8-bit codes as in Quantized.packed.

    Returns:
        uint32 (..., n / 4), little-endian: a view of packed if it is contiguous, otherwise a view of a copy.

    Raises:
        TypeError: packed is not uint8.
        ValueError: the length of the last axis is not a multiple of 4.

    Exact:
        unpack_mlx is the inverse.

    Source:
        MLX 0.32.4, mx.quantize.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> [hex(word) for word in layouts.pack_mlx(np.uint8([0x10, 0x32, 0x54, 0x76]))]
        ['0x76543210']
    """
    check_bytes("pack_mlx", packed)
    _check_multiple("pack_mlx", "packed", packed, MLX_WORD.itemsize, "a word has 4 bytes")
    return contiguous(packed).view(MLX_WORD)


def unpack_mlx(words: Any) -> Any:
    """Convert MLX's 32-bit words to packed codes, without a copy if words are contiguous: the inverse of pack_mlx.

    Args:
        words: uint32 (..., n).

    Returns:
        uint8 (..., 4 n): a view of words if they are contiguous, otherwise a view of a copy.

    Raises:
        TypeError: words are not uint32.
        ValueError: words are a 0-d array.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> [hex(byte) for byte in layouts.unpack_mlx(np.uint32([0x76543210]))]
        ['0x10', '0x32', '0x54', '0x76']
    """
    check_array("unpack_mlx", "words", words)
    if words.dtype != MLX_WORD:
        raise TypeError(f"unpack_mlx: words are {words.dtype}; needs uint32")
    if not words.ndim:
        raise ValueError("unpack_mlx: words are 0-d; needs at least one axis")
    return contiguous(words).view(np.uint8)


def _integer_from(op: str, name: str, n: Any, minimum: int) -> int:
    """Return n, an integer of any library, as an int."""
    try:
        number = index_of(n)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise ValueError(f"{op}: {name} is {n!r}; needs an integer of {minimum} or more")
    return number


@returns_in_library
def pad(x: Any, multiple: int, axis: int = -1) -> Any:
    """Append zeros along an axis, so that the length of the axis becomes a multiple of ``multiple``.

    Use it before quantize, which requires that the length is a multiple of the recipe's block size.

    Args:
        x: an array of any library, with at least one axis.
        multiple: a positive int. The new length is the old one, rounded up to a multiple of this number.
        axis: the axis to pad.

    Returns:
        A new array in the library of x, with the dtype of x; or x itself if its length already is a multiple.

    Raises:
        TypeError: x is a masked array or not an array, or axis is not an int.
        ValueError: multiple is not a positive int, or x does not have the axis.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import layouts
        >>> layouts.pad(np.float32([1, 2, 3]), 4)
        array([1., 2., 3., 0.], dtype=float32)
    """
    if hasattr(x, "filled"):
        raise TypeError("pad: x is a masked array, whose mask would be lost; pass x.filled(0)")
    multiple, axis = _integer_from("pad", "multiple", multiple, 1), as_index("pad", "axis", axis)
    original, (x,) = x, import_arrays("pad", x=x)
    if not x.ndim:
        raise ValueError("pad: x is 0-d; needs at least one axis; use x.reshape(1)")
    axis = check_axis("pad", axis, x.ndim)
    missing = -x.shape[axis] % multiple
    return np.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)]) if missing else original


def shuffle_rows(M: int, epilogue_tile: int) -> np.ndarray:
    """Return the row order of FlashInfer's shuffle_matrix_a: y = x[shuffle_rows(M, epilogue_tile)].

    The rows are permuted within blocks of B rows: new row 8 i + j of a block is its old row (B / 8) j + i. B is 32 if
    epilogue_tile is a multiple of 128, otherwise 16.

    Args:
        M: number of rows, a multiple of B; 0 gives an empty array.
        epilogue_tile: FlashInfer's epilogue tile, a positive int.

    Returns:
        A NumPy array int64 (M,) of row indices: entry r is the old index of new row r.

    Raises:
        ValueError: M is not an int, is negative or is not a multiple of B; or epilogue_tile is not a positive int.

    Examples:
        >>> from fp4kit import layouts
        >>> layouts.shuffle_rows(16, 64)[:9].tolist()
        [0, 2, 4, 6, 8, 10, 12, 14, 1]
    """
    M = _integer_from("shuffle_rows", "M", M, 0)
    epilogue_tile = _integer_from("shuffle_rows", "epilogue_tile", epilogue_tile, 1)
    block = 32 if epilogue_tile % 128 == 0 else 16
    if M % block:
        raise ValueError(f"shuffle_rows: M is {M}; needs a multiple of {block} for epilogue tile {epilogue_tile}")
    inside = np.arange(block).reshape(8, -1).T.reshape(-1)
    return (np.arange(0, M, block)[:, None] + inside).reshape(-1)


from fp4kit.layouts import aiter, kv  # noqa: E402  # last, because they import functions of this module
