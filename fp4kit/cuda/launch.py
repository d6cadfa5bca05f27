"""Launch kernels: the table of launches, grid sizes, prepared launches for one matrix or a group, and alignment checks.

Kernels use grid-stride loops, so their results do not depend on the size of the grid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fp4kit.arrays import imports
from fp4kit.cuda import compiler

THREADS = 256  # threads per thread block
BLOCKS_PER_SM = 16  # the most thread blocks per multiprocessor, unless a launcher chooses another limit
MAX_THREADS = 2048  # threads that run on a multiprocessor at a time
MAX_ELEMENTS = 1 << 33  # the most elements per launch
MAX_COLUMNS = (1 << 32) - 1  # the most elements per row, for recipes with blocks
# A limit of thread blocks per multiprocessor that is never reached, so each thread block processes one share of work.
UNLIMITED = 1 << 16
CACHE_SIZE = 1024  # the most entries in each cache of choices or launches; each new shape takes an entry


class Target(NamedTuple):
    """A GPU for which launches are prepared without it: its architecture, such as "sm_90", and its multiprocessors."""

    arch: str
    multiprocessors: int


Device = int | Target  # the number of a device, or a Target


@cache
def multiprocessors(device: Device) -> int:
    """Return the number of multiprocessors of a device."""
    if isinstance(device, Target):
        return device.multiprocessors
    return int(imports.cupy().cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


@cache
def architecture_of(device: Device) -> str:
    """Return the architecture of a device, such as "sm_90"."""
    if isinstance(device, Target):
        return device.arch.rstrip("af")
    properties = imports.cupy().cuda.runtime.getDeviceProperties(device)
    return f"sm_{properties['major']}{properties['minor']}"


def resident_blocks(device: Device) -> int:
    """Return how many thread blocks of THREADS (256) threads a device can run at once, limited only by threads."""
    return multiprocessors(device) * (MAX_THREADS // THREADS)


def steps_per_block(steps: int, device: Device, most: int, resident: int = MAX_THREADS // THREADS) -> int:
    """Return how many of `steps` a thread block takes: at most `most`, and so few that the grid fills the GPU twice.

    resident: how many thread blocks a multiprocessor runs at once.
    """
    # Before Blackwell memory limits these kernels, and several steps take longer. For 16384 x 16384 bfloat16 of
    # nvfp4-te, 1, 2 and 4 steps of dequantize take 170.0, 172.1 and 175.9 us, of quantize 159.8, 159.8 and 161.3, and
    # of quantize along columns 172.2, 177.2 and 179.4 (H200, 2026-11-29). Blackwell has hardly more instructions per
    # second for nearly twice the bytes.
    if int(architecture_of(device)[3:]) < 100:
        return 1
    return max(min(steps // (2 * resident * multiprocessors(device)), most), 1)


def check_count(elements: int) -> None:
    """Raise ValueError if a matrix has more than 2^33 elements."""
    if elements > MAX_ELEMENTS:
        raise ValueError(
            f"fp4kit.cuda: a matrix has {elements} elements; a kernel takes at most {MAX_ELEMENTS} (2^33); split the"
            " first axis"
        )


def check_columns(columns: int) -> None:
    """Raise ValueError if a row has more than 2^32 - 1 elements, too many for the kernels' 32-bit indices."""
    if columns > MAX_COLUMNS:
        raise ValueError(
            f"fp4kit.cuda: a row has {columns} elements; a kernel takes at most 2^32 - 1; reshape x to shorter rows"
        )


def grid(work_blocks: int, device: Device, per_multiprocessor: int = BLOCKS_PER_SM) -> int:
    """Return the number of thread blocks to launch, at least 1."""
    return max(min(work_blocks, multiprocessors(device) * per_multiprocessor), 1)


