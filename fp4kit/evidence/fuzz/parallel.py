"""Run the fuzzer in several processes, each with its own seed and engine, and merge the reports. The fuzzer compares
random calls (*cases*) on an engine with fp4kit's NumPy specification, and makes failing cases smaller (*shrinks* them).
The *pool* lists what cases are drawn from.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import Pool

_EVERY = 0.2  # seconds between progress reports
_counters: Any = None  # numbers of calls and failures, shared by all processes; set when a process starts


class WorkerTask(NamedTuple):
    """The work of each process that fuzzes: engine, limits and pool.

    Attributes:
        seconds: running time of each process, without shrinking.
        cases: number of cases per process, or None for no limit.
        pool: the recipes, operations, dtypes and options that cases are drawn from.
        shrink_seconds: time for shrinking each reported failure.
        device: the engine to compare with the specification: "gpu", "host", or None for the specification alone.
    """

    seconds: float
    cases: int | None
    pool: Pool
    shrink_seconds: float
    device: str | None


def run(work: WorkerTask, seed: int, processes: int, progress: Callable[[int, int], None]) -> fuzz.Report:
    """Run the fuzzer in several processes with the seeds seed, seed + 1, ..."""
    # Processes are spawned, because a CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 2)
    with ProcessPoolExecutor(processes, context, _start, (counters,)) as executor:
        running = {executor.submit(_work, work, seed + i) for i in range(processes)}
        _follow(running, counters, progress)
        reports = [future.result() for future in running]
    total = reports[0]
    for report in reports[1:]:
        total.add(report)
    return total


def _start(counters: Any) -> None:
    """Store the shared counters [calls, failures] in a module variable. Each new process calls this function first."""
    global _counters
    _counters = counters


def _follow(running: set[Future[fuzz.Report]], counters: Any, progress: Callable[[int, int], None]) -> None:
    """Call ``progress`` about every 0.2 s with the increase of the shared counters, until all processes have ended."""
    seen = (0, 0)
    while running:
        running = wait(running, _EVERY).not_done
        now = (counters[0], counters[1])
        progress(now[0] - seen[0], now[1] - seen[1])
        seen = now


def _work(work: WorkerTask, seed: int) -> fuzz.Report:
    """Run the fuzzer in this process with the given seed, and return its report."""
    engine = {"gpu": fuzz.device_engine, "host": fuzz.host_engine}[work.device]()[0] if work.device else None
    if work.device == "gpu" and engine is None:
        raise OSError("fuzz: this process finds no GPU, although the first process found one; run with --processes 1")
    done, last = [0, 0], time.monotonic()

    def progress(calls: int, failures: int) -> None:
        nonlocal done, last
        done = [done[0] + calls, done[1] + failures]
        if time.monotonic() - last > _EVERY:
            _report(done)
            done, last = [0, 0], time.monotonic()

    report = fuzz.run(
        engine,
        work.seconds,
        seed,
        cases=work.cases,
        pool=work.pool,
        shrink_seconds=work.shrink_seconds,
        progress=progress,
    )
    _report(done)
    return report


def _report(done: list[int]) -> None:
    """Add `done`, the numbers [calls, failures] of this process since its last report, to the shared counters."""
    with _counters.get_lock():
        for i, number in enumerate(done):
            _counters[i] += number
