// Block rules (see block_rules.cuh) that write E4M3 scales. They give the same results as the functions with these
// names in reference/block_rules.py. R is the recipe, In the type of the elements, and F a format. `amax` is the
// largest magnitude of the block, and t holds the tensor's scale for encoding, its scale for decoding, and its amax
// (TensorScale).
#pragma once

#include "block_rules.cuh"

// Return the smaller of a and b. If a is NaN, return NaN if NaN propagates in the recipe R (R::kPropagateNan), and
// otherwise b. b must not be NaN.
template <class R>
FP4KIT_DEVICE float lesser(float a, float b) {
  if constexpr (R::kPropagateNan) return is_nan(a) ? a : fminf(a, b);
  return fminf(a, b);
}

// Return the smallest normal value of the format F.
template <class F>
FP4KIT_DEVICE float min_normal_of() {
  return float_of(static_cast<u32>(F::kEmin + 127) << 23);
}
// Return the smallest positive value of the format F.
template <class F>
FP4KIT_DEVICE float min_subnormal_of() {
  return float_of(static_cast<u32>(F::kEmin - F::kMantissaBits + 127) << 23);
}

// Return x clamped to [low, high]. If x is NaN, return x, as np.clip does.
FP4KIT_DEVICE float clip(float x, float low, float high) {
  return is_nan(x) ? x : fminf(fmaxf(x, low), high);
}

struct block_te : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(lesser<R>(amax * (t.encode * kInv6), kFltMax));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return lesser<R>(1.0f / (decode_scale<R>(code) * t.decode), kFltMax);
  }
};

struct block_flashinfer : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(mul_ftz(t.encode, mul_ftz(amax, rcp_approx_ftz(6.0f))));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return block_factor(amax, rcp_approx_ftz(mul_ftz(decode_scale<R>(code), rcp_approx_ftz(t.encode))));
  }
};

struct block_flashinfer_precise : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return magnitude_of(amax) < kFltMin ? 0u : encode_scale<R>(mul_ftz(amax, mul_ftz(t.encode, kInv6)));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return block_factor(amax, fminf(div_ftz(1.0f, mul_ftz(decode_scale<R>(code), div_ftz(1.0f, t.encode))), kFltMax));
  }
};

struct block_modelopt : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / (max_of<typename R::Element>() * t.decode);
    return encode_scale<R>(
        clip(ratio == 0.0f ? 1.0f : ratio, min_subnormal_of<typename R::Scale>(), max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return decode_scale<R>(code) * t.decode;
  }
};

struct block_modelopt_static : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / max_of<typename R::Element>();
    const float scaled = (ratio == 0.0f ? 1.0f : ratio) * static_cast<float>(R::kScaleMax);
    return encode_scale<R>(clip(scaled / (t.amax / max_of<typename R::Element>()),
                                min_subnormal_of<typename R::Scale>(), max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return decode_scale<R>(code) * t.decode;
  }
};

struct block_torchao : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(clip(amax / max_of<typename R::Element>() / t.decode, min_normal_of<typename R::Scale>(),
                                max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return t.encode / decode_scale<R>(code);
  }
};

struct block_compressed_tensors : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const u32 code = encode_scale<R>(round_to<In>(amax / max_of<typename R::Element>()) * t.encode);
    return code | static_cast<u32>(code == 0u) * encode_scale<R>(0.125f);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return decode_scale<R>(code) / t.encode;
  }
};
