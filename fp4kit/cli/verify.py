"""Define the command verify, which reports what is wrong with a checkpoint as a table, as JSON or as an HTML page."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.findings import recorded_activations
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.plan.scale_search import RECORDED, ScaleSearch
from fp4kit.checkpoint.reconcile import Reconciliation, reconcile
from fp4kit.checkpoint.verify.compare import CheckpointComparison, LayerDifference, compare_checkpoints
from fp4kit.checkpoint.verify.integrity import grouped
from fp4kit.checkpoint.verify.report import summary_of, unchecked, write_report
from fp4kit.checkpoint.verify.verify import LayerReport, Verification, VerifyReport, execute, prepare
from fp4kit.cli.command import DIFFERENT, DONE, add_command, add_path
from fp4kit.cli.conversion_summary import verified_serve_command
from fp4kit.cli.convert import WHERE, activations_of, add_flags, devices_of, flags_of, recipes_of
from fp4kit.cli.output import Output, shape_text
from fp4kit.contract.compare_layer import COLUMNS, Parity
from fp4kit.contract.parity import parity
from fp4kit.storage.files import CheckpointError, listed, shown


def add_verify(subparsers: Any) -> None:
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
    (adapter,) = flags_of("adapter")
    add_flags(
        parser, (adapter._replace(help="the LoRA adapter that was merged into SRC"), *flags_of("search", "ignore"))
    )
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
    files, *others = flags_of("activations")
    text = files.help.replace(
        "write an input scale per layer", "compare the stored input scales with those of these activations"
    )
    add_flags(parser.add_argument_group(files.section), (files._replace(help=text), *others))
    add_flags(parser, WHERE)


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
        report = _run_verification(prepared, options, out)
    if args.html is not None:
        write_report(report, args.html)
    out.document("verify/1", report.as_data())
    if out.text:
        _print_report(out, report)
    return DONE if report.clean else DIFFERENT


def _names_activations(args: argparse.Namespace) -> bool:
    """Return whether --activations, --activation-rule or --unseen-experts is given."""
    return bool(args.activations or args.activation_rule or args.unseen_experts)


def _run_verification(prepared: Verification, options: Options, out: Output) -> VerifyReport:
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


def _print_report(out: Output, report: VerifyReport) -> None:
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


def add_compare(subparsers: Any) -> None:
    """Add the command compare, with its options and the function that runs it, to ``subparsers``."""
    parser = add_command(
        subparsers,
        "compare",
        _compare,
        examples=(
            ("fp4kit compare Llama-NVFP4 Llama-other", "show where two quantized models differ"),
            ("fp4kit compare Llama Llama-NVFP4", "show what quantization changed"),
        ),
        description="Compare the configs, metadata, tensors and quantized layers of two checkpoints. Layers of a"
        " model directory and a GGUF file are paired by llama.cpp's names. Exit codes: 0 equal, 1 different, 2 error.",
    )
    add_path(parser, "a", metavar="A", help="model directory, .safetensors or .gguf file, such as the original of B")
    add_path(parser, "b", metavar="B", help="the model directory, .safetensors or .gguf file to compare with A")
    add_flags(parser, flags_of("ignore"))


def _compare(args: argparse.Namespace, out: Output) -> int:
    """Run the command compare. Return 0 if the checkpoints are equal, otherwise 1."""
    total = sum(nbytes for _, nbytes in inspect_checkpoint(args.a).totals.values())
    with out.progress("comparing", total) as tick:
        comparison = compare_checkpoints(args.a, args.b, tick, args.ignore)
    out.document("compare/1", {"a": args.a, "b": args.b, **_comparison_body(comparison)})
    if out.text:
        _print_comparison(out, comparison)
    return DONE if comparison.equal else DIFFERENT


def _comparison_body(comparison: CheckpointComparison) -> dict[str, Any]:
    """Return a comparison as a dict for the command's JSON document, without the paths of the checkpoints."""
    return {"equal": comparison.equal, **asdict(comparison), "refused": [item._asdict() for item in comparison.refused]}


