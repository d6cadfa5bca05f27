// Arithmetic of the fake quantizers (fake.cuh): scales, and quotients and roundings of ordinary elements in few
// instructions.
#pragma once

#include "block.cuh"

// The scale of a fake quantizer. `encode` multiplies elements before rounding, `decode` after it. If a rule divides,
// one of them is the divisor and the other its rounded reciprocal, or NaN if quotients by way of the reciprocal could
// be wrong.
struct FakeScale {
  float encode, decode;
};

// Return whether 2^-80 < x < 2^80.
FP4KIT_DEVICE bool is_moderate(float x) {
  return x > 0x1p-80f && x < 0x1p80f;
}

// Return 1 / divisor if quotient_by may use it, else NaN.
FP4KIT_DEVICE float safe_reciprocal(float divisor) {
  return is_moderate(divisor) ? 1.0f / divisor : nan_value();
}

// Return amax divided by the largest value of a format, for any amax.
template <class F>
FP4KIT_DEVICE float over_max(float amax) {
  return is_moderate(amax) ? quotient_by(amax, max_of<F>(), 1.0f / max_of<F>()) : amax / max_of<F>();
}

// Return the integer nearest to x, ties to even, for |x| < 2^22. Zero is +0.
FP4KIT_DEVICE float nearest_integer(float x) {
  return (x + 0x1.8p23f) - 0x1.8p23f;
}

// Return floor(x) for 0 <= x < 2^23.
FP4KIT_DEVICE float floor_of(float x) {
  return add_rz(x, 0x1p23f) - 0x1p23f;
}

// Return the magnitude with the sign bit of x.
FP4KIT_DEVICE float with_sign_of(float magnitude, float x) {
  return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u));
}

// Return the value of a format nearest to a >= 0, ties to even, by way of its code. Saturates. NaN gives the format's
// NaN, or its largest value if it has none.
template <class F>
FP4KIT_DEVICE float nearest(float a) {
  return decode<F>(encode<F, Rounding::rn, Sign::signbit, F::kNanCode>(a));
}

// Return the value of a format nearest to x, ties to even. x is not NaN, and |x| is at most saturation() unless kClamp.
// Zero is +0. With e the exponent of max(|x|, 2^emin), adding and subtracting 1.5 * 2^(e + 23 - M) rounds x to the
// grid.
template <class F, bool kClamp>
FP4KIT_DEVICE float nearest_finite(float x) {
  if constexpr (kClamp) x = fminf(fmaxf(x, -max_of<F>()), max_of<F>());
  const u32 e = bits_of(fmaxf(magnitude_of(x), float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * (1.5f * static_cast<float>(1 << (23 - F::kMantissaBits)));
  return (x + magic) - magic;
}

// Return half a step above the largest value, less a margin for the rounding of the number that is compared with it.
template <class F>
FP4KIT_DEVICE float saturation() {
  return (max_of<F>() + 0.5f * float_of(static_cast<u32>(F::kEmax - F::kMantissaBits + 127) << 23)) * (1.0f - 0x1p-10f);
}

// Return whether the products of elements up to `largest` with s.encode need no clamp. If R is static, nearest_finite
// clamps, and the products must only be far from overflow, because a given amax is often below the largest element.
// False for NaN.
template <class R>
FP4KIT_DEVICE bool has_small_products(u32 largest, FakeScale s) {
  return float_of(largest) * s.encode < (R::kStatic ? 0x1p80f : saturation<typename R::Element>());
}
