"""Run random calls of the public functions on an engine and on the specification, and compare the results.
A case is one random test, drawn from an integer. It runs as a program: a list of calls, and of results that must be
equal. A failing case is shrunk to a smaller one and printed as Python. The pool holds what cases are drawn from.

draw.py draws a case, programs.py writes it as a program, and check.py runs the program on the specification and the
engine, statement by statement. Some checks need no second engine:

- A round trip gives the original again.
- Equal results come from strided views and copies, from grouped and single calls, and from quantize_both and two calls.
- Inputs and guards are unchanged.

A failure is shrunk (shrink.py) and printed as Python (print_repro.py). Calls that both engines reject with the same
message, and calls that the engine declines with NotImplementedError, are counted.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cpu.library import library
from fp4kit.evidence.engines import ComparedEngine, Outcome
from fp4kit.evidence.fuzz.check import Verdict, check, script
from fp4kit.evidence.fuzz.draw import DrawnCase, draw
from fp4kit.evidence.fuzz.recipes import Pool
from fp4kit.evidence.fuzz.shrink import shrink_case
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
        redrawn: number of variants that Recipe rejected.
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
        found = {name: getattr(self, name) for name in ("redrawn", "seconds")}
        counts = {operation: dict(counts) for operation, counts in self.operations.items()}
        return found | {
            "operations": counts,
            "sums": dict(self.sums),
            "reasons": dict(self.reasons),
            "failures": [asdict(f) for f in self.failures],
        }


def run(
    engine: ComparedEngine | None,
    seconds: float,
    seed: int,
    *,
    cases: int | None = None,
    pool: Pool | None = None,
    shrink_seconds: float = 10.0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Draw and check cases for ``seconds``, or until ``cases`` of them were checked, and return the Report."""
    report, start, spent = Report(), time.monotonic(), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in count() if cases is None else range(cases):
            if time.monotonic() - start - spent > seconds:
                break
            case, verdict = checked(report, engine, seed * CASES_PER_SEED + number, pool or Pool())
            if verdict.failed and report.wants(verdict):
                began = time.monotonic()
                report.failures.append(
                    reproduced(case, verdict, engine, seed * CASES_PER_SEED + number, shrink_seconds)
                )
                spent += time.monotonic() - began
            if progress is not None:
                progress(verdict.calls, int(verdict.failed))
    report.seconds = time.monotonic() - start
    return report


def run_case(
    engine: ComparedEngine | None, number: int, *, pool: Pool | None = None, shrink_seconds: float = 10.0
) -> Report:
    """Draw one fuzz case from the integer ``number``, check it, and return the Report."""
    report, start = Report(), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case, verdict = checked(report, engine, number, pool or Pool())
        if verdict.failed:
            report.failures.append(reproduced(case, verdict, engine, number, shrink_seconds))
    report.seconds = time.monotonic() - start
    return report


def checked(report: Report, engine: ComparedEngine | None, number: int, pool: Pool) -> tuple[DrawnCase, Verdict]:
    """Draw one fuzz case from the integer ``number``, check it, and add it to the report."""
    case, refused = draw(number, pool)
    verdict = check(case, engine)
    report.count(case, verdict, refused)
    return case, verdict


def reproduced(
    case: DrawnCase, verdict: Verdict, engine: ComparedEngine | None, number: int, seconds: float
) -> Failure:
    """Return the Failure of a failing case, shrunk for at most ``seconds``, with a Python program that reproduces
    it.
    """
    smaller = shrink_case(case, verdict, engine, seconds)
    last = check(smaller, engine)
    if last.key != verdict.key:  # the shrunk case does not fail every time
        smaller, last = case, verdict
    return Failure(
        number, verdict.kind, verdict.function, last.text, str(case), str(smaller), script(smaller, last, engine)
    )


def outcome(engine: ComparedEngine, pool: Pool, seed: int, cases: int) -> Outcome:
    """Draw and check ``cases`` cases on an engine, and return the counts as an Outcome, for `fp4kit selftest`."""
    total, report = Outcome(), Report()
    for number in range(seed * CASES_PER_SEED, seed * CASES_PER_SEED + cases):
        case, verdict = checked(report, engine, number, pool)
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
