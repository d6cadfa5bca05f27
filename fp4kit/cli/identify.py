"""Define the command identify: say which recipe made a checkpoint, given the model from which it was made.
The verdict says what explains most layers of a format; layers that deviate from it are called exceptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fp4kit.checkpoint.containers.config_entries import CARRIED, DOUBTFUL, REFUSED, UNDERSTOOD, Item, unfulfilled
from fp4kit.checkpoint.containers.configs import with_declaration
from fp4kit.checkpoint.delta import PatchReport, apply, diff, open_patch
from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.identify.diagnose import Diagnosis
from fp4kit.checkpoint.identify.run import PreparedIdentification, facts_of, problems_of
from fp4kit.checkpoint.identify.verdicts import MOST_RECIPES, CheckpointVerdict, short_text
from fp4kit.checkpoint.model.closed_world import reasons, refused_in
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, quantization_summary
from fp4kit.checkpoint.model.transforms import resolved
from fp4kit.checkpoint.plan.source_layers import all_doubts
from fp4kit.cli.command import DIFFERENT, DONE, add_command, add_path
from fp4kit.cli.convert import DASK, WORKERS, add_flags, flags_of
from fp4kit.cli.output import Output, shape_text
from fp4kit.storage.files import CheckpointError, listed, shown

_MOST_NAMES = 2  # if more names than this have one reason, they are counted instead of listed


def add_inspect(subparsers: Any) -> None:
    """Add the command inspect, with its options and the function that runs it, to ``subparsers``."""
    parser = add_command(
        subparsers,
        "inspect",
        _inspect,
        examples=(
            ("fp4kit inspect Llama-NVFP4", "list the tensors of a model directory"),
            ("fp4kit inspect model.gguf --json", "print the list as one JSON document"),
        ),
        description="List the tensors and layers of a checkpoint, and say which config keys and metadata fp4kit"
        " understands. Exit codes: 0 done, 2 error.",
    )
    add_path(parser, "path", metavar="PATH", help="model directory, .safetensors or .gguf file")


def _inspect(args: argparse.Namespace, out: Output) -> int:
    """Run the command inspect: print what a checkpoint contains. Return 0."""
    checkpoint = inspect_checkpoint(args.path)
    out.document("inspect/1", _checkpoint_body(checkpoint))
    if out.text:
        _print_checkpoint(out, checkpoint)
    return 0


def _checkpoint_body(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of a checkpoint as a dict for the command's JSON document."""
    return {
        "path": checkpoint.path,
        "files": [{"name": file.name, "bytes": file.size, "metadata": file.metadata} for file in checkpoint.files],
        "tensors": [
            {"name": entry.name, "file": file.name, "dtype": entry.dtype, "shape": entry.shape, "bytes": entry.nbytes}
            for file, entry in checkpoint.tensors.values()
        ],
        "layers": [{"name": x.name, "format": x.dtype, "shape": x.shape} for x in checkpoint.layers.values()],
        "unrecognised": checkpoint.unrecognised,
        "items": [item._asdict() for item in checkpoint.items],
        "totals": {dtype: {"tensors": count, "bytes": nbytes} for dtype, (count, nbytes) in checkpoint.totals.items()},
        "quantization": dict(quantization_summary(checkpoint)),
        "warnings": _warnings(checkpoint),
    }


def _warnings(checkpoint: Checkpoint) -> list[str]:
    """Return the warnings about a checkpoint as texts; [] if there are none."""
    declared = with_declaration(checkpoint.config or {}, checkpoint.hf_quant_config)
    return [*all_doubts(checkpoint.weights.values(), declared, checkpoint.tensors)]


def _print_checkpoint(out: Output, checkpoint: Checkpoint) -> None:
    """Print the content of a checkpoint."""
    rows = [(shown(e.name), e.dtype, shape_text(e.shape), str(e.nbytes)) for _, e in checkpoint.tensors.values()]
    out.table(("tensor", "dtype", "shape", "#bytes"), rows)
    layers = [(shown(layer.name), layer.dtype, shape_text(layer.shape)) for layer in checkpoint.layers.values()]
    out.table(("quantized layer", "format", "shape"), layers)
    _print_items(out, checkpoint.items)
    for dtype, (count, nbytes) in checkpoint.totals.items():
        out.line(f"{dtype}: {count} tensors, {decimal(nbytes)}")
    total = sum(nbytes for _, nbytes in checkpoint.totals.values())
    out.line(f"total: {len(checkpoint.tensors)} tensors in {len(checkpoint.files)} file(s), {decimal(total)}")
    for key, value in quantization_summary(checkpoint):
        out.line(f"{key}: {shown(value)}")
    for text in _warnings(checkpoint):
        out.line(f"warning: {text}")