def _print_comparison(out: Output, comparison: CheckpointComparison) -> None:
    """Print a comparison: tables of config entries, tensors and layers that differ, then the verdict."""
    rows = [(shown(f"{d.place}: {d.key}" if d.key else d.place), d.kind, shown(d.detail)) for d in comparison.configs]
    out.table(("config", "difference", "detail"), rows)
    # If a layer is quantized in only one checkpoint, all of its tensors differ. List the layer instead of its tensors.
    quantized_in_one = [layer for layer in comparison.layers if layer.codes is None]
    parts = {name for layer in quantized_in_one for name in layer.tensors}
    listed = [d for d in comparison.tensors if d.name not in parts]
    out.table(("tensor", "difference", "detail"), [(shown(d.name), d.kind, d.detail) for d in listed])
    layers = [(shown(layer.name), *_layer_cells(layer)) for layer in comparison.layers if layer.codes is not None]
    out.table(("quantized layer", "#codes", "#scales", "#values", "tensor scales", "#SQNR dB"), layers)
    cells = [(shown(layer.name), str(layer.elements), f"{layer.sqnr_db:.2f}") for layer in quantized_in_one]
    out.table(("layer quantized in one", "#values", "#SQNR dB"), cells)
    if len(listed) < len(comparison.tensors):
        count = len(quantized_in_one)
        out.line(
            f"not listed: {len(comparison.tensors) - len(listed)} tensors of the {count} layer{'s' * (count != 1)} that"
            " only one checkpoint has quantized"
        )
    for item in comparison.refused:
        out.line(f"not decoded, because of {shown(item.name)}: {shown(item.why)}")
    out.line(_comparison_verdict(comparison))


def _comparison_verdict(comparison: CheckpointComparison) -> str:
    """Return the last line of the output: how many tensors are the same, and how many differ."""
    same = f"{comparison.same} tensors are the same"
    if comparison.equal:
        return f"{same}, and so are configs and metadata; equal"
    configs = f"{len(comparison.configs)} differ" if comparison.configs else "all the same"
    return f"{same}; {len(comparison.tensors)} differ; entries of configs and metadata: {configs}"


def _layer_cells(layer: LayerDifference) -> tuple[str, str, str, str, str]:
    """Return the cells of one layer's row in the table, without its name, for a layer that both checkpoints
    quantize.
    """
    a, b = layer.tensor_scales
    scales = "same" if a == b else f"{a} and {b}"
    return f"{layer.codes} of {layer.elements}", str(layer.scales), str(layer.values), scales, f"{layer.sqnr_db:.2f}"


_KINDS = "contract (.json), model directory, .safetensors or .gguf file"


def add_parity(subparsers: Any) -> None:
    """Add the command parity, with its options and the function that runs it, to ``subparsers``."""
    parser: Any = add_command(
        subparsers,
        "parity",
        _parity,
        examples=(
            ("fp4kit parity train.json Llama-NVFP4 --weights Llama", "compare a trainer's contract with a checkpoint"),
            ("fp4kit parity train.json rollout.json", "compare two contracts on random numbers"),
            ("fp4kit parity train-logits.safetensors rollout-logits.safetensors", "compare logits bit by bit"),
        ),
        description="Compare codes, scales, values and products of two sides, layer by layer, and the values of other"
        " tensors, such as norms and biases, if both sides have them. If they differ, print"
        " the first step of the arithmetic that differs, the number of differences, one element step by step, and the"
        " setting that would make the sides equal. fp4kit convert writes a contract into every model directory. Exit"
        " codes: 0 everything that was compared is equal in every bit; 1 something differs, or a layer is on one"
        " side only; 2 an error.",
    )
    add_path(parser, "train", metavar="TRAIN", help=f"the side of the trainer: {_KINDS}")
    add_path(parser, "rollout", metavar="ROLLOUT", help=f"the side of the rollout engine: {_KINDS}")
    text = (
        "the unquantized model. Contracts are applied to it, and it shows at which step of the arithmetic bytes begin"
        " to differ (default: random numbers if both sides are contracts, otherwise none)"
    )
    parser.add_argument("--weights", metavar="SRC", help=text)
    text = "file with the inputs of each layer, (tokens, K), for activations and products (default: random numbers)"
    parser.add_argument("--inputs", metavar="FILE", help=text)
    text = "file with keys and values, (tokens, heads, head_dim), for KV cache recipes and layouts (default: random)"
    parser.add_argument("--kv", metavar="FILE", help=text)
    text = "elements per layer to compare, in evenly spaced rows (default: %(default)s)"
    parser.add_argument("--elements", type=int, default=1 << 18, metavar="N", help=text)
    parser.add_argument("--layers", type=int, metavar="N", help="compare only N evenly spaced layers (default: all)")
    text = "start no new layer or other tensor after S seconds, and say what was left out (default: no limit)"
    parser.add_argument("--seconds", type=float, metavar="S", help=text)


