"""Compute the two limits of a kernel on a GPU: the bytes that it moves, and the instructions that it issues.

    by bytes:  bytes per element * elements / bytes per second of the memory
    by issue:  instructions per element * elements / (multiprocessors * 4 schedulers * 32 threads * clock)

A kernel takes at least the longer of the two times. Instructions per element are those of its main loop (sass.py).

    python benchmarks/limits.py    count the main kernels anew, and write results/limits.json and docs/roofline.md

The command needs NVRTC and nvdisasm (kernel_report.py), and no GPU. benchmarks/run.py prints both limits for the GPU
that it runs on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import kernel_report
import sass
from kernel_report import BF16, ReportedKernel
from rows import Traffic, element_bytes, quantized_bytes, transposed_bytes, twice

from fp4kit.cli.output import markdown as table
from fp4kit.cuda import compiler, launch
from fp4kit.recipes import RECIPES
from fp4kit.reference.stochastic import TE_SIGN_MASK

HERE = Path(__file__).resolve().parent
RECORD, PAGE = HERE / "results" / "limits.json", HERE.parent / "docs" / "roofline.md"
ARCHITECTURES = ("sm_90", "sm_100a", "sm_103a", "sm_120a")
LANES = 4 * 32  # thread instructions that a multiprocessor issues per cycle: one warp per scheduler
SIZE = 16384  # rows and columns of the matrices of the page, as in run.py


class Card(NamedTuple):
    """The figures of a GPU that limit a kernel.

    Attributes:
        name: its name
        multiprocessors: their number
        clock: cycles per second
        bandwidth: bytes per second of its memory
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float

    def by_bytes(self, count: float) -> float:
        """Return the microseconds in which the memory moves `count` bytes."""
        return count / self.bandwidth * 1e6

    def by_issue(self, count: float) -> float:
        """Return the microseconds in which all multiprocessors issue `count` thread instructions."""
        return count / (self.multiprocessors * LANES * self.clock) * 1e6


# Figures of data sheets: 8 TB/s, and 75 TFLOPS of float32, which are 148 * 128 lanes * 2 * clock.
B200 = Card("B200", 148, 1.98e9, 8e12)


def card_of(cupy: Any) -> Card:
    """Return the figures of the current GPU, as CuPy reports them: its highest clock, and the peak of its memory."""
    device = cupy.cuda.Device()
    found = device.attributes
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    bandwidth = 2 * found["MemoryClockRate"] * 1e3 * found["GlobalMemoryBusWidth"] / 8  # two transfers per cycle
    return Card(name, found["MultiProcessorCount"], found["ClockRate"] * 1e3, bandwidth)


ROWS = ("quantize_rows", "store_patch_elements")  # functions that quantize_columns calls only for codes along rows


@cache
def main_loop(source: str, kernel: str, arch: str, without: tuple[str, ...] = ()) -> sass.Loop | None:
    """Return the counts of the main loop of a kernel that is compiled for an architecture, such as "sm_90"."""
    return sass.main_loop(sass.disassembled(compiler.cubin_path(source, arch).read_bytes()), kernel, without)


class MainKernel(NamedTuple):
    """A row of the page: a kernel, its bytes per element, and the functions that its call does not reach."""

    operation: str
    kernel: ReportedKernel
    traffic: Traffic
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.operation}: {self.kernel.recipe}"

    def per_element(self, arch: str) -> float:
        """Return the thread instructions per element in the main loop."""
        loop = main_loop(self.kernel.source, self.kernel.kernel, arch, self.without)
        found = None if loop is None else self.kernel.instructions(loop)
        if found is None:
            raise ValueError(f"limits: no main loop in {self.kernel.kernel}, {self.kernel.recipe}, for {arch}")
        return found


NAMES = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-modelopt", "mxfp4-flashinfer")


