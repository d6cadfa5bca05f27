"""Provide quantize and dequantize of fp4kit.jax, on arrays with values and in programs that JAX traces."""

from __future__ import annotations

from typing import Any

import jax

import fp4kit
from fp4kit.arguments import as_index
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.inputs import check_is_quantized, check_values_dtype
from fp4kit.call.outputs import part_specs
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.jax.calls import is_traced, outline, traced
from fp4kit.jax.functions import as_jax, check_seed
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout


def quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
) -> Quantized:
    """Quantize a JAX array to codes and scales, as fp4kit.quantize does, also under jax.jit. It has no gradient.

    In a traced program, the call runs on the host or the GPU as for fp4kit.jax.fake_quantize. Under jax.vmap the arrays
    of the result have the mapped axis in addition to the axes of q.shape. dequantize under jax.vmap removes it.

    Args:
        x: float32, float16 or bfloat16 array of JAX or NumPy.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax that determines the tensor scale; None computes it from x.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer array, which may be traced, or the random bytes, uint8 in the
            shape of x.
        hadamard: False, True or "no_signs", as in fp4kit.quantize.
        block_amax: calibrated block amaxes, as in fp4kit.quantize.

    Returns:
        A Quantized of arrays on the device of x. It is a pytree: its arrays are the leaves, and all other fields are
        static. It may be an argument and a result of jitted functions, and can be passed to jax.tree and
        jax.device_put.

    Raises:
        TypeError, ValueError: as for fp4kit.quantize. Errors that depend only on shapes and dtypes are also raised
            while the call is traced.

    Exact:
        Equals fp4kit.quantize bit for bit.

    Examples:
        >>> q = jax.jit(lambda x: quantize(x, "mxfp4"))(jax.numpy.array([[0.5, -6.0] * 16]))
        >>> q.packed[0, 0].item(), q.block_scale.tolist(), q.shape
        (241, [[127]], (1, 32))
    """
    x = as_jax("quantize", x)
    r, number = recipe_of("quantize", recipe), getattr(seed, "ndim", None) == 0
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    axis = as_index("quantize", "axis", axis)
    check_seed("quantize", seed)
    options = {"axis": axis, "scale_layout": scale_layout, "rounding": rounding, "hadamard": hadamard}
    if not is_traced(x, tensor_amax, block_amax, seed):
        arguments: dict[str, Any] = {**options, **amaxes, "seed": int(seed) if number else seed}
        return fp4kit.quantize(x, r, **arguments)
    quantize_options = QuantizeOptions(scale_layout, rounding, 0 if number else outline(seed), hadamard)
    given = outline(tensor_amax), outline(block_amax)
    call = quantize_call("quantize", outline(x), r, axis, quantize_options, tensor_amax=given[0], block_amax=given[1])
    shapes = {name: jax.ShapeDtypeStruct(*facts) for name, facts in part_specs(call).items()}
    arrays = traced("quantize", list(shapes.values()), x=x, recipe=r, seed=seed, **options, **amaxes)
    return unflatten(arrays, (tuple(shapes), call.x.shape, call.x.dtype, call.axis, r, scale_layout))


def dequantize(q: Quantized, dtype: Any = None) -> jax.Array:
    """Return the values of a Quantized as a JAX array, as fp4kit.dequantize does, also under jax.jit.

    The function has no gradient.

    Args:
        q: a Quantized of JAX arrays.
        dtype: float32, float16 or bfloat16; None for the dtype of the array that was quantized.

    Returns:
        A new array of shape q.shape.

    Raises:
        TypeError: q is not a Quantized, or dtype is none of these dtypes.

    Exact:
        Equals fp4kit.dequantize bit for bit.

    Examples:
        >>> q = quantize(jax.numpy.array([[0.3, -5.0] * 16]), "mxfp4")
        >>> jax.jit(dequantize)(q)[0, :2].tolist()
        [0.5, -4.0]
    """
    check_is_quantized("dequantize", q)
    wanted = numpy_dtype("dequantize", q.dtype if dtype is None else dtype)
    check_values_dtype("dequantize", wanted)
    if is_traced(q):
        return traced("dequantize", [jax.ShapeDtypeStruct(q.shape, wanted)], q=q, dtype=wanted.name)[0]
    values: Any = fp4kit.dequantize(q, wanted)
    return values
