"""Define the commands diff and apply, which write and apply a patch between two versions of a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fp4kit.checkpoint.delta import PatchReport, apply, diff, open_patch
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command, add_path
from fp4kit.storage.files import shown


def register(subparsers: Any) -> None:
    """Add the commands diff and apply, with their options and the functions that run them, to ``subparsers``."""
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
    out.line(_verdict(report))
    return 0


def _verdict(report: PatchReport) -> str:
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
