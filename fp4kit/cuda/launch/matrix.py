"""Launchers: the launch of a choice for a matrix, of dequantize, of amaxes. On the current stream; no synchronization
anywhere.

Arrays are CuPy arrays of one device, contiguous, with the quantized axis last. A Launch depends on types, shapes and
alignment alone, so it is kept.
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
    kernel_for,
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
    """The arrays of one matrix (M, K): those that its way needs, by the names of the kernels' arguments.

    packed, scales, tensor_scale: along rows; column_...: along columns. values: fake-quantized elements instead.
    amax_out and column_amax_out: where tensor_amax is copied to. group: the number of x's first 16 elements in the
    array that a seed's random bytes are of.
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
    """Whether every run of a matrix begins at a multiple of 16 bytes, in values too where they are written."""
    rows, columns = request.kernel_shape
    return aligned(m.x, columns * m.x.dtype.itemsize if rows > 1 else 16) and (
        m.values is None or m.values.data.ptr % 16 == 0
    )


def kernel_structs(request: LaunchRequest) -> str:
    """The structs that a kernel of a choice is instantiated with."""
    options: dict[str, Any] = {
        "fake": request.values,
        "stochastic": request.stochastic,
        "calibrated": request.calibrated,
    }
    r = decoding(faking(request.recipe), request.dtype) if request.values else request.recipe
    return recipe_struct(r, request.layout, **options, sign_mask=request.mask, finds_amax=request.finds_amax)


@cache
def _function(kernel: str, struct: str, dtype: np.dtype, whole: bool, device: int) -> Any:
    return loader.function(
        instantiation(kernel, struct, Input=TYPES[dtype], kAligned=whole), f"{kernel}_kernel", device
    )


