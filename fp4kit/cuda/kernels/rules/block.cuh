// One block in registers: its amax, the scaling of its elements, their codes and values. What R::kX means: see Recipe.
#pragma once

#include "block_rules_e4m3.cuh"
#include "block_rules_e8m0.cuh"
#include "block_rules_gguf_mlx.cuh"
#include "block_rules_e8m0_serving.cuh"
#include "block_rules_e4m3_serving.cuh"
#include "block_rules_torchao.cuh"
#include "decode_rules.cuh"
#include "random.cuh"

enum class AmaxNan { ignore, propagate, lanes };
enum class AmaxInput { all, no_nan, finite };  // which elements count in the amax of a tensor

// Larger of two magnitudes; NaN as the recipe says.
template <AmaxNan kNan>
FP4KIT_DEVICE float larger(float a, float b) {
  if constexpr (kNan == AmaxNan::propagate)
    return float_of(maximum(bits_of(a), bits_of(b)));  // NaN has the largest bits
  return fmaxf(a, b);
}

// amax of a block that is added run by run: 0 for no element that counts. Lanes: a NaN is ignored unless all even or
// all odd elements are.
template <AmaxNan kNan>
struct BlockAmax {
  float even = 0.0f, odd = 0.0f;
  bool is_empty = true;

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

  FP4KIT_DEVICE_MEMBER float result() const { return even > odd || kNan != AmaxNan::lanes ? even : odd; }
};

template <AmaxNan kNan, int kCount>
FP4KIT_DEVICE float amax_of(const float (&x)[kCount]) {
  BlockAmax<kNan> amax;
  amax.add(x);
  return amax.result();
}

// a / divisor from its rounded reciprocal, where no step leaves the normal range: on the same side of every midpoint of
// E2M1 and of small integers as the quotient rounded once, or on the midpoint where that is; for the largest values of
// formats, that quotient itself. Checked for all 2^23 significands of divisors and every a within 8 ulp of a midpoint,
// which stands for any with 8 bits at most; for divisors 2 - 2^-M times powers of two, M = 0 ... 7, as the largest
// values of formats are, for every a.
FP4KIT_DEVICE float quotient_by(float a, float divisor, float reciprocal) {
  const float quotient = a * reciprocal;
  return fma_rn(fma_rn(-divisor, quotient, a), reciprocal, quotient);
}

// What the elements of a block are multiplied with, or divided by: then with the reciprocal, rounded. Where elements
// meet the tensor's encode scale afterwards (R::kThenEncode), reciprocal is that: such a recipe has no way that would
// ask for the other.
struct Factor {
  float value, reciprocal;
};

// The scaled element that is encoded.
template <class R, class In>
FP4KIT_DEVICE float scaled_element(float x, Factor f) {
  const float factor = f.value;
  float y;
  if constexpr (R::kFlush) {
    y = mul_ftz(x, factor);
  } else if constexpr (R::kDivide) {
    y = x / factor;
  } else {
    y = x * factor;
  }
  if constexpr (R::kRoundScaled) y = round_to<In>(y);
  if constexpr (R::kThenEncode) y = y * f.reciprocal;
  if constexpr (R::kNanIsMax) y = is_nan(y) ? max_of<typename R::Element>() : y;
  return y;
}

template <class R>
FP4KIT_DEVICE u32 encode_compared(float x, float step) {
  return encode<typename R::Element, R::kRounding, R::kSign, R::kNanCode, R::kNarrow>(x, step);
}

template <class R>
FP4KIT_DEVICE u32 encode_element(float y) {
  return encode<typename R::Element, R::kRounding, R::kSign, R::kNanCode, R::kNarrow>(y);
}
