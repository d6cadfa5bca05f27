// One block in registers: its amax, the scaling of its elements, their codes and values. What R::kX means: see Recipe.
#pragma once

#include "random.cuh"
#include "scale.cuh"

enum class AmaxNan { ignore, propagate, lanes };
enum class AmaxInput { all, no_nan, finite };  // which elements count in the amax of a tensor

// Larger of two magnitudes; NaN as the recipe says.
template <AmaxNan kNan>
FP4KIT_DEVICE float larger(float a, float b) {
  if constexpr (kNan == AmaxNan::propagate) return float_of(maximum(bits_of(a), bits_of(b)));  // NaN has the largest bits
  return fmaxf(a, b);
}

// amax of kCount elements: 0 for none that counts.
template <AmaxNan kNan, int kCount>
FP4KIT_DEVICE float amax_of(const float (&x)[kCount]) {
  if constexpr (kNan == AmaxNan::lanes) {
    float even = magnitude_of(x[0]), odd = magnitude_of(x[1]);
#pragma unroll
    for (int i = 2; i < kCount; i += 2) {
      even = fmaxf(even, magnitude_of(x[i]));
      odd = fmaxf(odd, magnitude_of(x[i + 1]));
    }
    return even > odd ? even : odd;
  } else {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) amax = larger<kNan>(amax, magnitude_of(x[i]));
    return amax;
  }
}

// y_j = 1/4 sum_i s_i H_ij x_i over 16 elements, in double, rounded to In. Same order of sums as reference/hadamard.py.
template <u32 kSignMask, class In, int kRun>
FP4KIT_DEVICE void hadamard_run(float (&x)[kRun]) {
#pragma unroll
  for (int start = 0; start < kRun; start += 16) {
    double y[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) y[i] = kSignMask >> i & 1 ? -static_cast<double>(x[start + i]) : x[start + i];
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i & distance) continue;
        const double low = y[i], high = y[i + distance];
        y[i] = low + high;
        y[i + distance] = low - high;
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) x[start + i] = round_double_to<In>(y[i] * 0.25);
  }
}

// The scaled element that is encoded.
template <class R, class In>
FP4KIT_DEVICE float scaled_element(float x, float factor) {
  float y;
  if constexpr (R::kFlush) {
    y = mul_ftz(x, factor);
  } else if constexpr (R::kDivide) {
    y = x / factor;
  } else {
    y = x * factor;
  }
  if constexpr (R::kRoundScaled) y = round_to<In>(y);
  if constexpr (R::kNanIsMax) y = is_nan(y) ? max_of<typename R::Element>() : y;
  return y;
}

template <class R>
FP4KIT_DEVICE u32 encode_element(float y) {
  return encode<typename R::Element, R::kRounding, R::kSign, R::kNanCode, R::kNarrow>(y);
}

// Decode rules, as reference/dequantize.py names them: value * what the block's scales say.
struct decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return decode_scale<R>(code) * t.decode; }
  FP4KIT_DEVICE float apply(float value, float scale) { return value * scale; }
};
struct decode_tensor {  // decode_product without block scales
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return t.decode; }
  FP4KIT_DEVICE float apply(float value, float scale) { return value * scale; }
};
struct decode_te : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return decode_scale<R>(code) * t.amax * (1.0f / full_range<R>()); }
};
struct decode_compressed_tensors : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return decode_scale<R>(code) / t.encode; }
};
struct decode_e8m0_rule : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return decode_e8m0(code); }
};
struct decode_e8m0_flashinfer_host : decode_e8m0_rule {
  FP4KIT_DEVICE float apply(float value, float scale) { return (value + 0.0f) * scale; }  // -0 + 0 = +0
};
struct decode_e8m0_flashinfer_api : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return float_of(code << 23); }
};
struct decode_int_modelopt {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) { return t.amax <= kTinyAmax ? -1.0f : t.encode; }  // no scale is negative
  FP4KIT_DEVICE float apply(float value, float scale) { return scale < 0.0f ? 0.0f : value / scale; }
};
