"""Define grouped operations as PyTorch operators on lists of tensors, with a single kernel launch on a GPU.

In the operators' arguments an empty list stands for None.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import fp4kit
from fp4kit.call.parse import each
from fp4kit.recipes.serialization import from_spec
from fp4kit.torch.operators import check_backward, check_fake, check_limit, empty, loop_over, seed_of
from fp4kit.torch.tensors import copy_if_shared, detached
from fp4kit.types import RoundingMode


def all_detached(tensors: list[Tensor]) -> list[Any] | None:
    """Return the tensors detached from autograd, or None if the list is empty."""
    return [detached(tensor) for tensor in tensors] or None


def or_none(tensors: list[Tensor], count: int) -> list[Any]:
    """Return the list `tensors` itself, or a list of `count` times None if it is empty."""
    return tensors or [None] * count


@torch.library.custom_op("fp4kit::fake_quantize_grouped", mutates_args=())
def fake_quantize_grouped(
    xs: list[Tensor],
    recipe: str,
    axis: int,
    tensor_amax: list[Tensor],
    block_amax: list[Tensor],
    rounding: str,
    seed: Tensor | None,
    amax: list[Tensor],
    pass_through: bool,
) -> list[Tensor]:
    """Return fp4kit.fake_quantize_grouped of xs, as new tensors."""
    op, arrays = "fake_quantize_grouped", [x.detach() for x in xs]
    if not pass_through:
        each(op, lambda x, a: check_limit(op, x, recipe, axis, a), arrays, or_none(amax, len(xs)))
    amaxes: dict[str, Any] = {"tensor_amax": all_detached(tensor_amax), "block_amax": all_detached(block_amax)}
    mode = cast(RoundingMode, rounding)  # PyTorch's schemas have no Literal types
    values = fp4kit.fake_quantize_grouped(
        arrays, from_spec(recipe), axis=axis, rounding=mode, seed=seed_of(seed), **amaxes
    )
    return [copy_if_shared(value) for value in values]


@fake_quantize_grouped.register_fake
def _(xs: list[Tensor], recipe: str, axis: int, *rest: Any) -> list[Tensor]:
    tensor_amax, block_amax, rounding, seed, amax, pass_through = rest
    op, columns = "fake_quantize_grouped", (or_none(a, len(xs)) for a in (tensor_amax, block_amax, amax))

    def one(x: Tensor, tensor: Any, block: Any, limit: Any) -> Tensor:
        return empty(x, check_fake(op, x, recipe, axis, (tensor, block), (rounding, seed), (limit, pass_through)))

    return each(op, one, xs, *columns)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save in ctx what _backward needs: recipe, axis, pass_through, and the number of tensors in each list."""
    xs, recipe, axis, tensor_amax, block_amax, _, _, amax, pass_through = inputs
    ctx.how, ctx.pass_through, ctx.count = (recipe, axis), pass_through, len(xs)
    ctx.given = len(tensor_amax), len(block_amax), len(amax)
    if not pass_through:
        ctx.save_for_backward(*xs, *(amax or tensor_amax))


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Return the gradient of each argument of fake_quantize_grouped: None for all arguments except xs."""
    if not ctx.pass_through:
        xs, amax = ctx.saved_tensors[: ctx.count], list(ctx.saved_tensors[ctx.count :])
        grads = fake_quantize_grouped_backward(list(grads), list(xs), *ctx.how, amax)
    tensor, block, limit = ([None] * count for count in ctx.given)
    return grads, None, None, tensor, block, None, None, limit, None


fake_quantize_grouped.register_autograd(_backward, setup_context=_save_inputs)
fake_quantize_grouped.register_vmap(loop_over(fake_quantize_grouped))


@torch.library.custom_op("fp4kit::fake_quantize_grouped_backward", mutates_args=())
def fake_quantize_grouped_backward(
    grads: list[Tensor], xs: list[Tensor], recipe: str, axis: int, amax: list[Tensor]
) -> list[Tensor]:
    """Return grads with 0 where |x| > amax, or where x or amax is NaN, as fp4kit.fake_quantize_grouped_backward
    does.
    """
    arrays, upstream = [x.detach() for x in xs], [g.detach() for g in grads]
    options: dict[str, Any] = {"axis": axis, "amax": all_detached(amax), "pass_through": False}
    gradients = fp4kit.fake_quantize_grouped_backward(upstream, arrays, from_spec(recipe), **options)
    return [copy_if_shared(g, grad) for g, grad in zip(gradients, grads, strict=True)]


@fake_quantize_grouped_backward.register_fake
def _(grads: list[Tensor], xs: list[Tensor], recipe: str, axis: int, amax: list[Tensor]) -> list[Tensor]:
    op = "fake_quantize_grouped_backward"

    def one(grad: Tensor, x: Tensor, limit: Any) -> Tensor:
        return empty(grad, check_backward(op, grad, x, recipe, axis, limit))

    return each(op, one, grads, xs, or_none(amax, len(xs)))


def _save_clip_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save on ctx the inputs of fake_quantize_grouped_backward that _clip_backward reads: all except grads."""
    _, xs, recipe, axis, amax = inputs
    ctx.how, ctx.counts = (recipe, axis), (len(xs), len(amax))
    ctx.save_for_backward(*xs, *amax)


def _clip_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Return the gradient of each argument of fake_quantize_grouped_backward: None for all arguments except grads."""
    count, limits = ctx.counts
    xs, amax = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
    return fake_quantize_grouped_backward(list(grads), xs, *ctx.how, amax), [None] * count, None, None, [None] * limits


fake_quantize_grouped_backward.register_autograd(_clip_backward, setup_context=_save_clip_inputs)
fake_quantize_grouped_backward.register_vmap(loop_over(fake_quantize_grouped_backward))
