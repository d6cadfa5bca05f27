"""Choose the kernel that quantizes a matrix.
A LaunchRequest describes the wanted result: recipe, dtype, shape and options. KERNEL_CHOICES is an ordered table with
one KernelChoice per kernel. The first kernel that supports (takes) a request is launched. Single calls, cached calls
and groups all use this table.

kernels/README.md defines the words run, tile, patch and band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.call.parse import Declined
from fp4kit.cuda.compiler import THREAD_BYTES, has_table
from fp4kit.cuda.launch import CACHE_SIZE, THREADS, UNLIMITED, Device, grid, steps_per_block, struct_of
from fp4kit.formats import E2M1, E8M0, Codebook, IntegerOrFloat, is_same
from fp4kit.layouts import padded_shape
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import NOISE_STOCHASTICS
from fp4kit.recipes.schema import fake_unit
from fp4kit.reference.stochastic import HADAMARD_BLOCK

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VALUE_RUNS = 2  # runs of 16 bytes that a thread of dequantize or fake_quantize writes
MORE_VALUE_RUNS = 4  # such runs per thread if each thread block must prepare more, such as a table, before it starts
# The most steps per thread block of quantize, if it must prepare a table or sizes, and the most tiles per thread block
# of quantize_columns for blocks of one row. Four of its thread blocks fit on a multiprocessor.
PREPARED_STEPS, PATCH_STEPS, PATCH_RESIDENT = 4, 2, 4
WARP = 32  # threads per warp
MANY_ROWS = 1 << 9
MAX_TILE_BLOCK_COLUMNS = 32  # the widest block of quantize_tile, in which a thread holds one row of a block
FAKE_BLOCKS = (16, 32, 64, 128, 256, 512)  # block widths of fake_quantize, in which a warp computes a block's amax
TABLE_THREADS = 1024  # threads per thread block of quantize_table
# The smallest matrix for which quantize_table is used. Time in us with, then without tables (H200, 2026-11-21):
#     elements   1x16 blocks   16x16 blocks
#     2^22       15.9, 12.8     9.1,  8.9
#     2^23       17.6, 18.1    12.7, 24.1
#     2^24       22.3, 27.5    20.4, 36.4
MIN_TABLE_ELEMENTS = 1 << 23
PATCH_BLOCKS = ((1, 16), (1, 32), (16, 16), (32, 32))  # shapes of blocks that quantize_columns supports
PATCH_ROW_UNIT = 32  # for blocks of one row, quantize_columns needs rows of a multiple of this many bytes
TILE_ROWS = 128  # rows of a tile of quantize_columns
TILE_COLUMNS, TILE_BYTES = 128, 256  # width of such a tile: columns for square blocks, bytes for blocks of one row
SCALED_RUN = 16  # elements that a thread of quantize_with_scales encodes at a time
ROW_STEPS = 4  # blocks of a row per thread of quantize_tile, when it finds the amaxes of its rows
EDEN_RUN = 8  # elements that a thread of fake_ms_eden loads at a time
NOISE_RUN = 16  # elements that a thread of quantize_stochastic loads at a time
# quantize_columns processes tiles in bands of at most 2^BAND_SHIFT rows of tiles. With bands, writing codes along rows
# and columns takes 4% less time than without; bands of 2^4 rows are equally fast (H200, 2026-11-21).
BAND_SHIFT = 3


class Arguments(NamedTuple):
    """The names of a kernel's arguments, in order. Each argument has 8 bytes.

    Attributes:
        pointers: the addresses of arrays.
        words: unsigned numbers that differ between calls, such as a seed.
        sizes: numbers that are fixed when the launch is prepared, such as the shape of the matrix.
    """

    pointers: tuple[str, ...]
    words: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def struct(self) -> np.dtype:
        """Return the NumPy dtype of the struct of all arguments."""
        return struct_of(" ".join(self.pointers + self.words), " ".join(self.sizes))


# All kernels except quantize_columns take these arguments.
ROWS = Arguments(
    ("x", "packed", "scales", "values", "tensor_amax", "tensor_scale", "block_amax", "random", "amax_out"),
    ("seed", "counter"),
    ("rows", "columns"),
)
# The kernel quantize_columns takes these arguments.
_COLUMNWISE = ("column_packed", "column_scales")
_AMAXES = ("tensor_amax", "tensor_scale", "column_tensor_scale", "amax_out", "column_amax_out")
PATCHES = Arguments(("x", "packed", "scales", *_COLUMNWISE, "values", *_AMAXES), (), ("rows", "columns", "shift"))


class LaunchRequest(NamedTuple):
    """A quantization to launch: everything that determines the kernel, its template arguments and its grid.

    Attributes:
        recipe: the recipe.
        dtype: the dtype of x.
        shape: the rows and columns of the contiguous matrix x.
        layout: the layout of the block scales.
        values: True if fake-quantized values are written, False if codes are written.
        columns: True if columnwise codes are written, alone or together with rowwise codes. False for rowwise codes
            only.
        stochastic: True for stochastic rounding.
        mask: the sign mask of a Hadamard transform; None for no transform. If `columns` is True, only elements for
            columnwise codes are transformed.
        calibrated: True if the caller passes block amaxes.
        grouped: True if the launch is for a group of matrices.
        finds_amax: True if the kernel itself computes the tensor amax or the row amaxes of x, and writes them to
            tensor_amax.
        scaled: True if the caller passes block scales and tensor scales.
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
        """Return the shape (rows, columns) in which the kernel treats the matrix."""
        r, (rows, columns) = self.recipe, self.shape
        return (1, rows * columns) if r.block is None and r.tensor_scaling != "row" else (rows, columns)


