"""Keep the operators differentiable under torch.func transforms (grad, vjp, vmap and combinations).

PyTorch ignores the gradients of custom operators inside these transforms. Here an autograd.Function calls the operator
and provides the gradient instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from fp4kit.torch import linear_operators, operators


def active() -> bool:
    """Return True if a torch.func transform or forward-mode differentiation is active, otherwise False."""
    # In forward mode these classes raise an error, where a custom operator would silently drop the tangents.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fake_quantize(*arguments: Any) -> torch.Tensor:
    """Return operators.fake_quantize(*arguments), computed through the class FakeQuantize if active() is True."""
    return FakeQuantize.apply(*arguments) if active() else operators.fake_quantize(*arguments)


def fake_quantize_backward(*arguments: Any) -> torch.Tensor:
    """Return operators.fake_quantize_backward(*arguments), through FakeQuantizeBackward if active() is True."""
    return FakeQuantizeBackward.apply(*arguments) if active() else operators.fake_quantize_backward(*arguments)


class FakeQuantize(torch.autograd.Function):
    """Compute operators.fake_quantize with a gradient inside torch.func transforms, which ignore the operator's own."""

    setup_context = staticmethod(operators.save_inputs)
    vmap = staticmethod(operators.loop_over(fake_quantize))

    @staticmethod
    def forward(  # torch.compile does not support *arguments here
        x: Any, recipe: Any, axis: Any, tensor: Any, block: Any, rounding: Any, seed: Any, amax: Any, through: Any
    ) -> Any:
        """Return operators.fake_quantize of the arguments."""
        return operators.fake_quantize(x, recipe, axis, tensor, block, rounding, seed, amax, through)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of each argument of fake_quantize: None for all arguments except x."""
        return operators.backward(ctx, grads[0], fake_quantize_backward)


class FakeQuantizeBackward(torch.autograd.Function):
    """Compute the gradient of fake_quantize inside torch.func transforms. It can be differentiated again."""

    setup_context = staticmethod(operators.save_clip_inputs)
    vmap = staticmethod(operators.loop_over(fake_quantize_backward))

    @staticmethod
    def forward(grad: Any, x: Any, recipe: Any, axis: Any, amax: Any) -> Any:
        """Return operators.fake_quantize_backward of the arguments."""
        return operators.fake_quantize_backward(grad, x, recipe, axis, amax)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of each argument of fake_quantize_backward: None for all arguments except grad."""
        return operators.clip_backward(ctx, grads[0], fake_quantize_backward)


def linear(*arguments: Any) -> torch.Tensor:
    """Return linear_operators.linear(*arguments), computed through the class Linear if active() is True."""
    return Linear.apply(*arguments) if active() else linear_operators.linear(*arguments)


def linear_gradient_of_x(*arguments: Any) -> torch.Tensor:
    """Return linear_operators.linear_gradient_of_x(*arguments), through LinearGradientOfX if active() is True."""
    return LinearGradientOfX.apply(*arguments) if active() else linear_operators.linear_gradient_of_x(*arguments)


def linear_gradient_of_w(*arguments: Any) -> torch.Tensor:
    """Return linear_operators.linear_gradient_of_w(*arguments), through LinearGradientOfW if active() is True."""
    return LinearGradientOfW.apply(*arguments) if active() else linear_operators.linear_gradient_of_w(*arguments)


def quantized_values(*arguments: Any) -> torch.Tensor:
    """Return linear_operators.quantized_values(*arguments), through the class QuantizedValues if active() is True."""
    return QuantizedValues.apply(*arguments) if active() else linear_operators.quantized_values(*arguments)


class QuantizedValues(torch.autograd.Function):
    """Compute linear_operators.quantized_values with a gradient inside torch.func transforms."""

    setup_context = staticmethod(linear_operators.save_dtype)
    vmap = staticmethod(operators.loop_over(quantized_values))

    @staticmethod
    def forward(x: Any, recipe: Any) -> Any:
        """Return linear_operators.quantized_values of the arguments."""
        return linear_operators.quantized_values(x, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and recipe: the upstream gradient in the dtype of x, and None."""
        return linear_operators.values_backward(ctx, grads[0])


class Linear(torch.autograd.Function):
    """Compute linear_operators.linear with a gradient inside torch.func transforms."""

    setup_context = staticmethod(linear_operators.save_inputs)
    vmap = staticmethod(operators.loop_over(linear))

    @staticmethod
    def forward(x: Any, w: Any, block_scale: Any, tensor_scale: Any, seed: Any, settings: Any) -> Any:
        """Return linear_operators.linear of the arguments."""
        return linear_operators.linear(x, w, block_scale, tensor_scale, seed, settings)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of each argument of linear, as linear_operators.backward does."""
        return linear_operators.backward(ctx, grads[0], _PARTS)


class LinearGradientOfX(torch.autograd.Function):
    """Compute linear's gradient with respect to x inside torch.func transforms.

    Differentiating it raises NotImplementedError.
    """

    setup_context = staticmethod(linear_operators.save_nothing)
    backward = staticmethod(linear_operators.no_gradient)
    vmap = staticmethod(operators.loop_over(linear_gradient_of_x))

    @staticmethod
    def forward(grad: Any, w: Any, block_scale: Any, tensor_scale: Any, seed: Any, settings: Any, dtype: Any) -> Any:
        """Return linear_operators.linear_gradient_of_x of the arguments."""
        return linear_operators.linear_gradient_of_x(grad, w, block_scale, tensor_scale, seed, settings, dtype)


class LinearGradientOfW(torch.autograd.Function):
    """Compute linear's gradient with respect to w inside torch.func transforms.

    Differentiating it raises NotImplementedError.
    """

    setup_context = staticmethod(linear_operators.save_nothing)
    backward = staticmethod(linear_operators.no_gradient)
    vmap = staticmethod(operators.loop_over(linear_gradient_of_w))

    @staticmethod
    def forward(grad: Any, x: Any, seed: Any, settings: Any, dtype: Any) -> Any:
        """Return linear_operators.linear_gradient_of_w of the arguments."""
        return linear_operators.linear_gradient_of_w(grad, x, seed, settings, dtype)


_PARTS = linear_operators.BackwardOperators(quantized_values, linear_gradient_of_x, linear_gradient_of_w)
