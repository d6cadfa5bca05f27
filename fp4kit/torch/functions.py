"""Provide the public functions of fp4kit.torch, which convert their arguments to those of the operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fp4kit.arguments import as_entries, as_flag, as_index
from fp4kit.call.inputs import check_is_quantized, check_seed
from fp4kit.call.parse import check_hadamard
from fp4kit.ops.grouped import check_stack, per_tensor
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.serialization import to_spec
from fp4kit.torch import codes, groups, transforms
from fp4kit.torch.tensors import NUMPY, TORCH, check_tensor
from fp4kit.types import RoundingMode, ScaleLayout

Tensor = torch.Tensor
_INT64 = 2**63


@torch._dynamo.assume_constant_result
def _spec(recipe: Any) -> str:
    """Return a Recipe as the string of recipes.to_string.to_spec, because PyTorch operators do not accept Recipes."""
    return to_spec(recipe)


@torch._dynamo.assume_constant_result
def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return the PyTorch dtype that corresponds to the NumPy dtype float32, float16 or bfloat16."""
    return TORCH[np.dtype(dtype)]


def named_recipe(recipe: str | Recipe) -> str:
    """Return a recipe as the string that operators take."""
    return recipe if isinstance(recipe, str) else _spec(recipe)


def _amax(op: str, name: str, x: Tensor, given: Any) -> Tensor | None:
    """Return the caller's amax ``given`` as a tensor, for an operator on x."""
    if given is None or isinstance(given, Tensor):
        return given
    if isinstance(given, (bool, complex, str, bytes)):
        raise TypeError(f"{op}: {name} is {given!r:.60}; needs a real number or a float array")
    if isinstance(given, (int, float)):
        number = torch.full((), float(given), dtype=torch.float64, device=x.device)
        return number if x.is_cpu else number.to(torch.float32)
    return torch.as_tensor(given, dtype=torch.float64 if isinstance(given, (list, tuple)) else None, device=x.device)


