"""Choose the recipe and the format of a conversion that the user leaves open. A quantized source is the answer: its
layers keep their codes where the output format can store them. The first rule that applies decides:

1. The recipe that the user names.
2. If the source is quantized and the format can store its layers: the recipe that the source records, or else fp4kit's
   usual recipe for their container. If the format can store several containers, each layer follows its own.
3. The first of DEFAULTS that the format can store.

The format is the one that the user names, or else the source's, or else the one that most engines load.
"""

from __future__ import annotations

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from math import prod
from typing import Any

from fp4kit.checkpoint.containers.configs import ALL_FORMATS, MIXED
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.model_files import is_gguf_config
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request, kind_of
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.files import CheckpointError, shown

_GGUF_ONLY = "nvfp4-gguf"
# The usual recipe per kind of container. The first that a format can store is the default recipe of that format.
DEFAULTS = (
    "nvfp4-te",
    "mxfp4-ocp",
    "mxfp8-te",
    "fp8-transformers-block",
    "fp8-modelopt-channel",
    "fp8-modelopt",
    _GGUF_ONLY,
)


def with_defaults(
    request: Request, config: Mapping[str, Any], weights: Iterable[Weight], recorded: str, given: bool
) -> Request:
    """Return a request with the recipe and the format that follow from the source, and the reason for them."""
    # An unsuitable request is returned as it is, so that making the plan raises the error.
    if request.format == UNQUANTIZED:
        return request
    sizes: Counter[Container] = Counter()
    layers: dict[str, Container] = {}
    for weight in weights:
        if weight.container is not None:
            sizes[weight.container] += prod(weight.shape)
            layers[weight.name] = weight.container
    forms = [form for form, _ in sizes.most_common()]
    formats = list(_formats(request, config, forms))
    if given:
        suitable = (one for one in formats if _mixes(replace(request, format=one), config))
        return replace(request, format=next(suitable, request.format))
    for is_like in (_keeps_codes, _is_of_kind):
        for format in formats:
            for have in forms:
                found = _followed(replace(request, format=format), config, have, recorded, is_like)
                if found is not None:
                    return _with_others(found, config, layers, have)
    return _by_default(request, config, forms)


def _formats(request: Request, config: Mapping[str, Any], forms: Iterable[Container]) -> Iterator[str | None]:
    """Yield the formats to try, the best first: the one that the user names, or else the source's and then None."""
    if request.format is None and not is_gguf_config(config):
        own = (form.format or form.method for form in forms)
        yield from dict.fromkeys(one for one in own if one in ALL_FORMATS)
    yield request.format


def _followed(
    request: Request, config: Mapping[str, Any], have: Container, recorded: str, is_like: Any
) -> Request | None:
    """Return the request with the first recipe that stores layers of the container ``have`` alike; None if none
    does.
    """
    for name in (recorded, *DEFAULTS):
        if name in RECIPES:
            one = replace(request, recipe=RECIPES[name], chosen=f"as the source, which is stored as {have}")
            form = _form(one, config)
            if form is not None and is_like(have, form):
                return one
    return None


def _keeps_codes(have: Container, form: Container) -> bool:
    return have.same_codes(form)


def _is_of_kind(have: Container, form: Container) -> bool:
    return have.kind == form.kind


def _form(request: Request, config: Mapping[str, Any]) -> Container | None:
    """Return the container that a request writes, or None if it cannot be fulfilled."""
    try:
        return request.form_for(config)
    except CheckpointError:
        return None


def _mixes(request: Request, config: Mapping[str, Any]) -> bool:
    """Return whether the format of a request can hold all its recipes."""
    try:
        request.mixture_for(config)
    except CheckpointError:
        return False
    return True


def _with_others(request: Request, config: Mapping[str, Any], layers: Mapping[str, Container], first: Container) -> Any:
    """Return the request with recipes for the layers whose container is not that of the default recipe."""
    default = _form(request, config)
    if request.recipes or is_gguf_config(config) or request.codes or request.format not in (None, *MIXED):
        return request
    others: dict[str, list[str]] = defaultdict(list)
    for name, have in layers.items():
        if have is first or (default is not None and _keeps_codes(have, default)):
            continue
        found = _followed(request, config, have, "", _keeps_codes)
        if found is not None:
            others[found.recipe.id].append(name)
    pairs = tuple((pattern, RECIPES[id]) for id, names in others.items() for pattern in _patterns(names, layers))
    mixed = replace(request, recipes=pairs, follows_layers=True)
    return mixed if pairs and _mixes(mixed, config) else request


def _patterns(names: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return globs that match the given names and no other layer: with "*" for numbers where that is possible."""
    wanted, found = set(names), []
    by_glob: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        by_glob[re.sub(r"(?<=\.)\d+(?=\.)", "*", glob.escape(name))].append(name)
    for pattern, members in sorted(by_glob.items()):
        matches = re.compile(translate(pattern)).match
        is_exact = all(name in wanted for name in layers if matches(name))
        found += [pattern] if is_exact else sorted(map(glob.escape, members))
    return found


def _by_default(request: Request, config: Mapping[str, Any], forms: list[Container]) -> Request:
    """Return the request with the first of DEFAULTS that its format can store; unchanged if there is none."""
    named = f" of --format {request.format}" if request.format else ""
    why = f"the default{named}"
    if forms and named:
        why = f"{why}, which cannot keep the codes of layers in {shown(str(forms[0]))}"
    candidates: Iterable[Recipe] = (RECIPES[name] for name in DEFAULTS)
    found = (replace(request, recipe=one, chosen=why) for one in candidates)
    kinds = {kind_of(RECIPES[name]): RECIPES[name] for name in DEFAULTS if name != _GGUF_ONLY}
    usual = next((kinds[form.kind] for form in forms if form.kind in kinds), None)
    refused = replace(request, recipe=usual or request.recipe, chosen=why)  # making the plan raises the error
    return next((one for one in found if _form(one, config) is not None), refused)
