"""Check the scales that a caller passes to quantize, and convert them to the dtype and shape that engines need."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.amaxes import as_real, reshape_amax
from fp4kit.formats import E4M3, E8M0
from fp4kit.layouts import padded_shape
from fp4kit.quantized.part_shapes import NEVER_NAN, check_scale_codes, scale_shape
from fp4kit.recipes import Recipe

_FLOAT8 = {E4M3: np.dtype(ml_dtypes.float8_e4m3fn), E8M0: np.dtype(ml_dtypes.float8_e8m0fnu)}


def check_complete(op: str, r: Recipe, block_scale: Any, tensor_scale: Any) -> None:
    """Raise ValueError unless the caller passed exactly the scales that the recipe has: block, tensor, or both."""
    has = {"block_scale": r.scale is not None, "tensor_scale": r.tensor_scaling != "none"}
    given = {"block_scale": block_scale is not None, "tensor_scale": tensor_scale is not None}
    for name, is_given in given.items():
        if is_given and not has[name]:
            raise ValueError(f"{op}: {name} was given, but {r.id} has none; leave it out")
        if has[name] and not is_given:
            other = next(iter(given.keys() - {name}))
            raise ValueError(f"{op}: {other} was given without {name}; {r.id} has both; give both scales, or neither")


def parse_block_scale(op: str, given: Any, moved_shape: tuple[int, ...], r: Recipe, layout: str) -> Any:
    """Return the caller's block_scale as uint8 bit patterns, not copied; None if the recipe has no block scales."""
    if r.scale is None:
        return None
    shape = padded_shape(scale_shape(moved_shape, r), layout)
    float8 = _FLOAT8.get(r.scale)
    if not hasattr(given, "dtype") or given.dtype not in ((np.uint8,) if float8 is None else (np.uint8, float8)):
        got = getattr(given, "dtype", None) or type(given).__name__
        needed = f"uint8 bit patterns of {r.scale}" + ("" if float8 is None else f", or {float8}")
        raise TypeError(f"{op}: block_scale is {got}; {r.id} needs {needed}")
    if given.shape != shape:
        raise ValueError(f"{op}: block_scale has shape {given.shape}; {r.id} of {moved_shape} needs {shape}, {layout}")
    check_scale_codes(op, given, r.scale)
    return given.view(np.uint8)


def parse_tensor_scale(op: str, given: Any, moved_shape: tuple[int, ...], r: Recipe, on_device: bool) -> Any:
    """Return the caller's tensor_scale as float32 in its canonical shape, or None if the recipe has no tensor scale."""
    if r.tensor_scaling == "none":
        return None
    if on_device and isinstance(given, imports.cupy().ndarray):
        if given.dtype != np.float32:
            raise TypeError(f"{op}: tensor_scale is {given.dtype}; needs float32, because x is on a GPU")
        return reshape_amax(op, given, moved_shape, r, "tensor_scale")
    scale = reshape_amax(op, as_real(op, "tensor_scale", given), moved_shape, r, "tensor_scale")
    bad = ~(scale >= 0) if r.tensor_rule in NEVER_NAN else scale < 0
    if bad.any():
        what = "NaN" if np.isnan(scale[bad]).any() else "negative"
        raise ValueError(
            f"{op}: tensor_scale holds {int(bad.sum())} {what} value(s) of {scale.size}; needs tensor_scale >= 0"
        )
    return imports.to_device(scale) if on_device else scale
