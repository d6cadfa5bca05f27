"""Build the tables of recipes and formats as rows of text, for the README, the docs, the command line and tests."""

from __future__ import annotations

from collections.abc import Iterable

from fp4kit.formats import BLOCK_FORMATS, ELEMENT_FORMATS, ElementFormat
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, RECIPES, Recipe, recipe

RECIPE_COLUMNS = ("recipe", "block", "scale rule", "equal bit for bit to", "versions", "source")
FORMAT_COLUMNS = ("format", "bits", "largest", "smallest normal", "smallest", "NaN", "values")
BLOCK_COLUMNS = ("block format", "element", "scale", "block", "tensor scale", "bits per value")


def block_text(r: Recipe) -> str:
    """Return a recipe's block shape as text: the number of rows, "x" and the number of columns, such as "1x16"."""
    if r.block is None:
        return {"tensor": "tensor", "row": "row"}[r.tensor_scaling]
    return f"{r.block[0]}x{r.block[1]}"


def rule_text(r: Recipe) -> str:
    """Return the name of the rule by which a recipe computes its scales, with spaces in place of underscores."""
    rule = r.fake_rule if r.fake_only else r.block_rule or r.tensor_rule
    return (rule or "").replace("_", " ") + ", searched" * bool(r.search)


def recipe_rows(ids: Iterable[str] = tuple(RECIPES)) -> list[tuple[str, ...]]:
    """Return the table of recipes, one row per id."""
    return [(_names(r), block_text(r), rule_text(r), _exact(r), str(r.versions), r.source) for r in map(recipe, ids)]


def _exact(r: Recipe) -> str:
    """Return text that says which producer a recipe equals bit for bit."""
    others = (f"; {alias.id} {alias.exact}" for alias in PRODUCER_ALIASES.values() if alias.of == r.id)
    return r.exact + " (values only)" * r.fake_only + "".join(others)


def _names(r: Recipe) -> str:
    """Return the recipe's id followed by its aliases, joined with " = "."""
    return " = ".join([r.id, *(alias for alias, target in ALIASES.items() if target == r.id)])


def grouped_recipe_rows() -> list[tuple[str, ...]]:
    """Return the table of recipes with one row per group of recipes that differ only in id and block shape."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in recipe_rows():
        groups.setdefault(row[2:], []).append(row)
    return [(", ".join(r[0] for r in rows), _distinct(r[1] for r in rows), *shared) for shared, rows in groups.items()]


def _distinct(texts: Iterable[str]) -> str:
    """Return the texts joined with ", ", in their order and without repetitions."""
    return ", ".join(dict.fromkeys(texts))


def format_rows() -> list[tuple[str, ...]]:
    """Return the table of element and scale formats, one row per format, with the columns FORMAT_COLUMNS."""
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
    """Return the NaN code of a format as hexadecimal text, or "-" if the format has no NaN."""
    return "-" if f.specials == "none" else hex(f.nan_code) + (" and others, inf" if f.specials == "ieee" else "")


def _values(f: ElementFormat) -> str:
    """Return the magnitudes of a format as text, such as "0 0.5 1"; only their number if there are more than eight."""
    listed = f.magnitudes
    return " ".join(f"{v:g}" for v in listed) if len(listed) <= 8 else f"{len(listed)} magnitudes"


def block_rows() -> list[tuple[str, ...]]:
    """Return the table of block formats, one row per format, with the columns BLOCK_COLUMNS."""
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
    """Return a table in GitHub's Markdown as one text, without a final newline."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
