"""quantize and dequantize of fp4kit.jax."""

from __future__ import annotations

from typing import Any

import jax

import fp4kit
from fp4kit.arguments import as_index
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call import checks
from fp4kit.call.outputs import parts
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
    """fp4kit.quantize of an array of JAX, under jax.jit too: codes and scales in a Quantized, which is a pytree.

    x: float32, float16 or bfloat16 array. The other arguments are those of fp4kit.quantize; seed as in fake_quantize
    here. Returns Quantized of arrays on the device of x. It may be argument and result of jitted functions, and goes
    through jax.tree
        and jax.device_put; its arrays are the leaves, all else is static. Under jax.vmap its arrays have one more axis
        than its shape says, until dequantize under jax.vmap takes it away.
    In a program that JAX traces it runs as fake_quantize does. Gradients stop here.
    Raises what fp4kit.quantize raises; what depends on shapes and dtypes also while it is traced.

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
    how = QuantizeOptions(scale_layout, rounding, 0 if number else outline(seed), hadamard)
    given = outline(tensor_amax), outline(block_amax)
    call = quantize_call("quantize", outline(x), r, axis, how, tensor_amax=given[0], block_amax=given[1])
    found = {name: jax.ShapeDtypeStruct(*facts) for name, facts in parts(call).items()}
    arrays = traced("quantize", list(found.values()), x=x, recipe=r, seed=seed, **options, **amaxes)
    return unflatten(arrays, (tuple(found), call.x.shape, call.x.dtype, call.axis, r, scale_layout))


def dequantize(q: Quantized, dtype: Any = None) -> jax.Array:
    """fp4kit.dequantize to an array of JAX, under jax.jit too. Gradients stop here.

    q: a Quantized of JAX's arrays. dtype: float32, float16 or bfloat16; None for that of the array that was quantized.
    Returns a new array of q.shape. Raises TypeError for anything but a Quantized, and for another dtype.

    >>> q = quantize(jax.numpy.array([[0.3, -5.0] * 16]), "mxfp4")
    >>> jax.jit(dequantize)(q)[0, :2].tolist()
    [0.5, -4.0]
    """
    checks.check_is_quantized("dequantize", q)
    wanted = numpy_dtype("dequantize", q.dtype if dtype is None else dtype)
    checks.check_values_dtype("dequantize", wanted)
    if is_traced(q):
        return traced("dequantize", [jax.ShapeDtypeStruct(q.shape, wanted)], q=q, dtype=wanted.name)[0]
    values: Any = fp4kit.dequantize(q, wanted)
    return values
