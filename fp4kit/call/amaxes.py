"""Check the amaxes that a caller passes (tensor_amax, block_amax, clip limits), and reshape them for the engines.

The canonical shape of a tensor_amax depends on the recipe. For an array (..., K), with the quantized axis last, it is:

- ()                for the whole tensor
- (E,)              for one entry per expert
- (...)             for one entry per row
- (..., K / block)  for one entry per block
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.call.abstract_array import AbstractArray
from fp4kit.call.checks import description
from fp4kit.formats import E8M0, FLOATS
from fp4kit.quantized.part_shapes import fitting_shape, in_order, scale_shape, tensor_amax_shape
from fp4kit.recipes import Recipe


def parse_tensor_amax(op: str, given: Any, moved_shape: tuple[int, ...], recipe: Recipe, on_device: bool) -> Any:
    """Return the caller's tensor_amax as float32 in its canonical shape, or None if the caller passed none."""
    # Values on a device are not, because reading them would wait for the device.
    if given is None:
        return None
    if recipe.tensor_scaling == "none":
        raise ValueError(f"{op}: tensor_amax was given, but {recipe.id} has no tensor scale; leave it out")
    if on_device and isinstance(given, imports.cupy().ndarray):
        if given.dtype != np.float32:
            raise TypeError(f"{op}: tensor_amax is {given.dtype}; needs float32, because x is on a GPU")
        amax = reshape_amax(op, given, moved_shape, recipe)
        return amax if amax.flags.c_contiguous else amax.copy()
    checked = check_tensor_amax(op, given, moved_shape, recipe)
    return imports.to_device(checked) if on_device else checked


def check_tensor_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe) -> Any:
    """Check a caller's tensor_amax in host memory, and return it as float32 in the canonical shape of reshape_amax."""
    amax = reshape_amax(op, as_real(op, "tensor_amax", amax), moved_shape, recipe)
    if isinstance(amax, AbstractArray):
        return amax
    bad = ~(amax >= 0)
    if bad.any():
        what = "NaN" if np.isnan(amax).any() else "negative"
        raise ValueError(f"{op}: tensor_amax holds {int(bad.sum())} {what} value(s) of {amax.size}; needs amax >= 0")
    return without_sign(amax)


def without_sign(amax: np.ndarray) -> np.ndarray:
    """Return a copy of float32 amaxes without sign bits: -0 becomes 0, so that its sign does not spread to scales."""
    # Integer arithmetic clears the bits, because float arithmetic could flush subnormals to zero.
    return np.asarray(amax.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)


@ieee("amax")
def as_real(op: str, name: str, amax: Any) -> Any:
    """Return a real number or array, the argument `name` of the public function `op`, as a new float32 array."""
    array = amax if isinstance(amax, AbstractArray) else np.asarray(amax)
    if array.dtype.kind not in "fiu" and array.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {array.dtype}; needs a real number or a float array")
    if isinstance(array, AbstractArray):
        return AbstractArray(array.shape, np.dtype(np.float32))
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def check_clip_amax(op: str, amax: Any) -> Any:
    """Return the clip limit of a gradient (the argument amax of fake_quantize_backward) as float32, not reshaped."""
    # NaN is allowed: it makes the gradient 0, because no comparison |x| <= NaN holds.
    amax = as_real(op, "amax", amax)
    if isinstance(amax, AbstractArray):
        return amax
    with np.errstate(invalid="ignore"):
        negative = int(np.count_nonzero(amax < 0))
    if negative:
        raise ValueError(
            f"{op}: amax holds {negative} negative value(s) of {amax.size}; needs amax >= 0, such as fp4kit.amax(x)"
        )
    return amax


def reshape_amax(op: str, amax: Any, moved_shape: tuple[int, ...], recipe: Recipe, name: str = "tensor_amax") -> Any:
    """Return a tensor_amax or tensor_scale, reshaped to its canonical shape."""
    canonical = tensor_amax_shape(moved_shape, recipe)
    allowed = [canonical]
    if recipe.tensor_scaling == "tensor":
        if amax.size == 1:
            return amax.reshape(())
        allowed = [(), (moved_shape[0],)] if len(moved_shape) > 2 else [()]
    shape = fitting_shape(amax.shape, allowed)
    if shape is not None:
        return amax.reshape(shape)
    if recipe.tensor_scaling == "block" and in_order(amax.shape, canonical):
        return amax.reshape(canonical)
    raise ValueError(f"{op}: {name} has shape {amax.shape}; {recipe.id} needs {' or '.join(map(str, allowed))}")


