"""The panel of a Recipe: the format in words, the rules by name, and every field that is not as usual."""

from __future__ import annotations

from dataclasses import fields

from fp4kit.display.panel import Panel
from fp4kit.recipes import ALIASES, PRODUCER_ALIASES, Recipe
from fp4kit.recipes.table import is_listed

_SHOWN = (
    "id",
    "element",
    "scale",
    "block",
    "source",
    "exact",
    "versions",
    "tensor_scaling",
)  # in words, or in the title


def panel(r: Recipe) -> Panel:
    """What a recipe is: its fields, but for those that have their usual value."""
    names = [name for name, target in ALIASES.items() if target == r.id]
    kind = "in the table" if is_listed(r) else "a variant, not in the table"
    facts = [
        ("recipe", ", ".join([kind, *(f"also called {name}" for name in names)])),
        ("elements", f"{r.element}, {r.element.bits} bits, up to {r.element.max:g}"),
        ("scales", _scales(r)),
        *_rules(r),
        ("exact", r.exact),
        *((alias.id, f"{alias.source}, {alias.exact}") for alias in PRODUCER_ALIASES.values() if alias.of == r.id),
        ("source", r.source),
        *((("versions", str(r.versions)),) if r.versions else ()),
    ]
    return Panel(f"Recipe {r.id}", tuple(facts))


def _scales(r: Recipe) -> str:
    """What shares a scale, from the smallest to the largest."""
    block = f"{r.block[0]} x {r.block[1]} block" if r.block else "block"
    found = [f"{r.scale} for a {block}"] if r.scale else []
    covered = {
        "none": "",
        "tensor": "float32 for the tensor",
        "row": "float32 for a row",
        "block": f"float32 for a {block}",
    }
    return ", ".join(filter(None, [*found, covered[r.tensor_scaling]]))


def _rules(r: Recipe) -> list[tuple[str, str]]:
    """Rules, and what differs from a field's default."""
    shown = [field for field in fields(r) if field.name not in _SHOWN]
    rules = [field.name for field in shown if field.name.endswith("_rule")]
    usual = [field.name for field in shown if field.name in rules or getattr(r, field.name) != field.default]
    return [(name.replace("_", " "), str(getattr(r, name))) for name in usual if getattr(r, name) is not None]
