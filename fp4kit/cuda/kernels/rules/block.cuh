// Functions for one block (elements that share a scale) in registers: its amax (largest magnitude), its scaled elements
// and their codes. R is the recipe: its constants R::kX are fields of Recipe (recipes/schema.py), written by
// cuda/compiler.py. In is the type of the elements. kNan (AmaxNan) says what NaN elements do to the amax.
#pragma once

#include "block_rules_amax.cuh"
#include "block_rules_e4m3.cuh"
#include "block_rules_e8m0.cuh"
#include "block_rules_gguf_mlx.cuh"
#include "block_rules_e8m0_serving.cuh"
#include "block_rules_e4m3_serving.cuh"
#include "block_rules_ascend.cuh"
#include "block_rules_torchao.cuh"
#include "decode_rules.cuh"
#include "random.cuh"

// The effect of a NaN element on the amax of a block:
//   ignore     none; the amax is 0 if all elements are NaN
//   propagate  the amax is NaN
//   lanes      none, except that the amax is NaN if all odd elements are NaN
enum class AmaxNan { ignore, propagate, lanes };
// The elements that count in the amax of a tensor: all elements, all except NaN, or only finite ones.
enum class AmaxInput { all, no_nan, finite };

// Return the larger of two magnitudes. If one of them is NaN, return NaN for AmaxNan::propagate, and otherwise the one
// that is not NaN. If both are NaN, return NaN.
template <AmaxNan kNan>
FP4KIT_DEVICE float larger(float a, float b) {
  if constexpr (kNan == AmaxNan::propagate)
    return float_of(maximum(bits_of(a), bits_of(b)));  // NaN has the largest bits
  return fmaxf(a, b);
}

// The amax of a block, accumulated over groups of elements. It is 0 if no element was added. For AmaxNan::lanes, even
// and odd elements have separate amaxes. The result is then the amax of the even elements if it is larger, otherwise
// the amax of the odd elements.
template <AmaxNan kNan>
struct BlockAmax {
  float even = 0.0f, odd = 0.0f;
  bool is_empty = true;

  // Include kCount further elements in the amax. For AmaxNan::lanes, kCount must be even.
  template <int kCount>
  FP4KIT_DEVICE_MEMBER void add(const float (&x)[kCount]) {
    if constexpr (kNan == AmaxNan::lanes) {
      even = is_empty ? magnitude_of(x[0]) : fmaxf(even, magnitude_of(x[0]));
      odd = is_empty ? magnitude_of(x[1]) : fmaxf(odd, magnitude_of(x[1]));
      is_empty = false;
#pragma unroll
      for (int i = 2; i < kCount; i += 2) {
        even = fmaxf(even, magnitude_of(x[i]));
        odd = fmaxf(odd, magnitude_of(x[i + 1]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) even = larger<kNan>(even, magnitude_of(x[i]));
    }
  }

  // Return the amax of all elements that were added, or 0 if there are none.
  FP4KIT_DEVICE_MEMBER float result() const { return even > odd || kNan != AmaxNan::lanes ? even : odd; }
};

// Return the amax (the largest magnitude) of kCount elements. kNan says what NaN elements do to the amax (AmaxNan).
template <AmaxNan kNan, int kCount>
FP4KIT_DEVICE float amax_of(const float (&x)[kCount]) {
  BlockAmax<kNan> amax;
  amax.add(x);
  return amax.result();
}

// The factor that scales the elements of a block before they are rounded. Elements are multiplied by `value`, or
// divided by it if R::kDivide. `reciprocal` is the rounded 1 / value if R::kDivide, and otherwise equals `value`. The
// exception is R::kThenEncode: elements are also multiplied by the tensor's encode scale, which is stored as
// `reciprocal`. No code path for such recipes needs the reciprocal.
struct Factor {
  float value, reciprocal;
};

// Return element x after the recipe R has scaled it by the factor f of its block. Rounding the result to the element
// format gives the code of x. If the result is NaN and R::kNanIsMax is true, return the largest element value instead.
template <class R, class In>
FP4KIT_DEVICE float scaled_element(float x, Factor f) {
  const float factor = f.value;
  if constexpr (R::kSign == Sign::unscaled && !R::kStochastic) x = x + 0.0f;  // -0 -> 0
  if constexpr (R::kEncodeFirst) x = R::kFlush ? mul_ftz(x, f.reciprocal) : x * f.reciprocal;
  float y;
  if constexpr (R::kFlush) {
    y = mul_ftz(x, factor);
  } else if constexpr (R::kDivide) {
    y = x / factor;
  } else {
    y = x * factor;
  }
  if constexpr (R::kRoundScaled) y = round_to<In>(y);
  if constexpr (R::kRoundScaled && R::kRounding == Rounding::rnas && !R::kStochastic)
    y = with_rounded_half<typename R::Element, In>(y);
  if constexpr (R::kThenEncode && !R::kEncodeFirst) y = y * f.reciprocal;
  if constexpr (R::kNanIsMax) y = is_nan(y) ? max_of<typename R::Element>() : y;
  return y;
}

// Return the code whose value times `step` is nearest to the unscaled element x, or the lowest one if several are
// equally near. `step` is the factor of the block. R::kSign and R::kNanCode say what sign and NaN become. R::kRounding
// must be `first`.
template <class R>
FP4KIT_DEVICE u32 encode_compared(float x, float step) {
  return encode<typename R::Element, R::kRounding, R::kSign, R::kNanCode, R::kNarrow>(x, step);
}

// Return the code of a scaled element y, a result of scaled_element. R::kRounding says how y is rounded, and R::kSign
// which codes get a sign bit. NaN gets the code R::kNanCode. For Rounding::first, y is compared with the element values
// themselves (`step` is 1).
template <class R>
FP4KIT_DEVICE u32 encode_element(float y) {
  return encode<typename R::Element, R::kRounding, R::kSign, R::kNanCode, R::kNarrow>(y);
}
