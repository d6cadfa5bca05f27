"""search_scales on CuPy arrays where there are no block scales: the best of a grid of multiples of the amax."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.search_scales import Search, Terms
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.cuda.engine.amax import tensor_amax
from fp4kit.cuda.launch.geometry import THREADS, Launch, address, check_count, grid
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import decoding
from fp4kit.reference.search_amaxes import multiples

_POINTERS = ("x", "tensor_amax", "weights", "multiples", "losses", "least", "out")
_SIZES = ("rows", "columns", "rows_of_amax", "first", "count")
_SEARCH = np.dtype([(n, "u8") for n in _POINTERS] + [(n, "i8") for n in _SIZES] + [("power", "f8")])
MAX_LOSSES = 1 << 25  # of rows under multiples, in memory at a time


def search_amaxes(search: Search) -> Any:
    """amax * multiple of least loss: float32 in the shape of the amax."""
    call, cupy = search.call, imports.cupy()
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        amaxes = tensor_amax(call, x)
        if not x.size:
            return amaxes.copy()
        out = cupy.empty(amaxes.shape, np.float32)
        assert search.terms.grid is not None
        factors = cupy.asarray(multiples(search.terms.grid))
        search_matrix(x.reshape(-1, x.shape[-1]), amaxes, out, call.recipe, search.terms, factors)
        return out


def search_matrix(x: Any, amaxes: Any, out: Any, r: Recipe, terms: Terms, factors: Any) -> None:
    """Of the rows of x, as many for each of the amaxes, into out; factors: float32, the multiples."""
    check_count(x.size)
    cupy, device, (rows, columns) = imports.cupy(), x.device.id, x.shape
    most = min(max(MAX_LOSSES // rows, 1), factors.size)
    losses, least = cupy.empty((rows, most), np.float64), cupy.empty(amaxes.shape, np.float64)
    arrays = tuple(map(address, (x, amaxes, terms.weights, factors, losses, least, out)))
    rule = (r, x.dtype, terms.weights is not None, *objective_options(terms.power).items())
    for first in range(0, factors.size, most):
        count = min(most, factors.size - first)
        sizes = (rows, columns, rows // amaxes.size, first, count, float64_bits(terms.power))
        blocks = -(-rows * count // THREADS), -(-amaxes.size * 32 // THREADS)
        for kernel, work in zip(("row_losses_kernel", "least_losses_kernel"), blocks, strict=True):
            Launch(_function(kernel, *rule, device=device), grid(work, device), _SEARCH, *sizes)(*arrays)


def objective_options(power: float) -> dict[str, bool]:
    """What a loss adds; none of these: squares."""
    return {"kMagnitudes": power == 1, "kLargest": power == np.inf, "kPowers": power not in (1, 2, np.inf)}


def float64_bits(power: float) -> int:
    """A float64 among the numbers of a launch."""
    return int(np.float64(power).view(np.uint64))


@cache
def _function(
    kernel: str, r: Recipe, dtype: np.dtype, weighted: bool, *objective: tuple[str, bool], device: int
) -> Any:
    loss = {"kWeighted": weighted, "kOwn": r.fake_rule is not None, **dict(objective)}
    source = instantiation(
        "search_amaxes", recipe_struct(decoding(r, np.dtype(np.float32))), Input=TYPES[dtype], **loss
    )
    return loader.function(source, kernel, device)
