"""Launchers: choose the instantiation for a call, allocate outputs, launch on the current stream. No synchronization anywhere.

Arrays are CuPy arrays of one device, with the quantized axis last; matrices (B, M, K) as in ops.prepare.stack.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import THREADS, Launch, address, aligned, check_count, grid, resident
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, has_table, recipe_struct
from fp4kit.formats import E4M3
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe

LAUNCHES = 1024  # prepared ones that are kept, of each kind: they depend on the shapes
WHOLE = 1 << 16  # thread blocks a multiprocessor: no thread has to loop
THREAD_BYTES = 64  # of elements that a thread of quantize loads before it uses them
VALUE_RUNS = 2  # of 16 bytes, that a thread of dequantize writes, and of fake_quantize where little is made ready first
MOST_RUNS = 4  # where more is
_POINTER = "u8"
QUANTIZE_POINTERS = ("x", "packed", "scales", "values", "tensor_amax", "tensor_scale", "block_amax", "random", "amax_out")
QUANTIZE = np.dtype(
    [(n, _POINTER) for n in QUANTIZE_POINTERS] + [("seed", "u8"), ("group", "u8"), ("rows", "i8"), ("columns", "i8")]
)
_DEQUANTIZE = np.dtype(
    [(n, _POINTER) for n in ("packed", "scales", "values", "tensor_amax")] + [(n, "i8") for n in ("rows", "columns", "ahead")]
)
AMAX = np.dtype([("x", _POINTER), ("amax", _POINTER), ("rows", "i8"), ("columns", "i8")])


def rows_and_columns(shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """Shape that a kernel sees: without blocks, and with one scale for all, one long row."""
    rows, columns = shape
    return (1, rows * columns) if r.block is None and r.tensor_scaling != "row" else (rows, columns)


def kind_of(r: Recipe) -> str:
    """The kernel file that quantizes a recipe: by rows of blocks, by tiles of threads, or without blocks."""
    if r.block is None:
        return "quantize_plain"
    return "quantize_tile" if r.block_rows > 1 or r.four_over_six else "quantize"


TABLE_THREADS = 1024
# Elements of a matrix that are worth a table. H200, 2026-11-21, microseconds with and without: 2^22 15.9, 12.8; 2^23 17.6, 18.1;
# 2^24 22.3, 27.5; square blocks 9.1, 8.9; 12.7, 24.1; 20.4, 36.4.
TABLE_LEAST = 1 << 23


def takes_table(r: Recipe, dtype: np.dtype, elements: int, fake: bool) -> bool:
    """Whether 4over6 goes by the tables of quantize_table, which are worth their while for many elements."""
    square = r.block == (16, 16) and r.amax_nan == "propagate"
    known = r.four_over_six is not None and (r.block == (1, 16) or square) and r.tensor_scaling == "tensor"
    return known and TYPES[dtype] == "Bfloat16" and not fake and elements >= TABLE_LEAST


@cache
def _quantize_function(
    file: str, r: Recipe, dtype: np.dtype, whole: bool, layout: str, fake: bool, stochastic: bool, mask: int | None, device: int
) -> Any:
    struct = recipe_struct(r, layout, fake=fake, stochastic=stochastic, sign_mask=mask)
    source = instantiation(file, struct, Input=TYPES[dtype], kAligned=whole)
    return loader.function(source, f"{file}_kernel", device)


def value_blocks(rows: int, columns: int, dtype: np.dtype, runs: int) -> int:
    """Thread blocks that write a matrix, `runs` of 16 bytes a thread."""
    return -(-rows * -(-columns * dtype.itemsize // 16) // (runs * THREADS))


def _grid(r: Recipe, dtype: np.dtype, rows: int, columns: int, layout: str, fake: bool, device: int) -> int:
    """Thread blocks for a matrix: as many as keep its elements busy once; where each prepares something, what was fastest.

    H200, 16384 x 16384 bfloat16, 2026-11-21, of a copy: with 16, 24, 64, 96 a multiprocessor nvfp4-te 0.97, 0.99, 1.01, 1.02;
    0.91, 0.97, 0.99, 1.01 with swizzled scales. nvfp4-te-rowscaled with 96, with all that there is work for: 1.03, 0.99.
    """
    file = kind_of(r)
    if file == "quantize_tile":
        wide = -(-(columns // r.block_size) // (THREADS // r.block_rows))
        return grid(-(-rows // r.block_rows) * wide, device)
    if fake and r.block and r.apply != "divide":
        return grid(value_blocks(rows, columns, dtype, VALUE_RUNS), device, WHOLE)
    rows, _ = padded_shape((rows, columns), layout)  # threads go through the padding too
    work = -(-rows * (-(-columns // 16) * 16) * dtype.itemsize // (THREAD_BYTES * THREADS))
    prepares = has_table(r) or layout != "linear" or (file == "quantize" and r.tensor_scaling == "row")
    return grid(work, device, 96 if prepares else WHOLE)


def whole_runs(x: Any, values: Any, rows: int, columns: int) -> bool:
    """Whether every run of a matrix begins at a multiple of 16 bytes, in values too where they are written."""
    return aligned(x, columns * x.dtype.itemsize if rows > 1 else 16) and (values is None or values.data.ptr % 16 == 0)


@lru_cache(LAUNCHES)
def quantize_launch(
    r: Recipe,
    dtype: np.dtype,
    shape: tuple[int, int],
    whole: bool,
    layout: str,
    device: int,
    *,
    fake: bool = False,
    stochastic: bool = False,
    mask: int | None = None,
) -> Launch:
    """What quantizes a matrix of a shape; called with the addresses of QUANTIZE_POINTERS, the seed and the group."""
    rows, columns = rows_and_columns(shape, r)
    check_count(rows * columns)
    if takes_table(r, dtype, rows * columns, fake):
        function = _quantize_function("quantize_table", r, dtype, whole, layout, fake, stochastic, mask, device)
        work = -(-rows // r.block_rows) * r.block_rows * -(-columns // 128) * 8
        blocks = grid(-(-work // TABLE_THREADS), device, 1)
        return Launch(function, blocks, QUANTIZE, rows, columns, threads=TABLE_THREADS)
    function = _quantize_function(kind_of(r), r, dtype, whole, layout, fake, stochastic, mask, device)
    return Launch(function, _grid(r, dtype, rows, columns, layout, fake, device), QUANTIZE, rows, columns)


def quantize_matrix(
    x: Any,
    r: Recipe,
    layout: str,
    amax: Any,
    packed: Any,
    scales: Any,
    tensor_scale: Any,
    *,
    values: Any = None,
    seed: int | None = None,
    group: int = 0,
    random: Any = None,
    mask: int | None = None,
    block_amax: Any = None,
) -> None:
    """Quantize a contiguous matrix (M, K) into packed and scales; with values, write fake-quantized elements there instead.

    group: the number of x's first 16 elements in the array that the seed's random bytes are of.
    """
    whole = whole_runs(x, values, *rows_and_columns(x.shape, r))
    stochastic = seed is not None or random is not None
    fake, device = values is not None, x.device.id
    launch = quantize_launch(r, x.dtype, x.shape, whole, layout, device, fake=fake, stochastic=stochastic, mask=mask)
    launch(*map(address, (x, packed, scales, values, amax, tensor_scale, block_amax, random)), 0, seed or 0, group)


@cache
def _dequantize_function(r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, device: int) -> Any:
    source = instantiation("dequantize", recipe_struct(r, layout), Input=TYPES[original], Output=TYPES[dtype])
    return loader.function(source, "dequantize_kernel", device)


@lru_cache(LAUNCHES)
def dequantize_launch(r: Recipe, layout: str, original: np.dtype, dtype: np.dtype, shape: tuple[int, int], device: int) -> Launch:
    """What dequantizes a matrix of a shape; called with the addresses of packed, scales, values and tensor_amax."""
    rows, columns = shape
    check_count(rows * columns)
    if layout == "linear" and r.tensor_scaling != "row":
        rows, columns = 1, rows * columns
    many = layout != "linear" and r.scale is E4M3 and r.tensor_scaling in ("none", "tensor") and dtype.itemsize == 2
    blocks = grid(value_blocks(rows, columns, dtype, MOST_RUNS if many else VALUE_RUNS), device, WHOLE)
    function = _dequantize_function(r, layout, original, dtype, device)
    return Launch(function, blocks, _DEQUANTIZE, rows, columns, resident(device))


def dequantize_matrix(packed: Any, scales: Any, r: Recipe, layout: str, amax: Any, original: np.dtype, values: Any) -> None:
    """Values of contiguous packed codes into values (M, K)."""
    launch = dequantize_launch(r, layout, original, values.dtype, values.shape, values.device.id)
    launch(*map(address, (packed, scales, values, amax)))


def transform_struct(mask: int | None) -> str:
    """Transform, which says whether a Hadamard transform comes first, and with which signs."""
    text = f"struct Transform {{ static constexpr bool kHadamard = {str(mask is not None).lower()}; "
    return text + f"static constexpr u32 kSignMask = {mask or 0}u; }};"


@cache
def _amax_function(kernel: str, dtype: np.dtype, counted: str, whole: bool, mask: int | None, device: int) -> Any:
    source = instantiation("amax", transform_struct(mask), Input=TYPES[dtype], kCounted=f"AmaxInput::{counted}", kAligned=whole)
    return loader.function(source, kernel, device)


@lru_cache(LAUNCHES)
def amax_launch(
    dtype: np.dtype, counted: str, by_row: bool, whole: bool, rows: int, columns: int, device: int, mask: int | None = None
) -> Launch:
    """What finds an amax, or one a row; called with the addresses of x and of the result, which is zero before."""
    function = _amax_function("amax_rows_kernel" if by_row else "amax_kernel", dtype, counted, whole, mask, device)
    work = min(rows, -(-rows * columns // (4 * THREADS))) if by_row else -(-columns // (16 * THREADS))
    return Launch(function, grid(work, device), AMAX, rows, columns)


def amax(x: Any, counted: str = "all", by_row: bool = False, mask: int | None = None) -> Any:
    """Largest magnitude of a contiguous array (float32 ()), or of each row (M,). counted: "all", "no_nan" or "finite".

    mask: sign mask of a Hadamard transform that each run of 16 goes through first.
    """
    cupy = loader.cupy()
    rows, columns = x.shape if by_row else (1, x.size)
    whole = aligned(x, columns * x.dtype.itemsize if by_row else 16)
    launch = amax_launch(x.dtype, counted, by_row, whole, rows, columns, x.device.id, mask)
    out = cupy.zeros(rows if by_row else (), np.float32)
    launch(x.data.ptr, out.data.ptr)
    return out


COUNTED = {"ignore": "no_nan", "propagate": "all", "lanes": "finite"}


def empty_scales(shape: tuple[int, ...], layout: str) -> Any:
    """Block scales in a layout, padding zero."""
    cupy = loader.cupy()
    return cupy.empty(shape, np.uint8) if layout == "linear" else cupy.zeros(padded_shape(shape, layout), np.uint8)
