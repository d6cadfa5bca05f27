"""Define fake quantizers: functions that return x with the error that quantizing and dequantizing it would give.
All arrays are float32. x is (m, k), and `dtype` is its dtype before it was converted to float32. `amax` holds the block
amaxes, or None to compute them from x. `tensor_amax` holds the amaxes for the tensor scales. s is the scale of a block,
y the result, and M the largest element value.

The functions here differ from dequantize(quantize(x)): they reproduce producers' kernels that compute only values, no
codes. They are the fake rules of recipes/rules.py. All return a float32 array in the shape of x, and have the same
arguments, even if they do not use all of them. tensor_amax is None if the recipe has no tensor scale. Only the rules of
microxcaling use dtype.

In the docstrings, round() rounds to the nearest value of the element format, ties to even, and E4M3() rounds to the
nearest E4M3 value. clip_gradient computes the gradient of a fake quantizer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.arithmetic import power_of_two
from fp4kit.formats import E2M1, E4M3, E8M0, FLT_MAX, IF4_INTEGER_STEP, INT4
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import fake_unit
from fp4kit.reference import ascend
from fp4kit.reference.arith import ONE, ZERO, Array, Dtype, divide_full, log2, round_to
from fp4kit.reference.codec import amax_of, decode, encode, encode_e4m3_scale, encode_e8m0_scale, inverse_e8m0, show
from fp4kit.reference.tensor_rules import TINY_AMAX

FP_QUANT_GLOBAL = np.float32(3)  # the global scale that FP-Quant sets for NVFP4 with method abs_max


def _round(x: Array, recipe: Recipe) -> Array:
    """Return x >= 0 rounded to the nearest value of the element format, ties to even."""
    codes = show("code of the magnitude", encode(show("scaled magnitude", x), recipe.element), recipe.element)
    return show("magnitude of the element value", decode(codes, recipe.element))


def _e4m3(x: Array) -> Array:
    """Return x rounded to the nearest E4M3 value, ties to even, as float32. It saturates at +-448. NaN gives NaN."""
    return decode(show("block scale", encode_e4m3_scale(x), E4M3), E4M3)


def nvfp4_modelopt_triton(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as Model-Optimizer's Triton kernel does: y = round(|x| / s) * s with the sign of x.

        s = E4M3(min(amax / (6 gs), 448)) * gs,   gs = tensor_amax * fp32(1/2688), or 1e-12 if gs <= 0

    s is the scale of a block. amax holds the block amaxes; None computes them from x. round() rounds to the nearest
    element value, ties to even.

    If amax is NaN, the minimum is 448. If s is below 1e-5 or NaN, s is replaced by 1. A tensor whose scales are all
    below 1e-5 therefore becomes zero. Zeros are +0. A NaN element gives -6 s. dtype is not used.
    """
    gs = tensor_amax * (ONE / np.float32(E2M1.max * E4M3.max))
    gs = show("tensor scale", np.where(gs <= 0, np.float32(1e-12), gs))
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = amax_of(x, recipe, amax)
    scale = _e4m3(np.fmin(block / (E2M1.max * gs), E4M3.max)) * gs
    scale = show("factor to divide by", np.where(scale >= np.float32(1e-5), scale, ONE)[..., None])
    y = _round(np.abs(blocks) / scale, recipe) * scale
    return np.where(blocks >= 0, y, ZERO - y).reshape(x.shape)  # Triton negates by 0 - y, so zeros are +0


