"""Collect the recipes of all producers in one table, look up recipes by id, and make recipes of own formats."""

from __future__ import annotations

import copyreg
import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, Literal

from fp4kit.arguments import a_type, as_word, explains_calls, suggestion
from fp4kit.formats import BNB_FP4, ELEMENT_FORMATS, IF4, MX4, NF4, Codebook, ElementFormat
from fp4kit.recipes import ascend, local, nvidia, pytorch, serving, training
from fp4kit.recipes.schema import (
    ALL_RECIPES,
    PRODUCERS,
    Alias,
    Level,
    Recipe,
    as_levels,
    check_engines,
    is_simple,
)

_PRODUCERS = (  # within a format, their order is that of recipes()
    *(pytorch.ocp, nvidia.te, nvidia.flashinfer, nvidia.modelopt, pytorch.torchao, pytorch.compressed_tensors),
    *(pytorch.microxcaling, training.qat, local.gguf, local.mlx, serving.vllm, serving.triton_kernels, pytorch.quark),
    *(pytorch.auto_round, training.fouroversix, serving.sglang, serving.deepgemm, training.qwix, local.comfy_kitchen),
    *(pytorch.mslk, serving.aiter, serving.deepseek, training.fp_quant, serving.nunchaku, serving.transformers),
    *(training.jax, training.miles, serving.nncf, serving.onednn, serving.hf_kernels),
    *(ascend.hifloat4, ascend.amct, ascend.msmodelslim),
)
_FORMATS = "NVFP4 NVINT4 IF4 MXFP4 MXFP6 MXFP8 FP8 FP4 INT8 INT4 HIF4 HIFX3 HIFX5".split()
_made = [made for define in _PRODUCERS for made in define()]
_recipes = sorted((r for r in _made if isinstance(r, Recipe)), key=lambda r: _FORMATS.index(r.format_name))

ALL_RECIPES.update((r.id, r) for r in _recipes)
# the recipes that every operation supports
RECIPES: dict[str, Recipe] = {id: r for id, r in ALL_RECIPES.items() if is_simple(r)}
# {id of the alias: Alias}, for aliases that name a producer whose codes and scales equal another producer's
PRODUCER_ALIASES: dict[str, Alias] = {alias.id: alias for alias in _made if isinstance(alias, Alias)}

# {alias: id of its recipe}
ALIASES = {
    "nvfp4": "nvfp4-te",
    "mxfp4": "mxfp4-ocp",
    "mxfp8": "mxfp8-te",
    "mxfp4-torchao-floor": "mxfp4-ocp",
    "nvfp4-qwix-float16": "nvfp4-qwix",
} | {alias.id: alias.of for alias in PRODUCER_ALIASES.values()}


def recipes(of: str | None = None) -> tuple[str, ...]:
    """Return the ids of all recipes, or only those of a format or a producer.

    Args:
        of: a format, a producer or both, such as "int4", "modelopt" or "mxfp4-quark", in upper or lower case. None
            returns all ids.

    Returns:
        A tuple of ids, ordered by format. Aliases are not included.

    Raises:
        ValueError: no recipe belongs to this format or producer.
        TypeError: ``of`` is neither a str nor None.

    Examples:
        >>> import fp4kit
        >>> len(fp4kit.recipes()), fp4kit.recipes()[0]
        (264, 'nvfp4-te')
        >>> fp4kit.recipes("mxfp4-quark")
        ('mxfp4-quark-even', 'mxfp4-quark-floor', 'mxfp4-quark-ceil')
    """
    if of is None:
        return tuple(ALL_RECIPES)
    found = family(as_word("recipes", "of", of))
    if not found:
        needed = "needs a format or a producer, such as 'nvfp4' or 'modelopt'"
        raise ValueError(f"recipes: no recipe is of {of!r:.60}; {_hint(of, needed)}")
    return found


@explains_calls
def recipe(id: str | Recipe) -> Recipe:
    """Return the recipe with this id or alias.

    Args:
        id: an id or alias, in lower case. A Recipe is returned unchanged.

    Returns:
        The Recipe. If `id` is an alias, the Recipe has its own id, not the alias.

    Raises:
        ValueError: if the id is unknown; the message lists the nearest names.
        TypeError: if ``id`` is neither a str nor a Recipe.

    Examples:
        >>> import fp4kit
        >>> fp4kit.recipe("nvfp4").id, fp4kit.recipe("mxfp4").block
        ('nvfp4-te', (1, 32))
    """
    return recipe_of("recipe", id)


