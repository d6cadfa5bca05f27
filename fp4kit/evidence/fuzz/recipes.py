"""Draw recipes for fuzzing: the pool of what is drawn, the source of random choices, and variants of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, INT4, INT8
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.lazy import lazy_property
from fp4kit.recipes import ALL_RECIPES, Recipe, rules
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


COMPILED = {id: r for id, r in ALL_RECIPES.items() if not r.specification_only}
MANY = 1 << 20  # more elements than an array has; a limit that stays valid while shrinking changes the array's shape


@dataclass(frozen=True)
class Variant:
    """A recipe of the table, with some fields changed: (field, new value) pairs."""

    id: str
    changes: tuple[tuple[str, Any], ...] = ()

    @lazy_property
    def recipe(self) -> Recipe:
        base = COMPILED[self.id]
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

    recipes: tuple[str, ...] = tuple(COMPILED)
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
        known = {"recipes": COMPILED, "operations": OPERATIONS, "layouts": SCALE_LAYOUTS, "units": UNITS}
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
    numbers are simpler, so sequences to choose from begin with the simplest choice. ``refused`` counts the changes of
    recipes that Recipe rejected.
    """

    def __init__(self, seed: int, pool: Pool) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = pool
        self.made: list[int] = []
        self.seeds: list[int] = []
        self.refused = 0

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

E8M0_RULES = [name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E8M0" and "flashinfer" not in name]
E4M3_RULES = [name for name, rule in rules.BLOCK_RULES.items() if rule.scale == "E4M3" and rule.flush is False]
E8M0_DECODE = [name for name, rule in rules.DECODE_RULES.items() if rule.scales == ("E8M0",)]
E4M3_DECODE = ["product", "compressed_tensors", "stored_divisor", "auto_round", "gguf", "modelopt", "mlx_0322"]
OTHER_DECODE = ["te", "fouroversix", "fouroversix_float32", "int_modelopt"]
TENSOR_RULES = [name for name, over in rules.TENSOR_RULES.items() if over == "E4M3"]
UNSCALED_TENSOR_RULES = ["fp8_modelopt", "fp8_transformers", "fp8_deepgemm", "int_modelopt", "int4_qat"]
SQUARES = [(16, 16), (32, 32), (8, 8), (2, 16), (4, 32), (16, 32), (64, 64)]
FIRST = {"rounding": "first", "nan_code": 0}
FLAGS = (False, True)


def _with_block_rule(name: str) -> dict[str, Any]:
    apply = rules.BLOCK_RULES[name].apply
    return {"block_rule": name, "apply": apply} | (FIRST if apply == "compare" else {})


# {field: the new values to choose from}. A value that is a dict changes several fields.
CHANGES: dict[str, Sequence[Any]] = {
    "block": [
        *((1, n) for n in (16, 32, 64, 128, 8, 2)),
        *((n, n) for n in (16, 32, 8, 64)),
        (2, 16),
        (4, 32),
        (16, 32),
    ],
    "element": (E2M1, E2M3, E3M2, E4M3, E5M2, E1M2, E3M0, INT4, INT8),
    "tensor_scaling": ("tensor", "row", "block"),
    "rounding": [FIRST if name == "first" else name for name in rules.ROUNDINGS],
    "sign": tuple(rules.SIGNS),
    "nan_code": (None, 0, 3, 7, 8),
    "amax_nan": ("ignore", "propagate", "lanes"),
    "static": FLAGS,
    "search": ("", *rules.SEARCHES),
    "narrow": FLAGS,
    "scale_max": (448, 256),
    "apply": ("multiply", "divide"),
    "decode_rule": (*E4M3_DECODE, *OTHER_DECODE, *E8M0_DECODE),
    "block_rule": [*map(_with_block_rule, [*E4M3_RULES, *E8M0_RULES])],
    "tensor_rule": (*TENSOR_RULES, *UNSCALED_TENSOR_RULES),
    "round_scaled": FLAGS,
    "stochastic": rules.WITH_NEAREST,
    "repacked": FLAGS,
    "nan_is_max": FLAGS,
    "nan_sign": FLAGS,
    "four_over_six": rules.ERRORS,
    "fast_error": FLAGS,
    "lane_sums": FLAGS,
}
TRIES = 5  # values that are tried per change


def draw_variant(d: Picks, id: str, changes: int) -> Variant:
    """Return recipe ``id`` as a Variant with up to ``changes`` changes, each of which Recipe accepts."""
    r = COMPILED[id]
    found: dict[str, Any] = {}
    for _ in range(changes):
        for _ in range(TRIES):
            name = d.pick(tuple(CHANGES))
            value = d.pick(CHANGES[name])
            fields = value if isinstance(value, dict) else {name: value}
            try:
                r = replace(r, **fields)  # Recipe knows which fields fit together
            except ValueError:
                d.refused += 1
            else:
                found |= fields
                break
    return Variant(id, tuple((name, value) for name, value in found.items() if getattr(COMPILED[id], name) != value))