def _parity(args: argparse.Namespace, out: Output) -> int:
    """Run the command parity."""
    names = ("weights", "inputs", "kv", "elements", "layers", "seconds")
    try:
        found = parity(args.train, args.rollout, **{name: getattr(args, name) for name in names})
    except TypeError as error:
        raise CheckpointError(str(error)) from None
    out.document("parity/1", {"train": args.train, "rollout": args.rollout, **_parity_body(found)})
    out.line(found.verdict)
    out.table(tuple(COLUMNS), [tuple(map(shown, row)) for row in found.rows()])
    for layer in found.examples:
        for line in layer.lines:
            out.line(shown(line))
        if layer.worked is not None:
            out.verbatim(str(layer.worked))
    for title, texts in found.remarks:
        for text in texts:
            out.line(f"{title}: {shown(text)}")
    return DONE if found.equal else DIFFERENT


def _parity_body(found: Parity) -> dict[str, Any]:
    """Return a result of fp4kit.parity as a dict for the command's JSON document."""
    layers = [
        {**asdict(layer), "worked": None if layer.worked is None else str(layer.worked).splitlines()}
        for layer in found.layers
    ]
    contracts = None if found.contracts is None else asdict(found.contracts)
    facts = {name: getattr(found, name) for name in ("equal", "verdict", "sampled", "missing", "exclusions", "notes")}
    return {**facts, "contracts": contracts, "layers": layers}


def add_reconcile(subparsers: Any) -> None:
    """Add the command reconcile, with its options and the function that runs it, to ``subparsers``."""
    parser = add_command(
        subparsers,
        "reconcile",
        _reconcile,
        examples=(
            ("fp4kit reconcile --dry-run Llama-NVFP4", "print which layers would change"),
            ("fp4kit reconcile Llama-NVFP4 Llama-repaired", "write the repaired model"),
        ),
        description="Repair an NVFP4 checkpoint in which the parts of a fused layer (q/k/v, gate/up) have different"
        " tensor scales: give all parts the largest of these scales, and change their block scales accordingly.",
        writes=lambda args: Path(args.destination) if args.destination else None,
        usage="fp4kit reconcile SRC DST\n       fp4kit reconcile --dry-run SRC",
    )
    add_path(parser, "source", metavar="SRC", help="directory of the quantized model")
    add_path(parser, "destination", nargs="?", metavar="DST", help="new directory; written only if something changes")
    add_flags(parser, flags_of("ignore"))
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and write nothing")


def _reconcile(args: argparse.Namespace, out: Output) -> int:
    """Run the command reconcile."""
    if args.dry_run == (args.destination is not None):
        got = "--dry-run and DST" if args.dry_run else "neither DST nor --dry-run"
        raise CheckpointError(f"got {got}; give SRC and DST to write, or --dry-run and SRC to write nothing")
    total = sum(nbytes for _, nbytes in inspect_checkpoint(args.source).totals.values())
    with out.progress("writing", total) as tick:
        found = reconcile(args.source, args.destination, tick, args.ignore)
    out.document("reconcile/1", {**vars(found), "repairs": [vars(repair) for repair in found.repairs]})
    rows = [
        (shown(r.name), f"{r.before:.6g}", f"{r.after:.6g}", str(r.changed), str(r.underflow), f"{r.sqnr_db:.2f}")
        for r in found.repairs
    ]
    out.table(("layer", "#tensor scale", "#new one", "#scales changed", "#underflow", "#SQNR dB"), rows)
    out.line(_reconcile_verdict(found, args.dry_run))
    return 1 if args.dry_run and found.repairs else 0


def _reconcile_verdict(found: Reconciliation, dry: bool) -> str:
    """Return the last line of the output, which counts the repaired layers (or, if ``dry``, the layers to repair)."""
    if not found.repairs:
        return f"{found.groups} fused layers; the parts of each have one tensor scale; nothing to write"
    count = f"{len(found.repairs)} layers, parts of {found.groups} fused layers"
    return f"would rescale {count}" if dry else f"wrote {shown(str(found.destination))}: rescaled {count}"
