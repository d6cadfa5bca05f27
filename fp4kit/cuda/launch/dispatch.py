"""Which kernel quantizes a matrix: one ordered table, of which the first way that takes the work does it.

Drivers, cached calls and groups all ask it. A way names its kernel, says what it takes, and gives the geometry of a
launch; the reason of each row is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.parse import HADAMARD_BLOCK, Declined
from fp4kit.cuda.compile.traits import has_table
from fp4kit.cuda.launch.geometry import THREADS, UNLIMITED, grid
from fp4kit.cuda.launch.supported import check_formats, unsupported
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe

CACHE_SIZE = 1024  # choices and launches that are kept, of each kind: they depend on the shapes
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
THREAD_BYTES = 64  # of elements that a thread of quantize loads before it uses them
VALUE_RUNS = 2  # of 16 bytes, that a thread of dequantize writes, and of fake_quantize where little is made ready first
MORE_VALUE_RUNS = 4  # where more is
MAX_TILE_BLOCK_COLUMNS = 32  # columns of a block of which a thread holds a row
FAKE_BLOCKS = (16, 32, 64, 128, 256, 512)  # columns of which the threads of a warp find the amax
TABLE_THREADS = 1024
# Elements of a matrix that are worth a table. H200, 2026-11-21, microseconds with and without: 2^22 15.9, 12.8; 2^23
# 17.6, 18.1; 2^24 22.3, 27.5; square blocks 9.1, 8.9; 12.7, 24.1; 20.4, 36.4.
MIN_TABLE_ELEMENTS = 1 << 23
PATCH_BLOCKS = ((1, 16), (1, 32), (16, 16), (32, 32))
PATCH_ROW_UNIT = 32  # what rows are multiples of, for patches
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = (
    128,
    128,
    256,
)  # of a thread block: columns of square blocks, bytes of a row of others
SCALED_RUN = 16  # elements that a thread encodes under given scales
BAND_SHIFT = 3  # bands of 2^3 tiles: as fast as 2^4, both 4% faster than rows of tiles (both ways, H200, 2026-11-21)


class Arguments(NamedTuple):
    """A kernel's arguments, all of 8 bytes, in order: pointers to arrays, numbers of a call, sizes of a launch."""

    pointers: tuple[str, ...]
    words: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def struct(self) -> np.dtype:
        """The struct that the kernel takes."""
        return np.dtype(
            [(name, "u8") for name in (*self.pointers, *self.words)] + [(name, "i8") for name in self.sizes]
        )


ROWS = Arguments(
    ("x", "packed", "scales", "values", "tensor_amax", "tensor_scale", "block_amax", "random", "amax_out"),
    ("seed", "group"),
    ("rows", "columns"),
)
PATCHES = Arguments(
    (
        "x",
        "packed",
        "scales",
        "column_packed",
        "column_scales",
        "values",
        "tensor_amax",
        "tensor_scale",
        "column_tensor_scale",
        "amax_out",
        "column_amax_out",
    ),
    (),
    ("rows", "columns", "shift"),
)


class LaunchRequest(NamedTuple):
    """What a launch is asked for: all that the choice of its kernel depends on.

    shape: of the contiguous matrix. values: fake-quantized elements instead of codes. columns: codes along the columns,
    alone or beside those along the rows; then mask is of a Hadamard transform of the columns. calibrated: block amaxes
    are given. finds_amax: that of the whole array is found by the kernel, and written to tensor_amax. scaled: the
    scales are given.
    """

    recipe: Recipe
    dtype: np.dtype
    shape: tuple[int, int]
    layout: str = "linear"
    values: bool = False
    columns: bool = False
    stochastic: bool = False
    mask: int | None = None
    calibrated: bool = False
    grouped: bool = False
    finds_amax: bool = False
    scaled: bool = False

    @property
    def kernel_shape(self) -> tuple[int, int]:
        """Shape that a kernel sees: without blocks, and with one scale for all, one long row."""
        r, (rows, columns) = self.recipe, self.shape
        return (1, rows * columns) if r.block is None and r.tensor_scaling != "row" else (rows, columns)


class KernelChoice(NamedTuple):
    """A kernel file, what it takes, its grid (of a work, on a device), its arguments, their sizes, and threads of a
    block.
    """

    kernel: str
    takes: Callable[[LaunchRequest], bool]
    grid: Callable[[LaunchRequest, int], int]
    arguments: Arguments = ROWS
    sizes: Callable[[LaunchRequest], tuple[int, ...]] = lambda request: request.kernel_shape
    threads: int = THREADS


