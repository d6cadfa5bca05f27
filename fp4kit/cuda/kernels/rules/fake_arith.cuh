// Arithmetic of the fake quantizers (fake.cuh), which quantize and dequantize in one step: the scale of a block, and
// functions that divide and round in few instructions. R is the recipe, and F an element format (both are structs that
// cuda/compiler.py writes). amax is the largest magnitude of a block or tensor.
#pragma once

#include "block.cuh"

// The scale of a block in a fake quantizer. Elements are multiplied by `encode` before they are rounded, and by
// `decode` afterwards. If a rule divides instead, one of the two fields is the divisor, and the other is the rounded
// reciprocal of the divisor. The reciprocal is NaN if quotient_by could give a wrong quotient with it. Rules that never
// use a reciprocal store the divisor in both fields.
struct FakeScale {
  float encode, decode;
};

// Return true if 2^-80 < x < 2^80, and false for NaN.
FP4KIT_DEVICE bool is_moderate(float x) {
  return x > 0x1p-80f && x < 0x1p80f;
}

// Return the rounded 1 / divisor, the third argument of quotient_by, if 2^-80 < divisor < 2^80. Otherwise return NaN,
// because quotient_by may be wrong for such divisors.
FP4KIT_DEVICE float safe_reciprocal(float divisor) {
  return is_moderate(divisor) ? 1.0f / divisor : nan_value();
}

// Return the correctly rounded quotient of amax and the largest value of the format F. Any amax is allowed, including
// infinity and NaN.
template <class F>
FP4KIT_DEVICE float over_max(float amax) {
  return is_moderate(amax) ? quotient_by(amax, max_of<F>(), 1.0f / max_of<F>()) : amax / max_of<F>();
}

// Return the integer nearest to x, ties to even, for |x| < 2^22. A result of zero is +0.
FP4KIT_DEVICE float nearest_integer(float x) {
  return (x + 0x1.8p23f) - 0x1.8p23f;
}

// Return floor(x) for 0 <= x < 2^23. The result is +0 if x is below 1.
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

// Return the value of the format F nearest to x, ties to even. x must not be NaN. If kClamp is true, values above the
// largest value of F saturate; if it is false, |x| must be at most saturation<F>(). A result of zero is +0, even for
// negative x.
//
// Let e be the exponent of max(|x|, the smallest normal value of F), and M the number of mantissa bits. Adding and
// subtracting 1.5 * 2^(e + 23 - M) rounds x to the values of the format.
template <class F, bool kClamp>
FP4KIT_DEVICE float nearest_finite(float x) {
  if constexpr (kClamp) x = fminf(fmaxf(x, -max_of<F>()), max_of<F>());
  const u32 e = bits_of(fmaxf(magnitude_of(x), float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * (1.5f * static_cast<float>(1 << (23 - F::kMantissaBits)));
  return (x + magic) - magic;
}

// Return the magnitude up to which nearest_finite rounds a number correctly without a clamp: the largest value of F
// plus half a step, minus a relative margin of 2^-10 for rounding errors of the number.
template <class F>
FP4KIT_DEVICE float saturation() {
  return (max_of<F>() + 0.5f * float_of(static_cast<u32>(F::kEmax - F::kMantissaBits + 127) << 23)) * (1.0f - 0x1p-10f);
}

// Return true if fast_value is valid for a block: if the products of its elements with s.encode are small enough.
// `largest` is the float32 bits of the largest magnitude of the elements. Usually, the largest product must be below
// saturation<R::Element>(), because no clamp follows. If R::kStatic, it must only be below 2^80, because nearest_finite
// then clamps: the caller gave the amax, which may be smaller than the largest element. Return false if the product is
// NaN.
template <class R>
FP4KIT_DEVICE bool has_small_products(u32 largest, FakeScale s) {
  return float_of(largest) * s.encode < (R::kStatic ? 0x1p80f : saturation<typename R::Element>());
}
