"""Define the linear layer as PyTorch operators: torch.ops.fp4kit.linear, and the operators of its gradients.

In the arguments of these operators, w is a float tensor (N, K), or the packed codes of a Quantized. The scales of the
Quantized follow as further arguments, which are None for a float w. The settings are the text of
call.linear.settings_from_text.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

import fp4kit
from fp4kit.call.inputs import AbstractArray
from fp4kit.call.linear import (
    NO_SECOND_GRADIENT,
    OP,
    LinearOperations,
    LinearSettings,
    check_linear,
    gradient_of_w,
    gradient_of_x,
    product,
    settings_from_text,
)
from fp4kit.quantized.container import PARTS
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes.serialization import from_spec, to_spec
from fp4kit.torch import codes
from fp4kit.torch.operators import loop_over, seed_of
from fp4kit.torch.tensors import TORCH, check_devices, copy_if_shared, detached, outline

_EAGER = LinearOperations(fp4kit.quantize, fp4kit.transpose, fp4kit.matmul)


def _rows(x: Tensor) -> Tensor:
    """Return x (..., K) reshaped to a matrix (M, K): M is the product of all lengths but the last, or 1 if x is 1-d."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _weight_shape(s: LinearSettings, w: Tensor) -> tuple[int, int]:
    """Return the shape (N, K) of the weight of a linear layer."""
    if s.scale_layout is None:
        return w.shape[0], w.shape[1]
    packing = s.recipe_w.element.packing
    return w.shape[0], w.shape[1] // packing.bytes * packing.codes


def _weight(s: LinearSettings, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None) -> Any:
    """Return a weight as fp4kit's functions take it: a detached tensor, or a Quantized of detached tensors."""
    if s.scale_layout is None:
        return w.detach()
    facts = (PARTS, _weight_shape(s, w), np.dtype(np.float32), 1, s.recipe_w, s.scale_layout)
    return unflatten([detached(a) for a in (w, block_scale, tensor_scale, None)], facts)


def _checked(
    x: Tensor, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None, seed: Tensor | None, settings: str
) -> LinearSettings:
    """Check the arguments of linear, and return the settings that the text `settings` describes."""
    s = settings_from_text(settings)
    check_devices(OP, x=x, w=w, block_scale=block_scale, tensor_scale=tensor_scale)
    if seed is not None and seed.ndim:
        raise ValueError(f"{OP}: seed has shape {tuple(seed.shape)}; needs an int, or a 0-d integer tensor")
    whole = outline(w) if s.scale_layout is None else AbstractArray(_weight_shape(s, w), np.dtype(np.float32))
    given = outline(x)
    assert given is not None and whole is not None
    check_linear(s, given, whole, seed is not None)
    return s


@torch.library.custom_op("fp4kit::linear", mutates_args=())
def linear(
    x: Tensor, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None, seed: Tensor | None, settings: str
) -> Tensor:
    """Return y = x w^T as ops.linear.product computes it, with both operands quantized: a new tensor (..., N)."""
    s = _checked(x, w, block_scale, tensor_scale, seed, settings)
    y = product(_EAGER, s, _rows(x.detach()), _weight(s, w, block_scale, tensor_scale))
    return copy_if_shared(y.reshape(*x.shape[:-1], w.shape[0]))


@linear.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    s = _checked(x, w, *rest)
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=TORCH[s.out_dtype])


linear.register_vmap(loop_over(linear))


@torch.library.custom_op("fp4kit::linear_gradient_of_x", mutates_args=())
def linear_gradient_of_x(
    grad: Tensor,
    w: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor | None,
    seed: Tensor | None,
    settings: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of linear with respect to x, (..., K) in `dtype`, as ops.linear.gradient_of_x does."""
    s = settings_from_text(settings)
    weight = _weight(s, w, block_scale, tensor_scale)
    gradient = gradient_of_x(_EAGER, s, _rows(grad.detach()), weight, seed_of(seed), dtype)
    return copy_if_shared(gradient.reshape(*grad.shape[:-1], _weight_shape(s, w)[1]))


@linear_gradient_of_x.register_fake
def _(grad: Tensor, w: Tensor, *rest: Any) -> Tensor:
    settings, dtype = rest[-2:]
    return grad.new_empty((*grad.shape[:-1], _weight_shape(settings_from_text(settings), w)[1]), dtype=dtype)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save nothing on ctx, because no_gradient reads nothing."""


def no_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
    """Always raise NotImplementedError, because gradients from quantized operands have no gradients themselves."""
    raise NotImplementedError(NO_SECOND_GRADIENT)


linear_gradient_of_x.register_autograd(no_gradient, setup_context=save_nothing)
linear_gradient_of_x.register_vmap(loop_over(linear_gradient_of_x))


@torch.library.custom_op("fp4kit::linear_gradient_of_w", mutates_args=())
def linear_gradient_of_w(grad: Tensor, x: Tensor, seed: Tensor | None, settings: str, dtype: torch.dtype) -> Tensor:
    """Return the gradient of linear with respect to w, (N, K) in `dtype`, as ops.linear.gradient_of_w does."""
    s = settings_from_text(settings)
    return copy_if_shared(gradient_of_w(_EAGER, s, _rows(grad.detach()), _rows(x.detach()), seed_of(seed), dtype))


@linear_gradient_of_w.register_fake
def _(grad: Tensor, x: Tensor, seed: Tensor | None, settings: str, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[-1], x.shape[-1]), dtype=dtype)


