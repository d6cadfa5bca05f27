"""The table of recipes: those of all producers, by format; names that mean another; look-up by id."""

from __future__ import annotations

import copyreg
import difflib
from dataclasses import fields, replace
from typing import Any

from fp4kit.recipes import (
    auto_round,
    compressed_tensors,
    deepgemm,
    flashinfer,
    fouroversix,
    gguf,
    microxcaling,
    mlx,
    modelopt,
    ocp,
    qat,
    quark,
    qwix,
    sglang,
    te,
    torchao,
    triton_kernels,
    vllm,
)
from fp4kit.recipes.schema import Alias, Recipe
from fp4kit.recipes.versions import Versions

_PRODUCERS = (
    *(ocp, te, flashinfer, modelopt, torchao, compressed_tensors, microxcaling, qat, gguf, mlx),
    *(vllm, triton_kernels, quark, auto_round, fouroversix, sglang, deepgemm, qwix),
)
_FORMATS = ("NVFP4", "MXFP4", "MXFP6", "MXFP8", "FP8", "INT8", "INT4")


def _table() -> dict[str, Recipe]:
    found = [_with_versions(recipe, producer.VERSIONS) for producer in _PRODUCERS for recipe in producer.recipes()]
    return {recipe.id: recipe for recipe in sorted(found, key=lambda r: _FORMATS.index(r.format_name))}


def _with_versions(r: Recipe, usual: Versions) -> Recipe:
    """Return r with the usual versions of its producer, unless it has its own; its `exact` names them, unless it names
    one.
    """
    versions = r.versions or usual
    named = any(version in r.exact for version in versions)
    return replace(r, versions=versions, exact=r.exact if named else f"{r.exact} ({versions})")


RECIPES: dict[str, Recipe] = _table()

# Producers whose codes another's recipe gives, and what of them it does not.
PRODUCER_ALIASES: dict[str, Alias] = {alias.id: alias for alias in (*vllm.aliases(), *mlx.aliases())}

# Two names, one rule.
ALIASES = {
    "nvfp4": "nvfp4-te",
    "mxfp4": "mxfp4-ocp",
    "mxfp8": "mxfp8-te",
    "mxfp4-torchao-floor": "mxfp4-ocp",
    "nvfp4-qwix-float16": "nvfp4-qwix",
} | {alias.id: alias.of for alias in PRODUCER_ALIASES.values()}


def recipes() -> tuple[str, ...]:
    """Ids of all recipes, in the order of the table.

    >>> import fp4kit
    >>> len(fp4kit.recipes()), fp4kit.recipes()[0]
    (151, 'nvfp4-te')
    """
    return tuple(RECIPES)


def recipe(id: str | Recipe) -> Recipe:
    """The recipe of an id or alias; a Recipe is returned as it is.

    Raises ValueError for an unknown id, with the nearest names; TypeError for anything but a str or a Recipe.

    >>> import fp4kit
    >>> fp4kit.recipe("nvfp4").id, fp4kit.recipe("mxfp4").block
    ('nvfp4-te', (1, 32))
    """
    return recipe_of("recipe", id)


def recipe_of(op: str, id: Any) -> Recipe:
    """The same for a function whose argument it is, and whose errors begin with op."""
    if isinstance(id, Recipe):
        return id
    if not isinstance(id, str):
        raise TypeError(f"{op}: recipe is a {type(id).__name__}; needs an id such as 'nvfp4-te' or a Recipe")
    found = RECIPES.get(ALIASES.get(id, id))
    if found is None:
        near = difflib.get_close_matches(id.lower(), [*RECIPES, *ALIASES], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see fp4kit.recipes()"
        raise ValueError(f"{op}: no recipe is called {id!r}; {hint}")
    return found


def is_listed(r: Recipe) -> bool:
    """Whether a recipe is one of the table, so that its id says all."""
    return RECIPES.get(r.id) == r


def _reduce(r: Recipe) -> tuple[Any, ...]:
    """What a pickle holds: the id of a recipe of the table, all fields of another."""
    if is_listed(r):
        return recipe, (r.id,)
    return Recipe, tuple(getattr(r, field.name) for field in fields(r))


copyreg.pickle(Recipe, _reduce)  # here, since schema.py does not know the table
