// 4over6: the two scales that a block may have, and the error of an element for each of them. The functions give the
// same results as reference/four_over_six.py. The scale "six" maps the amax (largest magnitude) of the block to the
// value 6, and the scale "four" maps it to 4. R is the recipe, and t is the tensor scale (TensorScale): elements are
// multiplied by t.encode before they are encoded, and by t.decode after they are decoded. t.amax is the amax of the
// tensor.
#pragma once

#include "block_rules_e4m3_serving.cuh"
#include "integer_or_float.cuh"

// Return a * b. Subnormal operands and results are flushed to zero if R::kFlush.
template <class R>
FP4KIT_DEVICE float multiply(float a, float b) {
  return R::kFlush ? mul_ftz(a, b) : a * b;
}
// Return a / b. Subnormal operands and results are flushed to zero if R::kFlush.
template <class R>
FP4KIT_DEVICE float divide(float a, float b) {
  return R::kFlush ? div_ftz(a, b) : a / b;
}

// Store the codes of a block's two candidate scales: in `six` the code of the scale that maps the amax to 6, and in
// `four` the code of the scale that maps it to 4. `sixth` is a sixth of the block's amax, and t is the tensor scale. If
// R::kLaneSums and the tensor's amax is 0, both scales are 0. In a recipe of IF4, both codes stand for the same scale:
// `six` for E2M1 elements, and `four`, which has bit If4::kIntegerBit set, for INT4 elements.
template <class R>
FP4KIT_DEVICE void scales_of(float sixth, TensorScale t, u32& six, u32& four) {
  float base = multiply<R>(sixth, t.encode);
  if constexpr (R::kLaneSums) base = zero_of_zeros(base, t);
  six = encode_scale<R>(base);
  if constexpr (kHasTwoFormats<R>)
    four = six | If4::kIntegerBit;
  else
    four = encode_scale<R>(multiply<R>(base, 1.5f));
}

// Return the number by which elements are multiplied if the block gets the candidate scale `scale`. t is the tensor
// scale. The number is fouroversix_factor if R::kLaneSums. Otherwise it is 1 / (scale * t.decode), but at most the
// largest finite float; NaN stays NaN.
template <class R>
FP4KIT_DEVICE float candidate_factor(float scale, TensorScale t) {
  if constexpr (R::kLaneSums) return fouroversix_factor<R>(scale, t);
  const float inverse = divide<R>(1.0f, multiply<R>(scale, R::kIsCute ? 1.0f / t.encode : t.decode));
  return is_nan(inverse) ? inverse : fminf(inverse, kFltMax);
}

// Return true if FlashInfer returns early for a block with this amax, which it takes for zeros. All codes are then 0,
// without signs. kIsCute: its kernel in CuTe-DSL, which does not flush, and computes factors from t.encode alone.
template <class R>
FP4KIT_DEVICE bool clears(float amax) {
  return R::kFlush ? magnitude_of(amax) < kFltMin : R::kIsCute && amax == 0.0f;
}

// Return an element after decoding. `scaled` is the value of its code times the block scale, and t is the tensor scale.
// The result is scaled * t.decode if R::kFlush or R::kFastError, and otherwise scaled * t.amax / full_range<R>().
template <class R>
FP4KIT_DEVICE float decoded(float scaled, TensorScale t) {
  if constexpr (R::kFlush || R::kFastError) return multiply<R>(scaled, t.decode);
  return scaled * t.amax / full_range<R>();
}

// Return the number with which error_of compares an element. `value` is the value of the element's code, `scale` the
// block scale and t the tensor scale. The result is the decoded element (function `decoded`) or, if R::kFastError,
// value * scale without the tensor scale.
template <class R>
FP4KIT_DEVICE float compared(float value, float scale, TensorScale t) {
  const float scaled = value * scale;
  return R::kFastError ? scaled : decoded<R>(scaled, t);  // float16 holds its six bits, from 2^-10 to 2688
}

// Return the error that element x adds to its block: the square of the difference of x and `compared` if
// R::kSquaredError, and otherwise its magnitude. `compared` is the result of the function `compared` for the code of x.
// If R::kFastError, x is first multiplied by t.encode, where t is the tensor scale. If R::kFlush, a subnormal
// difference counts as 0.
template <class R>
FP4KIT_DEVICE float error_of(float x, float compared, TensorScale t) {
  float difference = compared - (R::kFastError ? x * t.encode : x);
  if constexpr (R::kFlush) difference = flush(difference);
  return R::kSquaredError ? difference * difference : fabsf(difference);
}

// Return the error (error_of) that element x adds to its block if x is encoded as INT4, one of the two element types of
// the recipe IF4. `scaled` is x times the factor of the block, `scale` the block scale, and t the tensor scale.
template <class R>
FP4KIT_DEVICE float integer_error_of(float x, float scaled, float scale, TensorScale t) {
  return error_of<R>(x, nearest_int4(scaled) * scale * t.amax * If4::kIntegerStep / full_range<R>(), t);
}
