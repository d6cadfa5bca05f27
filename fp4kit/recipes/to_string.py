"""Convert a recipe to a string and back: the id of a recipe in the table, or JSON with all fields of a variant."""

from __future__ import annotations

import json
from functools import lru_cache

from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import recipe as find_recipe
from fp4kit.recipes.to_dict import as_data, from_data


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
