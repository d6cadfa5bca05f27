"""Draw a fuzz case from an integer: plain data that describes an operation, a recipe, arrays and options.
The pool (pool.py) holds the recipes, operations and options that may be drawn. A variant is a recipe with some fields
changed.

Options contain no sizes. An option says, for example, only that a call gets an array of random bytes. The sizes of
amaxes, random bytes and outputs follow from the shapes of the arrays when the program is built. A case therefore stays
valid when shrinking makes its arrays smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import lcm, prod
from typing import Any

from fp4kit.call.search_scales import is_searchable
from fp4kit.evidence.fuzz.arrays import KINDS, NUMBERS, DrawnArray
from fp4kit.evidence.fuzz.pool import Picks, Pool
from fp4kit.evidence.fuzz.products import DrawnProduct, draw_product
from fp4kit.evidence.fuzz.recipes import Variant, draw_variant
from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import FAKE_RULES, NOISE_STOCHASTICS, SCALE_STOCHASTICS

GROUPED = ("quantize_grouped", "fake_quantize_grouped", "amax_grouped", "backward_grouped", "plan")
# Operations that return no codes. Only these are drawn for recipes without codes.
VALUES_ONLY = (
    "fake_quantize",
    "fake_quantize_grouped",
    "amax",
    "amax_grouped",
    "backward",
    "backward_grouped",
)
FLATTENED = ("partial", "master_weights")  # operations on shards of a flattened matrix
FAULTS = ("length", "axis", "dtype", "seed", "layout", "amax shape", "negative amax", "block_amax")
# Lengths of axes to draw from, at and next to the tile sizes of kernels. LENGTHS is for axes that are not quantized.
# BLOCKED is for quantized axes.
LENGTHS = (1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 256)
MAX_SEARCHED = 1 << 12  # elements per array in searches, where the specification tries 126 scales or 39 amaxes
BLOCKED = (16, 32, 48, 64, 96, 128, 160, 256, 272, 512, 1024)


@dataclass(frozen=True)
class DrawnOptions:
    """The options of a fuzz case: everything except the operation, recipe, arrays, axis and matrix product.

    Every default is the simplest choice, such as no option or the linear layout. Random bytes and amaxes are drawn from
    ``seed``.
    """

    seed: int = 0
    layout: str = "linear"
    rounding: str = "nearest"  # "seed" or "bytes": stochastic, with a seed or an array of random bytes
    hadamard: Any = False
    tensor_amax: str = ""  # "number", or an array as the recipe needs it: "array", or "column" with a further axis
    block_amax: bool = False
    out: str = ""  # "guarded" or "strided": repeat the call with such an output
    decoded: str = ""  # dtype to decode to; "": the dtype of the array
    target: Variant | None = None  # the recipe to requantize to
    target_layout: str = "linear"  # the layout that swizzle converts to
    pass_through: bool = False  # argument of fake_quantize_backward; in "partial": leave out the last shard
    axes: Any = None  # argument axis of amax
    cuts: tuple[float, ...] = ()  # where a flattened matrix is cut into shards, as fractions of its length
    columnwise: bool = False  # argument of cast_master_weights
    stacked: bool = False  # True: a group is one stacked array instead of a list
    fake: bool = False  # True: a plan runs fake_quantize instead of quantize
    objective: str = "mse"  # argument objective of search_scales
    candidates: str = ""  # "near" or "some": kind of the argument candidates of search_scales
    columns: str = ""  # "weights" or "hessian": pass this argument to search_scales
    fault: str = ""  # why the call must be rejected, one of FAULTS


@dataclass(frozen=True)
class DrawnCase:
    """One fuzz case, described by plain data: an operation on random arrays.

    Attributes:
        operation: a name in OPERATIONS.
        recipe: the recipe, or a variant of one.
        arrays: the input arrays; several only for grouped operations and master weights.
        axis: the quantized axis of each array. If an array is a stack of experts, it is the axis of one expert's array.
        options: everything else.
        product: the matrix product of the operation "matmul", which has its own arrays; ``arrays`` is then empty.
    """

    operation: str
    recipe: Variant
    arrays: tuple[DrawnArray, ...]
    axis: int
    options: DrawnOptions
    product: DrawnProduct | None = None

    @property
    def r(self) -> Recipe:
        """Return the case's Recipe, with the changes of its variant applied."""
        return self.recipe.recipe

    @property
    def x(self) -> DrawnArray:
        """Return the first array, which is the only one for most operations. A "matmul" has none: IndexError."""
        return self.arrays[0]

    def changed_options(self) -> list[str]:
        """Return the names of options that differ from their defaults, except the seed."""
        return [f.name for f in fields(DrawnOptions) if f.name != "seed" and getattr(self.options, f.name) != f.default]

    def __str__(self) -> str:
        """Return the case as one line: operation, recipe and its changes, arrays, axis and options with their
        values.
        """
        if self.product is not None:
            return f"{self.operation} {self.product}"
        named = {name: getattr(self.options, name) for name in self.changed_options()}
        shapes = " ".join(f"{a.dtype}{list(a.shape)}" for a in self.arrays)
        return (
            f"{self.operation} {self.recipe.id} {dict(self.recipe.changes) or ''} {shapes} axis {self.axis} "
            f"{named or ''}"
        )


