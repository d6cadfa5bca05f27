"""Define the commands recipes and formats, which list recipes and number formats.
The command recipes also compares recipes with producers (the libraries that they reproduce): with their recorded
outputs, or with installed versions.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from fp4kit import __version__
from fp4kit.arguments import flag
from fp4kit.arrays import imports
from fp4kit.cli import output as tables
from fp4kit.cli.command import DIFFERENT, DONE, EXCLUSIVE, Command
from fp4kit.cli.output import Output
from fp4kit.cuda.compiler import compiler_version
from fp4kit.evidence import selftest
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import OPERATIONS, Pool
from fp4kit.evidence.golden import check as agreement
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.live import run as producers
from fp4kit.recipes import ALIASES, ALL_RECIPES, family, recipe, recipes
from fp4kit.recipes.schema import PRODUCERS


def _bar(out: Output, *columns: ProgressColumn) -> Progress:
    """Return a line of progress on stderr, with the time elapsed in the last column."""
    columns = (*columns, TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not out.draws)


def _recipes(args: argparse.Namespace, out: Output) -> int:
    """Run the command recipes: list recipes, or compare them with producers (--check, --live)."""
    if args.long and (args.check or args.versions or args.presets):
        raise ValueError("--long is for the list of recipes, --agreement and --live; leave it out")
    ids = _named(args.ids) or recipes()
    if args.versions:
        return _versions(out, ids)
    if args.presets:
        if args.ids:
            raise ValueError(f"--presets lists all presets, which are no recipes; leave out {', '.join(args.ids)}")
        return _presets(out)
    if args.golden is not None and not args.check:
        raise ValueError("--golden was given without --check; add --check")
    for name in ("seconds", "seed"):
        if getattr(args, name) is not None and not args.live:
            raise ValueError(f"--{name} was given without --live; add --live")
    if args.live:
        return live(out, ids, 10.0 if args.seconds is None else args.seconds, args.seed or 0, args.long)
    if args.check:
        return _check(out, ids, GoldenSet.find() if args.golden is None else GoldenSet.open(args.golden))
    if args.agreement:
        rows = [row for row in agreement.agreement_rows() if not {*ids}.isdisjoint(row[1].split(" = "))]
        out.table(agreement.COLUMNS, rows if args.long else [(a, _first(b, " = ")) for a, b in rows])
        out.document("agreement/1", {"groups": _objects(agreement.COLUMNS, rows)})
        return DONE
    rows = tables.recipe_rows(ids)
    if args.long:
        out.table(tables.RECIPE_COLUMNS, rows)
    else:
        out.table(tables.SHORT_COLUMNS, tables.short_rows(rows))
        out.lines([tables.SOME_DIFFER] if any(" ~ " in row[0] for row in rows) else [])
    found = []
    for id, row in zip(ids, _objects(tables.RECIPE_COLUMNS[1:], [r[1:] for r in rows]), strict=True):
        versions = recipe(id).versions
        found.append({"id": id, **row, "versions": versions and versions._asdict()})
    out.document("recipes/1", {"recipes": found})
    return DONE


def _named(names: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the recipes that ``names`` stand for, without duplicates, in the order of the names."""
    found: dict[str, None] = {}
    for name in names:
        whole = name in ALL_RECIPES or (name in ALIASES and "-" in name)
        found.update(dict.fromkeys((not whole and family(name)) or (recipe(name).id,)))
    return tuple(found)


_MOST_NAMES = 3  # the largest number of recipes in one cell of a table, without --long


def _first(cell: str, separator: str) -> str:
    """Return the first recipes of a cell, and the number of the others."""
    names = cell.split(separator)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return separator.join(names[:_MOST_NAMES]) + more


