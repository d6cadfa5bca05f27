"""Tensors of PyTorch as fp4kit's checks see them, and its arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp4kit.call.outline import Outline
from fp4kit.formats import FLOATS
from fp4kit.interop import check_one_device, import_arrays

NUMPY = {getattr(torch, dtype.name): dtype for dtype in FLOATS}  # the dtypes of what is quantized, and of values
TORCH = {dtype: tensor_dtype for tensor_dtype, dtype in NUMPY.items()}


def numpy_dtype(dtype: torch.dtype) -> Any:
    """NumPy's dtype of the same numbers; one that NumPy lacks stays as it is, for errors to name."""
    name = str(dtype).removeprefix("torch.")
    return NUMPY.get(dtype) or (np.dtype(name) if hasattr(np, name) else dtype)


def outline(tensor: torch.Tensor | None) -> Outline | None:
    """Shape and dtype of a tensor, whose lengths may be symbols."""
    return None if tensor is None else Outline(tuple(tensor.shape), numpy_dtype(tensor.dtype))


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    found = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    if len({tensor.device for tensor in found.values()}) > 1:
        check_one_device(op, **found)


def check_tensor(op: str, x: Any, name: str = "x") -> None:
    """Raise TypeError for anything but a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} is {type(x).__name__}; needs a torch.Tensor; fp4kit.{op} takes arrays of other libraries")


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as fp4kit takes it: its gradient is the operator's business."""
    return None if tensor is None else tensor.detach()


def own(result: Any, *given: torch.Tensor | None) -> torch.Tensor:
    """A result as a tensor with memory of its own, which operators must return: a copy of what was given."""
    tensor = _as_torch(result)
    taken = {g.data_ptr() for g in given if g is not None}
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.data_ptr() in taken else tensor


def _as_torch(array: Any) -> torch.Tensor:  # SHIM: away as soon as fp4kit returns tensors for tensors
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == FLOATS[2]:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _as_numpy(array: Any) -> Any:  # SHIM
    return None if array is None else import_arrays("", q=array)[0]
