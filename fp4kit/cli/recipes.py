"""Define the commands recipes and formats, which list recipes and number formats.
The command recipes also compares recipes with producers (the libraries that they reproduce): with their recorded
outputs, or with installed versions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fp4kit.cli import tables
from fp4kit.cli.guard import DIFFERENT, DONE
from fp4kit.cli.output import Output
from fp4kit.cli.parser import add_command
from fp4kit.evidence.golden import check as agreement
from fp4kit.evidence.golden.check import GoldenResult, check_recipe
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.recipes import ALIASES, RECIPES, family, recipe, recipes


def register(commands: Any) -> None:
    """Add the commands recipes and formats, with their options and the functions that run them, to ``commands``."""
    listing = add_command(
        commands,
        "recipes",
        _recipes,
        examples=(
            ("fp4kit recipes nvfp4", "list the recipes of a format"),
            ("fp4kit recipes modelopt", "list the recipes of a producer"),
            ("fp4kit recipes nvfp4-te --check", "compare one recipe with its producer's recorded outputs"),
        ),
        description="List the recipes, or compare them with the outputs of their producers. Exit codes: 0 done, 1 a"
        " recipe differs or nothing was compared, 2 error.",
    )
    listing.add_argument(
        "ids", nargs="*", metavar="ID", help="recipes to show, by id, format or producer (default: all)"
    )
    what = listing.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="compare with the producers' recorded outputs, array by array"
    )
    what.add_argument(
        "--agreement", action="store_true", help="show which recipes give the same bytes on ordinary data"
    )
    what.add_argument(
        "--live", action="store_true", help="compare with installed producers on random inputs, bit for bit"
    )
    listing.add_argument(
        "--seconds", type=float, metavar="S", help="with --live: how long each producer runs (default: 10)"
    )
    listing.add_argument("--seed", type=int, metavar="N", help="with --live: seed of the inputs (default: 0)")
    text = "with --check: directory of recorded outputs (default: those of the package)"
    listing.add_argument("--golden", metavar="DIR", help=text)
    example = ("fp4kit formats", "list element formats, scale formats and block formats")
    text = "List the number formats: element formats, scale formats, and block formats, which combine both."
    add_command(commands, "formats", _formats, examples=(example,), description=text)


def _recipes(args: argparse.Namespace, out: Output) -> int:
    """Run the command recipes: list recipes, or compare them with producers (--check, --live)."""
    ids = _named(args.ids, families=not (args.check or args.live)) or recipes()
    if args.golden is not None and not args.check:
        raise ValueError("--golden was given without --check; add --check")
    for name in ("seconds", "seed"):
        if getattr(args, name) is not None and not args.live:
            raise ValueError(f"--{name} was given without --live; add --live")
    if args.live:
        from fp4kit.cli.live import live  # imported only here, because rich's progress bars take a while to import

        return live(out, ids, 10.0 if args.seconds is None else args.seconds, args.seed or 0)
    if args.check:
        return _check(out, ids, GoldenSet.find() if args.golden is None else GoldenSet.open(args.golden))
    if args.agreement:
        rows = agreement.agreement_rows()
        out.table(agreement.COLUMNS, rows)
        out.document("agreement/1", {"groups": _objects(agreement.COLUMNS, rows)})
        return DONE
    rows = tables.recipe_rows(ids)
    out.table(tables.RECIPE_COLUMNS, rows)
    listed = _objects(tables.RECIPE_COLUMNS[1:], [r[1:] for r in rows])
    out.document("recipes/1", {"recipes": [_listed(id, row) for id, row in zip(ids, listed, strict=True)]})
    return DONE


def _named(names: Sequence[str], families: bool) -> tuple[str, ...]:
    """Return the ids of the recipes that ``names`` stand for, without duplicates, in the order of the names."""
    found: dict[str, None] = {}
    for name in names:
        whole = name in RECIPES or (name in ALIASES and "-" in name)
        found.update(dict.fromkeys((families and not whole and family(name)) or (recipe(name).id,)))
    return tuple(found)


def _listed(id: str, row: dict[str, str]) -> dict[str, Any]:
    """Return a recipe as a dict for JSON: its id, the cells of its row, and its producer's versions (a dict or
    None).
    """
    versions = recipe(id).versions
    return {"id": id, **row, "versions": versions and versions._asdict()}


def _objects(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return the rows of a table as dicts for JSON: column title -> cell."""
    keys = [title.removeprefix("#").replace(" ", "_") for title in columns]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _check(out: Output, ids: tuple[str, ...], golden: GoldenSet) -> int:
    """Compare recipes with recorded outputs of the producers that they reproduce, and print the number of equal
    arrays.
    """
    results = [check_recipe(name, golden) for name in ids]
    rows = []
    for result in results:
        variants = sorted({f"{row.file}/{row.variant}" for row in ROWS if row.recipe == result.recipe})
        count = f"{result.equal} / {result.compared}" if result.compared else "no vectors"
        rows.append((result.recipe, count, ", ".join(variants)))
    out.table(("recipe", "#arrays equal", "recorded as"), rows)
    for result in results:
        for difference in result.differences:
            out.line(f"{result.recipe}: {difference.key}: {difference.differing} of {difference.size} differ")
    equal, compared = sum(r.equal for r in results), sum(r.compared for r in results)
    out.line(f"{equal} of {compared} arrays are equal in every bit; {compared - equal} unequal")
    checked = [
        {"id": r.recipe, "equal": r.equal, "compared": r.compared, "differences": _differences(r)} for r in results
    ]
    out.document("recipes.check/1", {"equal": equal, "compared": compared, "recipes": checked})
    return DONE if compared and equal == compared else DIFFERENT


def _differences(result: GoldenResult) -> list[dict[str, Any]]:
    """Return one dict per array that differs from the recorded output, for JSON; [] if all are equal."""
    return [{"key": d.key, "differing": d.differing, "size": d.size} for d in result.differences]


def _formats(args: argparse.Namespace, out: Output) -> int:
    """Run the command formats: print the tables of number formats and block formats. Return 0."""
    formats, blocks = tables.format_rows(), tables.block_rows()
    out.table(tables.FORMAT_COLUMNS, formats)
    out.line()
    out.table(tables.BLOCK_COLUMNS, blocks)
    body = {
        "formats": _objects(tables.FORMAT_COLUMNS, formats),
        "block_formats": _objects(tables.BLOCK_COLUMNS, blocks),
    }
    out.document("formats/1", body)
    return DONE
