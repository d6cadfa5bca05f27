"""Compute the input scale of a layer from the amax of its inputs, in the direction of each container."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_float32
from fp4kit.arithmetic import ieee
from fp4kit.formats import NVFP4


@ieee("input_scale")
def input_scale(amax: Any) -> np.float32:
    """Return the input scale that multiplies on decode, as Model-Optimizer stores it: ``amax / (6 * 448)``.

    Args:
        amax: the largest magnitude of the layer's inputs, a number that float32 represents.

    Returns:
        float32.

    Raises:
        TypeError: amax is not a real number.
        ValueError: amax is negative.

    Numerics:
        One division in float32, rounded to nearest even. An amax of 0 gives 0, which no engine can use. NaN gives NaN,
        and infinity gives infinity.

    Exact:
        Equals Model-Optimizer 0.47 with PyTorch on a CPU. On CUDA, PyTorch multiplies by the rounded reciprocal of
        2688, so the last bit may differ there.

    Source:
        Model-Optimizer 0.47, modelopt/torch/quantization/qtensor/nvfp4_tensor.py, get_activation_scaling_factor.

    Examples:
        >>> from fp4kit.calibration import input_scale
        >>> input_scale(1344.0)
        np.float32(0.5)
    """
    return np.float32(_checked("input_scale", amax) / np.float32(NVFP4.max))


@ieee("input_global_scale")
def input_global_scale(amax: Any) -> np.float32:
    """Return the input scale that divides on decode, as compressed-tensors stores it: ``448 * 6 * (1 / amax)``.

    Args:
        amax: the largest magnitude of the layer's inputs, a number that float32 represents.

    Returns:
        float32.

    Raises:
        TypeError: amax is not a real number.
        ValueError: amax is negative.

    Numerics:
        The reciprocal and then the product are rounded to float32, to nearest even. An amax below the smallest normal
        number is replaced by that number. A result that overflows, or that is NaN, becomes 1. So an amax of 0 or NaN
        gives 1, and infinity gives 0.

    Exact:
        Equals compressed-tensors 0.20 for a float32 amax. For a bfloat16 amax, llm-compressor divides in bfloat16.

    Source:
        compressed-tensors 0.20, compressed_tensors/quantization/utils/helpers.py, generate_gparam. PyTorch computes a
        number divided by a tensor with a reciprocal.

    Examples:
        >>> from fp4kit.calibration import input_global_scale
        >>> input_global_scale(1344.0)
        np.float32(2.0)
    """
    largest = np.maximum(_checked("input_global_scale", amax), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        scale = np.float32(np.float32(NVFP4.max) * (np.float32(1) / largest))
    return scale if np.isfinite(scale) else np.float32(1)


def _checked(op: str, amax: Any) -> np.float32:
    """Return an amax as float32."""
    found = as_float32(op, "amax", amax, "needs a number")
    if found < 0:
        raise ValueError(f"{op}: amax is {found}; needs a number >= 0")
    return found
