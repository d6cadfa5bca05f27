"""Find the tensor amax that gives a tensor scale, or a static input scale, which a checkpoint stores.

Decoding multiplies by a stored scale (Model-Optimizer's input_scale), or divides by it (compressed-tensors'
input_global_scale). A recipe computes both its encode scale and its decode scale from an amax. So the stored scale is
the decode scale or the encode scale of an amax. This module searches for the amax. compressed-tensors also stores the
encode scale of a weight (weight_global_scale).
"""

from __future__ import annotations

import ml_dtypes
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
    return np.float32(_encoding(np.asarray(scale), recipe, dtype))


def divisor_amaxes(divisors: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray | None:
    """Return amaxes that the recipe's tensor rule turns into the divisors of a checkpoint, or None if none are needed.

    A Quantized holds the reciprocal of a divisor, rounded to float32. A divisor of 16-bit elements can be computed from
    it, because it has few bits, but one of float32 elements cannot. So the result is None for 16-bit elements. It is
    also None if no divisor is the encode scale of an amax, and for recipes that are not of compressed-tensors, which
    decode without their encode scale. A divisor of a stack that is the encode scale of no amax gets 0, which decoding
    ignores, because its scale differs (implied_amax.stored_tensor_scale).

    Args:
        divisors: the stored divisors, float32, any shape.
        recipe: the recipe of the codes.
        dtype: the dtype of the elements.
    """
    if recipe.tensor_rule != "compressed_tensors" or dtype != np.float32:
        return None
    found = _encoding(divisors, recipe, dtype)
    return None if (found == UNKNOWN).all() else np.where(found == UNKNOWN, np.float32(0), found)


def divisor_dtype(divisors: np.ndarray, recipe: Recipe) -> np.dtype:
    """Return the dtype of the elements that were quantized, as far as the divisors of a checkpoint show it.

    The tensor rule of compressed-tensors rounds to the dtype of the elements. The result is that one of bfloat16,
    float16 and float32 for which the most divisors are the encode scales of amaxes, the first of several. If there are
    none, or if the recipe is not one of compressed-tensors, the result is bfloat16.

    Args:
        divisors: the stored divisors, float32, any shape.
        recipe: the recipe of the codes.
    """
    dtypes = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32)))
    if recipe.tensor_rule != "compressed_tensors":
        return dtypes[0]
    fitting = [_fits(divisors, recipe, dtype).sum() for dtype in dtypes]
    return dtypes[int(np.argmax(fitting))]


def _fits(divisors: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return for each divisor whether it is known to be the encode scale of an amax."""
    with np.errstate(all="ignore"):
        implied = implied_amax(np.float32(1) / divisors, recipe, dtype)
        same = (implied != UNKNOWN) & (tensor_scale(implied, recipe, dtype).encode == divisors)
    return same | (_encoding(divisors, recipe, dtype) != UNKNOWN)


def _encoding(scales: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return amaxes whose encode scales are the given ones: float32, in the shape of scales."""
    with np.errstate(all="ignore"):
        centers = np.asarray(covered_range(recipe) / scales, np.float32).view(np.int32)[..., None]
        steps = np.array(sorted(range(-NEAR, NEAR + 1), key=abs), np.int32)
        amaxes = np.maximum(centers + steps, 1).view(np.float32)
        fits = tensor_scale(amaxes, recipe, dtype).encode == scales[..., None]
    first = np.take_along_axis(amaxes, fits.argmax(-1)[..., None], -1)[..., 0]
    return np.where(fits.any(-1), first, UNKNOWN)
