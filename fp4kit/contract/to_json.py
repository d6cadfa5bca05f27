"""Convert the fields of a Contract to JSON data and back, and write and read contract files.

A recipe of the table is written as its id, its versions and its facts: the values of the fields that determine bits
and differ from their defaults. On reading, the facts must agree with this version of fp4kit, so a contract never
changes its meaning silently. A file may come from an untrusted source, so all of it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from fp4kit.recipes import Recipe
from fp4kit.recipes import serialization as to_dict
from fp4kit.recipes.table import is_listed, recipe
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.json_object import dump_object, load_object
from fp4kit.storage.whole_file import whole_file, write_file
from fp4kit.units import KINDS, UNITS, Unit
from fp4kit.units import from_spec as unit_from_spec
from fp4kit.units import to_spec as unit_spec

_T = TypeVar("_T", dict[str, Any], list[Any], str)
FILE = "fp4kit_contract.json"
VERSION = 1
_KEY = "fp4kit_contract"
_PROSE = ("id", "source", "exact", "versions")  # fields of a recipe on which no bit depends
_RECIPES = ("weights", "activations", "kv_cache")


def as_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a contract, and the version of the format, as a new dict of JSON data."""
    data: dict[str, Any] = {_KEY: VERSION}
    for name, value in values.items():
        if value in (None, ()):
            continue
        if name in _RECIPES:
            data[name] = _recipe_data(value)
        elif name == "patterns":
            data[name] = [[pattern, None if one is None else _recipe_data(one)] for pattern, one in value]
        elif name == "unit":
            spec = unit_spec(value)
            data[name] = json.loads(spec) if spec.startswith("{") else spec
        elif name == "inferred":
            data[name] = dict(value)
        else:
            data[name] = json.loads(json.dumps(value))  # tuples become lists
    return data


def from_data(label: str, data: Any, settings: Collection[str]) -> dict[str, Any]:
    """Return {name of the field: its value} for the contract that JSON data describes."""
    if not isinstance(data, Mapping) or type(data.get(_KEY)) is not int or data[_KEY] != VERSION:
        got = data.get(_KEY) if isinstance(data, Mapping) else data
        raise CheckpointError(f"{label}: {_KEY} is {got!r:.60}; this version of fp4kit reads version {VERSION}")
    known = (*settings, "unknown", "inferred")
    strange = [name for name in data if name != _KEY and name not in known]
    if strange:
        raise CheckpointError(
            f"{label}: unknown key {shown(str(strange[0]))!r}; a later version of fp4kit may support it"
        )
    found = {name: value for name, value in data.items() if name != _KEY}
    try:
        for name in _RECIPES:
            if found.get(name) is not None:
                found[name] = _recipe_from(name, found[name])
        if "patterns" in found:
            found["patterns"] = [_pair_from(pair) for pair in _checked("patterns", found["patterns"], list)]
        if found.get("unit") is not None:
            found["unit"] = _unit_from(found["unit"])
        if "inferred" in found:
            found["inferred"] = list(_checked("inferred", found["inferred"], dict).items())
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{label}: {shown(str(error))}") from None
    return found


def load(path: Path, settings: Collection[str]) -> dict[str, Any]:
    """Load a contract file and return {name of the field: its value}, the arguments for Contract."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file; needs a contract that fp4kit convert or Contract.save wrote")
    return from_data(path.name, load_object(path, path.name), settings)


def save(path: Path, data: dict[str, Any]) -> None:
    """Write the JSON data of a contract to a file, which appears only when it is complete. Replace an existing file."""
    with whole_file(path) as temporary:
        write_file(temporary, dump_object(data))


def _recipe_data(r: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON data, from which _recipe_from makes the recipe again."""
    if not is_listed(r):
        data = to_dict.as_data(r)
        assert isinstance(data, dict)
        return data
    versions = {} if r.versions is None else {"versions": list(r.versions)}
    return {"id": r.id, **versions, "facts": _facts(r)}


def _facts(r: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that determine bits and differ from their defaults, as JSON data."""
    found = {}
    for one in fields(r):
        value = getattr(r, one.name)
        if one.name in _PROSE or value is None or (one.default is not MISSING and value == one.default):
            continue
        found[one.name] = value.name if one.name in ("element", "scale") else value
    facts: dict[str, Any] = json.loads(json.dumps(found))
    return facts


def _recipe_from(name: str, data: Any) -> Recipe:
    """Return the recipe that JSON data describes."""
    if not isinstance(data, Mapping) or "element" in data:
        try:
            return to_dict.from_data(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
    strange = [key for key in data if key not in ("id", "versions", "facts")]
    if strange:
        raise ValueError(f"{name}: unknown key {strange[0]!r}; a later version of fp4kit may support it")
    r = recipe(_checked(f"{name}: id", data.get("id"), str))
    _checked(f"{name}: versions", data.get("versions", []), list)
    stated, own = _checked(f"{name}: facts", data.get("facts", {}), dict), _facts(r)
    for key in dict.fromkeys((*stated, *own) if stated else ()):
        if stated.get(key) != own.get(key):
            raise ValueError(
                f"{name}: {r.id} has {key} {own.get(key)!r:.60} in this version of fp4kit, and {stated.get(key)!r:.60}"
                " in the contract; install the version that wrote it, or write the contract again"
            )
    return r


def _pair_from(pair: Any) -> tuple[Any, Recipe | None]:
    """Return (pattern, recipe) from a pair of JSON data."""
    if not isinstance(pair, list) or len(pair) != 2:
        raise TypeError(f"patterns has {pair!r:.60}; needs pairs of a layer pattern and a recipe")
    pattern, data = pair
    return pattern, None if data is None else _recipe_from(f"pattern {pattern}", data)


def _unit_from(data: Any) -> Unit | str:
    """Return the id of a known unit unchanged, or the Unit that an object of fields describes."""
    if isinstance(data, str):
        if data not in UNITS:
            raise ValueError(f"unit is {data!r:.60}; needs one of {', '.join(UNITS)}, or an object of fields")
        return data
    steps = [name for name in KINDS if _checked("unit", data, dict).get(name) is not None]
    for name in steps:
        _checked(f"unit: {name}", data[name], dict)
    missing = next((name for name in KINDS if name not in data), None)
    if missing is not None:
        raise ValueError(f"unit: the field {missing!r} is missing; add it, or give the id of a unit")
    try:
        return unit_from_spec(json.dumps(data))
    except (ValueError, TypeError) as error:
        raise ValueError(f"unit: {error}") from None


def _checked(name: str, value: Any, kind: type[_T]) -> _T:
    """Return a value of JSON data unchanged."""
    if not isinstance(value, kind):
        need = {dict: "an object", list: "a list", str: "a string"}[kind]
        raise TypeError(f"{name} is {value!r:.60}; needs {need}")
    return value
