"""Quantize by rules that compute scales and codes together: HiFloat4, AMCT and msmodelslim, which are for Ascend NPUs.

Magnitudes and elements are float32 (m, blocks, block). r() rounds to the dtype in which a producer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import E4M3, E6M2, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, ZERO, Array, Dtype, round_to, sum_lanes
from fp4kit.reference.codec import amax_of, joined_scales, powers_of, show

Rounding = Callable[[Array], Array]
BFLOAT16, FLOAT32, FLOAT64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
HALF = np.float32(0.5)
TINY = np.float32(9.6e-7)  # is added before a logarithm, by HiFloat4 and msmodelslim
CEIL_X = 7.25  # the usual constant of msmodelslim's ceil_x


def _rounds_to(dtype: Dtype) -> Rounding:
    return np.asarray if dtype == FLOAT64 else lambda a: round_to(np.asarray(a, np.float32), dtype)


def _log2(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(np.float32)


def power_of_two(exponent: Array) -> Array:
    """Return 2^exponent for integer exponents as float32; NaN and infinities are kept."""
    finite = np.isfinite(exponent)
    return np.where(finite, np.ldexp(ONE, np.where(finite, exponent, ZERO).astype(np.int32)), np.abs(exponent))


# ---- HiF4: an E6M2 scale per block, and levels of one-bit exponents below it ----


class Hif4(NamedTuple):
    """The scales of HiF4 blocks, and the magnitudes of elements under them, which are multiples of a step.

    scale: (m, blocks). codes: the E6M2 codes of the scales. exponents: one array of bits (m, blocks, block / columns)
    per level. magnitudes: (m, blocks, block).
    """

    scale: Array
    codes: Array
    exponents: list[Array]
    magnitudes: Array


def hif4(a: Array, r: Recipe, dtype: Dtype, amax: Array | None = None, finite: Array | None = None) -> Hif4:
    """Return the scales and magnitudes of HiF4 for |x|, where HiFloat4 computes in `dtype`.

        s = E6M2(clamp(bf16(amax of the block * bf16(1/7)), 2^-48, 49152)),  i = bf16(1 / s)
        bit of a level = (amax of its elements * i / 2^(bits of the levels above) reaches 2^(levels from here down))
        t = |x| / 2^bits * i, rounded to the nearest magnitude of the element, ties away from zero

    7 is 1.75 * 2^(levels of bits). A block with NaN has scale NaN.

    amax: the amaxes of the blocks; None computes them.
    finite: None for HiFloat4. For AMCT, which blocks have a scale; it also rounds |x| * i to bfloat16 first.
    """
    r_, bf16, levels = _rounds_to(dtype), _rounds_to(BFLOAT16), r.exponent_levels
    largest = show("block amax", a.max(-1) if amax is None else amax)
    s = r_(bf16(largest * bf16(ONE / np.float32(1.75 * 2 ** len(levels)))))
    s = show("block scale before rounding", np.minimum(np.maximum(s, r_(np.float32(2.0**-48))), E6M2.max))
    exponent = np.frexp(s)[1] - 1
    s = r_(np.ldexp(np.rint(np.ldexp(s, 2 - exponent)), exponent - 2))
    has_scale = ~np.isnan(s) if finite is None else finite
    codes = np.where(has_scale, np.searchsorted(E6M2.magnitudes, s), E6M2.nan_code).astype(np.uint8)
    show("block scale", codes, E6M2) if dtype == FLOAT32 else show("block scale", s)
    inverse = show("factor to multiply by", r_(bf16(ONE / s)))[..., None]
    bits: list[Array] = []
    divided = a
    for below, level in zip(range(len(levels), 0, -1), levels, strict=True):
        shape = (*a.shape[:2], -1, level.columns)
        scaled = r_(a.reshape(shape).max(-1) * inverse)
        for above, bit in zip(levels, bits, strict=False):
            scaled = r_(scaled / powers_of(bit, above.columns // level.columns))
        bits.append(show(f"exponent bit per {level.columns}", scaled >= 2.0**below))
        divided = r_(divided / powers_of(bits[-1], level.columns))
    y = show("scaled magnitude", r_(divided * inverse))
    y = y if finite is None else show("scaled magnitude in bfloat16", round_to(y, BFLOAT16))
    step = np.float32(2**r.element.mantissa_bits)
    t = r_(np.floor(r_(r_(step * y) + HALF)) / step)
    return Hif4(s, codes, bits, np.where(t >= 2, r.element.max, t))


def quantize_hif4(blocks: Array, r: Recipe, amax: Array | None) -> tuple[Array, Array]:
    """Return the codes (m, blocks, block) and the scale bytes (m, blocks * r.scale_bytes) of HiF4.

    AMCT counts infinities and NaN as 0, and gives their block the scale NaN.
    """
    is_amct, finite = r.block_rule == "hif4_amct", np.isfinite(blocks)
    x = np.where(finite, blocks, ZERO) if is_amct else blocks
    found = hif4(np.abs(x), r, FLOAT32, amax, finite.all(-1) if is_amct else None)
    steps = np.nan_to_num(found.magnitudes * np.float32(2**r.element.mantissa_bits))
    codes = steps.astype(np.uint8) | np.where(x < 0, np.uint8(r.element.sign_bit), np.uint8(0))
    return show("code", codes, r.element), joined_scales(found.codes, found.exponents)


def hif4_native(x: Array, r: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as HiFloat4 does without force_fp32: every operation is rounded to dtype.

    In float16, 2^-48 is 0, so that a block of zeros gives NaN. The sign of NaN is not HiFloat4's, but always plus.
    """
    r_, blocks = _rounds_to(dtype), x.reshape(len(x), -1, r.block_size)
    found = hif4(np.abs(blocks), r, dtype)
    y = np.sign(blocks) * found.magnitudes
    for level, bits in zip(r.exponent_levels, found.exponents, strict=True):
        y = r_(y * powers_of(bits, level.columns))
    y = np.asarray(r_(y * found.scale[..., None]), np.float32)
    return np.where(np.isnan(y), np.float32(np.nan), y).reshape(x.shape)  # NumPy's sign depends on the shape


