"""The differentiable operators under torch.func: grad, vjp, vmap and what is made of them.

PyTorch runs the gradients of custom operators outside of these transforms only; inside, an autograd.Function around an
operator carries the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from fp4kit.torch import operators


def active() -> bool:
    """Whether a transform runs, or forward-mode differentiation, whose tangents a custom operator would drop without a
    word.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fake_quantize(*arguments: Any) -> torch.Tensor:
    """operators.fake_quantize, anywhere."""
    return FakeQuantize.apply(*arguments) if active() else operators.fake_quantize(*arguments)


def fake_quantize_backward(*arguments: Any) -> torch.Tensor:
    """operators.fake_quantize_backward, anywhere."""
    return FakeQuantizeBackward.apply(*arguments) if active() else operators.fake_quantize_backward(*arguments)


class FakeQuantize(torch.autograd.Function):
    """operators.fake_quantize with its gradient."""

    setup_context = staticmethod(operators.keep)
    vmap = staticmethod(operators.loop_over(fake_quantize))

    @staticmethod
    def forward(  # torch.compile takes no *arguments here
        x: Any, recipe: Any, axis: Any, tensor: Any, block: Any, rounding: Any, seed: Any, amax: Any, through: Any
    ) -> Any:
        """The operator."""
        return operators.fake_quantize(x, recipe, axis, tensor, block, rounding, seed, amax, through)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The gradient, with the function that can be differentiated again."""
        return operators.backward(ctx, grads[0], fake_quantize_backward)


class FakeQuantizeBackward(torch.autograd.Function):
    """operators.fake_quantize_backward with its own gradient."""

    setup_context = staticmethod(operators.keep_clip)
    vmap = staticmethod(operators.loop_over(fake_quantize_backward))

    @staticmethod
    def forward(grad: Any, x: Any, recipe: Any, axis: Any, amax: Any) -> Any:
        """The operator."""
        return operators.fake_quantize_backward(grad, x, recipe, axis, amax)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The gradient, with the function that can be differentiated again."""
        return operators.backward_of_clip(ctx, grads[0], fake_quantize_backward)
