"""Launch the kernels of requantize, which converts a quantized array (the source) to another recipe (the target).
requantize.cu keeps the codes of blocks whose new scales the target can represent. count_changed.cu counts the changed
values and finds the largest change.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

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
_CHANGED = np.dtype([("x", "u8"), ("y", "u8"), ("changed", "u8"), ("largest", "u8"), ("count", "i8")])


@cache
def _keep_function(kernel: str, target: Recipe, dtype: np.dtype, unsigned_zero: bool, device: int) -> Any:
    """Return one of the three compiled kernels of requantize.cu as a CuPy function on a device."""
    source = instantiation("requantize", recipe_struct(target), Input=TYPES[dtype], kUnsignedZero=unsigned_zero)
    return loader.function(source, kernel, device)


@lru_cache(CACHE_SIZE)
def _keep_launch(
    kernel: str, target: Recipe, dtype: np.dtype, unsigned_zero: bool, blocks: int, source_block: int, device: int
) -> Launch:
    """Return the prepared launch of one kernel of requantize.cu, for `blocks` blocks of `source_block` codes."""
    function = _keep_function(kernel, target, dtype, unsigned_zero, device)
    return Launch(function, grid(-(-blocks // THREADS), device), _KEEP, blocks, source_block)


class KeptSource(NamedTuple):
    """The source of a requantization: a quantized array whose codes may be kept.

    codes, scales: contiguous arrays, aligned to 8 bytes; scales are E8M0 in the linear layout.
    recipe, dtype: the recipe, and the dtype that was quantized.
    extent: the range of the scales, uint32 (3,), which power_amax finds.
    """

    codes: Any
    scales: Any
    recipe: Recipe
    dtype: np.dtype
    extent: Any


def source_of(codes: Any, scales: Any, r: Recipe, dtype: np.dtype) -> KeptSource:
    """Return a KeptSource for codes and scales."""
    return KeptSource(codes, scales, r, dtype, imports.cupy().zeros(3, np.uint32))


def power_amax(source: KeptSource, target: Recipe, amax: Any) -> None:
    """Overwrite `amax`, the tensor amax of the decoded source, with one that lets `target` keep codes of the source."""
    for kernel in ("requantize_range_kernel", "requantize_amax_kernel"):
        _launch(kernel, source, target, None, None, None, amax)


def keep_codes(source: KeptSource, result: Quantized) -> None:
    """Overwrite the blocks of the result whose new scale the target can represent, with the codes of the source."""
    arrays = (result.packed, result.block_scale, result.tensor_scale, result.tensor_amax)
    _launch("requantize_keep_kernel", source, result.recipe, *arrays)


def _launch(kernel: str, source: KeptSource, target: Recipe, *arrays: Any) -> None:
    """Launch one of the kernels of requantize.cu."""
    unsigned_zero = DECODE_RULES[source.recipe.decode_rule].unsigned_zero
    sizes = (source.scales.size, source.recipe.block_size, source.codes.device.id)
    launch = _keep_launch(kernel, target, source.dtype, unsigned_zero, *sizes)
    launch(*map(address, (source.codes, source.scales, source.extent, *arrays)))


@lru_cache(CACHE_SIZE)
def _changed_launch(count: int, device: int) -> Launch:
    """Return the prepared launch of count_changed.cu, which compares two arrays of `count` elements."""
    function = loader.function(instantiation("count_changed"), "count_changed_kernel", device)
    return Launch(function, grid(-(-count // (4 * THREADS)), device), _CHANGED, count)


def count_changed(x: Any, y: Any) -> tuple[Any, Any]:
    """Return (number of values that differ, int64 (); largest change, float32 ()) for two contiguous float32 arrays."""
    zeros = imports.cupy().zeros
    changed, largest = zeros((), np.int64), zeros((), np.float32)
    if x.size:
        _changed_launch(x.size, x.device.id)(*map(address, (x, y, changed, largest)))
    return changed, largest
