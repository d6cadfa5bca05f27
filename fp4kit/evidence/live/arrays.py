"""Arrays between NumPy and the libraries of producers, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def to_torch(x: np.ndarray) -> Any:
    """Return a tensor with a copy of an array's elements; bfloat16 stays bfloat16."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_numpy(tensor: Any) -> np.ndarray:
    """Return an array with a tensor's elements: bfloat16 typed, float8 and narrower as uint8 bit patterns."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()
