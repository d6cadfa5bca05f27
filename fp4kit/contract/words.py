"""Say in words how two settings of contracts differ."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fp4kit.recipes import Recipe
from fp4kit.units import Unit

_PROSE = ("id", "source", "exact", "versions")  # fields of a recipe on which no bit depends
# field of a recipe -> its name in texts
_NAMES = {
    "scale": "scale format",
    "element": "element format",
    "block_rule": "rule of the block scale",
    "tensor_scaling": "tensor scale per",
    "tensor_rule": "rule of the tensor scale",
    "decode_rule": "rule of decoding",
    "fake_rule": "rule of fake_quantize",
    "apply": "factor applied by",
    "amax_nan": "NaN in an amax",
    "four_over_six": "4over6 mode",
    "scale_max": "largest block scale",
    "fast_error": "fast 4over6 errors",
    "flush": "subnormals flushed",
    "round_scaled": "quotients rounded to the dtype of x",
    "search": "scale search",
    "static": "calibrated block amaxes",
    "narrow": "integers without -max - 1",
    "fake_only": "fake quantizer only",
}
_ONLY_DECODING = {"decode_rule", "fake_rule"}
_MANY = 4  # at most this many entries of a list are shown


def shown(value: Any) -> str:
    """Return a setting of a contract as text."""
    if isinstance(value, Recipe | Unit):
        return value.id
    if isinstance(value, tuple):
        parts = [_entry(one) for one in value[:_MANY]]
        more = f" and {len(value) - _MANY} more" if len(value) > _MANY else ""
        return (", ".join(parts) or "none") + more
    return "none" if value is None else str(value)


def difference(a: Any, b: Any) -> str:
    """Return text that says how two unequal settings differ."""
    if isinstance(a, Recipe) and isinstance(b, Recipe):
        return f"{a.id} and {b.id}: {', '.join(recipe_difference(a, b))}"
    if isinstance(a, tuple) and isinstance(b, tuple):
        only_a, only_b = (tuple(x for x in one if x not in other) for one, other in ((a, b), (b, a)))
        variants = [f"{x[0]}: {difference(x[1], y[1])}" for x in only_a for y in only_b if _are_variants(x, y)]
        if variants and len(variants) == len(only_a) == len(only_b):
            return "; ".join(variants)
        if only_a or only_b:
            return f"only the first has {shown(only_a)}; only the second has {shown(only_b)}"
        return "other order"
    if isinstance(a, Unit) and isinstance(b, Unit) and a.id == b.id:
        differing = [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
        return f"{a.id} with other values of {', '.join(differing)}"
    return f"{shown(a)} and {shown(b)}"


def _are_variants(a: Any, b: Any) -> bool:
    """Return whether a and b are (pattern, recipe) pairs with equal patterns and recipes of one id."""
    if isinstance(a, str) or isinstance(b, str) or a[0] != b[0]:
        return False
    return isinstance(a[1], Recipe) and isinstance(b[1], Recipe) and a[1].id == b[1].id


def only_decoding(a: Recipe, b: Recipe) -> bool:
    """Return whether all fields that determine bits are equal in two recipes, except those about decoding."""
    names = {one.name for one in fields(a) if getattr(a, one.name) != getattr(b, one.name)}
    return names <= {*_PROSE, *_ONLY_DECODING}


def recipe_difference(a: Recipe, b: Recipe) -> list[str]:
    """Return texts that say how two recipes differ, for a message."""
    found = [
        f"{_NAMES.get(one.name, one.name.replace('_', ' '))} {_value(a, one.name)} and {_value(b, one.name)}"
        for one in fields(a)
        if one.name not in _PROSE and getattr(a, one.name) != getattr(b, one.name)
    ]
    if not found:
        found = ["equal arithmetic under two names"]
    elif only_decoding(a, b) and not a.fake_only:
        found.append("so codes and scales are equal, and values may differ")
    if a.producer == b.producer and a.versions != b.versions and a.versions and b.versions:
        found.append(f"versions {a.versions} and {b.versions}")
    return found


def _value(r: Recipe, name: str) -> str:
    """Return the value of the field ``name`` of a recipe as text; "none" for None and ""."""
    value = getattr(r, name)
    if name in ("element", "scale"):
        return "none" if value is None else str(value.name)
    return "none" if value in (None, "") else str(value)


def _entry(value: Any) -> str:
    """Return an entry of a list as text: a word, "PATTERN=RECIPE", or a group of names in parentheses."""
    if isinstance(value, str):
        return value
    if len(value) == 2 and (value[1] is None or isinstance(value[1], Recipe)):
        return f"{value[0]}={'unquantized' if value[1] is None else value[1].id}"
    return "(" + " ".join(value) + ")"
