"""Convert between memory layouts of codes and scales: nibble order, scale swizzles, file formats, KV caches, padding.

The functions rearrange the bytes of NumPy and CuPy arrays. They do not change any value. The module kv handles the
pages of KV caches, and the module aiter the order of codes and scales that aiter's kernels read.
"""

from fp4kit.layouts import aiter, kv
from fp4kit.layouts.files import GGUF_BLOCKS, MLX_WORD, GgufBlock, pack_gguf, pack_mlx, unpack_gguf, unpack_mlx
from fp4kit.layouts.nibbles import check_pairs, pack, packed, unpack, unpacked, write_codes
from fp4kit.layouts.padding import pad, shuffle_rows
from fp4kit.layouts.scales import (
    SCALE_LAYOUTS,
    TILE_COLUMNS,
    check_layout,
    check_size,
    padded_shape,
    swizzle_scales,
    tile_rows,
    unswizzle_scales,
)

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
    "write_codes",
]


def __dir__() -> list[str]:
    """Return the public names, so that completion shows no others."""
    return list(__all__)
