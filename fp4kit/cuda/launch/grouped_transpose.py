"""Launch grouped_transpose.cu, which transposes the codes and block scales of a group of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.launch.geometry import address
from fp4kit.cuda.launch.grouped import GroupedLaunch, is_small, prepare_group
from fp4kit.cuda.launch.transpose import ARGUMENTS, kernel_structs, wide_copies, work_blocks
from fp4kit.recipes import Recipe

WHOLE_CODES, WORD_SCALES = 1, 2  # flags in a member's `aligned`, see grouped_transpose.cu


class TransposeMatrix(NamedTuple):
    """One matrix to transpose: the arrays of codes and scales, all contiguous.

    codes, scales: the codes and the block scales of the matrix.
    out, scales_out: the arrays for the codes and the block scales of its transposed copy.
    shape: the rows and columns of the matrix.
    """

    codes: Any
    scales: Any
    out: Any
    scales_out: Any
    shape: tuple[int, int]


@cache
def _function(bits: int, block: int, all_wide: bool, small: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    source = instantiation("grouped_transpose", kernel_structs(bits, block, "linear"), kAligned=all_wide, kSmall=small)
    return loader.function(source, "grouped_transpose_kernel", device)


def transpose_group(matrices: Sequence[TransposeMatrix], r: Recipe) -> GroupedLaunch:
    """Return a prepared launch that transposes the codes and scales of all matrices into their output arrays."""
    shapes = [(1, *m.shape) for m in matrices]
    flags_of_members = [
        wide_copies(*m[:2], r, "linear", *m[2:4], shape) for m, shape in zip(matrices, shapes, strict=True)
    ]
    flags = np.array(flags_of_members) @ (WHOLE_CODES, WORD_SCALES)
    bits, device = r.element.packing.stored_bits, matrices[0].codes.device.id
    small = is_small(matrices)
    function = _function(bits, r.block_size, all(map(all, flags_of_members)), small, device)
    table = np.array([(*map(address, m[:4]), *shape) for m, shape in zip(matrices, shapes, strict=True)], ARGUMENTS)
    pieces = np.array([work_blocks(bits, r.block_size, "linear", shape) for shape in shapes])
    return prepare_group(function, table, flags, pieces, tuple(matrices), small)
