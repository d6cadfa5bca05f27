"""Define the pool of recipes, operations and options that fuzz cases are drawn from, and pick from it at random.
A case describes one random test. A variant is a recipe, or a matrix unit, with some fields changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arrays import View
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.recipes import RECIPES
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
