// Block rules (see block_rules.cuh) of HiFloat4 and msmodelslim. The rules of msmodelslim, and those with kNative,
// round every operation to In, the type of the elements. msmodelslim's write code 0 for an amax of NaN. They give the
// same results as the functions with these names in reference/block_rules.py.
#pragma once

#include "block_rules.cuh"
#include "rounded_log2.cuh"

// Return 1 / 2^exponent, where the power is first rounded to In. If it is then 0, return 2^127. `exponent` must be at
// least -127 and at most 128.
template <class In>
FP4KIT_DEVICE float inverse_power(i32 exponent) {
  if (exponent >= (In::kMantissaBits == 10 ? 16 : 128)) return 0.0f;  // 128 is that of a given scale of NaN
  if (In::kMantissaBits == 10 && exponent < In::kLeastExponent) return 0x1p127f;
  return inverse_e8m0(static_cast<u32>(exponent + 127));
}

// Return x rounded to In if kNative, otherwise x itself.
template <bool kNative, class In>
FP4KIT_DEVICE float native(float x) {
  return kNative ? round_to<In>(x) : x;
}

template <bool kNative>
struct hifloat4_power : by_code {
  static constexpr bool kReadsInput = kNative;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    constexpr i32 kMost = 127 - R::Element::kEmax;
    const float sum = native<kNative, In>(amax + native<kNative, In>(9.6e-7f));
    const i32 log = kNative ? log2_floor<In>(bits_of(sum)) : log2_floor<Float32>(bits_of(sum));
    const i32 exponent = is_finite(sum) ? minimum(log - R::Element::kEmax, kMost) : kMost;
    return is_nan(amax) ? 255u : static_cast<u32>(exponent + 127);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (!kNative) return inverse_e8m0(code);
    return code == 255u ? nan_value() : 1.0f / round_to<In>(value_of_e8m0(code));
  }
};
struct block_e8m0_hifloat4 : hifloat4_power<false> {};
struct block_e8m0_hifloat4_native : hifloat4_power<true> {};

template <bool kNative>
struct hifloat4_scale : by_code {
  static constexpr bool kReadsInput = kNative;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(native<kNative, In>(amax / max_of<typename R::Element>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code);
    return scale == 0.0f ? 1.0f : scale;
  }
};
struct block_hifloat4 : hifloat4_scale<false> {};
struct block_hifloat4_native : hifloat4_scale<true> {};

// The rules of MXFP4: minmax rounds log2(amax / 0.875) down and subtracts 2, and ceil_x rounds log2(amax / 7.25) up.
// 9.6e-7 is added before the logarithm, so that zeros have one. (Any error of a quotient that is not normal is lost in
// this sum.) `divisor` is 0.875 or 7.25. The exponent is 125 at most.
template <bool kCeil, class In>
FP4KIT_DEVICE i32 msmodelslim_exponent(float amax, float divisor) {
  const float quotient = round_to<In>(quotient_by(amax, divisor, 1.0f / divisor)),
              sum = round_to<In>(quotient + round_to<In>(9.6e-7f));
  const i32 exponent = kCeil ? log2_ceil<In>(bits_of(sum)) : log2_floor<In>(bits_of(sum)) - 2;
  return is_finite(sum) ? minimum(exponent, 125) : 125;
}
template <bool kCeil>
struct msmodelslim_power : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const i32 exponent = msmodelslim_exponent<kCeil, In>(amax, kCeil ? 7.25f : 0.875f);
    return is_nan(amax) ? 0u : static_cast<u32>(exponent + 127);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u ? nan_value() : inverse_power<In>(static_cast<i32>(code) - 127);
  }
};
struct block_e8m0_msmodelslim : msmodelslim_power<false> {};
struct block_e8m0_msmodelslim_ceil_x : msmodelslim_power<true> {};

struct block_e8m0_msmodelslim_fp8 {
  static constexpr bool kReadsAmax = true, kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float a = round_to<In>(amax);
    if (!(a >= kFltMin && is_finite(a))) return 0u;
    return static_cast<u32>(maximum(log2_floor<In>(bits_of(a)) - R::Element::kEmax, -127) + 127);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (!is_finite(round_to<In>(amax))) return nan_value();
    return amax == 0.0f ? 1.0f : inverse_power<In>(static_cast<i32>(code) - 127);
  }
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};

// The amax is the power of two of the scale, which a search has found (msmodelslim_choice.cuh). Codes of powers below
// 2^-127 wrap around, to 255 at most. All elements of such blocks become zeros, with the power of the code too.
struct block_e8m0_msmodelslim_power {
  static constexpr bool kReadsAmax = true, kReadsInput = true;
  // Return the exponent of a finite amax. 0 has the exponent 0, or with elements E4M3 the smallest one, -127.
  template <class R>
  FP4KIT_DEVICE i32 exponent_of(float amax) {
    const bool is_tiny = amax < kFltMin;
    const i32 exponent = static_cast<i32>(bits_of(is_tiny ? amax * 0x1p64f : amax) >> 23) - (is_tiny ? 191 : 127);
    if (R::Element::kHasNan) return maximum(exponent, -127);
    return amax == 0.0f ? 0 : exponent;
  }
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_finite(amax) ? static_cast<u32>(exponent_of<R>(amax) + 127) & 0xFFu : 0u;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (!is_finite(amax) || code == 255u) return is_nan(amax) ? nan_value() : 0.0f;
    return amax == 0.0f ? 1.0f : inverse_power<In>(static_cast<i32>(code) - 127);
  }
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};