class _Struct(np.ndarray):
    """A struct of kernel arguments that CuPy passes by value, stored as an array with one element of raw bytes.

    At each launch, CuPy reads the array's __array_interface__ to find its address. NumPy creates this dict at every
    access, which takes 6 us for an array with named fields and 1.5 us for raw bytes (host of an H200, November 2026).
    This class stores the dict once.
    """

    __array_interface__: Any = None  # hides NumPy's descriptor, so that an instance can store its own value

    @classmethod
    def of(cls, memory: bytearray) -> _Struct:
        """Return a struct that shares its bytes with `memory`: later changes of `memory` change the struct."""
        plain = np.frombuffer(memory, np.dtype((np.void, len(memory))))
        struct = plain.view(cls)
        struct.__array_interface__ = plain.__array_interface__
        return struct


class _Slot(NamedTuple):
    """Memory for the arguments of one launch, in the forms that CuPy and the CUDA driver need.

    Attributes:
        memory: the bytes, which each launch overwrites.
        struct: an array that shares these bytes, for launches by CuPy.
        parameters: the address of a void*[1] that points to these bytes, for launches by the driver.
        held: the void*[1], kept alive.
    """

    memory: bytearray
    struct: _Struct
    parameters: int
    held: Any

    @classmethod
    def of(cls, size: int) -> _Slot:
        """Return a new slot for a struct of `size` bytes, all zero."""
        memory = bytearray(size)
        at = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        pointers = (ctypes.c_void_p * 1)(at)
        return cls(memory, _Struct.of(memory), ctypes.addressof(pointers), pointers)


class Launch:
    """A prepared launch: a kernel with a fixed grid and fixed sizes. Call the object with array addresses to launch.

    Args:
        function: the CuPy function of the kernel. For a Target, what function_of returns; it cannot be launched.
        blocks: the number of thread blocks.
        fields: the dtype of the struct of the kernel's arguments. Every field has 8 bytes.
        sizes: the values of the last fields, such as the shape of the matrix.
        threads: the number of threads per thread block.
    """

    __slots__ = ("_driver", "_free", "_handle", "_pack", "_size", "block", "fields", "function", "grid", "sizes")

    def __init__(self, function: Any, blocks: int, fields: np.dtype, *sizes: int, threads: int = THREADS) -> None:
        self.function, self.grid, self.block, self.fields, self.sizes = function, (blocks,), (threads,), fields, sizes
        # The driver's handle of the kernel, and CuPy's driver module. _by_driver sets both when it is first called.
        self._handle: int | None = None
        self._driver: Any = None
        layout = Struct(f"{len(fields.names or ())}Q")
        self._pack, self._size = layout.pack_into, layout.size
        # Slots that can be reused. A launch returns its slot at once, because the driver copies the bytes.
        self._free: list[_Slot] = []

    def __call__(self, *values: int, stream: Any = None) -> None:
        """Launch the kernel, without waiting for it."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot.of(self._size)
        self._pack(slot.memory, 0, *values, *self.sizes)
        if stream is None:
            self.function(self.grid, self.block, (slot.struct,))
        elif not self._by_driver(slot, stream):
            self.function(self.grid, self.block, (slot.struct,), stream=stream)
        self._free.append(slot)

    def _by_driver(self, slot: _Slot, stream: Any) -> bool:
        """Launch the kernel by the CUDA driver's function, which skips CuPy's conversion of arguments, and return
        True.
        """
        if self._handle is None:
            self._handle = getattr(getattr(self.function, "kernel", self.function), "ptr", 0)
            self._driver = imports.cupy().cuda.driver if self._handle else None
        driver = self._driver
        if driver is None:
            return False
        try:
            driver.launchKernel(
                self._handle, self.grid[0], 1, 1, self.block[0], 1, 1, 0, stream.ptr, slot.parameters, 0
            )
        except driver.CUDADriverError:
            return False
        return True


@cache
def struct_of(pointers: str, sizes: str = "", floats: str = "") -> np.dtype:
    """Return the dtype of a struct of kernel arguments: addresses, integers and float64 numbers, of 8 bytes each."""
    kinds = ((pointers, "u8"), (sizes, "i8"), (floats, "f8"))
    return np.dtype([(name, kind) for names, kind in kinds for name in names.split()])


class LaunchRow(NamedTuple):
    """How one kernel is launched: a row of LAUNCHES.

    Attributes:
        names: the names of its arguments: pointers, integers and float64 numbers, separated by bars.
        traits: the names of the types and constants that its instantiation defines, in order.
        limit: the most thread blocks per multiprocessor.
        threads: the number of threads per thread block.
        fixed: True if the kernel or its launcher needs THREADS threads per thread block. Launchers then count the work
            in thread blocks, not in threads.
        file: the name of its file in kernels/entries, without the suffix; "" if it is the name of the row.
        entry: the name of the kernel in this file, without the suffix "_kernel"; "" if it is the name of the row.
    """

    names: str
    traits: str = ""
    limit: int = BLOCKS_PER_SM
    threads: int = THREADS
    fixed: bool = False
    file: str = ""
    entry: str = ""

    @property
    def arguments(self) -> np.dtype:
        """Return the dtype of the struct of the kernel's arguments."""
        return struct_of(*self.names.split("|"))


