"""Define operations on single tensors as PyTorch operators, such as torch.ops.fp4kit.fake_quantize.

Each operator has four parts: an implementation, which calls fp4kit's own function; a meta implementation, which makes
all checks on shapes and dtypes and returns empty tensors; a gradient; and a vmap rule, which is a loop.

An operator takes strings, numbers and tensors. A recipe is passed as its id or, for a Recipe object, as the string that
recipes.to_string.to_spec returns. A seed is a tensor: uint8 bytes in the shape of x, or a 0-d integer on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import fp4kit
from fp4kit.call.inputs import check_clip_amax
from fp4kit.call.parse import Call, QuantizeOptions, backward_call, fake_call
from fp4kit.ops.quantize import check_rounding, clip_amax
from fp4kit.recipes.serialization import from_spec
from fp4kit.torch.tensors import check_devices, copy_if_shared, detached, outline
from fp4kit.types import RoundingMode


def seed_of(seed: Tensor | None) -> Any:
    """Return the seed that fp4kit's own functions take, from an operator's seed tensor."""
    return None if seed is None else int(seed) % 2**64 if seed.ndim == 0 else seed.detach()


def seed_outline(seed: Tensor | None) -> Any:
    """Return a stand-in for a seed tensor, for checks that read no values."""
    return 0 if seed is not None and seed.ndim == 0 else outline(seed)


def empty(like: Tensor, call: Call) -> Tensor:
    """Return an uninitialized tensor in the shape of the call's x, with the dtype and device of `like`."""
    return like.new_empty(call.moved.shape).movedim(-1, call.axis)


def _entries(argument: Any, dim: Any, count: int) -> Sequence[Any]:
    """Split an argument of an operator along the axis that vmap maps, and return a sequence with one entry per
    index.
    """
    if isinstance(argument, (list, tuple)):
        parts = [_entries(a, d, count) for a, d in zip(argument, dim, strict=True)]
        return [[part[i] for part in parts] for i in range(count)]
    if dim is None:
        return [argument] * count
    return argument.unbind(dim) if argument.shape[dim] else [argument.new_zeros(argument.movedim(dim, 0).shape[1:])]


