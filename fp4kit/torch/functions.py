"""The public functions of fp4kit.torch: arguments as people give them become those of the operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fp4kit.arguments import as_entries, as_flag, as_index
from fp4kit.call import checks
from fp4kit.call.parse import check_hadamard, check_seed
from fp4kit.ops.grouped_plan import check_stack, per_tensor
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.to_string import to_spec
from fp4kit.torch import codes, groups, transforms
from fp4kit.torch.tensors import NUMPY, TORCH, check_tensor
from fp4kit.types import RoundingMode, ScaleLayout

Tensor = torch.Tensor
_INT64 = 2**63


@torch._dynamo.assume_constant_result
def _spec(recipe: Any) -> str:
    """The string of a Recipe; under torch.compile a constant of the graph, which is guarded by the Recipe."""
    return to_spec(recipe)


@torch._dynamo.assume_constant_result
def _torch_dtype(dtype: Any) -> torch.dtype:
    return TORCH[np.dtype(dtype)]


def _named(recipe: str | Recipe) -> str:
    return recipe if isinstance(recipe, str) else _spec(recipe)


def _amax(op: str, name: str, x: Tensor, given: Any) -> Tensor | None:
    """An amax as a tensor: numbers and arrays become one on the device of x, without waiting for it where one number is
    given.

    Sequences become float64 first, which no default dtype of PyTorch rounds.
    """
    if given is None or isinstance(given, Tensor):
        return given
    if isinstance(given, (bool, complex, str, bytes)):
        raise TypeError(f"{op}: {name} is {given!r:.60}; needs a real number or a float array")
    if isinstance(given, (int, float)):
        return torch.full((), float(given), dtype=torch.float64, device=x.device).to(torch.float32)
    return torch.as_tensor(given, dtype=torch.float64 if isinstance(given, (list, tuple)) else None, device=x.device)


def _seed(op: str, seed: Any) -> Tensor | None:
    """Return a seed as a tensor; the 64 bits of an int as int64, as operators.seed_of reads them."""
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
    """x with the error of quantization, differentiable: fp4kit.fake_quantize, and fp4kit.fake_quantize_backward as its
    gradient.

        forward: dequantize(quantize(x))        backward: grad if pass_through, else grad where |x| <= amax, else 0

    x: float32, float16 or bfloat16 tensor of any shape, on the CPU or a CUDA device.
    recipe, axis, tensor_amax, block_amax, rounding: as in fp4kit.fake_quantize. None of the amaxes gets a gradient.
    seed: for "stochastic": an int, a 0-d integer tensor on the CPU, or the random bytes, a uint8 tensor of the shape of
    x. pass_through, amax: as in fp4kit.fake_quantize_backward; amax None is tensor_amax where that is given.

    Returns a new tensor of x's shape, dtype and device.
    Works under torch.compile(fullgraph=True), torch.export, torch.func, checkpointing and CUDA graphs: it is one
    operator,
        torch.ops.fp4kit.fake_quantize. Under torch.vmap it is the loop over the mapped axis: each entry has its own
        amax, and the same seed. Under torch.autocast it keeps the dtype of x. Gradients are reverse-mode; PyTorch
        raises for tangents, and for torch.func.grad inside of torch.compile, which has no gradients of custom
        operators.
    Raises what fp4kit.fake_quantize and fake_quantize_backward raise, before any work; what depends on shapes and
    dtypes also
        while it is traced. TypeError unless x is a tensor.
    Exact: the bits of fp4kit.fake_quantize, which states the numerics.

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
    options = str(rounding), _seed(op, seed), _amax(op, "amax", x, amax), as_flag(op, "pass_through", pass_through)
    return transforms.fake_quantize(x, _named(recipe), as_index(op, "axis", axis), *amaxes, *options)


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
    """[fake_quantize(x, recipe, tensor_amax=a, ...) for each x and its a], bit for bit, differentiable; on a GPU in one
    launch.

    xs: a sequence of tensors of any shapes and dtypes, such as the weights of experts, or one stacked tensor (experts
    first). tensor_amax, block_amax, amax: None, or one for each x: a sequence, or a tensor whose first axis is as long.
    The other arguments are those of fake_quantize, the same for all. Returns a list of new tensors. Traceable as
    fake_quantize: it is the operator torch.ops.fp4kit.fake_quantize_grouped. Raises what fp4kit.fake_quantize_grouped
    raises; TypeError unless all xs are tensors.

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
    spec, random = _named(recipe), (str(rounding), _seed(op, seed))
    if transforms.active():  # PyTorch has no gradients for operators on lists there
        columns = (column or [None] * len(xs) for column in (tensors, blocks, limits))
        rows = zip(xs, *columns, strict=True)
        return [transforms.fake_quantize(x, spec, axis, t, b, *random, a, pass_through) for x, t, b, a in rows]
    return groups.fake_quantize_grouped(xs, spec, axis, tensors, blocks, *random, limits, pass_through)


def _tensors(op: str, xs: Any) -> list[Any]:
    """The tensors of a sequence, or of a stack."""
    if not isinstance(xs, Tensor):
        return list(as_entries(op, "xs", xs))
    check_stack(op, xs, "tensor")
    return list(xs.unbind(0))


def _each_amax(op: str, name: str, xs: list[Tensor], given: Any) -> list[Any]:
    """One amax for each tensor; none where none is given."""
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
    """fp4kit.quantize of a tensor, traceable: codes and scales as tensors in a Quantized. Not differentiable.

    x: a tensor, which may require grad. The other arguments are those of fp4kit.quantize, and of fake_quantize here.
    Returns Quantized, whose arrays are new tensors on the device of x; under torch.compile and torch.export, too, where
    a
        Quantized may be argument and result.
    Raises what fp4kit.quantize raises; TypeError unless x is a tensor.

    >>> q = quantize(torch.tensor([[0.5, -6.0] * 16]), "mxfp4")
    >>> q.packed[0, 0].item(), q.block_scale.tolist(), q.shape
    (241, [[127]], (1, 32))
    """
    op = "quantize"
    check_tensor(op, x)
    r, axis = recipe_of(op, recipe), as_index(op, "axis", axis)
    check_hadamard(op, hadamard)
    options = str(scale_layout), str(rounding), _seed(op, seed), str(hadamard), _amax(op, "block_amax", x, block_amax)
    arrays = codes.quantize(x.detach(), _named(recipe), axis, _amax(op, "tensor_amax", x, tensor_amax), *options)
    names = (
        "packed",
        *["block_scale"] * (r.scale is not None),
        *["tensor_scale", "tensor_amax"] * (r.tensor_scaling != "none"),
    )
    return unflatten(arrays, (names, tuple(x.shape), NUMPY[x.dtype], axis % x.ndim, r, scale_layout))


def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """fp4kit.dequantize to a tensor, traceable. Not differentiable.

    q: a Quantized of tensors. dtype: torch.float32, float16 or bfloat16; None for that of the tensor that was
    quantized. Returns a new tensor of q.shape. Raises TypeError for anything but a Quantized of tensors, and for
    another dtype.

    >>> q = quantize(torch.tensor([[0.3, -5.0] * 16]), "mxfp4")
    >>> dequantize(q, torch.bfloat16)[0, :2]
    tensor([ 0.5000, -4.0000], dtype=torch.bfloat16)
    """
    checks.check_is_quantized("dequantize", q)
    check_tensor("dequantize", q.packed, "q.packed")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dequantize: dtype is {dtype!r:.60}; needs torch.float32, torch.float16 or torch.bfloat16")
    source = _torch_dtype(q.dtype)
    facts = q.shape, q.axis, _spec(q.recipe), q.scale_layout, source, source if dtype is None else dtype
    return codes.dequantize(q.packed, q.block_scale, q.tensor_scale, q.tensor_amax, *facts)
