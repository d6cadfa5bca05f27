"""Run the option --live of the command recipes: compare installed producers with fp4kit on random inputs."""

from __future__ import annotations

import math
import sys

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.evidence.live import run
from fp4kit.evidence.live import run as report


def live(out: Output, ids: tuple[str, ...], seconds: float, seed: int) -> int:
    """Compare every installed producer (a library that quantizes) with fp4kit on random inputs, and print the
    result.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds is {seconds:g}; a positive finite number is needed")
    if seed < 0:
        raise ValueError(f"--seed is {seed}; a number of at least 0 is needed")
    results = _run(out, ids, seconds, seed)
    out.table(report.COLUMNS, report.rows(results))
    for title, columns, rows in (
        ("Recipes that differ:", report.RECIPE_COLUMNS, report.differing_rows(results)),
        ("Recipes that were not run:", report.LEFT_OUT_COLUMNS, report.left_out_rows(results, ids)),
    ):
        if rows:
            out.line()
            out.line(title)
            out.table(columns, rows)
    for result in results:
        for found in result.found:
            out.verbatim(f"\n# input {found.number} of seed {seed}: {found.kind}, {found.dtype}")
            out.verbatim(found.script)
    arrays, differing = (sum(getattr(result.total, name) for result in results) for name in ("arrays", "differing"))
    out.line()
    out.line(f"compared {arrays:,} arrays of {len(report.rows(results))} producers bit for bit; {differing:,} differ")
    out.document("recipes.live/1", run.document(results, ids, seconds, seed))
    return DONE if arrays and not differing else DIFFERENT


def _run(out: Output, ids: tuple[str, ...], seconds: float, seed: int) -> list[run.ProducerResult]:
    """Run all installed producers one after another, and return their results."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = not out.quiet and sys.stderr.isatty()
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("")
        for adapter in run.adapters():
            bar.update(task, description=adapter.name, completed=0)

            def tick(differing: int, name: str = adapter.name) -> None:
                bar.advance(task)
                bar.update(task, description=f"{name}: {bar.tasks[0].completed:,.0f} arrays, {differing:,} differ")

            results.append(run.run(adapter, ids, seconds, seed, tick))
    return results
