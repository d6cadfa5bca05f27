"""Define the command fuzz: compare random calls with the specification.

The command prints counts, and for each failure a program that reproduces it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import OPERATIONS, Pool
from fp4kit.recipes import recipe

_SHOWN = 20  # the largest number of reasons for rejected or declined calls that are printed


def register(commands: Any) -> None:
    """Add the command fuzz, with its options and the function that runs it, to ``commands``."""
    parser = add_command(
        commands,
        "fuzz",
        _fuzz,
        examples=(
            ("fp4kit fuzz --seconds 60", "compare random calls for a minute"),
            ("fp4kit fuzz --host --cases 100 --operations quantize", "compare 100 calls of one operation on the CPU"),
        ),
        description=(
            "Draw random recipes, shapes, strides, options and data, compare this machine's GPU with the specification"
            " bit for bit, and check invariants on each result. Without a GPU, the compiled CPU engine is compared;"
            " without that, only the invariants of the specification are checked. Exit codes: 0 no failures, 1"
            " failures, 2 an error."
        ),
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long to run (default: 60)")
    parser.add_argument("--cases", type=int, metavar="K", help="stop after K cases per process")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random cases (default: 0)")
    parser.add_argument(
        "--case", type=int, metavar="SEED", help="repeat one case: the number that a failure was printed with"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="P",
        help="number of processes, with seeds N, N + 1, ... (default: 1)",
    )
    parser.add_argument("--recipes", nargs="+", metavar="ID", help="draw only these recipes and their variants")
    text = f"draw only these operations: {', '.join(OPERATIONS)}"
    parser.add_argument("--operations", nargs="+", metavar="NAME", help=text)
    parser.add_argument("--units", nargs="+", metavar="ID", help="draw only these units of matmul")
    parser.add_argument(
        "--changes", type=int, default=3, metavar="N", help="change at most N fields per variant (default: 3)"
    )
    parser.add_argument("--host", action="store_true", help="compare the CPU engine even if there is a GPU")


def _fuzz(args: argparse.Namespace, out: Output) -> int:
    """Run the command fuzz."""
    for name, minimum in (("seconds", 0), ("seed", 0), ("processes", 1), ("changes", 0)):
        if not getattr(args, name) >= minimum:  # "not >=" also rejects NaN seconds, with which the run would never end
            raise ValueError(f"--{name} is {getattr(args, name)}; a number of at least {minimum} is needed")
    engine, where = (None, "--host was given") if args.host else fuzz.device_engine()
    device = "gpu" if engine else "host"
    if engine is None:
        engine, where = fuzz.host_engine()
    if engine is None:
        device, where = (
            "",
            f"No GPU and no compiled engine ({where}): checking only the invariants of the specification",
        )
    out.line(where)
    report = _run(args, engine, device, _pool(args), not args.quiet and sys.stderr.isatty())
    _print(out, report, _pool_options(args))
    out.document("fuzz/1", report.as_json())
    return 1 if report.total("failed") else 0


def _pool(args: argparse.Namespace) -> Pool:
    """Return the Pool from which random cases are drawn."""
    chosen: dict[str, Any] = {"changes": args.changes}
    if args.recipes:
        chosen["recipes"] = tuple(recipe(id).id for id in args.recipes)
    for name in ("operations", "units"):
        if getattr(args, name):
            chosen[name] = tuple(getattr(args, name))
    return Pool(**chosen)


def _pool_options(args: argparse.Namespace) -> str:
    """Return the options that must be given again to reproduce a case, as text for the command line."""
    lists = "".join(
        f" --{name} {' '.join(getattr(args, name))}"
        for name in ("recipes", "operations", "units")
        if getattr(args, name)
    )
    return lists + (f" --changes {args.changes}" if args.changes != Pool.changes else "")


def _run(
    args: argparse.Namespace, engine: fuzz.ComparedEngine | None, device: str, pool: Pool, shown: bool
) -> fuzz.Report:
    """Run one case (--case) or random cases, in this process or in several (--processes), and return the report."""
    if args.case is not None:
        return fuzz.run_case(engine, args.case, pool=pool)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("drawing", calls=0, failed=0)

        def progress(calls: int, failed: int) -> None:
            fields = bar.tasks[0].fields
            calls, failed = fields["calls"] + calls, fields["failed"] + failed
            rate = calls / max(bar.tasks[0].elapsed or 0, 1e-3)
            bar.update(
                task, calls=calls, failed=failed, description=f"{calls:,} calls, {rate:,.0f}/s, {failed} failures"
            )

        if args.processes == 1:
            return fuzz.run(engine, args.seconds, args.seed, cases=args.cases, pool=pool, progress=progress)
        return fuzz.run_processes(
            device or None, args.processes, args.seconds, args.seed, progress, cases=args.cases, pool=pool
        )


def _print(out: Output, report: fuzz.Report, options: str) -> None:
    """Print counts per operation, the reasons why calls were rejected, the failures and the totals."""
    out.table(("operation", *(f"#{name}" for name in fuzz.COUNTED)), rows(report))
    if report.sums:
        out.table(("unit", "#sums"), [(unit, f"{number:,}") for unit, number in report.sums.most_common()])
    reasons = report.reasons.most_common()
    for reason, number in reasons[:_SHOWN]:
        out.verbatim(f"{number:6} {reason}")
    if len(reasons) > _SHOWN:
        out.verbatim(f"       and {len(reasons) - _SHOWN} more reasons")
    for failure in report.failures:
        out.verbatim(
            f"\n# fp4kit fuzz --case {failure.case}{options}\n# {failure.kind}: {failure.text}\n# {failure.shrunk}"
        )
        out.verbatim(failure.script)
    calls, values = report.total("calls"), report.total("values")
    rate = calls / max(report.seconds, 1e-3)
    out.line(
        f"{report.total('cases'):,} cases, {calls:,} calls ({rate:,.0f}/s), {values:,} values compared, "
        f"{report.total('failed'):,} failures; {report.redrawn} variants redrawn; {report.seconds:.0f} s"
    )


def rows(report: fuzz.Report) -> list[tuple[str, ...]]:
    """Return one table row per operation: its name, and the counts that fuzz.COUNTED lists."""
    counts = report.operations
    return [(operation, *(f"{counts[operation][name]:,}" for name in fuzz.COUNTED)) for operation in sorted(counts)]
