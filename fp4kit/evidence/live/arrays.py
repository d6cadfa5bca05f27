"""Convert arrays between NumPy and the libraries of producers, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.formats import ELEMENT_FORMATS


def to_torch(x: np.ndarray) -> Any:
    """Return a torch tensor with a copy of an array's elements and its dtype, bfloat16 included."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a NumPy array with the elements and dtype of a torch tensor on the CPU, bfloat16 included."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def codes_of(values: np.ndarray, format: str) -> np.ndarray:
    """Convert values to codes (uint8, one per value), for producers that return decoded values instead of codes."""
    fmt = next(f for f in ELEMENT_FORMATS if f.name.lower() == format)
    magnitudes = np.asarray(fmt.magnitudes, np.float64)
    size = np.abs(values.astype(np.float64))
    codes = np.minimum(np.searchsorted(magnitudes, size), len(magnitudes) - 1)
    if not np.array_equal(magnitudes[codes], size):
        raise ValueError(
            f"codes_of: {values[magnitudes[codes] != size][0]} is not a value of {fmt.name}; needs "
            "values that have a code"
        )
    return (codes + np.signbit(values) * (1 << (fmt.bits - 1))).astype(np.uint8)
