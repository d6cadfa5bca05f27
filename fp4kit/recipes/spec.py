"""A recipe as a string and back: the id of a recipe of the table, JSON of all fields of a variant."""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from functools import lru_cache
from typing import Any

from fp4kit.formats import ELEMENT_FORMATS, ElementFormat
from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import RECIPES
from fp4kit.recipes.table import recipe as find_recipe

_FORMATS = {fmt.name: fmt for fmt in ELEMENT_FORMATS}
_FIELDS = tuple(field.name for field in fields(Recipe))


@lru_cache(256)
def to_spec(recipe: str | Recipe) -> str:
    """A string that from_spec makes the recipe of: its id, or one line of JSON with every field of a recipe not in the table.

    Equal recipes have equal strings, in any process. Raises what fp4kit.recipe raises.

    >>> to_spec("mxfp4")
    'mxfp4-ocp'
    """
    r = find_recipe(recipe)
    if RECIPES.get(r.id) == r:
        return r.id
    return json.dumps({name: _plain(getattr(r, name)) for name in _FIELDS}, separators=(",", ":"))


@lru_cache(256)
def from_spec(spec: str) -> Recipe:
    """The recipe of a string of to_spec; an id or alias, too.

    Raises ValueError for an unknown id, for JSON that does not hold exactly the fields of a Recipe, and for what Recipe refuses;
    TypeError for a field of another type.

    >>> from dataclasses import replace
    >>> variant = replace(find_recipe("mxfp4-ocp"), block=(1, 16))
    >>> from_spec(to_spec(variant)) == variant
    True
    """
    if not spec.startswith("{"):
        return find_recipe(spec)
    try:
        values = json.loads(spec)
    except json.JSONDecodeError as error:
        raise ValueError(f"from_spec: {spec!r} is no JSON ({error}); needs an id, or what to_spec gives") from None
    if set(values) != set(_FIELDS):
        found = sorted(set(values) ^ set(_FIELDS))
        raise ValueError(f"from_spec: {', '.join(found)} missing or unknown; needs the fields of a Recipe, as to_spec gives them")
    return Recipe(**{name: _format(value) if name in ("element", "scale") else value for name, value in values.items()})


def _plain(value: Any) -> Any:
    """A field as JSON has it: a format by its name where it is one of fp4kit.formats, else by its fields."""
    if not isinstance(value, ElementFormat):
        return value
    return value.name if _FORMATS.get(value.name) == value else list(astuple(value))


def _format(value: Any) -> Any:
    """A format of its name or its fields; None stays."""
    if isinstance(value, list):
        return ElementFormat(*value)
    if value is not None and value not in _FORMATS:
        raise ValueError(f"from_spec: no element format is called {value!r}; needs one of {', '.join(_FORMATS)}, or its fields")
    return None if value is None else _FORMATS[value]