def value_blocks(rows: int, columns: int, dtype: np.dtype, runs: int) -> int:
    """Thread blocks that write a matrix, `runs` of 16 bytes a thread."""
    return -(-rows * -(-columns * dtype.itemsize // 16) // (runs * THREADS))


# ---- what each kernel takes ----


def uses_fake_rule(request: LaunchRequest) -> bool:
    """Whether values are wanted that follow the producer's own fake quantizer."""
    return request.values and request.recipe.fake_rule is not None


def _takes_fake(request: LaunchRequest) -> bool:
    rows, columns = request.recipe.block or (1, FAKE_BLOCKS[0])
    return uses_fake_rule(request) and rows == 1 and columns in FAKE_BLOCKS and request.recipe.amax_nan != "lanes"


def has_patch_kernel(r: Recipe) -> bool:
    """Whether a recipe's blocks are ones that a patch kernel has."""
    one_scale = r.tensor_scaling in ("none", "tensor") and r.four_over_six is None and not r.search
    return r.block in PATCH_BLOCKS and one_scale and not r.element.is_integer


def _takes_patch(request: LaunchRequest) -> bool:
    r, tall = request.recipe, request.recipe.block_rows > 1
    unit = r.block_size if tall else PATCH_ROW_UNIT // request.dtype.itemsize
    wanted = request.columns or tall
    transform = request.mask is None or (request.columns and r.block == (1, HADAMARD_BLOCK))
    plain = (
        not (request.stochastic or request.calibrated or request.grouped or request.scaled or uses_fake_rule(request))
        and transform
    )
    return wanted and plain and has_patch_kernel(r) and request.shape[1] % unit == 0


def _takes_table(request: LaunchRequest) -> bool:
    r = request.recipe
    square = r.block == (16, 16) and r.amax_nan == "propagate"
    sums = r.four_over_six in ("mae", "mse") and not r.lane_sums
    known = sums and (r.block == (1, 16) or square) and r.tensor_scaling == "tensor"
    plain = _by_rows(request) and not (request.values or request.grouped)
    return known and plain and request.dtype == BFLOAT16 and request.shape[0] * request.shape[1] >= MIN_TABLE_ELEMENTS


def _by_rows(request: LaunchRequest) -> bool:
    return not request.columns and not uses_fake_rule(request) and not request.scaled


def _takes_tile(request: LaunchRequest) -> bool:
    r = request.recipe
    rows, columns = r.block or (1, 0)
    whole = columns in (HADAMARD_BLOCK, MAX_TILE_BLOCK_COLUMNS) and THREADS % rows == 0
    return _by_rows(request) and (rows > 1 or r.four_over_six is not None) and whole and not request.calibrated


def _takes_scaled(request: LaunchRequest) -> bool:
    return (
        request.scaled
        and not request.columns
        and (request.recipe.block is None or request.recipe.block_size % SCALED_RUN == 0)
    )


def _takes_unblocked(request: LaunchRequest) -> bool:
    return _by_rows(request) and request.recipe.block is None


def _takes_rows(request: LaunchRequest) -> bool:
    r = request.recipe
    rows, columns = r.block or (0, 0)
    return _by_rows(request) and rows == 1 and r.four_over_six is None and columns % (32 if columns > 32 else 16) == 0


def searches(request: LaunchRequest) -> bool:
    """Whether block amaxes are to be chosen; scales that are given need none."""
    return bool(request.recipe.search) and not request.scaled


# ---- geometry ----


def _fake_grid(request: LaunchRequest, device: int) -> int:
    runs = VALUE_RUNS if request.recipe.block and not has_table(request.recipe) else MORE_VALUE_RUNS
    return grid(value_blocks(*request.kernel_shape, request.dtype, runs), device, UNLIMITED)


def _patch_sizes(request: LaunchRequest) -> tuple[int, ...]:
    """Rows, columns, and the shift: bands of tiles are of 2^shift."""
    return *request.shape, min((-(-request.shape[0] // TILE_ROWS) - 1).bit_length(), BAND_SHIFT)


def _patch_grid(request: LaunchRequest, device: int) -> int:
    rows, columns, shift = _patch_sizes(request)
    tall = -(-rows // TILE_ROWS)
    wide = -(-columns // (TILE_COLUMNS if request.recipe.block_rows > 1 else TILE_BYTES // request.dtype.itemsize))
    return grid(wide * ((tall + (1 << shift) - 1 >> shift) << shift), device, UNLIMITED)


def _table_grid(request: LaunchRequest, device: int) -> int:
    rows, columns = request.shape
    work = -(-rows // request.recipe.block_rows) * request.recipe.block_rows * -(-columns // 128) * 8
    return grid(-(-work // TABLE_THREADS), device, 1)


def _tile_grid(request: LaunchRequest, device: int) -> int:
    rows, columns = request.shape
    wide = -(-(columns // request.recipe.block_size) // (THREADS // request.recipe.block_rows))
    return grid(-(-rows // request.recipe.block_rows) * wide, device)


def _row_grid(request: LaunchRequest, device: int) -> int:
    """As many thread blocks as keep the elements busy once; where each prepares something, what was fastest.

    H200, 16384 x 16384 bfloat16, 2026-11-21, of a copy: with 16, 24, 64, 96 a multiprocessor nvfp4-te 0.97, 0.99, 1.01,
    1.02; 0.91, 0.97, 0.99, 1.01 with swizzled scales. nvfp4-te-rowscaled with 96, with all that there is work for:
    1.03, 0.99.
    """
    r, (rows, columns) = request.recipe, request.kernel_shape
    if request.values and r.block and r.apply == "multiply":
        return grid(value_blocks(rows, columns, request.dtype, VALUE_RUNS), device, UNLIMITED)
    if request.layout != "linear":
        rows, _ = padded_shape((rows, columns), request.layout)  # threads go through the padding too
    work = -(-rows * (-(-columns // 16) * 16) * request.dtype.itemsize // (THREAD_BYTES * THREADS))
    prepares = has_table(r) or request.layout != "linear" or (r.block is not None and r.tensor_scaling == "row")
    return grid(work, device, 96 if prepares else UNLIMITED)


def _scaled_grid(request: LaunchRequest, device: int) -> int:
    rows, columns = request.kernel_shape
    return grid(-(-rows * -(-columns // SCALED_RUN) // THREADS), device, UNLIMITED)


# ---- the table ----

KERNEL_CHOICES = (
    # The producer's own arithmetic, which has no codes.
    KernelChoice("fake_quantize", _takes_fake, _fake_grid),
    # Scales that are given: no amax, and a factor for each run of a block.
    KernelChoice("quantize_with_scales", _takes_scaled, _scaled_grid),
    # Blocks in columns, and both ways from one read: 0.95 and 0.78 - 0.82 of a copy, 0.4 by way of a transposed copy.
    # Square blocks: 0.995, 0.42 by tiles (H200, 2026-11-21).
    KernelChoice("quantize_columns", _takes_patch, _patch_grid, PATCHES, _patch_sizes),
    # 4over6 of many elements: scales from a table, 0.86 against 0.57 (H200, 2026-11-21).
    KernelChoice("quantize_table", _takes_table, _table_grid, threads=TABLE_THREADS),
    # A decision that spans threads: blocks of several rows, 4over6.
    KernelChoice("quantize_tile", _takes_tile, _tile_grid),
    # No blocks: any length, one scale for the tensor or a row.
    KernelChoice("quantize_unblocked", _takes_unblocked, _row_grid),
    # Everything else: blocks in a row.
    KernelChoice("quantize", _takes_rows, _row_grid),
)


@lru_cache(CACHE_SIZE)
def find_kernel(request: LaunchRequest) -> KernelChoice | None:
    """The first way that takes the work; None where there is none."""
    return (
        None
        if unsupported(request.recipe) or searches(request)
        else next((choice for choice in KERNEL_CHOICES if choice.takes(request)), None)
    )


def kernel_for(request: LaunchRequest) -> KernelChoice:
    """Return the first kernel that takes the request. Raise Declined, with what is needed, if no kernel does."""
    check_formats(request.recipe)
    choice = find_kernel(request)
    if choice is None:
        raise Declined(why_declined(request))
    return choice


def why_declined(request: LaunchRequest) -> str:
    """Return the message for a request that no kernel takes: what is missing, and what is needed."""
    r = request.recipe
    rows, columns = r.block or (1, 1)
    if searches(request):
        return (
            f"{r.id} has search={r.search!r}, which a kernel before those that make codes does; quantize launches both"
        )
    if uses_fake_rule(request):
        if r.amax_nan == "lanes":
            what = "amax_nan='lanes'"
        else:
            what = f"blocks of {rows}x{columns}"
        return (
            f"{what} with fake_rule={r.fake_rule!r} have no CUDA kernel; needs one row of 16, 32, 64, 128, 256 or 512"
            " columns, and amax_nan 'ignore' or 'propagate'; compute on the CPU with cupy.asnumpy(x)"
        )
    if request.scaled:
        return (
            f"blocks of {rows}x{columns} under given scales have no CUDA kernel; needs a multiple of {SCALED_RUN}"
            " columns; compute on the CPU with cupy.asnumpy(x)"
        )
    if request.calibrated and (rows > 1 or r.four_over_six):
        return "block_amax of blocks of several rows, or of 4over6, has no CUDA kernel; compute on the CPU"
    return (
        f"blocks of {rows}x{columns} have no CUDA kernel; needs 16 columns or a multiple of 32 (at most 32 for blocks"
        " of several rows and 4over6); compute on the CPU with cupy.asnumpy(x)"
    )
