"""Define the operations as PyTorch operators, such as torch.ops.fp4kit.fake_quantize. Each has four parts: an
implementation, which calls fp4kit; a meta implementation, which makes all checks on shapes and dtypes and returns empty
tensors; a gradient; and a vmap rule, which is a loop. Operators take strings, numbers and tensors: a recipe as its id
or as to_spec of it, a seed as uint8 bytes in the shape of x or as a 0-d integer on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fp4kit
from fp4kit.arrays.imports import check_one_device, is_distributed, way_to_array, way_to_local
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call import linear as linear_call
from fp4kit.call.inputs import AbstractArray, check_clip_amax
from fp4kit.call.linear import OP, LinearSettings
from fp4kit.call.parse import Call, QuantizeOptions, backward_call, each, fake_call, quantize_call
from fp4kit.formats import FLOATS
from fp4kit.ops.quantize import clip_amax
from fp4kit.quantized.container import PARTS, check_values_dtype
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.types import RoundingMode

NUMPY = {getattr(torch, dtype.name): dtype for dtype in FLOATS}  # dtypes that can be quantized
TORCH = {dtype: tensor_dtype for tensor_dtype, dtype in NUMPY.items()}


def outline(tensor: torch.Tensor | None) -> AbstractArray | None:
    """Return an AbstractArray with the shape and dtype of a tensor, for checks that read no values; None for None."""
    return None if tensor is None else AbstractArray(tuple(tensor.shape), numpy_dtype("fp4kit.torch", tensor.dtype))


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all the given tensors are on one device."""
    present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    if len({tensor.device for tensor in present.values()}) > 1:
        check_one_device(op, **present)


def check_tensor(op: str, x: Any, name: str = "x") -> None:
    """Raise TypeError unless x is a torch.Tensor that is not a DTensor. The message begins with ``op`` and ``name``."""
    if not isinstance(x, torch.Tensor):
        way_out = way_to_array(x, name)
        if hasattr(x, "__dlpack__") or isinstance(x, (list, tuple, float, int)):
            others = f"fp4kit.{op} takes arrays of other libraries"
            way_out = others if hasattr(fp4kit, op) else f"pass torch.as_tensor({name})"
        raise TypeError(f"{op}: {name} is {type(x).__name__}; needs a torch.Tensor; {way_out}")
    if is_distributed(x):
        raise TypeError(f"{op}: {name} is a DTensor, whose values are spread over ranks; {way_to_local(name)}")


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor detached from autograd, or None for None."""
    # Operators detach their inputs, because they define gradients of their own.
    return None if tensor is None else tensor.detach()


def copy_if_shared(result: Any, *given: torch.Tensor | None) -> torch.Tensor:
    """Return `result` itself, or a contiguous copy of it if its data begins at the address of one of the given
    tensors.
    """
    addresses = {g.data_ptr() for g in given if g is not None}
    return result.clone(memory_format=torch.contiguous_format) if result.data_ptr() in addresses else result


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
    # For an empty axis, one entry of zeros, because loop_over takes the shape of the results from a call.
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


def active() -> bool:
    """Return True if a torch.func transform or forward-mode differentiation is active, otherwise False."""
    # In forward mode an autograd.Function raises an error, where a custom operator would silently drop the tangents.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _differentiable(
    operator: Any, setup: Callable[..., None], backward: Callable[..., Any], run: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Give an operator its gradient and its vmap rule, and return a function that calls it, also in transforms.

    PyTorch ignores the gradients of custom operators inside torch.func transforms (grad, vjp, vmap and combinations).
    There an autograd.Function calls the operator and provides the gradient instead. `run` calls the operator with named
    arguments, because torch.compile does not support *arguments in a forward.
    """
    operator.register_autograd(backward, setup_context=setup)
    operator.register_vmap(loop_over(operator))

    def call(*arguments: Any) -> Any:
        return UnderTransforms.apply(*arguments) if active() else operator(*arguments)

    class UnderTransforms(torch.autograd.Function):
        setup_context = staticmethod(setup)
        vmap = staticmethod(loop_over(call))
        forward = staticmethod(run or operator)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward(ctx, grads[0])

    return call


# ---- fake_quantize ----


