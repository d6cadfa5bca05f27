"""Define the commands inspect, identify, diff and apply.
The verdict of identify says what explains most layers of a format; layers that deviate from it are called exceptions.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fp4kit.arguments import flag
from fp4kit.checkpoint.containers.config_entries import CARRIED, DOUBTFUL, REFUSED, UNDERSTOOD, Item, unfulfilled
from fp4kit.checkpoint.containers.configs import with_declaration
from fp4kit.checkpoint.delta import apply, diff, open_patch
from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.findings import unusable_input_scales
from fp4kit.checkpoint.identify.diagnose import Diagnosis
from fp4kit.checkpoint.identify.run import PreparedIdentification, facts_of, problems_of
from fp4kit.checkpoint.identify.verdicts import MOST_RECIPES, CheckpointVerdict, short_text
from fp4kit.checkpoint.model.closed_world import reasons, refused_in
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, quantization_summary
from fp4kit.checkpoint.model.transforms import resolved
from fp4kit.checkpoint.plan.source_layers import NUMBERS, all_doubts
from fp4kit.cli.command import DIFFERENT, DONE, Command, path_flag
from fp4kit.cli.convert import DASK, WORKERS, flags_of
from fp4kit.cli.output import Output
from fp4kit.ops.identify import either
from fp4kit.storage.files import CheckpointError, counted, listed, shown

_MOST_ROWS = 40  # of more tensors, those whose names differ only in numbers share a row
_MOST_NAMES = 2  # if more names than this have one reason, they are counted instead of listed


def _inspect(args: argparse.Namespace, out: Output) -> int:
    """Print what a checkpoint contains."""
    checkpoint = inspect_checkpoint(args.path)
    body = _checkpoint_body(checkpoint)
    out.document("inspect/1", body)
    if out.text:
        _print_checkpoint(out, body, checkpoint.items, args.all)
    return DONE


def _checkpoint_body(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of a checkpoint as a dict for the command's JSON document."""
    declared = with_declaration(checkpoint.config or {}, checkpoint.hf_quant_config)
    return {
        "path": checkpoint.root,
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
        "warnings": [*all_doubts(checkpoint.weights.values(), declared, checkpoint.tensors)],
    }


def _print_checkpoint(out: Output, body: dict[str, Any], items: Iterable[Item], every: bool) -> None:
    """Print the content of a checkpoint: a summary, and then its tensors and layers, alike ones in one row."""
    totals = body["totals"]
    total = decimal(sum(one["bytes"] for one in totals.values()))
    out.line(f"total: {counted(len(body['tensors']), 'tensor')} in {counted(len(body['files']), 'file')}, {total}")
    out.lines(f"{dtype}: {counted(one['tensors'], 'tensor')}, {decimal(one['bytes'])}" for dtype, one in totals.items())
    formats = Counter(layer["format"] for layer in body["layers"])
    out.lines(f"quantized layers: {count} in {shown(name)}" for name, count in formats.items())
    out.lines(f"{key}: {shown(value)}" for key, value in body["quantization"].items())
    out.lines(f"warning: {text}" for text in body["warnings"])
    is_long = len(body["tensors"]) > _MOST_ROWS and not every
    counts = {"#count": "{count}"} if is_long else {}
    tensors, layers = (_alike(body[name]) if is_long else body[name] for name in ("tensors", "layers"))
    sizes = [{**one, "size": decimal(one["bytes"])} for one in tensors]
    out.records(sizes, {"tensor": "{name}", **counts, "dtype": "{dtype}", "shape": "{shape}", "#size": "{size}"})
    out.records(layers, {"quantized layer": "{name}", **counts, "format": "{format}", "shape": "{shape}"})
    if is_long:
        out.line("* stands for numbers, and the size is the sum of a row; --all lists every tensor and layer")
    names: dict[tuple[str, str, str], list[str]] = {}
    for item in items:
        names.setdefault((item.group, item.place, item.why), []).append(item.name)
    order = (REFUSED, DOUBTFUL, UNDERSTOOD, CARRIED)
    rows = sorted(names.items(), key=lambda pair: order.index(pair[0][0]))
    out.table(
        ("read as", "place", "beside the layers", "why"),
        [(group, place, _brief(found), shown(why)) for (group, place, why), found in rows],
    )


