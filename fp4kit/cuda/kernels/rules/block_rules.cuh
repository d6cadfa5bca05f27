// Block rules, under the names of reference/block_rules.py: block_<rule> has
//   code(amax, tensor)          the block scale's bit pattern
//   factor(code, amax, tensor)  what elements are multiplied with or divided by
//   of_block(amax, factor)      the factor of a block, of what factor() gives for its code and any block that is not of zeros:
//                               so that a table by codes serves all blocks
#pragma once

#include "scale.cuh"

// np.minimum where NaN propagates, fminf where it is dropped.
template <class R>
FP4KIT_DEVICE float lesser(float a, float b) {
  if constexpr (R::kPropagateNan) return is_nan(a) ? a : fminf(a, b);
  return fminf(a, b);
}

// ---- block rules, E4M3 scales -----------------------------------------------------------------------------------------

template <class R>
FP4KIT_DEVICE u32 encode_scale(float x) {
#if FP4KIT_HAS_CVT_FP8
  if constexpr (R::Scale::kIsE4m3) return cvt_rn_satfinite_e4m3x2(0.0f, x) & 0xFFu;
#endif
  return encode<typename R::Scale, Rounding::rn, Sign::signbit, R::Scale::kNanCode>(x);
}

template <class R>
FP4KIT_DEVICE float decode_scale(u32 code) { return decode<typename R::Scale>(code); }

// The smallest positive value of a format, and the smallest normal one.
template <class F>
FP4KIT_DEVICE float min_normal_of() { return float_of(static_cast<u32>(F::kEmin + 127) << 23); }
template <class F>
FP4KIT_DEVICE float min_subnormal_of() { return float_of(static_cast<u32>(F::kEmin - F::kMantissaBits + 127) << 23); }

// What a factor depends on beside the code: nothing, or whether the block is of zeros, as ftz arithmetic sees it.
struct by_code {
  FP4KIT_DEVICE float of_block(float amax, float factor) { return factor; }
};
struct by_code_or_zero {
  FP4KIT_DEVICE float of_block(float amax, float factor) { return magnitude_of(amax) < kFltMin ? 0.0f : factor; }
};

// np.clip: NaN stays NaN.
FP4KIT_DEVICE float clip(float x, float low, float high) { return is_nan(x) ? x : fminf(fmaxf(x, low), high); }

struct block_te : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(lesser<R>(amax * (t.encode * kInv6), kFltMax));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return lesser<R>(1.0f / (decode_scale<R>(code) * t.decode), kFltMax); }
};

struct block_flashinfer : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(mul_ftz(t.encode, mul_ftz(amax, rcp_approx_ftz(6.0f))));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return of_block(amax, rcp_approx_ftz(mul_ftz(decode_scale<R>(code), rcp_approx_ftz(t.encode))));
  }
};

struct block_flashinfer_precise : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return magnitude_of(amax) < kFltMin ? 0u : encode_scale<R>(mul_ftz(amax, mul_ftz(t.encode, kInv6)));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return of_block(amax, fminf(div_ftz(1.0f, mul_ftz(decode_scale<R>(code), div_ftz(1.0f, t.encode))), kFltMax));
  }
};

struct block_modelopt : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / (max_of<typename R::Element>() * t.decode);
    return encode_scale<R>(clip(ratio == 0.0f ? 1.0f : ratio, min_subnormal_of<typename R::Scale>(), max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return decode_scale<R>(code) * t.decode; }
};

struct block_modelopt_static : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / max_of<typename R::Element>();
    const float scaled = (ratio == 0.0f ? 1.0f : ratio) * static_cast<float>(R::kScaleMax);
    return encode_scale<R>(clip(scaled / (t.amax / max_of<typename R::Element>()), min_subnormal_of<typename R::Scale>(), max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return decode_scale<R>(code) * t.decode; }
};

struct block_torchao : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(clip(amax / max_of<typename R::Element>() / t.decode, min_normal_of<typename R::Scale>(), max_of<typename R::Scale>()));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return t.encode / decode_scale<R>(code); }
};

struct block_compressed_tensors : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const u32 code = encode_scale<R>(round_to<In>(amax / max_of<typename R::Element>()) * t.encode);
    return code == 0u ? encode_scale<R>(0.125f) : code;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return decode_scale<R>(code) / t.encode; }
};

// ---- block rules, E8M0 scales -----------------------------------------------------------------------------------------

struct inverse_factor : by_code {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return inverse_e8m0(code); }
};

// exponent(bits) + up - emax, clamped to the range of E8M0; 255 where the exponent field is full.
template <class R>
FP4KIT_DEVICE u32 shifted_exponent(u32 bits, i32 up = 0) {
  const i32 field = static_cast<i32>((bits >> 23) & 0xFFu);
  return field == 255 ? 255u : static_cast<u32>(minimum(maximum(field + up - R::Element::kEmax, 0), 255));
}

template <class R>
FP4KIT_DEVICE u32 rounded_exponent(float amax, int mantissa_bits) {
  const u32 bits = bits_of(amax);
  return shifted_exponent<R>(bits > kInfinityBits ? bits : bits + (1u << (22 - mantissa_bits)));
}

struct block_e8m0_floor : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return shifted_exponent<R>(bits_of(amax)); }
};

struct block_e8m0_ceil : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return shifted_exponent<R>(bits_of(amax), (bits_of(amax) & 0x7FFFFFu) != 0u); }
};

struct block_e8m0_even : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return rounded_exponent<R>(amax, R::Element::kMantissaBits); }
};

template <class R>
FP4KIT_DEVICE u32 rceil(float amax) { return encode_e8m0_rp(amax * (1.0f / max_of<typename R::Element>())); }

struct block_e8m0_rceil : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return is_finite(amax) ? rceil<R>(amax) : 255u; }
};

struct block_e8m0_te : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return rceil<R>(amax); }
};

struct block_e8m0_te_reference : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return encode_e8m0_rp(amax / max_of<typename R::Element>()); }
};

// t = amax * rcp(max), flushed; code 254 has the subnormal inverse 2^-127, which ftz makes 0.
template <class R>
FP4KIT_DEVICE u32 code_flashinfer(float amax) {
  return encode_e8m0_rp(mul_ftz(amax, rcp_approx_ftz(max_of<typename R::Element>())));
}

struct block_e8m0_flashinfer_fp4 : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return code_flashinfer<R>(amax); }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return code == 0u || code >= 254u ? 0.0f : inverse_e8m0(code); }
};

struct block_e8m0_flashinfer_fp8 : block_e8m0_flashinfer_fp4 {};

struct block_e8m0_modelopt : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / max_of<typename R::Element>();
    const float exponent = ratio > 0.0f ? ceilf(static_cast<float>(log2(static_cast<double>(ratio)))) : -127.0f;
    return static_cast<u32>(static_cast<i32>(fminf(fmaxf(exponent, -127.0f), 127.0f)) + 127);
  }
};

struct block_e8m0_compressed_tensors : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const u32 code = rounded_exponent<R>(amax, R::Element::kBits == 6 ? 3 : 1);
    return round_to<In>(decode_e8m0(code)) == 0.0f ? 127u : code;
  }
};

// No block scales: the tensor's own, in the direction in which it is applied.
struct block_none : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return 0u; }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return R::kDivide ? t.decode : t.encode; }
};
