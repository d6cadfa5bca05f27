"""A recipe as a string and back: the id of a recipe of the table, JSON of all fields of a variant (recipes.data)."""

from __future__ import annotations

import json
from functools import lru_cache

from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import recipe as find_recipe
from fp4kit.recipes.to_dict import as_data, from_data


@lru_cache(256)
def to_spec(recipe: str | Recipe) -> str:
    """A string that from_spec makes the recipe of: its id, or one line of JSON with every field of a recipe not in the
    table.

    Equal recipes have equal strings, in any process. Raises what fp4kit.recipe raises.

    >>> to_spec("mxfp4")
    'mxfp4-ocp'
    """
    data = as_data(find_recipe(recipe))
    return data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))


@lru_cache(256)
def from_spec(spec: str) -> Recipe:
    """The recipe of a string of to_spec; an id or alias, too.

    Raises ValueError for an unknown id and for what is no JSON; what from_data raises for fields that make no recipe.

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
        raise ValueError(f"from_spec: {spec!r} is no JSON ({error}); needs an id, or what to_spec gives") from None
