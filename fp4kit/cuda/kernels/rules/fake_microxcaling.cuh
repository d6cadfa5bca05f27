// The fake quantizer of microxcaling: it quantizes and dequantizes in one step (see fake.cuh). It computes log2 in
// float32 and rounds the result of every operation to In, the type of the elements. R is the recipe, and amax the
// largest magnitude of a block.
#pragma once

#include "fake_arith.cuh"
#include "rounded_log2.cuh"

// How a magnitude halfway between two integers is rounded: up (away from zero), or to even. With `none`, every
// magnitude is rounded down, halfway or not.
enum class HalfWay { away, even, none };

// The rule of microxcaling. The result for an element x is round(x / s) * s, with s = 2^(floor(log2(amax)) - emax), but
// at least 2^-127. emax is the exponent of the largest element value, and an amax of 0 counts as 2^-126. The function
// `round` rounds the magnitude to the values of the element format, halves as kHalfWay says, and saturates. If
// kFlushBlocks, the elements of a block whose amax is below 2^-126 become zeros.
//
// All elements of a block become NaN in two cases: if the amax is NaN or infinite, and if s is 0 or infinite in the
// type In. (An amax of 0 in float16 gives NaN too, because float16 has no 2^-126.) An element -0 becomes +0. If the
// caller gave the amax (R::kStatic), infinite elements stay infinite, and NaN stays NaN, except in blocks that become
// zeros.
template <HalfWay kHalfWay, bool kFlushBlocks = false>
struct fake_microxcaling {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float positive = amax == 0.0f ? round_to<In>(kFltMin) : amax;
    if (!(positive > 0.0f && is_finite(positive))) return {nan_value(), nan_value()};  // float16 has no 2^-126: log2(0)
    const i32 shared = shared_exponent<R, In>(positive);
    const i32 exponent = maximum(shared - R::Element::kEmax, -127);
    const float decode = round_to<In>(value_of_e8m0(static_cast<u32>(exponent + 127)));  // NaN for 2^128
    if (!(decode > 0.0f && is_finite(decode))) return {nan_value(), nan_value()};        // x / 0 * 0
    return {kFlushBlocks && shared <= -127 ? 0.0f : inverse_e8m0(static_cast<u32>(exponent + 127)), decode};
  }
  // Return floor(log2(amax)) as microxcaling computes it in the type In, for a finite amax > 0. If the caller gave the
  // amax (R::kStatic) and In has 16 bits, the logarithm itself is computed, because log2_floor is not valid between two
  // values of In.
  template <class R, class In>
  FP4KIT_DEVICE i32 shared_exponent(float amax) {
    if constexpr (R::kStatic && sizeof(typename In::Bits) == 2)
      return static_cast<i32>(floorf(round_to<In>(float32_log2(amax))));
    const bool subnormal = amax < kFltMin;
    return log2_floor<In>(bits_of(subnormal ? amax * 0x1p64f : amax), subnormal ? 64 : 0);
  }
  // Return a >= 0 rounded to an integer: down if kHalfWay is `none`, and otherwise to the nearest integer, with halves
  // as kHalfWay says.
  template <class In>
  FP4KIT_DEVICE float rounded(float a) {
    if constexpr (kHalfWay == HalfWay::none) return floor_of(a);
    const float up = floor_of(round_to<In>(a + 0.5f));
    if constexpr (kHalfWay == HalfWay::away) return up;
    const float half = (a - 0.5f) * 0.5f;  // an integer for a = 0.5, 2.5, 4.5, ...
    return nearest_integer(half) == half ? up - 1.0f : up;
  }
  // Return the float32 bits of 2^floor(log2(a)), or those of the smallest normal element value if that is larger. If
  // kHalfWay is `none`, the logarithm is that of log2_floor, which is one too large for a few values. If halves are
  // rounded, the true logarithm is used, because these values round to the power of two above them with either
  // exponent.
  template <class R, class In>
  FP4KIT_DEVICE u32 power_below(float a) {
    const u32 bits = bits_of(fmaxf(a, float_of(static_cast<u32>(R::Element::kEmin + 127) << 23)));
    if constexpr (kHalfWay != HalfWay::none) return bits & kInfinityBits;
    return static_cast<u32>(log2_floor<In>(bits) + 127) << 23;
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    constexpr u32 kMantissa = static_cast<u32>(R::Element::kMantissaBits) << 23;
    if (kFlushBlocks && s.encode == 0.0f) x = 0.0f;
    const float scaled = round_to<In>(x * s.encode);
    float a = magnitude_of(scaled);  // below 2^(emax + 1) if amax is that of the block
    if constexpr (R::kStatic) a = fminf(a, float_of(static_cast<u32>(R::Element::kEmax + 2 + 127) << 23));
    const u32 power = power_below<R, In>(a);
    const float steps = a * float_of((254u << 23) + kMantissa - power);
    float y = fminf(rounded<In>(steps) * float_of(power - kMantissa), max_of<typename R::Element>());
    if constexpr (R::kStatic) y = is_finite(scaled) ? y : magnitude_of(scaled);
    return with_sign_of(y * s.decode, scaled + 0.0f);  // -0 + 0 = +0
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
struct fake_microxcaling_nearest : fake_microxcaling<HalfWay::away> {};
struct fake_microxcaling_nearest_flush : fake_microxcaling<HalfWay::away, true> {};
struct fake_microxcaling_even : fake_microxcaling<HalfWay::even> {};
struct fake_microxcaling_floor : fake_microxcaling<HalfWay::none> {};
