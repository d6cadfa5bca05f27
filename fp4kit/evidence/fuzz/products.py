"""Describe and draw matrix products (operation "matmul"): two operands, a matrix unit, an addend and a factor.
An operand is an array or a Quantized. A matrix unit models how hardware adds the products, in steps of some products
each; a unit may have an order of addition instead of steps. The pool holds the recipes and units to draw from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import lcm, prod
from typing import Any, NamedTuple

from fp4kit.call.matmul import Operand, step_of
from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.code_patterns import DISTANCES, FORMATS, PATTERNS
from fp4kit.evidence.fuzz.pool import Picks, Pool
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.formats import ElementFormat
from fp4kit.quantized.part_shapes import scale_shape, tensor_amax_shape
from fp4kit.units import UNITS, DotAdd, Unit

# {dtype of an operand that is an array: the format of its codes, or "" if the dtype has 16 bits}
ARRAYS = {
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
    """Return {field: value} for the fields of the matrix unit ``u`` that differ from UNITS[u.id]."""
    base = UNITS[u.id]
    return {f.name: getattr(u, f.name) for f in fields(Unit) if getattr(u, f.name) != getattr(base, f.name)}


# ---- units ----


def units_for(a: Variant | str, b: Variant | str) -> tuple[str, ...]:
    """Return the ids of the matrix units that can multiply two operands, each given by its recipe or by its dtype."""
    return _units_for(_operand_kind(a), _operand_kind(b))


class _Kind(NamedTuple):
    """The properties of an operand (an array or a Quantized) that decide which matrix units can multiply it.

    Attributes:
        dtype: dtype of an operand that is an array; "" for a Quantized.
        element, scale, block, per_block: for a Quantized, the element format, the scale format, the block size, and
            True if there is a tensor scale per block.
    """

    dtype: str = ""
    element: ElementFormat | None = None
    scale: ElementFormat | None = None
    block: int = 1
    per_block: bool = False


def _operand_kind(kind: Variant | str) -> _Kind:
    """Return the _Kind of an operand, which is given by its recipe (a Quantized) or by its dtype (an array)."""
    if isinstance(kind, str):
        return _Kind(kind)
    r = kind.recipe
    return _Kind("", r.element, r.scale, r.block_size, r.tensor_scaling == "block")


@cache
def _units_for(a: _Kind, b: _Kind) -> tuple[str, ...]:
    """Return the ids of the matrix units that can multiply operands of the kinds a and b, in the order of UNITS."""
    x, y = (_empty(kind) for kind in (a, b))
    # "dequantized" decodes both operands first, so it takes every recipe.
    return tuple(id for id in UNITS if id == "dequantized" or (x and y and _accepts(x, y, id)))


def _empty(kind: _Kind) -> Operand | None:
    """Return an Operand of the given kind without arrays, to ask which matrix units multiply such operands."""
    if kind.element is None:
        return Operand(None, ARRAYS[kind.dtype] or kind.dtype, None, None, 1, None, 0)
    if kind.per_block or kind.element.is_integer or kind.element.name not in FORMATS:
        return None
    return Operand(None, kind.element.name, kind.scale, kind.scale, kind.block if kind.scale else 1, None, 0)


def _accepts(a: Operand, b: Operand, id: str) -> bool:
    """Return True if the matrix unit ``id`` can multiply the operands, False if step_of raises ValueError for them."""
    try:
        step_of("matmul", UNITS[id], a, b)
    except ValueError:
        return False
    return True


def draw_unit(d: Picks, ids: tuple[str, ...]) -> Unit:
    """Return one of the matrix units with the given ids, at random."""
    u = UNITS[d.pick(ids)]
    if u.order is not None or not d.pool.changes or not d.chance(0.35):
        return u
    if d.chance(0.5):
        u = replace(u, **{kind: _other_step(d, step) for kind, step in u.steps().items()})
    promote = lcm(*(step.k for step in u.steps().values())) * int(d.pick((1, 2, 4, 12)))
    return replace(u, promote=promote) if d.chance(0.6) else u


def _other_step(d: Picks, step: Any) -> Any:
    """Return a copy of ``step`` with random bit counts and a random zero_exponent."""
    changes: dict[str, Any] = {"k": step.k * int(d.pick((1, 1, 2))), "zero_exponent": -int(d.pick((900, 139, 120, 2)))}
    if isinstance(step, DotAdd):
        changes |= {"fraction_bits": int(d.rng.integers(1, 41)), "output_bits": int(d.rng.integers(1, 24))}
    else:
        changes |= {"fraction_bits": int(d.rng.integers(8, 33)), "sum_bits": int(d.rng.integers(8, 33))}
    return replace(step, **changes)


# ---- operands ----


def draw_product(d: Picks, recipe: Variant) -> DrawnProduct:
    """Return a random matrix product."""
    for _ in range(20):
        kinds = _kinds(d, recipe)
        wanted = tuple(id for id in units_for(*kinds) if id in d.pool.units)
        if wanted:
            break
    refused = not wanted or (d.pool.faults and d.chance(0.03))
    u = draw_unit(d, d.pool.units if refused else wanted)
    shape_a, shape_b, lead = _shapes(d, kinds, u)
    patterns = draw_patterns(d)
    a, b = (draw_operand(d, *each) for each in zip(kinds, (shape_a, shape_b), patterns, strict=True))
    return DrawnProduct(
        a,
        b,
        u,
        c=_first_sums(d, (*lead, shape_a[-2], shape_b[-2])) if d.chance(0.6) else None,
        alpha=float(d.pick(ALPHAS)) if d.chance(0.3) else None,
        out_dtype=d.pick(d.pool.dtypes),
        swapped=d.chance(0.3),
    )


def _kinds(d: Picks, recipe: Variant) -> tuple[Variant | str, Variant | str]:
    """Return the kinds of two operands, as a pair."""
    if d.chance(0.3):
        kind = d.pick(tuple(ARRAYS))
        family = [other for other in FLOAT8 if other.endswith("fnuz") == kind.endswith("fnuz")]
        return kind, d.pick(family) if kind in FLOAT8 else kind
    partners = _partners(d.pool, _operand_kind(recipe))
    return recipe, d.pick(partners) if d.chance(0.5) and partners else recipe


@cache
def _partners(pool: Pool, kind: _Kind) -> tuple[Variant, ...]:
    """Return the recipes of a pool that can quantize the other operand of a product with an operand of `kind`."""
    hardware = {id for id, u in UNITS.items() if u.order is None}
    others = [each for each in (*map(Variant, pool.recipes), *pool.variants) if not each.recipe.fake_only]
    return tuple(each for each in others if hardware & set(_units_for(kind, _operand_kind(each))))


def draw_patterns(d: Picks) -> tuple[str, str]:
    """Return the names of code patterns (keys of PATTERNS) for two operands, as a pair."""
    # In a quarter of the draws, the patterns are chosen so that products of the two operands cancel.
    if d.chance(0.25):
        return d.pick(_PAIRS)
    return d.pick(tuple(PATTERNS)), d.pick(tuple(PATTERNS))


def _shapes(
    d: Picks, kinds: tuple[Variant | str, Variant | str], u: Unit
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes (..., rows, K) of two operands, and the leading axes of their product (all but the last
    two).
    """
    multiple = lcm(*(1 if isinstance(kind, str) else kind.recipe.length_multiple for kind in kinds))
    step = d.pick([step.k for step in u.steps().values()] or [32])
    limit = min(d.pool.largest, LONGEST)
    K = -(-int(_length(d, step, limit)) // multiple) * multiple
    M, N = int(d.pick(ROWS)), int(d.pick(ROWS))
    stacked = d.pick(("", "", "", "ab", "a", "b"))
    lead = d.pick(((1,), (2,), (3,), (2, 2))) if stacked else ()
    while M * N > 1 and (prod(lead) * M * N * K > MAX_PRODUCTS or prod(lead) * max(M, N) * K > limit):
        M, N = -(-M // 2), -(-N // 2)
    sizes = [M, N, K]
    if d.chance(0.03):
        sizes[d.rng.integers(3)] = 0
    M, N, K = sizes
    return (*(lead if "a" in stacked else ()), M, K), (*(lead if "b" in stacked else ()), N, K), lead


def _length(d: Picks, step: int, limit: int) -> int:
    """Return a random K for a product: a small multiple of ``step``, a number below 700, or, rarely, ``limit``."""
    kind = d.rng.random()
    if kind < 0.03:
        return limit
    if kind < 0.5:
        return min(step * int(d.pick((1, 1, 2, 3, 8, 12))), limit)
    return min(int(d.rng.integers(1, 700)), limit)


def draw_operand(d: Picks, kind: Variant | str, shape: tuple[int, ...], pattern: str) -> DrawnOperand:
    """Return a random operand with the shape (..., rows, K), either a Quantized with a recipe or an array of a
    dtype.
    """
    view = d.view(len(shape), flat=False)
    if isinstance(kind, str):
        name = f"codes of {ARRAYS[kind]}, {pattern}" if ARRAYS[kind] else pattern
        return DrawnOperand(_array(d, name, "uint8" if ARRAYS[kind] else kind, shape, view), dtype=kind)
    r, scales, tensor = kind.recipe, None, None
    codes = {4: "codes", 6: "codes of 6 bits", 8: "bytes"}[r.element.bits]
    if r.element.name in FORMATS:
        codes = f"codes of {r.element.name}, {pattern}"
    if r.scale is not None:
        name = d.pick(
            (f"scale codes of {r.scale.name}", f"scale codes of {r.scale.name}", "smallest scale codes", "bytes")
        )
        scales = _array(d, name, "uint8", scale_shape(shape, r))
    if r.tensor_scaling != "none":
        per_expert = r.tensor_scaling == "tensor" and len(shape) > 2 and d.chance(0.5)
        tensor = _array(d, "amaxes", "float32", shape[:1] if per_expert else tensor_amax_shape(shape, r))
    layout = d.pick(d.pool.layouts) if r.scale is not None else "linear"
    return DrawnOperand(
        _array(d, codes, "uint8", shape, view), kind, "", scales, tensor, columns=d.chance(0.3), layout=layout
    )


def _array(d: Picks, kind: str, dtype: str, shape: tuple[int, ...], view: View | None = None) -> DrawnArray:
    """Return the description of an array with a random seed. It is contiguous unless ``view`` says otherwise."""
    return DrawnArray(kind, dtype, shape, int(d.rng.integers(1 << 40)), view or View.plain(len(shape)))


def _first_sums(d: Picks, shape: tuple[int, ...]) -> DrawnArray:
    """Return a random argument c of matmul (the array that products are added to), in the given shape."""
    return _array(d, d.pick(C_KINDS), d.pick(d.pool.dtypes), shape, d.view(len(shape), flat=False))
