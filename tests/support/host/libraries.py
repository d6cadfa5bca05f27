"""Compile kernels to shared libraries and launch them in this process, for GPU tests without a GPU. See README.md."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from host import cupy_on_host
from host.compiler import Compiler
from host.device_memory import Memory, check_around_all, live_memory, margins_of, on_stream
from host.instantiations import Instantiation, launching_on, program_text

from fp4kit.cuda import compiler as loader
from fp4kit.ops import engines as call_cache
from fp4kit.reference.arith import reciprocal_table

# Symbols are hidden, because two libraries may have templates with the same name and different types.
FLAGS = ("-DHOST_LIBRARY", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-g0")
OTHER_MARGIN = 0x11  # value of margins and gaps in repeated launches: small numbers, while bytes 0xEE are large ones
MORE_BLOCKS = 3  # additional blocks in one of the launches
OF_ONE_GRID = ("search_hessian_kernel",)  # kernels that need the launcher's grid
# Kernels that may write to an array that the caller has filled, because they replace only one shard of its codes.
UPDATING = ("partial_cast_kernel", "grouped_partial_cast_kernel")
# The number of instantiations (kernels with given template arguments) per library. To start the compiler, parse the
# headers and link takes as long as to compile four instantiations.
BATCH = 32


def recorded(calls: Iterable[Callable[[], object]]) -> list[Instantiation]:
    """Return the kernel instantiations that the calls would launch, without launching them.

    Args:
        calls: functions of no arguments that call fp4kit on arrays of `cupy_on_host`.
    """
    wanted: dict[Instantiation, None] = {}

    def record(source: str, kernel: str, device: int) -> Callable[..., None]:
        wanted[Instantiation(source, kernel)] = None
        return lambda *arguments, **options: None

    call_cache._CALLS.clear()
    with cupy_on_host.installed(), launching_on(record, cupy_on_host), patch.object(cupy_on_host, "rehearsing", True):
        for call in calls:
            call()
    call_cache._CALLS.clear()
    return list(wanted)


class Library:
    """A compiled library of kernels, loaded into this process. Its kernels are launched by their number.

    Args:
        path: the shared library.
        table: the GPU's reciprocals, as fp4kit.reference.arith.reciprocal_table returns them.
    """

    def __init__(self, path: Path, table: np.ndarray) -> None:
        # PyDLL keeps the GIL during a launch. A library has one set of fibers, so only one thread may launch at a time.
        handle = ctypes.PyDLL(str(path))
        self._launch = handle.host_launch_here
        self._launch.argtypes = [
            ctypes.c_uint,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_bool,
            ctypes.c_ubyte,
        ]
        self._launch.restype = ctypes.c_char_p
        handle.main(0, (ctypes.c_void_p * 1)(table.ctypes.data), None)

    def launch(self, kernel: int, arguments: bytes, grid: int, threads: int, descending: bool = False) -> None:
        """Launch a kernel and wait until it ends.

        Args:
            kernel: the number of the kernel in the library.
            arguments: the bytes of the kernel's arguments.
            grid: the number of blocks.
            threads: the number of threads per block.
            descending: True to run the last block and the last thread first.

        Raises:
            AssertionError: if the kernel is stopped, or if it writes outside its memory. The message is the reason.
        """
        stopped = self._launch(kernel, arguments, len(arguments), grid, threads, descending, Memory.margin)
        assert stopped is None, f"a kernel was stopped: {stopped.decode()}"
        check_around_all()


def launch_in_every_order(
    launch: Callable[[int, bool], None], grid: int, others: Sequence[int], updates: bool = False
) -> None:
    """Call launch(blocks, descending) with the launcher's grid, then again with each grid of `others`.

    The repeated launches start from the original memory, run the last thread first, and have other bytes in margins and
    shared-memory gaps.

    Args:
        launch: a function that launches a kernel with a number of blocks, the last thread first if `descending`.
        grid: the launcher's number of blocks.
        others: the numbers of blocks of the repeated launches.
        updates: True if the kernel may change arrays that the host has filled.

    Raises:
        AssertionError: if launches leave different bytes in memory, or if a kernel changes an input although `updates`
            is False.
    """
    live = live_memory()
    before = [memory.bytes.copy() for memory in live]
    launch(grid, False)
    after = [memory.bytes.copy() for memory in live]
    for memory, was, is_now in zip(live, before, after, strict=True):
        assert updates or not memory.is_input or np.array_equal(was, is_now), "a kernel wrote to an input"
    for blocks in others:
        for memory, values in zip(live, before, strict=True):
            memory.bytes[...] = values
        with margins_of(OTHER_MARGIN):
            launch(blocks, True)
        same = all(np.array_equal(memory.bytes, values) for memory, values in zip(live, after, strict=True))
        assert same, (
            "what a kernel wrote depends on the grid, on the order of threads or on bytes beside an array: "
            f"{grid} blocks, {blocks} from the last"
        )


class Libraries:
    """Compile, load and launch kernels on demand. During a rehearsal, launches are only recorded and nothing runs.

    Args:
        folder: where to write the libraries.
        compiler: the C++ compiler.
        sources: the folder with the kernels' source files.
    """

    def __init__(self, folder: Path, compiler: Compiler, sources: Path = loader.SOURCES) -> None:
        self._compiler, self._folder, self._sources = Compiler((*compiler.command, *FLAGS)), folder, sources
        self._table = reciprocal_table()
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))
        self._found: dict[Instantiation, tuple[Future[Library], int]] = {}
        self._launched: set[tuple[Instantiation, int]] = set()  # instantiations and the grids they ran with
        self._noted: dict[Instantiation, None] = {}  # recorded, but not yet compiled

    def function(self, source: str, kernel: str, device: int) -> Callable[..., None]:
        """Act as compiler.function: return a function that launches a kernel, and compiles the kernel first if needed.

        In a rehearsal, the function only notes the kernel.

        Args:
            source: the text of the stub that requests the kernel.
            kernel: the name of the kernel in the stub.
            device: the number of the device, which is not used.
        """
        instantiation = Instantiation(source, kernel)

        def launch(grid: tuple[int], threads: tuple[int], arguments: tuple[np.ndarray], stream: Any = None) -> None:
            if cupy_on_host.rehearsing:
                self._note(instantiation)
                return
            data = arguments[0].tobytes()
            on_stream(lambda: self._launch(instantiation, data, grid[0], threads[0]))

        return launch

    def _launch(self, instantiation: Instantiation, arguments: bytes, grid: int, threads: int) -> None:
        """Launch a kernel with `threads` threads per block.

        The first launch of a kernel with a grid is repeated with other grids, because results must not depend on the
        grid. A kernel of OF_ONE_GRID is repeated with this grid. Launches from other threads are not repeated.

        Args:
            instantiation: the kernel.
            arguments: the bytes of the kernel's arguments.
            grid: the number of blocks.
            threads: the number of threads per block.
        """
        if instantiation not in self._found:
            self._submit([instantiation])
        library, number = self._found[instantiation]

        def launch(blocks: int, descending: bool) -> None:
            library.result().launch(number, arguments, blocks, threads, descending)

        # If other threads run, they may write to memory between repeated launches.
        is_alone = threading.current_thread() is threading.main_thread()
        if (instantiation, grid) in self._launched or not is_alone:
            launch(grid, False)
        else:
            self._launched.add((instantiation, grid))
            others = [grid] if instantiation.kernel in OF_ONE_GRID else [1, grid + MORE_BLOCKS]
            launch_in_every_order(launch, grid, others, instantiation.kernel in UPDATING)

    def rehearse(self, calls: Iterable[Callable[[], object]]) -> None:
        """Make the calls without running a kernel, then compile the kernels that they launch, many per library.

        This takes less time than to compile each kernel when it is launched.
        """
        with patch.object(cupy_on_host, "rehearsing", True):
            for call in calls:
                call()
        self._submit_noted()

    def _note(self, instantiation: Instantiation) -> None:
        """Record a new instantiation. Start to compile a library once BATCH instantiations are recorded."""
        if instantiation in self._found:
            return
        self._noted[instantiation] = None
        if len(self._noted) == BATCH:  # compile them while the rehearsal continues
            self._submit_noted()

    def _submit_noted(self) -> None:
        """Compile the recorded instantiations, in the background."""
        self._submit(list(self._noted))
        self._noted.clear()

    def _submit(self, instantiations: list[Instantiation]) -> None:
        """Compile the instantiations to one library per number of threads of a block, in the background."""
        by_threads: dict[str, list[Instantiation]] = {}
        for instantiation in instantiations:
            by_threads.setdefault(instantiation.threads, []).append(instantiation)
        for batch in by_threads.values():
            library = self._pool.submit(self._build, batch)
            self._found |= {instantiation: (library, i) for i, instantiation in enumerate(batch)}

    def _build(self, batch: list[Instantiation]) -> Library:
        """Compile and load one library with the instantiations in `batch`, which have one number of threads."""
        return Library(self.compiled(batch), self._table)

    def compiled(self, batch: list[Instantiation]) -> Path:
        """Compile one library with the instantiations in `batch`, which have one number of threads."""
        text = program_text(batch, self._sources)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        if not path.exists():  # it may be loaded already
            # Another thread may load the library that this thread is writing.
            new = path.with_suffix(f".{threading.get_ident()}")
            self._compiler.build(text, new, *sorted({file.parent for file in loader.files(self._sources).values()}))
            new.rename(path)
        return path

    @contextmanager
    def playing(self) -> Iterator[Any]:
        """Make fp4kit use the simulated CuPy and these kernels while the context lasts; yield the simulated CuPy."""
        call_cache._CALLS.clear()
        with cupy_on_host.installed(), launching_on(self.function, cupy_on_host):
            yield cupy_on_host
        call_cache._CALLS.clear()

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self._pool.shutdown(cancel_futures=True)
