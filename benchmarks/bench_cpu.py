"""Benchmark the CPU engine against the specification, other libraries, ggml and streaming loops.

    python benchmarks/bench_cpu.py [--peers PYTHON] [--ggml FOLDER] [--only GROUP ...] [--quick] [--output DIR] [RECIPE
    ...]

Writes results/cpu.json, cpu.md and cpu.svg. A partial run (--only, --quick or named recipes) is written only if
--output names a folder. --peers names a Python that has the other libraries (cpu_peers.py); --ggml names the source
folder of ggml (cpu_ggml.py).

Before a row is timed, its results are compared bit for bit with the specification's. A preallocated result is filled
with bytes 0xEE before that, so that unwritten memory is found.

The calls of a row take turns. They are fp4kit on one thread, on all threads and with preallocated results (`out=`), the
specification, and the other libraries. Short calls, and all calls of the group "sizes", follow an untimed call.
Reported times are medians; the smallest time is reported too. For recipes other than the seven of the first table, the
specification is timed once. The script fails if results are wrong, but not if calls are slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import cpu_cases
import cpu_ggml
import cpu_loops
import cpu_report
import cpu_search
import numpy as np
from cpu_bars import SEVEN
from cpu_cases import CpuCase, check, normal
from cpu_loops import two_passes
from cpu_sweep import SHAPES, sweep
from measure import BF16, F16, F32
from records import head
from rows import CpuRow
from timing import WARMED, Time, Watch, alternate, watch

import fp4kit

HERE = Path(__file__).resolve().parent
SIZES = (1 << 20, 1 << 25, 1 << 30, 1 << 33)  # bytes of bfloat16 input
COLUMNS = 4096
SMALL = (64, 4096)
SPARE = 1 << 30  # bytes of memory that stay free while a large array is timed


class Peers:
    """Run the other libraries in a separate process (cpu_peers.py) and time their calls on demand.

    `about` holds the process's first answer: {"calls", "missing", "versions"}.
    """

    def __init__(self, python: str, size: int, threads: int, quick: bool) -> None:
        command = [python, str(HERE / "cpu_peers.py"), str(size), str(threads), *(["--quick"] if quick else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        """Wait for one line of JSON from the process, and return its content as a dict.

        Raises RuntimeError if the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the other libraries ended with exit status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, name: str) -> float:
        """Make one call in the process and return its seconds.

        Afterwards, wait until the process is idle. Raises RuntimeError with the call's error if the call failed.

        name: the name of the call, one of about["calls"], such as "quantize/nvfp4/torchao eager".
        """
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self._rest()
        return float(answer["seconds"])

    def _rest(self) -> None:
        """Wait, at most a second, until the threads of the process are idle.

        Some libraries let their threads spin long after a call, which would slow the next call to be timed.
        """
        for _ in range(50):
            before = self._ticks()
            time.sleep(0.02)
            if self._ticks() == before:
                return

    def _ticks(self) -> list[str]:
        """Return the CPU times of the process and its children, as four numbers in text.

        Return an empty list on systems without /proc. Equal results at two moments mean that the process was idle.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[11:15] if stat.exists() else []

    def watches(self, operation: str, kind: str) -> tuple[dict[str, Watch], dict[str, str]]:
        """Return ({library: watch}, {library: error}) for an operation and kind of format.

        A watch makes the library's call once and returns its seconds. Each call is tried first; the second dict has the
        libraries whose call failed. Both dicts are empty if no library offers the operation.

        Args:
            operation: the name of the operation, such as "quantize"
            kind: "nvfp4", "mxfp4" or "mxfp8"
        """
        found: dict[str, Watch] = {}
        failed: dict[str, str] = {}
        for call in self.about["calls"]:
            prefix, _, library = call.rpartition("/")
            if prefix == f"{operation}/{kind}":
                try:
                    self.seconds(call)
                    found[library] = lambda call=call: self.seconds(call)  # type: ignore[misc]
                except RuntimeError as error:
                    failed[library] = str(error)
        return found, failed

    def close(self) -> None:
        """End the process of the other libraries."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class CpuBench:
    """One run of the benchmark.

    `args` are the options of the command line, and `peers` the other libraries (or None). `rows` are the rows so far,
    and `extra` the other measurements for the record.
    """

    def __init__(self, args: argparse.Namespace, peers: Peers | None) -> None:
        self.args, self.peers, self.rows = args, peers, list[CpuRow]()
        self.threads = fp4kit.num_threads()
        self.extra: dict[str, Any] = {}

    def watches(self, case: CpuCase, specification: bool = True, warm_below: float = WARMED) -> dict[str, Watch]:
        """Return {key of CpuRow.times: watch} for a case.

        A watch is a function that makes a call and returns its seconds.

        Args:
            case: the case, timed on one thread and on all threads
            specification: True to time the specification too
            warm_below: see timing.watch
        """
        found: dict[str, Watch] = {}
        for name, count in (("one", 1), ("all", self.threads)):
            for what, call in case.calls.items():
                context = partial(fp4kit.threads, count)
                found[name + what] = watch(call, context, warm_below=warm_below)
        return found | ({"specification": watch(case.call, fp4kit.specification)} if specification else {})

    def row(self, group: str, case: CpuCase, recipe: str, x: np.ndarray, beside: bool = False) -> None:
        """Check a case, time it and keep its row. Raises AssertionError if its results are wrong.

        Args:
            group: the name of the group of rows, such as "recipes"
            case: the calls to time
            recipe: the id of the recipe; "" if there is none
            x: the unquantized array, whose shape and dtype the row records
            beside: True to time the matching calls of other libraries too
        """
        seconds = check(case)
        others, failed = {}, {}
        if beside and self.peers is not None:
            others, failed = self.peers.watches(case.operation, recipe.partition("-")[0])
        is_brief = group == "recipes" and not beside  # the specification takes most of the time of several hundred rows
        times = alternate({**self.watches(case, not is_brief), **others}, self.args.repeat)
        times |= {"specification": Time.of([seconds])} if is_brief else {}
        peers = {name: times.pop(name) for name in others}
        row = CpuRow(
            group=group,
            operation=case.operation,
            recipe=recipe,
            dtype=x.dtype.name,
            shape=x.shape,
            bytes=case.bytes,
            times=times,
            peers=peers,
            failed=failed,
        )
        self.keep(row)

    def keep(self, row: CpuRow) -> None:
        """Print a row and add it to the run."""
        print(row, flush=True)
        self.rows.append(row)