def main_kernels() -> Iterator[MainKernel]:
    """Yield the kernels of the page, all for bfloat16."""
    x, values, bf16 = element_bytes(x=BF16), element_bytes(values=BF16), BF16
    codes, recipes = {name: quantized_bytes(name) for name in NAMES}, [RECIPES[name] for name in NAMES]
    for r in recipes:
        yield MainKernel("quantize", kernel_report.quantize_kernel(r, bf16), x | codes[r.id])
    four, te = RECIPES["nvfp4-te-4over6-mse-256"], recipes[0]
    yield MainKernel("quantize", kernel_report.table_kernel(four), x | quantized_bytes(four.id))
    for r in recipes:
        yield MainKernel("dequantize", kernel_report.dequantize_kernel(r, bf16), codes[r.id] | values)
    for r in recipes:
        yield MainKernel("quantize along columns", kernel_report.patch_kernel(r, bf16), x | codes[r.id], ROWS)
    for r in recipes:
        yield MainKernel("quantize_both", kernel_report.patch_kernel(r, bf16), x | twice(codes[r.id]))
    hadamard = kernel_report.patch_kernel(te, bf16, TE_SIGN_MASK)
    yield MainKernel("quantize along columns, Hadamard", hadamard, x | codes[te.id], ROWS)
    yield MainKernel("quantize_both, Hadamard", hadamard, x | twice(codes[te.id]))
    for r in recipes:
        yield MainKernel(
            "quantize, stochastic", kernel_report.quantize_kernel(r, bf16, stochastic=True), x | codes[r.id]
        )
    for kernel in kernel_report.layout_kernels():
        if kernel.kernel == "transpose_kernel" and kernel.options == "linear":
            yield MainKernel("transpose", kernel, transposed_bytes(kernel.recipe))


def count() -> dict[str, Any]:
    """Return the record of the page: NVRTC's version, and the instructions per element of each kernel."""
    version = ".".join(map(str, compiler.compiler_version()))
    counts = {k.key: {arch: round(k.per_element(arch), 2) for arch in ARCHITECTURES} for k in main_kernels()}
    return {"nvrtc": version, "instructions": counts}


COLUMNS = ("operation", "recipe", "bytes per element", *ARCHITECTURES, "by bytes, us", "by issue, us", "limit")


TEXT = """\
# Roofline of a {name}

This page says what fp4kit's main CUDA kernels can reach at most on a {name}. It is derived from machine code and data
sheets (evidence: derived): nothing was run on such a GPU. If you have one, compare the last columns with the times that
`python benchmarks/run.py` prints. A kernel takes at least the longer of two times:

- **By bytes**: the memory must move the bytes that the call reads and writes.
- **By issue**: the multiprocessors must issue the kernel's instructions. Each multiprocessor has four schedulers, and
  each scheduler issues one instruction per cycle for 32 threads.

| assumed figure | value | reason |
| --- | --- | --- |
| multiprocessors | {multiprocessors} | |
| memory | {bandwidth:g} TB/s | the peak of data sheets; a copy reaches less: 4.18 of 4.8 TB/s on an H200 |
| clock | {clock:g} GHz | 75 TFLOPS of float32 in data sheets are 148 x 128 x 2 x clock |

Times are for {size} x {size} bfloat16 elements. If a recipe has a tensor scale, the amax is given. Of {rows} rows,
{by_issue} are limited by issue, and the others by bytes.

The columns sm_90 to sm_120a give the thread instructions per element in the kernel's main loop.
`benchmarks/limits.py` counts them in the machine code that NVRTC {nvrtc} makes; `benchmarks/sass.py` states the rules.
Rare code does not count: elements such as NaN, 4over6 blocks that its table does not decide, and incomplete tiles. The
start of a kernel does not count either. Some instructions occupy their unit for several cycles, so a kernel can be
slower than both limits.

"""
COLUMNS = ("operation", "recipe", "bytes per element", *ARCHITECTURES, "by bytes, us", "by issue, us", "limit")


def page(record: Mapping[str, Any], card: Card = B200) -> str:
    """Return the Markdown page of a record."""
    rows, n = [], SIZE * SIZE
    for k in main_kernels():
        counts = record["instructions"][k.key]
        nbytes = float(sum(k.traffic.values()))
        times = card.by_bytes(nbytes * n), card.by_issue(counts["sm_100a"] * n)
        cells = (f"{nbytes:.2f}", *(f"{counts[arch]:.1f}" for arch in ARCHITECTURES), *(f"{us:.0f}" for us in times))
        rows.append((k.operation, k.kernel.recipe, *cells, "bytes" if times[0] >= times[1] else "issue"))
    figures = {"multiprocessors": card.multiprocessors, "bandwidth": card.bandwidth / 1e12, "clock": card.clock / 1e9}
    facts = {"name": card.name, "size": SIZE, "rows": len(rows), "nvrtc": record["nvrtc"]}
    by_issue = sum(row[-1] == "issue" for row in rows)
    return TEXT.format(**figures, **facts, by_issue=by_issue) + table(COLUMNS, rows) + "\n"


