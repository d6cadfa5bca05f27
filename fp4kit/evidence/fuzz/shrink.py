"""Shrink a failing case to a smaller case that fails in the same way. A case describes one random test: an operation, a
recipe, arrays and options. The first simpler case that still fails replaces the case. This is repeated until no simpler
case fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from math import lcm
from typing import Any, TypeVar

import numpy as np

from fp4kit.evidence.engines import ComparedEngine
from fp4kit.evidence.fuzz.arrays import DTYPES, DrawnArray, View
from fp4kit.evidence.fuzz.check import Verdict, check
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOperand, DrawnOptions, DrawnProduct, changes_of
from fp4kit.formats import bit_patterns
from fp4kit.units import UNITS

MAX_ONE_BY_ONE = 24  # elements are set to 1 one by one if at most this many are nonzero


def parts(n: int, unit: int) -> Iterator[slice]:
    """Yield slices of an axis of length ``n``, to try keeping only that part of the axis."""
    for step in sorted({unit, lcm(unit, 16) if n > 16 else unit}):
        half = n // 2 // step * step
        for part in (slice(0, step), slice(0, half), slice(half, n), slice(0, n - step), slice(step, n)):
            if 0 < len(range(*part.indices(n))) < n:
                yield part


def simpler_values(a: DrawnArray) -> Iterator[DrawnArray]:
    """Yield arrays with more zeros: first without nonzero elements, then with ever smaller groups of elements set
    to 0.
    """
    values = a.values()
    bits = bit_patterns(values).reshape(-1)
    (nonzero,) = np.nonzero(bits)
    size = len(nonzero)
    while size:
        for start in range(0, len(nonzero), size):
            yield _with_bits(a, bits, nonzero[start : start + size], 0)
        size //= 2
    one = _ones(a, bits)
    for i in nonzero[: MAX_ONE_BY_ONE if len(nonzero) <= MAX_ONE_BY_ONE else 0]:
        if bits[i] != one[i]:
            yield _with_bits(a, bits, np.array([i]), int(one[i]))


def _ones(a: DrawnArray, bits: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array in which every element except +0 is replaced by 1."""
    return np.where(bits != 0, np.ones((), DTYPES[a.dtype]).view(bits.dtype), bits)


def _with_bits(a: DrawnArray, bits: np.ndarray, at: np.ndarray, value: int) -> DrawnArray:
    """Return the array with the bit patterns ``bits``, except for ``value`` at the flat indices ``at``."""
    changed = bits.copy()
    changed[at] = value
    return a.with_values(changed.view(DTYPES[a.dtype]).reshape(a.shape), a.view)


_WHOLE = slice(None)


def simpler_products(product: DrawnProduct) -> Iterator[DrawnProduct]:
    """Yield products that are simpler in one respect, the largest simplifications first."""
    yield from _simpler_calls(product)
    yield from _one_matrix(product)
    yield from _fewer_rows(product)
    yield from _shorter(product)
    yield from (replace(product, a=a) for a in _simpler_operands(product.a))
    yield from (replace(product, b=b) for b in _simpler_operands(product.b))
    if product.c is not None:
        yield from (replace(product, c=c) for c in simpler_values(product.c))


def _simpler_calls(product: DrawnProduct) -> Iterator[DrawnProduct]:
    """Yield simpler products. Each has one changed field of the unit, or one argument, set back to its default."""
    changes = changes_of(product.unit)
    yield from (
        replace(product, unit=replace(product.unit, **{name: getattr(UNITS[product.unit.id], name)}))
        for name in changes
    )
    defaults: dict[str, Any] = {"c": None, "alpha": None, "out_dtype": "float32", "swapped": False}
    for name, default in defaults.items():
        if getattr(product, name) != default:
            yield replace(product, **{name: default})


def _cut(a: DrawnArray | None, *index: slice | int) -> DrawnArray | None:
    """Return the part of an array that ``index`` selects on its last axes, as a contiguous array."""
    if a is None:
        return None
    values = a.values()[(..., *index)]
    return a.with_values(np.ascontiguousarray(values).reshape(values.shape))


