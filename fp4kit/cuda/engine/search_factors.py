"""Find the best block amaxes of CuPy arrays, for recipes that try a fixed list of multiples of each amax.
A matrix is a tuple (x, block amaxes, tensor amax), where x holds the elements and is contiguous (M, K). The found
amaxes are written to the array of block amaxes. A sign mask is an int whose bit i is 1 if a Hadamard transform first
negates element i of each 16.

The search "quest", which computes each amax from the elements of a block, is launched here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.cuda.launch.geometry import THREADS, Launch, address, aligned, check_count, grid
from fp4kit.recipes import Recipe
from fp4kit.recipes.schema import searching
from fp4kit.reference.search import FACTORS

OWN_KERNELS = {**dict.fromkeys(FACTORS, "search_factors"), "quest": "search_quest"}  # {Recipe.search: its kernel}
_FACTORS = np.dtype([(n, "u8") for n in ("x", "tensor_amax", "block_amax")] + [(n, "i8") for n in ("rows", "columns")])


def search_factors(matrices: Iterable[tuple[Any, Any, Any]], r: Recipe, mask: int | None = None) -> None:
    """Find the best block amaxes of each matrix, and write them into the matrix's array of block amaxes."""
    for launch in factor_launches(matrices, r, mask):
        launch()


def factor_launches(
    matrices: Iterable[tuple[Any, Any, Any]], r: Recipe, mask: int | None = None
) -> Iterator[Callable[[], None]]:
    """Yield one function per matrix."""
    for x, out, amax in matrices:
        check_count(x.size)
        device = x.device.id
        function = _function(r, x.dtype, device, mask, aligned(x, 16))
        launch = Launch(function, grid(-(-x.size // r.block_size // THREADS), device, 8), _FACTORS, *x.shape)
        yield partial(_call, launch, (x, amax, out))


def _call(launch: Launch, arrays: tuple[Any, ...]) -> None:
    """Call a Launch with the addresses of arrays, in order; 0 for an array that is None."""
    launch(*map(address, arrays))


@cache
def _function(r: Recipe, dtype: np.dtype, device: int, mask: int | None, is_aligned: bool) -> Any:
    """Return the compiled kernel of a recipe's search as a CuPy function on a device."""
    kernel, struct = OWN_KERNELS[r.search], recipe_struct(searching(r), sign_mask=mask)
    if r.search in FACTORS:
        struct = f"{struct}\n{factors_text(r)}"
    source = instantiation(kernel, struct, Input=TYPES[dtype], kAligned=is_aligned)
    return loader.function(source, f"{kernel}_kernel", device)


def factors_text(r: Recipe) -> str:
    """Return the definition of the C++ array kFactors, the multiples that a recipe's search tries."""
    values = (f"{float(np.float32(factor)).hex()}f" for factor in FACTORS[r.search])
    return f"static __device__ const float kFactors[] = {{{', '.join(values)}}};"
