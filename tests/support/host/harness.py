"""A stand-in for the GPU behind the launchers of fp4kit.cuda: records launches, builds kernels for the CPU, runs
them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import numpy as np
import pytest
from host.compiler import SANITIZER_OPTIONS, SANITIZERS, Compiler, require_compiler

import fp4kit.cuda
from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.launch import geometry
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.arith import reciprocal_table

__all__ = ["SANITIZERS", "Compiler", "DeviceArray", "Host", "Instantiation", "Program", "launching_on", "program_text"]
__all__ += ["recorded", "require_compiler"]
T = TypeVar("T")
BATCH = 64  # instantiations of one program: the headers cost as much as ten of them
MORE_BLOCKS = 3  # than there is work, in one of the launches
IN_ARGUMENTS = 2**32 - 1
SEEN_BY_SANITIZERS = ("buffer-overflow", "misaligned address")
MULTIPROCESSORS = 2  # of the device that is played: few, so that the grid is smaller than the work


class Instantiation(NamedTuple):
    """What loader.function is asked for: the stub's text, and the name of a kernel in it."""

    source: str
    kernel: str


# ---- what runs under sanitizers ----

# What decides which bytes a kernel reads and writes; and the rules, whose arithmetic may be undefined.
_SHAPING = re.compile(
    r"\bk(?:Block|BlockRows|StoredBits|Layout|TensorScaling|Fake|Stochastic|Hadamard|FourOverSix) = [\w:]+"
)
_RULES = re.compile(r"\b(?:TensorRule|BlockRule|DecodeRule|Element|Scale|FakeRule) = \w+")
_OPTIONS = re.compile(r"^constexpr .*", re.MULTILINE)


def to_sanitize(instantiations: Iterable[Instantiation]) -> Iterator[Instantiation]:
    """Those of misaligned arrays, and the first of each kind of a kernel (of any types) and of each rule in a
    kernel.
    """
    seen: set[tuple[object, ...]] = set()
    for source, kernel in instantiations:
        facts: set[tuple[object, ...]] = {(kernel, *_OPTIONS.findall(source), *_SHAPING.findall(source))}
        facts |= {(kernel, rule) for rule in _RULES.findall(source)}
        if "kAligned = false" in source or not facts <= seen:
            yield Instantiation(source, kernel)
        seen |= facts


# ---- programs ----


_INCLUDE = re.compile(r'^#include "(\w+\.cuh?)"', re.MULTILINE)


def included(names: Iterable[str], tree: Mapping[str, str]) -> list[str]:
    """Those of the files of a tree, texts by name, that are named or included by one of them, directly or not."""
    found, pending = dict[str, None](), [*names]
    while pending:
        name = pending.pop()
        if name in tree and name not in found:
            found[name] = None
            pending += _INCLUDE.findall(tree[name])
    return sorted(found)


def program_text(instantiations: Iterable[Instantiation], sources: Path) -> str:
    """One translation unit: headers once, then each instantiation in a namespace, its kernel under a name of its
    own.
    """
    instantiations = list(instantiations)
    tree = {name: path.read_text() for name, path in loader.files(sources).items()}
    files = cache(lambda names: included(names, tree))  # few sets of names for many instantiations
    needed = [files(tuple(_INCLUDE.findall(source))) for source, _ in instantiations]
    headers = sorted({name for names in needed for name in names if name.endswith(".cuh")})
    lines = ['#include "serve.h"', *(f'#include "{name}"' for name in headers)]
    entries = []
    for i, ((source, kernel), names) in enumerate(zip(instantiations, needed, strict=True)):
        text = "".join([source, *(tree[name] for name in names if name.endswith(".cu"))])
        every, (arguments,) = re.findall(r"\b(\w+_kernel)\(", text), re.findall(rf"\b{kernel}\(([\w<>]+) ", text)
        lines += [f"namespace instance_{i} {{", *(f"#define {name} {name}_{i}" for name in every), source]
        lines += [
            *(f"#undef {name}" for name in every),
            f"constexpr Launch entry = launch<{arguments}, {kernel}_{i}>;",
            "}",
        ]
        entries.append(f"instance_{i}::entry")
    table = f"static const Launch launches[] = {{{', '.join(entries)}}};"
    return "\n".join(
        [*lines, f"int main(int argc, char** argv) {{ {table} return host_main(argc, argv, launches); }}", ""]
    )


