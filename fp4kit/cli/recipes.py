"""The commands recipes and formats: tables of what there is, and the check against recorded outputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fp4kit.cli import tables
from fp4kit.evidence import agreement
from fp4kit.evidence.check import check_recipe
from fp4kit.evidence.golden import GoldenSet
from fp4kit.evidence.rows import ROWS
from fp4kit.recipes import recipe, recipes


def register(commands: Any) -> None:
    """Add the commands to the subparsers of fp4kit."""
    listing = commands.add_parser("recipes", help="list the recipes, or check them against recorded outputs", allow_abbrev=False)
    listing.add_argument("ids", nargs="*", metavar="ID", help="recipes to show (default: all)")
    output = listing.add_mutually_exclusive_group()
    output.add_argument("--check", action="store_true", help="compare with the recorded outputs of the producers, array by array")
    output.add_argument("--agreement", action="store_true", help="print which recipes give the same bytes on ordinary data")
    listing.add_argument("--golden", metavar="DIR", help="recorded outputs to check (default: those of the package)")
    listing.set_defaults(func=_recipes)
    commands.add_parser("formats", help="list the number formats", allow_abbrev=False).set_defaults(func=_formats)


def _console() -> Console:
    """Standard output; as wide as a table needs when it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[str, ...] = ()) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _recipes(args: argparse.Namespace) -> int:
    ids = tuple(recipe(name).id for name in args.ids) or recipes()
    if args.golden is not None and not args.check:
        raise ValueError("--golden was given without --check; add --check")
    if args.check:
        return _check(ids, GoldenSet.find() if args.golden is None else GoldenSet.open(args.golden))
    if args.agreement:
        _print_table(agreement.COLUMNS, agreement.agreement_rows())
        return 0
    _print_table(tables.RECIPE_COLUMNS, tables.recipe_rows(ids))
    return 0


def _check(ids: tuple[str, ...], golden: GoldenSet) -> int:
    """Print arrays equal / arrays compared for each recipe; 1 if any is unequal or nothing could be compared."""
    results = [check_recipe(name, golden) for name in ids]
    rows = []
    for result in results:
        variants = sorted({f"{row.file}/{row.variant}" for row in ROWS if row.recipe == result.recipe})
        count = f"{result.equal} / {result.compared}" if result.compared else "no vectors"
        rows.append((result.recipe, count, ", ".join(variants)))
    _print_table(("recipe", "arrays equal", "recorded as"), rows, right=("arrays equal",))
    for result in results:
        for difference in result.differences:
            print(f"{result.recipe}: {difference.key}: {difference.differing} of {difference.size} differ")
    equal, compared = sum(r.equal for r in results), sum(r.compared for r in results)
    print(f"{equal} of {compared} arrays are equal in every bit; {compared - equal} unequal")
    return 0 if compared and equal == compared else 1


def _formats(args: argparse.Namespace) -> int:
    _print_table(tables.FORMAT_COLUMNS, tables.format_rows())
    _print_table(tables.BLOCK_COLUMNS, tables.block_rows())
    return 0