_MSMODELSLIM = "x tensor_amax block_amax bins | rows columns"
_KEEP = "source source_scales extent packed scales tensor_scale tensor_amax | blocks source_block"
_LOSSES = (
    "x amax tensor_amax weights multiples losses least out"
    " | rows columns rows_of_amax rows_of_tensor parts first count | power"
)
_LOSS_TRAITS = "Input kWeighted kOwn kMagnitudes kLargest kPowers"
# The arguments of search.cuh and search_full.cuh. column_weights points to the weights or the Hessians.
_SEARCH = "x tensor_amax column_weights block_amax unproven | rows columns lower upper"
# The pruned search without weights: threads per thread block, and thread blocks per multiprocessor. Thread blocks are
# large, because the threads of a thread block share tables of bounds.
SEARCH_THREADS, SEARCH_BLOCKS = 512, 2
# The most thread blocks per multiprocessor of the partial kernels. With 16, kernels take 6% longer; without a limit, up
# to 20% longer (H200, 2026-11-21).
_PARTIAL_BLOCKS = 64
# How each kernel is launched, except the kernels of dispatch.KERNEL_CHOICES, whose arguments and grids depend on a
# request, and those of matmul.py. The .cu file of a kernel describes its arguments and traits. A row "clip sm_80" holds
# for this architecture alone: LAUNCHES["clip sm_80"] = LAUNCHES["clip"]._replace(threads=128).
LAUNCHES = {
    "amax": LaunchRow("x amax | rows columns", "Input kCounted kAligned"),
    "amax_columns": LaunchRow(
        "x amax | matrices rows columns lanes tile_rows", "Input kAligned", UNLIMITED, fixed=True
    ),
    "amax_hadamard": LaunchRow("x amax | rows columns", "Input kCounted kAligned", fixed=True),
    "amax_long_rows": LaunchRow("x amax | rows columns", "Input kCounted kAligned", fixed=True, file="amax"),
    "amax_rows": LaunchRow("x amax | rows columns", "Input kCounted kAligned", fixed=True, file="amax"),
    "clip": LaunchRow("grad x amax out | count covered", "Input Gradient kAligned", UNLIMITED),
    "ceil_x": LaunchRow(_MSMODELSLIM, "Input kAligned", 8, file="search_msmodelslim"),
    "ceil_x_errors": LaunchRow(_MSMODELSLIM, "Input kAligned", 8, file="search_msmodelslim"),
    "count_changed": LaunchRow("x y changed largest | count"),
    "dequantize": LaunchRow(
        "packed scales values tensor_scale tensor_amax | rows columns ahead share",
        "Input Output",
        UNLIMITED,
        fixed=True,
    ),
    "hadamard_columns": LaunchRow("x out signs | outer length inner", "Input kHasSigns kIsInverse", fixed=True),
    "hadamard_rows": LaunchRow("x out signs | count length", "Input kHasSigns kIsInverse", fixed=True),
    "implied_amax": LaunchRow("tensor_scale tensor_amax amax | count", "Input"),
    "least_losses": LaunchRow(_LOSSES, _LOSS_TRAITS, file="search_amaxes"),
    "pack_codes": LaunchRow("in out | bytes", "kAligned", UNLIMITED),
    "partial_amax": LaunchRow(
        "values block_amax tensor_amax | start end rows columns block_at tensor_at", "Input", _PARTIAL_BLOCKS
    ),
    "partial_cast": LaunchRow(
        "values packed scale_codes block_amax tensor_amax | start end columns run_at code_at block_at tensor_at",
        "Input",
        _PARTIAL_BLOCKS,
    ),
    "partial_place": LaunchRow(
        "from to scale_codes scales tensor_amax tensor_scale | "
        "start end first last rows columns from_at to_at code_at scale_at tensor_at",
        "Input kLayout",
        _PARTIAL_BLOCKS,
    ),
    "requantize_amax": LaunchRow(_KEEP, "Input kUnsignedZero", file="requantize"),
    "requantize_keep": LaunchRow(_KEEP, "Input kUnsignedZero", file="requantize"),
    "requantize_range": LaunchRow(_KEEP, "Input kUnsignedZero", file="requantize"),
    "rotate": LaunchRow(
        "x out signs matrices | outer length inner matrix_step",
        "Input kContiguous kHasSigns kHasMatrices kIsInverse",
        fixed=True,
    ),
    "row_losses": LaunchRow(_LOSSES, _LOSS_TRAITS, file="search_amaxes"),
    "search": LaunchRow(_SEARCH, "Input kAligned kWeighted kAll kEight", SEARCH_BLOCKS, SEARCH_THREADS),
    "search_factors": LaunchRow("x tensor_amax block_amax | rows columns", "Input kAligned", 8),
    "search_full": LaunchRow(
        f"{_SEARCH} | power", "Input kAligned kWeighted kHessian kMagnitudes kLargest kPowers kFromFloor"
    ),
    "search_hessian": LaunchRow(_SEARCH, "Input kAligned", 8, fixed=True),
    "search_msmodelslim": LaunchRow(_MSMODELSLIM, "Input kAligned", 8),
    "search_quest": LaunchRow("x tensor_amax block_amax | rows columns", "Input kAligned", 8),
    "search_weighted": LaunchRow(_SEARCH, "Input kAligned kWeighted kAll kEight", 8, file="search", entry="search"),
    "swizzle": LaunchRow("in out | matrices rows columns", "kFrom kTo kQuads", UNLIMITED),
    "transpose": LaunchRow(
        "codes scales codes_out scales_out | matrices rows columns", "kAligned", UNLIMITED, fixed=True
    ),
    "unpack_codes": LaunchRow("in out | bytes", "kAligned", UNLIMITED, file="pack_codes"),
}


