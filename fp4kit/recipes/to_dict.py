"""Recipes as data of JSON: the id of one of the table, all fields of a variant; and back, whoever wrote it."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from fp4kit.formats import ELEMENT_FORMATS, ElementFormat
from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import is_listed, recipe

_FORMATS = {fmt.name: fmt for fmt in ELEMENT_FORMATS}


def as_data(r: Recipe) -> str | dict[str, Any]:
    """The id, or all fields; formats by name, or by their fields."""
    if is_listed(r):
        return r.id
    return {field.name: _field_data(getattr(r, field.name)) for field in fields(r)}


def from_data(data: Any) -> Recipe:
    """The recipe that as_data was given, equal in every field.

    Raises ValueError for an id that is not in the table; TypeError or ValueError, as Recipe does, for fields that make
    none, that are missing or that it has not.
    """
    if isinstance(data, str):
        return recipe(data)
    values = _checked(data, Recipe)
    for name in ("element", "scale"):
        values[name] = _format(values[name])
    if isinstance(values["block"], list):
        values["block"] = tuple(values["block"])
    return Recipe(**values)


def _field_data(value: Any) -> Any:
    if isinstance(value, ElementFormat):
        return value.name if _FORMATS.get(value.name) == value else asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _format(data: Any) -> Any:
    if isinstance(data, str):
        if data not in _FORMATS:
            raise ValueError(f"Recipe: no format is called {data!r}; needs one of {', '.join(_FORMATS)}, or its fields")
        return _FORMATS[data]
    return data if data is None else ElementFormat(**_checked(data, ElementFormat))


def _checked(data: Any, kind: type) -> dict[str, Any]:
    """data as arguments of a dataclass: it has no others, and all that must be given."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__}: {data!r} is no object of fields")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    strange = [name for name in data if name not in known]
    if strange:
        raise ValueError(f"{kind.__name__}: there is no field {strange[0]!r}; a later version of fp4kit may know it")
    missing = [name for name, needed in known.items() if needed and name not in data]
    if missing:
        raise ValueError(f"{kind.__name__}: the field {missing[0]!r} is missing")
    return dict(data)
