// 4over6: the two scales that a block may have, and what an element adds to the error of one; the twin of
// reference/four_over_six.py.
#pragma once

#include "block_rules_e4m3_serving.cuh"

template <class R>
FP4KIT_DEVICE float multiply(float a, float b) {
  return R::kFlush ? mul_ftz(a, b) : a * b;
}
template <class R>
FP4KIT_DEVICE float divide(float a, float b) {
  return R::kFlush ? div_ftz(a, b) : a / b;
}

// Scale codes of the two candidates, amax at 6 and amax at 4, from a sixth of amax.
template <class R>
FP4KIT_DEVICE void scales_of(float sixth, TensorScale t, u32& six, u32& four) {
  float base = multiply<R>(sixth, t.encode);
  if constexpr (R::kLaneSums) base = zero_of_zeros(base, t);
  six = encode_scale<R>(base);
  four = encode_scale<R>(multiply<R>(base, 1.5f));
}

// What elements are multiplied with under a scale.
template <class R>
FP4KIT_DEVICE float candidate_factor(float scale, TensorScale t) {
  if constexpr (R::kLaneSums) return fouroversix_factor<R>(scale, t);
  const float inverse = divide<R>(1.0f, multiply<R>(scale, t.decode));
  return is_nan(inverse) ? inverse : fminf(inverse, kFltMax);
}

// (code value * scale) in the units of x.
template <class R>
FP4KIT_DEVICE float decoded(float scaled, TensorScale t) {
  if constexpr (R::kFlush || R::kFastError) return multiply<R>(scaled, t.decode);
  return scaled * t.amax / full_range<R>();
}

// What an element is compared with: code value * scale in the units of x, or in those of the codes where the recipe
// says so.
template <class R>
FP4KIT_DEVICE float compared(float value, float scale, TensorScale t) {
  const float scaled = value * scale;
  return R::kFastError ? scaled : decoded<R>(scaled, t);  // float16 has room for its six bits, from 2^-10 to 2688
}

// The part of element x in the error.
template <class R>
FP4KIT_DEVICE float error_of(float x, float compared, TensorScale t) {
  float difference = compared - (R::kFastError ? x * t.encode : x);
  if constexpr (R::kFlush) difference = flush(difference);
  return R::kSquaredError ? difference * difference : fabsf(difference);
}