def row_of(kernel: str, device: Device) -> LaunchRow:
    """Return the row of LAUNCHES for a kernel on a device: that of its architecture ("clip sm_80"), if there is one."""
    return LAUNCHES.get(f"{kernel} {architecture_of(device)}", LAUNCHES[kernel])


@lru_cache(CACHE_SIZE)
def function_of(
    file: str,
    kernel: str,
    device: Device,
    struct: str,
    traits: tuple[tuple[str, compiler.Trait], ...],
    small: bool | None = None,
    threads: int = THREADS,
) -> Any:
    """Return a compiled kernel as a CuPy function on a device. `struct` is the C++ text of the structs it uses.

    It is the kernel for a group if `small` is not None, which says whether the group is small (is_small). For a Target,
    return the pair (source, name) that would be compiled.
    """
    values: dict[str, Any] = dict(traits) | ({"threads": threads} if threads != THREADS else {})
    if small is not None:
        source = compiler.instantiation(file, struct, kernel, **values, kSmall=small)
        return compiler.function(source, f"grouped_{kernel}_kernel", device)
    found = compiler.instantiation(file, struct, **values), f"{kernel}_kernel"
    return found if isinstance(device, Target) else compiler.function(*found, device)


def row_function(kernel: str, device: Device, struct: str, *traits: compiler.Trait, small: bool | None = None) -> Any:
    """Return the compiled kernel of a row of LAUNCHES, with the values of its traits, as a CuPy function."""
    row = row_of(kernel, device)
    values = tuple(zip(row.traits.split(), traits, strict=True))
    return function_of(row.file or kernel, row.entry or kernel, device, struct, values, small, row.threads)