class Draw(Picks):
    """Draw the parts of one fuzz case from an integer, in a fixed order.

    ``refused`` counts variants that Recipe rejected.
    """

    def __init__(self, seed: int, pool: Pool) -> None:
        super().__init__(seed, pool)
        self.refused = 0

    def case(self) -> DrawnCase:
        """Return a random fuzz case whose options fit its operation and recipe."""
        operation = self.pick(tuple(_supported(self.pool)))
        recipe = self.variant(operation)
        if operation == "matmul":
            return DrawnCase(operation, recipe, (), -1, DrawnOptions(), draw_product(self, recipe))
        # Plans get no fault, because a plan may reject the faulty argument only when it runs.
        fault = self.pick(FAULTS) if self.pool.faults and self.chance(0.03) and operation != "plan" else ""
        options = replace(self.options(operation, recipe.recipe), fault=fault)
        ndim = 2 if operation in FLATTENED else max(int(self.pick((1, 2, 2, 2, 3, 3, 4))), 1 + (operation in _MATRICES))
        axis = -1 if operation in _ROWS else int(self.rng.integers(-ndim, ndim))
        if operation == "transpose":
            axis = self.pick((-1, -2))
        if ndim == 1:
            # Swizzled layouts need a matrix.
            options = replace(options, layout="linear", target_layout="linear")
        count = int(self.rng.integers(1, 5)) if operation in (*GROUPED, "master_weights") and not options.stacked else 1
        arrays = tuple(self.array(operation, recipe.recipe, ndim, axis, options) for _ in range(count))
        return DrawnCase(operation, recipe, arrays, axis, options)

    def variant(self, operation: str) -> Variant:
        """Return a recipe of the pool that supports the operation, or a valid variant of it (with changed fields)."""
        variants = _supported(self.pool)[operation]
        for _ in range(50):
            variant = self.pick(variants)
            if not variant.changes and self.pool.changes and self.chance(0.5):
                variant = draw_variant(self.rng, variant.id, int(self.rng.integers(1, self.pool.changes + 1)))
            try:
                _ = variant.recipe
            except (ValueError, TypeError):
                self.refused += 1
            else:
                return variant
        return self.pick(variants)

    def target(self, r: Recipe) -> Variant:
        """Return a recipe to requantize to, for the source recipe ``r``."""
        nvfp4 = [one for one in _supported(self.pool)["requantize"] if one.recipe.scale == E4M3]
        if nvfp4 and r.element == E2M1 and r.scale == E8M0 and self.chance(0.5):
            return self.pick(nvfp4)
        return self.variant("requantize")

    def options(self, operation: str, r: Recipe) -> DrawnOptions:
        """Return random options that the operation and the recipe support."""
        scaled, floats = r.scale is not None and not r.fake_only, not (r.element.is_integer or r.four_over_six)
        coded, fake = (
            operation in _CODES,
            r.fake_rule is not None and operation in ("fake_quantize", "fake_quantize_grouped"),
        )
        has_layout = scaled and operation not in (*VALUES_ONLY, "partial", "swizzle_bytes")
        rule = FAKE_RULES[r.fake_rule].stochastic if fake and r.fake_rule else "any"
        stochastic = floats and operation in _ROUNDED and rule != "" and self.chance(0.25)
        seeded = operation in _SEEDED or r.stochastic in (*NOISE_STOCHASTICS, *SCALE_STOCHASTICS)
        roundings = [kind for kind in self.pool.roundings if kind in (("seed",) if seeded else ("seed", "bytes"))]
        if r.stochastic == "comfyui_nvfp4_cuda":  # it accepts no seed
            roundings = []
        found = DrawnOptions(
            seed=int(self.rng.integers(1 << 40)),
            layout=self.pick(self.pool.layouts) if has_layout else "linear",
            rounding=self.pick(roundings) if stochastic and roundings else "nearest",
            hadamard=self.pick(self.pool.hadamard) if coded and self.chance(0.3) else False,
            tensor_amax=(
                self.pick(("number", "array", "column")) if r.tensor_scaling != "none" and self.chance(0.4) else ""
            ),
            block_amax=r.static
            and (coded or operation in _ROUNDED)
            and operation != "quantize_both"
            and self.chance(0.6),
            out=self.pick(("", "", "guarded", "strided")) if operation in ("quantize", "with_scales", "decode") else "",
            decoded=self.pick(("", *self.pool.dtypes)),
            target=self.target(r) if operation == "requantize" else None,
            target_layout=self.pick(self.pool.layouts),
            pass_through=self.chance(0.3),
            axes=self.pick((None, 0, -1, "all")),
            cuts=tuple(float(cut) for cut in sorted(self.rng.random(self.rng.integers(0, 4)))),
            columnwise=r.block is not None and r.block[0] == r.block[1] > 1 and self.chance(0.5),
            stacked=operation in GROUPED and self.chance(0.4),
            fake=self.chance(0.4),
        )
        return self.search(found, r) if operation == "search_scales" else found

    def search(self, options: DrawnOptions, r: Recipe) -> DrawnOptions:
        """Return a copy of the options with random options of search_scales set. Only E4M3 scales get a Hessian."""
        by_hessian = r.scale == E4M3 and self.chance(0.3)
        objective = "mse" if by_hessian else self.pick(("mse", "mse", "mae", "max", "p2.4", "p3"))
        columns = "hessian" if by_hessian else self.pick(("", "weights"))
        return replace(options, objective=objective, columns=columns, candidates=self.pick(("", "", "near", "some")))

    # ---- arrays ----

    def array(self, operation: str, r: Recipe, ndim: int, axis: int, options: DrawnOptions) -> DrawnArray:
        """Return a description of a random array that suits the operation, the recipe and the options."""
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
        """Return ``ndim`` random axis lengths near multiples of the tile sizes of kernels."""
        shape = [int(self.pick(LENGTHS)) for _ in range(ndim)]
        multiple = lcm(r.length_multiple, 16 if options.hadamard else 1, 2 if operation == "pack" else 1)
        if options.target is not None:
            multiple = lcm(multiple, options.target.recipe.length_multiple)
        multiples = dict.fromkeys(range(ndim - 2, ndim) if operation in _BOTH_WAYS else (axis,), multiple)
        if options.columnwise and operation == "master_weights":
            multiples[0] = multiple
        for i, unit in multiples.items():
            shape[i] = -(-int(self.pick(BLOCKED)) // unit) * unit
        recipes = [r] if options.target is None else [r, options.target.recipe]
        is_searched = operation == "search_scales" or any(recipe.search for recipe in recipes)
        max_elements = min(self.pool.largest, MAX_SEARCHED) if is_searched else self.pool.largest
        for i in self.rng.permutation(ndim):
            if prod(shape) > max_elements:
                shape[i] = multiples.get(i) or int(self.pick((1, 2, 3)))
        if self.chance(0.03):
            shape[self.rng.integers(ndim)] = 0
        return tuple(shape)


# ---- groups of operations
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
# Operations that quantize several arrays with one seed.
_SEEDED = (
    "quantize_both",
    "quantize_grouped",
    "fake_quantize_grouped",
    "plan",
)
_MATRICES = ("quantize_both", "transpose", "swizzle", "swizzle_bytes", "decode")
_BOTH_WAYS = ("quantize_both", "transpose")
_ROWS = ("quantize_both", "pack", "swizzle_bytes", *FLATTENED)


def _supports(operation: str, r: Recipe) -> bool:
    """Return True if a recipe supports an operation, so that fuzz cases with both are drawn."""
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
def _supported(pool: Pool) -> dict[str, tuple[Variant, ...]]:
    """Return {operation: the recipes and variants in the pool that support it}."""
    variants = (*map(Variant, pool.recipes), *pool.variants)
    supported = {
        name: tuple(variant for variant in variants if _supports(name, variant.recipe)) for name in pool.operations
    }
    if not any(supported.values()):
        raise ValueError(
            f"fuzz: operations {', '.join(pool.operations)} are not defined for any of the recipes; choose other "
            "recipes or operations"
        )
    return {name: found for name, found in supported.items() if found}


def draw(seed: int, pool: Pool) -> tuple[DrawnCase, int]:
    """Return a fuzz case drawn from the integer ``seed``, and the number of recipe variants rejected meanwhile."""
    d = Draw(seed, pool)
    return d.case(), d.refused
