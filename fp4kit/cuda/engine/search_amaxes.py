"""Find the best amaxes of CuPy arrays on a grid of multiples, for recipes without block scales or with an amax rule.

The amaxes are tensor amaxes, or block amaxes if a recipe with an amax rule has block scales. The candidates for each
amax are multiples of the amax. The multiple with the smallest loss wins, where the loss measures the errors of the
fake-quantized values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.search_scales import Search
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.cuda.engine.amax import amax, tensor_amax
from fp4kit.cuda.launch.geometry import THREADS, Launch, address, check_count, grid
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import decoding
from fp4kit.reference.search import SearchTerms, multiples

_POINTERS = ("x", "amax", "tensor_amax", "weights", "multiples", "losses", "least", "out")
_SIZES = ("rows", "columns", "rows_of_amax", "rows_of_tensor", "parts", "first", "count")
_SEARCH = np.dtype([(n, "u8") for n in _POINTERS] + [(n, "i8") for n in _SIZES] + [("power", "f8")])
MAX_LOSSES = 1 << 25  # the most losses in memory at a time; there is one loss per row and multiple


def search_amaxes(search: Search) -> Any:
    """Return each amax times the multiple that gives the smallest loss: float32 in the shape of the amaxes."""
    call, r, cupy = search.call, search.call.recipe, imports.cupy()
    with imports.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        tensor = tensor_amax(call, x)
        amaxes = tensor if r.scale is None else amax(call._replace(moved=x))
        if not x.size:
            return cupy.abs(amaxes)  # the sign bit of a given -0 is ignored
        out = cupy.empty(amaxes.shape, np.float32)
        assert search.terms.grid is not None
        factors = cupy.asarray(multiples(search.terms.grid))
        columns = r.block_size if r.block else x.shape[-1]
        search_matrix(x.reshape(-1, columns), amaxes, tensor, out, r, search.terms, factors)
        return out


def search_matrix(x: Any, amaxes: Any, tensor: Any, out: Any, r: Recipe, terms: SearchTerms, factors: Any) -> None:
    """Find the multiple of each amax that gives the smallest loss, and write the amax times this multiple into out."""
    # The multiples are tried in batches, so that at most MAX_LOSSES losses are in memory.
    check_count(x.size)
    cupy, device, (rows, columns) = imports.cupy(), x.device.id, x.shape
    batch = min(max(MAX_LOSSES // rows, 1), factors.size)
    losses, least = cupy.empty((rows, batch), np.float64), cupy.empty(amaxes.shape, np.float64)
    arrays = tuple(map(address, (x, amaxes, tensor, terms.weights, factors, losses, least, out)))
    rule = (r, x.dtype, terms.weights is not None, *objective_options(terms.power).items())
    parts = 1 if terms.weights is None else terms.weights.size // columns
    covered = rows // amaxes.size, rows if tensor is None else rows // tensor.size
    for first in range(0, factors.size, batch):
        count = min(batch, factors.size - first)
        sizes = (rows, columns, *covered, parts, first, count, float64_bits(terms.power))
        blocks = -(-rows * count // THREADS), -(-amaxes.size * 32 // THREADS)
        for kernel, work in zip(("row_losses_kernel", "least_losses_kernel"), blocks, strict=True):
            Launch(_function(kernel, *rule, device=device), grid(work, device), _SEARCH, *sizes)(*arrays)


def objective_options(power: float) -> dict[str, bool]:
    """Return the kernel's options for a loss: the sum of |error|^power or, if power is inf, the largest |error|."""
    return {"kMagnitudes": power == 1, "kLargest": power == np.inf, "kPowers": power not in (1, 2, np.inf)}


def float64_bits(power: float) -> int:
    """Return the 64 bits of a number as a float64, as an int, because a Launch takes only ints as arguments."""
    return int(np.float64(power).view(np.uint64))


@cache
def _function(
    kernel: str, r: Recipe, dtype: np.dtype, weighted: bool, *objective: tuple[str, bool], device: int
) -> Any:
    """Return one of the two compiled kernels of this search as a CuPy function on a device."""
    loss = {"kWeighted": weighted, "kOwn": r.fake_rule is not None, **dict(objective)}
    source = instantiation(
        "search_amaxes", recipe_struct(decoding(r, np.dtype(np.float32))), Input=TYPES[dtype], **loss
    )
    return loader.function(source, kernel, device)
