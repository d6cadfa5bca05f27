"""Tensor rules: from the amax of a tensor to its scale, encode and decode. What blocks make of it: block_rules.py.

All arithmetic is float32 with one rn rounding per written operation, unless a rule says that it rounds to the input
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.arith import ONE, reciprocal_or_zero

Pair = tuple[np.ndarray, np.ndarray]  # encode, decode
TINY_AMAX = np.float32(2.0**-24)  # Model-Optimizer's FP8 and INT fake quantizers treat a smaller amax as "no scale"


class TensorScale(NamedTuple):
    """encode: multiplies on the way in; decode: multiplies on the way out (the one that is stored); amax: what they
    cover.
    """

    encode: np.ndarray
    decode: np.ndarray
    amax: np.ndarray

    def columns(self, recipe: Recipe) -> TensorScale:
        """The same as matrices: (1, 1), (M, 1), or (M, blocks) where every block has its own."""
        per_block = recipe.tensor_scaling == "block"
        return TensorScale(*(p if per_block and np.ndim(p) == 2 else np.reshape(p, (-1, 1)) for p in self))

    def cut(self, rows: slice, blocks: slice) -> TensorScale:
        """The part that a tile needs, of what columns() gave."""
        parts = (p[rows] if len(p) > 1 else p for p in self)
        return TensorScale(*(p[:, blocks] if p.shape[1] > 1 else p for p in parts))


def round_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x rounded to dtype (rn), as float32. After a float32 operation the second rounding is innocuous for 8 and 11
    bits.
    """
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


# ---- tensor rules: tensor_amax -> TensorScale
# ---------------------------------------------------------------------------


def full_range(recipe: Recipe) -> np.float32:
    """The amax that a tensor scale of 1 covers: the largest element times the largest block scale in use (2688 = 6 *
    448).
    """
    return np.float32(rules.TOPS.get(recipe.tensor_rule or "", recipe.element.max) * np.float32(recipe.scale_max))


def tensor_te_reference(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = min(2688 / amax, FLT_MAX), 1 if that is 0 (amax = inf); decode = 1 / encode. NaN stays NaN."""
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    encode_scale = np.where(encode_scale == 0, ONE, encode_scale)
    return encode_scale, ONE / encode_scale


def tensor_te(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """tensor_te_reference, and 1 for amax = 0."""
    encode_scale = np.where(amax == 0, ONE, tensor_te_reference(amax, recipe, dtype)[0])
    return encode_scale, ONE / encode_scale


def tensor_te_primary_weight(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = min(2688 / max(amax, FLT_MIN), FLT_MAX), 1 unless amax > 0; inf gives 0, which decodes as 1."""
    encode_scale = np.minimum(full_range(recipe) / np.maximum(amax, FLT_MIN), FLT_MAX)
    encode_scale = np.where(amax > 0, encode_scale, ONE)
    return encode_scale, ONE / np.where(encode_scale <= 0, ONE, encode_scale)


def tensor_flashinfer(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """make_nvfp4_global_scale: encode = min(2688 / amax, FLT_MAX), FLT_MAX for amax = 0; decode = 1 / encode."""
    encode_scale = np.minimum(full_range(recipe) / amax, FLT_MAX)
    return encode_scale, ONE / encode_scale


def tensor_divided(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """decode = amax / 2688, encode = 1 / decode (0 and NaN are not guarded)."""
    decode_scale = amax / full_range(recipe)
    return ONE / decode_scale, decode_scale


def tensor_compressed_tensors(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = rnd(rnd(1 / max(amax, tiny)) * 2688), both roundings to the input dtype; inf and NaN -> 1; decode = 1 /
    encode.
    """
    tiny = np.float32(ml_dtypes.finfo(dtype).tiny)
    reciprocal = round_to(ONE / np.maximum(amax, tiny), dtype)
    encode_scale = round_to(reciprocal * full_range(recipe), dtype)
    encode_scale = np.where(np.isfinite(encode_scale), encode_scale, ONE)
    return encode_scale, ONE / encode_scale


def tensor_mlx(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = 2688 / amax, decode = amax / 2688 (0, inf and NaN are not guarded). MLX calls amax global_scale."""
    return full_range(recipe) / amax, amax / full_range(recipe)


def tensor_fp8_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = 448 / amax (amax <= 2^-24 counts as 1), decode = 1 / encode."""
    encode_scale = recipe.element.max / np.where(amax <= TINY_AMAX, ONE, amax)
    return encode_scale, ONE / encode_scale


def tensor_int_modelopt(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = (2^(bits-1) - 1) / amax, 0 where amax <= 2^-24; decode = amax / (2^(bits-1) - 1), 0 there."""
    zero = amax <= TINY_AMAX
    safe = np.where(zero, ONE, amax)
    encode_scale = np.where(zero, np.float32(0), recipe.element.max / safe)
    return encode_scale, np.where(zero, np.float32(0), safe / recipe.element.max)


def tensor_int4_qat(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """decode = max(amax / 7, 1e-5); encode = 1 / decode (elements are divided by decode)."""
    decode_scale = np.maximum(amax / recipe.element.max, np.float32(1e-5))
    return ONE / decode_scale, decode_scale


def tensor_vllm(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = (1 / max(amax, 1e-8)) * 2688, two roundings; decode = 1 / encode, 1e-8 for an encode of 0."""
    encode_scale = ONE / np.maximum(amax, np.float32(1e-8)) * full_range(recipe)
    return encode_scale, ONE / np.where(encode_scale == 0, np.float32(1e8), encode_scale)


def tensor_auto_round(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = (1 / amax) * 2688, two roundings, 0 for amax = 0; decode = 1 / encode, 0 for an encode of 0."""
    encode_scale = reciprocal_or_zero(amax) * full_range(recipe)
    return encode_scale, reciprocal_or_zero(encode_scale)


def tensor_quark(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """decode = amax / 2688, 2^-23 for 0; encode = 1 / decode."""
    decode_scale = amax / full_range(recipe)
    decode_scale = np.where(decode_scale == 0, np.float32(2.0**-23), decode_scale)
    return ONE / decode_scale, decode_scale


def tensor_fouroversix(amax: np.ndarray, recipe: Recipe, dtype: np.dtype) -> Pair:
    """encode = 2688 / amax, decode = 1 / encode; 0, inf and NaN are not guarded."""
    encode_scale = full_range(recipe) / amax
    return encode_scale, ONE / encode_scale


tensor_fouroversix_4 = tensor_fouroversix  # with 4 * 448: rules.TOPS


TENSOR_RULES: dict[str, Callable[[np.ndarray, Recipe, np.dtype], Pair]] = {
    name: globals()[f"tensor_{name}"] for name in rules.TENSOR_RULES
}


def tensor_scale(amax: np.ndarray | None, recipe: Recipe, dtype: np.dtype) -> TensorScale:
    """The recipe's tensor rule applied to tensor_amax (float32, any shape); ones where the recipe has no tensor
    scale.
    """
    if recipe.tensor_rule is None or amax is None:
        return TensorScale(ONE, ONE, ONE)
    amax = np.asarray(amax, np.float32)
    with np.errstate(all="ignore"):
        return TensorScale(*TENSOR_RULES[recipe.tensor_rule](amax, recipe, dtype), amax)
