"""Convert between NumPy arrays and PyTorch tensors, bfloat16 included."""

from importlib import metadata

import ml_dtypes
import numpy as np
import pytest


def to_torch(array):
    """Return a PyTorch tensor with a copy of the array's values; ml_dtypes.bfloat16 becomes torch.bfloat16."""
    import torch

    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    """Return a NumPy array on the tensor's memory, without its gradient; torch.bfloat16 becomes ml_dtypes.bfloat16."""
    import torch

    tensor = tensor.detach()
    return (
        tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def since_2_13():
    """Return a pytest mark that skips a test on PyTorch before 2.13.

    Earlier versions do not trace objects that are made without their constructor, such as Quantized and Recipe.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "0.0"
    old = tuple(map(int, version.split(".")[:2])) < (2, 13)
    return pytest.mark.skipif(old, reason=f"PyTorch {version} does not trace a Quantized, or a Recipe")
