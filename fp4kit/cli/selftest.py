"""Define the command selftest: compare the engine of this machine with the specification."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fp4kit import __version__
from fp4kit.arrays import imports
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command
from fp4kit.cuda import compiler as loader
from fp4kit.evidence import selftest
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.golden.golden_set import GoldenSet

_SHOWN = 20  # the largest number of differences, and of reasons why cases were left out, that are printed


def register(commands: Any) -> None:
    """Add the command selftest, with its options and the function that runs it, to ``commands``."""
    parser = add_command(
        commands,
        "selftest",
        _selftest,
        examples=(
            ("fp4kit selftest --host --quick", "check the compiled CPU engine in at most a minute"),
            ("fp4kit selftest", "check every operation on this GPU"),
        ),
        description=(
            "Compare every operation on this machine's GPU, or with --host in the compiled CPU engine, with the"
            " specification, bit for bit. GPU kernels that are not cached are compiled first. Exit codes: 0 all equal,"
            " 1 something differs, 2 an error such as no GPU."
        ),
    )
    parser.add_argument("--host", action="store_true", help="check the compiled CPU engine instead of the GPU")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check less, which takes at most a minute: eight recipes, smaller tensors, every 61st float32",
    )
    parser.add_argument("--golden", metavar="DIR", help="directory of recorded outputs (default: those of the package)")


def _selftest(args: argparse.Namespace, out: Output) -> int:
    """Run the command selftest: find the engine and compare it."""
    golden = GoldenSet.find() if args.golden is None else GoldenSet.open(args.golden)
    if args.host:
        engine, name = fuzz.host_engine()
        if engine is None:
            raise OSError(f"--host: the compiled engine is not available: {name}")
        out.verbatim(f"{name}, fp4kit {__version__}")
        return report(engine, golden, args.quick, out)
    try:
        cupy = imports.cupy()
        compiler = ".".join(map(str, loader.compiler_version()))
    except RuntimeError as error:
        raise OSError(str(error)) from error
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    out.verbatim(f"{device}, CuPy {cupy.__version__}, NVRTC {compiler}, fp4kit {__version__}")
    return report(selftest.ComparedEngine(cupy), golden, args.quick, out)


def report(engine: selftest.ComparedEngine, golden: GoldenSet | None, quick: bool, out: Output) -> int:
    """Compare an engine with the specification, and print a table, the differences and the cases that were left out."""
    start = time.perf_counter()
    finished = run(selftest.plan(engine, golden, quick), not out.quiet and sys.stderr.isatty())
    out.table(("compared", "#cases", "#values", "#differ", "#left out", "#seconds"), rows(finished))
    wrong = [f for f in finished if f.failed]
    failures = [f"{f.task.part}: {f.task.name}: {f.error or f.outcome.first}" for f in wrong]
    left_out = sorted({reason for f in finished for reason in f.outcome.skipped})
    _listing(out, "differs", failures)
    _listing(out, "left out", left_out)
    values, differing = (sum(getattr(f.outcome, name) for f in finished) for name in ("values", "differing"))
    errors = sum(bool(f.error) for f in finished)
    out.line(f"{values:,} values compared, {differing:,} differ, {errors} errors; {time.perf_counter() - start:.0f} s")
    body = {"cases": len(finished), "values": values, "differing": differing, "errors": errors}
    out.document("selftest/1", {**body, "differs": failures, "left_out": left_out})
    return 1 if wrong or not values else 0


def run(tasks: list[selftest.Task], shown: bool) -> list[selftest.Finished]:
    """Run the comparisons ``tasks`` and return their results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        bar = progress.add_task("comparing", total=len(tasks))
        finished = []
        for f in selftest.run(tasks):
            finished.append(f)
            progress.update(bar, advance=1, description=f"{f.task.part}: {f.task.name}")
    return finished


def rows(finished: Iterable[selftest.Finished]) -> list[tuple[str, ...]]:
    """Return one table row per part of the selftest."""
    result: list[tuple[str, ...]] = []
    parts: dict[str, list[selftest.Finished]] = {}
    for f in finished:
        parts.setdefault(f.task.part, []).append(f)
    for part, members in parts.items():
        values, differing = (sum(getattr(f.outcome, name) for f in members) for name in ("values", "differing"))
        left_out, seconds = sum(len(f.outcome.skipped) for f in members), sum(f.seconds for f in members)
        result.append((part, str(len(members)), f"{values:,}", f"{differing:,}", str(left_out), f"{seconds:.1f}"))
    return result


def _listing(out: Output, title: str, lines: list[str]) -> None:
    """Print the first 20 of ``lines``, each as "title: line", then how many lines are left out, if any."""
    for line in lines[:_SHOWN]:
        out.line(f"{title}: {line}")
    if len(lines) > _SHOWN:
        out.line(f"{title}: and {len(lines) - _SHOWN} more")