def recipes(bench: CpuBench) -> None:
    """Time every recipe on bfloat16. The recipes in SEVEN are timed next to the other libraries."""
    x = normal((bench.args.size, bench.args.size))
    for recipe in bench.args.recipes:
        for case in cpu_cases.of_recipe(recipe, x):
            bench.row("recipes", case, recipe, x, beside=recipe in SEVEN)


def operations(bench: CpuBench) -> None:
    """Time, for the recipes in SEVEN, the operations and dtypes that `recipes` does not time. Also time amax."""
    shape = (bench.args.size, bench.args.size)
    x = normal(shape)
    for recipe in _seven(bench):
        for case in cpu_cases.operations(recipe, x):
            bench.row("operations", case, recipe, x, beside=case.operation == "fake_quantize")
        for dtype in (F16, F32):
            other = normal(shape, dtype)
            bench.row("operations", cpu_cases.quantize(recipe, other), recipe, other)
            bench.row("operations", cpu_cases.dequantize(recipe, other, dtype), recipe, other)
    bench.row("operations", CpuCase("amax", lambda: fp4kit.amax(x), x.nbytes), "", x)


def small(bench: CpuBench) -> None:
    """Time quantize, dequantize and fake_quantize of 64 x 4096 arrays, where the fixed cost of a call dominates."""
    x = normal(SMALL)
    for recipe in _seven(bench):
        for case in (
            cpu_cases.quantize(recipe, x),
            cpu_cases.dequantize(recipe, x),
            cpu_cases.fake_quantize(recipe, x),
        ):
            bench.row("small", case, recipe, x)


def _seven(bench: CpuBench) -> Iterator[str]:
    """Return an iterator over the recipes in SEVEN (those with performance targets) that this run times."""
    return (recipe for recipe in SEVEN if recipe in bench.args.recipes)


def touch() -> None:
    """Write once to all available memory except SPARE bytes, so that `sizes` does not time the allocation of pages.

    The host of a virtual machine may provide pages only at their first write, at half a gigabyte per second.
    """
    memory = np.empty(max(available() - SPARE, 0), np.uint8)
    memory[::4096] = 1