@torch.library.custom_op("fp4kit::fake_quantize", mutates_args=())
def fake_quantize_op(
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
    x = x.detach()
    if not pass_through and amax is not None:
        _check_limit("fake_quantize", x, recipe, axis, amax)
    amaxes: dict[str, Any] = {"tensor_amax": detached(tensor_amax), "block_amax": detached(block_amax)}
    mode = cast(RoundingMode, rounding)  # PyTorch's schemas have no Literal types
    return copy_if_shared(
        fp4kit.fake_quantize(x, from_spec(recipe), axis=axis, rounding=mode, seed=seed_of(seed), **amaxes)
    )


def _check_backward(op: str, grad: Tensor, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> Call:
    """Check the shapes, dtypes and devices of the arguments of fake_quantize_backward, and return the parsed call."""
    check_devices(op, grad=grad, x=x, amax=amax)
    call, given = backward_call(op, outline(grad), outline(x), from_spec(recipe), axis, outline(amax))
    clip_amax(call, given)
    return call


def _check_limit(op: str, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> None:
    """Check the clip limit of the gradient of x, and its values if they are on the host."""
    _check_backward(op, x, x, recipe, axis, amax)
    if amax is not None and amax.is_cpu:
        check_clip_amax(op, amax.detach().to(torch.float64).numpy())


def _outlines(
    op: str, x: Tensor, tensor_amax: Tensor | None, block_amax: Tensor | None, seed: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """Check that arguments are on one device, and return (x, amaxes by name) as outlines."""
    random = seed if seed is not None and seed.ndim else None
    check_devices(op, x=x, tensor_amax=tensor_amax, block_amax=block_amax, seed=random)
    return outline(x), {"tensor_amax": outline(tensor_amax), "block_amax": outline(block_amax)}


def check_fake(
    op: str,
    x: Tensor,
    recipe: str,
    axis: int,
    tensor_amax: Tensor | None = None,
    block_amax: Tensor | None = None,
    rounding: str = "nearest",
    seed: Tensor | None = None,
    amax: Tensor | None = None,
    pass_through: bool = True,
) -> Call:
    """Check the shapes, dtypes and devices of the arguments of fake_quantize, and return the parsed call."""
    r, number = from_spec(recipe), seed_outline(seed)
    given, amaxes = _outlines(op, x, tensor_amax, block_amax, seed)
    options = QuantizeOptions(rounding=cast(RoundingMode, rounding), seed=number)
    call = fake_call(op, given, r, axis, options, **amaxes)
    if not pass_through and amax is not None:
        _check_backward(op, x, x, recipe, axis, amax)
    return call


@fake_quantize_op.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return empty(x, check_fake("fake_quantize", x, *rest))


@torch.library.custom_op("fp4kit::fake_quantize_backward", mutates_args=())
def fake_quantize_backward_op(grad: Tensor, x: Tensor, recipe: str, axis: int, amax: Tensor | None) -> Tensor:
    options: dict[str, Any] = {"axis": axis, "amax": detached(amax), "pass_through": False}
    return copy_if_shared(fp4kit.fake_quantize_backward(grad.detach(), x.detach(), from_spec(recipe), **options), grad)


@fake_quantize_backward_op.register_fake
def _(grad: Tensor, *rest: Any) -> Tensor:
    return empty(grad, _check_backward("fake_quantize_backward", grad, *rest))


def _keep(ctx: Any, x: Any, recipe: str, axis: int, amax: Any) -> None:
    """Save what clipping the gradient of one tensor or of a group needs. No other input gets a gradient."""
    ctx.how, ctx.count = (recipe, axis), len(x) if isinstance(x, (list, tuple)) else None
    ctx.save_for_backward(*((x, amax) if ctx.count is None else (*x, *amax)))


def _clipped(ctx: Any, grad: Any) -> Any:
    """Return the clipped gradient of one tensor or of a group, from what _keep saved."""
    if ctx.count is None:
        x, amax = ctx.saved_tensors
        return _clip(grad, x, *ctx.how, amax)
    xs, limits = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])
    return fake_quantize_grouped_backward_op(list(grad), xs, *ctx.how, limits)


def _no_gradients(inputs: tuple[Any, ...]) -> list[Any]:
    """Return None in place of every input but the first, and of every entry of a list."""
    return [[None] * len(one) if isinstance(one, (list, tuple)) else None for one in inputs[1:]]


def _save_clip(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.others = _no_gradients(inputs)
    _keep(ctx, *inputs[1:])


def _clip_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    return _clipped(ctx, grad), *ctx.others


def _save_fake(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, recipe, axis, tensor_amax, _, _, _, amax, ctx.pass_through = inputs
    ctx.others = _no_gradients(inputs)
    if not ctx.pass_through:
        is_given = len(amax) > 0 if isinstance(amax, (list, tuple)) else amax is not None
        _keep(ctx, x, recipe, axis, amax if is_given else tensor_amax)


def _fake_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    return grad if ctx.pass_through else _clipped(ctx, grad), *ctx.others


_clip = _differentiable(
    fake_quantize_backward_op,
    _save_clip,
    _clip_backward,
    lambda grad, x, recipe, axis, amax: fake_quantize_backward_op(grad, x, recipe, axis, amax),
)


fake_quantize = _differentiable(
    fake_quantize_op,
    _save_fake,
    _fake_backward,
    lambda x, recipe, axis, tensor, block, rounding, seed, amax, through: fake_quantize_op(
        x, recipe, axis, tensor, block, rounding, seed, amax, through
    ),
)


# ---- groups: an empty list stands for None, and a GPU needs a single kernel launch ----


def _all_detached(tensors: list[Tensor]) -> list[Any] | None:
    return [tensor.detach() for tensor in tensors] or None


@torch.library.custom_op("fp4kit::fake_quantize_grouped", mutates_args=())
def fake_quantize_grouped_op(
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
    op, arrays = "fake_quantize_grouped", [x.detach() for x in xs]
    if not pass_through:
        each(op, lambda x, a: _check_limit(op, x, recipe, axis, a), arrays, amax or [None] * len(xs))
    amaxes: dict[str, Any] = {"tensor_amax": _all_detached(tensor_amax), "block_amax": _all_detached(block_amax)}
    mode, number = cast(RoundingMode, rounding), seed_of(seed)
    values = fp4kit.fake_quantize_grouped(arrays, from_spec(recipe), axis=axis, rounding=mode, seed=number, **amaxes)
    return [copy_if_shared(value) for value in values]


@fake_quantize_grouped_op.register_fake
def _(xs: list[Tensor], recipe: str, axis: int, *rest: Any) -> list[Tensor]:
    tensor_amax, block_amax, rounding, seed, amax, pass_through = rest
    op, columns = "fake_quantize_grouped", (a or [None] * len(xs) for a in (tensor_amax, block_amax, amax))

    def one(x: Tensor, tensor: Any, block: Any, limit: Any) -> Tensor:
        return empty(x, check_fake(op, x, recipe, axis, tensor, block, rounding, seed, limit, pass_through))

    return each(op, one, xs, *columns)


@torch.library.custom_op("fp4kit::fake_quantize_grouped_backward", mutates_args=())
def fake_quantize_grouped_backward_op(
    grads: list[Tensor], xs: list[Tensor], recipe: str, axis: int, amax: list[Tensor]
) -> list[Tensor]:
    arrays, upstream = [x.detach() for x in xs], [g.detach() for g in grads]
    options: dict[str, Any] = {"axis": axis, "amax": _all_detached(amax), "pass_through": False}
    gradients = fp4kit.fake_quantize_grouped_backward(upstream, arrays, from_spec(recipe), **options)
    return [copy_if_shared(g, grad) for g, grad in zip(gradients, grads, strict=True)]


@fake_quantize_grouped_backward_op.register_fake
def _(grads: list[Tensor], xs: list[Tensor], recipe: str, axis: int, amax: list[Tensor]) -> list[Tensor]:
    op = "fake_quantize_grouped_backward"

    def one(grad: Tensor, x: Tensor, limit: Any) -> Tensor:
        return empty(grad, _check_backward(op, grad, x, recipe, axis, limit))

    return each(op, one, grads, xs, amax or [None] * len(xs))


_differentiable(fake_quantize_grouped_op, _save_fake, _fake_backward)
_differentiable(fake_quantize_grouped_backward_op, _save_clip, _clip_backward)


# ---- quantize and dequantize: the arrays of a Quantized are passed and returned as tensors ----


_HADAMARD = {"False": False, "True": True}  # other strings pass unchanged
_TENSOR_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}


@torch.library.custom_op("fp4kit::quantize", mutates_args=())
def quantize_op(
    x: Tensor,
    recipe: str,
    axis: int,
    tensor_amax: Tensor | None,
    scale_layout: str,
    rounding: str,
    seed: Tensor | None,
    hadamard: str,
    block_amax: Tensor | None,
) -> list[Tensor]:
    options: dict[str, Any] = {"scale_layout": scale_layout, "rounding": rounding, "seed": seed_of(seed)}
    options |= {"tensor_amax": detached(tensor_amax), "block_amax": detached(block_amax)}
    options["hadamard"] = _HADAMARD.get(hadamard, hadamard)
    q = fp4kit.quantize(x.detach(), from_spec(recipe), axis=axis, **options)
    return [copy_if_shared(a, tensor_amax) for a in q.parts().values() if a is not None]


@quantize_op.register_fake
def _(x: Tensor, recipe: str, axis: int, tensor_amax: Tensor | None, *rest: Any) -> list[Tensor]:
    scale_layout, rounding, seed, hadamard, block_amax = rest
    flag: Any = _HADAMARD.get(hadamard, hadamard)
    op, options = "quantize", QuantizeOptions(scale_layout, rounding, seed_outline(seed), flag)
    given, amaxes = _outlines(op, x, tensor_amax, block_amax, seed)
    call = quantize_call(op, given, from_spec(recipe), axis, options, **amaxes)
    return [x.new_empty(shape, dtype=_TENSOR_DTYPES[dtype.name]) for shape, dtype in call.part_specs().values()]


quantize_op.register_vmap(loop_over(quantize_op))


@torch.library.custom_op("fp4kit::dequantize", mutates_args=())
def dequantize_op(
    packed: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    shape: Sequence[int],
    axis: int,
    recipe: str,
    scale_layout: str,
    dtype: torch.dtype,
    values_dtype: torch.dtype,
) -> Tensor:
    arrays = [detached(a) for a in (packed, block_scale, tensor_scale, tensor_amax)]
    facts = PARTS, tuple(shape), numpy_dtype("dequantize", dtype), axis, from_spec(recipe), scale_layout
    values: Any = fp4kit.dequantize(unflatten(arrays, facts), values_dtype)
    return values


@dequantize_op.register_fake
def _(packed: Tensor, *rest: Any) -> Tensor:
    shape, axis, values_dtype = rest[3], rest[4], rest[-1]
    check_values_dtype("dequantize", numpy_dtype("dequantize", values_dtype))
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    return packed.new_empty(moved, dtype=values_dtype).movedim(-1, axis)


dequantize_op.register_vmap(loop_over(dequantize_op))


# ---- linear: w is a float tensor (N, K), or packed codes, whose scales follow; settings as in settings_from_text ----


_EAGER = linear_call.LinearOperations(fp4kit.quantize, fp4kit.transpose, fp4kit.matmul)


def _rows(x: Tensor) -> Tensor:
    """Return x (..., K) reshaped to a matrix (M, K): M is the product of all lengths but the last, or 1 if x is 1-d."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _weight_shape(s: LinearSettings, w: Tensor) -> tuple[int, int]:
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
    s = linear_call.settings_from_text(settings)
    check_devices(OP, x=x, w=w, block_scale=block_scale, tensor_scale=tensor_scale)
    if seed is not None and seed.ndim:
        raise ValueError(f"{OP}: seed has shape {tuple(seed.shape)}; needs an int, or a 0-d integer tensor")
    whole = outline(w) if s.scale_layout is None else AbstractArray(_weight_shape(s, w), np.dtype(np.float32))
    given = outline(x)
    assert given is not None and whole is not None
    linear_call.check_linear(s, given, whole, seed is not None)
    return s


@torch.library.custom_op("fp4kit::linear", mutates_args=())
def linear_op(
    x: Tensor, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None, seed: Tensor | None, settings: str
) -> Tensor:
    s = _checked(x, w, block_scale, tensor_scale, seed, settings)
    y = linear_call.product(_EAGER, s, _rows(x.detach()), _weight(s, w, block_scale, tensor_scale))
    return copy_if_shared(y.reshape(*x.shape[:-1], w.shape[0]))


@linear_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    s = _checked(x, w, *rest)
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=TORCH[s.out_dtype])


@torch.library.custom_op("fp4kit::linear_gradient_of_x", mutates_args=())
def linear_gradient_of_x_op(
    grad: Tensor,
    w: Tensor,
    block_scale: Tensor | None,
    tensor_scale: Tensor | None,
    seed: Tensor | None,
    settings: str,
    dtype: torch.dtype,
) -> Tensor:
    s = linear_call.settings_from_text(settings)
    weight = _weight(s, w, block_scale, tensor_scale)
    gradient = linear_call.gradient_of_x(_EAGER, s, _rows(grad.detach()), weight, seed_of(seed), dtype)
    return copy_if_shared(gradient.reshape(*grad.shape[:-1], _weight_shape(s, w)[1]))


@linear_gradient_of_x_op.register_fake
def _(grad: Tensor, w: Tensor, *rest: Any) -> Tensor:
    settings, dtype = rest[-2:]
    return grad.new_empty(
        (*grad.shape[:-1], _weight_shape(linear_call.settings_from_text(settings), w)[1]), dtype=dtype
    )


@torch.library.custom_op("fp4kit::linear_gradient_of_w", mutates_args=())
def linear_gradient_of_w_op(grad: Tensor, x: Tensor, seed: Tensor | None, settings: str, dtype: torch.dtype) -> Tensor:
    s = linear_call.settings_from_text(settings)
    return copy_if_shared(
        linear_call.gradient_of_w(_EAGER, s, _rows(grad.detach()), _rows(x.detach()), seed_of(seed), dtype)
    )


@linear_gradient_of_w_op.register_fake
def _(grad: Tensor, x: Tensor, seed: Tensor | None, settings: str, dtype: torch.dtype) -> Tensor:
    return grad.new_empty((grad.shape[-1], x.shape[-1]), dtype=dtype)


@torch.library.custom_op("fp4kit::quantized_values", mutates_args=())
def quantized_values_op(x: Tensor, recipe: str) -> Tensor:
    values: Any = fp4kit.dequantize(fp4kit.quantize(x.detach(), from_spec(recipe)), np.float32)
    return copy_if_shared(values)


@quantized_values_op.register_fake
def _(x: Tensor, recipe: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _save_dtype(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dtype = inputs[0].dtype


def _no_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
    raise NotImplementedError(linear_call.NO_SECOND_GRADIENT)


_gradient_of_x = _differentiable(linear_gradient_of_x_op, _save_dtype, _no_gradient)
_gradient_of_w = _differentiable(linear_gradient_of_w_op, _save_dtype, _no_gradient)
_values = _differentiable(quantized_values_op, _save_dtype, lambda ctx, grad: (grad.to(ctx.dtype), None))


def _save_linear_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.settings = inputs
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, *scales, seed = ctx.saved_tensors
    s, of_x, of_w = linear_call.settings_from_text(ctx.settings), None, None
    if s.backward == "quantized":
        if ctx.needs_input_grad[0]:
            of_x = _gradient_of_x(grad, w, *scales, seed, ctx.settings, x.dtype)
        if ctx.needs_input_grad[1]:
            of_w = _gradient_of_w(grad, x, seed, ctx.settings, w.dtype)
        return of_x, of_w, None, None, None, None
    with torch.autocast(grad.device.type, enabled=False):
        if ctx.needs_input_grad[0]:
            of_x = (grad.float() @ _weight_values(s, w, *scales)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = _rows(x)
            values = rows.float() if s.backward == "high-precision" else _values(rows, to_spec(s.recipe_x))
            of_w = (_rows(grad).float().T @ values).to(w.dtype)
    return of_x, of_w, None, None, None, None


def _weight_values(s: LinearSettings, w: Tensor, block_scale: Tensor | None, tensor_scale: Tensor | None) -> Tensor:
    """Return the weight by which the gradient is multiplied, as float32 (N, K)."""
    if s.backward == "high-precision":
        return w.float()
    if s.scale_layout is None:
        return _values(w, to_spec(s.recipe_w))
    facts = list(_weight_shape(s, w)), 1, to_spec(s.recipe_w), s.scale_layout, torch.float32, torch.float32
    return dequantize_op(w, block_scale, tensor_scale, None, *facts)


linear = _differentiable(linear_op, _save_linear_inputs, _linear_backward)