def recipe_of(op: str, id: Any) -> Recipe:
    """Return the recipe with an id or alias; a Recipe is returned unchanged. Case matters.

    Raise TypeError if id is neither a str nor a Recipe, ValueError if no recipe or alias has this id, and ValueError
    or NotImplementedError if op does not support the recipe. Every message begins with op, the public function.
    """
    if isinstance(id, Recipe):
        check_engines(op, id)
        return id
    if not isinstance(id, str):
        way_out = "; the array is the first argument and the recipe the second" if hasattr(id, "__dlpack__") else ""
        raise TypeError(f"{op}: recipe is {a_type(id)}; needs an id such as 'nvfp4-te' or a Recipe{way_out}")
    result = ALL_RECIPES.get(ALIASES.get(id, id))
    if result is None:
        raise ValueError(f"{op}: no recipe is called {id!r}; {_hint(id)}")
    check_engines(op, result)
    return result


# {name that users may take for a recipe: end of the error message, which says what to do instead}
_ELSEWHERE = {
    "nf4": "make one: fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)",
    "gptq": "GPTQ chooses scales and codes; pass its scales to quantize as block_scale and tensor_scale",
    "awq": "AWQ chooses scales; pass them to quantize as block_scale and tensor_scale",
}


_NEEDED = "see fp4kit.recipes(), or run `fp4kit recipes` with a format such as nvfp4 or a producer such as torchao"


def _hint(id: str, needed: str = _NEEDED) -> str:
    """Return the end of the error message for an unknown id: what the user may have meant, otherwise ``needed``."""
    written = id.strip().lower().replace("_", "-")
    if written in ALL_RECIPES or written in ALIASES:
        return _did_you_mean([written])
    if written in _ELSEWHERE:
        return _ELSEWHERE[written]
    if not (members := family(written)):
        names = {_plain(name): id for id, p in PRODUCERS.items() for name in (*p.name.split(" ("), p.package, p.name)}
        format, _, rest = written.partition("-")  # nvfp4-transformer-engine is nvfp4-te
        own = rest and names.get(_plain(rest))
        written = names.get(_plain(written)) or (f"{format}-{own}" if own else written)
        members = family(written)
    if members:
        more = f" `fp4kit recipes {written}` lists all {len(members)}" if len(members) > 3 else ""
        return _did_you_mean(sorted(members, key=lambda name: name.count("-"))[:3]) + more
    nearest = difflib.get_close_matches(written, [*ALL_RECIPES, *ALIASES], n=3, cutoff=0.6)
    return _did_you_mean(nearest) if nearest else needed


def _plain(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.lower()))


def _did_you_mean(names: list[str]) -> str:
    """Return the question "did you mean 'A' or 'B'?" for the given names, of which there must be at least one."""
    return f"did you mean {' or '.join(map(repr, names))}?"


def family(words: str) -> tuple[str, ...]:
    """Return the ids of a format's or producer's recipes, given words such as "nvfp4" or "mxfp4-torchao".

    An id matches if the given words are consecutive words of it, where hyphens separate words. Case does not matter,
    and "_" counts as "-". The ids are in the order of the table. Return () if no id matches.
    """
    wanted = f"-{words.strip().lower().replace('_', '-')}-"
    return tuple(id for id in ALL_RECIPES if wanted in f"-{id}-")


def several(ids: Iterable[str], near: Recipe, own: str = "") -> str:
    """Return up to five ids as text for an error message, followed by the number of ids that were left out.

    Ids with the format of the recipe `near` come first, and among them those of the producer `own`. Ids with fewer
    parts, which hyphens separate, come before longer ids. Ids of recipes without rounding to nearest are left out.
    """
    ids = (id for id in ids if not RECIPES[id].stochastic_only)
    ordered = sorted(
        ids, key=lambda id: (RECIPES[id].format_name != near.format_name, f"-{own}" not in id, id.count("-"))
    )
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def is_listed(r: Recipe) -> bool:
    """Return whether the table holds a recipe equal to r, so that the id alone identifies it."""
    return ALL_RECIPES.get(r.id) == r


def name_for_inputs(r: Recipe, scales: str | None, weights: Recipe | None = None) -> str:
    """Return the id of a recipe of inputs, or its alias for scales that are "static", such as nvfp4-vllm-static, or for
    scales per token beside weights of the same producer.
    """
    end = "-static" if scales == "static" else f"-{weights.producer}-token" if weights is not None else r.id
    aliases = [name for name, id in ALIASES.items() if id == r.id and name.endswith(end)]
    return aliases[0] if aliases and is_listed(r) else r.id


