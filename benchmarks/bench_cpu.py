"""The engine of the host beside the specification, other libraries, ggml and streaming loops; writes results/cpu.json,
.md, .svg.

    python benchmarks/bench_cpu.py [--peers PYTHON] [--ggml FOLDER] [--only GROUP ...] [--quick] [--output DIR] [RECIPE
    ...]

Before a row is timed, its results are compared in every bit with the specification's, written over 0xEE where it takes
`out`. The calls of a row take turns: one thread, all threads, into memory that is there, the specification, the other
libraries; short ones after one that is not timed, and all those of sizes. Times are medians, with the smallest beside
them. --peers: a Python that has the other libraries (cpu_peers.py); --ggml: cpu_ggml.py. Parts of the benchmark, of the
recipes, and quick runs are written only to a DIR that was named. Nothing is asserted of a time.
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
from timing import WARMED, Watch, alternate, watch

import fp4kit

HERE = Path(__file__).resolve().parent
SIZES = (1 << 20, 1 << 25, 1 << 30, 1 << 33)  # bytes of bfloat16 input
COLUMNS = 4096
SMALL = (64, 4096)
SPARE = 1 << 30  # bytes of memory that a large array leaves


class Peers:
    """A process that has other libraries and times their calls on demand."""

    def __init__(self, python: str, size: int, threads: int, quick: bool) -> None:
        command = [python, str(HERE / "cpu_peers.py"), str(size), str(threads), *(["--quick"] if quick else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the other libraries ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, name: str) -> float:
        """Of one call; RuntimeError with what it raised there."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self._rest()
        return float(answer["seconds"])

    def _rest(self) -> None:
        """Wait until its threads look for work no longer, a second at most: some do so for long, on a processor of
        their own.
        """
        for _ in range(50):
            before = self._ticks()
            time.sleep(0.02)
            if self._ticks() == before:
                return

    def _ticks(self) -> list[str]:
        """Of processors: what the process, and what it started, has used. Nothing where there is no /proc."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[11:15] if stat.exists() else []

    def watches(self, operation: str, kind: str) -> tuple[dict[str, Watch], dict[str, str]]:
        """{library: stop-watch} of the calls of a kind, tried once, and why others fail."""
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
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Bench:
    """A run: its options, and the rows so far."""

    def __init__(self, args: argparse.Namespace, peers: Peers | None) -> None:
        self.args, self.peers, self.rows = args, peers, list[CpuRow]()
        self.threads = fp4kit.num_threads()
        self.extra: dict[str, Any] = {}

    def watches(self, case: CpuCase, specification: bool = True, warm_below: float = WARMED) -> dict[str, Watch]:
        """Stop-watches of a case by the names of CpuRow.times."""
        found: dict[str, Watch] = {}
        for name, count in (("one", 1), ("all", self.threads)):
            for what, call in case.calls.items():
                context = partial(fp4kit.threads, count)
                found[name + what] = watch(call, context, warm_below=warm_below)
        return found | ({"specification": watch(case.call, fp4kit.specification)} if specification else {})

    def row(self, group: str, case: CpuCase, recipe: str, x: np.ndarray, beside: bool = False) -> None:
        """Check, time and keep a case; beside: with the other libraries' calls of the kind."""
        check(case)
        others, failed = {}, {}
        if beside and self.peers is not None:
            others, failed = self.peers.watches(case.operation, recipe.partition("-")[0])
        times = alternate({**self.watches(case), **others}, self.args.repeat)
        peers = {name: times.pop(name) for name in others}
        self.keep(CpuRow(group, case.operation, recipe, x.dtype.name, x.shape, case.bytes, times, peers, failed))

    def keep(self, row: CpuRow) -> None:
        """Print a row and add it."""
        print(row, flush=True)
        self.rows.append(row)


def recipes(bench: Bench) -> None:
    """Every recipe on bfloat16; seven of them beside the other libraries."""
    x = normal((bench.args.size, bench.args.size))
    for recipe in bench.args.recipes:
        for case in cpu_cases.of_recipe(recipe, x):
            bench.row("recipes", case, recipe, x, beside=recipe in SEVEN)


def operations(bench: Bench) -> None:
    """The other operations and dtypes."""
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


def small(bench: Bench) -> None:
    """64 x 4096: what a call costs."""
    x = normal(SMALL)
    for recipe in _seven(bench):
        for case in (
            cpu_cases.quantize(recipe, x),
            cpu_cases.dequantize(recipe, x),
            cpu_cases.fake_quantize(recipe, x),
        ):
            bench.row("small", case, recipe, x)


def _seven(bench: Bench) -> Iterator[str]:
    return (recipe for recipe in SEVEN if recipe in bench.args.recipes)


def touch() -> None:
    """Write to all memory but SPARE once: a virtual machine's host may give it then alone, at half a gigabyte a
    second.
    """
    memory = np.empty(max(available() - SPARE, 0), np.uint8)
    memory[::4096] = 1


