"""Convert codes and scales to and from the file formats of llama.cpp (GGUF) and MLX.

A GGUF tensor is a sequence of blocks of scales and codes. An MLX tensor is an array of 32-bit words of codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.formats import MXFP4, NVFP4
from fp4kit.layouts.nibbles import check_array, check_bytes, contiguous


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