class KernelChoice(NamedTuple):
    """A kernel, with functions that say which requests the kernel supports and how it is launched.

    Attributes:
        kernel: the name of its file in kernels/entries, without the suffix.
        takes: takes(request) returns True if the kernel supports a request.
        grid: grid(request, device) returns the number of thread blocks for a request.
        arguments: the names of its arguments.
        sizes: sizes(request) returns the values of arguments.sizes.
        threads: the number of threads per thread block.
    """

    kernel: str
    takes: Callable[[LaunchRequest], bool]
    grid: Callable[[LaunchRequest, Device], int]
    arguments: Arguments = ROWS
    sizes: Callable[[LaunchRequest], tuple[int, ...]] = lambda request: request.kernel_shape
    threads: int = THREADS


def value_blocks(rows: int, columns: int, dtype: np.dtype, runs: int) -> int:
    """Return the number of thread blocks that write a matrix of values, if each thread writes `runs` times 16 bytes."""
    return -(-rows * -(-columns * dtype.itemsize // 16) // (runs * THREADS))


# ---- which requests each kernel takes ----


def uses_fake_rule(request: LaunchRequest) -> bool:
    """Return True if a request is for fake-quantized values and the recipe has a fake_rule, which computes them."""
    return request.values and request.recipe.fake_rule is not None


def adds_noise(request: LaunchRequest) -> bool:
    """Return True if a request is for stochastic rounding by added noise, as ComfyUI and MSLK round."""
    return request.stochastic and request.recipe.stochastic in NOISE_STOCHASTICS


def _takes_ms_eden(request: LaunchRequest) -> bool:
    """Return True if the kernel fake_ms_eden supports a request: fake-quantized values by a fake_rule of MS-EDEN."""
    # Blocks must have a multiple of EDEN_RUN (8) columns, and amax_nan must not be "lanes".
    fits = request.recipe.block_size % EDEN_RUN == 0 and request.recipe.amax_nan != "lanes"
    return uses_fake_rule(request) and fake_unit(request.recipe) > 1 and fits


def _takes_fake(request: LaunchRequest) -> bool:
    """Return True if the kernel fake_quantize supports a request: fake-quantized values, computed by a fake_rule."""
    rows, columns = request.recipe.block or (1, FAKE_BLOCKS[0])
    fits = rows == 1 and columns in FAKE_BLOCKS and request.recipe.amax_nan != "lanes"
    return uses_fake_rule(request) and fake_unit(request.recipe) == 1 and fits


def _takes_hif4(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_hif4 supports a request: by rows, for HiF4."""
    r = request.recipe
    return bool(r.levels) and r.tensor_rule is None and not (request.columns or request.scaled)


def _takes_dual(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_dual supports a request: by rows, for dual-level MXFP4."""
    r = request.recipe
    return r.tensor_rule == "msmodelslim" and r.block_size in FAKE_BLOCKS and not (request.columns or request.scaled)


def _dual_run(request: LaunchRequest) -> int:
    """Return the number of elements that a thread of quantize_dual encodes at a time."""
    return 32 if request.recipe.block_size % 32 == 0 else 16


def finds_outer_amaxes(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_dual computes the amaxes of outer blocks, each of which a warp must hold."""
    lanes = request.recipe.tensor_columns // _dual_run(request)
    return _takes_dual(request) and not request.grouped and lanes in (1, 2, 4, 8, 16, 32)


def _takes_noise(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_stochastic supports a request: rowwise stochastic rounding by noise."""
    # Blocks must have one row, and a multiple of NOISE_RUN (16) columns.
    rows, columns = request.recipe.block or (0, 0)
    plain = _by_rows(request) and not request.grouped
    return adds_noise(request) and plain and rows == 1 and columns % NOISE_RUN == 0


def has_patch_kernel(r: Recipe) -> bool:
    """Return True if the kernel quantize_columns supports the blocks, scales and elements of a recipe."""
    # The elements must be floats, in blocks of 1 x 16, 1 x 32, 16 x 16 or 32 x 32 (PATCH_BLOCKS).
    # The recipe must have at most one tensor scale per tensor, no 4over6 and no search.
    one_scale = r.tensor_scaling in ("none", "tensor") and r.four_over_six is None and not r.search
    is_float = not (r.element.is_integer or isinstance(r.element, Codebook))
    return r.block in PATCH_BLOCKS and one_scale and is_float


def _takes_patch(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_columns supports a request: for columnwise codes, or for square blocks."""
    # has_patch_kernel(recipe) must be True.
    # For square blocks, the number of columns must be a multiple of the block size.
    r, has_tall_blocks = request.recipe, request.recipe.block_rows > 1
    unit = r.block_size if has_tall_blocks else PATCH_ROW_UNIT // request.dtype.itemsize
    needs_patches = request.columns or has_tall_blocks
    can_transform = request.mask is None or (request.columns and r.block == (1, HADAMARD_BLOCK))
    others = request.stochastic or request.calibrated or request.grouped or request.scaled or uses_fake_rule(request)
    fits = can_transform and has_patch_kernel(r) and request.shape[1] % unit == 0
    return needs_patches and not others and fits


def _takes_table(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_table supports a request: codes of a large bfloat16 matrix by a 4over6
    recipe.
    """
    # The matrix must have at least MIN_TABLE_ELEMENTS (2^23) elements and be quantized along its rows, not in a group
    # and not under scales that the caller passes.
    # The recipe must sum errors ("mae" or "mse") without lane_sums, and have one tensor scale and blocks of 1 x 16 or
    # 16 x 16.
    r = request.recipe
    is_square = r.block == (16, 16) and r.amax_nan == "propagate"
    sums_errors = r.four_over_six in ("mae", "mse") and r.block_rule == "four_over_six" and not r.lane_sums
    has_tables = sums_errors and (r.block == (1, 16) or is_square) and r.tensor_scaling == "tensor"
    plain = _by_rows(request) and not (request.values or request.grouped)
    is_large = request.shape[0] * request.shape[1] >= MIN_TABLE_ELEMENTS
    return has_tables and plain and request.dtype == BFLOAT16 and is_large


def _by_rows(request: LaunchRequest) -> bool:
    """Return True if a request is for rowwise codes or values, with scales that the kernel itself computes."""
    return not request.columns and not uses_fake_rule(request) and not request.scaled


def _takes_tile(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_tile supports a request."""
    # Blocks must have 16 or 32 columns, and a number of rows that divides THREADS (256).
    # The caller must pass neither scales nor block amaxes, and the request must not be for values by a fake_rule.
    r = request.recipe
    rows, columns = r.block or (1, 0)
    fits_threads = columns in (HADAMARD_BLOCK, MAX_TILE_BLOCK_COLUMNS) and THREADS % rows == 0
    return _by_rows(request) and (rows > 1 or r.four_over_six is not None) and fits_threads and not request.calibrated


def _takes_scaled(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_with_scales supports a request."""
    r = request.recipe
    return request.scaled and not request.columns and (r.block is None or r.block_size % SCALED_RUN == 0)


def _takes_unblocked(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize_unblocked supports a request: rowwise, by a recipe without blocks."""
    return _by_rows(request) and request.recipe.block is None


def _takes_rows(request: LaunchRequest) -> bool:
    """Return True if the kernel quantize supports a request: rowwise, for blocks of one row, without 4over6."""
    # The width of a block must be 16, or a multiple of 32.
    r = request.recipe
    rows, columns = r.block or (0, 0)
    plain = _by_rows(request) and not adds_noise(request)
    return plain and rows == 1 and r.four_over_six is None and columns % (32 if columns > 32 else 16) == 0


def finds_rows(request: LaunchRequest) -> bool:
    """Return True if each thread block computes the amaxes of the rows that it quantizes."""
    by_row = request.finds_amax and request.recipe.tensor_scaling == "row"
    of_tiles = _takes_tile(request) and request.recipe.block_rows == 1 and not request.values
    return by_row and (_takes_rows(request) or of_tiles or _finds_unblocked_rows(request))


def _finds_unblocked_rows(request: LaunchRequest) -> bool:
    """Return True if thread blocks of quantize_unblocked compute the amaxes of their rows: of many rows of one code per
    byte, which are long enough for a thread block, and short enough for the L2 cache.
    """
    rows, columns = request.shape
    fits = rows >= MANY_ROWS and 4096 <= columns <= 1 << 15 and request.recipe.element.packing.codes == 1
    return _takes_unblocked(request) and fits and not request.stochastic and request.mask is None


def needs_search(request: LaunchRequest) -> bool:
    """Return True if a search kernel must first choose the block amaxes, because the recipe has a search."""
    return bool(request.recipe.search) and not request.scaled


# ---- grids ----


def _fake_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of fake_quantize, in which each thread writes 2 times 16 bytes
    (VALUE_RUNS).
    """
    runs = VALUE_RUNS if request.recipe.block and not has_table(request.recipe) else MORE_VALUE_RUNS
    return grid(value_blocks(*request.kernel_shape, request.dtype, runs), device, UNLIMITED)


def _hif4_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of quantize_hif4, in which each thread reads 64 bytes or writes 32."""
    runs = VALUE_RUNS if request.values else THREAD_BYTES // 16
    return grid(value_blocks(*request.shape, request.dtype, runs), device, UNLIMITED)


def _patch_sizes(request: LaunchRequest) -> tuple[int, ...]:
    """Return the size arguments of quantize_columns: the rows and columns of the matrix, and the shift of a band."""
    return *request.shape, min((-(-request.shape[0] // TILE_ROWS) - 1).bit_length(), BAND_SHIFT)


def _patch_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of quantize_columns: one per tile, or per PATCH_STEPS tiles."""
    rows, columns, shift = _patch_sizes(request)
    tiles_down = -(-rows // TILE_ROWS)
    tile_columns = TILE_COLUMNS if request.recipe.block_rows > 1 else TILE_BYTES // request.dtype.itemsize
    tiles = -(-columns // tile_columns) * ((tiles_down + (1 << shift) - 1 >> shift) << shift)
    steps = steps_per_block(tiles, device, PATCH_STEPS if request.recipe.block_rows == 1 else 1, PATCH_RESIDENT)
    return grid(-(-tiles // steps), device, UNLIMITED)


def _table_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of quantize_table: at most one per multiprocessor, where it fills a table."""
    rows, columns = request.shape
    threads = -(-rows // request.recipe.block_rows) * request.recipe.block_rows * -(-columns // 128) * 8
    return grid(-(-threads // TABLE_THREADS), device, 1)


def _tile_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of quantize_tile: one per tile, at most BLOCKS_PER_SM per multiprocessor."""
    rows, columns = request.shape
    if plan := row_plan(request, device):
        return plan.blocks
    tiles_across = -(-(columns // request.recipe.block_size) // (THREADS // request.recipe.block_rows))
    return grid(-(-rows // request.recipe.block_rows) * tiles_across, device)


def _bytes_per_thread(request: LaunchRequest) -> int:
    """Return the bytes of elements that a thread of quantize loads at a time, before row_plan doubles them: 32 or
    64.
    """
    r = request.recipe
    return VALUE_RUNS * 16 if request.values and r.block and r.apply == "multiply" else THREAD_BYTES


MORE_ROW_THREADS = 512  # threads per thread block for rows that do not fit into one step of THREADS threads
ROWS_BYTES = 1 << 25


class RowPlan(NamedTuple):
    """How thread blocks process rows whose amaxes they compute (finds_rows).

    Attributes:
        step: "warp" if each warp takes one row in one step of its threads, "several" if a thread block takes several
            whole rows in one step, "one" if it takes one row in one step, "part" if it takes one row in several steps.
            It is always "part" for quantize_tile.
        threads: the number of threads per thread block, a multiple of WARP.
        thread_bytes: the bytes of elements that a thread of quantize loads at a time. It is not used by quantize_tile.
        blocks: the number of thread blocks.
    """

    step: str
    threads: int
    thread_bytes: int
    blocks: int


def row_plan(request: LaunchRequest, device: Device) -> RowPlan | None:
    """Return the RowPlan of a request; None unless thread blocks compute the amaxes of their rows (finds_rows)."""
    if not finds_rows(request):
        return None
    rows, columns = request.shape
    if request.recipe.block is None:
        return RowPlan("part", THREADS, THREAD_BYTES, grid(rows, device, 8))
    if request.recipe.four_over_six:
        warps = -(-columns // (WARP * request.recipe.block_size))
        threads = min(WARP * -(-warps // ROW_STEPS), THREADS)
        return RowPlan("part", threads, THREAD_BYTES, grid(rows, device, 96))
    most, itemsize = THREADS // WARP, request.dtype.itemsize
    thread_bytes = _bytes_per_thread(request)
    if rows >= grid(rows, device, 4) * most:
        for bytes_ in (thread_bytes // 2, thread_bytes, 2 * thread_bytes) if thread_bytes == THREAD_BYTES else ():
            warp = WARP * bytes_ // itemsize
            if warp // 2 < columns <= warp and bytes_ >= 16 * itemsize:
                return RowPlan("warp", THREADS, bytes_, grid(-(-rows // most), device, 96))
    if thread_bytes == THREAD_BYTES and columns * itemsize > THREADS * THREAD_BYTES:
        thread_bytes = 2 * THREAD_BYTES
    warp = WARP * thread_bytes // itemsize  # elements that a warp loads in one step
    count = min(most * warp // columns, rows // grid(rows, device, 4))  # rows that a thread block takes at a time
    if count > 1 and columns <= warp:
        warps = -(-count * columns // warp)
        return RowPlan("several", WARP * warps, thread_bytes, grid(-(-rows // (warps * warp // columns)), device, 96))
    warps = -(-columns // warp)
    if warps > most:
        most = MORE_ROW_THREADS // WARP
    steps = -(-warps // most)
    if steps == 1:
        return RowPlan("one", WARP * warps, thread_bytes, grid(rows, device, 96))
    # The rows that thread blocks have begun should fit into the L2 cache, where they are read again.
    blocks = max(grid(UNLIMITED, device, 1), ROWS_BYTES // (columns * itemsize))
    return RowPlan("part", WARP * -(-warps // steps), thread_bytes, min(rows, blocks))


def _row_grid(request: LaunchRequest, device: Device) -> int:
    """Return the number of thread blocks of quantize or quantize_unblocked: one thread per 64 bytes of elements."""
    # If every thread block must first prepare something, the grid has at most 96 thread blocks per multiprocessor, so
    # that a thread block does more work per preparation.
    r, (rows, columns) = request.recipe, request.kernel_shape
    if plan := row_plan(request, device):
        return plan.blocks
    if request.values and r.block and r.apply == "multiply":
        work = value_blocks(rows, columns, request.dtype, VALUE_RUNS)
        steps = steps_per_block(work, device, PREPARED_STEPS if has_table(r) else 1)
        return grid(-(-work // steps), device, UNLIMITED)
    if request.layout != "linear":
        rows, _ = padded_shape((rows, columns), request.layout)  # threads also write the padding of the scales
    work = -(-rows * (-(-columns // 16) * 16) * request.dtype.itemsize // (THREAD_BYTES * THREADS))
    prepares = has_table(r) or request.layout != "linear" or (r.block is not None and r.tensor_scaling == "row")
    steps = steps_per_block(work, device, PREPARED_STEPS if prepares else 1)
    return grid(-(-work // steps), device, 96 if prepares else UNLIMITED)


def _threads_grid(request: LaunchRequest, device: Device, unit: int) -> int:
    """Return the number of thread blocks of a kernel with one thread per `unit` elements of a row."""
    rows, columns = request.kernel_shape
    return grid(-(-rows * -(-columns // unit) // THREADS), device, UNLIMITED)


# ---- the table of kernels ----

KERNEL_CHOICES = (
    # For HiF4 and dual-level MXFP4, whose scales have several levels.
    KernelChoice("quantize_hif4", _takes_hif4, _hif4_grid),
    KernelChoice("quantize_dual", _takes_dual, lambda w, d: _threads_grid(w, d, _dual_run(w))),
    # For stochastic rounding by noise (ComfyUI, MSLK), which no other kernel computes.
    KernelChoice("quantize_stochastic", _takes_noise, lambda w, d: _threads_grid(w, d, w.recipe.block_size)),
    # For the fake rules of fouroversix's MS-EDEN, which correct the scales of several blocks together.
    KernelChoice("fake_ms_eden", _takes_ms_eden, lambda w, d: _threads_grid(w, d, fake_unit(w.recipe))),
    # For fake-quantized values by another fake_rule (the producer's own fake quantizer), which needs no codes.
    KernelChoice("fake_quantize", _takes_fake, _fake_grid),
    # For codes under scales that the caller passes. No amax is needed; each thread computes the factor of its elements.
    KernelChoice("quantize_with_scales", _takes_scaled, lambda w, d: _threads_grid(w, d, SCALED_RUN)),
    # For columnwise codes, with or without rowwise codes, and for square blocks. Speed relative to a copy (H200,
    # 2026-11-21):
    #     request           quantize_columns   alternative
    #     columnwise        0.95
    #     both directions   0.78 to 0.82       0.4 (through a transposed copy)
    #     square blocks     0.995              0.42 (quantize_tile)
    KernelChoice("quantize_columns", _takes_patch, _patch_grid, PATCHES, _patch_sizes),
    # For 4over6 of large matrices. Speed relative to a copy: 0.86; by quantize_tile, 0.57 (H200, 2026-11-21).
    KernelChoice("quantize_table", _takes_table, _table_grid, threads=TABLE_THREADS),
    # For blocks of several rows, and for 4over6. Several threads compute the scale of a block together.
    KernelChoice("quantize_tile", _takes_tile, _tile_grid),
    # For recipes without blocks: rows of any length, with one scale per tensor or row.
    KernelChoice("quantize_unblocked", _takes_unblocked, _row_grid),
    # For all other requests with blocks of one row.
    KernelChoice("quantize", _takes_rows, _row_grid),
)


@lru_cache(CACHE_SIZE)
def find_kernel(request: LaunchRequest) -> KernelChoice | None:
    """Return the first kernel in KERNEL_CHOICES that supports a request, or None if no kernel does."""
    if unsupported(request.recipe) or needs_search(request) or (adds_noise(request) and not _takes_noise(request)):
        return None
    choices = KERNEL_CHOICES[:2] if request.recipe.levels else KERNEL_CHOICES
    return next((choice for choice in choices if choice.takes(request)), None)


def kernel_for(request: LaunchRequest) -> KernelChoice:
    """Return the first kernel in KERNEL_CHOICES that supports a request."""
    check_formats(request.recipe)
    choice = find_kernel(request)
    if choice is None:
        raise Declined(why_declined(request))
    return choice


ON_THE_CPU = "compute on the CPU with cupy.asnumpy(x)"  # the end of the reasons of Declined


def why_declined(request: LaunchRequest) -> str:
    """Return the error message for a request for which find_kernel returns None: what is unsupported, what is
    needed.
    """
    # The recipe itself must be supported (check_formats).
    return next(text for is_reason, text in _reasons(request) if is_reason)


def _reasons(request: LaunchRequest) -> Iterator[tuple[bool, str]]:
    """Yield pairs (whether this is why a request has no kernel, the message). The last pair is always a reason."""
    r, (rows, columns) = request.recipe, request.recipe.block or (1, 1)
    blocks, none = f"blocks of {rows}x{columns}", "no CUDA kernel; needs"
    search = f"{r.id} has search={r.search!r}: a separate kernel chooses the block amaxes"
    yield needs_search(request), f"{search}; call quantize, which launches both"
    if adds_noise(request):
        rounding = f"stochastic rounding of {r.id}"
        yield request.grouped, f"{rounding} in a group has no CUDA kernel; call quantize for each array"
        needed = f"scales computed from x, and blocks of one row and a multiple of {NOISE_RUN} columns"
        where = "under given scales" if request.scaled else f"in {blocks}"
        yield True, f"{rounding} {where} has {none} {needed}; {ON_THE_CPU}"
    needed = "one row of 16, 32, 64, 128, 256 or 512 columns"
    yield r.tensor_rule == "msmodelslim", f"{blocks} by {r.id} have {none} {needed}; {ON_THE_CPU}"
    needed = f"a multiple of {EDEN_RUN} columns, and amax_nan 'ignore' or 'propagate'"
    yield fake_unit(r) > 1, f"{blocks} by {r.id} have {none} {needed}; {ON_THE_CPU}"
    what = "amax_nan='lanes'" if r.amax_nan == "lanes" else blocks
    needed = "one row of 16, 32, 64, 128, 256 or 512 columns, and amax_nan 'ignore' or 'propagate'"
    yield uses_fake_rule(request), f"{what} with fake_rule={r.fake_rule!r} have {none} {needed}; {ON_THE_CPU}"
    needed = f"a multiple of {SCALED_RUN} columns"
    yield request.scaled, f"{blocks} under given scales have {none} {needed}; {ON_THE_CPU}"
    is_tall = rows > 1 or r.four_over_six is not None
    what = "block_amax of blocks of several rows, or of 4over6, has no CUDA kernel; compute on the CPU"
    yield request.calibrated and is_tall, what
    needed = "16 columns or a multiple of 32 (at most 32 for blocks of several rows and 4over6)"
    yield True, f"{blocks} have {none} {needed}; {ON_THE_CPU}"


MAX_EXPONENT = 100  # the largest |exponent| of an element, so that encoding and decoding stay in float32's range
FOUR_OVER_SIX_COLUMNS = 16  # the columns of a 4over6 block that kernels support


def check_formats(r: Recipe) -> None:
    """Raise Declined if no kernel supports a recipe. The message says what is needed and what to do instead."""
    if wrong := unsupported(r):
        raise Declined(f"{r.id} has {wrong}; {ON_THE_CPU}")


@lru_cache(256)
def unsupported(r: Recipe) -> str | None:
    """Return why no kernel supports a recipe, or None if it exceeds no limit of the kernels."""
    texts = (
        f"{what}, which no CUDA kernel supports; needs {needed}" for is_wrong, what, needed in _limits(r) if is_wrong
    )
    return next(texts, None)


def _limits(r: Recipe) -> Iterator[tuple[bool, str, str]]:
    """Yield one tuple per limit: whether a recipe exceeds it, the property that exceeds it, and what is needed."""
    e, s = r.element, r.scale
    yield r.specification_only, "rules of the specification alone", "an array in host memory"
    # Kernels can encode and decode elements whose smallest and largest exponents are at most MAX_EXPONENT.
    fits = -MAX_EXPONENT <= e.emin - e.mantissa_bits and e.emax <= MAX_EXPONENT and e.bias >= 0
    yield not (e.is_integer or fits), f"elements {e} with bias {e.bias}", "values from 2^-100 to 2^100"
    without_zero = r.is_custom and s is not None and not s.has_zero and s != E8M0
    yield without_zero, f"scales {s}, which have no zero", "E8M0, or a scale format with a zero"
    if r.is_custom and s is not None and s.has_zero:
        yield s.bias < 0, f"scales {s} with bias {s.bias}", "a bias of 0 or more"
        yield s.mantissa_bits == 0, f"scales {s} without mantissa bits", "E8M0, or at least one mantissa bit"
    narrow = r.block is not None and r.block_size % 4 != 0
    yield narrow, f"blocks of {r.block_size} columns", "a multiple of 4"
    yield e.is_integer and r.rounding != "rn", f"rounding={r.rounding!r} for elements {e}", "'rn'"
    lanes = r.amax_nan == "lanes" and r.tensor_scaling == "block"
    yield lanes, "amax_nan='lanes' with tensor_scaling='block'", "'ignore' or 'propagate'"
    if r.four_over_six:
        yield not (is_same(e, E2M1) or isinstance(e, IntegerOrFloat)), f"4over6 with elements {e}", "E2M1"
        in_lanes = (r.lane_sums or r.four_over_six == "max") and r.block_rows > 1
        rule = f"4over6 by {'lane_sums' if r.lane_sums else 'max'}"
        yield in_lanes, f"{rule} with blocks of {r.block_rows} rows", "one row"
        shape = f"4over6 with blocks of {r.block_size} columns"
        yield r.block_size != FOUR_OVER_SIX_COLUMNS, shape, f"{FOUR_OVER_SIX_COLUMNS}"
