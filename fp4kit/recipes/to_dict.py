"""Convert a recipe to JSON data and back: the id of a recipe in the table, or all fields of a variant.

Files that fp4kit saves contain this data. from_data checks all of the data, because a file may be untrusted.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from fp4kit.formats import ELEMENT_FORMATS, IF4, MX4, Codebook, ElementFormat
from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import is_listed, recipe

_FORMATS = {fmt.name: fmt for fmt in (*ELEMENT_FORMATS, MX4, IF4)}


def as_data(r: Recipe) -> str | dict[str, Any]:
    """Return a recipe as JSON data: its id if the recipe is in the table, otherwise {field: value}."""
    if is_listed(r):
        return r.id
    return {field.name: _field_data(getattr(r, field.name)) for field in fields(r)}


def from_data(data: Any) -> Recipe:
    """Return the Recipe that JSON data describes: the inverse of as_data, equal in every field."""
    if isinstance(data, str):
        return recipe(data)
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