def _print_items(out: Output, items: Iterable[Item]) -> None:
    """Print a table of everything that a checkpoint stores besides its layers; print nothing if there is nothing."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for item in items:
        names.setdefault((item.group, item.place, item.why), []).append(item.name)
    order = (REFUSED, DOUBTFUL, UNDERSTOOD, CARRIED)
    rows = [
        (group, place, _brief(found), shown(why))
        for (group, place, why), found in sorted(names.items(), key=lambda pair: order.index(pair[0][0]))
    ]
    if rows:
        out.table(("read as", "place", "beside the layers", "why"), rows)


def _brief(names: list[str]) -> str:
    """Return a short text for some names."""
    endings = {name.rpartition(".")[2] for name in names}
    if len(names) > _MOST_NAMES and len(endings) == 1:
        return f"{len(names)} *.{shown(endings.pop())}"
    return listed(names, _MOST_NAMES)


def add_identify(subparsers: Any) -> None:
    """Add the command identify, with its options and the function that runs it, to ``subparsers``."""
    parser: Any = add_command(
        subparsers,
        "identify",
        _identify,
        examples=(
            ("fp4kit identify Llama-NVFP4 --source Llama", "name the recipe that made a checkpoint of Llama"),
            ("fp4kit identify Llama-NVFP4 --source Llama --all", "print every layer and every recipe"),
            ("fp4kit identify Llama-NVFP4 --source Llama --layers '*.mlp.*'", "examine only the MLP layers"),
            ("fp4kit identify Llama-NVFP4", "report what the checkpoint reveals without its source"),
        ),
        description="Name the recipe that made each quantized layer of a checkpoint, and what went wrong with its"
        " bytes, such as swapped nibbles. Exit codes: 0 every layer is explained by a recipe, or recognized as the"
        " result of a known method such as GPTQ; 1 a layer is neither, is corrupted, or has no counterpart in the"
        " source; 2 error.",
    )
    parser.hints = {"": "; did you mean --source {}?"}
    add_path(parser, "path", metavar="DST", help="directory or GGUF file of the quantized model")
    text = (
        "directory or GGUF file of the unquantized model that DST was made from (default: none. The command"
        " then reports only what names, configs, metadata and scales of DST reveal)"
    )
    parser.add_argument("--source", metavar="SRC", help=text)
    add_flags(parser, flags_of("ignore"))
    parser.add_argument("--all", action="store_true", help="print every layer and every recipe")
    parser.add_argument(
        "--layers",
        action="append",
        default=[],
        metavar="GLOB",
        help="identify only the layers of DST whose names match GLOB; repeatable",
    )
    parser.add_argument(
        "--all-rows",
        action="store_true",
        help="compare all rows (default: 256 rows of each larger layer, and all rows if these are not explained)",
    )
    text = "number of worker processes (default: 1, which is the process of the command itself)"
    add_flags(parser, (WORKERS._replace(help=text), DASK))


def _identify(args: argparse.Namespace, out: Output) -> int:
    """Run the command identify."""
    if args.source is None:
        return _stored(args, out)
    with cluster(args.dask) as executor:
        prepared = PreparedIdentification(args.path, args.source, args.ignore, args.layers, args.all_rows)
        with out.progress("identifying", prepared.nbytes) as tick:
            verdict = prepared.run(Options(args.workers, executor, progress=tick))
    out.document("identify/1", _verdict_body(verdict))
    for problem in verdict.problems:
        out.line(f"PROBLEM: {shown(problem)}")
    sentence = verdict.sentence if args.all else verdict.short_sentence
    is_short = len(verdict.recipes) > MOST_RECIPES and not args.all
    out.line(shown(sentence) + "; --all names them" * is_short)
    if verdict.hint:
        out.line(shown(verdict.hint))
    if verdict.coverage is not None and verdict.coverage.sentence:
        out.line(verdict.coverage.sentence)
    shown_layers = verdict.layers if args.all else verdict.exceptions
    rows = []
    for layer in shown_layers:
        found = layer.explanation
        text = found.sentence if args.all else short_text(found.sentence, found.recipes)
        rows.append((shown(layer.name), found.recipe or "-", shown(text)))
    out.table(("layer", "recipe", "verdict"), rows)
    if args.all:
        out.table(("layer without a counterpart",), [(shown(name),) for name in verdict.unpaired])
    return DONE if verdict.is_clean else DIFFERENT


_NEED_SOURCE = {"all": "prints", "layers": "limits", "all_rows": "is for", "workers": "is for", "dask": "is for"}


def _stored(args: argparse.Namespace, out: Output) -> int:
    """Print what can be said about a checkpoint without its source: what is odd, and hints at the tool that made it."""
    for name, what in _NEED_SOURCE.items():
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{option}: {what} the verdicts on layers, which need the source; add --source SRC")
    checkpoint = inspect_checkpoint(args.path)
    items = resolved(checkpoint, checkpoint.weights, args.ignore, reads=False).items
    refused = reasons(refused_in(items, args.ignore))
    if not checkpoint.layers:
        refused += filter(None, [unfulfilled(checkpoint.config or {}, checkpoint.hf_quant_config)])
    problems, facts = problems_of(checkpoint), list(facts_of(checkpoint))
    body = {
        "refused": refused,
        "problems": [{"text": text, "layers": count} for text, count in problems.items()],
        "facts": [{"what": what, "text": text} for what, text in facts],
    }
    out.document("identify.stored/1", body)
    for text in refused:
        out.line(f"PROBLEM: {text}")
    for text, count in problems.most_common():
        out.line(f"PROBLEM: {count} sampled layers: {shown(text)}")
    for what, text in facts:
        out.line(f"{shown(what)}: {shown(text)}")
    if not checkpoint.layers and not refused:
        out.line("there are no quantized layers")
    out.line("not checked: which recipe gives the bytes; add --source SRC with the unquantized model")
    return DIFFERENT if problems or refused else DONE


def _verdict_body(verdict: CheckpointVerdict) -> dict[str, Any]:
    """Return a verdict as a dict for the command's JSON document."""
    shown_fields = [field.name for field in fields(Diagnosis) if field.repr]
    layers = [
        {"name": layer.name, **{name: getattr(layer.explanation, name) for name in shown_fields}}
        for layer in verdict.layers
    ]
    facts = ("recipes", "mishap", "sentence", "hint", "rules", "unpaired", "moved")
    found = {name: getattr(verdict, name) for name in facts}
    coverage = verdict.coverage
    found["rows"] = None if coverage is None else {"read": coverage.read, "total": coverage.total}
    return {**found, "exceptions": [layer.name for layer in verdict.exceptions], "layers": layers}


