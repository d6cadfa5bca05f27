"""The amax that a stored tensor scale implies: no checkpoint stores one, and some rules decode with it."""

from __future__ import annotations

import numpy as np

from fp4kit.formats import FLT_MAX
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import BLOCK_RULES, DECODE_RULES
from fp4kit.reference.arith import ONE
from fp4kit.reference.tensor_rules import TensorScale, full_range, tensor_scale

UNKNOWN = np.float32(-1)  # in place of an amax where none gives the scale
NEAR = 8  # float32 steps between tensor_scale * full_range and the amaxes of a rule of a few float32 roundings
FAR = 1 << 20  # and of a rule that rounds to 16 bits: an eighth of the number
JUMP = np.float32(4096)  # 2^20 subnormal steps from 2688 * 2^-149 are 391 times it; the least jump of a rule is 65504
_LARGEST = int(FLT_MAX.view(np.int32))


def covered_range(recipe: Recipe) -> np.float32:
    """The amax that a tensor scale of 1 covers: full_range under block scales, else the element's max."""
    return full_range(recipe) if recipe.scale is not None else recipe.element.max


def same_scale(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether float32 scales agree in every bit, NaN with NaN."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))


def _order(bits: np.ndarray, scale: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """-1, 0, 1 where the amax of these bits gives a smaller, the same, a larger scale.

    Scales grow with the amax, but for the small amaxes that a rule takes for a much larger one, which give JUMP times
    the scale and more. Within FAR steps of the right one, no larger amax does.
    """
    found = tensor_scale(bits.astype(np.int32).view(np.float32), recipe, dtype).decode
    return np.where((found < scale) | (found >= scale * JUMP), -1, np.where(found == scale, 0, 1))


def _first(
    low: np.ndarray, high: np.ndarray, least: int, scale: np.ndarray, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Bits of the first amax of [low, high] that orders at `least` or above; high + 1 if none does."""
    high = high + 1
    while (low < high).any():
        middle = (low + high) // 2
        above = _order(np.minimum(middle, _LARGEST), scale, recipe, dtype) >= least
        low, high = np.where(above | (low >= high), low, middle + 1), np.where(above, middle, high)
    return low


def amax_interval(
    scale: np.ndarray, recipe: Recipe, dtype: np.dtype, steps: int = FAR
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the first and last positive float32 amax, `steps` or less from scale * covered_range, whose rule gives
    the scale.

    scale: float32, positive and finite. Returns int64 of its shape; the first is above the last where there is none.
    """
    with np.errstate(all="ignore"):
        near = np.minimum(np.asarray(scale, np.float32) * covered_range(recipe), FLT_MAX)
        center = near.view(np.int32).astype(np.int64)
        low, high = np.maximum(center - steps, 1), np.minimum(center + steps, _LARGEST)
        first = _first(low, high, 0, scale, recipe, dtype)
        return first, _first(low, high, 1, scale, recipe, dtype) - 1


def _roundest(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The number of [first, last] that ends in the most zeros: last without the bits below its highest that first - 1
    lacks.
    """
    differ = (first - 1) ^ last
    for shift in (1, 2, 4, 8, 16):
        differ |= differ >> shift
    return last & ~(differ >> 1)


def implied_amax(scale: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """The amax that a stored tensor scale was made from, as far as the scale tells: float32, same shape; -1 where none
    gives it.

    Of the positive amaxes within FAR float32 steps of scale * covered_range whose tensor rule gives exactly the scale,
    the one of the fewest significant bits (the bits of a float32 that ends in the most zeros): the amax of bfloat16 and
    float16 data, of which rarely two give one scale. Where there is none, the first of 0, inf and NaN that gives the
    scale. scale: float32, any shape. recipe: one with a tensor rule. dtype: of the array that was quantized, to which
    some rules round.
    """
    scale = np.asarray(scale, np.float32)
    found = np.full(scale.shape, UNKNOWN)
    for special in (np.nan, np.inf, 0.0):
        given = tensor_scale(np.float32(special), recipe, dtype).decode
        found = np.where(same_scale(given, scale), np.float32(special), found)
    usual = (scale > 0) & np.isfinite(scale)
    found[usual] = _implied(scale[usual], found[usual], recipe, dtype)
    return found


def _implied(scale: np.ndarray, otherwise: np.ndarray, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
    """Of a row of positive finite scales; otherwise: what stands where no amax is near."""
    first, last = amax_interval(scale, recipe, dtype, NEAR)
    far = ~_inside(first, last, scale, recipe)
    if far.any():
        first[far], last[far] = amax_interval(scale[far], recipe, dtype)
    amax = _roundest(first, np.maximum(last, first)).astype(np.int32).view(np.float32)
    return np.where(first <= last, amax, otherwise)


def _inside(first: np.ndarray, last: np.ndarray, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Whether all amaxes of the scale are nearer than NEAR: some are, and neither end of the search is one."""
    with np.errstate(all="ignore"):
        center = np.minimum(scale * covered_range(recipe), FLT_MAX).view(np.int32).astype(np.int64)
    return (first <= last) & (first > center - NEAR) & (last < center + NEAR)


def stored_tensor_scale(
    scale: np.ndarray | None, amax: np.ndarray | None, recipe: Recipe, dtype: np.dtype
) -> TensorScale:
    """The TensorScale that a Quantized decodes with: its tensor_scale, which is the truth, and the amax where the rule
    reads one.

    amax: the known one, used where the recipe's rule gives scale for it; elsewhere the implied one; UNKNOWN where there
    is none, and then the values are decode(code) * (block_scale * tensor_scale). Ones where the recipe has no tensor
    scale.
    """
    if recipe.tensor_rule is None or scale is None:
        return TensorScale(ONE, ONE, ONE)
    scale = np.asarray(scale, np.float32)
    if not DECODE_RULES[recipe.decode_rule].needs_amax:
        return TensorScale(ONE, scale, ONE)
    known = np.full(scale.shape, UNKNOWN) if amax is None else np.array(amax, np.float32)
    wrong = (
        ~same_scale(tensor_scale(known, recipe, dtype).decode, scale)
        if amax is not None
        else np.ones(scale.shape, bool)
    )
    if wrong.any():
        known[wrong] = implied_amax(scale[wrong], recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(tensor_scale(known, recipe, dtype).encode, scale, known)


def encodes_by_amax(recipe: Recipe) -> bool:
    """Whether elements meet the tensor's encode scale, which an amax gives: where they meet the decode scale, none is
    needed.
    """
    if recipe.tensor_rule is None:
        return False
    return recipe.apply == "multiply" if recipe.block_rule is None else BLOCK_RULES[recipe.block_rule].encode


def encoding_scale(scale: np.ndarray | None, recipe: Recipe, dtype: np.dtype) -> TensorScale:
    """The TensorScale that codes are made with under a given tensor scale: decode is that, encode the implied amax's.

    Where no amax gives the scale, encode = 1 / scale. Ones where the recipe has no tensor scale, or does not read a
    part.
    """
    if scale is None:
        return TensorScale(ONE, ONE, ONE)
    if not encodes_by_amax(recipe):
        return TensorScale(ONE, scale, ONE)
    amax = implied_amax(scale, recipe, dtype)
    with np.errstate(all="ignore"):
        return TensorScale(
            np.where(amax == UNKNOWN, ONE / scale, tensor_scale(amax, recipe, dtype).encode), scale, amax
        )