class Watch:
    """The kernels that were loaded while `watching` lasts, and those that a call launches."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str, str]] = {}  # a function is kept, so that its id stays its own

    def load(self, function: Callable[..., Any], source: str, kernel: str, device: int) -> Any:
        """Return a kernel as compiler.function does, and remember its source."""
        found = function(source, kernel, device)
        self._known[id(found)] = found, source, kernel
        return found

    def launched(self, call: Callable[[], object]) -> list[tuple[str, str]]:
        """Make a call, and return (source, kernel) of every kernel that it launches."""
        functions: list[Any] = []

        def noting(kind: type) -> Any:
            real = kind.__call__

            def launch_it(self: Any, *arguments: Any, **options: Any) -> None:
                functions.append(self.function)
                real(self, *arguments, **options)

            return patch.object(kind, "__call__", launch_it)

        with noting(launch.Launch), noting(launch.GroupedLaunch):
            call()
        if unknown := [function for function in functions if id(function) not in self._known]:
            raise ValueError(f"{len(unknown)} kernels were loaded before they were watched")
        return [self._known[id(function)][1:] for function in functions]

    def issued_per_element(self, call: Callable[[], object], operation: str, recipe: str, cupy: Any) -> float:
        """Return the thread instructions per element of a call on the current GPU, as the function of this name does.

        Raises ValueError also without nvdisasm, and for a call that launches none of fp4kit's kernels.
        """
        if not sass.disassembler():
            raise ValueError("nvdisasm is missing; pip install nvidia-cuda-nvdisasm")
        if not (launched := self.launched(call)):
            raise ValueError("no kernel of fp4kit is launched")
        return issued_per_element(
            launched, operation, recipe, compiler.architecture(cupy.cuda.Device().compute_capability)
        )


@contextmanager
def watching() -> Iterator[Watch]:
    """Yield a Watch for the kernels that are loaded within a with block. Enter it before any kernel is loaded."""
    watch, real = Watch(), compiler.function
    with patch.object(compiler, "function", lambda *arguments: watch.load(real, *arguments)):
        yield watch


_TYPES = re.compile(r"^using (?:Input|Output) = (\w+);", re.MULTILINE)
_DTYPES = {name: str(dtype) for dtype, name in compiler.TYPES.items()}
# Kernels whose main loops a test compares with the lines that a simulated GPU executes, unless their source says that
# they have another loop: one per row, or per member of a group.
COUNTED = ("amax", "dequantize", "quantize", "quantize_columns", "quantize_table", "transpose")
_OTHER_LOOPS = re.compile(r"RowStep::(?!none)|TensorScaling::row|kBlockRows = (?!1;)")


def issued_per_element(launched: Iterable[tuple[str, str]], operation: str, recipe: str, arch: str) -> float:
    """Return the thread instructions per element that a call issues in the main loops of its kernels.

    Every kernel goes through all elements once. Raises ValueError for a kernel whose main loop is not counted.

    Args:
        launched: the source and the name of every kernel.
        operation: the operation of the row, such as "quantize along columns".
        recipe: the id of the recipe, or "".
        arch: the architecture, such as "sm_90".
    """
    total = 0.0
    for source, kernel in launched:
        name, types = kernel.removesuffix("_kernel"), [_DTYPES[found] for found in _TYPES.findall(source)]
        if name not in COUNTED or (name != "transpose" and _OTHER_LOOPS.search(source)):
            raise ValueError(f"the instructions of {kernel} are not counted")
        element = types[-1] if types else "4 bits" if RECIPES[recipe].is_packed else "8 bits"
        without = ROWS if name == "quantize_columns" and "columns" in operation else ()
        loop = main_loop(source, kernel, arch, without)
        found = None if loop is None else ReportedKernel(kernel, recipe, element, "", source).instructions(loop)
        if found is None:
            raise ValueError(f"the main loop of {kernel} is not found")
        total += found
    return total


def main() -> None:
    """Count the instructions of the main kernels, and write the record and the page."""
    record = count()
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))
    print(f"written: {RECORD}, {PAGE}")


if __name__ == "__main__":
    main()
