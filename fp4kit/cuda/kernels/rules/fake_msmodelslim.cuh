// The fake quantizer of msmodelslim's MX formats (see fake.cuh): element values times powers of two that are rounded to
// In, the type of the elements. R is the recipe, whose block rule is one of msmodelslim.
#pragma once

#include "fake_arith.cuh"

// Return a >= 0 rounded to the values of the format F: floor(a / step + 0.5) * step, at most max_of<F>(). The sum is
// rounded to float32. NaN gives the largest value.
template <class F>
FP4KIT_DEVICE float nearest_by_a_sum(float a) {
  constexpr u32 kMantissa = static_cast<u32>(F::kMantissaBits) << 23;
  a = fminf(a, max_of<F>());
  const u32 power = bits_of(fmaxf(a, float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float steps = floor_of(a * float_of((254u << 23) + kMantissa - power) + 0.5f);
  return fminf(steps * float_of(power - kMantissa), max_of<F>());
}

// Elements of MXFP4 saturate if they are infinite. Those of MXFP8 stay infinite, and become infinite in float16 if the
// power of two underflows to 0, so that the result is NaN.
struct fake_mx_msmodelslim {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const u32 code = R::BlockRule::template code<R, In>(amax, TensorScale{});
    const float factor = R::BlockRule::template factor<R, In>(code, amax, TensorScale{});
    return {factor, is_nan(factor) ? factor : round_to<In>(value_of_e8m0(code))};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    using E = typename R::Element;
    const float y = (x + 0.0f) * s.encode, a = magnitude_of(y);
    if (is_nan(y) || (E::kHasNan && s.decode == 0.0f && x != 0.0f)) return nan_value();
    return E::kHasNan && a > kFltMax ? y * s.decode : fast_value<R, In>(x, s);
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return float_of(largest) * s.encode < 0x1p80f && s.decode > 0.0f;
  }
  // -0 counts as 0. So does, for MXFP8, an element that scaling makes -0.
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    const float y = x * s.encode;
    const float value = nearest_by_a_sum<typename R::Element>(magnitude_of(y)) * s.decode;
    return with_sign_of(value, (R::Element::kHasNan ? y : x) + 0.0f);
  }
};
