"""NumPy arrays as PyTorch's tensors and back, bfloat16 included."""

from importlib import metadata

import ml_dtypes
import numpy as np
import pytest


def to_torch(array):
    import torch

    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    import torch

    tensor = tensor.detach()
    return (
        tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def since_2_13():
    """Mark of a test of what earlier versions of PyTorch do not trace: objects that are made without their
    constructor.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "0.0"
    old = tuple(map(int, version.split(".")[:2])) < (2, 13)
    return pytest.mark.skipif(old, reason=f"PyTorch {version} does not trace a Quantized, or a Recipe")
