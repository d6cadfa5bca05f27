"""Build the panel of a Recipe: its format in words, its rules, and every field that differs from its default."""

from __future__ import annotations

from dataclasses import fields

from fp4kit.display.panel import Panel
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, Recipe
from fp4kit.recipes.table import is_listed

# The fields that panel() describes in words or in the title, so that _rules leaves them out.
_DESCRIBED = (
    "id",
    "element",
    "scale",
    "block",
    "source",
    "exact",
    "versions",
    "tensor_scaling",
)


def panel(r: Recipe) -> Panel:
    """Return the panel of a recipe: its aliases, formats, rules and sources, and all other fields that are not
    default.
    """
    names = [name for name, target in ALIASES.items() if target == r.id]
    kind = "in the table" if is_listed(r) else "a variant, not in the table"
    facts = [
        ("recipe", f"{kind}, also called {', '.join(names)}" if names else kind),
        ("elements", f"{r.element}, {r.element.bits} bits, up to {r.element.max:g}"),
        ("scales", _scales(r)),
        *_rules(r),
        ("formulas", f"fp4kit.explain(x, {r.id!r}, index) applies them step by step" if is_listed(r) else ""),
        ("exact", r.exact),
        *((alias.id, f"{alias.source}, {alias.exact}") for alias in PRODUCER_ALIASES.values() if alias.of == r.id),
        ("source", r.source),
        *((("versions", str(r.versions)),) if r.versions else ()),
    ]
    return Panel(f"Recipe {r.id}", tuple(facts))


def _scales(r: Recipe) -> str:
    """Return the scales of a recipe as text, such as "E4M3 per 1 x 16 block, float32 per tensor"; "" for none."""
    block = f"{r.block[0]} x {r.block[1]} block" if r.block else "block"
    scales = [f"{r.scale} per {block}"] if r.scale else []
    covered = {
        "none": "",
        "tensor": "float32 per tensor",
        "row": "float32 per row",
        "block": f"float32 per {block}",
    }
    return ", ".join(filter(None, [*scales, covered[r.tensor_scaling]]))


def _rules(r: Recipe) -> list[tuple[str, str]]:
    """Return (name of a field, its value as text) pairs: every rule, and every other field that is not its default."""
    shown = [field for field in fields(r) if field.name not in _DESCRIBED]
    rules = [field.name for field in shown if field.name.endswith("_rule")]
    names = [field.name for field in shown if field.name in rules or getattr(r, field.name) != field.default]
    return [(name.replace("_", " "), str(getattr(r, name))) for name in names if getattr(r, name) is not None]
