"""Define quantize and dequantize as PyTorch operators: the arrays of a Quantized are passed and returned as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fp4kit
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.inputs import check_values_dtype
from fp4kit.call.outputs import part_specs
from fp4kit.call.parse import QuantizeOptions, quantize_call
from fp4kit.quantized.container import PARTS
from fp4kit.quantized.slicing import unflatten
from fp4kit.recipes.serialization import from_spec
from fp4kit.torch.operators import loop_over, seed_of, seed_outline
from fp4kit.torch.tensors import check_devices, copy_if_shared, detached, outline

_HADAMARD = {"False": False, "True": True}  # other strings pass unchanged


@torch.library.custom_op("fp4kit::quantize", mutates_args=())
def quantize(
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
    """Return the arrays of fp4kit.quantize(x, ...) that are not None, as new tensors."""
    options: dict[str, Any] = {"scale_layout": scale_layout, "rounding": rounding, "seed": seed_of(seed)}
    options |= {"hadamard": _flag(hadamard), "tensor_amax": detached(tensor_amax), "block_amax": detached(block_amax)}
    q = fp4kit.quantize(x.detach(), from_spec(recipe), axis=axis, **options)
    arrays = (q.packed, q.block_scale, q.tensor_scale, q.tensor_amax)
    return [copy_if_shared(a, tensor_amax) for a in arrays if a is not None]


def _flag(hadamard: str) -> Any:
    """Return the hadamard option for an operator's string: "False" and "True" as bools, other strings unchanged."""
    return _HADAMARD.get(hadamard, hadamard)


@quantize.register_fake
def _(x: Tensor, recipe: str, axis: int, tensor_amax: Tensor | None, *rest: Any) -> list[Tensor]:
    scale_layout, rounding, seed, hadamard, block_amax = rest
    op, options = "quantize", QuantizeOptions(scale_layout, rounding, seed_outline(seed), _flag(hadamard))
    random = seed if seed is not None and seed.ndim else None
    check_devices(op, x=x, tensor_amax=tensor_amax, block_amax=block_amax, seed=random)
    amaxes = outline(tensor_amax), outline(block_amax)
    call = quantize_call(op, outline(x), from_spec(recipe), axis, options, tensor_amax=amaxes[0], block_amax=amaxes[1])
    return [x.new_empty(shape, dtype=_TENSOR_DTYPES[dtype.name]) for shape, dtype in part_specs(call).values()]


_TENSOR_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
quantize.register_vmap(loop_over(quantize))


@torch.library.custom_op("fp4kit::dequantize", mutates_args=())
def dequantize(
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
    """Return the values of a Quantized, given by its arrays and fields, as a new tensor."""
    arrays = [detached(a) for a in (packed, block_scale, tensor_scale, tensor_amax)]
    q = unflatten(
        arrays, (PARTS, tuple(shape), numpy_dtype("dequantize", dtype), axis, from_spec(recipe), scale_layout)
    )
    values: Any = fp4kit.dequantize(q, values_dtype)
    return values


@dequantize.register_fake
def _(packed: Tensor, *rest: Any) -> Tensor:
    shape, axis, values_dtype = rest[3], rest[4], rest[-1]
    check_values_dtype("dequantize", numpy_dtype("dequantize", values_dtype))
    moved = (*shape[:axis], *shape[axis + 1 :], shape[axis])
    return packed.new_empty(moved, dtype=values_dtype).movedim(-1, axis)


dequantize.register_vmap(loop_over(dequantize))