@lru_cache(CACHE_SIZE)
def prepared(
    kernel: str, work: int, sizes: tuple[int, ...], device: Device, traits: tuple[compiler.Trait, ...], struct: str = ""
) -> Launch:
    """Return the prepared launch of a row of LAUNCHES with fixed sizes. `work` is the most threads that have work, or
    the most thread blocks if the row is fixed.
    """
    row = row_of(kernel, device)
    function = row_function(kernel, device, struct, *traits)
    blocks = work if row.fixed else -(-work // row.threads)
    return Launch(function, grid(blocks, device, row.limit), row.arguments, *sizes, threads=row.threads)


def address(array: Any) -> int:
    """Return the address of a CuPy array's first element, or 0 for None."""
    return 0 if array is None else array.data.ptr


def aligned(array: Any, run_bytes: int) -> bool:
    """Return True if every row of an array begins at a multiple of 16 bytes, so that kernels can use vector
    accesses.
    """
    return (array is None or array.data.ptr % 16 == 0) and run_bytes % 16 == 0


def as_aligned(array: Any) -> Any:
    """Return an array that is contiguous and begins at a multiple of 16 bytes: the array itself, or else a copy of
    it.
    """
    if array is None:
        return None
    array = imports.cupy().ascontiguousarray(array)
    return array if array.data.ptr % 16 == 0 else array.copy()


# Groups: one launch for many tensors, the members. The work on a member is divided into pieces, and a thread block
# processes one piece at a time (kernels/shared/grouped.cuh). The arguments of the members are passed as kernel
# arguments if the group is small; otherwise they are in a table in device memory.
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
        arguments: the struct of arguments, as an array with one element of raw bytes (see Launch).
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


def piece_counts(elements: Any, device: Device, most: int = MAX_PIECE) -> np.ndarray:
    """Return the number of pieces into which the work on each tensor of a group is divided: an int64 array."""
    # The largest size is chosen so that the group has about 20 pieces per multiprocessor (PIECES_PER_MULTIPROCESSOR),
    # but it is at least MIN_PIECE (8192) and at most `most` elements.
    counts = np.asarray(elements)
    check_count(int(counts.max()))
    share = int(counts.sum()) // (multiprocessors(device) * PIECES_PER_MULTIPROCESSOR)
    return np.maximum(-(-counts // int(np.clip(share, MIN_PIECE, most))), 1)


def group_table(members: np.ndarray) -> np.ndarray:
    """Return the table of a large group in 8-byte words (see grouped.cuh): first the members, then the pieces."""
    pieces = members["pieces"]
    work = np.empty(int(pieces.sum()), _PIECE)
    work["member"] = np.repeat(np.arange(len(pieces)), pieces)
    work["index"] = np.arange(len(work)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.concatenate([members.view(np.uint64), work.view(np.uint64)])


def prepare_group(
    function: Any,
    arguments: np.ndarray,
    aligned_runs: ArrayLike,
    pieces: np.ndarray,
    held: Any,
    small: bool = False,
    threads: int = THREADS,
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
    return GroupedLaunch(function, total, group.view(np.dtype((np.void, group.itemsize))), (table, held), threads)


def prepare_rows(
    kernel: str,
    device: Device,
    struct: str,
    traits: tuple[compiler.Trait, ...],
    members: Sequence[tuple[int, ...]],
    aligned_runs: ArrayLike,
    pieces: np.ndarray,
    held: Any,
) -> GroupedLaunch:
    """Return the prepared launch of a row of LAUNCHES over a group, with the arguments of each member as a tuple."""
    row, small = row_of(kernel, device), is_small(members)
    function = row_function(kernel, device, struct, *traits, small=small)
    return prepare_group(function, np.array(members, row.arguments), aligned_runs, pieces, held, small, row.threads)
