"""Block amaxes of recipes that choose among multiples of each, by the compiled library."""

from __future__ import annotations

import ctypes

import numpy as np

from fp4kit.cpu.buffers import address
from fp4kit.cpu.dequantize import decoder_of
from fp4kit.cpu.encode import INPUTS, Shape, blocks_of, kernels_of, source
from fp4kit.cpu.library import SearchFactorsCall, functions, threads_for
from fp4kit.recipes import Recipe, rules
from fp4kit.reference import search_factors as specification
from fp4kit.reference.tensor_rules import tensor_scale

_TRIED = 4  # of the time that codes of an element take, about, for this many candidates


@np.errstate(all="ignore")
def search_matrix(
    x: np.ndarray, out: np.ndarray, amax: np.ndarray | None, recipe: Recipe, hadamard: int | None
) -> None:
    """reference.search.search_matrix."""
    factors = np.asarray(specification.FACTORS[recipe.search], np.float32)
    kernels, decoder = kernels_of(recipe), decoder_of(recipe, np.dtype(np.float32))
    by_code = not rules.BLOCK_RULES[recipe.block_rule or ""].reads_amax
    tensor = [np.ascontiguousarray(part, np.float32).reshape(-1) for part in tensor_scale(amax, recipe, x.dtype)]
    step, cost = int(max(part.size for part in tensor) > 1), 1 + len(factors) // _TRIED
    tensor = [np.ascontiguousarray(np.broadcast_to(part, len(x) if step else 1)) for part in tensor]
    shape = Shape.of(x, recipe.block_size, 1, x.strides[1] != x.itemsize or hadamard is not None)
    for rows, columns in shape.parts(cost):
        cut, found = x[rows, columns], out[rows, blocks_of(columns, recipe)]
        unusual = np.zeros(shape.number(rows, columns), np.uint8)
        above = [part[rows] if step else part for part in tensor]
        call = SearchFactorsCall(
            source(cut, hadamard),
            *map(address, (*above, factors)),
            step,
            len(factors),
            address(found),
            out.strides[0] // out.itemsize,
            address(unusual),
            shape.height,
            shape.width,
            INPUTS[x.dtype],
            kernels.rule,
            kernels.element,
            decoder,
            recipe.block_size,
            by_code,
            threads_for(cut.size * cost),
        )
        functions().fp4kit_search_factors(ctypes.byref(call))
        for some, others in (unit for unit, flag in zip(shape.units(rows, columns), unusual, strict=True) if flag):
            part = amax if amax is None or not step else amax.reshape(-1)[some]
            specification.search_matrix(x[some, others], out[some, blocks_of(others, recipe)], part, recipe, hadamard)
