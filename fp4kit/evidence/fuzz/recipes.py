"""Draw recipes for fuzzing: recipes of the table, and variants of them (with some fields changed).
Each function in CHANGES takes a random generator and a recipe `r`, and returns new values for one or more fields of the
recipe as {field: value}. It returns {} if the recipe does not allow the change.

The functions know which fields fit together: what each rule assumes about factors, subnormals and element formats. If
Recipe still rejects a variant, draw.py draws another one and counts the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arrays import View
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, E8M0, INT4, INT8, IntegerOrFloat
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.lazy import lazy_property
from fp4kit.recipes import RECIPES, Recipe, rules
from fp4kit.recipes.validate import can_be_repacked
from fp4kit.units import UNITS

FLOAT_ELEMENTS = (E2M1, E2M3, E3M2, E4M3, E5M2, E1M2, E3M0)
E8M0_RULES = tuple(
    name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E8M0" and "flashinfer" not in name
)
E4M3_RULES = tuple(name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E4M3" and rule.flush is False)
TENSOR_SCALE_RULES = tuple(name for name in E4M3_RULES if not rules.BLOCK_RULES[name].one_level)
TENSOR_RULES = tuple(name for name, over in rules.TENSOR_RULES.items() if over == "E4M3")
E8M0_DECODE = tuple(name for name, rule in rules.DECODE_RULES.items() if rule.scales == ("E8M0",))
E4M3_DECODE = ("product", "compressed_tensors", "stored_divisor", "auto_round", "gguf", "modelopt", "mlx_0322")
FIELDS = tuple(field.name for field in fields(Recipe))
Rng = np.random.Generator


@dataclass(frozen=True)
class Variant:
    """A recipe from the table of recipes, with some fields changed.

    Attributes:
        id: id of the recipe.
        changes: (field, new value) pairs.
    """

    id: str
    changes: tuple[tuple[str, Any], ...] = ()

    @lazy_property
    def recipe(self) -> Recipe:
        """Return the Recipe with the changes applied, or the recipe of the table itself if there are none."""
        base = RECIPES[self.id]
        return replace(base, **dict(self.changes)) if self.changes else base

    def simpler(self) -> Iterator[Variant]:
        """Yield variants with fewer changes: first without any, then without one of them."""
        if len(self.changes) > 1:
            yield Variant(self.id)
        for i in range(len(self.changes)):
            yield Variant(self.id, self.changes[:i] + self.changes[i + 1 :])


def draw_variant(rng: Rng, id: str, changes: int) -> Variant:
    """Return recipe ``id`` as a Variant, changed by up to ``changes`` different functions of CHANGES."""
    r: Any = RECIPES[id]
    found: dict[str, Any] = {}
    names = list(CHANGES)
    for number in rng.permutation(len(names))[:changes]:
        changed = CHANGES[names[number]](rng, r)
        found |= changed
        r = _changed(r, changed)
    return Variant(id, tuple((name, value) for name, value in found.items() if getattr(RECIPES[id], name) != value))


def _changed(r: Any, changes: dict[str, Any]) -> Any:
    """Return an object with the fields of the recipe ``r``, some of them replaced as ``changes`` says."""
    return SimpleNamespace(**{name: getattr(r, name) for name in FIELDS} | changes)


def _pick(rng: Rng, choices: Any) -> Any:
    """Return one entry of a nonempty sequence at random, all with equal probability."""
    return choices[rng.integers(len(choices))]


def _block(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random block shape as {"block": (rows, columns)}, or {} if the recipe has no blocks."""
    if r.block is None:
        return {}
    one_row = r.fake_rule or r.search or r.tensor_scaling == "row" or r.stochastic == "mslk"
    square = _pick(rng, ((16, 16), (32, 32), (8, 8), (2, 16), (4, 32), (16, 32), (64, 64)))
    columns = (16, 32, 8, 2) if r.stochastic == "ms_eden" else (16, 32, 64, 128, 8, 2)[: 5 if r.search else 6]
    return {"block": (1, _pick(rng, columns)) if one_row or rng.random() < 0.5 else square}