def hif4_float64(x: Array, r: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as HiFloat4's NumPy script does: elements are scaled and rounded in float64."""
    return hif4_native(x.astype(np.float64), r, tensor_amax, amax, FLOAT64)


# ---- HiFloat4's NVFP4 and MX formats ----


def nvfp4_hifloat4_native(x: Array, r: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x to NVFP4 with one level of scales, as HiFloat4 does: every operation is rounded to dtype.

    Logarithms decide exponents, after 2^-45 is added (2^-14 in float16).
    """
    r_, blocks = _rounds_to(dtype), x.reshape(len(x), -1, r.block_size)
    tiny = np.float32(2.0**-14 if dtype == np.float16 else 2.0**-45)
    s = r_(amax_of(x, r, amax) / r.element.max)
    s = show("block scale before rounding", np.minimum(s, E4M3.max))
    exponent = np.nan_to_num(np.maximum(np.floor(r_(_log2(r_(s + tiny)))), -6)).astype(np.int32)
    s = show("factor to divide by", r_(np.ldexp(np.rint(r_(np.ldexp(s, 3 - exponent))), exponent - 3))[..., None])
    y = r_(np.abs(blocks) / s)
    y = np.where(np.isfinite(y), y, r.element.max)
    exponent = np.clip(np.floor(r_(_log2(r_(y + tiny)))), 0, 2).astype(np.int32)
    magnitude = np.minimum(r_(np.ldexp(np.rint(r_(np.ldexp(y, 1 - exponent))), exponent - 1)), r.element.max)
    return r_(r_(np.sign(blocks) * magnitude) * s).reshape(x.shape)


def _elements(a: Array, e: ElementFormat, r_: Rounding) -> Array:
    """Return scaled magnitudes rounded to those of a float format: floor(a / step + 1/2) * step, saturated."""
    exponent = np.clip(np.floor(r_(_log2(r_(a + r_(TINY))))), e.emin, e.emax)
    power, steps = power_of_two(np.nan_to_num(exponent)), np.float32(2**e.mantissa_bits)
    magnitude = r_(r_(np.floor(r_(r_(r_(a * steps) / power) + HALF)) / steps) * power)
    return np.minimum(magnitude, e.max)


def hifloat4_exponent(amax: Array, e: ElementFormat, dtype: Dtype) -> Array:
    """Return the exponents of HiFloat4's MX scales: floor(log2(amax + 9.6e-7)) - emax, at most 127 - emax."""
    r_ = _rounds_to(dtype)
    exponent = np.floor(r_(_log2(r_(amax + r_(TINY))))) - np.float32(e.emax)
    return np.clip(exponent, -127 - e.emax, 127 - e.emax)


def mx_hifloat4_native(x: Array, r: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x to an MX format as HiFloat4 does: every operation is rounded to dtype."""
    r_, e, blocks = _rounds_to(dtype), r.element, x.reshape(len(x), -1, r.block_size)
    exponent = show(
        "exponent of the scale",
        hifloat4_exponent(amax_of(x, r, amax), e, dtype),
    )
    power = show("factor to divide by", r_(power_of_two(exponent)))[..., None]
    magnitude = _elements(r_(np.abs(blocks) / power), e, r_)
    return r_(r_(np.sign(blocks) * magnitude) * power).reshape(x.shape)


def _in_float32(rule: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, r, tensor_amax, amax, dtype: rule(x, r, tensor_amax, amax, FLOAT32)


nvfp4_hifloat4, mx_hifloat4 = map(_in_float32, (nvfp4_hifloat4_native, mx_hifloat4_native))  # with force_fp32


# ---- msmodelslim ----


class Scaled(NamedTuple):
    """Blocks under powers of two: exponents (m, blocks), which may be NaN or infinite, and element values."""

    exponent: Array
    values: Array

    def decoded(self, dtype: Dtype) -> Array:
        """Return the values times the powers of two, which are rounded to dtype."""
        return self.values * round_to(power_of_two(self.exponent), dtype)[..., None]


def under_power(blocks: Array, exponent: Array, r: Recipe, dtype: Dtype) -> Scaled:
    """Return MXFP4 blocks under 2^exponent: ties away from zero, computed in float32."""
    power = show("factor to divide by", round_to(power_of_two(exponent), dtype))[..., None]
    scaled = show("element / factor", blocks / power)
    values = np.sign(blocks) * _elements(np.abs(scaled), r.element, _rounds_to(FLOAT32))
    return Scaled(exponent, np.where((exponent < -127)[..., None], ZERO * values, values))


def _log2_amax(amax: Array, divisor: float, dtype: Dtype) -> Array:
    r_ = _rounds_to(dtype)
    return r_(_log2(r_(r_(amax / np.float32(divisor)) + r_(TINY))))


def minmax_exponent(amax: Array, dtype: Dtype) -> Array:
    """Return the exponent of the power of two at or below amax / 3.5: floor(log2(amax / 0.875 + 9.6e-7)) - 2."""
    return np.clip(np.floor(_log2_amax(amax, 0.875, dtype)) - np.float32(2), -129, 125)


def _msmodelslim(blocks: Array, amax: Array, r: Recipe, dtype: Dtype) -> Scaled:
    return under_power(blocks, minmax_exponent(amax, dtype), r, dtype)


def msmodelslim_ceil_x(blocks: Array, amax: Array, r: Recipe, dtype: Dtype, constant: float = CEIL_X) -> Scaled:
    """Scale by the power of two at or above amax / constant."""
    return under_power(blocks, ceil_x_exponent(amax, constant, dtype), r, dtype)


def ceil_x_exponent(amax: Array, constant: float, dtype: Dtype) -> Array:
    """Return the exponents of the scales of ceil_x: ceil(log2(amax / constant + 9.6e-7)), clipped to [-129, 125]."""
    return np.clip(np.ceil(_log2_amax(amax, constant, dtype)), -129, 125)


def amax_of_ceil_x(exponent: Array) -> Array:
    """Return amaxes that give these exponents by msmodelslim_ceil_x, in every dtype: those of 0.75 * 2^exponent."""
    return np.maximum(np.float32(0.75) * power_of_two(exponent) - TINY, ZERO) * np.float32(CEIL_X)


def squared_error(blocks: Array, found: Scaled, dtype: Dtype) -> Array:
    """Return the squared error per element, where every operation is rounded to dtype."""
    r_ = _rounds_to(dtype)
    return r_(np.square(r_(blocks - r_(found.decoded(dtype)))))


def _error(blocks: Array, found: Scaled, dtype: Dtype) -> Array:
    """Return the mean squared error per block, where every operation is rounded to dtype."""
    return round_to(sum_lanes(squared_error(blocks, found, dtype)) / np.float32(blocks.shape[-1]), dtype)


def choose_4over6(blocks: Array, amax: Array, r: Recipe, dtype: Dtype) -> Scaled:
    """Try the powers of two nearest to amax / 6 and amax / 4, and keep the latter if its error is smaller."""
    r_, found = _rounds_to(dtype), []
    for top in (6, 4):
        s = r_(amax / np.float32(top))
        log = r_(_log2(np.where(s <= 0, ONE, s)))
        below = np.floor(log)
        fraction, margin = r_(log - below), np.float32(1e-6)
        odd = np.where(below % 2 == 0, below + 1, below)  # a logarithm halfway goes to the odd neighbor
        near = np.where(fraction < r_(HALF - margin), below, odd)
        exponent = np.where(fraction > r_(HALF + margin), below + 1, near)
        found.append(under_power(blocks, np.where(np.isinf(log), log, exponent).astype(np.float32), r, dtype))
    six, four = found
    return _smaller(six, four, ~(_error(blocks, four, dtype) >= _error(blocks, six, dtype)))


def _smaller(usual: Scaled, other: Scaled, is_better: Array) -> Scaled:
    values = np.where(is_better[..., None], other.values, usual.values)
    return Scaled(np.where(is_better, other.exponent, usual.exponent), values)


def fp8_exponent(amax: Array, e: ElementFormat, dtype: Dtype, rounding: Rounding = np.floor) -> Array:
    """Return log2 of the amax rounded by `rounding`, minus the exponent of the largest element: NaN above 127."""
    r_ = _rounds_to(dtype)
    log = r_(_log2(r_(np.where(amax == 0, r_(np.float32(2.0**-126)), amax))))
    exponent = rounding(log) - np.float32(e.emax)
    return np.where(exponent > 127, np.float32(np.nan), np.maximum(exponent, -127))


def _fp8(blocks: Array, amax: Array, r: Recipe, dtype: Dtype, rounding: Rounding = np.floor) -> Scaled:
    return fp8_under_power(blocks, fp8_exponent(amax, r.element, dtype, rounding), r, dtype)


def fp8_under_power(blocks: Array, exponent: Array, r: Recipe, dtype: Dtype) -> Scaled:
    """Return MXFP8 blocks under 2^exponent: ties away from zero, computed in float32."""
    r_, e = _rounds_to(dtype), r.element
    power = show("factor to divide by", r_(power_of_two(exponent)))[..., None]
    y = show("element / factor", np.where(blocks == 0, ZERO, blocks / power))
    a = np.abs(y)
    power = power_of_two(np.maximum(np.floor(_log2(np.where(a == 0, ONE, a))), e.emin))
    steps = np.float32(2**e.mantissa_bits)
    magnitude = np.floor(a / power * steps + HALF) / steps * power
    return Scaled(exponent, np.sign(y) * np.where(np.isinf(a), a, np.minimum(magnitude, e.max)))


def choose_mse(blocks: Array, amax: Array, r: Recipe, dtype: Dtype) -> Scaled:
    """Try both neighbors of the exponent, and keep the larger one if its error is smaller."""
    down, up = _fp8(blocks, amax, r, dtype), _fp8(blocks, amax, r, dtype, np.ceil)
    larger, usual = _error(blocks, up, dtype), _error(blocks, down, dtype)
    return _smaller(down, up, np.isfinite(larger) & ((larger < usual) | ~np.isfinite(usual)))


# {Recipe.search: the function that chooses the exponent of each block}
CHOICES: dict[str, Callable[[Array, Array, Recipe, Dtype], Scaled]] = {
    "msmodelslim_4over6": choose_4over6,
    "msmodelslim_mse": choose_mse,
}


def power_exponent(amax: Array, e: ElementFormat) -> Array:
    """Return floor(log2(amax)), which the searches of CHOICES give as powers of two. NaN and infinity are kept.

    E2M1: an amax of 0 gives 0. E4M3: at least -127, also for 0.
    """
    exponent = np.where(np.isfinite(amax), np.frexp(amax)[1] - np.float32(1), amax).astype(np.float32)
    if e == E4M3:
        return np.where(amax == 0, np.float32(-127), np.maximum(exponent, -127))
    return np.where(amax == 0, ZERO, exponent)


def _power(blocks: Array, amax: Array, r: Recipe, dtype: Dtype) -> Scaled:
    under = fp8_under_power if r.element == E4M3 else under_power
    return under(blocks, power_exponent(amax, r.element), r, dtype)


SCALED: dict[str, Callable[[Array, Array, Recipe, Dtype], Scaled]] = {
    "e8m0_msmodelslim": _msmodelslim,
    "e8m0_msmodelslim_ceil_x": msmodelslim_ceil_x,
    "e8m0_msmodelslim_fp8": _fp8,
    "e8m0_msmodelslim_power": _power,
}


def scaled_msmodelslim(blocks: Array, r: Recipe, dtype: Dtype, amax: Array | None = None) -> Scaled:
    """Return msmodelslim's blocks. amax: their amaxes; None computes them."""
    name = "amax of the searched scale" if r.search else "block amax"
    amax = show(name, np.abs(blocks).max(-1) if amax is None else amax)
    return SCALED[str(r.block_rule)](blocks, amax, r, dtype)


def mx_msmodelslim(x: Array, r: Recipe, tensor_amax: Array | None, amax: Array | None, dtype: Dtype) -> Array:
    """Fake-quantize x as msmodelslim does: element values times powers of two that are rounded to dtype."""
    return scaled_msmodelslim(x.reshape(len(x), -1, r.block_size), r, dtype, amax).decoded(dtype).reshape(x.shape)


def scale_bytes(exponent: Array) -> Array:
    """Return the bytes of exponents as msmodelslim stores them: exponent + 127, or 0 if it is NaN or infinite."""
    return np.where(np.isfinite(exponent), exponent + 127, 0).astype(np.int64).astype(np.uint8)


def inverse_power(exponent: Array, dtype: Dtype) -> Array:
    """Return 1 / 2^exponent, where the power is rounded to dtype; 2^127 if that is 0, as every element then saturates.

    NaN gives NaN. It is 0 for a power that is infinite in dtype.
    """
    power = round_to(power_of_two(exponent), dtype)
    return np.where(power == 0, np.float32(2.0**127), ONE / power)