@lru_cache(CACHE_SIZE)
def quantize_launch(choice: KernelChoice, request: LaunchRequest, whole: bool, device: int) -> Launch:
    """The launch of a choice for a work; called with the addresses of the way's pointers, and seed and group where it
    takes them.
    """
    sizes = choice.sizes(request)
    check_count(sizes[0] * sizes[1])
    if request.recipe.block:
        check_columns(sizes[1])
    function = _function(choice.kernel, kernel_structs(request), request.dtype, whole, device)
    blocks = choice.grid(request, device)
    if request.finds_amax:
        blocks = -(-blocks // FINDERS) * FINDERS
    return Launch(function, blocks, choice.arguments.struct, *sizes, threads=choice.threads)


def quantize_matrix(m: Matrix, request: LaunchRequest, seed: int = 0, choice: KernelChoice | None = None) -> None:
    """Quantize a matrix by the way that takes the work, or by one that is named."""
    choice = choice or kernel_for(request)
    launch = quantize_launch(choice, request, has_aligned_runs(m, request), m.x.device.id)
    numbers = (seed, m.group) if choice.arguments.words else ()
    launch(*(address(getattr(m, name)) for name in choice.arguments.pointers), *numbers)


@cache
def _dequantize_function(r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, device: int) -> Any:
    source = instantiation(
        "dequantize", recipe_struct(decoding(r, dtype), layout), Input=TYPES[original], Output=TYPES[dtype]
    )
    return loader.function(source, "dequantize_kernel", device)


@lru_cache(CACHE_SIZE)
def dequantize_launch(
    r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, shape: tuple[int, int], device: int
) -> Launch:
    """What dequantizes a matrix of a shape; called with the addresses of the first five of _DEQUANTIZE."""
    rows, columns = shape
    check_count(rows * columns)
    if layout == "linear" and r.tensor_scaling != "row":
        rows, columns = 1, rows * columns
    many = layout != "linear" and r.scale == E4M3 and r.tensor_scaling in ("none", "tensor") and dtype.itemsize == 2
    blocks = grid(value_blocks(rows, columns, dtype, MORE_VALUE_RUNS if many else VALUE_RUNS), device, UNLIMITED)
    function = _dequantize_function(r, layout, original, dtype, device)
    return Launch(function, blocks, _DEQUANTIZE, rows, columns, resident_blocks(device))


@cache
def _implied_function(r: Recipe, original: np.dtype, device: int) -> Any:
    return loader.function(
        instantiation("implied_amax", recipe_struct(r), Input=TYPES[original]), "implied_amax_kernel", device
    )


def implied_amaxes(tensor_scale: Any, amax: Any, r: Recipe, original: np.dtype) -> Any:
    """The amaxes of contiguous tensor scales, as reference.implied finds them: float32, same shape."""
    device, count = tensor_scale.device.id, tensor_scale.size
    found = imports.cupy().empty(tensor_scale.shape, np.float32)
    launch = Launch(_implied_function(r, original, device), grid(-(-count // THREADS), device), _IMPLIED, count)
    launch(*map(address, (tensor_scale, amax, found)))
    return found


def dequantize_matrix(
    packed: Any, scales: Any, r: Recipe, layout: str, tensor_scale: Any, amax: Any, original: np.dtype, values: Any
) -> None:
    """Values of contiguous packed codes into values (M, K). tensor_scale: None without; amax: as many, or None if
    unknown.
    """
    if r.tensor_scaling in ("row", "block") and DECODE_RULES[r.decode_rule].needs_amax:
        amax = implied_amaxes(tensor_scale, amax, r, original)
    launch = dequantize_launch(r, layout, original, values.dtype, values.shape, values.device.id)
    launch(*map(address, (packed, scales, values, tensor_scale, amax)))


def transform_struct(mask: int | None) -> str:
    """Transform, which says whether a Hadamard transform comes first, and with which signs."""
    text = f"struct Transform {{ static constexpr bool kHadamard = {str(mask is not None).lower()}; "
    return text + f"static constexpr u32 kSignMask = {mask or 0}u; }};"


@cache
def _amax_function(kernel: str, dtype: np.dtype, counted: str, whole: bool, mask: int | None, device: int) -> Any:
    source = instantiation(
        "amax", transform_struct(mask), Input=TYPES[dtype], kCounted=f"AmaxInput::{counted}", kAligned=whole
    )
    return loader.function(source, kernel, device)


@lru_cache(CACHE_SIZE)
def amax_launch(
    dtype: np.dtype,
    counted: str,
    by_row: bool,
    whole: bool,
    rows: int,
    columns: int,
    device: int,
    mask: int | None = None,
) -> Launch:
    """What finds an amax, or one a row; called with the addresses of x and of the result, which is zero before."""
    function = _amax_function("amax_rows_kernel" if by_row else "amax_kernel", dtype, counted, whole, mask, device)
    work = min(rows, -(-rows * columns // (4 * THREADS))) if by_row else -(-columns // (16 * THREADS))
    return Launch(function, grid(work, device), AMAX, rows, columns)


def amax(x: Any, counted: str = "all", by_row: bool = False, mask: int | None = None) -> Any:
    """Largest magnitude of a contiguous array (float32 ()), or of each row (M,). counted: "all", "no_nan" or "finite".

    mask: sign mask of a Hadamard transform that each run of 16 goes through first.
    """
    cupy = imports.cupy()
    rows, columns = x.shape if by_row else (1, x.size)
    whole = aligned(x, columns * x.dtype.itemsize if by_row else 16)
    launch = amax_launch(x.dtype, counted, by_row, whole, rows, columns, x.device.id, mask)
    out = cupy.zeros(rows if by_row else (), np.float32)
    launch(x.data.ptr, out.data.ptr)
    return out


COUNTED = {"ignore": "no_nan", "propagate": "all", "lanes": "finite"}


def empty_scales(shape: tuple[int, ...], layout: str) -> Any:
    """Block scales in a layout, padding zero."""
    cupy = imports.cupy()
    return cupy.empty(shape, np.uint8) if layout == "linear" else cupy.zeros(padded_shape(shape, layout), np.uint8)
