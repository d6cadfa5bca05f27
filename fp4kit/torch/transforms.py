"""Keep the operators differentiable under torch.func transforms (grad, vjp, vmap and combinations).

PyTorch ignores the gradients of custom operators inside these transforms. Here an autograd.Function calls the operator
and provides the gradient instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from fp4kit.torch import operators


def active() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active.

    Then the autograd.Functions of this file are used. They raise an error in forward mode, where a custom operator
    would silently drop the tangents.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fake_quantize(*arguments: Any) -> torch.Tensor:
    """Call operators.fake_quantize, through the class FakeQuantize if a transform is active."""
    return FakeQuantize.apply(*arguments) if active() else operators.fake_quantize(*arguments)


def fake_quantize_backward(*arguments: Any) -> torch.Tensor:
    """Call operators.fake_quantize_backward, through the class FakeQuantizeBackward if a transform is active."""
    return FakeQuantizeBackward.apply(*arguments) if active() else operators.fake_quantize_backward(*arguments)


class FakeQuantize(torch.autograd.Function):
    """Provide the gradient of operators.fake_quantize inside torch.func transforms."""

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
        """Return one gradient per argument, computed by a function that is differentiable itself."""
        return operators.backward(ctx, grads[0], fake_quantize_backward)


class FakeQuantizeBackward(torch.autograd.Function):
    """Provide the gradient of operators.fake_quantize_backward inside torch.func transforms."""

    setup_context = staticmethod(operators.save_clip_inputs)
    vmap = staticmethod(operators.loop_over(fake_quantize_backward))

    @staticmethod
    def forward(grad: Any, x: Any, recipe: Any, axis: Any, amax: Any) -> Any:
        """Return operators.fake_quantize_backward of the arguments."""
        return operators.fake_quantize_backward(grad, x, recipe, axis, amax)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return one gradient per argument, computed by a function that is differentiable itself."""
        return operators.clip_backward(ctx, grads[0], fake_quantize_backward)
