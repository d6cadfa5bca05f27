"""Define the command parity: check that a trainer and a rollout engine compute with equal bits."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_path
from fp4kit.contract.compare_layer import COLUMNS, Parity
from fp4kit.contract.parity import parity
from fp4kit.storage.files import CheckpointError, shown

_KINDS = "contract (.json), model directory, .safetensors or .gguf file"


def register(subparsers: Any) -> None:
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
    out.document("parity/1", {"train": args.train, "rollout": args.rollout, **_body(found)})
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


def _body(found: Parity) -> dict[str, Any]:
    """Return a result of fp4kit.parity as a dict for the command's JSON document."""
    layers = [
        {**asdict(layer), "worked": None if layer.worked is None else str(layer.worked).splitlines()}
        for layer in found.layers
    ]
    contracts = None if found.contracts is None else asdict(found.contracts)
    facts = {name: getattr(found, name) for name in ("equal", "verdict", "sampled", "missing", "exclusions", "notes")}
    return {**facts, "contracts": contracts, "layers": layers}