def _reduce(r: Recipe) -> tuple[Any, ...]:
    """Return the pair (function, arguments) by which pickle and copy restore a recipe."""
    if is_listed(r):
        return recipe, (r.id,)
    return Recipe, tuple(getattr(r, field.name) for field in fields(r))


copyreg.pickle(Recipe, _reduce)  # registered here, because schema.py does not know the table


_SUFFIXES = {"nearest": "", "up": "_up", "down": "_down"}
_FLOATS = ("float32", "float16", "bfloat16")


@explains_calls
def custom_recipe(
    id: str,
    element: ElementFormat | str,
    scale: ElementFormat | str | None = None,
    block: int | tuple[int, int] | None = None,
    *,
    scale_rounding: Literal["nearest", "up", "down"] = "nearest",
    tensor_scale: bool = False,
    levels: Sequence[tuple[int, ElementFormat | str]] | None = None,
) -> Recipe:
    """Return a recipe for element and scale formats that you choose.

    Let M be the largest magnitude of the element format (1 for MX4), and let S() round to the scale format. Then

        scale = S(amax / M)
        code = the code of x * (1 / scale)
        value = decode(code) * scale

    With a tensor scale, t = (amax of the tensor) / (M * largest scale), scale = S(amax / M * (1 / t)), and scale * t
    takes the place of scale in the other two formulas.

    With `levels`, blocks lie in larger blocks that have a scale t each, or are divided into groups with exponent bits,
    or both. Let n be the number of levels of exponent bits. Then M * 2^n takes the place of M above, and

        t = (amax of the outer block) / (M * 2^n * largest scale), with 1 as the largest scale of E8M0
        bit of a group at level k (0, 1, ... n - 1) = 1 if a magnitude in the group, times 1 / scale and divided by
            2^(bits of the groups around it), exceeds L * 2^(n - 1 - k); otherwise 0
        code = the code of x / 2^bits * (1 / scale),   value = decode(code) * 2^bits * scale

    where bits is the sum of the bits of the groups that hold the element, and L is M plus half the distance from M to
    the next smaller magnitude, or to 0. If there is a t, scale * t takes the place of scale in the last three formulas,
    as above.

    Args:
        id: a name for the recipe. It must not be the id or an alias of a recipe in the table.
        element: the format of the elements: a Codebook, MX4, a float or an integer, or the name of one of
            fp4kit.formats, such as "E2M1". MX4 needs scale=E8M0.
        scale: the format of the block scales. Either a float format of at most 8 bits or its name, such as "E4M3",
            whose scales are stored in block_scale, one byte per block. Or "float32", "float16" or "bfloat16", whose
            scales are stored in tensor_scale, one float32 number per block that is rounded to this type. For a block of
            several rows, this number is repeated for every row. None stands for the format in levels, or "float32"
            without levels.
        block: the number of elements along the quantized axis that share a scale, or (rows, columns) of a block. None
            stands for the columns in levels, or 32 without levels.
        scale_rounding: how a scale is rounded to its format. With "up", elements are clipped only if the scale
            saturates; with "nearest" and "down", the largest elements of a block may be clipped. For float32 scales,
            only "nearest" is accepted.
        tensor_scale: True to add one float32 scale per tensor. It needs block scales of at most 8 bits, but not E8M0.
        levels: several levels of scales, outermost first, as pairs (columns, format). The columns of a level divide
            those of the level above. The formats are, in this order: "float32", "float16" or "bfloat16", at most once;
            the format of the block scales, an ElementFormat or the name of one of fp4kit.formats; "exponent1" for one
            bit per group, any number of times. Numbers are stored in tensor_scale, and codes in block_scale. Bits are
            stored in block_scale behind the code of their block, level by level, the first group in bit 7 of a byte.

    Returns:
        A Recipe, for all functions that accept a recipe. Use dataclasses.replace to change its other fields, such as
        rounding and amax_nan.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the id is taken, scale_rounding or the name of a format is unknown, or formats, block and options do
            not fit together.

    Numerics:
        float32, rounded to nearest even after every operation. Elements are rounded to the nearest code, and saturate.
        A scale beyond the largest of its format becomes the largest. Scales below 1e-38 count as 1e-38 when elements
        are encoded, so that 1 / scale is finite. A block of zeros has scale 0; in E8M0 and E6M2, which have no zero, it
        has the smallest scale, 2^-127 or 2^-48. An amax is NaN if an element is NaN; then the scale is NaN, or the
        largest if its format has no NaN.

    Exact:
        For blocks of 32, 64 and 128, float32 scales and the elements NF4 and BNB_FP4, equals quantize_4bit of
        bitsandbytes 0.50.2 on a CPU, for x.reshape(1, -1). bitsandbytes stores the first of two codes in the high
        nibble, and divides a last, incomplete block instead of multiplying it.

    Examples:
        >>> import fp4kit, numpy as np
        >>> nf4 = fp4kit.custom_recipe("my-nf4", fp4kit.formats.NF4, "float32", block=64)
        >>> x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(1, 64)
        >>> q = fp4kit.quantize(x, nf4)
        >>> q.tensor_scale.tolist(), fp4kit.dequantize(q)[0, -3:].tolist()
        ([[2.0]], [2.0, 2.0, 2.0])
        >>> dual = fp4kit.custom_recipe("dual", fp4kit.formats.E2M1, levels=[(512, "float32"), (32, "E8M0")])
        >>> [str(level) for level in dual.scale_levels]
        ['float32 per 1 x 512 block', 'E8M0 per 1 x 32 block']
    """
    if not isinstance(scale_rounding, str) or scale_rounding not in _SUFFIXES:
        raise ValueError(
            f"custom_recipe: scale_rounding is {scale_rounding!r:.60}; needs one of {', '.join(_SUFFIXES)}"
        )
    if isinstance(id, str) and (id in ALL_RECIPES or id in ALIASES):
        raise ValueError(f"custom_recipe: id is {id!r}, which is the id of a producer's recipe; needs another one")
    if not isinstance(tensor_scale, bool):
        raise TypeError(f"custom_recipe: tensor_scale is {tensor_scale!r:.60}; needs True or False")
    scale = _named("scale", scale, _FLOATS)
    fields: dict[str, Any] = {"element": _named("element", element, ()), "source": "custom", "exact": ""}
    fields["amax_nan"] = "propagate"
    outer = ""
    if levels is not None:
        fields["levels"], scale, columns = _levels(levels, scale)
        outer, block = fields["levels"][0].format, columns if block is None else block
    block = 32 if block is None else block
    fields["block"] = (1, block) if isinstance(block, int) and not isinstance(block, bool) else block
    if isinstance(scale, ElementFormat):
        fields |= {"scale": scale, "block_rule": f"amax{_SUFFIXES[scale_rounding]}"}
        if tensor_scale and outer in _FLOATS:
            raise ValueError(f"custom_recipe: tensor_scale is True, but levels begins with {outer!r}; leave out one")
        if tensor_scale:
            fields |= {"tensor_scaling": "tensor", "tensor_rule": "amax"}
        elif outer in _FLOATS:
            fields |= {"tensor_scaling": "block", "tensor_rule": _float_rule(outer, scale_rounding)}
    else:
        fields |= _float_scale("float32" if scale is None else scale, scale_rounding, tensor_scale)
    try:
        return Recipe(id=id, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"custom_recipe: {error}") from None


