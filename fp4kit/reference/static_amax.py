"""Find the tensor amax that gives a static input scale, which a checkpoint stores for the inputs of a layer.

Decoding multiplies by a stored scale (Model-Optimizer's input_scale), or divides by it (compressed-tensors'
input_global_scale). A recipe computes both its encode scale and its decode scale from an amax. So the stored scale is
the decode scale or the encode scale of an amax. This module searches for the amax.
"""

from __future__ import annotations

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.reference.implied_amax import NEAR, UNKNOWN, covered_range, implied_amax
from fp4kit.reference.tensor_rules import tensor_scale


def static_amax(scale: np.float32, recipe: Recipe, dtype: np.dtype, divides: bool) -> np.float32:
    """Return an amax that the recipe's tensor rule turns into a static input scale; UNKNOWN (-1) if there is none.

    Args:
        scale: the stored scale, positive and finite.
        recipe: a recipe with one tensor scale per tensor.
        dtype: the dtype of the inputs. Some rules round to it.
        divides: True if the scale divides on decode, so that it is the encode scale; False if it multiplies.
    """
    if not divides:
        return np.float32(implied_amax(np.asarray(scale), recipe, dtype))
    with np.errstate(all="ignore"):
        center = int((covered_range(recipe) / scale).view(np.int32))
        bits = np.arange(max(center - NEAR, 1), center + NEAR + 1, dtype=np.int32)
        bits = bits[np.argsort(np.abs(bits - center), kind="stable")]
        amaxes = bits.view(np.float32)
        fits = tensor_scale(amaxes, recipe, dtype).encode == scale
    return np.float32(amaxes[fits][0]) if fits.any() else UNKNOWN
