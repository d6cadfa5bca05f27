"""Launch the kernels for one matrix: quantize, fake_quantize, dequantize and amax.
A sign mask is an int whose bit i is 1 if the Hadamard transform first negates element i of each 16.

All functions launch on the current stream, and none waits for the device. Arrays are contiguous CuPy arrays on one
device, with the quantized axis last. Prepared launches are cached, because a Launch depends only on dtypes, shapes and
alignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fp4kit.arrays import imports
from fp4kit.call.parse import Call, Declined
from fp4kit.cuda import compiler
from fp4kit.cuda import launch as geometry
from fp4kit.cuda.compiler import FINDERS, TYPES, has_table, instantiation, recipe_struct
from fp4kit.cuda.dispatch import (
    CACHE_SIZE,
    MORE_VALUE_RUNS,
    VALUE_RUNS,
    KernelChoice,
    LaunchRequest,
    RowPlan,
    finds_rows,
    kernel_for,
    row_plan,
    value_blocks,
)
from fp4kit.cuda.launch import (
    THREADS,
    UNLIMITED,
    Launch,
    address,
    aligned,
    check_columns,
    check_count,
    grid,
    resident_blocks,
)
from fp4kit.formats import E4M3
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.recipes.schema import decoding, faking, with_row_blocks
from fp4kit.reference.codec import is_per_expert, part_for_matrix

_DEQUANTIZE = np.dtype(
    [(n, "u8") for n in ("packed", "scales", "values", "tensor_scale", "tensor_amax")]
    + [(n, "i8") for n in ("rows", "columns", "ahead")]
)
_IMPLIED = np.dtype([(n, "u8") for n in ("tensor_scale", "tensor_amax", "amax")] + [("count", "i8")])
AMAX = np.dtype([("x", "u8"), ("amax", "u8"), ("rows", "i8"), ("columns", "i8")])


class Matrix(NamedTuple):
    """The inputs and outputs of a kernel for one matrix (M, K). Fields have the names of the kernels' arguments.

    Arrays that the kernel does not need are None.

    Attributes:
        x: the elements.
        packed, scales, tensor_scale: the codes and scales of the rowwise result.
        column_packed, column_scales, column_tensor_scale: the codes and scales of the columnwise result.
        values: the fake-quantized values, if they are written instead of codes.
        tensor_amax, block_amax: the amaxes from which scales are computed.
        amax_out, column_amax_out: arrays into which the kernel copies tensor_amax.
        random: the random bytes of stochastic rounding; None if a seed is used.
        group: where the matrix begins in the random stream of a seed, counted in groups of 16 elements.
    """

    x: Any
    packed: Any = None
    scales: Any = None
    values: Any = None
    tensor_amax: Any = None
    tensor_scale: Any = None
    block_amax: Any = None
    random: Any = None
    amax_out: Any = None
    column_packed: Any = None
    column_scales: Any = None
    column_tensor_scale: Any = None
    column_amax_out: Any = None
    group: int = 0


def has_aligned_runs(m: Matrix, request: LaunchRequest) -> bool:
    """Return True if kernels can load and store 16 bytes at a time."""
    rows, columns = request.kernel_shape
    return aligned(m.x, columns * m.x.dtype.itemsize if rows > 1 else 16) and (
        m.values is None or m.values.data.ptr % 16 == 0
    )


def kernel_structs(request: LaunchRequest, plan: RowPlan | None = None) -> str:
    """Return the C++ text of the structs that are template arguments of the kernel for a request."""
    options: dict[str, Any] = {
        "fake": request.values,
        "stochastic": request.stochastic,
        "calibrated": request.calibrated,
    }
    r = decoding(faking(request.recipe), request.dtype) if request.values else request.recipe
    if plan is not None:
        options["row_step"] = plan.step, plan.thread_bytes
    finds_amax = request.finds_amax and plan is None
    return recipe_struct(r, request.layout, **options, sign_mask=request.mask, finds_amax=finds_amax)


@cache
def _function(kernel: str, struct: str, dtype: np.dtype, aligned_runs: bool, device: int) -> Any:
    """Return a compiled kernel for elements of a dtype, as a CuPy function that is loaded on a device."""
    return compiler.function(
        instantiation(kernel, struct, Input=TYPES[dtype], kAligned=aligned_runs), f"{kernel}_kernel", device
    )


@lru_cache(CACHE_SIZE)
def quantize_launch(choice: KernelChoice, request: LaunchRequest, aligned_runs: bool, device: int) -> Launch:
    """Return the prepared launch of a kernel for a request."""
    sizes = choice.sizes(request)
    check_count(sizes[0] * sizes[1])
    if request.recipe.block:
        check_columns(sizes[1])
    plan = row_plan(request, device)
    function = _function(choice.kernel, kernel_structs(request, plan), request.dtype, aligned_runs, device)
    blocks = choice.grid(request, device)
    if request.finds_amax and plan is None:
        blocks = -(-blocks // FINDERS) * FINDERS  # whole clusters
    threads = choice.threads if plan is None else plan.threads
    return Launch(function, blocks, choice.arguments.struct, *sizes, threads=threads)


def quantize_matrix(m: Matrix, request: LaunchRequest, seed: int = 0, choice: KernelChoice | None = None) -> None:
    """Quantize the matrix m.x by one launch, which writes the output arrays of m."""
    choice = choice or kernel_for(request)
    launch = quantize_launch(choice, request, has_aligned_runs(m, request), m.x.device.id)
    numbers = (seed, m.group) if choice.arguments.words else ()
    launch(*(address(getattr(m, name)) for name in choice.arguments.pointers), *numbers)


@cache
def _dequantize_function(r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, device: int) -> Any:
    """Return the compiled kernel dequantize as a CuPy function on a device."""
    source = instantiation(
        "dequantize", recipe_struct(decoding(r, dtype), layout), Input=TYPES[original], Output=TYPES[dtype]
    )
    return compiler.function(source, "dequantize_kernel", device)


@lru_cache(CACHE_SIZE)
def dequantize_launch(
    r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, shape: tuple[int, int], device: int
) -> Launch:
    """Return the prepared launch that dequantizes matrices of a shape (rows, columns)."""
    rows, columns = shape
    check_count(rows * columns)
    if layout == "linear" and r.tensor_scaling != "row":
        rows, columns = 1, rows * columns
    prepares_tables = (
        layout != "linear" and r.scale == E4M3 and r.tensor_scaling in ("none", "tensor") and dtype.itemsize == 2
    )
    blocks = grid(
        value_blocks(rows, columns, dtype, MORE_VALUE_RUNS if prepares_tables else VALUE_RUNS), device, UNLIMITED
    )
    function = _dequantize_function(r, layout, original, dtype, device)
    return Launch(function, blocks, _DEQUANTIZE, rows, columns, resident_blocks(device))


@cache
def _implied_function(r: Recipe, original: np.dtype, device: int) -> Any:
    """Return the compiled kernel implied_amax as a CuPy function on a device."""
    return compiler.function(
        instantiation("implied_amax", recipe_struct(r), Input=TYPES[original]), "implied_amax_kernel", device
    )


def implies_amaxes(r: Recipe) -> bool:
    """Return True if the amaxes of rows or blocks must be computed from their tensor scales before decoding."""
    # The amax of a whole tensor needs no such step, because the kernel that decodes computes it itself.
    return r.tensor_scaling in ("row", "block") and DECODE_RULES[r.decode_rule].needs_amax


def implied_amaxes(tensor_scale: Any, amax: Any, r: Recipe, original: np.dtype) -> Any:
    """Return, for each tensor scale, an amax for which the recipe gives this scale: float32 in the shape of the
    scales.
    """
    device, count = tensor_scale.device.id, tensor_scale.size
    found = imports.cupy().empty(tensor_scale.shape, np.float32)
    launch = Launch(_implied_function(r, original, device), grid(-(-count // THREADS), device), _IMPLIED, count)
    launch(*map(address, (tensor_scale, amax, found)))
    return found


def dequantize_matrix(
    packed: Any, scales: Any, r: Recipe, layout: str, tensor_scale: Any, amax: Any, original: np.dtype, values: Any
) -> None:
    """Decode a quantized matrix, and write the values into `values`, rounded to its dtype."""
    if implies_amaxes(r):
        amax = implied_amaxes(tensor_scale, amax, r, original)
    launch = dequantize_launch(r, layout, original, values.dtype, values.shape, values.device.id)
    launch(*map(address, (packed, scales, values, tensor_scale, amax)))


def transform_struct(mask: int | None) -> str:
    """Return the text of the C++ struct Transform, which tells an amax kernel whether to apply a Hadamard transform."""
    text = f"struct Transform {{ static constexpr bool kHadamard = {str(mask is not None).lower()}; "
    return text + f"static constexpr u32 kSignMask = {mask or 0}u; }};"


@cache
def _amax_function(
    kernel: str, dtype: np.dtype, counted: str, aligned_runs: bool, mask: int | None, device: int
) -> Any:
    """Return a compiled amax kernel, as a CuPy function that is loaded on a device."""
    source = instantiation(
        "amax", transform_struct(mask), Input=TYPES[dtype], kCounted=f"AmaxInput::{counted}", kAligned=aligned_runs
    )
    return compiler.function(source, kernel, device)


@lru_cache(CACHE_SIZE)
def amax_launch(
    dtype: np.dtype,
    counted: str,
    by_row: bool,
    aligned_runs: bool,
    rows: int,
    columns: int,
    device: int,
    mask: int | None = None,
) -> Launch:
    """Return the prepared launch that computes the amax of a matrix or, if by_row is True, one amax per row."""
    # If by_row is False, the result must hold 0 before, because the kernel only raises it.
    function = _amax_function(
        "amax_rows_kernel" if by_row else "amax_kernel", dtype, counted, aligned_runs, mask, device
    )
    work = min(rows, -(-rows * columns // (4 * THREADS))) if by_row else -(-columns // (16 * THREADS))
    return Launch(function, grid(work, device), AMAX, rows, columns)


def amax(x: Any, counted: str = "all", by_row: bool = False, mask: int | None = None) -> Any:
    """Return the largest magnitude of a contiguous array, float32 (), or of each row of a matrix, float32 (M,)."""
    cupy = imports.cupy()
    rows, columns = x.shape if by_row else (1, x.size)
    aligned_runs = aligned(x, columns * x.dtype.itemsize if by_row else 16)
    launch = amax_launch(x.dtype, counted, by_row, aligned_runs, rows, columns, x.device.id, mask)
    out = cupy.zeros(rows if by_row else (), np.float32)
    launch(x.data.ptr, out.data.ptr)
    return out


# Maps the amax_nan of a recipe to the elements that count in the tensor amax.
COUNTED = {"ignore": "no_nan", "propagate": "all", "lanes": "finite"}


def empty_scales(shape: tuple[int, ...], layout: str) -> Any:
    """Return a new uint8 array for block scales: uninitialized in the linear layout, zeros in a swizzled layout."""
    # Zeros are needed because not every kernel writes the padding of a swizzled layout.
    cupy = imports.cupy()
    return cupy.empty(shape, np.uint8) if layout == "linear" else cupy.zeros(padded_shape(shape, layout), np.uint8)


CLIP = np.dtype([(name, "u8") for name in ("grad", "x", "amax", "out")] + [("count", "i8"), ("covered", "i8")])


@cache
def _clip_function(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, device: int) -> Any:
    """Return the compiled kernel as a CuPy function on a device."""
    source = instantiation("clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=aligned_runs)
    return compiler.function(source, "clip_kernel", device)


@lru_cache(CACHE_SIZE)
def _clip_launch(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, count: int, covered: int, device: int) -> Launch:
    """Return the prepared launch of clip.cu for arrays of `count` elements."""
    blocks = -(-count * max(dtype.itemsize, grad.itemsize) // (16 * THREADS))
    return Launch(
        _clip_function(dtype, grad, aligned_runs, device), grid(blocks, device, UNLIMITED), CLIP, count, covered
    )


def clip_gradient(grad: Any, x: Any, amax: Any, out: Any) -> None:
    """Write the clipped gradient into out: grad where |x| <= amax, otherwise +0."""
    aligned_runs = all(a.data.ptr % 16 == 0 for a in (grad, x, out))
    launch = _clip_launch(x.dtype, grad.dtype, aligned_runs, x.size, x.size // amax.size, x.device.id)
    launch(*map(address, (grad, x, amax, out)))


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
    return compiler.function(source, f"grouped_{kernel}_kernel", device)


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
def _grouped_amax_function(
    kernel: str, dtype: np.dtype, counted: str, aligned_runs: bool, small: bool, mask: int | None, device: int
) -> Any:
    """Return a compiled grouped amax kernel as a CuPy function on a device."""
    names: dict[str, str | bool] = {
        "Input": TYPES[dtype],
        "kCounted": f"AmaxInput::{counted}",
        "kAligned": aligned_runs,
        "kSmall": small,
    }
    return compiler.function(instantiation("grouped_amax", transform_struct(mask), **names), kernel, device)


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
    function = _grouped_amax_function(kernel, xs[0].dtype, counted, all(aligned_runs), small, mask, device)
    pieces = piece_counts(np.array([x.size for x in xs]), device)
    return prepare_group(function, arguments, aligned_runs, pieces, (tuple(xs), tuple(outs)), small)


class Clip(NamedTuple):
    """The arguments of launch.clip.clip_gradient for one array of a group. `out` is the array to write to."""

    grad: Any
    x: Any
    amax: Any
    out: Any


@cache
def _grouped_clip_function(dtype: np.dtype, grad: np.dtype, aligned_runs: bool, small: bool, device: int) -> Any:
    """Return the compiled kernel grouped_clip as a CuPy function on a device."""
    source = instantiation(
        "grouped_clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=aligned_runs, kSmall=small
    )
    return compiler.function(source, "grouped_clip_kernel", device)


def clip_group(clips: Sequence[Clip]) -> GroupedLaunch:
    """Return a prepared launch that clips all gradients in `clips` as launch.clip.clip_gradient does."""
    aligned_runs = [all(a.data.ptr % 16 == 0 for a in (c.grad, c.x, c.out)) for c in clips]
    arguments = np.array([(*map(address, c), c.x.size, c.x.size // c.amax.size) for c in clips], CLIP)
    first = clips[0]
    device, small = first.x.device.id, is_small(clips)
    function = _grouped_clip_function(first.x.dtype, first.grad.dtype, all(aligned_runs), small, device)
    pieces = piece_counts(np.array([c.x.size for c in clips]), device, MIN_PIECE)
    return prepare_group(function, arguments, aligned_runs, pieces, tuple(clips), small)


# In arrays of up to this many elements, the quantize kernel itself computes the amaxes (with_kernel_amax). For a tensor
# amax, this saves two launches: one that clears the amax and one that computes it. For row amaxes, it saves the launch
# that computes them. Device time in us, bfloat16 to nvfp4-te (H200, 2026-11-22); on the host, one launch takes 5 us
# less than three:
#     shape            64 x 4096   128 x 4096   256 x 4096
#     one launch       4.5         5.6          8.6
#     three launches   5.9         6.2          6.6
MAX_KERNEL_AMAX_ELEMENTS = 1 << 19
MAX_KERNEL_AMAX_COLUMNS = 1 << 14  # see _has_short_rows
MANY_ROWS = 1 << 9
SEED_GROUP = 16  # consecutive elements whose random bytes come from one block of the stream of a seed


def launch_request(call: Call, *, values: bool = False, columns: bool = False) -> LaunchRequest:
    """Return the LaunchRequest of a call, with the shape of the whole array as one matrix of joined rows."""
    x = call.x if columns else call.moved
    K = x.shape[-1]
    return LaunchRequest(
        with_row_blocks(call.recipe),
        x.dtype,
        (prod(x.shape[:-1]), K),
        "linear" if values else call.layout,
        values,
        columns,
        call.random is not None,
        call.mask,
        call.block_amax is not None,
        scaled=call.has_scales,
    )


def matrix_count(call: Call, request: LaunchRequest, amax: Any) -> int:
    """Return the number of matrices into which a call is split: 1 if all rows can be joined to one matrix."""
    shape = call.x.shape if request.columns else call.moved.shape
    # True if rows of different matrices cannot be joined. A Hadamard transform does not matter: it stays within a row.
    separate = request.layout != "linear" or request.columns or request.recipe.block_rows > 1
    if len(shape) < 3 or not (separate or is_per_expert(amax, request.recipe)):
        return 1
    B = prod(shape[:-2])
    if isinstance(call.random, int) and prod(shape[-2:]) % SEED_GROUP:
        raise Declined(
            f"stochastic rounding from a seed of stacked matrices of {prod(shape[-2:])} elements each has no CUDA"
            f" kernel; needs a multiple of {SEED_GROUP}, or the random bytes"
        )
    return B


def with_kernel_amax(call: Call, request: LaunchRequest, x: Any) -> LaunchRequest:
    """Return the request with finds_amax=True if the quantize kernel should compute the tensor or row amaxes itself."""
    r, finding = call.recipe, request._replace(finds_amax=True)
    has_scales = r.tensor_scaling == "tensor" or (r.tensor_scaling == "row" and _has_short_rows(request))
    if not has_scales or call.tensor_amax is not None or call.mask is not None or x.size == 0:
        return request
    is_small = (
        x.size <= MAX_KERNEL_AMAX_ELEMENTS
        and has_aligned_runs(Matrix(x), request)
        and matrix_count(call, request, None) == 1
    )
    return finding if is_small or finds_rows(finding) else request


def _has_short_rows(request: LaunchRequest) -> bool:
    """Return True if rows are so short that the quantize kernel finds their amaxes faster than a separate launch."""
    rows, columns = request.shape
    return columns <= MAX_KERNEL_AMAX_COLUMNS * (2 if rows >= MANY_ROWS else 1)


def split_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> Iterator[tuple[Matrix, LaunchRequest]]:
    """Split the arrays of a call into matrices."""
    r, x = request.recipe, whole.x
    B = matrix_count(call, request, whole.tensor_scale if whole.tensor_amax is None else whole.tensor_amax)
    K, rows = x.shape[-1], x.size // B // x.shape[-1]
    random = None if isinstance(call.random, int) else call.random
    block_amax, random = (None if a is None else imports.cupy().ascontiguousarray(a) for a in (call.block_amax, random))
    whole = whole._replace(block_amax=block_amax, random=random)
    scales = ("tensor_amax", "amax_out", "column_amax_out", "tensor_scale", "column_tensor_scale")
    parts = {name: a.reshape(B, -1) for name, a in _arrays(whole) if name not in scales}
    for i in range(B):
        matrix = {name: a[i] for name, a in parts.items()}
        matrix |= {name: part_for_matrix(getattr(whole, name), r, i, (B, rows)) for name in scales}
        matrix["x"] = matrix["x"].reshape(rows, K)
        yield Matrix(**matrix, group=i * rows * K // SEED_GROUP), request._replace(shape=(rows, K))


def _arrays(m: Matrix) -> Iterator[tuple[str, Any]]:
    """Yield (name of the field, array) for each array of a Matrix. Fields that are None, and `group`, are left out."""
    return ((name, a) for name, a in zip(Matrix._fields[:-1], m[:-1], strict=True) if a is not None)
