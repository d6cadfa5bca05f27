"""Shrink a failing matrix product: fewer matrices, rows and elements along K, and simpler operands.
shrink.py tries the products in order, and keeps the first one that still fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np

from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.products import DrawnOperand, DrawnProduct, changes_of
from fp4kit.evidence.fuzz.shrink_arrays import parts, simpler_values
from fp4kit.units import UNITS

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
