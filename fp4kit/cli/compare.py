"""Define the command compare: print where two checkpoints differ in configs, metadata, tensors and quantized layers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.compare import CheckpointComparison, LayerDifference, compare_checkpoints
from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_ignore, add_path
from fp4kit.storage.files import shown


def register(subparsers: Any) -> None:
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
    add_ignore(parser)


def _compare(args: argparse.Namespace, out: Output) -> int:
    """Run the command compare. Return 0 if the checkpoints are equal, otherwise 1."""
    total = sum(nbytes for _, nbytes in inspect_checkpoint(args.a).totals.values())
    with out.progress("comparing", total) as tick:
        comparison = compare_checkpoints(args.a, args.b, tick, args.ignore)
    out.document("compare/1", {"a": args.a, "b": args.b, **_body(comparison)})
    if out.text:
        _print(out, comparison)
    return DONE if comparison.equal else DIFFERENT


def _body(comparison: CheckpointComparison) -> dict[str, Any]:
    """Return a comparison as a dict for the command's JSON document, without the paths of the checkpoints."""
    return {"equal": comparison.equal, **asdict(comparison), "refused": [item._asdict() for item in comparison.refused]}


def _print(out: Output, comparison: CheckpointComparison) -> None:
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
    out.line(_verdict(comparison))


def _verdict(comparison: CheckpointComparison) -> str:
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
