"""The command reconcile: one tensor scale for the parts of every layer that loaders fuse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.model.inspect import open_checkpoint
from fp4kit.checkpoint.verify.reconcile import Reconciliation, reconcile
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_path
from fp4kit.storage.errors import CheckpointError, shown


def register(subparsers: Any) -> None:
    """Add the command."""
    text = "repair an NVFP4 checkpoint whose fused layers (q/k/v, gate/up) disagree in their tensor scales"
    parser = add_command(
        subparsers,
        "reconcile",
        _reconcile,
        text,
        writes=lambda args: Path(args.destination) if args.destination else None,
        usage="fp4kit reconcile SRC DST\n       fp4kit reconcile --dry-run SRC",
    )
    add_path(parser, "source", metavar="SRC", help="directory of the quantized model")
    add_path(parser, "destination", nargs="?", metavar="DST", help="new directory to write, if something has to change")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and write nothing")


def _reconcile(args: argparse.Namespace, out: Output) -> int:
    if args.dry_run == (args.destination is not None):
        raise CheckpointError("either SRC and DST are needed, or --dry-run and SRC")
    total = sum(nbytes for _, nbytes in open_checkpoint(args.source).totals.values())
    with out.progress("writing", total) as tick:
        found = reconcile(args.source, args.destination, tick)
    out.document("reconcile/1", {**vars(found), "repairs": [vars(repair) for repair in found.repairs]})
    rows = [
        (shown(r.name), f"{r.before:.6g}", f"{r.after:.6g}", str(r.changed), str(r.underflow), f"{r.sqnr_db:.2f}")
        for r in found.repairs
    ]
    out.table(("layer", "#tensor scale", "#new one", "#scales changed", "#underflow", "#SQNR dB"), rows)
    out.line(_verdict(found, args.dry_run))
    return 1 if args.dry_run and found.repairs else 0


def _verdict(found: Reconciliation, dry: bool) -> str:
    if not found.repairs:
        return f"{found.groups} fused layers, and the parts of each agree; nothing to write"
    what = "would get" if dry else f"wrote {shown(str(found.destination))}:"
    return f"{what} {len(found.repairs)} layers with another tensor scale, of {found.groups} fused ones"
