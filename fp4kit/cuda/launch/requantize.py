"""Launch the kernels of requantize.

requantize.cu keeps the codes of blocks under new scales if that changes no value. count_changed.cu counts changed
values.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.arrays import imports
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import THREADS, Launch, address, grid
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import DECODE_RULES

_POINTERS = ("source", "source_scales", "extent", "packed", "scales", "tensor_scale", "tensor_amax")
_KEEP = np.dtype([(name, "u8") for name in _POINTERS] + [("blocks", "i8"), ("source_block", "i8")])
_CHANGED = np.dtype([("x", "u8"), ("y", "u8"), ("changed", "u8"), ("count", "i8")])


@cache
def _keep_function(kernel: str, target: Recipe, dtype: np.dtype, unsigned_zero: bool, device: int) -> Any:
    """Return one of the two compiled kernels of requantize.cu."""
    source = instantiation("requantize", recipe_struct(target), Input=TYPES[dtype], kUnsignedZero=unsigned_zero)
    return loader.function(source, kernel, device)


@lru_cache(CACHE_SIZE)
def _keep_launch(
    kernel: str, target: Recipe, dtype: np.dtype, unsigned_zero: bool, blocks: int, source_block: int, device: int
) -> Launch:
    """Return the launch of one of the kernels for `blocks` blocks of the source with source_block codes each."""
    function = _keep_function(kernel, target, dtype, unsigned_zero, device)
    return Launch(function, grid(-(-blocks // THREADS), device), _KEEP, blocks, source_block)


def keep_codes(codes: Any, scales: Any, r: Recipe, result: Quantized) -> None:
    """Overwrite the arrays of a result with the codes of its source, if that keeps every value.

    Scales of the target must represent the scales of the source exactly. Otherwise the result is left unchanged.

    Args:
        codes, scales: the source, contiguous and aligned to 8 bytes; scales are E8M0 in the linear layout.
        r: the recipe of the source.
    """
    extent = imports.cupy().zeros(3, np.uint32)
    arrays = (codes, scales, extent, result.packed, result.block_scale, result.tensor_scale, result.tensor_amax)
    unsigned_zero = DECODE_RULES[r.decode_rule].unsigned_zero
    for kernel in ("requantize_range_kernel", "requantize_keep_kernel"):
        launch = _keep_launch(
            kernel, result.recipe, result.dtype, unsigned_zero, scales.size, r.block_size, codes.device.id
        )
        launch(*map(address, arrays))


@lru_cache(CACHE_SIZE)
def _changed_launch(count: int, device: int) -> Launch:
    """Return the launch that compares `count` values."""
    function = loader.function(instantiation("count_changed"), "count_changed_kernel", device)
    return Launch(function, grid(-(-count // (4 * THREADS)), device), _CHANGED, count)


def count_changed(x: Any, y: Any) -> Any:
    """Return how many values of two contiguous float32 arrays differ: int64 (), on their device.

    Values differ if their bits do, except that every NaN equals every NaN.
    """
    changed = imports.cupy().zeros((), np.int64)
    if x.size:
        _changed_launch(x.size, x.device.id)(*map(address, (x, y, changed)))
    return changed