def add_diff(subparsers: Any) -> None:
    """Add the command diff to ``subparsers``."""
    parser = add_command(
        subparsers,
        "diff",
        _diff,
        examples=(
            ("fp4kit diff step100 step101 -o step101.patch", "write the changed bytes, and count the changed codes"),
        ),
        description="Write a patch file: the bytes that changed between two versions of a model, and the SHA-256 of"
        " every file. Also print, per quantized layer, how many codes and block scales changed. Exit codes: 0 done, 2"
        " error.",
        writes=lambda args: args.output,
    )
    add_path(parser, "a", metavar="A", help="old version: a model directory, safetensors file or GGUF file")
    add_path(parser, "b", metavar="B", help="new version, of the same kind")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PATCH", help="the patch file to write")


def add_apply(subparsers: Any) -> None:
    """Add the command apply to ``subparsers``."""
    parser = add_command(
        subparsers,
        "apply",
        _apply,
        examples=(
            (
                "fp4kit apply step100 step101.patch step101",
                "write the new version, and compare the SHA-256 of each file",
            ),
        ),
        description="Write the new version of a model from the old version and a patch that fp4kit diff wrote. The old"
        " and the new files must have the SHA-256 that the patch states. Exit codes: 0 done, 2 error.",
        writes=lambda args: Path(args.destination),
    )
    add_path(parser, "a", metavar="A", help="old version: a model directory, safetensors file or GGUF file")
    add_path(parser, "patch", metavar="PATCH", help="the patch file")
    add_path(parser, "destination", metavar="DST", help="new directory or file")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted run that was writing DST")


def _diff(args: argparse.Namespace, out: Output) -> int:
    """Run the command diff: write the patch, and print the changes of each layer. Return 0."""
    total = sum(file.size for file in inspect_checkpoint(args.b).files)
    with out.progress("comparing", total) as tick:
        report = diff(args.a, args.b, args.output, tick)
    out.document("diff/1", asdict(report))
    rows = [
        (shown(one.name), f"{one.codes} of {one.elements}", f"{one.scales} of {one.scale_bytes}")
        for one in report.layers
    ]
    out.table(("quantized layer", "#codes that changed", "#scales that changed"), rows)
    out.line(_patch_line(report))
    return 0


def _patch_line(report: PatchReport) -> str:
    """Return the last line of diff: the path and size of the patch, and how many files are stored in each way."""
    return (
        f"wrote {shown(str(report.patch))}, {decimal(report.nbytes)}: {report.changed} files as"
        f" {report.changed_bytes} changed bytes, {report.whole} whole files, {report.unchanged} unchanged"
    )


def _apply(args: argparse.Namespace, out: Output) -> int:
    """Run the command apply: write the new version from the old version and the patch. Return 0."""
    total = sum(facts.nbytes for facts in open_patch(Path(args.patch)).result.values())
    with out.progress("writing", total) as tick:
        apply(args.a, args.patch, args.destination, args.resume, tick)
    out.document("apply/1", {"destination": args.destination, "bytes": total})
    out.line(f"wrote {shown(args.destination)}, {decimal(total)}; all files have the SHA-256 of the patch")
    return 0