def _objects(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return the rows of a table as dicts for JSON: column title -> cell."""
    keys = [title.removeprefix("#").replace(" ", "_") for title in columns]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _check(out: Output, ids: tuple[str, ...], golden: GoldenSet) -> int:
    """Compare recipes with recorded outputs of the producers that they reproduce, and print the number of equal
    arrays.
    """
    results = [agreement.check_recipe(name, golden) for name in ids]
    rows = []
    for result in results:
        variants = sorted({f"{row.file}/{row.variant}" for row in ROWS if row.recipe == result.recipe})
        count = f"{result.equal} / {result.compared}" if result.compared else "no recorded outputs"
        rows.append((result.recipe, count, ", ".join(variants)))
    out.table(("recipe", "#arrays equal", "recorded as"), rows)
    out.lines(f"{r.recipe}: {d.key}: {d.differing} of {d.size} differ" for r in results for d in r.differences)
    equal, compared = sum(r.equal for r in results), sum(r.compared for r in results)
    out.lines(filter(None, [golden.note]))
    if compared:
        out.line(f"{equal} of {compared} arrays are equal in every bit; {compared - equal} unequal")
    else:
        derived = not any(recipe(id).evidence for id in ids)
        out.line("no recorded outputs" + (": derived from the producer's source code" if derived else " were found"))
    keys = ("key", "differing", "size")
    checked = [
        {
            "id": r.recipe,
            "equal": r.equal,
            "compared": r.compared,
            "differences": [{key: getattr(d, key) for key in keys} for d in r.differences],
        }
        for r in results
    ]
    out.document("recipes.check/1", {"equal": equal, "compared": compared, "recipes": checked})
    return DONE if compared and equal == compared else DIFFERENT


def _presets(out: Output) -> int:
    """Print the presets of tools, and whether convert follows them."""
    from fp4kit.checkpoint.selection import presets  # imports fp4kit.checkpoint, which other commands do not need

    out.table(presets.PRESET_COLUMNS, [*presets.preset_rows()])
    exclusions = [one._asdict() for one in presets.EXCLUSIONS]
    out.document("recipes.presets/1", {"exclusions": exclusions, "presets": [one._asdict() for one in presets.PRESETS]})
    return DONE


def _versions(out: Output, ids: tuple[str, ...]) -> int:
    """Print which version of each producer is recorded, and which is the newest in the package index."""
    from fp4kit.checkpoint.executors import run_all  # imports fp4kit.checkpoint, which other commands do not need

    names = dict.fromkeys(recipe(id).producer for id in ids)
    with _bar(out, BarColumn(), MofNCompleteColumn()) as bar, ThreadPoolExecutor(4) as pool:
        answers = run_all(pool, deque((producers.version_of, (name,)) for name in names))
        by_name = {one.producer: one for one in bar.track(answers, len(names), description="asking the package index")}
    found = [by_name[name] for name in names]
    out.table(producers.VERSION_COLUMNS, found)
    newer = [f"{PRODUCERS[one.producer].name} {one.newest}" for one in found if one.state == "newer"]
    if newer:
        out.line()
        out.line(f"Newer than recorded: {', '.join(newer)}. To compare them, install them and use --live")
    date = time.strftime("%Y-%m-%d", time.gmtime())
    out.document("recipes.versions/1", {"date": date, "producers": [one._asdict() for one in found]})
    return DONE


def _formats(args: argparse.Namespace, out: Output) -> int:
    """Run the command formats: print the tables of formats, or the values of one format. Return 0."""
    if args.name is not None:
        scaled: dict[str, tuple[Sequence[str], Sequence[str]]] = {}  # format with scales -> its columns and row
        for titles, row in (
            *((tables.BLOCK_COLUMNS, row) for row in tables.block_rows()),
            *((tables.LEVEL_COLUMNS, row) for row in tables.level_rows()),
        ):
            scaled.setdefault(row[0], (titles, row))
        name, named = args.name.upper(), {f.name: f for f in tables.LISTED_FORMATS}
        if name in scaled:
            out.table(scaled[name][0], [scaled[name][1]])
            out.line()
            name = scaled[name][1][1]
        if (found := named.get(name)) is None:
            names = dict.fromkeys((*named, *scaled))
            raise ValueError(f"there is no format {args.name!r}; needs one of {', '.join(names)}")
        rows = tables.value_rows(found)
        out.table(tables.VALUE_COLUMNS, rows)
        out.document("formats.values/1", {"format": found.name, "values": _objects(tables.VALUE_COLUMNS, rows)})
        return DONE
    body: dict[str, Any] = {}
    for key, columns, rows in (
        ("formats", tables.FORMAT_COLUMNS, tables.format_rows()),
        ("block_formats", tables.BLOCK_COLUMNS, tables.block_rows()),
        ("hierarchical_formats", tables.LEVEL_COLUMNS, tables.level_rows()),
    ):
        if body:
            out.line()
        out.table(columns, rows)
        body[key] = _objects(columns, rows)
    out.document("formats/1", body)
    return DONE


def live(out: Output, ids: tuple[str, ...], seconds: float, seed: int, long: bool = False) -> int:
    """Compare every installed producer (a library that quantizes) with fp4kit on random inputs, and print the
    result.

    long: whether to list all recipes that were not run.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds is {seconds:g}; a positive finite number is needed")
    if seed < 0:
        raise ValueError(f"--seed is {seed}; a number of at least 0 is needed")
    results = _run_producers(out, ids, seconds, seed)
    left_out = producers.left_out_rows(results, ids)
    if not long:
        left_out = [(_first(names, ", "), why) for names, why in left_out]
    out.table(producers.COLUMNS, producers.rows(results))
    for title, columns, rows in (
        ("Recipes that differ:", producers.RECIPE_COLUMNS, producers.differing_rows(results)),
        ("Recipes that were not run:", producers.LEFT_OUT_COLUMNS, left_out),
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
    out.line(
        f"compared {arrays:,} arrays of {len(producers.rows(results))} producers bit for bit; {differing:,} differ"
    )
    out.document("recipes.live/1", producers.document(results, ids, seconds, seed))
    return DONE if arrays and not differing else DIFFERENT


def _run_producers(out: Output, ids: tuple[str, ...], seconds: float, seed: int) -> list[producers.ProducerResult]:
    """Run all installed producers one after another, and return their results."""
    results = []
    with _bar(out, SpinnerColumn()) as bar:
        task = bar.add_task("")
        for adapter in producers.adapters():
            bar.update(task, description=adapter.name, completed=0)

            def tick(differing: int, name: str = adapter.name) -> None:
                bar.advance(task)
                bar.update(task, description=f"{name}: {bar.tasks[0].completed:,.0f} arrays, {differing:,} differ")

            results.append(producers.run(adapter, ids, seconds, seed, tick))
            found = results[-1].total
            if found.arrays and not out.draws:  # lines that stay if the command is stopped
                out.line(f"{adapter.name}: {found.arrays:,} arrays, {found.differing:,} differ")
    return results


_LONG_SECONDS = 30  # a case that takes longer gets a line of its own if no progress bar is drawn
_MOST_SHOWN = 20  # the largest number of differences, and of reasons why cases were left out, that are printed


def _selftest(args: argparse.Namespace, out: Output) -> int:
    """Run the command selftest: find the engine and compare it."""
    if not args.seconds > 0:
        raise ValueError(f"--seconds is {args.seconds:g}; a number above 0 is needed")
    golden = GoldenSet.find() if args.golden is None else GoldenSet.open(args.golden)
    if args.host:
        engine, name = fuzz.host_engine()
        if engine is None:
            raise OSError(f"--host: the compiled engine is not available: {name}")
        out.verbatim(f"{name}, fp4kit {__version__}")
        if not args.quick and args.seconds == math.inf:
            out.line("about 10 minutes on two cores; --quick takes at most a minute, and --seconds S ends it sooner")
        return report(engine, golden, args.quick, out, args.seconds)
    try:
        cupy = imports.cupy()
        compiler = ".".join(map(str, compiler_version()))
    except RuntimeError as error:
        raise OSError(f"{error}; selftest --host checks the compiled CPU engine instead") from error
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    out.verbatim(f"{device}, CuPy {cupy.__version__}, NVRTC {compiler}, fp4kit {__version__}")
    return report(selftest.ComparedEngine(cupy), golden, args.quick, out, args.seconds)


def report(
    engine: selftest.ComparedEngine, golden: GoldenSet | None, quick: bool, out: Output, seconds: float = math.inf
) -> int:
    """Compare an engine with the specification, and print a table, the differences and the cases that were left out."""
    start = time.perf_counter()
    tasks, finished = selftest.plan(engine, golden, quick), []
    left = Counter(task.part for task in tasks)
    with _bar(out, BarColumn(), MofNCompleteColumn()) as progress:
        bar = progress.add_task("comparing", total=len(tasks))
        for f in selftest.run(tasks, seconds=seconds):
            finished.append(f)
            progress.update(bar, advance=1, description=f"{f.task.part}: {f.task.name}")
            left[f.task.part] -= 1
            if not out.draws and (not left[f.task.part] or f.seconds > _LONG_SECONDS):
                what = f"{f.task.part}: {f.task.name}" if left[f.task.part] else f.task.part
                so_far = f"{len(finished)} of {len(tasks)} cases after {time.perf_counter() - start:.0f} s"
                out.line(f"{so_far}; finished: {what}")
    out.table(("compared", "#cases", "#values", "#differ", "#left out", "#seconds"), task_rows(finished))
    wrong = [f for f in finished if f.failed]
    failures = [f"{f.task.part}: {f.task.name}: {f.error or f.outcome.first}" for f in wrong]
    left_out = sorted({reason for f in finished for reason in f.outcome.skipped})
    for title, lines in (("differs", failures), ("left out", left_out)):
        out.lines(f"{title}: {line}" for line in lines[:_MOST_SHOWN])
        if len(lines) > _MOST_SHOWN:
            out.line(f"{title}: and {len(lines) - _MOST_SHOWN} more")
    out.lines(filter(None, [golden.note if golden is not None else ""]))
    values, differing = (sum(getattr(f.outcome, name) for f in finished) for name in ("values", "differing"))
    errors = sum(bool(f.error) for f in finished)
    out.line(
        f"{values:,} values compared, {differing:,} differ, {errors} errors; {time.perf_counter() - start:.0f} s in all"
    )
    body = {"cases": len(finished), "values": values, "differing": differing, "errors": errors}
    out.document("selftest/1", {**body, "differs": failures, "left_out": left_out})
    return 1 if wrong or not values else 0


def task_rows(finished: Sequence[selftest.Finished]) -> list[tuple[str, ...]]:
    """Return one table row per part of the selftest."""
    result: list[tuple[str, ...]] = []
    for part in dict.fromkeys(f.task.part for f in finished):
        members = [f for f in finished if f.task.part == part]
        values, differing = (sum(getattr(f.outcome, name) for f in members) for name in ("values", "differing"))
        left_out, seconds = sum(len(f.outcome.skipped) for f in members), sum(f.seconds for f in members)
        result.append((part, str(len(members)), f"{values:,}", f"{differing:,}", str(left_out), f"{seconds:.1f}"))
    return result


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
        device = ""
        where = f"No GPU and no compiled engine ({where}): checking only the invariants of the specification"
    out.line(where)
    chosen: dict[str, Any] = {
        name: tuple(getattr(args, name)) for name in ("recipes", "operations", "units") if getattr(args, name)
    }
    # the options that must be given again to reproduce a case
    options = "".join(f" --{name} {' '.join(values)}" for name, values in chosen.items())
    options += f" --changes {args.changes}" if args.changes != Pool.changes else ""
    if "recipes" in chosen:
        chosen["recipes"] = tuple(recipe(id).id for id in chosen["recipes"])
    report = _run_fuzz(args, engine, device, Pool(changes=args.changes, **chosen), out)
    _print_fuzz(out, report, options)
    out.document("fuzz/1", report.as_json())
    return DIFFERENT if report.total("failed") else DONE


def _run_fuzz(
    args: argparse.Namespace, engine: fuzz.ComparedEngine | None, device: str, pool: Pool, out: Output
) -> fuzz.Report:
    """Run one case (--case) or random cases, in this process or in several (--processes), and return the report."""
    if args.case is not None:
        return fuzz.run_case(engine, args.case, pool=pool)
    with _bar(out, SpinnerColumn()) as bar:
        task = bar.add_task("drawing", calls=0, failed=0)

        def progress(calls: int, failed: int) -> None:
            fields = bar.tasks[0].fields
            calls, failed = fields["calls"] + calls, fields["failed"] + failed
            rate = calls / max(bar.tasks[0].elapsed or 0, 1e-3)
            text = f"{calls:,} calls, {rate:,.0f}/s, {failed} failures"
            bar.update(task, calls=calls, failed=failed, description=text)

        if args.processes == 1:
            return fuzz.run(engine, args.seconds, args.seed, cases=args.cases, pool=pool, progress=progress)
        return fuzz.run_processes(
            device or None, args.processes, args.seconds, args.seed, progress, cases=args.cases, pool=pool
        )


def _print_fuzz(out: Output, report: fuzz.Report, options: str) -> None:
    """Print counts per operation, the reasons why calls were rejected, the failures and the totals."""
    columns = ("operation", *(f"#{name}" for name in fuzz.COUNTED))
    counts = sorted(report.operations.items())
    out.table(columns, [(name, *(f"{found[one]:,}" for one in fuzz.COUNTED)) for name, found in counts])
    out.table(("unit", "#sums"), [(unit, f"{number:,}") for unit, number in report.sums.most_common()])
    reasons = report.reasons.most_common()
    for reason, number in reasons[:_MOST_SHOWN]:
        out.verbatim(f"{number:6} {reason}")
    if len(reasons) > _MOST_SHOWN:
        out.verbatim(f"       and {len(reasons) - _MOST_SHOWN} more reasons")
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


_GOLDEN = (
    "directory of recorded outputs (default: all in a checkout or with fp4kit-evidence installed, else a selection)"
)

COMMANDS = {
    "recipes": Command(
        _recipes,
        "List the recipes, or compare them with the outputs of their producers. Exit codes: 0 done, 1 a"
        " recipe differs or nothing was compared, 2 error.",
        {
            "fp4kit recipes nvfp4": "list the recipes of a format",
            "fp4kit recipes modelopt": "list the recipes of a producer",
            "fp4kit recipes nvfp4-te --check": "compare one recipe with its producer's recorded outputs",
        },
        [
            flag("ids", "recipes to show, by id, format or producer (default: all)", nargs="*", metavar="ID"),
            *(
                flag(name, text, EXCLUSIVE, action="store_true")
                for name, text in (
                    ("--check", "compare with the producers' recorded outputs, array by array"),
                    ("--agreement", "show which recipes give the same bytes on ordinary data"),
                    ("--live", "compare with installed producers on random inputs, bit for bit"),
                    ("--presets", "list the presets of Model-Optimizer and llm-compressor that convert --like follows"),
                    ("--versions", "compare the recorded versions of producers with those in pip's package index"),
                )
            ),
            flag(
                "--long",
                "also show what a recipe equals bit for bit, and its source; with --agreement and --live: all recipes"
                " of a row, instead of the first three",
                action="store_true",
            ),
            flag("--seconds", "with --live: how long each producer runs (default: 10)", type=float, metavar="S"),
            flag("--seed", "with --live: seed of the inputs (default: 0)", type=int, metavar="N"),
            flag("--golden", f"with --check: {_GOLDEN}", metavar="DIR"),
        ],
    ),
    "formats": Command(
        _formats,
        "List the number formats: element formats, scale formats, and block formats, which combine both. Or list the"
        " value of every code of one format.",
        {
            "fp4kit formats": "list element formats, scale formats and block formats",
            "fp4kit formats E6M2": "list the values of a format",
        },
        [
            flag(
                "name",
                "format whose values are listed; for a format with scales, those of its elements",
                nargs="?",
                metavar="FORMAT",
            )
        ],
    ),
    "selftest": Command(
        _selftest,
        "Compare every operation on this machine's GPU, or with --host in the compiled CPU engine, with the"
        " specification, bit for bit. GPU kernels that are not cached are compiled first. Exit codes: 0 all equal,"
        " 1 something differs, 2 an error such as no GPU.",
        {
            "fp4kit selftest --host --quick": "check the compiled CPU engine in at most a minute",
            "fp4kit selftest": "check every operation on this GPU",
        },
        [
            flag("--host", "check the compiled CPU engine, in about 10 minutes on two cores", action="store_true"),
            flag(
                "--quick",
                "check less, which takes at most a minute: eight recipes, smaller tensors, every 61st float32",
                action="store_true",
            ),
            flag(
                "--seconds",
                "begin no case after S seconds (default: no limit)",
                type=float,
                default=math.inf,
                metavar="S",
            ),
            flag("--golden", _GOLDEN, metavar="DIR"),
        ],
    ),
    "fuzz": Command(
        _fuzz,
        "Draw random recipes, shapes, strides, options and data, compare this machine's GPU with the specification"
        " bit for bit, and check invariants on each result. Without a GPU, the compiled CPU engine is compared;"
        " without that, only the invariants of the specification are checked. Exit codes: 0 no failures, 1"
        " failures, 2 an error.",
        {
            "fp4kit fuzz --seconds 60": "compare random calls for a minute",
            "fp4kit fuzz --host --cases 100 --operations quantize": "compare 100 calls of one operation on the CPU",
        },
        [
            flag("--seconds", "how long to run (default: 60)", type=float, default=60.0, metavar="S"),
            flag("--cases", "stop after K cases per process", type=int, metavar="K"),
            flag("--seed", "seed of the random cases (default: 0)", type=int, default=0, metavar="N"),
            flag("--case", "repeat one case: the number that a failure was printed with", type=int, metavar="SEED"),
            flag(
                "--processes",
                "number of processes, with seeds N, N + 1, ... (default: 1)",
                type=int,
                default=1,
                metavar="P",
            ),
            flag("--recipes", "draw only these recipes and their variants", nargs="+", metavar="ID"),
            flag("--operations", f"draw only these operations: {', '.join(OPERATIONS)}", nargs="+", metavar="NAME"),
            flag("--units", "draw only these units of matmul", nargs="+", metavar="ID"),
            flag("--changes", "change at most N fields per variant (default: 3)", type=int, default=3, metavar="N"),
            flag("--host", "compare the CPU engine even if there is a GPU", action="store_true"),
        ],
    ),
}