def _named(argument: str, given: Any, others: Sequence[str]) -> Any:
    """Return the format that a name stands for, and names in ``others`` and objects other than strings unchanged."""
    if not isinstance(given, str) or given in others:
        return given
    if given not in _NAMES:
        known = (*others, *_NAMES)
        near = suggestion(given, known) or suggestion(given.upper(), known)
        raise ValueError(
            f"custom_recipe: {argument} is {given!r:.60}; needs an ElementFormat, or one of {', '.join(known)}{near}"
        )
    return _NAMES[given]


def _float_scale(scale: Any, scale_rounding: str, tensor_scale: bool) -> dict[str, Any]:
    """Return {field: value} for a Recipe whose block scales are float32 numbers that are rounded to a float type."""
    if not isinstance(scale, str):
        raise TypeError(
            f"custom_recipe: scale is {scale!r:.60}; needs an ElementFormat, such as fp4kit.formats.E4M3, or its name"
        )
    if tensor_scale or (scale == "float32" and scale_rounding != "nearest"):
        given = "tensor_scale is True" if tensor_scale else f"scale_rounding is {scale_rounding!r}"
        raise ValueError(f"custom_recipe: {given}, but scale is {scale!r}; needs a scale format of at most 8 bits")
    rule = _float_rule(scale, scale_rounding)
    return {"scale": None, "block_rule": None, "tensor_scaling": "block", "tensor_rule": rule}


