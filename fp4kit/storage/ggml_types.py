"""List the tensor types of GGUF files: for each type its number, name, elements per block and bytes per block.

A row of a tensor is a whole number of blocks.
Source: llama.cpp 0c1e57098, ggml.h and ggml-common.h; gguf 0.19.0, constants.py.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fp4kit.layouts import GGUF_BLOCKS


class GgmlType(NamedTuple):
    """A tensor type of GGUF files: its name, the elements per block and the bytes per block."""

    name: str
    elements: int
    bytes: int


_QK = 256
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    30: GgmlType("BF16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    20: GgmlType("IQ4_NL", 32, 18),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
    10: GgmlType("Q2_K", _QK, 84),
    11: GgmlType("Q3_K", _QK, 110),
    12: GgmlType("Q4_K", _QK, 144),
    13: GgmlType("Q5_K", _QK, 176),
    14: GgmlType("Q6_K", _QK, 210),
    15: GgmlType("Q8_K", _QK, 292),
    16: GgmlType("IQ2_XXS", _QK, 66),
    17: GgmlType("IQ2_XS", _QK, 74),
    18: GgmlType("IQ3_XXS", _QK, 98),
    19: GgmlType("IQ1_S", _QK, 50),
    21: GgmlType("IQ3_S", _QK, 110),
    22: GgmlType("IQ2_S", _QK, 82),
    23: GgmlType("IQ4_XS", _QK, 136),
    29: GgmlType("IQ1_M", _QK, 56),
    34: GgmlType("TQ1_0", _QK, 54),
    35: GgmlType("TQ2_0", _QK, 66),
    39: GgmlType("MXFP4", GGUF_BLOCKS["mxfp4"].elements, GGUF_BLOCKS["mxfp4"].bytes),
    40: GgmlType("NVFP4", GGUF_BLOCKS["nvfp4"].elements, GGUF_BLOCKS["nvfp4"].bytes),
}
# Types that llama.cpp had in earlier versions.
REMOVED = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
NUMBER_OF = {kind.name: number for number, kind in GGML_TYPES.items()}
# Types with blocks of several elements, which only GGUF files have.
BLOCKED = {kind.name: kind for kind in GGML_TYPES.values() if kind.elements > 1}


def ggml_nbytes(kind: GgmlType, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of a tensor of the GGUF type ``kind``."""
    return prod(shape) // kind.elements * kind.bytes
