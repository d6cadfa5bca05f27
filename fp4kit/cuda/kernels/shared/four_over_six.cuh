// 4over6: each block gets the better of two scales, which map its amax (largest magnitude) to the value 6 ("six") or to
// 4 ("four"). The scales and codes are bit-identical to the results of reference/four_over_six.py. R is the recipe, and
// In is the type of the elements of x. t is the tensor scale (TensorScale), with its fields encode, decode and amax. A
// run holds the elements of one row of a block. kAligned is true if all rows of x begin at multiples of 16 bytes, and
// also all rows of `values` if values are stored.
//
// The exact path sums the errors of the elements in the same order as the reference. Because only the comparison of the
// two sums matters, the fast path sums approximate errors instead, in a few operations per element. If the two sums are
// too close, the block takes the exact path. That happens for about four in ten thousand blocks of normally distributed
// data. It also happens for blocks for which both scales are equally good, such as blocks whose elements all have one
// magnitude.
#pragma once

#include "four_over_six_rules.cuh"
#include "quantize.cuh"

// ---- functions for the exact path

// Call visit(x) for each element of a run (one row of a block), in order, with x as float32. The run is unchanged
// afterwards. If kUnrolled is false, the machine code is kept small, because rarely used instructions must first be
// read from memory. In that case, the run is rotated by one word per iteration, because registers cannot be indexed by
// a variable.
template <bool kUnrolled, class In, int kCount, class Visit>
FP4KIT_DEVICE void for_each_element(Run<In, kCount>& run, Visit&& visit) {
  if constexpr (kUnrolled) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) visit(element(run, i));
  } else {
#pragma unroll 1
    for (int word = 0; word < run.kWords; ++word) {
#pragma unroll
      for (int i = 0; i < run.kPerWord; ++i) visit(element(run, i));
      const u32 first = run.w[0];
#pragma unroll
      for (int i = 1; i < run.kWords; ++i) run.w[i - 1] = run.w[i];
      run.w[run.kWords - 1] = first;
    }
  }
}

// Return the value, with its sign, to which a scaled element (the element times the factor of its block) is rounded
// when errors are measured. The result is usually the value of the element's code (encode_element), so magnitudes above
// the format's largest value saturate. The exception is Rounding::rnw, for which magnitudes do not saturate
// (nearest_unbounded).
template <class R>
FP4KIT_DEVICE float rounded(float scaled) {
  if constexpr (R::kRounding == Rounding::rnw)
    return nearest_unbounded(magnitude_of(scaled)) * (scaled < 0.0f ? -1.0f : 1.0f);
  return decode<typename R::Element>(encode_element<R>(scaled));
}

// Return the error that element x adds to its block (see error_of) in a recipe of IF4. The block scale has the code
// scale_code and the value `scale`. x is rounded to INT4 if bit If4::kIntegerBit of scale_code is set, and otherwise to
// E2M1. `scaled` is x times the factor of the block, and t is the tensor scale.
template <class R>
FP4KIT_DEVICE float error_in_format(float x, float scaled, u32 scale_code, float scale, TensorScale t) {
  using Floats = FloatsOf<R>;
  return scale_code & If4::kIntegerBit ? integer_error_of<Floats>(x, scaled, scale, t)
                                       : error_of<Floats>(x, compared<Floats>(rounded<Floats>(scaled), scale, t), t);
}

// Return the error of a run (one row of a block) under the scale code scale_code and the tensor scale t: the sum of the
// errors of its elements (error_of), added in the order that the recipe specifies. If R::kLargestError, return the
// largest magnitude of these errors instead, or NaN if one is NaN. The run is unchanged afterwards.
template <class R, bool kUnrolled = false, class In>
FP4KIT_DEVICE float sum_errors(Run<In, R::kBlock>& run, u32 scale_code, TensorScale t) {
  const float scale = decode_scale<R>(e4m3_of<R>(scale_code)), factor = candidate_factor<R>(scale, t);
  float error = 0.0f;
  const auto error_at = [&](float x) {
    if constexpr (kHasTwoFormats<R>)
      return error_in_format<R>(x, multiply<R>(x, factor), scale_code, scale, t);
    else
      return error_of<R>(x, compared<R>(rounded<R>(multiply<R>(x, factor)), scale, t), t);
  };
  if constexpr (R::kLargestError) {
    for_each_element<kUnrolled>(run,
                                [&](float x) { error = larger<AmaxNan::propagate>(error, magnitude_of(error_at(x))); });
  } else if constexpr (R::kLaneSums) {
    float lanes[8] = {};
    for_each_element<true>(run, [&, i = 0](float x) mutable { lanes[i % 8] = lanes[i % 8] + error_at(x), ++i; });
    for (const float lane : lanes) error = error + lane;
  } else {
    for_each_element<kUnrolled>(run, [&](float x) { error = error + error_at(x); });
  }
  return error;
}