def _float_rule(scale: str, scale_rounding: str) -> str:
    return "amax" if scale == "float32" else f"amax_{scale}{_SUFFIXES[scale_rounding]}"


def _levels(given: Any, scale: Any) -> tuple[tuple[Level, ...], ElementFormat, int]:
    """Return (levels, the format of the block scales, its columns) from the arguments levels and scale."""
    op, pairs = "custom_recipe: levels", given if isinstance(given, (tuple, list)) else (given,)
    are_pairs = all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)
    formats = {each.name: each for _, each in (pairs if are_pairs else ()) if isinstance(each, ElementFormat)}
    names = [(n, getattr(each, "name", each)) for n, each in pairs] if are_pairs else given
    levels = as_levels(op, names)
    of_scale = [level for level in levels if level.format not in (*_FLOATS, "exponent1")]
    if len(of_scale) != 1:
        needed = "one level with a format of at most 8 bits, such as (32, 'E8M0')"
        raise ValueError(f"{op} has {len(of_scale)} formats of block scales; needs {needed}")
    columns, name = of_scale[0]
    found = formats.get(name) or (scale if getattr(scale, "name", None) == name else _BY_NAME.get(name))
    if found is None:
        raise ValueError(f"{op} names the format {name!r}; needs an ElementFormat, or one of {', '.join(_BY_NAME)}")
    if scale is not None and scale != found:
        raise ValueError(f"custom_recipe: scale is {scale!r}, but levels has {found}; leave scale out")
    return levels, found, columns


_BY_NAME = {fmt.name: fmt for fmt in (*ELEMENT_FORMATS, MX4, IF4)}
_NAMES = {**_BY_NAME, NF4.name: NF4, BNB_FP4.name: BNB_FP4}


def as_data(r: Recipe) -> str | dict[str, Any]:
    """Return a recipe as JSON data: its id if the recipe is in the table, otherwise {field: value}."""
    if is_listed(r):
        return r.id
    return {field.name: _field_data(getattr(r, field.name)) for field in fields(r)}


def from_data(data: Any) -> Recipe:
    """Return the Recipe that JSON data describes: the inverse of as_data and to_spec, equal in every field."""
    if isinstance(data, str):
        return from_spec(data)
    values = _checked(data, Recipe)
    for name in ("element", "scale"):
        values[name] = _format(values[name])
    if isinstance(values["block"], list):
        values["block"] = tuple(values["block"])
    return Recipe(**values)


def from_record(data: Any) -> Recipe | None:
    """Return the recipe that a checkpoint records; None if it records none, or one that cannot be stored."""
    try:
        r = from_data(data)
    except (ValueError, TypeError):
        return None
    return r if is_simple(r) else None


def _field_data(value: Any) -> Any:
    """Return the value of a field of a Recipe as JSON data."""
    if isinstance(value, ElementFormat):
        if _BY_NAME.get(value.name) == value:
            return value.name
        return {f.name: _field_data(getattr(value, f.name)) for f in fields(value) if f.init}
    return list(value) if isinstance(value, tuple) else value


def _format(data: Any) -> Any:
    """Return the ElementFormat that data describes: the name of a standard format, or a dict of fields."""
    if isinstance(data, str):
        if data not in _BY_NAME:
            raise ValueError(
                f"Recipe: no format has the name {data!r}; needs one of {', '.join(_BY_NAME)}, or an object of fields"
            )
        return _BY_NAME[data]
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
def to_spec(id: str | Recipe) -> str:
    """Return a string from which from_spec makes an equal recipe.

    The string is the id if the recipe is in the table, otherwise one line of JSON with every field. Equal recipes give
    equal strings, in any process. Raise the errors of fp4kit.recipe.

    >>> to_spec("mxfp4")
    'mxfp4-ocp'
    """
    data = as_data(recipe(id))
    return data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))


@lru_cache(256)
def from_spec(spec: str) -> Recipe:
    """Return the recipe that a string describes: the inverse of to_spec. An id or an alias is accepted too.

    A string that begins with "{" is read as JSON. Raise ValueError for an unknown id and for invalid JSON. Raise the
    errors of from_data for invalid fields.

    >>> from dataclasses import replace
    >>> variant = replace(recipe("mxfp4-ocp"), block=(1, 16))
    >>> from_spec(to_spec(variant)) == variant
    True
    """
    if not spec.startswith("{"):
        return recipe(spec)
    try:
        return from_data(json.loads(spec))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"from_spec: {spec!r} is not valid JSON ({error}); needs an id, or a string that to_spec made"
        ) from None
