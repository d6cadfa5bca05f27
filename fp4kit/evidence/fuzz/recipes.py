"""Draw recipes for fuzzing: the pool of what is drawn, the source of random choices, and variants of recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, E8M0, INT4, INT8, IntegerOrFloat
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.lazy import lazy_property
from fp4kit.recipes import RECIPES, Recipe, rules
from fp4kit.recipes.validate import can_be_repacked
from fp4kit.units import UNITS

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


MANY = 1 << 20  # more elements than an array has; a limit that stays valid while shrinking changes the array's shape


@dataclass(frozen=True)
class Variant:
    """A recipe of the table, with some fields changed: (field, new value) pairs."""

    id: str
    changes: tuple[tuple[str, Any], ...] = ()

    @lazy_property
    def recipe(self) -> Recipe:
        base = RECIPES[self.id]
        return replace(base, **dict(self.changes)) if self.changes else base


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
        known = {"recipes": RECIPES, "operations": OPERATIONS, "layouts": SCALE_LAYOUTS, "units": UNITS}
        for name, allowed in known.items():
            unknown = [value for value in getattr(self, name) if value not in allowed]
            if unknown or not getattr(self, name):
                raise ValueError(
                    f"fuzz: {name} holds {unknown or 'nothing'}; needs one or more of {', '.join(allowed)}"
                )

    def every_variant(self) -> tuple[Variant, ...]:
        return (*map(Variant, self.recipes), *self.variants)


class Picks:
    """A source of random choices. Sources with equal seeds and pools make equal choices.

    ``made`` and ``seeds`` record the choices, so that hypothesis can repeat and simplify them (shrink.py). Smaller
    numbers are simpler, so sequences to choose from begin with the simplest choice.
    """

    def __init__(self, seed: int, pool: Pool) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = pool
        self.made: list[int] = []
        self.seeds: list[int] = []

    def record(self, choice: int, limit: int) -> int:
        """Record and return a choice among the numbers below ``limit``."""
        self.made.append(choice)
        return choice

    def seed(self) -> int:
        self.seeds.append(int(self.rng.integers(1 << 40)))
        return self.seeds[-1]

    def below(self, limit: int) -> int:
        return self.record(int(self.rng.integers(limit)), limit)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def limits_above(self, *limits: float) -> int:
        """Return how many of ``limits`` are above a random number from 0 to 1."""
        number = self.rng.random()
        return self.record(sum(number < limit for limit in limits), len(limits) + 1)

    def chance(self, probability: float) -> bool:
        return self.limits_above(probability) == 1

    def fraction(self) -> float:
        return self.record(int(self.rng.random() * (1 << 53)), 1 << 53) / (1 << 53)

    def shuffled(self, values: Sequence[int]) -> list[int]:
        order, rest = self.rng.permutation(len(values)).tolist(), list(values)
        ranks = [sum(later < i for later in order[k:]) for k, i in enumerate(order)]
        return [rest.pop(self.record(rank, len(rest))) for rank in ranks]

    def view(self, ndim: int, flat: bool) -> View:
        """Return a random memory layout. ``flat``: neither transposed nor strided."""
        view = View.plain(ndim)
        if not self.chance(0.5):
            return view
        offset = self.below(9) if self.chance(0.6) else 0
        if flat:
            return replace(view, offset=offset)
        order = tuple(self.shuffled(view.order)) if self.chance(0.5) else view.order
        return View(order, tuple(self.pick((1, 1, 1, 2, -1, 3)) for _ in range(ndim)), offset)

    def array(self, kind: str, dtype: str, shape: tuple[int, ...], view: View | None = None) -> DrawnArray:
        """Return an array with a random seed. All elements keep their values, except while a failure is shrunk."""
        seed = self.seed()
        stop = min(prod(shape), self.record(MANY, MANY + 1))
        start = stop - min(stop, self.record(MANY, MANY + 1))
        return DrawnArray(kind, dtype, shape, seed, view or View.plain(len(shape)), (start, stop))


# ---- variants of recipes ----

FLOAT_ELEMENTS = (E2M1, E2M3, E3M2, E4M3, E5M2)
E8M0_RULES = [name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E8M0" and "flashinfer" not in name]
E4M3_RULES = [name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E4M3" and rule.flush is False]
TENSOR_SCALE_RULES = [name for name in E4M3_RULES if not rules.BLOCK_RULES[name].one_level]
TENSOR_RULES = [name for name, over in rules.TENSOR_RULES.items() if over == "E4M3"]
UNSCALED_TENSOR_RULES = ("fp8_modelopt", "fp8_transformers", "fp8_deepgemm", "int_modelopt", "int4_qat")
E8M0_DECODE = [name for name, rule in rules.DECODE_RULES.items() if rule.scales == ("E8M0",)]
E4M3_DECODE = ["product", "compressed_tensors", "stored_divisor", "auto_round", "gguf", "modelopt", "mlx_0322"]
AMAX_DECODE = ["te", "fouroversix", "fouroversix_float32"]
SQUARES = ((16, 16), (32, 32), (8, 8), (2, 16), (4, 32), (16, 32), (64, 64))
FIELDS = tuple(field.name for field in fields(Recipe))


def _blocks(r: Any) -> Sequence[Any]:
    if r.block is None:
        return ()
    columns = (16, 32, 8, 2) if r.stochastic == "ms_eden" else (16, 32, 64, 128, 8, 2)[: 5 if r.search else 6]
    one_row = r.fake_rule or r.search or r.tensor_scaling == "row" or r.stochastic == "mslk"
    return [(1, size) for size in columns] + ([] if one_row else list(SQUARES))


def _elements(r: Any) -> Sequence[Any]:
    if r.element.is_integer:
        return (INT4, INT8)
    fixed = r.scale == E4M3 or r.nan_code or r.rounding == "rnw" or r.stochastic in rules.NOISE_STOCHASTICS
    return () if fixed else 5 * FLOAT_ELEMENTS + (E1M2, E3M0)


def _tensor_scalings(r: Any) -> Sequence[Any]:
    if r.tensor_rule is None or r.four_over_six or (r.block is not None and r.block[0] > 1):
        return ()
    return ("tensor", "row", "block") if r.scale is None and r.block is not None else ("tensor", "row")


def _roundings(r: Any) -> Sequence[Any]:
    if r.four_over_six:
        return () if r.fast_error else ("rn", "rnw")
    if r.apply == "compare":
        return ()
    unfit = {"first"} if r.element.is_integer or r.nan_is_max else set()
    unfit |= set() if r.element == E2M1 else {"rnw"}
    first = {"rounding": "first", "nan_code": 0}
    return [first if name == "first" else name for name in rules.ROUNDINGS if name not in unfit]


def _searches(r: Any) -> Sequence[Any]:
    plain = r.block and r.block[0] == 1 and not (r.four_over_six or r.static or r.fake_rule or r.block[1] % 8)
    if not plain or r.scale is None:
        return ()
    return ["", *(name for name, rule in rules.SEARCHES.items() if rule.scale == r.scale.name)]


def _decode_rules(r: Any) -> Sequence[Any]:
    if r.scale is None:
        return ("product", "int_modelopt")
    return E8M0_DECODE if r.scale == E8M0 else E4M3_DECODE + (AMAX_DECODE if r.tensor_scaling != "none" else [])


def _block_rules(r: Any) -> Sequence[Any]:
    # Other fields of recipes with FlashInfer's rules or 4over6 depend on the rule.
    if r.block_rule is None or r.flush or r.four_over_six:
        return ()
    names = E8M0_RULES if r.scale == E8M0 else TENSOR_SCALE_RULES if r.tensor_scaling != "none" else E4M3_RULES
    found = [{"block_rule": name, "apply": rules.BLOCK_RULES[name].apply} for name in names]
    return [each | ({"rounding": "first", "nan_code": 0} if each["apply"] == "compare" else {}) for each in found]


def _stochastics(r: Any) -> Sequence[Any]:
    if r.element.is_integer or r.stochastic == "ms_eden":
        return ()
    is_e2m1 = r.element == E2M1
    is_mslk = is_e2m1 and r.scale == E8M0 and r.block is not None and r.block[0] == 1
    allowed = {"comfyui_nvfp4": is_e2m1, "comfyui_nvfp4_cuda": is_e2m1, "mslk": is_mslk, "ms_eden": False}
    return [name for name in rules.STOCHASTICS if allowed.get(name, True)]


def _errors(r: Any) -> Sequence[Any]:
    if not r.four_over_six:
        return ()
    if isinstance(r.element, IntegerOrFloat):
        return [*rules.ERRORS]
    rows = [(error, not r.flush and r.rounding == "rn", False) for error in rules.ERRORS[:2]]
    if not r.flush:
        rows += [(error, False, lanes) for error in rules.ERRORS for lanes in (False, True)]
    return [dict(zip(("four_over_six", "fast_error", "lane_sums"), row, strict=True)) for row in rows]


def _unless(condition: Any, choices: Sequence[Any]) -> Sequence[Any]:
    return () if condition else choices


# {field: function from a recipe to the new values to choose from, none if the recipe does not allow a change}. A value
# that is a dict changes several fields. The functions know which fields fit together; Recipe may still reject some.
CHANGES: dict[str, Callable[[Any], Sequence[Any]]] = {
    "block": _blocks,
    "element": _elements,
    "tensor_scaling": _tensor_scalings,
    "rounding": _roundings,
    "sign": lambda r: _unless(r.element.is_integer, tuple(rules.SIGNS)),
    "nan_code": lambda r: _unless(r.rounding == "first", (None, 0, 3, r.element.max_code, r.element.sign_bit)),
    "amax_nan": lambda r: ("ignore", "propagate", "lanes")[: 3 if r.block else 2],
    "static": lambda r: _unless(
        r.four_over_six or r.search or r.scale is None or rules.BLOCK_RULES[r.block_rule].reads_amax, (False, True)
    ),
    "search": _searches,
    "narrow": lambda r: _unless(not r.element.is_integer, (not r.narrow,)),
    "scale_max": lambda r: _unless(r.scale != E4M3, (448, 256)),
    "apply": lambda r: _unless(r.block_rule is not None, ("multiply", "divide")),
    "decode_rule": _decode_rules,
    "block_rule": _block_rules,
    "tensor_rule": lambda r: _unless(
        r.tensor_rule is None or r.four_over_six, UNSCALED_TENSOR_RULES if r.scale is None else TENSOR_RULES
    ),
    "round_scaled": lambda r: _unless(r.four_over_six or r.apply == "compare", (not r.round_scaled,)),
    "stochastic": _stochastics,
    "repacked": lambda r: _unless(not can_be_repacked(r), (not r.repacked,)),
    "nan_is_max": lambda r: _unless(
        r.four_over_six or r.element.is_integer or r.rounding == "first", (not r.nan_is_max,)
    ),
    "four_over_six": _errors,
}


def draw_variant(d: Picks, id: str, changes: int) -> Variant:
    """Return recipe ``id`` as a Variant, changed by up to ``changes`` different rows of CHANGES."""
    r: Any = RECIPES[id]
    found: dict[str, Any] = {}
    names = list(CHANGES)
    for _ in range(changes):
        name = names.pop(d.below(len(names)))
        if choices := CHANGES[name](r):
            value = d.pick(choices)
            found |= value if isinstance(value, dict) else {name: value}
            r = SimpleNamespace(**{field: found.get(field, getattr(r, field)) for field in FIELDS})
    return Variant(id, tuple((name, value) for name, value in found.items() if getattr(RECIPES[id], name) != value))
