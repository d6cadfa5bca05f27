"""Run random calls of the public functions on an engine and on the specification, and compare the results.

draw.py draws a case from an integer, programs.py writes it as a program, and check.py runs the program on both,
statement by statement, and prints it. shrink.py makes a failing case smaller. Each process has its own seed and engine.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cpu.library import library
from fp4kit.evidence.fuzz.check import Verdict
from fp4kit.evidence.fuzz.draw import DrawnCase, draw
from fp4kit.evidence.fuzz.programs import check, script
from fp4kit.evidence.fuzz.recipes import Pool
from fp4kit.evidence.testing import ComparedEngine, Outcome
from fp4kit.ops.engines import engine as engine_name

CASES_PER_SEED = 10**9  # case i of seed s is drawn from s * 10^9 + i
MAX_FAILURES = 5  # failures of different kinds that are shrunk and printed
COUNTED = ("cases", "calls", "values", "refused", "declined", "failed")


@dataclass(frozen=True)
class Failure:
    """A fuzz case that failed, with its shrunk form and a program that reproduces it.

    Attributes:
        case: the integer that the case is drawn from.
        kind: the kind of the failure, such as "differs" (see check.Verdict).
        function: the function that failed.
        text: what is wrong in the shrunk case.
        drawn: the case as one line.
        shrunk: the shrunk case as one line.
        script: a Python program that reproduces the failure of the shrunk case.
    """

    case: int
    kind: str
    function: str
    text: str
    drawn: str
    shrunk: str
    script: str


@dataclass
class Report:
    """The counts and failures of a fuzzer run.

    Attributes:
        operations: {operation: {name of a count: count}}, with the names in COUNTED, such as "cases" and "failed".
        sums: {id of a matrix unit: number of sums of matmul that were compared and equal}. Variants count for their
            unit.
        reasons: {why a call was rejected or declined: number of such calls}.
        redrawn: number of changes of recipes that Recipe rejected.
        seconds: running time.
        failures: the first failure of each kind and function, at most MAX_FAILURES.
    """

    operations: dict[str, Counter[str]] = field(default_factory=dict)
    sums: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    redrawn: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Return the sum of a count over all operations; 0 if no case was counted."""
        return sum(counts[name] for counts in self.operations.values())

    def count(self, case: DrawnCase, verdict: Verdict, refused: int) -> None:
        """Add a case and its verdict to the counts of the report."""
        counts = self.operations.setdefault(case.operation, Counter())
        counts.update(cases=1, calls=verdict.calls, values=verdict.values, failed=int(verdict.failed))
        self.redrawn += refused
        if case.product is not None and verdict.kind == "equal":
            self.sums[case.product.unit.id] += case.product.sums
        if verdict.kind in ("refused", "declined"):
            counts[verdict.kind] += 1
            self.reasons[f"{verdict.kind}: {verdict.reason}"] += 1

    def add(self, other: Report) -> None:
        """Add the report of another process to this report, in place."""
        for operation, counts in other.operations.items():
            self.operations.setdefault(operation, Counter()).update(counts)
        self.sums.update(other.sums)
        self.reasons.update(other.reasons)
        self.redrawn += other.redrawn
        self.seconds = max(self.seconds, other.seconds)
        for failure in other.failures:
            if self.wants(failure):
                self.failures.append(failure)

    def wants(self, failure: Failure | Verdict) -> bool:
        """Return True if a failure should be added to the report."""
        # The report must not have a failure with this kind and function yet, and must have fewer than MAX_FAILURES.
        reported = {(f.kind, f.function) for f in self.failures}
        return len(reported) < MAX_FAILURES and (failure.kind, failure.function) not in reported

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data: dicts, lists, numbers and strings."""
        first = {"redrawn": self.redrawn, "seconds": self.seconds}
        return first | vars(self) | {"failures": [vars(failure) for failure in self.failures]}


def run(
    engine: ComparedEngine | None,
    seconds: float,
    seed: int,
    *,
    first: int | None = None,
    cases: int | None = None,
    pool: Pool | None = None,
    shrink_seconds: float = 10.0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Draw and check cases for ``seconds``, or until ``cases`` of them were checked, and return the Report."""
    report, start, shrinking = Report(), time.monotonic(), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in islice(count(seed * CASES_PER_SEED if first is None else first), cases):
            if time.monotonic() - start - shrinking > seconds:
                break
            verdict, more = checked(report, engine, number, pool or Pool(), shrink_seconds)
            shrinking += more
            if progress is not None:
                progress(verdict.calls, int(verdict.failed))
    report.seconds = time.monotonic() - start
    return report


