"""search_scales on CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from fp4kit import interop
from fp4kit.call.amaxes import is_per_expert, part_of
from fp4kit.call.parse import Call, Declined
from fp4kit.call.search_scales import PLAIN, Search, Terms, check_swept
from fp4kit.cuda import loader
from fp4kit.cuda.engine.amax import tensor_amax
from fp4kit.cuda.engine.matrices import work_of
from fp4kit.cuda.engine.search_factors import search_factors
from fp4kit.cuda.geometry import THREADS, Launch, address, aligned, check_count, grid
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, recipe_struct
from fp4kit.cuda.ways import way_of
from fp4kit.parts import scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.search import FACTORS

_POINTERS = ("x", "tensor_amax", "of_columns", "block_amax", "unproven")  # of_columns: weights or Hessians
_SEARCH = np.dtype([(n, "u8") for n in _POINTERS] + [(n, "i8") for n in ("rows", "columns", "lower", "upper")])
_ALL = (-126, 126)
_WORD = (1 << 64) - 1  # of a signed number


def search_scales(search: Search) -> Any:
    """Block amaxes of least loss: float32 (..., K / 16)."""
    call, r = search.call, search.call.recipe
    check_swept(search)
    if r.block_rows > 1:
        what = f"{r.id} has blocks of {r.block_rows} rows, whose search no CUDA kernel has"
        raise Declined(f"{what}; compute on the CPU with cupy.asnumpy(x)")
    cupy = interop.cupy()
    with interop.making_current(call.x.device.id):
        x = cupy.ascontiguousarray(call.moved)
        amaxes = tensor_amax(call, x)
        out = cupy.empty(scale_shape(x.shape, r), np.float32)
        if x.size:
            B = prod(x.shape[:-2]) if is_per_expert(amaxes, r) else 1
            parts = zip(x.reshape(B, -1, x.shape[-1]), out.reshape(B, -1), strict=True)
            for i, (part, found) in enumerate(parts):
                search_matrix(part, found, part_of(amaxes, r, i, (B, len(part))), r, search.terms)
        return out


def search_matrix(x: Any, out: Any, amax: Any, r: Recipe, terms: Terms = PLAIN, unproven: Any = None) -> None:
    """Of one matrix into out; unproven: a uint64 to add the blocks to for which every candidate was tried."""
    check_count(x.size)
    rows, columns = x.shape
    device, whole = x.device.id, aligned(x, 16)
    if terms.hessian is None:
        function = _function("search", r, x.dtype, device, kAligned=whole, kWeighted=terms.weights is not None)
        blocks, of_columns = grid(-(-x.size // 16 // THREADS), device, 8), terms.weights
    else:
        function = _function("search_hessian", r, x.dtype, device, kAligned=whole)
        strips = max(min(-(-rows // THREADS), grid(rows * columns, device, 8) // (columns // 16)), 1)
        blocks, of_columns = columns // 16 * strips, terms.hessian
    offsets = (end & _WORD for end in terms.offsets or _ALL)
    launch = Launch(function, blocks, _SEARCH, rows, columns, *offsets)
    launch(*map(address, (x, amax, of_columns, out, unproven)))


def searched(call: Call) -> Call:
    """The call with the block amaxes that its recipe's search chooses, under the recipe without it; else as it is.

    What no kernel searches stays as it is, and is declined as any other recipe that no way takes.
    """
    if call.recipe.search not in _KERNELS or call.has_scales or call.mask is not None:
        return call
    taking = call._replace(recipe=_without_search(call.recipe))
    way_of(work_of(taking)._replace(calibrated=True))  # declined before any work
    with interop.making_current(call.x.device.id):
        amax = tensor_amax(call, interop.cupy().ascontiguousarray(call.moved))
        found = _KERNELS[call.recipe.search](call._replace(tensor_amax=amax))
        return taking._replace(tensor_amax=amax, block_amax=found)


_KERNELS: dict[str, Callable[[Call], Any]] = {
    "modelopt_sweep": lambda call: search_scales(Search(call)), **dict.fromkeys(FACTORS, search_factors)
}


@cache
def _without_search(r: Recipe) -> Recipe:
    return replace(r, search="")


@cache
def _function(kernel: str, r: Recipe, dtype: np.dtype, device: int, **options: bool) -> Any:
    source = instantiation(kernel, recipe_struct(r), Input=TYPES[dtype], **options)
    return loader.function(source, f"{kernel}_kernel", device)
