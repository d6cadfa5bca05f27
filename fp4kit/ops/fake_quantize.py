"""fake_quantize and its straight-through gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.cuda import loader
from fp4kit.interop import as_array
from fp4kit.ops import check, fake_on_device, on_device, prepared_call
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.prepare import Prepared, prepare, stack
from fp4kit.ops.quantize import SEED_WITHOUT_USE, compute_tensor_amax, given_amaxes, matrix_part, quantize_prepared, random_source
from fp4kit.quantized import scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.blocks import tiles
from fp4kit.reference.fake import FAKE_RULES, clip_gradient
from fp4kit.reference.scaling import tensor_scale


def fake_quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
) -> np.ndarray:
    """x with the error of quantization: dequantize(quantize(x)), in the shape and dtype of x.

    Arguments, errors and numerics are those of quantize. Recipes with a fake_rule follow their producer's own fake quantizer
    instead, which has no codes and often another arithmetic than its real one (reference.fake states each); on a GPU they need
    blocks of one row and 16, 32, ... 512 columns.
    Returns a new array of x's shape and dtype, NumPy or CuPy as x is.
    """
    key = call = None
    if seed is None and block_amax is None:
        key, call = prepared_call.find("fake_quantize", (x, tensor_amax), recipe, axis, rounding)
    if call is not None:
        return call(x, tensor_amax)
    p = prepare("fake_quantize", x, recipe, axis, tensor_amax=tensor_amax, block_amax=block_amax, seed=seed)
    values = _fake_quantize(p, rounding, seed)
    if key is not None:
        prepared_call.keep(key, prepared_call.fake_quantize(p, values))
    return values


@ieee("fake_quantize")
def _fake_quantize(p: Prepared, rounding: str, seed: Any) -> Any:
    r = p.recipe
    if r.fake_rule is None:
        if p.on_device:
            return on_device.fake_quantize("fake_quantize", p, random_source("fake_quantize", p, rounding))
        return dequantize(quantize_prepared("fake_quantize", p, "linear", rounding, False, None))
    if rounding != "nearest":
        raise ValueError(f"fake_quantize: {r.id} rounds to nearest only; got rounding={rounding!r}")
    if seed is not None:
        raise ValueError(f"fake_quantize: {SEED_WITHOUT_USE}")
    if p.on_device:
        return fake_on_device.fake_quantize("fake_quantize", p)
    amax, block = given_amaxes("fake_quantize", p)
    if amax is None and r.tensor_scaling != "none":
        amax = compute_tensor_amax(p.moved, r)
    return np.moveaxis(_run_fake_rule(p, amax, block), -1, p.axis)


def _run_fake_rule(p: Prepared, amax: np.ndarray | None, block: np.ndarray | None) -> np.ndarray:
    moved = np.empty(p.moved.shape, p.x.dtype)
    if not moved.size:
        return moved
    per_expert = amax is not None and amax.ndim > 0
    x = stack(p.moved, p.recipe, per_expert)
    values = moved.reshape(x.shape)
    blocks = None if block is None else block.reshape(*x.shape[:2], -1)
    size = p.recipe.block_size
    for i, matrix in enumerate(x):
        tensor = tensor_scale(matrix_part(amax, p.recipe, i, x.shape), p.recipe, p.x.dtype).columns(p.recipe)
        for rows, columns in tiles(matrix.shape, p.recipe.block):
            tile = np.ascontiguousarray(matrix[rows, columns], np.float32)
            cut = slice(columns.start // size, columns.stop // size)
            given = None if blocks is None else blocks[i][rows, cut]
            with np.errstate(all="ignore"):
                y = FAKE_RULES[p.recipe.fake_rule or ""](tile, p.recipe, tensor.cut(rows, cut).amax, given, p.x.dtype)
                values[i][rows, columns] = y.astype(p.x.dtype)
    return moved


def fake_quantize_backward(
    grad: Any, x: Any, recipe: str | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> np.ndarray:
    """Straight-through gradient of fake_quantize with respect to x.

        pass_through: grad        otherwise: grad where |x| <= amax, else 0

    grad: float32, float16 or bfloat16, shape of x. amax: float32 (), one per row of x (axis last), or one per block; None for
    what the recipe's tensor scale uses (MX recipes: the tensor's amax). It is compared in float32, never rounded to x's dtype.
    On a GPU all arrays are there, and amax is a number or a float32 array.
    Returns grad itself with pass_through, else a new array of grad's shape and dtype.
    Raises ValueError if the shapes differ, amax fits neither, or is negative (on a GPU a device array is not read); TypeError for
        other dtypes.
    Numerics: |x| = amax passes; NaN x gives 0, and so does a NaN amax, which no |x| is within.
    Source: Model-Optimizer tensor_quant.py, FakeTensorQuantFunction.backward.
    """
    p = prepare_backward(grad, x, recipe, axis, amax)
    g = p.others["grad"]
    if pass_through or not g.size:
        return g
    clip = clip_amax(p)
    if p.on_device:
        return fake_on_device.clip(g, p, clip)
    out = np.empty(p.moved.shape, g.dtype)
    _run_clip(np.moveaxis(g, p.axis, -1), p, clip, out)
    return np.moveaxis(out, -1, p.axis)


def prepare_backward(grad: Any, x: Any, recipe: str | Recipe, axis: int, amax: Any) -> Prepared:
    """x, and among the others grad and amax: imported and checked, but for the values of an amax on a device."""
    p = prepare("fake_quantize_backward", x, recipe, axis, grad=grad, amax=amax)
    g = p.others["grad"]
    g = g if isinstance(g, type(p.x)) else as_array(g, "fake_quantize_backward: grad")
    check.check_float("fake_quantize_backward", g, "grad")
    if g.shape != p.x.shape:
        raise ValueError(f"fake_quantize_backward: grad has shape {g.shape}; needs that of x, {p.x.shape}")
    given = p.others["amax"]
    if given is not None and not (p.on_device and isinstance(given, type(p.x))):
        given = check.check_clip_amax("fake_quantize_backward", given)
    return p._replace(others=p.others | {"grad": g, "amax": given})


@ieee("fake_quantize_backward")
def clip_amax(p: Prepared) -> Any:
    """The amax of the call as (1, 1), (rows, 1) or (rows, blocks), rows = all leading axes joined; on the device of x."""
    amax = p.others["amax"]
    if amax is None:
        return _reshape_clip_amax(_computed_clip_amax(p), p)
    if isinstance(amax, type(p.x)) and p.on_device:
        if amax.dtype != np.float32:
            raise TypeError(f"fake_quantize_backward: amax is {amax.dtype}; needs float32 on a device")
        return _reshape_clip_amax(amax, p)
    host = _reshape_clip_amax(amax, p)
    return loader.cupy().asarray(host) if p.on_device else host


def _computed_clip_amax(p: Prepared) -> Any:
    if p.on_device:
        return fake_on_device.clip_amax("fake_quantize_backward", p)
    r = p.recipe
    return compute_tensor_amax(p.moved, replace(r, tensor_scaling="tensor") if r.tensor_scaling == "none" else r)


def _reshape_clip_amax(amax: Any, p: Prepared) -> Any:
    lead = p.moved.shape[:-1]
    rows = int(np.prod(lead))
    blocks = int(np.prod(scale_shape(p.moved.shape, p.recipe)[-1:]))
    if amax.size == 1:
        return amax.reshape(1, 1)
    if amax.shape in (lead, (*lead, 1), (rows, 1)):
        return amax.reshape(rows, 1)
    if p.recipe.block and amax.size == rows * blocks:
        return amax.reshape(rows, blocks)
    raise ValueError(
        f"fake_quantize_backward: amax has shape {amax.shape}; x {p.x.shape} needs (), {lead} (rows) "
        f"or {(*lead, blocks)} (blocks)"
    )


@ieee("fake_quantize_backward")
def _run_clip(grad: np.ndarray, p: Prepared, amax: np.ndarray, out: np.ndarray) -> None:
    if not out.size:
        return
    K = p.moved.shape[-1]
    x, g = stack(p.moved, p.recipe, True), stack(grad, p.recipe, True)
    result = out.reshape(x.shape)
    M = x.shape[1]
    for i, matrix in enumerate(x):
        part = amax if len(amax) == 1 else amax[i * M : (i + 1) * M]
        for rows, columns in tiles((M, K), p.recipe.block):
            limit = part if len(part) == 1 else part[rows]
            if limit.shape[1] > 1:
                size = K // limit.shape[1]
                limit = np.repeat(limit[:, columns.start // size : columns.stop // size], size, axis=1)
            result[i][rows, columns] = clip_gradient(g[i][rows, columns], matrix[rows, columns], limit)