class Program:
    """A running program: launches by number, arrays in and out through pipes."""

    def __init__(self, path: Path, table: Path) -> None:
        self._command, self._log, self._process = [str(path), str(table)], path.with_suffix(".log"), None

    def launch(
        self,
        number: int,
        grid: int,
        threads: int,
        descending: bool,
        arguments: bytes,
        pointers: list[Any],
        arrays: list[Any],
    ) -> list[bytes]:
        """Arrays (misalignment, bytes) after a launch; pointers: (array that holds it or IN_ARGUMENTS, array pointed
        to, offset).

        Raises AssertionError if the program stops, with why.
        """
        if self._process is None:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=-1, stdout=-1, stderr=log, env=os.environ | SANITIZER_OPTIONS
                )
        request = [
            struct.pack("=7I", number, grid, threads, descending, len(arguments), len(pointers), len(arrays)),
            arguments,
        ]
        request += [struct.pack("=2IQ", *pointer) for pointer in pointers]
        request += [struct.pack("=2Q", misalignment, len(data)) for misalignment, data in arrays]
        try:
            self._process.stdin.write(b"".join([*request, *(data for *_, data in arrays)]))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        sizes = [1, *(len(data) for *_, data in arrays)]
        done, *answer = (self._process.stdout.read(size) for size in sizes)
        if [len(data) for data in (done, *answer)] != sizes:
            raise AssertionError(
                f"a kernel was stopped: status {self.close()}\n{self._log.read_text(errors='replace')[:6000]}"
            )
        return answer

    def close(self) -> int:
        """End the process; a later launch starts it again. Returns its exit status, or minus the signal that stopped
        it.
        """
        process, self._process = self._process, None
        if process is None:
            return 0
        process.communicate()
        return process.returncode


# ---- arrays and the device ----