def _element(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random element format as {"element": format}: an integer format for integers, else a float format."""
    if r.element.is_integer:
        return {"element": _pick(rng, (INT4, INT8))}
    if r.scale == E4M3 or r.nan_code or r.rounding == "rnw" or r.stochastic in rules.NOISE_STOCHASTICS:
        return {}
    return {"element": _pick(rng, FLOAT_ELEMENTS[:5] if rng.random() < 0.8 else FLOAT_ELEMENTS)}


def _tensor_scaling(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.tensor_scaling as {field: value}."""
    if r.tensor_rule is None or r.four_over_six or (r.block is not None and r.block[0] > 1):
        return {}
    if r.scale is None and r.block is not None:
        return {"tensor_scaling": _pick(rng, ("tensor", "row", "block"))}
    return {"tensor_scaling": _pick(rng, ("tensor", "row"))}


def _rounding(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.rounding, how scaled elements are rounded to codes, as {field: value}."""
    if r.four_over_six or r.apply == "compare":
        return {} if r.fast_error or not r.four_over_six else {"rounding": _pick(rng, ("rn", "rnw"))}
    unfit = {"first"} if r.element.is_integer or r.nan_is_max else set()
    unfit |= set() if r.element == E2M1 else {"rnw"}
    rounding = _pick(rng, [name for name in rules.ROUNDINGS if name not in unfit])
    return {"rounding": rounding} | ({"nan_code": 0} if rounding == "first" else {})


def _sign(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.sign, a key of rules.SIGNS, as {"sign": value}; {} for integer elements."""
    return {} if r.element.is_integer else {"sign": _pick(rng, rules.SIGNS)}


def _nan_code(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.nan_code, the code of a NaN element, as {field: value}."""
    return (
        {} if r.rounding == "first" else {"nan_code": _pick(rng, (None, 0, 3, r.element.max_code, r.element.sign_bit))}
    )


def _amax_nan(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.amax_nan, which says how NaN elements affect an amax, as {"amax_nan": value}."""
    return {"amax_nan": _pick(rng, ("ignore", "propagate", "lanes") if r.block else ("ignore", "propagate"))}


def _static(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random value of Recipe.static as {field: value}."""
    # Also return {} for recipes with 4over6 or a search, because these recipes choose scales themselves.
    if r.four_over_six or r.search or r.scale is None or rules.BLOCK_RULES[r.block_rule].reads_amax:
        return {}
    return {"static": bool(rng.random() < 0.5)}


def _search(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random search of block scales (Recipe.search) as {field: value}."""
    plain = r.block and r.block[0] == 1 and not (r.four_over_six or r.static or r.fake_rule or r.block[1] % 8)
    if not plain or r.scale is None:
        return {}
    return {"search": _pick(rng, ["", *(name for name, rule in rules.SEARCHES.items() if rule.scale == r.scale.name)])}


def _narrow(rng: Rng, r: Any) -> dict[str, Any]:
    """Return the opposite of Recipe.narrow as {field: value}, or {} for float elements."""
    return {"narrow": not r.narrow} if r.element.is_integer else {}


def _scale_max(rng: Rng, r: Any) -> dict[str, Any]:
    """Return {"scale_max": 448} or {"scale_max": 256} at random; {} unless the block scales are E4M3."""
    return {"scale_max": _pick(rng, (448, 256))} if r.scale == E4M3 else {}


def _apply(rng: Rng, r: Any) -> dict[str, Any]:
    """Return {"apply": "multiply"} or {"apply": "divide"} at random; {} if the recipe has a block rule, which fixes
    it.
    """
    return {"apply": _pick(rng, ("multiply", "divide"))} if r.block_rule is None else {}


def _decode_rule(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random decode rule that fits the recipe's scale format, as {"decode_rule": name}."""
    if r.scale == E8M0:
        return {"decode_rule": _pick(rng, E8M0_DECODE)}
    if r.scale is None:
        return {"decode_rule": _pick(rng, ("product", "int_modelopt"))}
    with_amax = ("te", "fouroversix", "fouroversix_float32") if r.tensor_scaling != "none" else ()
    return {"decode_rule": _pick(rng, (*E4M3_DECODE, *with_amax))}


def _block_rule(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random block rule for the recipe's scale format, and the fields that depend on it, as {field: value}."""
    # Also return {} for recipes with FlashInfer's rules or 4over6, because other fields of these recipes depend on the
    # rule.
    if r.block_rule is None or r.flush or r.four_over_six:
        return {}
    with_tensor = r.tensor_scaling != "none"
    rule = _pick(rng, E8M0_RULES if r.scale == E8M0 else TENSOR_SCALE_RULES if with_tensor else E4M3_RULES)
    apply = rules.BLOCK_RULES[rule].apply
    return {"block_rule": rule, "apply": apply} | ({"rounding": "first", "nan_code": 0} if apply == "compare" else {})


def _tensor_rule(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random tensor rule as {field: value}; {} if the recipe has no tensor rule, or if it uses 4over6."""
    if r.tensor_rule is None or r.four_over_six:
        return {}
    if r.scale is None:
        return {
            "tensor_rule": _pick(rng, ("fp8_modelopt", "fp8_transformers", "fp8_deepgemm", "int_modelopt", "int4_qat"))
        }
    return {"tensor_rule": _pick(rng, TENSOR_RULES)}


def _round_scaled(rng: Rng, r: Any) -> dict[str, Any]:
    """Return the opposite of Recipe.round_scaled as {field: value}."""
    return {} if r.four_over_six or r.apply == "compare" else {"round_scaled": not r.round_scaled}


def _stochastic(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random kind of stochastic rounding as {"stochastic": name}; {} for integer elements and for MS-EDEN."""
    if r.element.is_integer or r.stochastic == "ms_eden":
        return {}
    is_e2m1 = r.element == E2M1
    is_mslk = is_e2m1 and r.scale == E8M0 and r.block is not None and r.block[0] == 1
    allowed = {"comfyui_nvfp4": is_e2m1, "comfyui_nvfp4_cuda": is_e2m1, "mslk": is_mslk, "ms_eden": False}
    return {"stochastic": _pick(rng, [name for name in rules.STOCHASTICS if allowed.get(name, True)])}


def _repacked(rng: Rng, r: Any) -> dict[str, Any]:
    """Return the opposite of Recipe.repacked as {field: value}, or {} if can_be_repacked(r) is False."""
    return {"repacked": not r.repacked} if can_be_repacked(r) else {}


def _nan_is_max(rng: Rng, r: Any) -> dict[str, Any]:
    """Return the opposite of Recipe.nan_is_max as {field: value}."""
    return {} if r.four_over_six or r.element.is_integer or r.rounding == "first" else {"nan_is_max": not r.nan_is_max}


def _four_over_six(rng: Rng, r: Any) -> dict[str, Any]:
    """Return a random error measure of 4over6, and how errors are added, as {field: value}."""
    if not r.four_over_six:
        return {}
    if isinstance(r.element, IntegerOrFloat):
        return {"four_over_six": _pick(rng, rules.ERRORS)}
    exact = bool(not r.flush and rng.random() < 0.5)
    error = _pick(rng, rules.ERRORS if exact else rules.ERRORS[:2])
    fast = not exact and not r.flush and r.rounding == "rn"
    return {"four_over_six": error, "fast_error": fast, "lane_sums": bool(exact and rng.random() < 0.5)}


CHANGES: dict[str, Callable[[Rng, Any], dict[str, Any]]] = {
    "block": _block,
    "element": _element,
    "tensor_scaling": _tensor_scaling,
    "rounding": _rounding,
    "sign": _sign,
    "nan_code": _nan_code,
    "amax_nan": _amax_nan,
    "static": _static,
    "search": _search,
    "narrow": _narrow,
    "scale_max": _scale_max,
    "apply": _apply,
    "decode_rule": _decode_rule,
    "block_rule": _block_rule,
    "tensor_rule": _tensor_rule,
    "round_scaled": _round_scaled,
    "stochastic": _stochastic,
    "repacked": _repacked,
    "nan_is_max": _nan_is_max,
    "four_over_six": _four_over_six,
}


OPERATIONS = (
    "quantize",
    "quantize_both",
    "with_scales",
    "decode",
    "fake_quantize",
    "quantize_grouped",
    "fake_quantize_grouped",
    "amax_grouped",
    "plan",
    "requantize",
    "backward",
    "backward_grouped",
    "transpose",
    "swizzle",
    "swizzle_bytes",
    "pack",
    "amax",
    "partial",
    "master_weights",
    "search_scales",
    "matmul",
)


@dataclass(frozen=True)
class Pool:
    """The recipes, operations and options that fuzz cases are drawn from.

    Attributes:
        recipes: ids of recipes.
        variants: further recipes, which are drawn unchanged.
        dtypes: dtypes of input arrays.
        layouts: layouts of block scales.
        operations: names in OPERATIONS.
        roundings: values of DrawnOptions.rounding.
        hadamard: values of the argument hadamard.
        changes: the largest number of fields that a drawn variant of ``recipes`` changes. If it is 0, no variants of
            recipes or units are drawn.
        faults: True to give some cases a fault, so that their call must be rejected.
        largest: the largest number of elements per array.
        units: ids of the units of fp4kit.matmul.

    Raises:
        ValueError: if recipes, operations, layouts or units is empty or holds an unknown name.
    """

    recipes: tuple[str, ...] = tuple(RECIPES)
    variants: tuple[Variant, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    layouts: tuple[str, ...] = SCALE_LAYOUTS
    operations: tuple[str, ...] = OPERATIONS
    roundings: tuple[str, ...] = ("nearest", "seed", "bytes")
    hadamard: tuple[Any, ...] = (False, True, "no_signs")
    changes: int = 3
    faults: bool = True
    largest: int = 1 << 16
    units: tuple[str, ...] = tuple(UNITS)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("recipes", tuple(RECIPES)),
            ("operations", OPERATIONS),
            ("layouts", SCALE_LAYOUTS),
            ("units", tuple(UNITS)),
        ):
            unknown = [value for value in getattr(self, name) if value not in allowed]
            if unknown or not getattr(self, name):
                raise ValueError(
                    f"fuzz: {name} holds {unknown or 'nothing'}; needs one or more of {', '.join(allowed)}"
                )


class Picks:
    """A source of random choices for fuzz cases. Sources with equal seeds and pools make equal choices.

    Attributes:
        rng: the random generator.
        pool: the recipes, operations and options to choose from.
    """

    def __init__(self, seed: int, pool: Pool) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = pool

    def pick(self, choices: Any) -> Any:
        """Return one of the choices, a nonempty sequence, at random."""
        return choices[self.rng.integers(len(choices))]

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return bool(self.rng.random() < probability)

    def view(self, ndim: int, flat: bool) -> View:
        """Return a random memory layout of an array of ``ndim`` axes."""
        view = View.plain(ndim)
        if self.chance(0.5):
            offset = int(self.rng.integers(0, 9)) if self.chance(0.6) else 0
            if flat:
                return replace(view, offset=offset)
            order = tuple(self.rng.permutation(ndim).tolist()) if self.chance(0.5) else view.order
            view = View(order, tuple(self.rng.choice([1, 1, 1, 2, -1, 3], ndim).tolist()), offset)
        return view
