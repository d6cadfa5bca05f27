"""Define the command reconcile: give layers that a loader joins into one fused layer a common tensor scale.
For example, a loader joins q, k and v. These layers are called the parts of the fused layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.reconcile import Reconciliation, reconcile
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_ignore, add_path
from fp4kit.storage.files import CheckpointError, shown


def register(subparsers: Any) -> None:
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
    add_ignore(parser)
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
    out.line(_verdict(found, args.dry_run))
    return 1 if args.dry_run and found.repairs else 0


def _verdict(found: Reconciliation, dry: bool) -> str:
    """Return the last line of the output, which counts the repaired layers (or, if ``dry``, the layers to repair)."""
    if not found.repairs:
        return f"{found.groups} fused layers; the parts of each have one tensor scale; nothing to write"
    count = f"{len(found.repairs)} layers, parts of {found.groups} fused layers"
    return f"would rescale {count}" if dry else f"wrote {shown(str(found.destination))}: rescaled {count}"
