// Arithmetic of the fake quantizers (fake.cuh): scales, and functions that divide and round ordinary elements in few
// instructions.
#pragma once

#include "block.cuh"

// The scale of a fake quantizer. Elements are multiplied by `encode` before rounding and by `decode` after it. If a
// rule divides, one of the two fields is the divisor, and the other is the rounded reciprocal of the divisor. The
// reciprocal is NaN if quotient_by could give a wrong quotient with it. Rules that never use a reciprocal store the
// divisor in both fields.
struct FakeScale {
  float encode, decode;
};

// Return true if 2^-80 < x < 2^80.
FP4KIT_DEVICE bool is_moderate(float x) {
  return x > 0x1p-80f && x < 0x1p80f;
}

// Return 1 / divisor for quotient_by. Return NaN unless 2^-80 < divisor < 2^80, because quotient_by may be wrong for
// other divisors.
FP4KIT_DEVICE float safe_reciprocal(float divisor) {
  return is_moderate(divisor) ? 1.0f / divisor : nan_value();
}

// Return amax divided by the largest value of the format F, correctly rounded, for any amax.
template <class F>
FP4KIT_DEVICE float over_max(float amax) {
  return is_moderate(amax) ? quotient_by(amax, max_of<F>(), 1.0f / max_of<F>()) : amax / max_of<F>();
}

// Return the integer nearest to x, ties to even, for |x| < 2^22. A result of zero is +0.
FP4KIT_DEVICE float nearest_integer(float x) {
  return (x + 0x1.8p23f) - 0x1.8p23f;
}

// Return floor(x) for 0 <= x < 2^23, as +0 for x below 1.
FP4KIT_DEVICE float floor_of(float x) {
  return add_rz(x, 0x1p23f) - 0x1p23f;
}

// Return `magnitude`, which must not be negative, with the sign bit of x.
FP4KIT_DEVICE float with_sign_of(float magnitude, float x) {
  return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u));
}

// Return the value of the format F nearest to a >= 0, ties to even. Values above the largest value saturate. NaN gives
// the NaN of the format, or its largest value if the format has no NaN.
template <class F>
FP4KIT_DEVICE float nearest(float a) {
  return decode<F>(encode<F, Rounding::rn, Sign::signbit, F::kNanCode>(a));
}

// Return the value of the format F nearest to x, ties to even. x must not be NaN. If kClamp is false, |x| must be at
// most saturation(). A result of zero is +0.
//
// Let e be the exponent of max(|x|, 2^emin), and M the number of mantissa bits. Adding and subtracting 1.5 * 2^(e + 23
// - M) rounds x to the grid of the format.
template <class F, bool kClamp>
FP4KIT_DEVICE float nearest_finite(float x) {
  if constexpr (kClamp) x = fminf(fmaxf(x, -max_of<F>()), max_of<F>());
  const u32 e = bits_of(fmaxf(magnitude_of(x), float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * (1.5f * static_cast<float>(1 << (23 - F::kMantissaBits)));
  return (x + magic) - magic;
}

// Return the bound below which a number need not be clamped before it is rounded: half a step above the largest value,
// minus a margin for rounding errors of the number.
template <class F>
FP4KIT_DEVICE float saturation() {
  return (max_of<F>() + 0.5f * float_of(static_cast<u32>(F::kEmax - F::kMantissaBits + 127) << 23)) * (1.0f - 0x1p-10f);
}

// Return true if elements times s.encode need no clamp, for elements whose magnitude is at most float_of(largest).
// Return false if such a product is NaN. If R::kStatic, the caller gave the amax and nearest_finite clamps, so the
// products must only be far from overflow. (There, the given amax is often smaller than the largest element.)
template <class R>
FP4KIT_DEVICE bool has_small_products(u32 largest, FakeScale s) {
  return float_of(largest) * s.encode < (R::kStatic ? 0x1p80f : saturation<typename R::Element>());
}