# The operations that accept block amaxes for the recipes of takes_block_amaxes. Grouped kernels read block amaxes only
# for static recipes.
OPERATIONS_WITH_BLOCK_AMAXES = ("quantize", "fake_quantize", "explain")


def takes_e8m0_amaxes(r: Recipe) -> bool:
    """Return whether recipe r accepts block amaxes for its E8M0 scales, such as those that search_scales finds."""
    chooses_scales = r.fake_only or r.fake_rule or r.search or r.four_over_six
    return r.scale == E8M0 and r.block_rows == 1 and r.tensor_scaling == "none" and not chooses_scales


def takes_block_amaxes(r: Recipe) -> bool:
    """Return whether a recipe accepts given block amaxes, such as the result of search_scales, in place of x's own."""
    return takes_e8m0_amaxes(r) or (r.is_custom and r.block_rule is not None and r.block_rows == 1)


def parse_block_amax(op: str, given: Any, moved_shape: tuple[int, ...], recipe: Recipe, on_device: bool) -> Any:
    """Return the caller's block amaxes as float32 (..., K/block), or None if the caller passed none."""
    if given is None:
        return None
    if not recipe.static and not (takes_block_amaxes(recipe) and op in OPERATIONS_WITH_BLOCK_AMAXES):
        raise ValueError(
            f"{op}: block_amax was given, but {recipe.id} computes it from x; leave it out, or use a recipe that"
            " accepts it, such as nvfp4-modelopt-static"
        )
    shape = scale_shape(moved_shape, recipe)
    if on_device:
        if (
            not isinstance(given, imports.cupy().ndarray)
            or given.dtype != np.float32
            or not in_order(given.shape, shape)
        ):
            raise ValueError(
                f"{op}: block_amax is {description(given)}; needs a float32 CuPy array of shape {shape}, because x is"
                " on a GPU"
            )
        return given.reshape(shape)
    amax = as_real(op, "block_amax", given)
    if not in_order(amax.shape, shape):
        raise ValueError(f"{op}: block_amax has shape {amax.shape}; {recipe.id} needs {shape}")
    if not isinstance(amax, AbstractArray) and (np.isnan(amax).any() or (amax < 0).any()):
        raise ValueError(f"{op}: block_amax holds NaN or negative values; needs amax >= 0")
    return (amax if isinstance(amax, AbstractArray) else without_sign(amax)).reshape(shape)


def clip_amax(call: Any, given: Any) -> Any:
    """Return the clip limit of a gradient, checked and in the memory (host or device) of x; None if `given` is None."""
    if given is None:
        return None
    if call.on_device and isinstance(given, type(call.x)):
        if given.dtype != np.float32:
            raise TypeError(f"{call.op}: amax is {given.dtype}; needs float32, because x is on a GPU")
        return reshape_clip_amax(given, call)
    host = reshape_clip_amax(check_clip_amax(call.op, given), call)
    return imports.to_device(host) if call.on_device else host


def reshape_clip_amax(amax: Any, call: Any) -> Any:
    """Return the clip limits of a gradient in one of three shapes: (1, 1), (rows, 1) or (rows, blocks)."""
    lead = call.moved.shape[:-1]
    rows = prod(lead)
    blocks = scale_shape(call.moved.shape, call.recipe)[-1]
    if amax.size == 1:
        return amax.reshape(1, 1)
    if amax.shape == (rows, 1) or (amax.shape[: len(lead)] == lead and amax.size == rows):
        return amax.reshape(rows, 1)
    if call.recipe.tensor_scaling == "tensor" and len(lead) > 1 and amax.shape[:1] == lead[:1] and amax.size == lead[0]:
        return amax.reshape(lead[0], 1).repeat(prod(lead[1:]), axis=0)
    if call.recipe.block and amax.size == rows * blocks:
        return amax.reshape(rows, blocks)
    raise ValueError(
        f"{call.op}: amax has shape {amax.shape}; x {call.x.shape} needs (), {lead} (rows) or {(*lead, blocks)}"
        " (blocks)"
    )
