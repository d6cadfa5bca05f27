"""Define the command inspect: list the tensors and quantized layers of a checkpoint, and what its configs declare."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from rich.filesize import decimal

from fp4kit.checkpoint.containers.config_entries import CARRIED, DOUBTFUL, REFUSED, UNDERSTOOD, Item
from fp4kit.checkpoint.containers.configs import with_declaration
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, quantization_summary
from fp4kit.checkpoint.plan.source_layers import all_doubts
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_path
from fp4kit.cli.render import shape_text
from fp4kit.storage.files import listed, shown

_MOST_NAMES = 2  # if more names than this have one reason, they are counted instead of listed


def register(subparsers: Any) -> None:
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
    out.document("inspect/1", _body(checkpoint))
    if out.text:
        _print(out, checkpoint)
    return 0


def _body(checkpoint: Checkpoint) -> dict[str, Any]:
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


def _print(out: Output, checkpoint: Checkpoint) -> None:
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
