"""NumPy arrays as PyTorch's tensors and back, bfloat16 included."""

import ml_dtypes
import numpy as np


def to_torch(array):
    import torch

    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    import torch

    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