def _cut_operand(x: DrawnOperand, *index: slice | int) -> DrawnOperand:
    """Return the part of an operand (codes, block scales and tensor scales) that ``index`` selects, for shrinking."""
    codes = _cut(x.codes, *index, _WHOLE)
    assert codes is not None
    tensor = x.tensor_scale
    if tensor is not None and tensor.ndim >= x.codes.ndim - 1:  # one tensor scale per row or per block
        tensor = _cut(tensor, *index, *[_WHOLE] * (tensor.ndim - x.codes.ndim + 1))
    elif tensor is not None and tensor.ndim:  # one tensor scale per expert; a single matrix has one in all
        tensor = _cut(tensor, 0)
    return replace(x, codes=codes, scales=_cut(x.scales, *index, _WHOLE), tensor_scale=tensor)


def _one_matrix(product: DrawnProduct) -> Iterator[DrawnProduct]:
    """Yield products of two matrices from a product of stacks: that of the first matrices, then that of the last."""
    lead = max(product.a.codes.shape[:-2], product.b.codes.shape[:-2], key=len)
    for i in (0, -1) if lead else ():
        index: tuple[slice | int, ...] = (*[i] * len(lead), _WHOLE)
        a, b = (_cut_operand(x, *index) if x.codes.ndim > 2 else x for x in (product.a, product.b))
        yield replace(product, a=a, b=b, c=_cut(product.c, *index, _WHOLE))


def _fewer_rows(product: DrawnProduct) -> Iterator[DrawnProduct]:
    """Yield products with fewer rows of a, and then products with fewer rows of b. The array c is cut to match."""
    for part in parts(product.a.codes.shape[-2], 1):
        yield replace(product, a=_cut_operand(product.a, part), c=_cut(product.c, part, _WHOLE))
    for part in parts(product.b.codes.shape[-2], 1):
        yield replace(product, b=_cut_operand(product.b, part), c=_cut(product.c, _WHOLE, part))


def _shorter(product: DrawnProduct) -> Iterator[DrawnProduct]:
    """Yield products with fewer elements along K, in whole blocks."""
    for part in parts(product.a.codes.shape[-1], lcm(product.a.multiple, product.b.multiple)):
        yield replace(product, a=_along_k(product.a, part), b=_along_k(product.b, part))


def _along_k(x: DrawnOperand, part: slice) -> DrawnOperand:
    """Return the operand with only those elements along K (the summed axis) that ``part`` selects, and their scales."""
    start, stop, _ = part.indices(x.codes.shape[-1])
    blocks = slice(start // x.multiple, stop // x.multiple)
    codes, tensor = _cut(x.codes, part), x.tensor_scale
    assert codes is not None
    if tensor is not None and tensor.ndim == x.codes.ndim:  # one tensor scale per block
        tensor = _cut(tensor, blocks)
    return replace(x, codes=codes, scales=_cut(x.scales, blocks), tensor_scale=tensor)


def _simpler_operands(x: DrawnOperand) -> Iterator[DrawnOperand]:
    """Yield simpler variants of an operand, to try while shrinking."""
    if x.recipe is not None:
        yield from (replace(x, recipe=recipe) for recipe in x.recipe.simpler())
    simpler: dict[str, Any] = {"columns": False, "layout": "linear"}
    yield from (replace(x, **{name: value}) for name, value in simpler.items() if getattr(x, name) != value)
    if not x.codes.view.is_plain:
        yield replace(x, codes=replace(x.codes, view=View.plain(x.codes.ndim)))
    ones = None if x.tensor_scale is None else x.tensor_scale.with_values(np.ones(x.tensor_scale.shape, np.float32))
    if ones is not None and x.tensor_scale is not None and (x.tensor_scale.values() != 1).any():
        yield replace(x, tensor_scale=ones)
    yield from (replace(x, codes=codes) for codes in simpler_values(x.codes))
    if x.scales is not None:
        yield from (replace(x, scales=scales) for scales in simpler_values(x.scales))


T = TypeVar("T")


def shrink(value: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], seconds: float) -> T:
    """Simplify a failing value as long as a simpler value fails too, and return the result."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in simpler(value):
            if time.monotonic() > end:
                return value
            if fails(candidate):
                value, again = candidate, True
                break
    return value


def shrink_case(case: DrawnCase, verdict: Verdict, engine: ComparedEngine | None, seconds: float) -> DrawnCase:
    """Return a simpler case that fails with a verdict of the same kind from the same function."""

    def fails(candidate: DrawnCase) -> bool:
        try:
            return check(candidate, engine).key == verdict.key
        except Exception:  # a candidate may be an invalid case
            return False

    return shrink(case, simpler_cases, fails, seconds)


def simpler_cases(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases that are simpler in one respect, the largest simplifications first."""
    if case.product is not None:
        yield from (replace(case, product=product) for product in simpler_products(case.product))
        return
    yield from _fewer_arrays(case)
    for variant in case.recipe.simpler():
        yield replace(case, recipe=variant)
    yield from _simpler_options(case)
    for i, a in enumerate(case.arrays):
        for smaller in _simpler_arrays(a, case, i):
            yield _with_array(case, i, smaller)
    if len(case.arrays) == 1 and not case.options.stacked:
        yield from _fewer_axes(case)
    for i, a in enumerate(case.arrays):
        for plainer in simpler_values(a):
            yield _with_array(case, i, plainer)