def seed_tensor(op: str, seed: Any) -> Tensor | None:
    """Return a caller's seed as the tensor that operators take."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.ndim == 0 and (seed.dtype.is_floating_point or seed.dtype.is_complex or seed.dtype == torch.bool):
            raise TypeError(
                f"{op}: seed is a tensor of {seed.dtype}; needs an int, a 0-d integer tensor, or random bytes"
            )
        return seed
    number = check_seed(op, as_index(op, "seed", seed))
    return torch.scalar_tensor(number - 2 * _INT64 if number >= _INT64 else number, dtype=torch.int64)


def fake_quantize(
    x: Tensor,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    pass_through: bool = True,
    amax: Any = None,
) -> Tensor:
    """Return the values of x after quantization and dequantization. The function is differentiable.

        forward: dequantize(quantize(x))
        backward: grad if pass_through, otherwise grad where |x| <= amax, and 0 elsewhere

    Here grad is the gradient with respect to the result. The forward pass is fp4kit.fake_quantize, and the gradient
    is fp4kit.fake_quantize_backward.

    The function is one operator, torch.ops.fp4kit.fake_quantize. It therefore works under
    torch.compile(fullgraph=True), torch.export, torch.func, checkpointing and CUDA graphs. Under torch.vmap it is a
    loop over the mapped axis: each slice has its own amax, and all slices use one seed. Under torch.autocast it keeps
    the dtype of x.

    Only reverse-mode gradients are supported. PyTorch raises an error in forward mode. It also raises one for
    torch.func.grad inside torch.compile, because it does not differentiate custom operators there.

    Args:
        x: float32, float16 or bfloat16 tensor of any shape, on the CPU or a CUDA device.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax of the tensor scale, as in fp4kit.fake_quantize; None takes it from x. It gets no
            gradient.
        block_amax: calibrated block amaxes, as in fp4kit.fake_quantize; None takes them from x. They get no gradient.
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer tensor on the CPU, or the random bytes, uint8 in the shape of x.
        pass_through: True to use the incoming gradient grad unchanged; False to set it to 0 where |x| > amax, and where
            x or amax is NaN.
        amax: the clip limit of the gradient, as in fp4kit.fake_quantize_backward. None means tensor_amax, or the amax
            of x if that is None too. It gets no gradient.

    Returns:
        A new tensor with the shape, dtype and device of x.

    Raises:
        TypeError: x is not a tensor.
        TypeError, ValueError: as for fp4kit.fake_quantize and fp4kit.fake_quantize_backward, before any work. Errors
            that depend only on shapes and dtypes are also raised while the call is traced.

    Exact:
        Equals fp4kit.fake_quantize bit for bit. That function states the numerics.

    Examples:
        >>> x = torch.tensor([[0.3, -5.0] * 16], requires_grad=True)
        >>> y = fake_quantize(x, "mxfp4")
        >>> y[0, :2].tolist()
        [0.5, -4.0]
        >>> y.sum().backward()
        >>> x.grad[0, :2].tolist()
        [1.0, 1.0]
    """
    op = "fake_quantize"
    check_tensor(op, x)
    amaxes = _amax(op, "tensor_amax", x, tensor_amax), _amax(op, "block_amax", x, block_amax)
    options = (
        str(rounding),
        seed_tensor(op, seed),
        _amax(op, "amax", x, amax),
        as_flag(op, "pass_through", pass_through),
    )
    return transforms.fake_quantize(x, named_recipe(recipe), as_index(op, "axis", axis), *amaxes, *options)


def fake_quantize_grouped(
    xs: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    pass_through: bool = True,
    amax: Any = None,
) -> list[Tensor]:
    """Fake-quantize every tensor of a list as fake_quantize does. On a GPU, this takes a single kernel launch.

    The function is differentiable.

    Args:
        xs: a sequence of tensors of any shapes and dtypes, such as the weights of experts; or one stacked tensor,
            experts first.
        recipe: a recipe id or a Recipe, for all tensors.
        axis: the axis along which blocks run, in each tensor.
        tensor_amax: one amax per tensor of xs, as a sequence, or as a tensor with one entry per tensor along its first
            axis. None takes each amax from the tensor itself.
        block_amax: the calibrated block amaxes of each tensor, as a sequence or tensor like tensor_amax. None takes
            them from the tensors.
        rounding: "nearest" or "stochastic", for all tensors.
        seed: for "stochastic", for all tensors: an int, a 0-d integer tensor on the CPU, or random bytes in the shape
            of the tensors.
        pass_through: True to use the incoming gradients unchanged; False to set them to 0 where |x| > amax.
        amax: one clip limit of the gradient per tensor. None means tensor_amax, or each tensor's own amax if that is
            None too.

    Returns:
        A list of new tensors, one per tensor of xs. PyTorch can trace the call as it traces fake_quantize, because
        it is the operator torch.ops.fp4kit.fake_quantize_grouped.

    Raises:
        TypeError: an entry of xs is not a tensor.
        TypeError, ValueError: as for fp4kit.fake_quantize_grouped.

    Exact:
        Equals [fake_quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> experts = [torch.full((2, 16), 0.3), torch.full((4, 16), 3.0)]
        >>> [y[0, 0].item() for y in fake_quantize_grouped(experts, "nvfp4")]
        [0.30000001192092896, 3.0]
    """
    op = "fake_quantize_grouped"
    xs, given = _tensors(op, xs), (tensor_amax, block_amax, amax)
    for i, x in enumerate(xs):
        check_tensor(op, x, f"xs[{i}]")
    names = ("tensor_amax", "block_amax", "amax")
    tensors, blocks, limits = (_each_amax(op, name, xs, a) for name, a in zip(names, given, strict=True))
    axis, pass_through = as_index(op, "axis", axis), as_flag(op, "pass_through", pass_through)
    spec, random = named_recipe(recipe), (str(rounding), seed_tensor(op, seed))
    if transforms.active():  # inside a torch.func transform, operators on lists have no gradient
        columns = (column or [None] * len(xs) for column in (tensors, blocks, limits))
        rows = zip(xs, *columns, strict=True)
        return [transforms.fake_quantize(x, spec, axis, t, b, *random, a, pass_through) for x, t, b, a in rows]
    return groups.fake_quantize_grouped(xs, spec, axis, tensors, blocks, *random, limits, pass_through)


def _tensors(op: str, xs: Any) -> list[Any]:
    """Return the tensors of a sequence `xs` as a list, or the entries of a stacked tensor along its first axis."""
    if not isinstance(xs, Tensor):
        return list(as_entries(op, "xs", xs))
    check_stack(op, xs, "tensor")
    return list(xs.unbind(0))


def _each_amax(op: str, name: str, xs: list[Tensor], given: Any) -> list[Any]:
    """Return a list with one amax per tensor of `xs`, or an empty list if the caller gave none, to pass to an
    operator.
    """
    if given is None or not xs:
        return []
    entries: Iterable[Any] = given.unbind(0) if isinstance(given, Tensor) and given.ndim else given
    return [_amax(op, name, x, a) for x, a in zip(xs, per_tensor(op, name, entries, len(xs)), strict=True)]


def quantize(
    x: Tensor,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: bool | str = False,
    block_amax: Any = None,
) -> Quantized:
    """Quantize a tensor to codes and scales, as fp4kit.quantize does.

    It works under torch.compile, but has no gradient.

    Args:
        x: float32, float16 or bfloat16 tensor, on the CPU or a CUDA device. It may require grad.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax of the tensor scale; None takes it from x.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer tensor on the CPU, or the random bytes, uint8 in the shape of x.
        hadamard: False, True or "no_signs", as in fp4kit.quantize.
        block_amax: calibrated block amaxes, as in fp4kit.quantize.

    Returns:
        A Quantized of new tensors on the device of x. Under torch.compile and torch.export, a Quantized may be an
        argument and a result.

    Raises:
        TypeError: x is not a tensor.
        TypeError, ValueError: as for fp4kit.quantize.

    Exact:
        Equals fp4kit.quantize bit for bit.

    Examples:
        >>> q = quantize(torch.tensor([[0.5, -6.0] * 16]), "mxfp4")
        >>> q.packed[0, 0].item(), q.block_scale.tolist(), q.shape
        (241, [[127]], (1, 32))
    """
    op = "quantize"
    check_tensor(op, x)
    r, axis = recipe_of(op, recipe), as_index(op, "axis", axis)
    check_hadamard(op, hadamard)
    options = (
        str(scale_layout),
        str(rounding),
        seed_tensor(op, seed),
        str(hadamard),
        _amax(op, "block_amax", x, block_amax),
    )
    arrays = codes.quantize(x.detach(), named_recipe(recipe), axis, _amax(op, "tensor_amax", x, tensor_amax), *options)
    names = (
        "packed",
        *["block_scale"] * (r.scale is not None),
        *["tensor_scale", "tensor_amax"] * (r.tensor_scaling != "none"),
    )
    return unflatten(arrays, (names, tuple(x.shape), NUMPY[x.dtype], axis % x.ndim, r, scale_layout))


def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a Quantized as a tensor, as fp4kit.dequantize does.

    It works under torch.compile, but has no gradient.

    Args:
        q: a Quantized of tensors.
        dtype: torch.float32, torch.float16 or torch.bfloat16; None for the dtype of the tensor that was quantized.

    Returns:
        A new tensor of shape q.shape, on the device of its codes.

    Raises:
        TypeError: q is not a Quantized of tensors, or dtype is none of these dtypes.

    Exact:
        Equals fp4kit.dequantize bit for bit.

    Examples:
        >>> q = quantize(torch.tensor([[0.3, -5.0] * 16]), "mxfp4")
        >>> dequantize(q, torch.bfloat16)[0, :2]
        tensor([ 0.5000, -4.0000], dtype=torch.bfloat16)
    """
    check_is_quantized("dequantize", q)
    check_tensor("dequantize", q.packed, "q.packed")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dequantize: dtype is {dtype!r:.60}; needs torch.float32, torch.float16 or torch.bfloat16")
    source = _torch_dtype(q.dtype)
    facts = q.shape, q.axis, _spec(q.recipe), q.scale_layout, source, source if dtype is None else dtype
    return codes.dequantize(q.packed, q.block_scale, q.tensor_scale, q.tensor_amax, *facts)
