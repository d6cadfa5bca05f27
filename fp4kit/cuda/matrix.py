"""Launch the kernels for one matrix, or for a group of matrices, on the current stream, without waiting for the device.
Arrays are contiguous CuPy arrays on one device, with the quantized axis last. A sign mask is an int whose bit i is 1 if
the Hadamard transform first negates element i of each 16. Prepared launches are cached, because a Launch depends only
on dtypes, shapes and alignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.parse import Call, Declined
from fp4kit.cuda import dispatch
from fp4kit.cuda.compiler import FINDERS, has_table, recipe_struct
from fp4kit.cuda.dispatch import KernelChoice, LaunchRequest
from fp4kit.cuda.launch import (
    CACHE_SIZE,
    MAX_PIECE,
    MIN_PIECE,
    THREADS,
    Device,
    GroupedLaunch,
    Launch,
    address,
    aligned,
    check_columns,
    check_count,
    function_of,
    is_small,
    multiprocessors,
    piece_counts,
    prepare_group,
    prepare_rows,
    prepared,
    resident_blocks,
    steps_per_block,
)
from fp4kit.formats import E2M1, E4M3, is_same
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.recipes.schema import decoding, faking, with_row_blocks
from fp4kit.reference.codec import is_per_expert, part_for_matrix

# The most steps per thread block of dequantize. Before the first step, each thread executes 40 to 110 instructions for
# tables and sizes; a step takes about as many (sm_90).
DEQUANTIZE_STEPS = 4


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


def kernel_structs(request: LaunchRequest, plan: dispatch.RowPlan | None = None) -> str:
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


@lru_cache(CACHE_SIZE)
def quantize_launch(choice: KernelChoice, request: LaunchRequest, aligned_runs: bool, device: Device) -> Launch:
    """Return the prepared launch of a kernel for a request."""
    sizes = choice.sizes(request)
    check_count(sizes[0] * sizes[1])
    if request.recipe.block:
        check_columns(sizes[1])
    plan = dispatch.row_plan(request, device)
    traits = (("Input", request.dtype), ("kAligned", aligned_runs))
    structs = kernel_structs(request, plan)
    threads = choice.threads if plan is None else plan.threads
    function = function_of(choice.kernel, choice.kernel, device, structs, traits, threads=max(choice.threads, threads))
    blocks = choice.grid(request, device)
    if request.finds_amax and plan is None:
        blocks = -(-blocks // FINDERS) * FINDERS  # whole clusters
    return Launch(function, blocks, choice.arguments.struct, *sizes, threads=threads)


def quantize_matrix(m: Matrix, request: LaunchRequest, seed: int = 0, choice: KernelChoice | None = None) -> None:
    """Quantize the matrix m.x by one launch, which writes the output arrays of m."""
    choice = choice or dispatch.kernel_for(request)
    launch = quantize_launch(choice, request, has_aligned_runs(m, request), m.x.device.id)
    numbers = (seed, m.group) if choice.arguments.words else ()
    launch(*(address(getattr(m, name)) for name in choice.arguments.pointers), *numbers)


@lru_cache(CACHE_SIZE)
def dequantize_launch(
    r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, shape: tuple[int, int], device: Device
) -> Launch:
    """Return the prepared launch that dequantizes matrices of a shape (rows, columns)."""
    rows, columns = shape
    check_count(rows * columns)
    if layout == "linear" and r.tensor_scaling != "row" and r.tensor_columns == r.block_size:
        rows, columns = 1, rows * columns
    has_entries = r.scale == E4M3 or (r.scale is not None and is_same(r.element, E2M1))
    prepares_tables = (
        layout != "linear" and has_entries and r.tensor_scaling in ("none", "tensor") and dtype.itemsize == 2
    )
    runs = dispatch.MORE_VALUE_RUNS if prepares_tables else dispatch.VALUE_RUNS
    work = dispatch.value_blocks(rows, columns, dtype, runs)
    steps = 1 if r.levels else steps_per_block(work, device, DEQUANTIZE_STEPS)
    share = steps * runs * THREADS
    sizes, blocks = (rows, columns, resident_blocks(device) * share, share), -(-work // steps)
    return prepared("dequantize", blocks, sizes, device, (original, dtype), recipe_struct(decoding(r, dtype), layout))


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
    launch = prepared("implied_amax", count, (count,), device, (original,), recipe_struct(r))
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


# Several thread blocks share a row if there are fewer rows than half of the multiprocessors. Each takes this many
# elements: kLongRowPart in amax.cu.
LONG_ROW_PART = 1 << 14


@cache
def transform_struct(mask: int | None) -> str:
    """Return the text of the C++ struct Transform, which tells an amax kernel whether to apply a Hadamard transform."""
    text = f"struct Transform {{ static constexpr bool kHadamard = {str(mask is not None).lower()}; "
    return text + f"static constexpr u32 kSignMask = {mask or 0}u; }};"


def amax_launch(x: Any, counted: str = "all", by_row: bool = False, mask: int | None = None) -> Launch:
    """Return the prepared launch that computes the amax of a matrix or, if by_row is True, one amax per row."""
    # If raises_amax(x, by_row), the result must hold 0 before.
    (rows, columns), run_bytes = _amax_shape(x, by_row)
    work = min(rows, -(-rows * columns // (4 * THREADS))) if by_row else -(-columns // 16)
    traits = (x.dtype, f"AmaxInput::{counted}", aligned(x, run_bytes))
    kernel = "amax_rows" if by_row else "amax"
    if by_row and raises_amax(x, by_row):
        kernel, work = "amax_long_rows", rows * -(-columns // LONG_ROW_PART)
    return prepared(kernel, work, (rows, columns), x.device.id, traits, transform_struct(mask))


def raises_amax(x: Any, by_row: bool) -> bool:
    """Return True if the kernel of amax_launch only raises amaxes: the amax of an array, or those of few long rows."""
    return not by_row or (x.shape[1] > 2 * LONG_ROW_PART and 2 * x.shape[0] <= multiprocessors(x.device.id))


def _amax_shape(x: Any, by_row: bool) -> tuple[tuple[int, int], int]:
    """Return (the rows and columns that an amax kernel is told, the bytes between runs that must be aligned)."""
    return (x.shape, x.shape[1] * x.dtype.itemsize) if by_row else ((1, x.size), 16)


def amax(x: Any, counted: str = "all", by_row: bool = False, mask: int | None = None) -> Any:
    """Return the largest magnitude of a contiguous array, float32 (), or of each row of a matrix, float32 (M,)."""
    out = imports.cupy().zeros(x.shape[0] if by_row else (), np.float32)
    amax_launch(x, counted, by_row, mask)(x.data.ptr, out.data.ptr)
    return out


# Maps the amax_nan of a recipe to the elements that count in the tensor amax.
COUNTED = {"ignore": "no_nan", "propagate": "all", "lanes": "finite"}


def empty_scales(shape: tuple[int, ...], layout: str) -> Any:
    """Return a new uint8 array for block scales: uninitialized in the linear layout, zeros in a swizzled layout."""
    # Zeros are needed because not every kernel writes the padding of a swizzled layout.
    cupy = imports.cupy()
    return cupy.empty(shape, np.uint8) if layout == "linear" else cupy.zeros(padded_shape(shape, layout), np.uint8)


def clip_gradient(grad: Any, x: Any, amax: Any, out: Any) -> None:
    """Write the clipped gradient into out: grad where |x| <= amax, otherwise +0."""
    clip_launch(grad, x, amax, out)(*map(address, (grad, x, amax, out)))


def clip_launch(grad: Any, x: Any, amax: Any, out: Any) -> Launch:
    """Return the prepared launch of clip_gradient."""
    aligned_runs = all(a.data.ptr % 16 == 0 for a in (grad, x, out))
    runs = -(-x.size * max(x.itemsize, grad.itemsize) // 16)
    sizes, traits = (x.size, x.size // amax.size), (x.dtype, grad.dtype, aligned_runs)
    return prepared("clip", runs, sizes, x.device.id, traits)


def quantize_group(matrices: Sequence[Matrix], requests: Sequence[LaunchRequest], seed: int = 0) -> GroupedLaunch:
    """Return a prepared launch that quantizes all matrices as quantize_matrix does."""
    first, r = matrices[0], requests[0].recipe
    choice = dispatch.kernel_for(requests[0]._replace(grouped=True))
    aligned_runs = [has_aligned_runs(m, w) for m, w in zip(matrices, requests, strict=True)]
    arguments = np.zeros(len(matrices), choice.arguments.struct)
    for name in choice.arguments.pointers:
        arguments[name] = [address(getattr(m, name)) for m in matrices]
    arguments["seed"], arguments["counter"] = seed, [m.group for m in matrices]
    sizes = [w.kernel_shape if m.x.size else m.x.shape for m, w in zip(matrices, requests, strict=True)]
    arguments["rows"], arguments["columns"] = zip(*sizes, strict=True)
    if r.block:
        check_columns(int(arguments["columns"].max()))
    device, small = first.x.device.id, is_small(matrices)
    traits = (("Input", first.x.dtype), ("kAligned", all(aligned_runs)))
    function = function_of(choice.kernel, choice.kernel, device, kernel_structs(requests[0]), traits, small)
    # If a piece has little setup, small pieces are best.
    simple = small and not has_table(r) and r.tensor_scaling != "row"
    pieces = piece_counts([m.x.size for m in matrices], device, MIN_PIECE if simple else MAX_PIECE)
    return prepare_group(function, arguments, aligned_runs, pieces, tuple(matrices), small)


def amax_group(
    xs: Sequence[Any], outs: Sequence[Any], counted: str, by_row: bool = False, mask: int | None = None
) -> GroupedLaunch:
    """Return a prepared launch that computes the amax of each array in xs, as amax does."""
    # If by_row is False, outs must hold zeros before each launch.
    kernel, device, shapes = "amax_rows" if by_row else "amax", xs[0].device.id, [_amax_shape(x, by_row) for x in xs]
    aligned_runs = [aligned(x, run_bytes) for x, (_, run_bytes) in zip(xs, shapes, strict=True)]
    members = [(address(x), address(out), *shape) for x, out, (shape, _) in zip(xs, outs, shapes, strict=True)]
    traits = (xs[0].dtype, f"AmaxInput::{counted}", all(aligned_runs))
    pieces = piece_counts([x.size for x in xs], device)
    return prepare_rows(kernel, device, transform_struct(mask), traits, members, aligned_runs, pieces, (xs, outs))


class Clip(NamedTuple):
    """The arguments of clip_gradient for one array of a group. `out` is the array to write to."""

    grad: Any
    x: Any
    amax: Any
    out: Any


def clip_group(clips: Sequence[Clip]) -> GroupedLaunch:
    """Return a prepared launch that clips all gradients in `clips` as clip_gradient does."""
    aligned_runs = [all(a.data.ptr % 16 == 0 for a in (c.grad, c.x, c.out)) for c in clips]
    members, first = [(*map(address, c), c.x.size, c.x.size // c.amax.size) for c in clips], clips[0]
    device, traits = first.x.device.id, (first.x.dtype, first.grad.dtype, all(aligned_runs))
    pieces = piece_counts([c.x.size for c in clips], device, MIN_PIECE)
    return prepare_rows("clip", device, "", traits, members, aligned_runs, pieces, clips)


# In arrays of up to this many elements, the quantize kernel itself computes the amaxes (with_kernel_amax). This saves
# the launch that computes them, and, for a tensor amax in a graph, the one that clears the amax. Device time in us,
# bfloat16 to nvfp4-te (H200, 2026-11-22); on the host, one launch takes 5 us less than three:
#     shape            64 x 4096   128 x 4096   256 x 4096
#     one launch       4.5         5.6          8.6
#     three launches   5.9         6.2          6.6
MAX_KERNEL_AMAX_ELEMENTS = 1 << 19
MAX_KERNEL_AMAX_COLUMNS = 1 << 14  # 1 << 17 if there are at least dispatch.MANY_ROWS rows
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
    rows, columns = request.shape
    # The quantize kernel finds amaxes of rows faster than a separate launch only if rows are short.
    most = MAX_KERNEL_AMAX_COLUMNS * (8 if rows >= dispatch.MANY_ROWS else 1)
    has_scales = r.tensor_scaling == "tensor" or (r.tensor_scaling == "row" and columns <= most)
    finds_outer = dispatch.finds_outer_amaxes(finding)
    if call.tensor_amax is not None or x.size == 0 or not (finds_outer or (has_scales and call.mask is None)):
        return request
    is_small = (
        x.size <= MAX_KERNEL_AMAX_ELEMENTS
        and has_aligned_runs(Matrix(x), request)
        and matrix_count(call, request, None) == 1
    )
    return finding if finds_outer or is_small or dispatch.finds_rows(finding) else request


def split_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> Iterator[tuple[Matrix, LaunchRequest]]:
    """Split the arrays of a call into matrices."""
    r, x = request.recipe, whole.x
    B = matrix_count(call, request, whole.tensor_scale if whole.tensor_amax is None else whole.tensor_amax)
    K, rows = x.shape[-1], x.size // B // x.shape[-1]
    random = None if isinstance(call.random, int) else call.random
    block_amax, random = (None if a is None else imports.cupy().ascontiguousarray(a) for a in (call.block_amax, random))
    whole = whole._replace(block_amax=block_amax, random=random)
    scales = ("tensor_amax", "amax_out", "column_amax_out", "tensor_scale", "column_tensor_scale")
    arrays = {name: a for name, a in whole._asdict().items() if a is not None and name not in (*scales, "group")}
    parts = {name: a.reshape(B, -1) for name, a in arrays.items()}
    for i in range(B):
        matrix = {name: a[i] for name, a in parts.items()}
        matrix |= {name: part_for_matrix(getattr(whole, name), r, i, (B, rows)) for name in scales}
        matrix["x"] = matrix["x"].reshape(rows, K)
        yield Matrix(**matrix, group=i * rows * K // SEED_GROUP), request._replace(shape=(rows, K))


def quantize_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> None:
    """Quantize the matrices of a call, by one launch each, which writes the output arrays of `whole`."""
    seed = call.random if isinstance(call.random, int) else 0
    for matrix, part in split_matrices(call, request, whole):
        quantize_matrix(matrix, part, seed)