def run_case(
    engine: ComparedEngine | None, number: int, *, pool: Pool | None = None, shrink_seconds: float = 10.0
) -> Report:
    """Draw one fuzz case from the integer ``number``, check it, and return the Report."""
    return run(engine, inf, 0, first=number, cases=1, pool=pool, shrink_seconds=shrink_seconds)


def checked(
    report: Report, engine: ComparedEngine | None, number: int, pool: Pool, shrink_seconds: float
) -> tuple[Verdict, float]:
    """Draw and check a case, and add it and a new failure to the report. Return the seconds spent on shrinking, too."""
    case, refused = draw(number, pool)
    verdict, start = check(case, engine), time.monotonic()
    report.count(case, verdict, refused)
    if not verdict.failed or not report.wants(verdict):
        return verdict, 0.0
    smaller, last, note = case, verdict, ""
    try:
        from fp4kit.evidence.fuzz.shrink import shrunk
    except ImportError as error:
        note = f' (not made smaller: {error}; run pip install "fp4kit[fuzz]")'
    else:

        def fails(candidate: DrawnCase) -> bool:
            try:
                return check(candidate, engine).key == verdict.key
            except Exception:  # a candidate may be an invalid case
                return False

        simplest = shrunk(number, pool, fails, shrink_seconds)
        again = check(simplest, engine)
        if again.key == verdict.key:  # otherwise the case does not fail every time
            smaller, last = simplest, again
    text = script(smaller, last, engine)
    report.failures.append(
        Failure(number, verdict.kind, verdict.function, last.text, str(case), f"{smaller}{note}", text)
    )
    return verdict, time.monotonic() - start


_counters: Any = None  # numbers of calls and failures, shared by all processes; set when a process starts


def run_processes(
    device: str | None, processes: int, seconds: float, seed: int, progress: Callable[[int, int], None], **options: Any
) -> Report:
    """Run the fuzzer with the seeds seed, seed + 1, ... in several processes, and return the sum of their reports.

    Args:
        device: the engine to compare with the specification: "gpu", "host", or None for the specification alone.
        processes: the number of processes.
        seconds: running time of each process, without shrinking.
        seed: the seed of the first process.
        progress: is called with the increase of the numbers of calls and failures.
        options: further arguments of ``run``.
    """
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    counters = context.Array("q", 2)
    with ProcessPoolExecutor(processes, context, _start, (counters,)) as executor:
        running = {executor.submit(_work, device, seconds, seed + i, options) for i in range(processes)}
        seen, pending = (0, 0), running
        while pending:
            pending = wait(pending, 0.2).not_done
            now = (counters[0], counters[1])
            progress(now[0] - seen[0], now[1] - seen[1])
            seen = now
    total = Report()
    for future in running:
        total.add(future.result())
    return total


def _start(counters: Any) -> None:
    global _counters
    _counters = counters


def _work(device: str | None, seconds: float, seed: int, options: dict[str, Any]) -> Report:
    engine = None if device is None else {"gpu": device_engine, "host": host_engine}[device]()[0]
    if device == "gpu" and engine is None:
        raise OSError("fuzz: this process finds no GPU, although the first process found one; run with --processes 1")

    def progress(calls: int, failures: int) -> None:
        with _counters.get_lock():
            _counters[0] += calls
            _counters[1] += failures

    return run(engine, seconds, seed, progress=progress, **options)


def outcome(engine: ComparedEngine, pool: Pool, seed: int, cases: int) -> Outcome:
    """Draw and check ``cases`` cases on an engine, and return the counts as an Outcome, for `fp4kit selftest`."""
    total = Outcome()
    for number in range(seed * CASES_PER_SEED, seed * CASES_PER_SEED + cases):
        case, _ = draw(number, pool)
        verdict = check(case, engine)
        first = f"case {number}: {case}: {verdict.kind}: {verdict.text}" if verdict.failed else ""
        left_out = (f"{case.recipe.id}: {verdict.reason}",) if verdict.kind == "declined" else ()
        total += Outcome(verdict.values, max(verdict.differing, int(verdict.failed)), first, left_out)
    return total


def device_engine() -> tuple[ComparedEngine | None, str]:
    """Return (engine of the current GPU, description), where the description is text like "NVIDIA H200, CuPy
    14.0.1".
    """
    # If no GPU can be used, for example because CuPy is not installed, return (None, reason).
    try:
        cupy = imports.cupy()
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except Exception as error:  # CuPy's exception types exist only if CuPy is installed
        return None, str(error).partition("\n")[0]
    return ComparedEngine(cupy), f"{name}, CuPy {cupy.__version__}"


def host_engine() -> tuple[ComparedEngine | None, str]:
    """Return (the host's compiled engine, its name), or (None, reason) if that engine is not available."""
    found = library()
    return (None, found.level) if found.functions is None else (ComparedEngine(np), f"This processor, {engine_name()}")