def nvfp4_modelopt_static(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as Model-Optimizer does with calibrated block amaxes: y = round(|x| / s) * s with the sign of x.

        a = tensor_amax * (448 / recipe.scale_max) / 6
        e = 1 / a * 448
        s = E4M3(clamp(amax / 6 * e, -448, 448)) * (1 / e)

    s is the scale of a block, and amax the calibrated amax of the block. So s is amax / 6 fake-quantized to FP8, as the
    recipe fp8-modelopt does it with the tensor amax a. If a is at most 2^-24, it is replaced by 1. If s is 0, y is 0.
    If s is infinite or NaN, it is replaced by 1. Zeros are +0. A NaN element gives -6 s. dtype is not used.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = amax_of(x, recipe, amax)
    outer = tensor_amax * np.float32(E4M3.max / recipe.scale_max) / E2M1.max
    tensor_encode = show("tensor encode scale", ONE / np.where(outer <= TINY_AMAX, ONE, outer) * E4M3.max)
    scale = _e4m3(np.clip(block / E2M1.max * tensor_encode, -E4M3.max, E4M3.max)) * (ONE / tensor_encode)
    scale = show("factor to divide by", np.where(np.isfinite(scale), scale, ONE)[..., None])
    y = _round(np.abs(blocks) / np.where(scale == 0, ONE, scale), recipe) * scale
    return np.where(blocks >= 0, y, ZERO - y).reshape(x.shape)  # Triton negates by 0 - y, so zeros are +0


def nvfp4_modelopt_cuda(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as Model-Optimizer's CUDA kernel does: y = round(|x| * (1 / s)) * s with the sign of x.

        s = E4M3((amax / 6) * t) / t,   t = 448 * (6 / tensor_amax)

    s is the scale of a block, and amax its largest magnitude. t and s are float64; 1 / s and s are then rounded to
    float32. An infinite or NaN amax counts as FLT_MAX. If amax is 0, or if tensor_amax is 0, infinite or NaN, s is
    replaced by 1. If s is 0, y is 0. -0 gives +0, and a NaN element gives 6 s. dtype is not used.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = np.fmin(amax_of(x, recipe, amax), FLT_MAX)
    t = show("tensor encode scale", np.float64(448) * (E2M1.max / tensor_amax).astype(np.float64))
    u = _e4m3(((block / E2M1.max).astype(np.float64) * t).astype(np.float32)).astype(np.float64) / t
    valid = (block > 0) & np.isfinite(block) & (tensor_amax > 0) & np.isfinite(tensor_amax)
    scale = show("factor to multiply by", np.where(valid, (1 / u).astype(np.float32), ONE)[..., None])
    unscale = np.where(valid, u.astype(np.float32), ONE)[..., None]
    y = np.where(unscale == 0, ZERO, _round(np.abs(blocks) * scale, recipe) * unscale)
    return np.where(blocks < 0, -y, y).reshape(x.shape)


def mx_modelopt(x: Array, recipe: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as Model-Optimizer's CUDA kernel for MX formats does: y = round(|x| / s) * s with the sign of x.

    s, the scale of a block, is amax / M rounded up to a power of two and clamped to [2^-127, 2^127], or 1 if amax is 0.
    M is the largest element value. The amax leaves out NaN elements, and an infinite amax counts as FLT_MAX. -0 gives
    +0. The producer leaves NaN elements undefined; here they give NaN, or the largest value times s in a format without
    NaN. tensor_amax and dtype are not used.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = np.fmin(amax_of(x, recipe, amax), FLT_MAX)
    codes = np.where(block == 0, np.uint8(127), encode_e8m0_scale(block / recipe.element.max))
    codes = show("block scale", codes, E8M0)
    factor = show("factor to multiply by", inverse_e8m0(codes))
    y = _round(np.abs(blocks) * factor[..., None], recipe) * decode(codes, E8M0)[..., None]
    return np.where(blocks < 0, -y, y).reshape(x.shape)


def int_modelopt(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x to integers as Model-Optimizer does: y = clip(rint(x * e), low, M) / e, e = M / tensor_amax.

    M is the largest element value; low is -M if recipe.narrow is set, otherwise -M - 1. -0 and NaN are kept. amax and
    dtype are not used.

    - If tensor_amax is at most 2^-24, y is +0, as in the producer's CUDA code. But if the recipe has one scale per
      block, y is 0 * x, as in the producer's PyTorch code: a zero with the sign of x, or NaN if x is infinite or NaN.
    - If tensor_amax is infinite or NaN, all elements that it covers (of a tensor, row or block) become NaN.
    """
    zero = (tensor_amax <= TINY_AMAX)[..., None]
    scale = np.where(zero, ONE, recipe.element.max / tensor_amax[..., None])
    low = -recipe.element.max - (not recipe.narrow)
    blocks = _tensor_blocks(x, recipe)
    y = np.clip(np.rint(blocks * scale), low, recipe.element.max) / scale
    nothing = ZERO * blocks if recipe.tensor_scaling == "block" else ZERO
    return np.where(zero, nothing, y).reshape(x.shape)


def int4_qat(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x to 4-bit integers as training stacks do for QAT: y = clip(rint(x / s), -7, 7) * s.

    s is the scale: max(tensor_amax * fp32(1 / 7), 1e-5). A tensor_amax may cover the tensor, a row or a block. -0 and
    NaN elements are kept. If a tensor_amax is infinite or NaN, all elements that it covers become NaN. amax and dtype
    are not used.
    """
    scale = np.maximum(tensor_amax * (ONE / recipe.element.max), np.float32(1e-5))[..., None]
    y = np.clip(np.rint(_tensor_blocks(x, recipe) / scale), -recipe.element.max, recipe.element.max) * scale
    return y.reshape(x.shape)


def _tensor_blocks(x: Array, recipe: Recipe) -> Array:
    """Return x (m, k) as (m, blocks, block), or as (m, 1, k) if the recipe has no blocks."""
    # The result is a view if x is contiguous. k must be a multiple of the block.
    # If m is 0, or if k is 0 and the recipe has no blocks, NumPy cannot infer the number of blocks and raises
    # ValueError.
    return x.reshape(len(x), -1, recipe.block_size if recipe.block else x.shape[1])


def _log2_floor(x: Array, dtype: Dtype) -> Array:
    """Return floor(log2(x)) of x >= 0 as float32; log2 is first rounded to float32 and then to dtype."""
    # Because of the rounding, the result is one too large for x just below a power of two. x = 0 gives -inf, inf gives
    # inf, and NaN gives NaN.
    with np.errstate(divide="ignore"):
        return np.floor(round_to(np.log2(x.astype(np.float64)).astype(np.float32), dtype))


def _exp2(exponent: Array, dtype: Dtype) -> Array:
    """Return 2^exponent for integer exponents, which are stored as floats. The float32 result is rounded to dtype."""
    return round_to(np.ldexp(np.float32(1), exponent.astype(np.int32)), dtype)


def _microxcaling(round_magnitude: Callable[[Array, Dtype], Array], flush: bool = False) -> Callable[..., Array]:
    """Return the fake quantizer of microxcaling for a rounding mode: y = round(x / s) * s."""

    def rule(x: Array, recipe: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
        """Fake-quantize x as microxcaling does: y = round(x / s) * s, with s = 2^(floor(log2(amax)) - emax).

        Every operation is rounded to dtype. emax is the exponent of the largest element value. log2 is rounded too, so
        its floor is one too large just below a power of two. If the exponent of s is above 127, as for an infinite
        amax, or if amax is NaN, the block becomes NaN. An exponent below -127 is replaced by -127. Elements saturate,
        and -0 becomes +0. In float16, blocks of zeros give NaN (0 / 0). tensor_amax is not used.
        """
        element = recipe.element
        blocks = x.reshape(len(x), -1, recipe.block_size)
        block = amax_of(x, recipe, amax)
        tiny = round_to(np.float32(2.0**-126), dtype)
        shared = _log2_floor(np.where(block == 0, block + tiny, block), dtype)
        blocks = np.where((shared <= -127)[..., None], ZERO, blocks) if flush else blocks
        exponent = show("exponent of the scale", shared - np.float32(element.emax))
        exponent = np.where(exponent > 127, np.nan, np.maximum(exponent, -127))
        scale = np.where(np.isnan(exponent), np.nan, _exp2(np.nan_to_num(exponent), dtype)).astype(np.float32)[
            ..., None
        ]
        scaled = show("element / factor", round_to(blocks / show("factor to divide by", scale), dtype))
        a = np.abs(scaled)
        private = _log2_floor(np.where(a == 0, ONE, a), dtype)
        private = np.nan_to_num(np.maximum(private, np.float32(element.emin)), posinf=127)
        step = power_of_two((private - element.mantissa_bits).astype(np.int32))
        rounded = round_to(round_magnitude(round_to(a / step, dtype), dtype) * step, dtype)
        rounded = show("magnitude of the element value", np.minimum(rounded, element.max))
        y = round_to(np.where(np.isinf(a), a, rounded) * scale, dtype)
        return np.where(scaled < 0, -y, y).reshape(x.shape)

    return rule


def _half_away(v: Array, dtype: Dtype) -> Array:
    """Return v >= 0 rounded to the nearest integer, ties up: floor(v + 0.5), as microxcaling's mode "nearest" does."""
    return np.floor(round_to(v + np.float32(0.5), dtype))


def _half_even(v: Array, dtype: Dtype) -> Array:
    """Return v >= 0 rounded to the nearest integer, ties to even, as microxcaling's mode "even" does."""
    return _half_away(v, dtype) - ((v - np.float32(0.5)) % 2 == 0)


microxcaling_nearest = _microxcaling(_half_away)
microxcaling_nearest_flush = _microxcaling(_half_away, flush=True)
microxcaling_even = _microxcaling(_half_even)
microxcaling_floor = _microxcaling(lambda v, dtype: np.floor(v))


def fp_quant(x: Array, recipe: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as FP-Quant does with method abs_max: y = round(x / s) * s, s = 2^(floor(log2(amax)) - 2) / 0.75.

    s is the scale of a block. amax holds the block amaxes; None computes them from x. round() saturates, and ties go
    toward zero. log2 is rounded to float32.

    Every zero of x gives -0. If amax is below 2^-124, s is 0, and nonzero elements give a zero with the sign of x. If
    amax is infinite or NaN, the whole block is NaN. tensor_amax and dtype are not used.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = amax_of(x, recipe, amax)
    exponent = np.floor(show("log2 of the amax", log2(np.where(np.isfinite(block), block, ONE)))) - np.float32(2)
    power = np.where(exponent < -126, ZERO, np.ldexp(ONE, np.clip(exponent, -126, 127).astype(np.int32)))
    scale = np.where(np.isfinite(block), power / np.float32(0.75), np.float32(np.nan))
    scale = show("factor to divide by", scale.astype(np.float32))[..., None]
    codes = encode(blocks / scale, recipe.element, "rnz", "not_positive", recipe.element.sign_bit)
    return (decode(show("code", codes, recipe.element), recipe.element) * scale).reshape(x.shape)


def nvfp4_fp_quant(x: Array, recipe: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as FP-Quant does for NVFP4 with method abs_max: y = round(x * 3 / s) * s / 3.

        s = E4M3(amax * 3 / 6)

    s is the scale of a block, and amax its largest magnitude. 3 is FP-Quant's global scale. Operations are rounded from
    left to right, and divisions are those of PTX div.full.f32. round() saturates, and ties go toward zero. Every zero
    of x gives -0. If s underflows to 0, y is +0 where x is positive and -0 elsewhere. If amax is infinite or NaN, the
    whole block is NaN. y is float32. tensor_amax and dtype are not used.
    """
    blocks = x.reshape(len(x), -1, recipe.block_size)
    block = amax_of(x, recipe, amax)
    scale = divide_full(block * FP_QUANT_GLOBAL, recipe.element.max)
    scale = show("factor to divide by", _e4m3(np.where(np.isfinite(block), scale, np.float32(np.nan))))[..., None]
    scaled = divide_full(blocks * FP_QUANT_GLOBAL, scale)
    codes = encode(scaled, recipe.element, "rnz", "not_positive", recipe.element.sign_bit)
    values = decode(show("code", codes, recipe.element), recipe.element) * scale
    return divide_full(values, FP_QUANT_GLOBAL).reshape(x.shape)


def clip_gradient(grad: Array, x: Array, amax: Array) -> Array:
    """Return the straight-through gradient with clipping: grad where |x| <= amax, and 0 elsewhere.

    Where x or amax is NaN, the result is 0. amax is float32 and is not rounded to the dtype of x. The result has the
    dtype of grad.
    """
    with np.errstate(all="ignore"):
        return np.where(np.abs(x).astype(np.float32) <= amax, grad, np.zeros((), grad.dtype))


_TOP = np.float32(6.0 / (17 / 16 * 0.93))  # the element value to which the amax of a block is scaled, about 6.07
_SCALE_TOP = np.float32(255.99)  # the block scale of the block with the tensor's amax


def ms_eden(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype, random: Array) -> Array:
    """Fake-quantize x as MS-EDEN does for NVFP4: q * s * D, computed from left to right.

        D = tensor_amax / 255.99 / t, or 1 if tensor_amax is 0,   t = float32(6 / (17/16 * 0.93))
        c = E4M3(amax / t / D), or 1 if c is 0
        y = x / (c * D),   q = y rounded to E2M1, ties away from zero
        k = (sum of y * y) / (sum of y * q) over a row of 32 elements, or 1 if the divisor is 0
        s = c * k, rounded to one of the two E4M3 values around it

    The upper value is taken if random < (c * k - lower) / (upper - lower). Divisions are those of PTX div.full.f32.
    Sums add in the order of the elements.

    -0 counts as +0. A zero q is +0 if y is positive, otherwise -0. An infinite or NaN element makes its row of 32
    NaN, and an infinite or NaN tensor_amax makes everything NaN. c * k above 448 gives 448. dtype is not used.

    random: float32 (m, blocks), at least 0 and below 1.
    """
    return _ms_eden(x, recipe, tensor_amax, amax, random, integers=False)


def ms_eden_if4(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, dtype: Dtype, random: Array) -> Array:
    """Fake-quantize x as MS-EDEN does for IF4: as ms_eden, but a block may be rounded to integers instead of E2M1.

    With integers, q is i * float32(6/7), where i is y * float32(7/6), limited to -7 to 7 and rounded to an integer,
    ties to even. A zero i has the sign of y. A block gets integers if its sum of (y - q) * (y - q) is then strictly
    smaller than with E2M1. dtype is not used.

    random: float32 (m, blocks), at least 0 and below 1.
    """
    return _ms_eden(x, recipe, tensor_amax, amax, random, integers=True)


def _ms_eden(x: Array, recipe: Recipe, tensor_amax: Array, amax: Array | None, random: Array, integers: bool) -> Array:
    """Return the result of ms_eden or, if integers is True, of ms_eden_if4."""
    blocks = x.reshape(len(x), -1, recipe.block_size) + ZERO
    amax = amax_of(x, recipe, amax)
    tensor = divide_full(divide_full(tensor_amax, _SCALE_TOP), _TOP)
    tensor = show("tensor scale", np.where(tensor_amax == 0, ONE, tensor))
    scale = decode(encode_e4m3_scale(divide_full(divide_full(amax, _TOP), tensor)), E4M3)
    scale = show("block scale before the correction", np.where(scale == 0, ONE, scale))
    factor = show("factor to divide by", scale * tensor)
    y = show("element / factor", divide_full(blocks, factor[..., None]))
    q = decode(encode(y, recipe.element, "rna", "not_positive", recipe.element.sign_bit), recipe.element)
    if integers:
        i = np.rint(np.clip(y * np.float32(7 / 6), -INT4.max, INT4.max)) * IF4_INTEGER_STEP
        better = _sum((y - i) * (y - i)) < _sum((y - q) * (y - q))
        q = np.where(better[..., None], i, q)
    q = show("element value", q)
    row = (len(x), -1, fake_unit(recipe))
    squares, products = _sum((y * y).reshape(row)), _sum((y * q).reshape(row))
    k = show("correction", np.where(products == 0, ONE, divide_full(squares, products)))
    corrected = scale * np.repeat(k, row[2] // recipe.block_size, axis=1)
    stored = show("block scale", _rounded(show("corrected block scale", corrected), random))
    return (q * stored[..., None] * tensor[..., None]).reshape(x.shape)


def _sum(terms: Array) -> Array:
    """Return the sums over the last axis, which must not be empty, added in order."""
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _rounded(scales: Array, random: Array) -> Array:
    """Return float32 scales >= 0 rounded stochastically to E4M3."""
    codes = encode(scales, E4M3)
    nearest = decode(codes, E4M3)
    below, above = (decode(codes + np.uint8(step), E4M3) for step in (255, 1))
    is_above = nearest > scales
    upper, lower = np.where(is_above, nearest, above), np.where(is_above, below, nearest)
    return np.where(random < divide_full(scales - lower, upper - lower), upper, lower)


FAKE_RULES: dict[str, Callable[..., Array]] = {
    name: getattr(ascend, name, None) or globals()[name] for name in rules.FAKE_RULES
}
