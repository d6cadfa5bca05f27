"""Fake quantizers that are not dequantize(quantize(x)): producers' value-only kernels, and straight-through
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX
from fp4kit.recipes import Recipe, rules
from fp4kit.reference.arith import ONE, ZERO
from fp4kit.reference.block_arith import inverse_e8m0
from fp4kit.reference.blocks import block_amax
from fp4kit.reference.codec import decode, encode, encode_e8m0
from fp4kit.reference.tensor_rules import TINY_AMAX, round_to
from fp4kit.rounding import power_of_two


def _round(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    """x >= 0 to the nearest value of the element format, ties to even."""
    return decode(encode(x, recipe.element), recipe.element)


def _e4m3(x: np.ndarray) -> np.ndarray:
    return decode(encode(x, E4M3), E4M3)


def nvfp4_modelopt_triton(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = round(|x| / s) * s, s = E4M3(min(amax / (6 gs), 448)) * gs, gs = tensor_amax * fp32(1/2688).

    gs <= 0 -> 1e-12; s < 1e-5 and NaN -> 1, so that a tensor whose scales are all below 1e-5 becomes zero. The sign is
    + for x >= 0 and - for all else, NaN included (which gives -6 s).
    """
    gs = tensor_amax * (ONE / np.float32(E2M1.max * E4M3.max))
    gs = np.where(gs <= 0, np.float32(1e-12), gs)
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = block_amax(x, recipe) if amax is None else amax
    scale = _e4m3(np.fmin(block / (E2M1.max * gs), E4M3.max)) * gs
    scale = np.where(scale >= np.float32(1e-5), scale, ONE)[..., None]
    y = _round(np.abs(blocks) / scale, recipe) * scale
    return np.where(blocks >= 0, y, ZERO - y).reshape(x.shape)  # 0 - y, as Triton negates: no -0


