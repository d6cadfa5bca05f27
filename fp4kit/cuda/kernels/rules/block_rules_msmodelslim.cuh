// Block rules (see block_rules.cuh) of msmodelslim, which round every operation to In, the type of the elements. They
// write E8M0 scales, and code 0 for an amax of NaN. They give the same results as the functions with these names in
// reference/block_rules.py.
#pragma once

#include "block_rules.cuh"
#include "rounded_log2.cuh"

// Return 1 / 2^exponent, where the power is first rounded to In. If it is then 0, return 2^127. `exponent` must be at
// least -127 and at most 127.
template <class In>
FP4KIT_DEVICE float inverse_power(i32 exponent) {
  if (In::kMantissaBits == 10 && exponent >= 16) return 0.0f;
  if (In::kMantissaBits == 10 && exponent < In::kLeastExponent) return 0x1p127f;
  return inverse_e8m0(static_cast<u32>(exponent + 127));
}

// The rules of MXFP4: minmax rounds log2(amax / 0.875) down and subtracts 2, and ceil_x rounds log2(amax / 7.25) up.
// 9.6e-7 is added before the logarithm, so that zeros have one.
template <bool kCeil>
struct msmodelslim_power : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float quotient = round_to<In>(amax / (kCeil ? 7.25f : 0.875f));
    const float sum = round_to<In>(quotient + round_to<In>(9.6e-7f));
    const i32 exponent = kCeil ? log2_ceil<In>(bits_of(sum)) : log2_floor<In>(bits_of(sum)) - 2;
    return is_nan(amax) ? 0u : static_cast<u32>((is_finite(sum) ? minimum(exponent, 125) : 125) + 127);
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
