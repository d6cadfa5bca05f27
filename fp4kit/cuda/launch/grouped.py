"""Launchers of groups: one kernel over many tensors, prepared once and launched as often as needed. See grouped.cuh.

A Launch holds the table of pointers on the device, and every array it points to; launching it does no work for each
tensor.
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
SMALL_GROUP = 32  # the most members of a small group: kSmallGroup of grouped.cuh
PIECES_PER_MULTIPROCESSOR = 20  # if there is little work
# Fewest and most elements of a piece: one and three turns of a thread block whose threads take 64 bytes of bfloat16
# each. More turns amortize what a piece begins with (a table of factors, loads of its position), but make the end
# uneven. Time of 8 tensors of 1856 x 2688 relative to one launch, with one turn, PIECES_PER_MULTIPROCESSOR and three
# turns: nvfp4-te 1.10, 1.03, 1.05; mxfp4-flashinfer 1.03, 1.05, 1.10 (H200, 2026-11-21).
MIN_ELEMENTS, MAX_ELEMENTS = 8192, 24576


@dataclass(frozen=True)
class GroupedLaunch:
    """A launch that is ready: call it to make it, on the current stream of the current device."""

    function: Any
    grid: int
    arguments: np.ndarray  # plain bytes: see geometry.Launch
    held: tuple[Any, ...]  # the table, and the arrays it points to
    threads: int = THREADS  # of a block

    def __call__(self) -> None:
        self.function((self.grid,), (self.threads,), (self.arguments,))


def is_small(members: Sequence[Any]) -> bool:
    """Whether a group's members go with the kernel's arguments: which instantiation it takes (kSmall)."""
    return len(members) <= SMALL_GROUP


def piece_counts(elements: np.ndarray, device: int, most: int = MAX_ELEMENTS) -> np.ndarray:
    """Return into how many pieces each tensor is divided. Pieces have one size, as far as whole pieces allow. A tensor
    without elements has one piece.

    most: the most elements of a piece.
    """
    check_count(int(elements.max()))
    share = int(elements.sum()) // (geometry.multiprocessors(device) * PIECES_PER_MULTIPROCESSOR)
    return np.maximum(-(-elements // int(np.clip(share, MIN_ELEMENTS, most))), 1)


def group_table(members: np.ndarray) -> np.ndarray:
    """Return the members, followed by their pieces, as grouped.cuh declares them in device memory, in 8-byte words."""
    pieces = members["pieces"]
    work = np.empty(int(pieces.sum()), _PIECE)
    work["member"] = np.repeat(np.arange(len(pieces)), pieces)
    work["index"] = np.arange(len(work)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.concatenate([members.view(np.uint64), work.view(np.uint64)])


def prepare_group(
    function: Any, arguments: np.ndarray, whole: ArrayLike, pieces: np.ndarray, held: Any, small: bool = False
) -> GroupedLaunch:
    """The launch of a grouped kernel: arguments, alignment and number of pieces of each member; small: kSmall of the
    kernel.
    """
    member = np.dtype([("arguments", arguments.dtype), ("pieces", "u4"), ("aligned", "u4")])
    members, total, table = np.zeros(len(arguments), member), int(pieces.sum()), None
    members["arguments"], members["pieces"], members["aligned"] = arguments, pieces, whole
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
def _quantize_function(kernel: str, struct: str, dtype: np.dtype, whole: bool, small: bool, device: int) -> Any:
    source = instantiation(f"grouped_{kernel}", struct, Input=TYPES[dtype], kAligned=whole, kSmall=small)
    return loader.function(source, f"grouped_{kernel}_kernel", device)


def quantize_group(matrices: Sequence[Matrix], requests: Sequence[LaunchRequest], seed: int = 0) -> GroupedLaunch:
    """The launch that does launch.quantize_matrix of each matrix.

    works: of the matrices, the same but for their shapes; all of one device. Matrices without elements are of shape (n,
    0), where n is how many tensor scales they have.
    """
    first, r = matrices[0], requests[0].recipe
    choice = kernel_for(requests[0]._replace(grouped=True))
    whole = [has_aligned_runs(m, w) for m, w in zip(matrices, requests, strict=True)]
    arguments = np.zeros(len(matrices), choice.arguments.struct)
    for name in choice.arguments.pointers:
        arguments[name] = [address(getattr(m, name)) for m in matrices]
    arguments["seed"], arguments["group"] = seed, [m.group for m in matrices]
    sizes = [w.kernel_shape if m.x.size else m.x.shape for m, w in zip(matrices, requests, strict=True)]
    arguments["rows"], arguments["columns"] = zip(*sizes, strict=True)
    if r.block:
        check_columns(int(arguments["columns"].max()))
    device, small = first.x.device.id, is_small(matrices)
    function = _quantize_function(choice.kernel, kernel_structs(requests[0]), first.x.dtype, all(whole), small, device)
    simple = small and not has_table(r) and r.tensor_scaling != "row"  # a piece begins with little
    pieces = piece_counts(np.array([m.x.size for m in matrices]), device, MIN_ELEMENTS if simple else MAX_ELEMENTS)
    return prepare_group(function, arguments, whole, pieces, tuple(matrices), small)


@cache
def _amax_function(
    kernel: str, dtype: np.dtype, counted: str, whole: bool, small: bool, mask: int | None, device: int
) -> Any:
    names: dict[str, str | bool] = {
        "Input": TYPES[dtype],
        "kCounted": f"AmaxInput::{counted}",
        "kAligned": whole,
        "kSmall": small,
    }
    return loader.function(instantiation("grouped_amax", transform_struct(mask), **names), kernel, device)


def amax_group(
    xs: Sequence[Any], outs: Sequence[Any], counted: str, by_row: bool = False, mask: int | None = None
) -> GroupedLaunch:
    """The launch that writes what launch.amax gives of each array into its out, which must hold zeros if not by_row."""
    shapes = [x.shape if by_row else (1, x.size) for x in xs]
    whole = [aligned(x, shape[1] * x.dtype.itemsize if by_row else 16) for x, shape in zip(xs, shapes, strict=True)]
    arguments = np.array(
        [(address(x), address(out), *shape) for x, out, shape in zip(xs, outs, shapes, strict=True)], AMAX
    )
    device = xs[0].device.id
    kernel = "grouped_amax_rows_kernel" if by_row else "grouped_amax_kernel"
    small = is_small(xs)
    function = _amax_function(kernel, xs[0].dtype, counted, all(whole), small, mask, device)
    pieces = piece_counts(np.array([x.size for x in xs]), device)
    return prepare_group(function, arguments, whole, pieces, (tuple(xs), tuple(outs)), small)


class Clip(NamedTuple):
    """The arguments of clip.clip_gradient."""

    grad: Any
    x: Any
    amax: Any
    out: Any


@cache
def _clip_function(dtype: np.dtype, grad: np.dtype, whole: bool, small: bool, device: int) -> Any:
    source = instantiation("grouped_clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=whole, kSmall=small)
    return loader.function(source, "grouped_clip_kernel", device)


def clip_group(clips: Sequence[Clip]) -> GroupedLaunch:
    """The launch that does clip.clip_gradient of each; xs of one dtype, gradients of one, all with elements, on one
    device.
    """
    whole = [all(a.data.ptr % 16 == 0 for a in (c.grad, c.x, c.out)) for c in clips]
    arguments = np.array([(*map(address, c), c.x.size, c.x.size // c.amax.size) for c in clips], CLIP)
    first = clips[0]
    device, small = first.x.device.id, is_small(clips)
    function = _clip_function(first.x.dtype, first.grad.dtype, all(whole), small, device)
    pieces = piece_counts(np.array([c.x.size for c in clips]), device, MIN_ELEMENTS)
    return prepare_group(function, arguments, whole, pieces, tuple(clips), small)
