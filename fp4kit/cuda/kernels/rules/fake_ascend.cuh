// The fake quantizers of HiFloat4 and msmodelslim (see fake.cuh). Every operation is rounded to In, the type of the
// elements, except with kNative = false. R is the recipe, whose block rule is one of block_rules_ascend.cuh.
#pragma once

#include "fake_arith.cuh"
#include "nearest_by_a_sum.cuh"

// The rule of HiFloat4's MX formats: element values times powers of two.
template <bool kNative>
struct fake_hifloat4_mx {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const u32 code = R::BlockRule::template code<R, In>(amax, TensorScale{});
    const float factor = R::BlockRule::template factor<R, In>(code, amax, TensorScale{});
    return {factor, native<kNative, In>(value_of_e8m0(code))};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    return is_nan(x * s.encode) ? nan_value() : fast_value<R, In>(x, s);
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return float_of(largest) * s.encode < 0x1p80f;
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    using F = typename R::Element;
    const float a = native<kNative, In>(magnitude_of(x) * s.encode);
    const float magnitude = kNative ? nearest_by_a_sum<F, In>(a) : nearest_by_a_sum<F>(a);
    return with_sign_of(magnitude * s.decode, x + 0.0f);  // -0 + 0 = +0
  }
};
struct fake_mx_hifloat4 : fake_hifloat4_mx<false> {};
struct fake_mx_hifloat4_native : fake_hifloat4_mx<true> {};

// The rule of HiFloat4's NVFP4, without a tensor scale. A quotient that is infinite or NaN counts as 6.
template <bool kNative>
struct fake_hifloat4_nvfp4 {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float s = decode_scale<R>(R::BlockRule::template code<R, In>(amax, TensorScale{}));
    return {s, s};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    if (is_nan(x) || is_nan(s.decode)) return nan_value();
    const float y = native<kNative, In>(magnitude_of(x) / s.decode), max = max_of<typename R::Element>();
    const float magnitude = x == 0.0f ? 0.0f : nearest<typename R::Element>(is_finite(y) ? y : max);
    return with_sign_of(magnitude * s.decode, x + 0.0f);  // -0 + 0 = +0
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return true;
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    return value<R, In>(x, s);
  }
};
struct fake_nvfp4_hifloat4 : fake_hifloat4_nvfp4<false> {};
struct fake_nvfp4_hifloat4_native : fake_hifloat4_nvfp4<true> {};

// The rule of msmodelslim's MX formats: element values times powers of two that are rounded to In. Elements of MXFP4
// saturate if they are infinite. Those of MXFP8 stay infinite, and become infinite in float16 if the
// power of two underflows to 0, so that the result is NaN.
struct fake_mx_msmodelslim {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const u32 code = R::BlockRule::template code<R, In>(amax, TensorScale{});
    const float factor = R::BlockRule::template factor<R, In>(code, amax, TensorScale{});
    if (is_nan(factor)) return {factor, factor};
    if (factor == 0.0f) return {factor, amax < 1.0f ? 0.0f : float_of(kInfinityBits)};  // a tiny or an infinite power
    return {factor, round_to<In>(value_of_e8m0(code))};
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