class DeviceArray:
    """What launch needs of a CuPy array, over a NumPy array whose address modulo 16 is `misalignment`."""

    at: ClassVar[WeakValueDictionary[int, DeviceArray]] = WeakValueDictionary()
    device = SimpleNamespace(id=0)

    def __init__(self, values: Any, misalignment: int = 0, is_output: bool = False) -> None:
        values = np.asarray(values)
        memory = np.empty(values.nbytes + 32, np.uint8)
        start = -memory.ctypes.data % 16 + misalignment
        self.array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values
        self.misalignment, self.is_output, self.is_table = misalignment, is_output, False
        self.shape, self.dtype, self.size, self.ndim = values.shape, values.dtype, values.size, values.ndim
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)
        self.at[self.data.ptr] = self

    @classmethod
    def output(cls, shape: tuple[int, ...], dtype: Any, misalignment: int = 0) -> DeviceArray:
        """An array for a kernel to fill: every byte 0xEE."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return cls(np.full(count, 0xEE, np.uint8).view(dtype).reshape(shape), misalignment, True)

    @classmethod
    def zeros(cls, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
        """An array for a kernel to add to."""
        return cls(np.zeros(shape, dtype), is_output=True)

    @classmethod
    def table(cls, values: Any) -> DeviceArray:
        """An input that may hold pointers to other arrays, in whole words of 8 bytes."""
        array = cls(values)
        array.is_table = True
        return array

    def pointers(self) -> list[tuple[int, DeviceArray]]:
        """Offset and array of each pointer in a table."""
        words = self.array.reshape(-1).view(np.uint64) if self.is_table else ()
        return [(8 * i, self.at[int(word)]) for i, word in enumerate(words) if int(word) in self.at]


@contextmanager
def launching_on(function: Callable[[str, str, int], Callable[..., None]], cupy: Any = None) -> Iterator[None]:
    """The launchers of fp4kit.cuda take their kernels from `function`(source, kernel, device), and need no CuPy.

    cupy: what stands in for the module; None for as much as launchers take of it, with DeviceArrays.
    """
    modules = pkgutil.walk_packages(fp4kit.cuda.__path__, "fp4kit.cuda.")
    launchers = [importlib.import_module(module.name) for module in modules]
    caches = {f for m in launchers if m is not loader for f in vars(m).values() if hasattr(f, "cache_clear")}
    fake = cupy or SimpleNamespace(zeros=DeviceArray.zeros, empty=DeviceArray.output, asarray=DeviceArray.table)
    with ExitStack() as stack:
        for cached in caches:  # they hold functions of another device
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(patch.object(loader, "function", function))
        stack.enter_context(patch.object(imports, "cupy", lambda: fake))
        stack.enter_context(patch.object(geometry, "multiprocessors", lambda device: MULTIPROCESSORS))
        yield


def recorded(calls: Iterable[Callable[[], object]]) -> list[Instantiation]:
    """What the calls would launch; nothing is launched."""
    wanted: dict[Instantiation, None] = {}

    def record(source: str, kernel: str, device: int) -> Callable[..., None]:
        wanted[Instantiation(source, kernel)] = None
        return lambda *launch: None

    with launching_on(record):
        for call in calls:
            call()
    return list(wanted)


def _unify_nan(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind == "u" else np.where(np.isnan(x), x.dtype.type(np.nan), x)


class Host:
    """The device that fp4kit.cuda.launch launches on while one of its methods runs: the CPU."""

    def __init__(
        self, folder: Path, compiler: Compiler, sources: Path = loader.SOURCES, checks_all: bool = True
    ) -> None:
        """checks_all: every launch runs under the sanitizers that the compiler has; else, of what is built,
        to_sanitize.
        """
        self.compiler, self._folder, self._sources, self._checks_all = compiler, folder, sources, checks_all
        self._table = folder / "reciprocals"
        reciprocal_table().tofile(self._table)
        self._programs: dict[Instantiation, tuple[Future[Program], int]] = {}
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))

    def build(self, calls: Iterable[Callable[[], object]]) -> None:
        """Start compiling what the calls would launch, many instantiations a program."""
        new = [instantiation for instantiation in recorded(calls) if instantiation not in self._programs]
        checked = set(new if self._checks_all else to_sanitize(new))
        for compiler, wanted in ((self.compiler, checked), (self.compiler.plain, set(new) - checked)):
            batch = [instantiation for instantiation in new if instantiation in wanted]
            for start in range(0, len(batch), BATCH):
                self._submit(batch[start : start + BATCH], compiler)

    def run(self, call: Callable[[], T]) -> T:
        """call(), with its launches on this device."""
        with launching_on(self._function):
            return call()

    def check(self, case: Any) -> None:
        """Each (name, actual, expected) of case.run() has the same bits; NaN equals NaN, whose bits depend on the
        machine.
        """
        results = self.run(lambda: list(case.run()))
        assert results
        for name, actual, expected in results:
            assert_same_bits(_unify_nan(actual), _unify_nan(expected), name)

    def check_mutation(self, folder: Path, file: str, text: str, changed: str, case: Any, seen: str) -> None:
        """A copy of the sources, in which `text` of one file is `changed`, fails the case with what `seen` matches."""
        if seen in SEEN_BY_SANITIZERS and not self.compiler.sanitizes:
            pytest.skip("the C++ compiler has no sanitizers")
        sources = folder / "cuda"
        shutil.copytree(loader.SOURCES, sources)
        path = loader.files(sources)[file]
        original = path.read_text()
        assert text in original, f"{file} has no {text!r} any more; choose another line to change"
        path.write_text(original.replace(text, changed))
        needs_sanitizers = any(sign in seen for sign in (*SEEN_BY_SANITIZERS, "stopped"))
        with Host(folder, self.compiler if needs_sanitizers else self.compiler.plain, sources) as mutant:
            mutant.build([lambda: list(case.run())])
            with pytest.raises(AssertionError, match=seen):
                mutant.check(case)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exception: object) -> None:
        """End all programs, built or not."""
        self._pool.shutdown(cancel_futures=True)
        for future in {future for future, _ in self._programs.values()}:
            if not future.cancelled() and not future.exception():
                future.result().close()

    def _submit(self, batch: list[Instantiation], compiler: Compiler) -> None:
        program = self._pool.submit(self._compile, batch, compiler)
        self._programs |= {instantiation: (program, i) for i, instantiation in enumerate(batch)}

    def _compile(self, batch: list[Instantiation], compiler: Compiler) -> Program:
        text = program_text(batch, self._sources)
        path = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        compiler.build(text, path, *sorted({file.parent for file in loader.files(self._sources).values()}))
        return Program(path, self._table)

    def _function(self, source: str, kernel: str, device: int) -> Callable[..., None]:
        instantiation = Instantiation(source, kernel)
        if instantiation not in self._programs:
            self._submit([instantiation], self.compiler)
        future, number = self._programs[instantiation]

        def launch_everywhere(grid: tuple[int], threads: tuple[int], arguments: tuple[np.ndarray]) -> None:
            launch_one(future.result(), number, grid[0], threads[0], arguments[0])

        return launch_everywhere


def launch_one(program: Program, number: int, grid: int, threads: int, arguments: np.ndarray) -> None:
    """A launch, repeated with one block and with more blocks than there is work, and in the opposite order of threads.

    All must give the same bytes and leave the inputs alone.
    """
    names: dict[DeviceArray, str] = {}
    held: list[tuple[int, DeviceArray, int]] = []
    for i, value in enumerate(np.frombuffer(arguments.tobytes(), np.uint64).tolist()):
        if value in DeviceArray.at:
            names.setdefault(
                DeviceArray.at[value], arguments.dtype.names[i] if arguments.dtype.names else f"argument {i}"
            )
            held.append((IN_ARGUMENTS, DeviceArray.at[value], 8 * i))
    for holder, table in enumerate(list(names)):
        for offset, array in table.pointers():
            names.setdefault(array, f"array {len(names)}, of {names[table]}")
            held.append((holder, array, offset))
    places = {array: i for i, array in enumerate(names)}
    pointers = [(holder, places[array], offset) for holder, array, offset in held]
    sent = [(array.misalignment, array.array.tobytes()) for array in names]
    first, *others = (
        program.launch(number, blocks, threads, descending, arguments.tobytes(), pointers, sent)
        for blocks, descending in ((grid, False), (1, True), (grid + MORE_BLOCKS, True))
    )
    for (array, name), data, *repeated in zip(names.items(), first, *others, strict=True):
        if array.is_table:
            continue  # the program has pointers of its own there
        assert repeated == [data, data], f"{name} depends on the grid or on the order of threads"
        assert array.is_output or data == array.array.tobytes(), f"{name} is an input, and the kernel wrote to it"
        array.array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
