"""Define the command identify: say which recipe made a checkpoint, given the model from which it was made.
The verdict says what explains most layers of a format; layers that deviate from it are called exceptions.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from fp4kit.checkpoint.containers.config_entries import unfulfilled
from fp4kit.checkpoint.executors import Options, cluster
from fp4kit.checkpoint.identify.diagnose import Diagnosis
from fp4kit.checkpoint.identify.run import PreparedIdentification, facts_of, problems_of
from fp4kit.checkpoint.identify.verdicts import MOST_RECIPES, CheckpointVerdict, short_text
from fp4kit.checkpoint.model.closed_world import reasons, refused_in
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.transforms import resolved
from fp4kit.cli.convert import add_worker_count
from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_ignore, add_path
from fp4kit.storage.files import CheckpointError, shown


def register(subparsers: Any) -> None:
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
    add_ignore(parser)
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
    add_worker_count(parser, "number of worker processes (default: 1, which is the process of the command itself)")


def _identify(args: argparse.Namespace, out: Output) -> int:
    """Run the command identify."""
    if args.source is None:
        return _stored(args, out)
    with cluster(args.dask) as executor:
        prepared = PreparedIdentification(args.path, args.source, args.ignore, args.layers, args.all_rows)
        with out.progress("identifying", prepared.nbytes) as tick:
            verdict = prepared.run(Options(args.workers, executor, progress=tick))
    out.document("identify/1", _body(verdict))
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


def _body(verdict: CheckpointVerdict) -> dict[str, Any]:
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
