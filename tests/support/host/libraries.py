"""Kernels as shared libraries in this process: the runner of the tests of the GPU where there is none. See
README.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from host import cupy_on_host
from host.device_memory import check_around_all, live_memory, on_stream
from host.harness import MORE_BLOCKS, SANITIZERS, Compiler, Instantiation, launching_on, program_text

from fp4kit.call import call_cache
from fp4kit.cuda.compile import loader
from fp4kit.reference.arith import reciprocal_table

# Each library keeps its symbols to itself: two of them have templates of one name and other types.
FLAGS = ("-DHOST_LIBRARY", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-g0")
# The sanitizer of undefined behaviour can trap, and then needs no library that the process must be started with. It
# also sees an address that is not aligned: a GPU refuses that, the host's CPU takes it. Of address 0 the signal tells
# more.
TRAPS = ("-fsanitize=undefined", "-fno-sanitize=null", "-fsanitize-undefined-trap-on-error")
OF_ONE_GRID = ("search_hessian_kernel",)  # kernels that need a grid of so many blocks
# instantiations of a library, of one .cu file: headers of several may not stand together; to read them costs as six
BATCH = 32


class Library:
    """A loaded library; it launches kernels by number."""

    def __init__(self, path: Path, table: np.ndarray) -> None:
        handle = ctypes.PyDLL(
            str(path)
        )  # holds the interpreter's lock: fibers are the library's own, one launch at a time
        self._launch = handle.host_launch_here
        self._launch.argtypes = [
            ctypes.c_uint,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_bool,
        ]
        self._launch.restype = ctypes.c_char_p
        handle.main(0, (ctypes.c_void_p * 1)(table.ctypes.data), None)

    def launch(self, kernel: int, arguments: bytes, grid: int, threads: int, descending: bool = False) -> None:
        """Launch a kernel; descending: the last thread first. Raises AssertionError if it is stopped, with why."""
        stopped = self._launch(kernel, arguments, len(arguments), grid, threads, descending)
        assert stopped is None, f"a kernel was stopped: {stopped.decode()}"
        check_around_all()


def launch_in_every_order(launch: Callable[[int, bool], None], grid: int, others: Sequence[int]) -> None:
    """launch(blocks, descending) with the launcher's grid; then, from the same memory, each of the others, last thread
    first.

    Raises AssertionError unless all leave the same bytes everywhere.
    """
    live = live_memory()
    before = [memory.bytes.copy() for memory in live]
    launch(grid, False)
    after = [memory.bytes.copy() for memory in live]
    for blocks in others:
        for memory, values in zip(live, before, strict=True):
            memory.bytes[...] = values
        launch(blocks, True)
        same = all(np.array_equal(memory.bytes, values) for memory, values in zip(live, after, strict=True))
        assert same, (
            f"what a kernel wrote depends on the grid or on the order of threads: {grid} blocks, {blocks} from the last"
        )


class Libraries:
    """Compiles and loads what is launched; while it rehearses, launches are noted and nothing runs."""

    def __init__(self, folder: Path, compiler: Compiler, sources: Path = loader.SOURCES) -> None:
        plain = tuple(flag for flag in compiler.command if flag not in SANITIZERS)
        self._compiler, self._folder, self._sources = Compiler((*plain, *FLAGS, *TRAPS)), folder, sources
        self._table = reciprocal_table()
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))
        self._found: dict[Instantiation, tuple[Future[Library], int]] = {}
        self._launched: set[tuple[Instantiation, int]] = set()  # with the grid
        self._noted: dict[str, dict[Instantiation, None]] = defaultdict(dict)  # by the .cu file

    def function(self, source: str, kernel: str, device: int) -> Callable[..., None]:
        """What stands in for loader.function: the kernel is compiled when it is launched."""
        instantiation = Instantiation(source, kernel)

        def launch(grid: tuple[int], threads: tuple[int], arguments: tuple[np.ndarray], stream: Any = None) -> None:
            if cupy_on_host.rehearsing:
                self._note(instantiation)
                return
            data = arguments[0].tobytes()
            on_stream(lambda: self._launch(instantiation, data, grid[0], threads[0]))

        return launch

    def _launch(self, instantiation: Instantiation, arguments: bytes, grid: int, threads: int) -> None:
        if instantiation not in self._found:
            self._submit([instantiation])
        library, number = self._found[instantiation]

        def launch(blocks: int, descending: bool) -> None:
            library.result().launch(number, arguments, blocks, threads, descending)

        is_alone = (
            threading.current_thread() is threading.main_thread()
        )  # others write to memory between the launches of one
        if (instantiation, grid) in self._launched or not is_alone:
            launch(grid, False)
        else:
            self._launched.add((instantiation, grid))
            launch_in_every_order(
                launch, grid, [grid] if instantiation.kernel in OF_ONE_GRID else [1, grid + MORE_BLOCKS]
            )

    def rehearse(self, calls: Iterable[Callable[[], object]]) -> None:
        """Make the calls without running a kernel, and compile what they launch, many instantiations a library."""
        with patch.object(cupy_on_host, "rehearsing", True):
            for call in calls:
                call()
        for file in list(self._noted):
            self._submit(list(self._noted.pop(file)))

    def _note(self, instantiation: Instantiation) -> None:
        if instantiation in self._found:
            return
        file = instantiation.source.splitlines()[-1]
        self._noted[file][instantiation] = None
        if len(self._noted[file]) == BATCH:  # compiled while the rehearsal goes on
            self._submit(list(self._noted.pop(file)))

    def _submit(self, batch: list[Instantiation]) -> None:
        if batch:
            library = self._pool.submit(self._build, batch)
            self._found |= {instantiation: (library, i) for i, instantiation in enumerate(batch)}

    def _build(self, batch: list[Instantiation]) -> Library:
        text = program_text(batch, self._sources)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        self._compiler.build(text, path, *sorted({file.parent for file in loader.files(self._sources).values()}))
        return Library(path, self._table)

    @contextmanager
    def playing(self) -> Iterator[Any]:
        """The host plays the GPU: fp4kit finds its CuPy, and launches here."""
        call_cache._CALLS.clear()
        with cupy_on_host.installed(), launching_on(self.function, cupy_on_host):
            yield cupy_on_host
        call_cache._CALLS.clear()

    def close(self) -> None:
        """Compile nothing any more."""
        self._pool.shutdown(cancel_futures=True)