def sizes(bench: CpuBench) -> None:
    """Time quantize of 1 MiB to 8 GiB of input, next to a streaming loop over the same number of bytes.

    Sizes that do not fit in memory are left out and recorded in bench.extra. If the system does not report its memory,
    all sizes are left out.
    """
    left_out = bench.extra.setdefault("left out", {})
    if not bench.args.quick:
        touch()
    for nbytes in SIZES[:1] if bench.args.quick else SIZES:
        needed, there = nbytes * 21 // 10 + SPARE, available()
        if there < needed:
            left_out[f"{nbytes >> 20} MiB"] = f"needs {needed >> 20} MiB of memory, {there >> 20} MiB are available"
            continue
        few = normal((min(nbytes, SIZES[1]) // 2 // COLUMNS, COLUMNS))
        x = few if nbytes <= few.nbytes else np.tile(few, (nbytes // few.nbytes, 1))
        for recipe in ("nvfp4-te", "mxfp4-ocp"):
            case = cpu_cases.quantize_whole(recipe, x)
            cpu_cases.check_rows(case.target, x)
            with ThreadPoolExecutor(bench.threads) as pool:
                words = x.reshape(-1).view(np.int64)
                targets = {"loop": None, "loop into": np.zeros(len(words) // 4, np.int64)}
                passes = {name: two_passes(words, target, bench.threads, pool) for name, target in targets.items()}
                loops = {name: watch(call, warm_below=inf) for name, call in passes.items()}
                # Make an untimed call before each timed one, because the host of a virtual machine may take back memory
                # that was free for a few seconds.
                mine = bench.watches(case, nbytes <= SIZES[1], warm_below=inf)
                times = alternate(mine | loops, bench.args.repeat)
            peers = {name: times.pop(name) for name in loops}
            bench.keep(
                CpuRow(
                    group="sizes",
                    operation="quantize",
                    recipe=recipe,
                    dtype="bfloat16",
                    shape=x.shape,
                    bytes=x.nbytes,
                    times=times,
                    peers=peers,
                )
            )
            del case, loops, passes, targets  # frees the large arrays that they hold


def ggml(bench: CpuBench) -> None:
    """Time quantize and dequantize of ggml on float32 with one thread, next to fp4kit with one thread.

    fp4kit is timed on float32 and, for quantize only, on bfloat16. Does nothing without --ggml.
    """
    if bench.args.ggml is None:
        return
    x = normal((bench.args.size, bench.args.size), F32)
    with tempfile.TemporaryDirectory() as folder:
        library = cpu_ggml.build(bench.args.ggml, Path(folder))
        for recipe in (recipe for recipe in _seven(bench) if recipe[:5] in cpu_ggml.BLOCK_BYTES):
            others = cpu_ggml.calls(library, recipe[:5], x)
            for dtype in (F32, BF16):
                source = x.astype(dtype)
                cases = (cpu_cases.quantize(recipe, source), cpu_cases.dequantize(recipe, source, F32))
                for case in cases[: 2 if dtype == F32 else 1]:
                    check(case)
                    mine = {name: found for name, found in bench.watches(case, False).items() if name.startswith("one")}
                    times = alternate(
                        mine | {"ggml": watch(others[case.operation], warm_below=WARMED)}, bench.args.repeat
                    )
                    peers = {"ggml": times.pop("ggml")}
                    bench.keep(
                        CpuRow(
                            group="ggml",
                            operation=case.operation,
                            recipe=recipe,
                            dtype=np.dtype(dtype).name,
                            shape=x.shape,
                            bytes=case.bytes,
                            times=times,
                            peers=peers,
                        )
                    )


def searches(bench: CpuBench) -> None:
    """Time searches of block scales. search_scales is timed next to a NumPy loop over the candidates.

    Also count the blocks for which all candidates are tried.
    """
    x = normal((min(bench.args.size, 512), bench.args.size))
    for case in cpu_search.cases(x):
        check(case)
        loop = {"NumPy": watch(lambda: cpu_search.loop(x))} if case.operation == "search_scales" else {}
        times = alternate(bench.watches(case) | loop, bench.args.repeat)
        peers = {name: times.pop(name) for name in loop}
        bench.keep(
            CpuRow(
                group="searches",
                operation=case.operation,
                recipe=cpu_search.RECIPE,
                dtype=x.dtype.name,
                shape=x.shape,
                bytes=case.bytes,
                times=times,
                peers=peers,
            )
        )
    bench.extra["unproven"] = cpu_search.unproven(x)
    print(f"blocks for which all candidates were tried: {bench.extra['unproven']:.3%}", flush=True)


def loops(bench: CpuBench) -> None:
    """Measure memory throughput with streaming loops over as many bytes as the large matrix has."""
    nbytes = max(2 * bench.args.size**2 // (32 * bench.threads), 1) * 32 * bench.threads
    bench.extra["loops"] = cpu_loops.streaming(nbytes, bench.threads, bench.args.repeat)
    print(f"loops, GB/s: {bench.extra['loops']}", flush=True)


def first(bench: CpuBench) -> None:
    """Measure the time of the first calls in a fresh process, and the peak memory of large calls."""
    bench.extra["first use, ms"] = cpu_loops.first_use(1 if bench.args.quick else bench.args.repeat)
    nbytes = SIZES[1 if bench.args.quick else 2]
    bench.extra["MiB beyond"] = cpu_loops.beyond(("nvfp4-te", "mxfp4-ocp"), nbytes, COLUMNS)
    print(f"first use, ms: {bench.extra['first use, ms']}; MiB beyond: {bench.extra['MiB beyond']}", flush=True)


def sweeps(bench: CpuBench) -> None:
    """Run the sweep of cpu_sweep.py, which looks for calls that are slower than the specification."""
    bench.extra["sweep"] = sweep(bench.args.recipes, SHAPES[:3] if bench.args.quick else SHAPES)
    found = bench.extra["sweep"]
    print(f"sweep: {found['cases']} cases, {len(found['slower'])} slower; smallest {found['smallest'][:3]}", flush=True)


GROUPS: dict[str, Callable[[CpuBench], None]] = {
    "first": first,
    "small": small,
    "loops": loops,
    "sweep": sweeps,
    "ggml": ggml,
    "recipes": recipes,
    "operations": operations,
    "sizes": sizes,
    "searches": searches,
}


def available() -> int:
    """Return the bytes of memory that can be allocated, or 0 on systems without /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    return found[0] if found else 0


def processor() -> str:
    """Return the first of these texts that the system gives: the model name, the processor, the architecture.

    The model name comes from /proc/cpuinfo. The others are platform.processor() and platform.machine().
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe(bench: CpuBench) -> dict[str, Any]:
    """Return the head of the record: machine, engine, versions, commit, date, and the load when the run began."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    about = {} if bench.peers is None else bench.peers.about
    if bench.args.ggml is not None:
        versions["ggml"] = cpu_ggml.version(bench.args.ggml)
    return {
        "device": "CPU",
        "processor": processor(),
        "threads": bench.threads,
        "engine": fp4kit.engine(),
        **head(**versions),
        "versions of peers": about.get("versions", {}),
        "missing": about.get("missing", {}),
        "size": bench.args.size,
        "repeat": bench.args.repeat,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("recipes", nargs="*", metavar="RECIPE", help="recipes to time (default: all)")
    result.add_argument(
        "--only",
        nargs="+",
        choices=GROUPS,
        metavar="GROUP",
        help=f"groups to run, of {', '.join(GROUPS)} (default: all)",
    )
    result.add_argument(
        "--quick", action="store_true", help="3 rounds, few shapes and sizes, nothing compiled by torch.compile"
    )
    result.add_argument(
        "--peers",
        metavar="PYTHON",
        default=sys.executable,
        help="Python that has the other libraries (default: this one)",
    )
    result.add_argument("--no-peers", action="store_true", help="do not time other libraries")
    result.add_argument(
        "--ggml", type=Path, metavar="FOLDER", help="folder with the sources of ggml; without it, ggml is not timed"
    )
    result.add_argument("--size", type=int, default=4096, help="rows and columns of the large matrix")
    result.add_argument("--repeat", type=int, default=15, help="rounds")
    result.add_argument("--output", type=Path, help="folder for the record, the table and the plot")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the groups of measurements, and print the bars (performance targets) at the end.

    After each group, the record so far is written, if the run is whole or --output names a folder.
    """
    args = parser().parse_args(arguments)
    whole = not (args.only or args.quick or args.recipes)
    to_nearest = [id for id in fp4kit.recipes() if not fp4kit.recipe(id).stochastic_only]
    args.recipes, args.repeat = args.recipes or to_nearest, 3 if args.quick else args.repeat
    output = args.output or (HERE / "results" if whole else None)
    quiet = args.no_peers or (args.only and not {"recipes", "operations"} & set(args.only))
    peers = None if quiet else Peers(args.peers, args.size, fp4kit.num_threads(), args.quick)
    bench = CpuBench(args, peers)
    about = describe(bench)
    for name in args.only or GROUPS:
        start = time.perf_counter()
        print(f"== {name}; load {os.getloadavg()[0]:.2f}", flush=True)
        GROUPS[name](bench)
        print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        record = (
            about
            | bench.extra
            | {
                "load at the end": round(os.getloadavg()[0], 2),
                "rows": [r.record() for r in bench.rows],
            }
        )
        if output:
            cpu_report.write(record, output)
    print("\n".join(cpu_report.bar_lines(record)))
    if peers is not None:
        peers.close()


if __name__ == "__main__":
    main()