def loop_over(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a vmap rule for an operator: call it once per index of the mapped axis, and stack the results."""

    def mapped(info: Any, dims: Sequence[Any], *arguments: Any) -> Any:
        columns = [_entries(a, d, info.batch_size or 1) for a, d in zip(arguments, dims, strict=True)]
        results = [operator(*entries) for entries in zip(*columns, strict=True)]
        join = torch.stack if info.batch_size else lambda tensors: tensors[0].new_empty((0, *tensors[0].shape))
        if isinstance(results[0], Tensor):
            return join(results), 0
        return [join(tensors) for tensors in zip(*results, strict=True)], [0] * len(results[0])

    return mapped


# ---- fake_quantize ----


@torch.library.custom_op("fp4kit::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor,
    recipe: str,
    axis: int,
    tensor_amax: Tensor | None,
    block_amax: Tensor | None,
    rounding: str,
    seed: Tensor | None,
    amax: Tensor | None,
    pass_through: bool,
) -> Tensor:
    """Return fp4kit.fake_quantize of x, as a new tensor."""
    x = x.detach()
    if not pass_through and amax is not None:
        check_limit("fake_quantize", x, recipe, axis, amax)
    amaxes: dict[str, Any] = {"tensor_amax": detached(tensor_amax), "block_amax": detached(block_amax)}
    mode = cast(RoundingMode, rounding)  # PyTorch's schemas have no Literal types
    return copy_if_shared(
        fp4kit.fake_quantize(x, from_spec(recipe), axis=axis, rounding=mode, seed=seed_of(seed), **amaxes)
    )


def check_backward(op: str, grad: Tensor, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> Call:
    """Check the shapes, dtypes and devices of the arguments of fake_quantize_backward, and return the parsed call."""
    check_devices(op, grad=grad, x=x, amax=amax)
    call, given = backward_call(op, outline(grad), outline(x), from_spec(recipe), axis, outline(amax))
    clip_amax(call, given)
    return call


def check_limit(op: str, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> None:
    """Check the clip limit `amax` of the gradient of x as check_backward does, and its values if they are on the
    host.
    """
    check_backward(op, x, x, recipe, axis, amax)
    if amax is not None and amax.is_cpu:
        check_clip_amax(op, amax.detach().to(torch.float64).numpy())


def check_fake(
    op: str,
    x: Tensor,
    recipe: str,
    axis: int,
    amaxes: tuple[Tensor | None, Tensor | None],
    random: tuple[str, Tensor | None],
    clip: tuple[Tensor | None, bool],
) -> Call:
    """Check the shapes, dtypes and devices of the arguments of fake_quantize, and return the parsed call."""
    r, (rounding, seed), (amax, pass_through) = from_spec(recipe), random, clip
    check_rounding(op, r, rounding, seed_outline(seed))
    check_devices(
        op, x=x, tensor_amax=amaxes[0], block_amax=amaxes[1], seed=seed if seed is not None and seed.ndim else None
    )
    tensor_amax, block_amax = map(outline, amaxes)
    options = QuantizeOptions(rounding=cast(RoundingMode, rounding), seed=seed_outline(seed))
    call = fake_call(op, outline(x), r, axis, options, tensor_amax=tensor_amax, block_amax=block_amax)
    if not pass_through and amax is not None:
        check_backward(op, x, x, recipe, axis, amax)
    return call


@fake_quantize.register_fake
def _(x: Tensor, recipe: str, axis: int, *rest: Any) -> Tensor:
    tensor_amax, block_amax, *random, amax, pass_through = rest
    clip = amax, pass_through
    return empty(x, check_fake("fake_quantize", x, recipe, axis, (tensor_amax, block_amax), tuple(random), clip))


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the inputs of fake_quantize that `backward` reads, on ctx: recipe and axis as ctx.how, and pass_through."""
    x, recipe, axis, tensor_amax, _, _, _, amax, pass_through = inputs
    ctx.how, ctx.pass_through = (recipe, axis), pass_through
    if not pass_through:
        ctx.save_for_backward(x, tensor_amax if amax is None else amax)


def backward(ctx: Any, grad: Tensor, clip: Callable[..., Tensor] | None = None) -> tuple[Any, ...]:
    """Return the gradient of each argument of fake_quantize: None for all arguments except x."""
    if ctx.pass_through:
        return grad, *[None] * 8
    x, amax = ctx.saved_tensors
    return (clip or fake_quantize_backward)(grad, x, *ctx.how, amax), *[None] * 8


fake_quantize.register_autograd(backward, setup_context=save_inputs)
fake_quantize.register_vmap(loop_over(fake_quantize))


@torch.library.custom_op("fp4kit::fake_quantize_backward", mutates_args=())
def fake_quantize_backward(grad: Tensor, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> Tensor:
    """Return grad, with 0 where |x| > amax or where x or amax is NaN, as fp4kit.fake_quantize_backward does."""
    options: dict[str, Any] = {"axis": axis, "amax": detached(amax), "pass_through": False}
    return copy_if_shared(fp4kit.fake_quantize_backward(grad.detach(), x.detach(), from_spec(recipe), **options), grad)


@fake_quantize_backward.register_fake
def _(grad: Tensor, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> Tensor:
    return empty(grad, check_backward("fake_quantize_backward", grad, x, recipe, axis, amax))


def save_clip_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save on ctx the inputs of fake_quantize_backward that clip_backward reads: all except grad."""
    _, x, recipe, axis, amax = inputs
    ctx.how = recipe, axis
    ctx.save_for_backward(x, amax)


def clip_backward(ctx: Any, grad: Tensor, clip: Callable[..., Tensor] | None = None) -> tuple[Any, ...]:
    """Return the gradient of each argument of fake_quantize_backward: None for all arguments except grad."""
    x, amax = ctx.saved_tensors
    return (clip or fake_quantize_backward)(grad, x, *ctx.how, amax), *[None] * 4


fake_quantize_backward.register_autograd(clip_backward, setup_context=save_clip_inputs)
fake_quantize_backward.register_vmap(loop_over(fake_quantize_backward))
