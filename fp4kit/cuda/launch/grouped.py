"""Prepare single kernel launches for groups of tensors: quantize, amax and clip.
The tensors of a group are its members. The work on a member is divided into pieces, and a thread block processes one
piece at a time. A sign mask is an int whose bit i is 1 if a Hadamard transform first negates element i of each 16.

The addresses and sizes of the members are passed as kernel arguments if the group is small. Otherwise they are in a
table in device memory. kernels/shared/grouped.cuh uses the words member and piece, too.

A GroupedLaunch is prepared once and launched as often as needed. It keeps the table and all arrays alive. A launch does
no work per tensor on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, has_table
from fp4kit.cuda.launch import geometry
from fp4kit.cuda.launch.clip import CLIP
from fp4kit.cuda.launch.dispatch import LaunchRequest, kernel_for
from fp4kit.cuda.launch.geometry import THREADS, address, aligned, check_columns, check_count
from fp4kit.cuda.launch.matrix import AMAX, Matrix, has_aligned_runs, kernel_structs, transform_struct

_GROUP = np.dtype([("members", "u8"), ("count", "i8"), ("pieces", "i8")])
_PIECE = np.dtype([("member", "u4"), ("index", "u4")])
SMALL_GROUP = 32  # the most members of a small group: kSmallGroup in grouped.cuh
# Pieces per multiprocessor, unless pieces would have fewer than MIN_PIECE or more than MAX_PIECE elements.
PIECES_PER_MULTIPROCESSOR = 20
# The fewest and the most elements per piece. If each of the 256 threads of a thread block reads 32 bfloat16 elements
# (64 bytes) per turn, the thread block processes 8192 elements per turn, so these sizes are one turn and three turns.
# Larger pieces amortize their setup (computing a table of factors, looking up the piece's tensor), but leave more
# thread blocks waiting for the last one at the end. Time for 8 tensors of 1856 x 2688, relative to one launch on
# one tensor of their total size, by elements per piece (H200, 2026-11-21). In the middle column, the size follows from
# PIECES_PER_MULTIPROCESSOR:
#     recipe             8192   from the number of pieces   24576
#     nvfp4-te           1.10   1.03                        1.05
#     mxfp4-flashinfer   1.03   1.05                        1.10
MIN_PIECE, MAX_PIECE = 8192, 24576


@dataclass(frozen=True)
class GroupedLaunch:
    """A prepared launch of a kernel over a group of tensors. Call this object to launch it on the current stream.

    Attributes:
        function: the CuPy function of the kernel.
        grid: the number of thread blocks.
        arguments: the struct of arguments, as an array with one element of raw bytes (see geometry.Launch).
        held: the table and the arrays that it points to, kept alive.
        threads: threads per thread block.
    """

    function: Any
    grid: int
    arguments: np.ndarray
    held: tuple[Any, ...]
    threads: int = THREADS

    def __call__(self) -> None:
        """Launch the kernel on the current stream, without waiting for it."""
        self.function((self.grid,), (self.threads,), (self.arguments,))


def is_small(members: Sequence[Any]) -> bool:
    """Return True if a group has at most 32 members (SMALL_GROUP)."""
    return len(members) <= SMALL_GROUP


def piece_counts(elements: np.ndarray, device: int, most: int = MAX_PIECE) -> np.ndarray:
    """Return the number of pieces into which the work on each tensor of a group is divided: an int64 array."""
    # The largest size is chosen so that the group has about 20 pieces per multiprocessor (PIECES_PER_MULTIPROCESSOR),
    # but it is at least MIN_PIECE (8192) and at most `most` elements.
    check_count(int(elements.max()))
    share = int(elements.sum()) // (geometry.multiprocessors(device) * PIECES_PER_MULTIPROCESSOR)
    return np.maximum(-(-elements // int(np.clip(share, MIN_PIECE, most))), 1)


def group_table(members: np.ndarray) -> np.ndarray:
    """Return the table of a large group in 8-byte words (see grouped.cuh): first the members, then the pieces."""
    pieces = members["pieces"]
    work = np.empty(int(pieces.sum()), _PIECE)
    work["member"] = np.repeat(np.arange(len(pieces)), pieces)
    work["index"] = np.arange(len(work)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.concatenate([members.view(np.uint64), work.view(np.uint64)])


def prepare_group(
    function: Any, arguments: np.ndarray, aligned_runs: ArrayLike, pieces: np.ndarray, held: Any, small: bool = False
) -> GroupedLaunch:
    """Return a prepared launch of a kernel that processes a group of tensors (its members)."""
    member = np.dtype([("arguments", arguments.dtype), ("pieces", "u4"), ("aligned", "u4")])
    members, total, table = np.zeros(len(arguments), member), int(pieces.sum()), None
    members["arguments"], members["pieces"], members["aligned"] = arguments, pieces, aligned_runs
    if small:
        group = np.zeros(1, [("pieces", "i8"), ("first", "u4", SMALL_GROUP), ("members", member, SMALL_GROUP)])
        first = np.cumsum(pieces) - pieces
        group["pieces"], group["first"] = total, np.pad(first, (0, SMALL_GROUP - len(first)), constant_values=2**32 - 1)
        group["members"][0, : len(members)] = members
    else:
        table = imports.cupy().asarray(group_table(members))
        group = np.array([(table.data.ptr, len(members), total)], _GROUP)
    return GroupedLaunch(function, total, group.view(np.dtype((np.void, group.itemsize))), (table, held))


@cache
def _quantize_function(kernel: str, struct: str, dtype: np.dtype, aligned_runs: bool, small: bool, device: int) -> Any:
    """Return the grouped variant of a quantize kernel, compiled, as a CuPy function that is loaded on a device."""
    source = instantiation(f"grouped_{kernel}", struct, Input=TYPES[dtype], kAligned=aligned_runs, kSmall=small)
    return loader.function(source, f"grouped_{kernel}_kernel", device)


def quantize_group(matrices: Sequence[Matrix], requests: Sequence[LaunchRequest], seed: int = 0) -> GroupedLaunch:
    """Return a prepared launch that quantizes all matrices as launch.matrix.quantize_matrix does."""
    first, r = matrices[0], requests[0].recipe
    choice = kernel_for(requests[0]._replace(grouped=True))
    aligned_runs = [has_aligned_runs(m, w) for m, w in zip(matrices, requests, strict=True)]
    arguments = np.zeros(len(matrices), choice.arguments.struct)
    for name in choice.arguments.pointers:
        arguments[name] = [address(getattr(m, name)) for m in matrices]
    arguments["seed"], arguments["group"] = seed, [m.group for m in matrices]
    sizes = [w.kernel_shape if m.x.size else m.x.shape for m, w in zip(matrices, requests, strict=True)]
    arguments["rows"], arguments["columns"] = zip(*sizes, strict=True)
    if r.block:
        check_columns(int(arguments["columns"].max()))
    device, small = first.x.device.id, is_small(matrices)
    function = _quantize_function(
        choice.kernel, kernel_structs(requests[0]), first.x.dtype, all(aligned_runs), small, device
    )
    simple = (
        small and not has_table(r) and r.tensor_scaling != "row"
    )  # a piece has little setup, so small pieces are best
    pieces = piece_counts(np.array([m.x.size for m in matrices]), device, MIN_PIECE if simple else MAX_PIECE)
    return prepare_group(function, arguments, aligned_runs, pieces, tuple(matrices), small)


@cache
def _amax_function(
    kernel: str, dtype: np.dtype, counted: str, aligned_runs: bool, small: bool, mask: int | None, device: int
) -> Any:
    """Return a compiled grouped amax kernel as a CuPy function on a device."""
    names: dict[str, str | bool] = {
        "Input": TYPES[dtype],
        "kCounted": f"AmaxInput::{counted}",
        "kAligned": aligned_runs,
        "kSmall": small,
    }
    return loader.function(instantiation("grouped_amax", transform_struct(mask), **names), kernel, device)


def amax_group(
    xs: Sequence[Any], outs: Sequence[Any], counted: str, by_row: bool = False, mask: int | None = None
) -> GroupedLaunch:
    """Return a prepared launch that computes the amax of each array in xs, as launch.matrix.amax does."""
    # If by_row is False, outs must hold zeros before each launch.
    shapes = [x.shape if by_row else (1, x.size) for x in xs]
    aligned_runs = [
        aligned(x, shape[1] * x.dtype.itemsize if by_row else 16) for x, shape in zip(xs, shapes, strict=True)
    ]
    arguments = np.array(
        [(address(x), address(out), *shape) for x, out, shape in zip(xs, outs, shapes, strict=True)], AMAX
    )
    device = xs[0].device.id
    kernel = "grouped_amax_rows_kernel" if by_row else "grouped_amax_kernel"
    small = is_small(xs)
    function = _amax_function(kernel, xs[0].dtype, counted, all(aligned_runs), small, mask, device)
    pieces = piece_counts(np.array([x.size for x in xs]), device)
    return prepare_group(function, arguments, aligned_runs, pieces, (tuple(xs), tuple(outs)), small)


class Clip(NamedTuple):
    """The arguments of launch.clip.clip_gradient for one array of a group. `out` is the array to write to."""

    grad: Any
    x: Any
    amax: Any
    out: Any


@cache
def _clip_function(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, small: bool, device: int) -> Any:
    """Return the compiled kernel grouped_clip as a CuPy function on a device."""
    source = instantiation(
        "grouped_clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=aligned_runs, kSmall=small
    )
    return loader.function(source, "grouped_clip_kernel", device)


def clip_group(clips: Sequence[Clip]) -> GroupedLaunch:
    """Return a prepared launch that clips all gradients in `clips` as launch.clip.clip_gradient does."""
    aligned_runs = [all(a.data.ptr % 16 == 0 for a in (c.grad, c.x, c.out)) for c in clips]
    arguments = np.array([(*map(address, c), c.x.size, c.x.size // c.amax.size) for c in clips], CLIP)
    first = clips[0]
    device, small = first.x.device.id, is_small(clips)
    function = _clip_function(first.x.dtype, first.grad.dtype, all(aligned_runs), small, device)
    pieces = piece_counts(np.array([c.x.size for c in clips]), device, MIN_PIECE)
    return prepare_group(function, arguments, aligned_runs, pieces, tuple(clips), small)
