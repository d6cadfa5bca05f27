"""Find the tensor amax that a stored tensor scale implies.
No checkpoint stores the tensor amax, but some recipes need it to decode. The tensor rule of a recipe makes the tensor
scale from the amax. This module searches the float32 numbers for an amax that gives the stored scale.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fp4kit.formats import FLT_MAX
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES, DECODE_RULES
from fp4kit.reference.arith import ONE
from fp4kit.reference.tensor_rules import TensorScale, amax_range, full_range, reciprocal_of_scale, tensor_scale

UNKNOWN = np.float32(-1)  # stands for the amax if no amax gives the scale
# NEAR and FAR are search radii around tensor_scale * covered_range, in float32 steps. NEAR is tried first.
NEAR = 8  # enough for a rule that makes a few float32 roundings
FAR = 1 << 20  # enough for a rule that rounds to 16 bits: an eighth of the number
# A scale more than JUMP times as large as the stored one shows that a rule replaced a small amax by a larger number.
# Such a replacement makes the scale at least 65504 times as large. Without it, FAR steps make the scale at most 391
# times as large (2^20 subnormal steps from 2688 * 2^-149).
JUMP = np.float32(4096)
_LARGEST = int(FLT_MAX.view(np.int32))
FEW = 64  # the largest number of scales whose interval is kept


def covered_range(recipe: Recipe) -> np.float32:
    """Return the tensor amax that gives the tensor scale 1, such as 2688 for most NVFP4 recipes.

    For amax rules, the result is tensor_rules.amax_range. For other rules, it is tensor_rules.full_range if the recipe
    has block scales, otherwise the largest element value.
    """
    if recipe.is_custom:
        return amax_range(recipe)
    return full_range(recipe) if recipe.scale is not None else recipe.element.max


def same_scale(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return whether float32 scales are equal in every bit, elementwise. Any two NaNs count as equal."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))


def _order(bits: np.ndarray, scale: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Compare the scales that amaxes give with `scale`: return -1 if a scale is smaller, 0 if equal, 1 if larger."""
    candidate = tensor_scale(bits.astype(np.int32).view(np.float32), recipe, dtype).decode
    return np.where((candidate < scale) | (candidate >= scale * JUMP), -1, np.where(candidate == scale, 0, 1))


