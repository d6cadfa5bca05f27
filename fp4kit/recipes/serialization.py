"""Convert a recipe to JSON data or to a string and back: the id of a recipe in the table, or all fields of a variant.

Files that fp4kit saves contain this data. from_data checks all of the data, because a file may be untrusted.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from fp4kit.formats import ELEMENT_FORMATS, IF4, MX4, Codebook, ElementFormat
from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import is_listed
from fp4kit.recipes.table import recipe as find_recipe

_FORMATS = {fmt.name: fmt for fmt in (*ELEMENT_FORMATS, MX4, IF4)}


def as_data(r: Recipe) -> str | dict[str, Any]:
    """Return a recipe as JSON data: its id if the recipe is in the table, otherwise {field: value}."""
    if is_listed(r):
        return r.id
    return {field.name: _field_data(getattr(r, field.name)) for field in fields(r)}


def from_data(data: Any) -> Recipe:
    """Return the Recipe that JSON data describes: the inverse of as_data, equal in every field."""
    if isinstance(data, str):
        return find_recipe(data)
    values = _checked(data, Recipe)
    for name in ("element", "scale"):
        values[name] = _format(values[name])
    if isinstance(values["block"], list):
        values["block"] = tuple(values["block"])
    return Recipe(**values)


def _field_data(value: Any) -> Any:
    """Return the value of a field of a Recipe as JSON data."""
    if isinstance(value, ElementFormat):
        if _FORMATS.get(value.name) == value:
            return value.name
        return {f.name: _field_data(getattr(value, f.name)) for f in fields(value) if f.init}
    return list(value) if isinstance(value, tuple) else value


def _format(data: Any) -> Any:
    """Return the ElementFormat that data describes: the name of a standard format, or a dict of fields."""
    if isinstance(data, str):
        if data not in _FORMATS:
            raise ValueError(
                f"Recipe: no format has the name {data!r}; needs one of {', '.join(_FORMATS)}, or an object of fields"
            )
        return _FORMATS[data]
    if data is None:
        return None
    kind = Codebook if isinstance(data, dict) and "table" in data else ElementFormat
    return kind(**_checked(data, kind))


def _checked(data: Any, kind: type) -> dict[str, Any]:
    """Return a copy of `data`, a dict of keyword arguments for the dataclass `kind`, after checking its names."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__}: {data!r} is not an object; needs an object of fields")
    is_required = {field.name: field.default is MISSING for field in fields(kind) if field.init}
    unknown = [name for name in data if name not in is_required]
    if unknown:
        raise ValueError(f"{kind.__name__}: unknown field {unknown[0]!r}; a later version of fp4kit may support it")
    missing = [name for name, required in is_required.items() if required and name not in data]
    if missing:
        raise ValueError(f"{kind.__name__}: the field {missing[0]!r} is missing; add it")
    return dict(data)


@lru_cache(256)
def to_spec(recipe: str | Recipe) -> str:
    """Return a string from which from_spec makes an equal recipe.

    The string is the id if the recipe is in the table, otherwise one line of JSON with every field. Equal recipes give
    equal strings, in any process. Raise the errors of fp4kit.recipe.

    >>> to_spec("mxfp4")
    'mxfp4-ocp'
    """
    data = as_data(find_recipe(recipe))
    return data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))


@lru_cache(256)
def from_spec(spec: str) -> Recipe:
    """Return the recipe that a string describes: the inverse of to_spec. An id or an alias is accepted too.

    A string that begins with "{" is read as JSON. Raise ValueError for an unknown id and for invalid JSON. Raise the
    errors of from_data for invalid fields.

    >>> from dataclasses import replace
    >>> variant = replace(find_recipe("mxfp4-ocp"), block=(1, 16))
    >>> from_spec(to_spec(variant)) == variant
    True
    """
    if not spec.startswith("{"):
        return find_recipe(spec)
    try:
        return from_data(json.loads(spec))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"from_spec: {spec!r} is not valid JSON ({error}); needs an id, or a string that to_spec made"
        ) from None