def nvfp4_modelopt_static(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = round(|x| / s) * s; s is amax / 6 through fp8-modelopt's E4M3 with amax' = tensor_amax * (448 / N) / 6.

    s = 0 -> zeros; s not finite -> 1.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = block_amax(x, recipe) if amax is None else amax
    outer = tensor_amax * np.float32(E4M3.max / recipe.scale_max) / E2M1.max
    encode_scale = ONE / np.where(outer <= TINY_AMAX, ONE, outer) * E4M3.max
    scale = _e4m3(np.clip(block / E2M1.max * encode_scale, -E4M3.max, E4M3.max)) * (ONE / encode_scale)
    scale = np.where(np.isfinite(scale), scale, ONE)[..., None]
    y = _round(np.abs(blocks) / np.where(scale == 0, ONE, scale), recipe) * scale
    return np.where(blocks >= 0, y, ZERO - y).reshape(x.shape)  # 0 - y, as Triton negates: no -0


def nvfp4_modelopt_cuda(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = round(|x| * (1 / u)) * u, u = E4M3((amax / 6) * t) / t, t = 448 * (6 / tensor_amax); t and u in float64.

    An amax or tensor_amax of 0, inf or NaN: y = round(|x|).
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = np.fmin(block_amax(x, recipe) if amax is None else amax, FLT_MAX)
    t = np.float64(448) * (E2M1.max / tensor_amax).astype(np.float64)
    u = _e4m3(((block / E2M1.max).astype(np.float64) * t).astype(np.float32)).astype(np.float64) / t
    valid = (block > 0) & np.isfinite(block) & (tensor_amax > 0) & np.isfinite(tensor_amax)
    scale = np.where(valid, (1 / u).astype(np.float32), ONE)[..., None]
    unscale = np.where(valid, u.astype(np.float32), ONE)[..., None]
    y = np.where(unscale == 0, ZERO, _round(np.abs(blocks) * scale, recipe) * unscale)
    return np.where(blocks < 0, -y, y).reshape(x.shape)


def mx_modelopt(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray | None, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = round(|x| / s) * s, s = amax / max rounded up to a power of two within [2^-127, 2^127]; amax = 0 -> s = 1.

    amax ignores NaN and takes inf as FLT_MAX. NaN elements are undefined there; here they give NaN, or the largest
    value.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = np.fmin(block_amax(x, recipe) if amax is None else amax, FLT_MAX)
    codes = np.where(block == 0, np.uint8(127), encode_e8m0(block / recipe.element.max, "rp"))
    y = _round(np.abs(blocks) * inverse_e8m0(codes)[..., None], recipe) * decode(codes, E8M0)[..., None]
    return np.where(blocks < 0, -y, y).reshape(x.shape)


def int_modelopt(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = clip(rint(x * s), min, max) / s, s = max / tensor_amax; -0 and NaN come through.

    Where tensor_amax <= 2^-24 the result is +0 (the CUDA path), but per block a zero of the sign of x (the PyTorch
    path).
    """
    zero = (tensor_amax <= TINY_AMAX)[..., None]
    scale = np.where(zero, ONE, recipe.element.max / tensor_amax[..., None])
    low = -recipe.element.max - (not recipe.narrow)
    blocks = _tensor_blocks(x, recipe)
    y = np.clip(np.rint(blocks * scale), low, recipe.element.max) / scale
    nothing = np.copysign(ZERO, blocks) if recipe.tensor_scaling == "block" else ZERO
    return np.where(zero, nothing, y).reshape(x.shape)


def int4_qat(
    x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray, amax: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """y = clip(rint(x / s), -7, 7) * s, s = max(tensor_amax / 7, 1e-5). -0 comes through."""
    scale = np.maximum(tensor_amax / recipe.element.max, np.float32(1e-5))[..., None]
    y = np.clip(np.rint(_tensor_blocks(x, recipe) / scale), -recipe.element.max, recipe.element.max) * scale
    return y.reshape(x.shape)


def _tensor_blocks(x: np.ndarray, recipe: Recipe) -> np.ndarray:
    """x (m, k) as (m, blocks, block), one block a row where tensor scales do not go by block."""
    return x.reshape(len(x), -1, recipe.block_size if recipe.block else x.shape[1])


def _log2_floor(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """floor(log2(x)) with log2 rounded to float32, then to dtype: one too large just below a power of two."""
    with np.errstate(divide="ignore"):
        return np.floor(round_to(np.log2(x.astype(np.float64)).astype(np.float32), dtype))


def _exp2(exponent: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return round_to(np.ldexp(np.float32(1), exponent.astype(np.int32)), dtype)


def _microxcaling(
    round_magnitude: Callable[[np.ndarray, np.dtype], np.ndarray], flush: bool = False
) -> Callable[..., np.ndarray]:
    def rule(
        x: np.ndarray, recipe: Recipe, tensor_amax: np.ndarray | None, amax: np.ndarray | None, dtype: np.dtype
    ) -> np.ndarray:
        """s = 2^(floor(log2(amax)) - emax); y = round(x / s) * s; every operation rounded to the input dtype.

        log2 is rounded to the dtype, so its floor is one too large just below powers of two; an exponent above 127
        makes the block NaN; below -127 it is -127. Elements saturate; -0 becomes +0. float16: all-zero blocks give NaN
        (0 / 0). flush: blocks with log2(amax) <= -127 are zero.
        """
        element = recipe.element
        blocks = x.reshape(len(x), -1, recipe.block_size)
        block = block_amax(x, recipe) if amax is None else amax
        tiny = round_to(np.float32(2.0**-126), dtype)
        shared = _log2_floor(np.where(block == 0, block + tiny, block), dtype)
        blocks = np.where((shared <= -127)[..., None], ZERO, blocks) if flush else blocks
        exponent = shared - np.float32(element.emax)
        exponent = np.where(exponent > 127, np.nan, np.maximum(exponent, -127))
        scale = np.where(np.isnan(exponent), np.nan, _exp2(np.nan_to_num(exponent), dtype)).astype(np.float32)[
            ..., None
        ]
        scaled = round_to(blocks / scale, dtype)
        a = np.abs(scaled)
        private = _log2_floor(np.where(a == 0, ONE, a), dtype)
        private = np.nan_to_num(np.maximum(private, np.float32(element.emin)), posinf=127)
        step = power_of_two((private - element.mantissa_bits).astype(np.int32))
        rounded = round_to(round_magnitude(round_to(a / step, dtype), dtype) * step, dtype)
        rounded = np.minimum(rounded, element.max)
        y = round_to(np.where(np.isinf(a), a, rounded) * scale, dtype)
        return np.where(scaled < 0, -y, y).reshape(x.shape)

    return rule


def _half_away(v: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.floor(round_to(v + np.float32(0.5), dtype))


def _half_even(v: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return _half_away(v, dtype) - ((v - np.float32(0.5)) % 2 == 0)


microxcaling_nearest = _microxcaling(_half_away)
microxcaling_nearest_flush = _microxcaling(_half_away, flush=True)
microxcaling_even = _microxcaling(_half_even)
microxcaling_floor = _microxcaling(lambda v, dtype: np.floor(v))

FAKE_RULES: dict[str, Callable[..., np.ndarray]] = {name: globals()[name] for name in rules.FAKE_RULES}


def clip_gradient(grad: np.ndarray, x: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Straight-through gradient with a clip mask: grad where |x| <= amax, else 0 (NaN x gives 0). amax is not
    rounded.
    """
    with np.errstate(all="ignore"):
        return np.where(np.abs(x).astype(np.float32) <= amax, grad, np.zeros((), grad.dtype))
