"""A case: one operation with a recipe, arrays and options, as data; drawn from one integer.

Options say what is wanted, not which array: sizes of amaxes, random bytes and outputs follow from the shapes when the
program is written, so that a case of smaller shapes is a case, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import lcm, prod
from typing import Any

import numpy as np

from fp4kit.call.search_scales import is_searchable
from fp4kit.evidence.fuzz.arrays import KINDS, NUMBERS, DrawnArray, View
from fp4kit.evidence.fuzz.recipes import Variant, draw_variant
from fp4kit.formats import E4M3
from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.recipes import RECIPES, Recipe

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
)
GROUPED = ("quantize_grouped", "fake_quantize_grouped", "amax_grouped", "backward_grouped", "plan")
VALUES_ONLY = (
    "fake_quantize",
    "fake_quantize_grouped",
    "amax",
    "amax_grouped",
    "backward",
    "backward_grouped",
)  # what fake-only recipes have
FLATTENED = ("partial", "master_weights")
FAULTS = ("length", "axis", "dtype", "seed", "layout", "amax shape", "negative amax", "block_amax")
LENGTHS = (1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 256)
MOST_SEARCHED = 1 << 12  # elements of an array: the specification tries 126 scales, or 39 amaxes
BLOCKED = (16, 32, 48, 64, 96, 128, 160, 256, 272, 512, 1024)


@dataclass(frozen=True)
class Pool:
    """What cases are drawn from. changes: the most fields of a recipe that a variant changes; largest: elements of an
    array.

    variants: recipes that are drawn as they are, beside recipes.
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

    def __post_init__(self) -> None:
        for name, known in (("recipes", tuple(RECIPES)), ("operations", OPERATIONS), ("layouts", SCALE_LAYOUTS)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown or not getattr(self, name):
                raise ValueError(f"fuzz: {name} holds {unknown or 'nothing'}; needs some of {', '.join(known)}")


@dataclass(frozen=True)
class DrawnOptions:
    """What a call has beside arrays and recipe; a default is the simplest choice. seed: of random numbers and
    amaxes.
    """

    seed: int = 0
    layout: str = "linear"
    rounding: str = "nearest"  # "seed" or "bytes": stochastic
    hadamard: Any = False
    tensor_amax: str = ""  # "number" or "array": of the shape that the recipe has, or one per expert
    block_amax: bool = False
    out: str = ""  # "guarded" or "strided"
    decoded: str = ""  # a dtype
    target: Variant | None = None
    target_layout: str = "linear"
    pass_through: bool = False
    axes: Any = None  # of amax
    cuts: tuple[float, ...] = ()  # of the flattened matrix, as parts of it
    columnwise: bool = False
    stacked: bool = False
    fake: bool = False  # of a plan
    objective: str = "mse"  # of a search
    candidates: str = ""  # "near", or "some"
    columns: str = ""  # what a search has of them: "weights" or "hessian"
    fault: str = ""  # what makes the call one to be refused


@dataclass(frozen=True)
class DrawnCase:
    """One operation on arrays. axis: of each array, or of each member of a stacked one."""

    operation: str
    recipe: Variant
    arrays: tuple[DrawnArray, ...]
    axis: int
    options: DrawnOptions

    @property
    def r(self) -> Recipe:
        return self.recipe.recipe

    @property
    def x(self) -> DrawnArray:
        return self.arrays[0]

    def changed_options(self) -> list[str]:
        """Names of the options that are not the simplest."""
        return [f.name for f in fields(DrawnOptions) if f.name != "seed" and getattr(self.options, f.name) != f.default]

    def __str__(self) -> str:
        named = {name: getattr(self.options, name) for name in self.changed_options()}
        shapes = " ".join(f"{a.dtype}{list(a.shape)}" for a in self.arrays)
        return (
            f"{self.operation} {self.recipe.id} {dict(self.recipe.changes) or ''} {shapes} axis {self.axis}"
            f" {named or ''}"
        )


class Draw:
    """What is drawn for one case, in order."""

    def __init__(self, seed: int, pool: Pool) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = pool
        self.refused = 0

    def pick(self, choices: Any) -> Any:
        """One of them."""
        return choices[self.rng.integers(len(choices))]

    def often(self, probability: float) -> bool:
        """True with a probability."""
        return bool(self.rng.random() < probability)

    def case(self) -> DrawnCase:
        """Operation, recipe, shapes and options that fit; rarely with a fault that must be refused."""
        operation = self.pick(tuple(_served(self.pool)))
        recipe = self.variant(operation)
        fault = (
            self.pick(FAULTS) if self.pool.faults and self.often(0.03) and operation != "plan" else ""
        )  # a plan may wait
        options = replace(self.options(operation, recipe.recipe), fault=fault)
        ndim = 2 if operation in FLATTENED else max(int(self.pick((1, 2, 2, 2, 3, 3, 4))), 1 + (operation in _MATRICES))
        axis = -1 if operation in _ROWS else int(self.rng.integers(-ndim, ndim))
        if operation == "transpose":
            axis = self.pick((-1, -2))
        if ndim == 1:
            options = replace(options, layout="linear", target_layout="linear")  # the others need the rows of a matrix
        count = int(self.rng.integers(1, 5)) if operation in (*GROUPED, "master_weights") and not options.stacked else 1
        arrays = tuple(self.array(operation, recipe.recipe, ndim, axis, options) for _ in range(count))
        return DrawnCase(operation, recipe, arrays, axis, options)

    def variant(self, operation: str) -> Variant:
        """A recipe or variant for an operation, which Recipe does not refuse."""
        variants = _served(self.pool)[operation]
        for _ in range(50):
            variant = self.pick(variants)
            if not variant.changes and self.pool.changes and self.often(0.5):
                variant = draw_variant(self.rng, variant.id, int(self.rng.integers(1, self.pool.changes + 1)))
            try:
                _ = variant.recipe
            except (ValueError, TypeError):
                self.refused += 1
            else:
                return variant
        return self.pick(variants)

    def options(self, operation: str, r: Recipe) -> DrawnOptions:
        """Options that the operation and the recipe have."""
        scaled, floats = r.scale is not None and not r.fake_only, not (r.element.is_integer or r.four_over_six)
        coded, fake = (
            operation in _CODES,
            r.fake_rule is not None and operation in ("fake_quantize", "fake_quantize_grouped"),
        )
        has_layout = scaled and operation not in (*VALUES_ONLY, "partial", "swizzle_bytes")
        stochastic = floats and operation in _ROUNDED and not fake and self.often(0.25)
        roundings = [
            kind for kind in self.pool.roundings if kind in (("seed",) if operation in _SEEDED else ("seed", "bytes"))
        ]
        found = DrawnOptions(
            seed=int(self.rng.integers(1 << 40)),
            layout=self.pick(self.pool.layouts) if has_layout else "linear",
            rounding=self.pick(roundings) if stochastic and roundings else "nearest",
            hadamard=self.pick(self.pool.hadamard) if coded and self.often(0.3) else False,
            tensor_amax=(
                self.pick(("number", "array", "column")) if r.tensor_scaling != "none" and self.often(0.4) else ""
            ),
            block_amax=r.static
            and (coded or operation in _ROUNDED)
            and operation != "quantize_both"
            and self.often(0.6),
            out=self.pick(("", "", "guarded", "strided")) if operation in ("quantize", "with_scales", "decode") else "",
            decoded=self.pick(("", *self.pool.dtypes)),
            target=self.variant("requantize") if operation == "requantize" else None,
            target_layout=self.pick(self.pool.layouts),
            pass_through=self.often(0.3),
            axes=self.pick((None, 0, -1, "all")),
            cuts=tuple(float(cut) for cut in sorted(self.rng.random(self.rng.integers(0, 4)))),
            columnwise=r.block is not None and r.block[0] == r.block[1] > 1 and self.often(0.5),
            stacked=operation in GROUPED and self.often(0.4),
            fake=self.often(0.4),
        )
        return self.search(found, r) if operation == "search_scales" else found

    def search(self, options: DrawnOptions, r: Recipe) -> DrawnOptions:
        """The same with what is searched."""
        by_hessian = r.scale == E4M3 and self.often(0.3)
        objective = "mse" if by_hessian else self.pick(("mse", "mse", "mae", "max", "p2.4", "p3"))
        columns = "hessian" if by_hessian else self.pick(("", "weights"))
        return replace(options, objective=objective, columns=columns, candidates=self.pick(("", "", "near", "some")))

    # ---- arrays
    # ---------------------------------------------------------------------------------------------------------

    def array(self, operation: str, r: Recipe, ndim: int, axis: int, options: DrawnOptions) -> DrawnArray:
        """An array whose lengths fit the blocks; of a stack, one with the experts first."""
        shape = self.shape(operation, r, ndim, axis % ndim, options)
        if options.stacked:
            shape = (int(self.rng.integers(1, 5)), *shape)
        kind = self.pick(NUMBERS if operation in FLATTENED else KINDS)
        dtype = self.pick(self.pool.dtypes)
        if operation in ("pack", "swizzle_bytes"):
            kind, dtype = ("codes" if operation == "pack" else "bytes"), "uint8"
        view = self.view(len(shape), flat=operation in FLATTENED)
        return DrawnArray(kind, dtype, shape, int(self.rng.integers(1 << 40)), view)

    def shape(self, operation: str, r: Recipe, ndim: int, axis: int, options: DrawnOptions) -> tuple[int, ...]:
        """Lengths around those of tiles; whole blocks along the axis, and along the other one where blocks are moved
        there.
        """
        shape = [int(self.pick(LENGTHS)) for _ in range(ndim)]
        multiple = lcm(r.length_multiple, 16 if options.hadamard else 1, 2 if operation == "pack" else 1)
        if options.target is not None:
            multiple = lcm(multiple, options.target.recipe.length_multiple)
        multiples = dict.fromkeys(range(ndim - 2, ndim) if operation in _BOTH_WAYS else (axis,), multiple)
        if options.columnwise and operation == "master_weights":
            multiples[0] = multiple
        for i, unit in multiples.items():
            shape[i] = -(-int(self.pick(BLOCKED)) // unit) * unit
        met = [r] if options.target is None else [r, options.target.recipe]
        is_searched = operation == "search_scales" or any(one.search for one in met)
        most = min(self.pool.largest, MOST_SEARCHED) if is_searched else self.pool.largest
        for i in self.rng.permutation(ndim):
            if prod(shape) > most:
                shape[i] = multiples.get(i) or int(self.pick((1, 2, 3)))
        if self.often(0.03):
            shape[self.rng.integers(ndim)] = 0
        return tuple(shape)

    def view(self, ndim: int, flat: bool) -> View:
        """Often plain; else with another order, steps, and an offset."""
        view = View.plain(ndim)
        if self.often(0.5):
            offset = int(self.rng.integers(0, 9)) if self.often(0.6) else 0
            if flat:
                return replace(view, offset=offset)
            order = tuple(self.rng.permutation(ndim).tolist()) if self.often(0.5) else view.order
            view = View(order, tuple(self.rng.choice([1, 1, 1, 2, -1, 3], ndim).tolist()), offset)
        return view


_CODES = ("quantize", "quantize_both", "with_scales", "quantize_grouped", "plan")
_ROUNDED = (
    "quantize",
    "quantize_both",
    "with_scales",
    "fake_quantize",
    "quantize_grouped",
    "fake_quantize_grouped",
    "plan",
)
_SEEDED = ("quantize_both", "quantize_grouped", "fake_quantize_grouped", "plan")  # one seed for several arrays
_MATRICES = ("quantize_both", "transpose", "swizzle", "swizzle_bytes", "decode")
_BOTH_WAYS = ("quantize_both", "transpose")
_ROWS = ("quantize_both", "pack", "swizzle_bytes", *FLATTENED)


def _serves(operation: str, r: Recipe) -> bool:
    """Whether a recipe of the table has what an operation needs."""
    if r.fake_only and operation not in VALUES_ONLY:
        return False
    if operation in FLATTENED:
        return r.block is not None and r.tensor_scaling in ("none", "tensor") and not (r.four_over_six or r.search)
    if operation == "transpose":
        return r.block is not None and r.block[0] > 1
    if operation == "search_scales":
        return is_searchable(r)
    return r.scale is not None if operation in ("swizzle",) else True


@cache
def _served(pool: Pool) -> dict[str, tuple[Variant, ...]]:
    """The recipes and variants of a pool that each operation is defined for; operations without any are left out."""
    variants = (*map(Variant, pool.recipes), *pool.variants)
    served = {name: tuple(variant for variant in variants if _serves(name, variant.recipe)) for name in pool.operations}
    if not any(served.values()):
        raise ValueError(
            f"fuzz: operations {', '.join(pool.operations)} are not defined for any of the recipes; take others"
        )
    return {name: found for name, found in served.items() if found}


def draw(seed: int, pool: Pool) -> tuple[DrawnCase, int]:
    """The case of an integer, and how many variants were refused on the way."""
    d = Draw(seed, pool)
    return d.case(), d.refused
