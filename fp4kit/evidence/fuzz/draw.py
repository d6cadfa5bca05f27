"""Draw a fuzz case from an integer: plain data that describes an operation, a recipe, arrays and options.

Options contain no sizes. An option says, for example, only that a call gets an array of random bytes. The sizes of
amaxes, random bytes and outputs follow from the shapes of the arrays when the program is built.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import lcm, prod
from typing import Any

from fp4kit.call.matmul import Operand, step_of, takes_float32
from fp4kit.call.search_scales import is_searchable
from fp4kit.evidence.fuzz.arrays import DISTANCES, FORMATS, KINDS, NUMBERS, PATTERNS, DrawnArray
from fp4kit.evidence.fuzz.recipes import Picks, Pool, Variant, draw_variant
from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.quantized.container import scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe, is_simple
from fp4kit.recipes.rules import FAKE_RULES
from fp4kit.units import ENGINE_ORDERS, UNITS, DotAdd, IntegerAdd, Unit

# {dtype of an operand that is an array: the format of its codes, or "" if it has 16 or 32 bits}
ARRAYS = {
    "float32": "",
    "bfloat16": "",
    "float16": "",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "float8_e4m3fnuz": "E4M3FNUZ",
    "float8_e5m2fnuz": "E5M2FNUZ",
}
FLOAT8 = tuple(dtype for dtype, format in ARRAYS.items() if format)
MAX_PRODUCTS = 1 << 18  # products of elements per case, because the specification computes some 10^7 per second
LONGEST = 1 << 16  # the largest K
ROWS = (1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129)
ALPHAS = (0.5, -3.7, 1e-30, 3e38, 0.0, -0.0, float("inf"))
C_KINDS = ("ordinary", "bits", "tiny", "zeros", "sprinkled", "constant", "outlier")
_PAIRS = [(f"paired by {d}", f"opposed by {d}") for d in DISTANCES]


@dataclass(frozen=True)
class DrawnOperand:
    """One random operand of a matrix product, described by plain data.

    Attributes:
        codes: the codes (..., rows, K), one per byte; or the elements if the operand is an array of a 16-bit dtype.
        recipe: the recipe of a Quantized; None if the operand is an array.
        dtype: dtype of an operand that is an array, a key of ARRAYS; "" for a Quantized.
        scales: block scales in the linear layout, (..., rows, K / block); None if the recipe has none.
        tensor_scale: the tensor scale; None if the recipe has none.
        columns: True if a Quantized has its quantized axis before the last axis.
        layout: the layout of the block scales.
    """

    codes: DrawnArray
    recipe: Variant | None = None
    dtype: str = ""
    scales: DrawnArray | None = None
    tensor_scale: DrawnArray | None = None
    columns: bool = False
    layout: str = "linear"

    @property
    def multiple(self) -> int:
        """Return the number that K, the length of the summed axis, must be a multiple of; 1 for an array."""
        return 1 if self.recipe is None else self.recipe.recipe.length_multiple

    def __str__(self) -> str:
        name = self.dtype if self.recipe is None else f"{self.recipe.id} {dict(self.recipe.changes) or ''}".strip()
        return f"{name} {list(self.codes.shape)}"


@dataclass(frozen=True)
class DrawnProduct:
    """One random call to fp4kit.matmul, described by plain data.

    Attributes:
        a, b: the operands.
        unit: the unit, or a variant of one.
        c: the array that products are added to; None for zeros.
        alpha: the number that multiplies the sums; None for the tensor scales.
        out_dtype: dtype of the result.
        swapped: True to compare the result also with the transpose of the product of b and a.
    """

    a: DrawnOperand
    b: DrawnOperand
    unit: Unit
    c: DrawnArray | None = None
    alpha: float | None = None
    out_dtype: str = "float32"
    swapped: bool = False

    @property
    def sums(self) -> int:
        """Return the number of elements of the result."""
        a, b = self.a.codes.shape, self.b.codes.shape
        return prod(a[:-2] or b[:-2]) * a[-2] * b[-2]

    def __str__(self) -> str:
        """Return the product as one line: operands, unit and its changes, c, alpha and the dtype of the result."""
        c = "" if self.c is None else f" c {self.c.dtype} {self.c.kind}"
        alpha = "" if self.alpha is None else f" alpha {self.alpha}"
        return f"{self.a} x {self.b} by {self.unit.id} {changes_of(self.unit) or ''}{c}{alpha} to {self.out_dtype}"


def changes_of(u: Unit) -> dict[str, Any]:
    """Return {field: value} for the fields of the matrix unit ``u`` that differ from UNITS[u.id], without `checked`."""
    names = [one.name for one in fields(Unit) if one.name != "checked"]
    return {name: getattr(u, name) for name in names if getattr(u, name) != getattr(UNITS[u.id], name)}


# ---- matrix products ----


@cache
def _operand(kind: Variant | str) -> Operand | None:
    """Return an Operand of a recipe or dtype without arrays, or None if only "dequantized" multiplies such operands."""
    if isinstance(kind, str):
        return Operand(None, ARRAYS[kind] or kind, None, None, 1, None, 0)
    r = kind.recipe
    if r.tensor_scaling == "block" or r.element.is_integer or r.element.name not in FORMATS:
        return None
    return Operand(None, r.element.name, r.scale, r.scale, r.block_size if r.scale else 1, None, 0)


def units_for(a: Variant | str, b: Variant | str) -> tuple[str, ...]:
    """Return the ids of the matrix units that can multiply two operands, each given by its recipe or by its dtype."""
    return _units_for(_operand(a), _operand(b))


@cache
def _units_for(a: Operand | None, b: Operand | None) -> tuple[str, ...]:
    # "dequantized" decodes both operands first, so it takes every recipe, but no float32 arrays.
    arrays = [x.element for x in (a, b) if x]
    return tuple(
        id for id in UNITS if (id == "dequantized" and "float32" not in arrays) or (a and b and _accepts(a, b, id))
    )


def _accepts(a: Operand, b: Operand, id: str) -> bool:
    u = UNITS[id]
    if "float32" in (a.element, b.element) and not takes_float32(u):
        return False
    if u.order is None:
        a, b = (x._replace(element="tf32") if x.element == "float32" else x for x in (a, b))
    try:
        step_of("matmul", u, a, b)
    except ValueError:
        return False
    return True


def _draw_unit(d: Picks, ids: tuple[str, ...]) -> Unit:
    u = UNITS[d.pick(ids)]
    if u.order is not None or not d.pool.changes or not d.chance(0.35):
        return u
    if d.chance(0.5):
        u = replace(u, **{kind: _other_step(d, step) for kind, step in u.steps().items()})
    promote = lcm(*(step.k for step in u.steps().values())) * d.pick((1, 2, 4, 12))
    return replace(u, promote=promote) if d.chance(0.6) and u.fp8_as is None else u


def _other_step(d: Picks, step: Any) -> Any:
    changes: dict[str, Any] = {"k": step.k * d.pick((1, 1, 2)), "zero_exponent": -d.pick((900, 139, 120, 2))}
    if isinstance(step, IntegerAdd):
        return step
    if isinstance(step, DotAdd):
        changes |= {"fraction_bits": 1 + d.below(40)}
        changes |= {"output_bits": 1 + d.below(23)} if step.output == "float32" else {}
        changes |= {"group": d.pick((4, 16))} if step.group > 1 else {}
    else:
        changes |= {"fraction_bits": 8 + d.below(25), "sum_bits": 8 + d.below(25)}
    return replace(step, **changes)


def _draw_product(d: Picks, recipe: Variant) -> DrawnProduct:
    for _ in range(20):
        kinds = _kinds(d, recipe)
        wanted = tuple(id for id in units_for(*kinds) if id in d.pool.units)
        if wanted:
            break
    refused = not wanted or (d.pool.faults and d.chance(0.03))
    u = _draw_unit(d, d.pool.units if refused else wanted)
    shape_a, shape_b, lead = _shapes(d, kinds, u)
    patterns = draw_patterns(d)
    a, b = (draw_operand(d, *each) for each in zip(kinds, (shape_a, shape_b), patterns, strict=True))
    c, is_engine = None, u.order in ENGINE_ORDERS
    if d.chance(0.6) and not is_engine:
        shape = (*lead, shape_a[-2], shape_b[-2])
        dtype = "float16" if u.id.endswith("-f16") else d.pick(d.pool.dtypes)
        c = d.array(d.pick(C_KINDS), dtype, shape, d.view(len(shape), flat=False))
    needs_alpha = u.order == "mlx-cpu" and b.tensor_scale is not None
    alpha = float(d.pick(ALPHAS)) if d.chance(0.3) or needs_alpha else None
    swapped = d.chance(0.3) and not is_engine
    return DrawnProduct(a, b, u, c=c, alpha=alpha, out_dtype=d.pick(d.pool.dtypes), swapped=swapped)


def _kinds(d: Picks, recipe: Variant) -> tuple[Variant | str, Variant | str]:
    if d.chance(0.2):  # an activation and the weight of an engine
        dtype = d.pick(("float32", "float32", "float16", "bfloat16"))
        if set(ENGINE_ORDERS) & set(units_for(dtype, recipe)):
            return dtype, recipe
    if d.chance(0.3):
        kind = d.pick(tuple(ARRAYS))
        family = [other for other in FLOAT8 if other.endswith("fnuz") == kind.endswith("fnuz")]
        return kind, d.pick(family) if kind in FLOAT8 else kind
    partners = _partners(d.pool, _operand(recipe))
    return recipe, d.pick(partners) if d.chance(0.5) and partners else recipe


@cache
def _partners(pool: Pool, a: Operand | None) -> tuple[Variant, ...]:
    """Return the recipes of a pool that can quantize the other operand of a product with the operand ``a``."""
    hardware = {id for id, u in UNITS.items() if u.order is None}
    others = [each for each in pool.every_variant() if not each.recipe.fake_only]
    return tuple(each for each in others if hardware & set(_units_for(a, _operand(each))))


def draw_patterns(d: Picks) -> tuple[str, str]:
    """Return the names of code patterns for two operands. In a quarter of the draws, their products cancel."""
    if d.chance(0.25):
        return d.pick(_PAIRS)
    return d.pick(tuple(PATTERNS)), d.pick(tuple(PATTERNS))


def _shapes(
    d: Picks, kinds: tuple[Variant | str, Variant | str], u: Unit
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes (..., rows, K) of two operands, and the leading axes of their product."""
    multiple = lcm(*(1 if isinstance(kind, str) else kind.recipe.length_multiple for kind in kinds))
    multiple = lcm(multiple, 64) if u.order == "ggml-avx2" else multiple
    step = d.pick([step.k for step in u.steps().values()] or [32])
    limit = min(d.pool.largest, LONGEST)
    length = d.limits_above(0.5, 0.03)
    K = limit if length == 2 else step * d.pick((1, 1, 2, 3, 8, 12)) if length else 1 + d.below(699)
    K = -(-min(K, limit) // multiple) * multiple
    M, N = d.pick(ROWS), d.pick(ROWS)
    stacked = d.pick(("", "", "", "ab", "a", "b"))
    lead = d.pick(((1,), (2,), (3,), (2, 2))) if stacked else ()
    while M * N > 1 and (prod(lead) * M * N * K > MAX_PRODUCTS or prod(lead) * max(M, N) * K > limit):
        M, N = -(-M // 2), -(-N // 2)
    sizes = [M, N, K]
    if d.chance(0.03):
        sizes[d.below(3)] = 0
    M, N, K = sizes
    N = -(-N // 8) * 8 if u.order == "ggml-avx2-repacked" else N
    return (*(lead if "a" in stacked else ()), M, K), (*(lead if "b" in stacked else ()), N, K), lead


def draw_operand(d: Picks, kind: Variant | str, shape: tuple[int, ...], pattern: str) -> DrawnOperand:
    """Return a random operand with the shape (..., rows, K): a Quantized with a recipe, or an array of a dtype."""
    view = d.view(len(shape), flat=False)
    if isinstance(kind, str):
        name = f"codes of {ARRAYS[kind]}, {pattern}" if ARRAYS[kind] else pattern
        return DrawnOperand(d.array(name, "uint8" if ARRAYS[kind] else kind, shape, view), dtype=kind)
    r, scales, tensor = kind.recipe, None, None
    codes = {4: "codes", 8: "bytes"}.get(r.element.bits, f"codes of {r.element.bits} bits")
    if r.element.name in FORMATS:
        codes = f"codes of {r.element.name}, {pattern}"
    if r.scale is not None:
        name = d.pick((*2 * (f"scale codes of {r.scale.name}",), "smallest scale codes", "bytes"))
        scales = d.array(name, "uint8", scale_shape(shape, r))
    if r.tensor_scaling != "none":
        per_expert = r.tensor_scaling == "tensor" and len(shape) > 2 and d.chance(0.5)
        tensor = d.array("amaxes", "float32", shape[:1] if per_expert else tensor_amax_shape(shape, r))
    layout = d.pick(d.pool.layouts) if r.scale is not None else "linear"
    found = d.array(codes, "uint8", shape, view)
    return DrawnOperand(found, kind, "", scales, tensor, columns=d.chance(0.3), layout=layout)


# ---- other operations ----

GROUPED = ("quantize_grouped", "fake_quantize_grouped", "amax_grouped", "backward_grouped", "plan")
# Operations that return no codes. Only these are drawn for recipes without codes.
VALUES_ONLY = ("fake_quantize", "fake_quantize_grouped", "amax", "amax_grouped", "backward", "backward_grouped")
# Only these are drawn for recipes with several levels of scales, or with a search of the whole array.
LEVELED = ("quantize", "fake_quantize", "quantize_grouped", "fake_quantize_grouped", "plan", "decode")
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
    rounding: str = "nearest"  # "seed", "bytes" or "numbers": stochastic, with a seed, or an array of random numbers
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

    def __str__(self) -> str:
        """Return the case as one line: operation, recipe and its changes, arrays, axis and options with their
        values.
        """
        if self.product is not None:
            return f"{self.operation} {self.product}"
        named = {f.name: getattr(self.options, f.name) for f in fields(DrawnOptions) if f.name != "seed"}
        named = {name: value for name, value in named.items() if value != getattr(DrawnOptions, name)}
        shapes = " ".join(f"{a.dtype}{list(a.shape)}" for a in self.arrays)
        changes = dict(self.recipe.changes) or ""
        return f"{self.operation} {self.recipe.id} {changes} {shapes} axis {self.axis} {named or ''}"


class Draw(Picks):
    """Draw the parts of one fuzz case, in a fixed order."""

    def case(self) -> DrawnCase:
        """Return a random fuzz case whose options fit its operation and recipe."""
        operation = self.pick(tuple(_supported(self.pool)))
        recipe = self.variant(operation)
        if operation == "matmul":
            return DrawnCase(operation, recipe, (), -1, DrawnOptions(), _draw_product(self, recipe))
        # Plans get no fault, because a plan may reject the faulty argument only when it runs.
        fault = self.pick(FAULTS) if self.pool.faults and self.chance(0.03) and operation != "plan" else ""
        options = replace(self.options(operation, recipe.recipe), fault=fault)
        ndim = 2 if operation in FLATTENED else max(self.pick((1, 2, 2, 2, 3, 3, 4)), 1 + (operation in _MATRICES))
        axis = -1 if operation in _ROWS else self.below(2 * ndim) - ndim
        if operation == "transpose":
            axis = self.pick((-1, -2))
        if ndim == 1:  # swizzled layouts need a matrix
            options = replace(options, layout="linear", target_layout="linear")
        several = operation in (*GROUPED, "master_weights") and not options.stacked
        count = 1 + self.below(4) if several else 1
        arrays = tuple(self.input(operation, recipe.recipe, ndim, axis, options) for _ in range(count))
        return DrawnCase(operation, recipe, arrays, axis, options)

    def variant(self, operation: str) -> Variant:
        """Return a recipe of the pool that supports the operation, or a variant of it (with changed fields)."""
        variant = self.pick(_supported(self.pool)[operation])
        if not variant.changes and self.pool.changes and self.chance(0.5):
            return draw_variant(self, variant.id, 1 + self.below(self.pool.changes))
        return variant

    def target(self, r: Recipe) -> Variant:
        """Return a recipe to requantize to, for the source recipe ``r``."""
        nvfp4 = [one for one in _supported(self.pool)["requantize"] if one.recipe.scale == E4M3]
        to_nvfp4 = nvfp4 and r.element == E2M1 and r.scale == E8M0 and self.chance(0.5)
        found = self.pick(nvfp4) if to_nvfp4 else self.variant("requantize")
        return replace(found, changes=(*found.changes, ("nan_sign", False))) if found.recipe.nan_sign else found

    def options(self, operation: str, r: Recipe) -> DrawnOptions:
        """Return random options that the operation and the recipe support."""
        coded, rounded = operation in _CODES, operation in _ROUNDED
        scaled = r.scale is not None and not r.fake_only
        has_layout = scaled and operation not in (*VALUES_ONLY, "partial", "swizzle_bytes")
        fake_rule = r.fake_rule if operation in ("fake_quantize", "fake_quantize_grouped") else None
        roundable = rounded and not (r.element.is_integer or r.four_over_six)
        stochastic = roundable and not (fake_rule and FAKE_RULES[fake_rule].stochastic == "") and self.chance(0.25)
        seeded = operation in _SEEDED
        roundings = [kind for kind in self.pool.roundings if kind in (("seed",) if seeded else ("seed", "bytes"))]
        rounding = self.pick(roundings) if stochastic and roundings else "nearest"
        if r.stochastic_only:
            rounding = "numbers" if r.stochastic == "comfyui_nvfp4_cuda" else "seed"
        amaxes, is_square = ("number", "array", "column"), r.block is not None and r.block[0] == r.block[1] > 1
        found = DrawnOptions(
            seed=self.seed(),
            layout=self.pick(self.pool.layouts) if has_layout else "linear",
            rounding=rounding,
            hadamard=self.pick(self.pool.hadamard) if coded and self.chance(0.3) and not r.nan_sign else False,
            tensor_amax=self.pick(amaxes) if r.tensor_scaling != "none" and self.chance(0.4) else "",
            block_amax=r.static and rounded and operation != "quantize_both" and self.chance(0.6),
            out=self.pick(("", "", "guarded", "strided")) if operation in ("quantize", "with_scales", "decode") else "",
            decoded=self.pick(("", *self.pool.dtypes)),
            target=self.target(r) if operation == "requantize" else None,
            target_layout=self.pick(self.pool.layouts),
            pass_through=self.chance(0.3),
            axes=self.pick((None, 0, -1, "all")),
            cuts=tuple(sorted(self.fraction() for _ in range(self.below(4)))),
            columnwise=is_square and self.chance(0.5),
            stacked=operation in GROUPED and self.chance(0.4),
            fake=self.chance(0.4),
        )
        if operation != "search_scales":
            return found
        by_hessian = r.scale == E4M3 and self.chance(0.3)
        return replace(
            found,
            objective="mse" if by_hessian else self.pick(("mse", "mse", "mae", "max", "p2.4", "p3")),
            columns="hessian" if by_hessian else self.pick(("", "weights")),
            candidates=self.pick(("", "", "near", "some")),
        )

    def input(self, operation: str, r: Recipe, ndim: int, axis: int, options: DrawnOptions) -> DrawnArray:
        """Return a description of a random array that suits the operation, the recipe and the options."""
        shape = self.shape(operation, r, ndim, axis % ndim, options)
        if options.stacked:
            shape = (1 + self.below(4), *shape)
        kind, dtype = self.pick(NUMBERS if operation in FLATTENED else KINDS), self.pick(self.pool.dtypes)
        if operation in ("pack", "swizzle_bytes"):
            kind, dtype = ("codes" if operation == "pack" else "bytes"), "uint8"
        return self.array(kind, dtype, shape, self.view(len(shape), flat=operation in FLATTENED))

    def shape(self, operation: str, r: Recipe, ndim: int, axis: int, options: DrawnOptions) -> tuple[int, ...]:
        """Return ``ndim`` random axis lengths near multiples of the tile sizes of kernels."""
        shape = [self.pick(LENGTHS) for _ in range(ndim)]
        recipes = [r] if options.target is None else [r, options.target.recipe]
        multiples = [recipe.length_multiple for recipe in recipes]
        multiple = lcm(*multiples, 16 if options.hadamard else 1, 2 if operation == "pack" else 1)
        units = dict.fromkeys(range(ndim - 2, ndim) if operation in _BOTH_WAYS else (axis,), multiple)
        if options.columnwise and operation == "master_weights":
            units[0] = multiple
        for i, unit in units.items():
            shape[i] = -(-self.pick(BLOCKED) // unit) * unit
        is_searched = operation == "search_scales" or any(recipe.search for recipe in recipes)
        max_elements = min(self.pool.largest, MAX_SEARCHED) if is_searched else self.pool.largest
        for i in self.shuffled(range(ndim)):
            if prod(shape) > max_elements:
                shape[i] = units.get(i) or self.pick((1, 2, 3))
        if self.chance(0.03):
            shape[self.below(ndim)] = 0
        return tuple(shape)


# ---- groups of operations
_CODES = ("quantize", "quantize_both", "with_scales", "quantize_grouped", "plan")
_ROUNDED = (*_CODES, "fake_quantize", "fake_quantize_grouped")
# Operations that quantize several arrays with one seed.
_SEEDED = ("quantize_both", "quantize_grouped", "fake_quantize_grouped", "plan")
_MATRICES = ("quantize_both", "transpose", "swizzle", "swizzle_bytes", "decode")
_BOTH_WAYS = ("quantize_both", "transpose")
_ROWS = ("quantize_both", "pack", "swizzle_bytes", *FLATTENED)
_TO_NEAREST = ("requantize", "transpose", "search_scales", *FLATTENED)  # these round without a seed


def _supports(operation: str, r: Recipe) -> bool:
    if (r.fake_only and operation not in VALUES_ONLY) or (not is_simple(r) and operation not in LEVELED):
        return False
    if operation in (*_TO_NEAREST, *_SEEDED * (r.stochastic == "comfyui_nvfp4_cuda")) and r.stochastic_only:
        return False
    if operation in FLATTENED:
        return r.block is not None and r.tensor_scaling in ("none", "tensor") and not (r.four_over_six or r.search)
    if operation == "transpose":
        return r.block is not None and r.block[0] > 1
    if operation == "search_scales":
        return is_searchable(r)
    return r.scale is not None or operation != "swizzle"


@cache
def _supported(pool: Pool) -> dict[str, tuple[Variant, ...]]:
    """Return {operation: the recipes and variants in the pool that support it}."""
    supported = {
        name: tuple(variant for variant in pool.every_variant() if _supports(name, variant.recipe))
        for name in pool.operations
    }
    if not any(supported.values()):
        raise ValueError(
            f"fuzz: operations {', '.join(pool.operations)} are not defined for any of the recipes; choose other "
            "recipes or operations"
        )
    return {name: found for name, found in supported.items() if found}


def draw(seed: int, pool: Pool) -> tuple[DrawnCase, int]:
    """Return a fuzz case drawn from the integer ``seed``, and how many changes of recipes were rejected meanwhile."""
    d = Draw(seed, pool)
    return d.case(), d.refused
