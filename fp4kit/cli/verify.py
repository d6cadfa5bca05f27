"""Define the command verify, which reports what is wrong with a checkpoint as a table, as JSON or as an HTML page."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.findings import recorded_activations
from fp4kit.checkpoint.plan.scale_search import RECORDED, ScaleSearch
from fp4kit.checkpoint.verify.integrity import grouped
from fp4kit.checkpoint.verify.report import summary_of, unchecked, write_report
from fp4kit.checkpoint.verify.verify import LayerReport, Verification, VerifyReport, execute, prepare
from fp4kit.cli.conversion_summary import verified_serve_command
from fp4kit.cli.convert import (
    activations_of,
    add_activations,
    add_adapter,
    add_scale_search,
    add_workers,
    devices_of,
    recipes_of,
)
from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_ignore, add_path
from fp4kit.cli.render import shape_text
from fp4kit.storage.files import CheckpointError, listed, shown


def register(subparsers: Any) -> None:
    """Add the command verify, with its options and the function that runs it, to ``subparsers``."""
    parser: Any = add_command(
        subparsers,
        "verify",
        _verify,
        examples=(
            ("fp4kit verify Llama-NVFP4 --source Llama", "compare every byte with the original, quantized again"),
            ("fp4kit verify Llama-NVFP4", "check the files and what engines require"),
            ("fp4kit verify Llama-NVFP4 --source Llama --html report.html", "also write a report with charts"),
        ),
        description="Check the files of a checkpoint against its manifest, and its scales and configs against what"
        " engines require. With --source, quantize the source again and compare every byte.",
        epilog="Exit codes: 0 no errors, but there may be warnings; 1 errors, such as bytes that differ; 2 the"
        " checkpoint cannot be read.",
    )
    parser.hints = {"": "; did you mean --source {}?"}
    add_path(parser, "path", metavar="DST", help="directory or GGUF file of the quantized model")
    parser.add_argument(
        "--source", metavar="SRC", help="compare with this original: the directory or GGUF file DST was made from"
    )
    text = (
        "recipe of the quantized layers (default: the one recorded in DST). PATTERN=RECIPE gives the recipe of the"
        " layers of SRC that match PATTERN, as in convert, and replaces the recorded patterns; repeatable"
    )
    parser.add_argument("--recipe", action="append", metavar="[PATTERN=]RECIPE", help=text)
    add_adapter(parser, "the LoRA adapter that was merged into SRC")
    add_scale_search(parser)
    add_ignore(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report with charts: one HTML file, readable offline"
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="check that vLLM and SGLang can split every layer over N ranks without cutting a block",
    )
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="N of these ranks share the experts, and each of them holds whole experts (--tp defaults to N)",
    )
    add_activations(parser, "compare the stored input scales with those of these activations")
    add_workers(parser)


def _verify(args: argparse.Namespace, out: Output) -> int:
    """Run the command verify."""
    for name in ("recipe", "scale_search", "column_weights", "imatrix"):
        if getattr(args, name) is not None and args.source is None:
            option = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{option}: says how layers were made from a source; add --source SRC")
    has_weights = args.column_weights is not None or args.imatrix is not None
    objective = RECORDED if args.scale_search is None and has_weights else args.scale_search
    search = ScaleSearch.of(objective, args.column_weights, args.imatrix)
    activations = activations_of(args, *recorded_activations(Path(args.path))) if _names_activations(args) else None
    if args.html is not None:
        _check_page(args.html, Path(args.path))
    ranks = {"tp": args.tp, "ep": args.ep}
    with cluster(args.dask) as executor:
        options = Options(args.workers, executor, devices_of(args))
        default, recipes = recipes_of(args.recipe or ())
        prepared = prepare(
            args.path, args.source, default, options, search, args.ignore, activations, recipes, args.adapter, **ranks
        )
        report = _run(prepared, options, out)
    if args.html is not None:
        write_report(report, args.html)
    out.document("verify/1", report.as_data())
    if out.text:
        _print(out, report)
    return DONE if report.clean else DIFFERENT


def _names_activations(args: argparse.Namespace) -> bool:
    """Return whether --activations, --activation-rule or --unseen-experts is given."""
    return bool(args.activations or args.activation_rule or args.unseen_experts)


def _run(prepared: Verification, options: Options, out: Output) -> VerifyReport:
    """Execute a prepared verification with a line of progress, and return the report."""
    with out.progress("verifying", prepared.nbytes) as tick:
        return execute(prepared, Options(options.workers, options.executor, options.devices, progress=tick))


def _check_page(page: Path, model: Path) -> None:
    """Raise CheckpointError if the HTML page cannot be written, or if its path is inside the checkpoint."""
    # A page inside the checkpoint would change it.
    if page.is_dir() or not page.parent.is_dir():
        raise CheckpointError(
            f"--html {shown(str(page))}: cannot be written; a file name in a directory that exists is needed"
        )
    if page.resolve().is_relative_to(model.resolve()):
        raise CheckpointError(
            f"--html {shown(str(page))}: lies inside the checkpoint, which it would change; choose another directory"
        )


def _print(out: Output, report: VerifyReport) -> None:
    """Print a report: the table of layers, the issues, a summary, what was not checked, the next step and the
    verdict.
    """
    columns = ("layer", "format", "#SQNR dB", "#clipped", "#zero blocks", "#flushed", "#differing bytes")
    out.table(columns, [_cells(layer) for layer in report.layers])
    for issue, subjects in grouped(report.issues):
        loader = f"{issue.loader}: " if issue.loader else ""
        out.line(f"{issue.severity}: {loader}{listed(subjects)}: {shown(issue.sentence)}")
    if not report.layers:
        out.line(f"note: {_NO_LAYERS}")
    for line in summary_of(report):
        out.line(line)
    missing = unchecked(report)
    if missing:
        out.line(f"not checked: {'; '.join(missing)}")
    step = _next_step(report)
    if step:
        out.line(f"next: {step}")
    elif report.clean and (command := verified_serve_command(report)):
        out.line(f"serve: {command}")
    out.line(_verdict(report))


_NO_LAYERS = (
    "no quantized layer of a known format was found, so only the files were checked; fp4kit convert quantizes a model"
)


def _next_step(report: VerifyReport) -> str:
    """Return the command to run next, for the line that begins with "next:"; "" if there is none."""
    path = shlex.quote(str(report.path))
    if not report.layers:
        return ""
    if report.source is None:
        return f"fp4kit verify {path} --source SRC"
    names = {layer.name for layer in report.layers}
    if any(layer.differing for layer in report.layers) or any(
        issue.severity == "error" and issue.subject in names for issue in report.issues
    ):
        return f"fp4kit identify {path} --source {shlex.quote(str(report.source))}, which says what made the layers"
    return ""


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """Return the cells of one layer's row in the table of layers; "-" stands for counts that need a source."""
    found = layer.tally
    sqnr = "-" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
    clipped, flushed = (str(n) if found.compared else "-" for n in (found.saturated, found.flushed_blocks))
    name = f"{shown(layer.name)} {shape_text(layer.shape)}"
    differing = str(layer.differing) if layer.compared else "-"
    return name, layer.format, sqnr, clipped, str(found.zero_blocks), flushed, differing


def _verdict(report: VerifyReport) -> str:
    """Return the last line of the output."""
    warnings = len(report.issues) - report.errors
    manifest = {
        "equal": "files match the manifest",
        "differs": "files differ from the manifest",
        "none": "no manifest",
    }
    count = len(report.layers)
    text = f"{count} layer{'s' * (count != 1)}, {manifest[report.manifest]}"
    if report.source is not None:
        differing = sum(layer.differing for layer in report.layers)
        compared = sum(layer.compared for layer in report.layers)
        recipe = (report.recipe or "its format") + (f" with scales {report.scales}" if report.scales else "")
        text += f"; {differing} of {compared} bytes differ from the source encoded with {recipe}"
        text += f"; {len(report.changed)} of {report.copied} copied tensors differ"
    return f"{text}; errors: {report.errors}, warnings: {warnings}"