def _with_array(case: DrawnCase, i: int, a: DrawnArray) -> DrawnCase:
    """Return a copy of the case in which ``a`` replaces array ``i``."""
    return replace(case, arrays=(*case.arrays[:i], a, *case.arrays[i + 1 :]))


def _fewer_arrays(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield copies of the case with one of its arrays left out, each array in turn. A single array yields none."""
    if len(case.arrays) > 1:
        for i in range(len(case.arrays)):
            yield replace(case, arrays=case.arrays[:i] + case.arrays[i + 1 :])


def _simpler_options(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases with one option set to its default, a simpler recipe to requantize to, or one cut removed."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(DrawnOptions)}
    for name in case.changed_options():
        yield replace(case, options=replace(case.options, **{name: defaults[name]}))
    if case.options.target is not None:
        for variant in case.options.target.simpler():
            yield replace(case, options=replace(case.options, target=variant))
    if len(case.options.cuts) > 1:
        for i in range(len(case.options.cuts)):
            yield replace(case, options=replace(case.options, cuts=case.options.cuts[:i] + case.options.cuts[i + 1 :]))


def _simpler_arrays(a: DrawnArray, case: DrawnCase, i: int) -> Iterator[DrawnArray]:
    """Yield simpler forms of `a`, which is array ``i`` of the case."""
    if not a.view.is_plain:
        yield replace(a, view=View.plain(a.ndim))
        if a.view.offset:
            yield replace(a, view=replace(a.view, offset=0))
        yield replace(a, view=View(a.view.order, (1,) * a.ndim, a.view.offset))
        yield replace(a, view=View(tuple(range(a.ndim)), a.view.steps, a.view.offset))
    values = a.values()
    for axis in range(a.ndim):
        for part in parts(a.shape[axis], _unit(case, a, axis)):
            index: list[Any] = [slice(None)] * a.ndim
            index[axis] = part
            yield a.with_values(values[tuple(index)], a.view)
    if a.dtype in ("float16", "bfloat16"):
        with np.errstate(all="ignore"):
            yield replace(a.with_values(values.astype(np.float32), a.view), dtype="float32")


def _unit(case: DrawnCase, a: DrawnArray, axis: int) -> int:
    """Return the step for shortening an axis of an array: its length may change by multiples of this number."""
    shift = case.options.stacked
    along = case.axis % (a.ndim - shift) + shift if a.ndim > shift else 0
    if axis != along:
        return 1
    target = case.options.target
    lengths = (
        case.r.length_multiple,
        16 if case.options.hadamard else 1,
        target.recipe.length_multiple if target else 1,
    )
    return lcm(*lengths)


def _fewer_axes(case: DrawnCase) -> Iterator[DrawnCase]:
    """Yield cases without one of the axes of length 1 of the case's only array."""
    a, along = case.x, case.axis % case.x.ndim
    for axis in range(a.ndim):
        if a.shape[axis] == 1 and axis != along and a.ndim > 1:
            smaller = a.with_values(np.squeeze(a.values(), axis))
            yield replace(case, arrays=(smaller,), axis=along - (axis < along) - smaller.ndim)