def sizes(bench: Bench) -> None:
    """quantize from 1 MB to 8 GB of input, beside a streaming loop over as many bytes, in memory that the machine
    has.
    """
    left_out = bench.extra.setdefault("left out", {})
    if not bench.args.quick:
        touch()
    for nbytes in SIZES[:1] if bench.args.quick else SIZES:
        needed, there = nbytes * 21 // 10 + SPARE, available()
        if there < needed:
            left_out[f"{nbytes >> 20} MiB"] = f"needs {needed >> 20} MiB of memory, {there >> 20} were there"
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
                mine = bench.watches(
                    case, nbytes <= SIZES[1], warm_below=inf
                )  # a host may take back what is free for seconds
                times = alternate(mine | loops, bench.args.repeat)
            peers = {name: times.pop(name) for name in loops}
            bench.keep(CpuRow("sizes", "quantize", recipe, "bfloat16", x.shape, x.nbytes, times, peers))
            del case, loops, passes, targets  # and what they write to


def ggml(bench: Bench) -> None:
    """ggml's encoders and decoders, one thread, float32, beside one thread of this one's from bfloat16 and float32."""
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
                        CpuRow("ggml", case.operation, recipe, np.dtype(dtype).name, x.shape, case.bytes, times, peers)
                    )


def searches(bench: Bench) -> None:
    """Searches of block scales, beside a loop over candidates in NumPy; the share of blocks that bounds do not
    prove.
    """
    x = normal((min(bench.args.size, 512), bench.args.size))
    for case in cpu_search.cases(x):
        check(case)
        loop = {"NumPy": watch(lambda: cpu_search.loop(x))} if case.operation == "search_scales" else {}
        times = alternate(bench.watches(case) | loop, bench.args.repeat)
        peers = {name: times.pop(name) for name in loop}
        bench.keep(
            CpuRow("searches", case.operation, cpu_search.RECIPE, x.dtype.name, x.shape, case.bytes, times, peers)
        )
    bench.extra["unproven"] = cpu_search.unproven(x)
    print(f"blocks of which all candidates were tried: {bench.extra['unproven']:.3%}", flush=True)


def loops(bench: Bench) -> None:
    """What memory gives, at the size of the rows."""
    nbytes = max(2 * bench.args.size**2 // (32 * bench.threads), 1) * 32 * bench.threads
    bench.extra["loops"] = cpu_loops.streaming(nbytes, bench.threads, bench.args.repeat)
    print(f"loops, GB/s: {bench.extra['loops']}", flush=True)


def first(bench: Bench) -> None:
    """What a fresh process pays, in time and in memory."""
    bench.extra["first use, ms"] = cpu_loops.first_use(1 if bench.args.quick else bench.args.repeat)
    nbytes = SIZES[1 if bench.args.quick else 2]
    bench.extra["MiB beyond"] = cpu_loops.beyond(("nvfp4-te", "mxfp4-ocp"), nbytes, COLUMNS)
    print(f"first use, ms: {bench.extra['first use, ms']}; MiB beyond: {bench.extra['MiB beyond']}", flush=True)


def sweeps(bench: Bench) -> None:
    """Whether a call is slower than the specification anywhere."""
    bench.extra["sweep"] = sweep(bench.args.recipes, SHAPES[:3] if bench.args.quick else SHAPES)
    found = bench.extra["sweep"]
    print(f"sweep: {found['cases']} cases, {len(found['slower'])} slower; smallest {found['smallest'][:3]}", flush=True)


GROUPS: dict[str, Callable[[Bench], None]] = {
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
    """Bytes of memory that can be had."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    return found[0] if found else 0


def processor() -> str:
    """Its name, as the system gives it."""
    path = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe(bench: Bench) -> dict[str, Any]:
    """Machine, engine, versions, commit, date, and how busy the machine was when the run began."""
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
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("recipes", nargs="*", metavar="RECIPE", help="all of the table by default")
    result.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"some of {', '.join(GROUPS)}")
    result.add_argument(
        "--quick", action="store_true", help="3 rounds, few shapes and sizes, nothing compiled by torch.compile"
    )
    result.add_argument(
        "--peers", metavar="PYTHON", default=sys.executable, help="what has the other libraries; this one"
    )
    result.add_argument("--no-peers", action="store_true", help="without other libraries")
    result.add_argument("--ggml", type=Path, metavar="FOLDER", help="its sources")
    result.add_argument("--size", type=int, default=4096, help="rows and columns of the large matrix")
    result.add_argument("--repeat", type=int, default=15, help="rounds")
    result.add_argument("--output", type=Path, help="folder for the record, the table and the plot")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the groups and write the record after each."""
    args = parser().parse_args(arguments)
    whole = not (args.only or args.quick or args.recipes)
    args.recipes, args.repeat = args.recipes or fp4kit.recipes(), 3 if args.quick else args.repeat
    output = args.output or (HERE / "results" if whole else None)
    quiet = args.no_peers or (args.only and not {"recipes", "operations"} & set(args.only))
    peers = None if quiet else Peers(args.peers, args.size, fp4kit.num_threads(), args.quick)
    bench = Bench(args, peers)
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
