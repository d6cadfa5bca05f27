"""Store a matrix of zeros so that all loaders can read it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp4kit.quantized.container import Quantized


def of_zeros(q: Quantized) -> Quantized:
    """Return a copy of the all-zero matrix ``q`` with scales that all loaders can read: block scales 0, tensor
    scale 1.
    """
    zeros = {"packed": np.zeros_like(q.packed)}
    zeros |= {} if q.block_scale is None else {"block_scale": np.zeros_like(q.block_scale)}
    return replace(q, **zeros, tensor_scale=np.ones_like(q.tensor_scale), tensor_amax=None)
