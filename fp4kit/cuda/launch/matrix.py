"""Launch the kernels for one matrix: quantize, fake_quantize, dequantize and amax.
A sign mask is an int whose bit i is 1 if the Hadamard transform first negates element i of each 16.

All functions launch on the current stream, and none waits for the device. Arrays are contiguous CuPy arrays on one
device, with the quantized axis last. Prepared launches are cached, because a Launch depends only on dtypes, shapes and
alignment.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import FINDERS, TYPES, recipe_struct
from fp4kit.cuda.launch.dispatch import (
    CACHE_SIZE,
    MORE_VALUE_RUNS,
    VALUE_RUNS,
    KernelChoice,
    LaunchRequest,
    RowPlan,
    kernel_for,
    row_plan,
    value_blocks,
)
from fp4kit.cuda.launch.geometry import (
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
from fp4kit.recipes.schema import decoding, faking

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
    return loader.function(
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
    return loader.function(source, "dequantize_kernel", device)


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
    return loader.function(
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
    return loader.function(source, kernel, device)


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
