"""Provide fp4kit.jax.linear: a linear layer with both operands quantized, multiplied as a GPU's matrix unit does."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

import fp4kit
from fp4kit.arguments import as_index
from fp4kit.call.inputs import AbstractArray
from fp4kit.call.inputs import check_seed as check_seed_range
from fp4kit.call.linear import (
    NO_SECOND_GRADIENT,
    OP,
    LinearOperations,
    LinearSettings,
    check_linear,
    check_weight,
    gradient_of_w,
    gradient_of_x,
    linear_settings,
    product,
)
from fp4kit.call.outputs import part_specs
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.jax.calls import is_traced, outline, traced
from fp4kit.jax.codes import dequantize, quantize
from fp4kit.jax.functions import as_jax, check_seed
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import FACTS, flatten, unflatten
from fp4kit.recipes import Recipe
from fp4kit.types import Hadamard, RoundingMode
from fp4kit.units import Unit


class StaticLinear(NamedTuple):
    """The arguments of linear that JAX treats as static.

    settings: all arguments except x, w and seed.
    seed: the seed if it is an int; None if the caller passed an array, which is not static, or no seed.
    """

    settings: LinearSettings
    seed: int | None


def linear(
    x: Any,
    w: Any,
    recipe_x: str | Recipe,
    recipe_w: str | Recipe | None = None,
    *,
    unit: str | Unit = "sm100",
    out_dtype: Any = None,
    backward: str = "straight-through",
    recipe_grad: str | Recipe | None = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
) -> jax.Array:
    """Return y = x w^T, with both operands quantized and multiplied as a GPU's matrix unit does. Differentiable.

        y = matmul(quantize(x, recipe_x), quantize(w, recipe_w), unit=unit, out_dtype=out_dtype)

    The formula uses fp4kit.matmul and fp4kit.quantize. With it, a W4A4 layer can be trained and evaluated on hardware
    without FP4. Before quantization, x is reshaped to a matrix (M, K), so a tensor scale covers all of x.

    backward="straight-through" gives the gradients of the product of the dequantized operands, as if nothing had been
    rounded:

        gradient of x = grad w'    gradient of w = grad^T x'

    Here x' and w' are the dequantized operands in float32, and grad is the gradient with respect to y, converted to
    float32. jax.numpy.matmul computes these products in float32 with precision="highest"; XLA determines the order of
    the sums. The result is rounded to the dtype of x or w.

    backward="high-precision" multiplies by the unquantized x and w instead, also in float32. Transformer Engine has
    both backward passes for row-scaled activations (recipe_x="nvfp4-te-rowscaled", recipe_w="nvfp4-te"). There they are
    called backward_override="dequantized" and "high_precision". Transformer Engine multiplies in bfloat16.

    backward="quantized" computes both gradients as Transformer Engine's NVFP4 recipe does, from operands that are
    quantized along the axis of the sum:

        gradient of x = matmul(quantize(grad, recipe_grad), quantize(w, recipe_w, axis=0))
        gradient of w = matmul(quantize(grad, recipe_grad, axis=0), quantize(x, recipe_x, axis=0))

    Both products are computed as `unit` does, and rounded to the dtype of x or w. Transformer Engine's defaults are
    recipe_x="nvfp4-te", recipe_w="nvfp4-te-2d", rounding="stochastic" and hadamard=True.

    Works under jax.jit, grad, vmap, scan and checkpoint. All arguments except x, w and seed are static. In traced
    programs, calls run on the host or the GPU as for fp4kit.jax.fake_quantize.

    Args:
        x: float32, float16 or bfloat16 array (..., K) of JAX or NumPy.
        w: float32, float16 or bfloat16 array (N, K); or a Quantized of JAX arrays with blocks along K, which gets no
            gradient.
        recipe_x: the recipe of x.
        recipe_w: the recipe of w; None if w is a Quantized.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: float32, float16 or bfloat16; None for the dtype of x.
        backward: "straight-through", "high-precision" or "quantized".
        recipe_grad: the recipe of the gradient with respect to y, for "quantized"; None for recipe_x.
        rounding: for "quantized", how both quantized copies of the gradient with respect to y are rounded.
        seed: for rounding="stochastic": an int, or a 0-d integer array, which may be traced. Both copies use this seed;
            pass another one in every training step.
        hadamard: True transforms both operands of the gradient of w along M, as in fp4kit.quantize. "no_signs" leaves
            out the random signs.

    Returns:
        A new array (..., N) of out_dtype, on the device of x.

    Raises:
        TypeError: x or w is not an array of JAX or NumPy, or its dtype is not one of the three above.
        TypeError: recipe_w is missing for an unquantized w, or another argument has the wrong type.
        ValueError: an argument is unknown or contradicts another, such as a seed for "straight-through".
        ValueError: w is a Quantized, for "high-precision".
        ValueError: lengths do not fit each other or a recipe, or the unit has no instruction for two of the recipes.
            For "quantized", M and N are lengths of quantized axes too, and a Quantized w needs square blocks.
        NotImplementedError: the engine of the device cannot multiply the operands; or the gradients of "quantized" are
            differentiated again.

    Exact:
        y and the gradients of "quantized" equal the formulas above bit for bit, with and without jit. A Quantized w
        with square blocks is transposed instead of quantized again, with equal bits. fp4kit.matmul says which units
        were compared with hardware.

    Source:
        NVFP4BlockScaling in Transformer Engine's common/recipe/__init__.py: weights in blocks of 16 x 16, stochastic
        rounding for gradients alone, the Hadamard transform for the columnwise copies of activations and gradients.

    Examples:
        >>> x, w = jax.numpy.full((16, 32), 0.3), jax.numpy.full((16, 32), 5.0)
        >>> linear(x, w, "mxfp4", "mxfp4")[0, 0].item()  # 0.25 * 4 * 32
        32.0
        >>> of_w = jax.jit(jax.grad(lambda w: linear(x, w, "mxfp4", "mxfp4").sum()))(w)
        >>> of_w[0, 0].item()  # 0.25 * 16
        4.0
    """
    x = as_jax(OP, x)
    weight, shape = None, None
    if isinstance(w, Quantized):
        check_weight(w)
        weight, shape = (w.recipe, w.scale_layout), AbstractArray(w.shape, np.dtype(np.float32))
    else:
        w = as_jax(OP, w, "w")
    options = unit, x.dtype if out_dtype is None else out_dtype, backward, str(rounding), hadamard
    s = linear_settings(OP, (recipe_x, recipe_w, recipe_grad), weight, *options)
    number, given = _seeds(seed)
    check_linear(s, outline(x), outline(w) if shape is None else shape, seed is not None)
    y = _linear(StaticLinear(s, number), x.reshape(prod(x.shape[:-1]), x.shape[-1]), w, given)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _seeds(seed: Any) -> tuple[int | None, Any]:
    """Return a seed as (int, None) if it is static, or as (None, 0-d array); (None, None) if there is no seed."""
    check_seed(OP, seed)
    if getattr(seed, "ndim", 0):
        raise ValueError(f"{OP}: seed has shape {seed.shape}; needs an int, or a 0-d integer array")
    if seed is None or hasattr(seed, "dtype"):
        return None, seed
    return check_seed_range(OP, as_index(OP, "seed", seed)), None


def _matmul(a: Quantized, b: Quantized, *, unit: Unit, out_dtype: Any) -> Any:
    """Return fp4kit.matmul(a, b) as a JAX array (M, N) of out_dtype, for a with M rows and b with N rows."""
    if not is_traced(a, b):
        return fp4kit.matmul(a, b, unit=unit, out_dtype=out_dtype)
    shape = a.moved_shape[0], b.moved_shape[0]
    declared = [jax.ShapeDtypeStruct(shape, out_dtype)]
    return traced("matmul", declared, a=a, b=b, unit=unit, out_dtype=np.dtype(out_dtype).name)[0]


def _transpose(q: Quantized) -> Quantized:
    """Return the transpose of a quantized matrix that has square blocks along axis 1."""
    if not is_traced(q):
        return fp4kit.transpose(q)
    options = QuantizeOptions(q.scale_layout)
    specs = part_specs(quantize_call(OP, AbstractArray(q.shape, q.dtype), q.recipe, 0, options))
    names = flatten(q)[1][0]
    arrays = traced("transpose", [jax.ShapeDtypeStruct(*specs[name]) for name in names], q=q)
    facts = {name: getattr(q, name) for name in FACTS} | {"axis": 0}
    return unflatten(arrays, (names, *facts.values()))


_OPERATIONS = LinearOperations(quantize, _transpose, _matmul)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: StaticLinear, x: Any, w: Any, seed: Any) -> Any:
    """Return y (M, N) for x (M, K) and w, as `linear` describes it."""
    return product(_OPERATIONS, static.settings, x, w)


def _forward(static: StaticLinear, x: Any, w: Any, seed: Any) -> tuple[Any, Any]:
    """Return the result of _linear, and the residuals for _backward: x, w and seed."""
    return _linear(static, x, w, seed), (x, w, seed)


def _backward(static: StaticLinear, residuals: Any, grad: Any) -> tuple[Any, Any, None]:
    """Return the gradients of _linear with respect to x, w and seed."""
    (x, w, seed), s = residuals, static.settings
    quantized = isinstance(w, Quantized)
    if s.backward == "quantized":
        of_x = _gradient_of_x(static, x.dtype, grad, w, seed)
        return of_x, None if quantized else _gradient_of_w(static, w.dtype, grad, x, seed), None
    grad, multiply = grad.astype(np.float32), partial(jax.numpy.matmul, precision="highest")
    if s.backward == "high-precision":
        values = w.astype(np.float32)
    else:
        values = dequantize(w, np.float32) if quantized else _values(s.recipe_w, w.dtype, w)
    of_x = multiply(grad, values).astype(x.dtype)
    if quantized:
        return of_x, None, None
    rows = x.astype(np.float32) if s.backward == "high-precision" else _values(s.recipe_x, x.dtype, x)
    return of_x, multiply(grad.T, rows).astype(w.dtype), None


_linear.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _values(recipe: Recipe, dtype: Any, x: Any) -> Any:
    """Return the values of x after quantization along its last axis and dequantization, as float32."""
    return dequantize(quantize(x, recipe), np.float32)


_values.defvjp(
    lambda recipe, dtype, x: (_values(recipe, dtype, x), None), lambda recipe, dtype, _, grad: (grad.astype(dtype),)
)


def _seed_of(static: StaticLinear, given: Any) -> Any:
    """Return the seed to pass to quantize: `given`, the seed as an array, or static.seed if `given` is None."""
    return static.seed if given is None else given


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradient_of_x(static: StaticLinear, dtype: Any, grad: Any, w: Any, seed: Any) -> Any:
    """Return the gradient of _linear with respect to x, (M, K), from quantized operands."""
    return gradient_of_x(_OPERATIONS, static.settings, grad, w, _seed_of(static, seed), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradient_of_w(static: StaticLinear, dtype: Any, grad: Any, x: Any, seed: Any) -> Any:
    """Return the gradient of _linear with respect to w, (N, K), from quantized operands."""
    return gradient_of_w(_OPERATIONS, static.settings, grad, x, _seed_of(static, seed), dtype)


def _no_gradient(*arguments: Any) -> NoReturn:
    """Always raise NotImplementedError, because gradients from quantized operands have no gradients themselves."""
    raise NotImplementedError(NO_SECOND_GRADIENT)


_gradient_of_x.defvjp(lambda static, dtype, *arguments: (_gradient_of_x(static, dtype, *arguments), None), _no_gradient)
_gradient_of_w.defvjp(lambda static, dtype, *arguments: (_gradient_of_w(static, dtype, *arguments), None), _no_gradient)