// Return the 4-bit code of a scaled element (the element times the factor of its block) in a recipe of IF4: an INT4
// code if the bit If4::kIntegerBit of the block's scale code is set, and otherwise an E2M1 code.
template <class R>
FP4KIT_DEVICE u32 code_in_format(float scaled, u32 scale_code) {
  return scale_code & If4::kIntegerBit ? int4_code(scaled) : encode_element<FloatsOf<R>>(scaled);
}

// Return the 4-bit codes of a run (16 elements) under the chosen scale code and the tensor scale t, with the first code
// in the lowest bits. `amax` is the amax of the block. If clears(amax), all codes are 0, without signs.
// The run is unchanged afterwards.
template <class R, bool kUnrolled = false, class In>
FP4KIT_DEVICE u64 encode_chosen(Run<In, R::kBlock>& run, float amax, u32 scale_code, TensorScale t) {
  if (clears<R>(amax)) return 0u;
  const float factor = candidate_factor<R>(decode_scale<R>(e4m3_of<R>(scale_code)), t);
  u64 codes = 0u;
  if constexpr (kHasTwoFormats<R>)
    for_each_element<kUnrolled>(
        run, [&](float x) { codes = codes >> 4 | static_cast<u64>(code_in_format<R>(x * factor, scale_code)) << 60; });
  else
    for_each_element<kUnrolled>(
        run, [&](float x) { codes = codes >> 4 | static_cast<u64>(encode_element<R>(multiply<R>(x, factor))) << 60; });
  return codes;
}

// Store the codes of a run that begins at element `first` in a.packed or, if R::kFake, the values to which the codes
// decode in a.values. `codes` is the result of encode_chosen. scale_code is the code of the block scale, and t is the
// tensor scale.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void store_chosen(const QuantizeArguments& a, i64 first, u64 codes, u32 scale_code, TensorScale t) {
  const u32 words[2] = {static_cast<u32>(codes), static_cast<u32>(codes >> 32)};
  store_packed<R, In, R::kBlock, kAligned>(a, first, words, scale_code, t);
}

// ---- functions for the fast path
//
// Notation: u is the decoded value of the code value 1, y = |x| * factor < 7, e = 2^-24, and v is the code value
// nearest to y as computed below. Assume that u * factor is within 8 e of 1. Then the error |v u - |x|| differs from
// the reference's error by at most 114 e u:
//    24 e u   v u differs from the reference's products and quotients by 4 e times at most 6 u
//     2 e u   both differences are rounded
//    88 e u   near a tie, v may be the other neighbor. Then y is within 4 e of the tie, which is at most 5, and the two
//             errors differ by twice (4 + 5 * 8) e u
//
// Sums of n magnitudes differ by at most 114 e n u, plus 42 e times a sum of at most n u for the order of additions. A
// sum E of n squares differs by at most 114 e u * 2 sum |d| plus 42 e E, where 2 u sum |d| <= 2 u sqrt(n E) <= 4 E + n
// / 4 u^2. The function is_decided requires that the two sums differ by more than both of these errors together.

// A block scale in the form that the fast path uses. Magnitudes of elements are measured in units of amax_power(t). u
// is the decoded value of the code value 1.
struct alignas(16) ApproximateScale {
  float factor;  // infinite if the fast path must not be used
  float small;   // factor * 2^-126
  float unit;    // u * 2^126
  float slack;   // the part of the sums' combined error that depends on the larger u of the two scales
};

// Return true if all blocks of a tensor have one tensor scale in the recipe R, or if R has no tensor scales. A table of
// all block scales is then worthwhile.
template <class R>
FP4KIT_DEVICE constexpr bool has_one_scale() {
  return R::kTensorScaling == TensorScaling::tensor || R::kTensorScaling == TensorScaling::none;
}

// Return the largest power of two that is not above the tensor's amax. The amax must be a positive normal number.
FP4KIT_DEVICE float amax_power(TensorScale t) {
  return float_of(bits_of(t.amax) & kInfinityBits);
}
// Return 1 / amax_power(t), which is exact. The tensor's amax must be a positive normal number below 2^126.
FP4KIT_DEVICE float inverse_amax_power(TensorScale t) {
  return float_of(0x7F000000u - bits_of(amax_power(t)));
}

