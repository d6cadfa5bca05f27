"""Build the tables of recipes and formats as rows of text, for the README, the docs, the command line and the tests."""

from __future__ import annotations

from collections.abc import Iterable

from fp4kit.formats import BLOCK_FORMATS, ELEMENT_FORMATS, ElementFormat
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, RECIPES, Recipe, recipe

RECIPE_COLUMNS = ("recipe", "block", "scale rule", "equal bit for bit to", "versions", "source")
FORMAT_COLUMNS = ("format", "bits", "largest", "smallest normal", "smallest", "NaN", "values")
BLOCK_COLUMNS = ("block format", "element", "scale", "block", "tensor scale", "bits per value")


def block_text(r: Recipe) -> str:
    """Return a recipe's block shape as "rows x columns", such as "1x16".

    For a recipe without blocks, return what shares a scale: "tensor" or "row".
    """
    if r.block is None:
        return {"tensor": "tensor", "row": "row"}[r.tensor_scaling]
    return f"{r.block[0]}x{r.block[1]}"


def rule_text(r: Recipe) -> str:
    """Return the name of the rule by which a recipe computes its scales, with spaces for underscores.

    This is the rule of its block scales if it has blocks, else that of its tensor scale; for a fake quantizer, its own
    rule.
    """
    rule = r.fake_rule if r.fake_only else r.block_rule or r.tensor_rule
    return (rule or "").replace("_", " ") + ", searched" * bool(r.search)


def recipe_rows(ids: Iterable[str] = tuple(RECIPES)) -> list[tuple[str, ...]]:
    """Return the table of recipes, one row per id.

    The cells of a row are: the id with its aliases, block, scale rule, what the recipe equals, versions and source.
    """
    return [(_names(r), block_text(r), rule_text(r), _exact(r), str(r.versions), r.source) for r in map(recipe, ids)]


def _exact(r: Recipe) -> str:
    """Return what a recipe equals bit for bit, followed by where each producer alias of it deviates."""
    others = (f"; {alias.id} {alias.exact}" for alias in PRODUCER_ALIASES.values() if alias.of == r.id)
    return r.exact + " (values only)" * r.fake_only + "".join(others)


def _names(r: Recipe) -> str:
    """Return the recipe's id followed by its aliases, joined with " = "."""
    return " = ".join([r.id, *(alias for alias, target in ALIASES.items() if target == r.id)])


def grouped_recipe_rows() -> list[tuple[str, ...]]:
    """Return the table of recipes with one row for all recipes that agree in rule, equality, versions and source.

    The rows are in the order in which the groups first occur.
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in recipe_rows():
        groups.setdefault(row[2:], []).append(row)
    return [(", ".join(r[0] for r in rows), _distinct(r[1] for r in rows), *shared) for shared, rows in groups.items()]


def _distinct(texts: Iterable[str]) -> str:
    """Return the texts joined with ", ", without repetitions."""
    return ", ".join(dict.fromkeys(texts))


def format_rows() -> list[tuple[str, ...]]:
    """Return the table of element and scale formats, one row per format."""
    return [
        (
            f.name,
            str(f.bits),
            f"{f.max:g}",
            f"{f.min_normal:g}" if not f.is_integer else "-",
            f"{f.min_subnormal:g}",
            _nan(f),
            _values(f),
        )
        for f in ELEMENT_FORMATS
    ]


def _nan(f: ElementFormat) -> str:
    """Return how a format encodes NaN: "-" if it does not, else the NaN code.

    IEEE formats have further NaN codes and infinities, which the text mentions.
    """
    return "-" if f.specials == "none" else hex(f.nan_code) + (" and others, inf" if f.specials == "ieee" else "")


def _values(f: ElementFormat) -> str:
    """Return all magnitudes of a format if there are at most eight, else their number."""
    listed = f.magnitudes
    return " ".join(f"{v:g}" for v in listed) if len(listed) <= 8 else f"{len(listed)} magnitudes"


def block_rows() -> list[tuple[str, ...]]:
    """Return the table of block formats (element format, scale format and block size), one row per format."""
    return [
        (
            b.name,
            b.element.name,
            b.scale.name,
            str(b.block_size),
            "float32" if b.has_tensor_scale else "-",
            f"{b.bits_per_value:g}",
        )
        for b in BLOCK_FORMATS
    ]


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in GitHub's Markdown."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
