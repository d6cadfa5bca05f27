"""The differentiable operators under torch.func transforms: grad, vjp, vmap and their combinations.

PyTorch does not run the gradients of custom operators inside these transforms. There, an autograd.Function around the
operator carries the gradient instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from fp4kit.torch import operators


def active() -> bool:
    """Return whether a transform or forward-mode differentiation is active.

    Forward-mode counts, because a custom operator would silently drop its tangents.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fake_quantize(*arguments: Any) -> torch.Tensor:
    """Return operators.fake_quantize, inside or outside of a transform."""
    return FakeQuantize.apply(*arguments) if active() else operators.fake_quantize(*arguments)


def fake_quantize_backward(*arguments: Any) -> torch.Tensor:
    """Return operators.fake_quantize_backward, inside or outside of a transform."""
    return FakeQuantizeBackward.apply(*arguments) if active() else operators.fake_quantize_backward(*arguments)


class FakeQuantize(torch.autograd.Function):
    """operators.fake_quantize with its gradient, for use inside transforms."""

    setup_context = staticmethod(operators.save_inputs)
    vmap = staticmethod(operators.loop_over(fake_quantize))

    @staticmethod
    def forward(  # torch.compile does not support *arguments here
        x: Any, recipe: Any, axis: Any, tensor: Any, block: Any, rounding: Any, seed: Any, amax: Any, through: Any
    ) -> Any:
        """Call the operator."""
        return operators.fake_quantize(x, recipe, axis, tensor, block, rounding, seed, amax, through)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient, computed by a function that can itself be differentiated."""
        return operators.backward(ctx, grads[0], fake_quantize_backward)


class FakeQuantizeBackward(torch.autograd.Function):
    """operators.fake_quantize_backward with its gradient, for use inside transforms."""

    setup_context = staticmethod(operators.save_clip_inputs)
    vmap = staticmethod(operators.loop_over(fake_quantize_backward))

    @staticmethod
    def forward(grad: Any, x: Any, recipe: Any, axis: Any, amax: Any) -> Any:
        """Call the operator."""
        return operators.fake_quantize_backward(grad, x, recipe, axis, amax)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient, computed by a function that can itself be differentiated."""
        return operators.clip_backward(ctx, grads[0], fake_quantize_backward)