linear_gradient_of_w.register_autograd(no_gradient, setup_context=save_nothing)
linear_gradient_of_w.register_vmap(loop_over(linear_gradient_of_w))


@torch.library.custom_op("fp4kit::quantized_values", mutates_args=())
def quantized_values(x: Tensor, recipe: str) -> Tensor:
    """Return the values of x after quantization along its last axis and dequantization, as a new float32 tensor."""
    values: Any = fp4kit.dequantize(fp4kit.quantize(x.detach(), from_spec(recipe)), np.float32)
    return copy_if_shared(values)


@quantized_values.register_fake
def _(x: Tensor, recipe: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def save_dtype(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the dtype of x as ctx.dtype, which values_backward reads."""
    ctx.dtype = inputs[0].dtype


def values_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of quantized_values' two arguments: `grad` in the dtype of x for x, and None for recipe."""
    return grad.to(ctx.dtype), None


quantized_values.register_autograd(values_backward, setup_context=save_dtype)
quantized_values.register_vmap(loop_over(quantized_values))


class BackwardOperators(NamedTuple):
    """The functions that `backward` calls. By default, they are the operators of this file.

    Inside torch.func transforms, transforms.py passes versions of them that have gradients there.

    Attributes:
        values: quantized_values.
        gradient_of_x: linear_gradient_of_x.
        gradient_of_w: linear_gradient_of_w.
    """

    values: Callable[..., Tensor] = quantized_values
    gradient_of_x: Callable[..., Tensor] = linear_gradient_of_x
    gradient_of_w: Callable[..., Tensor] = linear_gradient_of_w


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the inputs of linear for `backward`: the tensors by ctx.save_for_backward, the settings as ctx.settings."""
    *tensors, ctx.settings = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, grad: Tensor, parts: BackwardOperators = BackwardOperators()) -> tuple[Any, ...]:  # noqa: B008  (immutable)
    """Return the gradient of each argument of linear: None for all arguments except x and a float w."""
    x, w, *scales, seed = ctx.saved_tensors
    s, of_x, of_w = settings_from_text(ctx.settings), None, None
    if s.backward == "quantized":
        if ctx.needs_input_grad[0]:
            of_x = parts.gradient_of_x(grad, w, *scales, seed, ctx.settings, x.dtype)
        if ctx.needs_input_grad[1]:
            of_w = parts.gradient_of_w(grad, x, seed, ctx.settings, w.dtype)
        return of_x, of_w, None, None, None, None
    with torch.autocast(grad.device.type, enabled=False):
        if ctx.needs_input_grad[0]:
            of_x = (grad.float() @ _weight_values(parts, s, w, *scales)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = _rows(x)
            values = rows.float() if s.backward == "high-precision" else parts.values(rows, to_spec(s.recipe_x))
            of_w = (_rows(grad).float().T @ values).to(w.dtype)
    return of_x, of_w, None, None, None, None


def _weight_values(
    parts: BackwardOperators, s: LinearSettings, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None
) -> Tensor:
    """Return the weight by which `backward` multiplies, as float32 (N, K)."""
    if s.backward == "high-precision":
        return w.float()
    if s.scale_layout is None:
        return parts.values(w, to_spec(s.recipe_w))
    facts = list(_weight_shape(s, w)), 1, to_spec(s.recipe_w), s.scale_layout, torch.float32, torch.float32
    return codes.dequantize(w, block_scale, tensor_scale, None, *facts)


linear.register_autograd(backward, setup_context=save_inputs)