// Return true if this tensor scale is proven to keep all scales in the range of normal numbers, and all squared errors
// finite. The condition is sufficient, not necessary: 2^-60 < amax < 2^60, and both scales are finite. So the result is
// false for an amax of 0 or NaN.
FP4KIT_DEVICE bool is_ordinary(TensorScale t) {
  return t.amax > 0x1p-60f && t.amax < 0x1p60f && is_finite(t.encode) && is_finite(t.decode);
}

// Return the ApproximateScale of a scale code of the recipe R with the tensor scale t. If the fast path must not be
// used with this scale, for example because is_ordinary(t) is false, the field `factor` is infinity, and the other
// fields are 0.
template <class R, class In>
FP4KIT_DEVICE ApproximateScale approximate_scale(u32 code, TensorScale t) {
  const float scale = decode_scale<R>(code), factor = candidate_factor<R>(scale, t), unit = decoded<R>(scale, t);
  // If u is at most 2^-60, squared errors are so small that the reference's squares lose bits.
  const bool applies = !R::kLargestError && is_ordinary(t) && unit > 0x1p-60f &&
                       magnitude_of(unit * factor - 1.0f) <= 0x1p-21f && takes_fast_path<R, In>(0u, {factor, factor});
  if (!applies) return {float_of(kInfinityBits), 0.0f, 0.0f, 0.0f};
  constexpr float kCount = R::kBlock * R::kBlockRows;
  const float u = unit * inverse_amax_power(t);
  const float slack = R::kSquaredError ? u * u * (kCount * 0x1p-18f) : u * (kCount * 1.25f * 0x1p-16f);
  return {factor, factor * amax_power(t) * 0x1p-126f, u * 0x1p126f, slack};
}

// Return approximately the sum of the errors of one row of a block: of |error| in units of amax_power(t) or, if
// R::kSquaredError, of error^2 in units of amax_power(t)^2. `a` holds the magnitudes of the elements in units of
// amax_power(t). `small` and `unit` are fields of the ApproximateScale of the block's scale.
//
// Let y be the magnitude of an element divided by the block's scale, so that E2M1 holds y rounded. `small` is chosen so
// that a * small is y * 2^-126. Near 2^-126, float32 has the steps of E2M1, divided by 2^22: a y in [1, 2) has the
// smallest normal exponent, and a y below 1 is subnormal with the same step. So this function rounds y to E2M1 by
// adding 2^21 to the bit pattern and clearing the lowest 22 bits.
template <class R>
FP4KIT_DEVICE float approximate_error(const float (&a)[R::kBlock], float small, float unit) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) {
    const u32 value = (bits_of(a[i] * small) + 0x200000u) & 0xFFC00000u;
    const float difference = fma_rn(float_of(value), unit, -a[i]);
    error = R::kSquaredError ? fma_rn(difference, difference, error) : error + fabsf(difference);
  }
  return error;
}

// Store in `errors` the approximate sums of errors (approximate_error) of a run of finite elements: errors[0] for the
// scale `six`, and errors[1] for the scale `four`. `inverse` is inverse_amax_power of the tensor scale.
template <class R, class In>
FP4KIT_DEVICE void approximate_errors(const Run<In, R::kBlock>& run, const ApproximateScale& six,
                                      const ApproximateScale& four, float inverse, float (&errors)[2]) {
  Run<In, R::kBlock> magnitudes = run;
#pragma unroll
  for (int i = 0; i < run.kWords; ++i) magnitudes.w[i] &= FastPath<R, In>::kIs16Bit ? 0x7FFF7FFFu : 0x7FFFFFFFu;
  float a[R::kBlock];
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) a[i] = element(magnitudes, i) * inverse;
  errors[0] = approximate_error<R>(a, six.small, six.unit);
  errors[1] = approximate_error<R>(a, four.small, four.unit);
}

// Return true if `errors`, the approximate sums of a block's errors for the scales `six` and `four`, prove which scale
// has the smaller error: if they differ by more than their uncertainty. Return false if a sum is NaN. The scale of
// `four` must be at least that of `six`.
template <class R>
FP4KIT_DEVICE bool is_decided(const ApproximateScale& six, const ApproximateScale& four, const float (&errors)[2]) {
  const float slack = four.slack;  // the larger slack of the two, because four's scale is at least six's
  return fabsf(errors[1] - errors[0]) > (R::kSquaredError ? fma_rn(errors[0] + errors[1], 0x1p-15f, slack) : slack);
}

// Return true if a block has only zeros and may take the fast path: its amax and both scale codes are 0, and
// is_ordinary(t) is true. The codes of the elements are then 0 with the signs of the elements.
FP4KIT_DEVICE bool is_zero_block(float amax, u32 six_code, u32 four_code, TensorScale t) {
  return amax == 0.0f && six_code == 0u && four_code == 0u && is_ordinary(t);
}
