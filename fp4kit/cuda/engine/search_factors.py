"""Block amaxes of recipes that choose among multiples of each, on CuPy arrays."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from fp4kit import interop
from fp4kit.call.amaxes import is_per_expert, part_of
from fp4kit.call.parse import Call
from fp4kit.cuda import loader
from fp4kit.cuda.geometry import THREADS, Launch, address, aligned, check_count, grid
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, recipe_struct
from fp4kit.parts import scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.search import FACTORS

_FACTORS = np.dtype([(n, "u8") for n in ("x", "tensor_amax", "block_amax")] + [(n, "i8") for n in ("rows", "columns")])


def search_factors(call: Call) -> Any:
    """The chosen block amaxes of call.moved under call.tensor_amax: float32 (..., K / block)."""
    r, cupy = call.recipe, interop.cupy()
    x = cupy.ascontiguousarray(call.moved)
    out = cupy.empty(scale_shape(x.shape, r), np.float32)
    if x.size:
        B = prod(x.shape[:-2]) if is_per_expert(call.tensor_amax, r) else 1
        rows = x.size // x.shape[-1] // B
        for i, (part, found) in enumerate(zip(x.reshape(B, rows, -1), out.reshape(B, rows, -1), strict=True)):
            search_matrix(part, found, part_of(call.tensor_amax, r, i, (B, rows)), r)
    return out


def search_matrix(x: Any, out: Any, amax: Any, r: Recipe) -> None:
    """Of one matrix into out; amax: of the tensor, None where the recipe has no tensor scale."""
    check_count(x.size)
    device = x.device.id
    function = _function(r, x.dtype, device, aligned(x, 16))  # eight elements are whole runs of 16 bytes
    launch = Launch(function, grid(-(-x.size // r.block_size // THREADS), device, 8), _FACTORS, *x.shape)
    launch(*map(address, (x, amax, out)))


@cache
def _function(r: Recipe, dtype: np.dtype, device: int, is_aligned: bool) -> Any:
    source = instantiation("search_factors", recipe_struct(r) + "\n" + factors_text(r), Input=TYPES[dtype], kAligned=is_aligned)
    return loader.function(source, "search_factors_kernel", device)


def factors_text(r: Recipe) -> str:
    """The factors of a recipe's candidates, as C++."""
    values = (f"{float(np.float32(factor)).hex()}f" for factor in FACTORS[r.search])
    return f"static __device__ const float kFactors[] = {{{', '.join(values)}}};"
