"""What llama.cpp and MLX keep in their files: blocks of codes and scales, words of codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.formats import MXFP4, NVFP4
from fp4kit.layouts.nibbles import check_array, check_bytes


class GgufBlock(NamedTuple):
    """A block of a GGUF tensor: `scales` scale bytes, then the codes of as many groups of `group` elements, two a
    byte.
    """

    scales: int
    group: int

    @property
    def elements(self) -> int:
        """Elements of a block, of which a row is a whole number."""
        return self.scales * self.group

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.scales * (1 + self.group // 2)


GGUF_BLOCKS = {"mxfp4": GgufBlock(1, MXFP4.block_size), "nvfp4": GgufBlock(4, NVFP4.block_size)}


def pack_gguf(packed: Any, scales: Any, format: str) -> Any:
    """Packed codes and their block scales -> the bytes of a GGUF tensor, block by block.

        mxfp4, 17 bytes of 32 elements:   s   | c0 c16 | c1 c17 | ... | c15 c31 |
        nvfp4, 36 bytes of 64 elements:   s s s s   then for each of the 4 groups of 16   | c0 c8 | c1 c9 | ... | c7 c15
        |

    (s: a scale's byte; of two codes in a byte the first has the low nibble.)

    packed: uint8 (..., K/2), two codes a byte as in Quantized.packed, K a multiple of 32 or 64. scales: uint8 (...,
    K/32) or (..., K/16), linear. format: "mxfp4" or "nvfp4". Returns a new uint8 array (..., K/32*17) or (..., K/64*36)
    of their library. Raises TypeError unless both are uint8; ValueError for another format, K that is no multiple, or
    shapes that do not fit. No byte is interpreted: a scale byte stays what it is, also where llama.cpp reads it in
    another way (which the recipes mxfp4-gguf and nvfp4-gguf know). Inverse: unpack_gguf. Source: llama.cpp 0c1e57098,
    ggml-common.h block_mxfp4 and block_nvfp4.

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
            f"pack_gguf: scales are {scales.shape}; packed {packed.shape} of {format} needs {expected}, linear"
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
    """Bytes of a GGUF tensor -> packed codes (..., K/2), two a byte as in Quantized.packed, and scales; inverse of
    pack_gguf.

    raw: uint8 (..., K/32*17) for "mxfp4", (..., K/64*36) for "nvfp4", as gguf.GGUFReader gives a tensor's data.
    Raises as pack_gguf.

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
    if not is_one_of(format, GGUF_BLOCKS):
        raise ValueError(f"{op}: format is {format!r:.60}; needs one of {', '.join(GGUF_BLOCKS)}, which llama.cpp has")
    return GGUF_BLOCKS[format]


def _check_multiple(op: str, name: str, array: Any, multiple: int, why: str) -> None:
    if array.shape[-1] % multiple:
        raise ValueError(
            f"{op}: the last axis of {name} has length {array.shape[-1]}; {why}; needs a multiple of {multiple}"
        )


def _contiguous(a: Any) -> Any:
    """np.ascontiguousarray, which CuPy's arrays do not take."""
    return a if a.flags.c_contiguous else a.copy()


MLX_WORD = np.dtype("<u4")


def pack_mlx(packed: Any) -> Any:
    """Packed codes -> MLX's words: uint8 (..., n), of 4-bit or 8-bit codes -> uint32 (..., n / 4), a view where it can
    be.

        word:  bits 0..3 c0 | 4..7 c1 | ... | 28..31 c7        of 8-bit codes:  0..7 c0 | 8..15 c1 | 16..23 c2 | 24..31
        c3

    Raises TypeError unless packed is uint8; ValueError unless the last axis is a multiple of 4. Scales need no change:
    MLX's are uint8 (..., blocks), linear. Inverse: unpack_mlx. Source: MLX 0.32.4, mx.quantize, whose words are
    little-endian.

    >>> import numpy as np
    >>> from fp4kit import layouts
    >>> [hex(word) for word in layouts.pack_mlx(np.uint8([0x10, 0x32, 0x54, 0x76]))]
    ['0x76543210']
    """
    check_bytes("pack_mlx", packed)
    _check_multiple("pack_mlx", "packed", packed, MLX_WORD.itemsize, "a word has 4 bytes")
    return _contiguous(packed).view(MLX_WORD)


def unpack_mlx(words: Any) -> Any:
    """MLX's words -> packed codes: uint32 (..., n) -> uint8 (..., 4 n), a view where it can be; inverse of pack_mlx.

    Raises TypeError unless words are uint32, ValueError for a 0-d array.

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
    return _contiguous(words).view(np.uint8)