def _first_bits(
    low: np.ndarray, high: np.ndarray, minimum_order: int, scale: np.ndarray, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the bits of the smallest amax in [low, high] that gives a scale of at least `scale`, or a scale above
    it.
    """
    high = high + 1
    while (low < high).any():
        middle = (low + high) // 2
        above = _order(np.minimum(middle, _LARGEST), scale, recipe, dtype) >= minimum_order
        low, high = np.where(above | (low >= high), low, middle + 1), np.where(above, middle, high)
    return low


def amax_interval(
    scale: np.ndarray, recipe: Recipe, dtype: np.dtype, steps: int = FAR
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest positive amax that the tensor rule turns into `scale`, as float32 bits.

    The result is two int64 arrays in the shape of scale. If no such amax exists, the first is larger than the second.

    scale: float32, positive and finite.
    recipe: the recipe, which names the tensor rule.
    dtype: the dtype of the quantized array.
    steps: only amaxes within this number of float32 steps of scale * covered_range are searched.
    """
    scale = np.asarray(scale, np.float32)
    if scale.size > FEW:
        return _interval(scale, recipe, dtype, steps)
    first, last = _kept_interval(scale.tobytes(), scale.shape, recipe, np.dtype(dtype), steps)
    return first.copy(), last.copy()  # callers change them


@lru_cache(maxsize=1024)
def _kept_interval(
    scale: bytes, shape: tuple[int, ...], recipe: Recipe, dtype: np.dtype, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return amax_interval of the float32 numbers with the bytes `scale` and the given shape, kept in a cache of
    1024.
    """
    # The arrays are shared with later calls, so a caller must not change them.
    return _interval(np.frombuffer(scale, np.float32).reshape(shape), recipe, dtype, steps)


def _interval(scale: np.ndarray, recipe: Recipe, dtype: np.dtype, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of the smallest and of the largest positive amax that the tensor rule turns into each scale."""
    with np.errstate(all="ignore"):
        likely_amax = np.minimum(scale * covered_range(recipe), FLT_MAX)
        center = likely_amax.view(np.int32).astype(np.int64)
        low, high = np.maximum(center - steps, 1), np.minimum(center + steps, _LARGEST)
        first = _first_bits(low, high, 0, scale, recipe, dtype)
        return first, _first_bits(low, high, 1, scale, recipe, dtype) - 1


def _with_fewest_bits(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the integer in [first, last] that ends in the most zero bits, elementwise."""
    differ = (first - 1) ^ last
    for shift in (1, 2, 4, 8, 16):
        differ |= differ >> shift
    return last & ~(differ >> 1)


def implied_amax(scale: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the amax that a tensor scale was probably computed from.

    A candidate is a positive amax that the tensor rule turns into exactly the scale. Candidates are searched within
    FAR (2^20) float32 steps of scale * covered_range. The result is the candidate with the fewest significant bits,
    which is the float32 that ends in the most zero bits. For bfloat16 and float16 data this is the original amax,
    because two amaxes of such data rarely give equal scales.

    If there is no candidate, or if the scale is not positive and finite, 0, inf and NaN are tried in this order. The
    first of them that gives the scale is the result. If none gives it, the result is -1 (UNKNOWN).

    Args:
        scale: float32, any shape.
        recipe: a recipe with a tensor rule.
        dtype: dtype of the array that was quantized. Some rules round to it.

    Returns:
        The amaxes: float32, in the shape of scale.
    """
    scale = np.asarray(scale, np.float32)
    amax = np.full(scale.shape, UNKNOWN)
    for special in (np.nan, np.inf, 0.0):
        special_scale = tensor_scale(np.float32(special), recipe, dtype).decode
        amax = np.where(same_scale(special_scale, scale), np.float32(special), amax)
    usual = (scale > 0) & np.isfinite(scale)
    amax[usual] = _implied(scale[usual], amax[usual], recipe, dtype)
    return amax


def _implied(scale: np.ndarray, otherwise: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return the implied amaxes (see implied_amax) of positive finite scales: float32, in the shape of scale."""
    # Where no amax near a scale gives it, the result is taken from the array `otherwise`.
    first, last = amax_interval(scale, recipe, dtype, NEAR)
    far = ~_is_complete(first, last, scale, recipe)
    if far.any():
        first[far], last[far] = amax_interval(scale[far], recipe, dtype)
    amax = _with_fewest_bits(first, np.maximum(last, first)).astype(np.int32).view(np.float32)
    return np.where(first <= last, amax, otherwise)


def _is_complete(first: np.ndarray, last: np.ndarray, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return True for each scale whose interval [first, last] is known to hold every amax that gives it."""
    with np.errstate(all="ignore"):
        center = np.minimum(scale * covered_range(recipe), FLT_MAX).view(np.int32).astype(np.int64)
    return (first <= last) & (first > center - NEAR) & (last < center + NEAR)


def stored_tensor_scale(
    scale: np.ndarray | None, amax: np.ndarray | None, recipe: Recipe, dtype: np.dtype
) -> TensorScale:
    """Return the TensorScale to decode a Quantized with. Its field `decode` is the stored tensor_scale.

    The fields `amax` and `encode` are 1 unless the recipe's decode rule reads them. In that case, `amax` is the given
    amax if the tensor rule makes `scale` from it, otherwise the implied amax, and `encode` follows from it. If no amax
    gives the scale, `amax` is UNKNOWN (-1), and the Quantized is decoded as decode(code) * (block_scale *
    tensor_scale). All fields are 1 if the recipe has no tensor scale, or if `scale` is None.
    """
    if recipe.tensor_rule is None or scale is None:
        return TensorScale(ONE, ONE, ONE)
    scale = np.asarray(scale, np.float32)
    if not DECODE_RULES[recipe.decode_rule].needs_amax:
        return TensorScale(ONE, scale, ONE)
    amaxes = np.full(scale.shape, UNKNOWN) if amax is None else np.array(amax, np.float32)
    mismatched = (
        ~same_scale(tensor_scale(amaxes, recipe, dtype).decode, scale)
        if amax is not None
        else np.ones(scale.shape, bool)
    )
    if mismatched.any():
        amaxes[mismatched] = implied_amax(scale[mismatched], recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(tensor_scale(amaxes, recipe, dtype).encode, scale, amaxes)


def encodes_by_amax(recipe: Recipe) -> bool:
    """Return whether the recipe encodes elements with the tensor's encode scale, which follows from the tensor amax.

    If so, the tensor amax must be known to quantize with a given tensor scale. Other recipes need only the decode
    scale, which a Quantized stores. The result is False if the recipe has no tensor scale.
    """
    if recipe.tensor_rule is None:
        return False
    return recipe.apply == "multiply" if recipe.block_rule is None else BLOCK_RULES[recipe.block_rule].encode


def encoding_scale(scale: np.ndarray | None, recipe: Recipe, dtype: np.dtype) -> TensorScale:
    """Return the TensorScale to encode elements with if the user passes the tensor scale.

    Its field `decode` is the given scale. Fields that the recipe does not read are 1; so are all fields if scale is
    None. The other fields depend on the recipe:

    - Custom recipe: `encode` is the scale's reciprocal (see reciprocal_of_scale).
    - Any other recipe that encodes by the amax: `amax` is the implied amax, and `encode` follows from it. If no amax
      gives the scale, `amax` is UNKNOWN (-1), and `encode` is 1 / scale.
    """
    if scale is None:
        return TensorScale(ONE, ONE, ONE)
    if recipe.is_custom:  # the encode scale follows from the decode scale
        return TensorScale(reciprocal_of_scale(scale), scale, ONE)
    if not encodes_by_amax(recipe):
        return TensorScale(ONE, scale, ONE)
    amax = implied_amax(scale, recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(
            np.where(amax == UNKNOWN, ONE / scale, tensor_scale(amax, recipe, dtype).encode), scale, amax
        )
