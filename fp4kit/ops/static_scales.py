"""Implement fp4kit.quantize_static, which quantizes activations under the input scale that a checkpoint stores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp4kit.arguments import as_float32
from fp4kit.arrays.imports import import_arrays, on_device, to_device, to_host
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.ops.amax import amax
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import swizzle
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes.table import recipe_of
from fp4kit.reference.arith import ONE
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.implied_amax import UNKNOWN
from fp4kit.reference.static_amax import static_amax
from fp4kit.reference.tensor_rules import TensorScale
from fp4kit.types import Array, RecipeId, ScaleLayout

OP = "quantize_static"
# {tensor rule: the argument of quantize_static that recipes with this rule take}
_DIRECTIONS = {"divided": "input_scale", "vllm": "input_global_scale"}
_RECIPES = {
    "input_scale": "nvfp4-vllm-static, nvfp4-flashinfer-static or nvfp4-comfy-kitchen-static",
    "input_global_scale": "nvfp4-vllm-static-divisor",
}


def quantize_static(
    x: Array,
    recipe: RecipeId | Recipe,
    *,
    input_scale: Any = None,
    input_global_scale: Any = None,
    scale_layout: ScaleLayout = "linear",
) -> Quantized:
    """Quantize activations with the static input scale that a checkpoint stores, as an inference engine does.

    Pass the stored number as input_scale or input_global_scale, whichever name the checkpoint uses. The tensor scale is
    not computed from x. If you have the amax from calibration instead, pass it to fp4kit.quantize as tensor_amax.

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        recipe: the recipe of the engine's kernel: nvfp4-vllm-static, nvfp4-flashinfer-static or
            nvfp4-comfy-kitchen-static for input_scale, nvfp4-vllm-static-divisor for input_global_scale, or another
            recipe with the tensor rule of one of them. It needs block scales and one scale per tensor, and must not
            choose scales by their errors (4over6, searches).
        input_scale: a scale that multiplies on decode (Model-Optimizer, ComfyUI), about amax / 2688. A number, or an
            array or a tensor of one element; it must be a positive float32 number.
        input_global_scale: a scale that divides on decode (compressed-tensors), about 2688 / amax.
        scale_layout: as in fp4kit.quantize.

    Returns:
        A new Quantized. Its tensor_scale is input_scale, or the reciprocal of input_global_scale.

    Raises:
        TypeError: a scale is not a number.
        ValueError: not exactly one scale is given, it is not positive and finite, the recipe takes the other scale or
            none, or no amax gives the input_global_scale.
        TypeError, ValueError, NotImplementedError: as for fp4kit.quantize.

    Numerics:
        As for fp4kit.quantize. Elements beyond the scale saturate.

    Exact:
        Equals fp4kit.quantize with a tensor_amax that gives this scale. Scales that were computed from an amax have
        such a tensor_amax. If no amax gives an input_scale, block scales are computed from the scale itself, on the
        host, and the result has no tensor_amax.

    Source:
        recipe.source.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.calibration import input_scale
        >>> x = np.float32([[0.1, -6, 2.4, 0.6] * 8])
        >>> q = fp4kit.quantize_static(x, "nvfp4-vllm-static", input_scale=input_scale(5.25))
        >>> q.equals(fp4kit.quantize(x, "nvfp4-vllm-static", tensor_amax=5.25))
        True
    """
    r = recipe_of(OP, recipe)
    name, scale = _given(r, input_scale, input_global_scale)
    (array,) = import_arrays(OP, x=x)
    quantize_call(OP, array, r, -1, QuantizeOptions(scale_layout))  # raises the errors of quantize before any work
    found = static_amax(scale, r, array.dtype, name == "input_global_scale")
    if found != UNKNOWN:
        return quantize(x, r, tensor_amax=float(found), scale_layout=scale_layout)
    if name == "input_global_scale":
        raise ValueError(
            f"{OP}: no amax gives the input_global_scale {float(scale)!r} by {r.id}; needs a scale that was computed as"
            " 2688 * (1 / amax) in float32, such as that of fp4kit.calibration.input_global_scale"
        )
    with np.errstate(all="ignore"):
        tensor = TensorScale(np.asarray(ONE / scale), np.asarray(scale), np.asarray(ONE))
        codes = BLOCK_RULES[str(r.block_rule)].code(to_host(amax(array, r)), tensor, r, array.dtype)
    codes = to_device(codes) if on_device(array) else codes
    q: Quantized = quantize(x, r, block_scale=codes, tensor_scale=scale)
    return q if scale_layout == "linear" else swizzle(q, scale_layout)


def _given(r: Recipe, input_scale: Any, input_global_scale: Any) -> tuple[str, np.float32]:
    """Return the scale that the caller gave, as the pair (name of the argument, value as float32)."""
    given = {"input_scale": input_scale, "input_global_scale": input_global_scale}
    passed = [name for name, value in given.items() if value is not None]
    if len(passed) != 1:
        came = "both scales were given" if passed else "no scale was given"
        raise ValueError(f"{OP}: {came}; needs either input_scale or input_global_scale")
    (name,) = passed
    needed = _DIRECTIONS.get(r.tensor_rule or "")
    if needed is None or r.tensor_scaling != "tensor" or r.four_over_six or r.search or r.fake_only or r.scale is None:
        raise ValueError(f"{OP}: {r.id} takes no static input scale; needs a recipe such as {_RECIPES[name]}")
    if needed != name:
        raise ValueError(f"{OP}: {name} was given, but {r.id} takes {needed}; for {name}, use {_RECIPES[name]}")
    return name, _number(name, given[name])


def _number(name: str, value: Any) -> np.float32:
    """Return a scale as float32."""
    found = as_float32(OP, name, value, "needs a number, or an array of one element")
    if not (found > 0 and math.isfinite(found)):
        raise ValueError(f"{OP}: {name} is {value!s:.60}; needs a positive float32 number")
    return found