def _alike(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record, with their count and the sum of their bytes, for all that differ only in numbers of names."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in records:
        facts = {key: one[key] for key in ("dtype", "format", "shape") if key in one}
        groups[f"{NUMBERS.sub('*', one['name'])} {facts}"].append(one)
    return [
        {
            **alike[0],
            "name": alike[0]["name"] if len(alike) == 1 else NUMBERS.sub("*", alike[0]["name"]),
            "count": len(alike),
            "bytes": sum(one.get("bytes", 0) for one in alike),
        }
        for alike in groups.values()
    ]


def _brief(names: list[str]) -> str:
    """Return a short text for some names."""
    endings = {name.rpartition(".")[2] for name in names}
    if len(names) > _MOST_NAMES and len(endings) == 1:
        return f"{len(names)} *.{shown(endings.pop())}"
    return listed(names, _MOST_NAMES)


def _identify(args: argparse.Namespace, out: Output) -> int:
    """Say which recipe made a checkpoint."""
    if args.source is None:
        return _stored(args, out)
    with cluster(args.dask) as executor:
        prepared = PreparedIdentification(args.path, args.source, args.ignore, args.layers, args.all_rows)
        with out.progress("identifying", prepared.nbytes) as tick:
            verdict = prepared.run(Options(args.workers, executor, progress=tick))
    out.document("identify/1", _verdict_body(verdict))
    out.lines(map(shown, filter(None, [verdict.hint])))
    out.lines(f"PROBLEM: {shown(problem)}" for problem in verdict.problems)
    sentence = verdict.sentence if args.all else verdict.short_sentence
    is_short = len(verdict.recipes) > MOST_RECIPES and not args.all
    out.line(shown(sentence) + "; --all names them" * is_short)
    out.lines([verdict.coverage.sentence] if verdict.coverage and verdict.coverage.sentence else [])
    rows, sets = [], dict[str, str]()  # names of recipes -> what stands for them in the table
    for name, found in [(x.name, x.explanation) for x in verdict.layers] if args.all else verdict.grouped_exceptions:
        text = found.sentence if args.all else short_text(found.sentence, found.recipes or found.nearly)
        if args.all and len(found.recipes) > MOST_RECIPES:
            names = either(found.recipes)
            text = text.replace(names, sets.setdefault(names, f"any of set {len(sets) + 1}"), 1)
        rows.append((shown(name), found.recipe or "-", shown(text)))
    out.table(("layer", "recipe", "verdict"), rows)
    out.lines(f"{name.removeprefix('any of ')}: {shown(names)}" for names, name in sets.items())
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
    refused += unusable_input_scales(checkpoint, checkpoint.layers.values())
    problems, facts = problems_of(checkpoint), list(facts_of(checkpoint))
    body = {
        "refused": refused,
        "problems": [{"text": text, "layers": count} for text, count in problems.items()],
        "facts": [{"what": what, "text": text} for what, text in facts],
    }
    out.document("identify.stored/1", body)
    out.lines(f"PROBLEM: {text}" for text in refused)
    out.lines(f"PROBLEM: {count} sampled layers: {shown(text)}" for text, count in problems.most_common())
    out.lines(f"{shown(what)}: {shown(text)}" for what, text in facts)
    if not checkpoint.layers and not refused:
        out.line("there are no quantized layers, so there is nothing to identify")
    else:
        out.line("not checked: which recipe gives the bytes; add --source SRC with the unquantized model")
    return DIFFERENT if problems or refused or not checkpoint.layers else DONE


def _verdict_body(verdict: CheckpointVerdict) -> dict[str, Any]:
    """Return a verdict as a dict for the command's JSON document."""
    shown_fields = [field.name for field in fields(Diagnosis) if field.repr]
    layers = [
        {"name": layer.name, **{name: getattr(layer.explanation, name) for name in shown_fields}}
        for layer in verdict.layers
    ]
    facts = ("recipes", "mishap", "sentence", "hint", "rules", "unpaired", "moved", "input_scales")
    found = {name: getattr(verdict, name) for name in facts}
    coverage = verdict.coverage
    found["rows"] = None if coverage is None else {"read": coverage.read, "total": coverage.total}
    return {**found, "exceptions": [layer.name for layer in verdict.exceptions], "layers": layers}


def _diff(args: argparse.Namespace, out: Output) -> int:
    """Write a patch, and print the changes of each layer."""
    total = sum(file.size for file in inspect_checkpoint(args.b).files)
    with out.progress("comparing", total) as tick:
        report = diff(args.a, args.b, args.output, tick)
    body = asdict(report)
    out.document("diff/1", body)
    columns = {"#codes that changed": "{codes} of {elements}", "#scales that changed": "{scales} of {scale_bytes}"}
    out.records(body["layers"], {"quantized layer": "{name}", **columns})
    out.line(
        f"wrote {shown(str(report.patch))}, {decimal(report.nbytes)}: {report.changed} files as"
        f" {report.changed_bytes} changed bytes, {report.whole} whole files, {report.unchanged} unchanged"
    )
    return DONE


def _apply(args: argparse.Namespace, out: Output) -> int:
    """Write the new version of a model from the old version and a patch."""
    total = sum(facts.nbytes for facts in open_patch(Path(args.patch)).result.values())
    with out.progress("writing", total) as tick:
        apply(args.a, args.patch, args.destination, args.resume, tick)
    out.document("apply/1", {"destination": args.destination, "bytes": total})
    out.line(f"wrote {shown(args.destination)}, {decimal(total)}; all files have the SHA-256 of the patch")
    return DONE


_OLD = path_flag("a", "A", "old version: a model directory, safetensors file or GGUF file")

COMMANDS = {
    "inspect": Command(
        _inspect,
        "List the tensors and layers of a checkpoint, and say which config keys and metadata fp4kit"
        " understands. Exit codes: 0 done, 2 error.",
        {
            "fp4kit inspect Llama-NVFP4": "list the tensors of a model directory",
            "fp4kit inspect model.gguf --json": "print the list as one JSON document",
        },
        [
            path_flag("path", "PATH", "model directory, .safetensors, .gguf, .onnx or OpenVINO's .xml file"),
            flag("--all", f"list every tensor and layer, also of more than {_MOST_ROWS}", action="store_true"),
        ],
    ),
    "identify": Command(
        _identify,
        "Name the recipe that made each quantized layer of a checkpoint, and what went wrong with its"
        " bytes, such as swapped nibbles. Exit codes: 0 every layer is explained by a recipe, or recognized as the"
        " result of a known method such as GPTQ; 1 a layer is neither, is corrupted, or has no counterpart in the"
        " source, or there is no layer to identify; 2 error.",
        {
            "fp4kit identify Llama-NVFP4 --source Llama": "name the recipe that made a checkpoint of Llama",
            "fp4kit identify Llama-NVFP4 --source Llama --all": "print every layer and every recipe",
            "fp4kit identify Llama-NVFP4 --source Llama --layers '*.mlp.*'": "examine only the MLP layers",
            "fp4kit identify Llama-NVFP4": "report what the checkpoint reveals without its source",
        },
        [
            path_flag("path", "DST", "directory or GGUF file of the quantized model"),
            flag(
                "--source",
                "directory or GGUF file of the unquantized model that DST was made from (default: none. The command"
                " then reports only what names, configs, metadata and scales of DST reveal)",
                metavar="SRC",
            ),
            *flags_of("ignore"),
            flag("--all", "print every layer and every recipe", action="store_true"),
            flag(
                "--layers",
                "identify only the layers of DST whose names match GLOB; repeatable",
                action="append",
                default=[],
                metavar="GLOB",
            ),
            flag(
                "--all-rows",
                "compare all rows (default: all rows if the layers have at most 2^24 weights;"
                " otherwise 256 rows of each larger layer, and all rows if these are not explained)",
                action="store_true",
            ),
            WORKERS._replace(
                help="number of worker processes (default: 1, which is the process of the command itself)", section=""
            ),
            DASK._replace(section=""),
        ],
        hints={"": "; did you mean --source {}?"},
    ),
    "diff": Command(
        _diff,
        "Write a patch file: the bytes that changed between two versions of a model, and the SHA-256 of"
        " every file. Also print, per quantized layer, how many codes and block scales changed. Exit codes: 0 done, 2"
        " error.",
        {"fp4kit diff step100 step101 -o step101.patch": "write the changed bytes, and count the changed codes"},
        [
            _OLD,
            path_flag("b", "B", "new version, of the same kind"),
            flag("--output", "the patch file to write", short=["-o"], type=Path, required=True, metavar="PATCH"),
        ],
        writes=lambda args: args.output,
    ),
    "apply": Command(
        _apply,
        "Write the new version of a model from the old version and a patch that fp4kit diff wrote. The old"
        " and the new files must have the SHA-256 that the patch states. Exit codes: 0 done, 2 error.",
        {
            "fp4kit apply step100 step101.patch step101": "write the new version, and compare the SHA-256 of each file",
        },
        [
            _OLD,
            path_flag("patch", "PATCH", "the patch file"),
            path_flag("destination", "DST", "new directory or file"),
            flag("--resume", "continue the interrupted run that was writing DST", action="store_true"),
        ],
        writes=lambda args: Path(args.destination),
    ),
}
