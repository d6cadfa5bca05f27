"""Provide helpers for tensors: outlines for checks without values, device checks, and results free of shared memory."""

from __future__ import annotations

from typing import Any

import torch

import fp4kit
from fp4kit.arrays.imports import check_one_device, is_distributed, way_to_array, way_to_local
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.inputs import AbstractArray
from fp4kit.formats import FLOATS

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
