// Block rules (see block_rules.cuh) that write E8M0 scales: powers of two, with code = exponent + 127, and code 255 for
// NaN. They give the same results as the functions with these names in reference/block_rules.py. R is the recipe, In
// the type of the elements, and `amax` the largest magnitude of the block. t (TensorScale) holds the tensor's scale for
// encoding, its scale for decoding, and its amax.
#pragma once

#include "block_rules.cuh"

// Base of the rules whose factor is the reciprocal of the scale's value (inverse_e8m0).
struct inverse_factor : by_code {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return inverse_e8m0(code);
  }
};

// Return the E8M0 code of a block scale from `bits`, the float32 bits of an amax. The code is the exponent field of
// `bits`, plus `up` (1 for an amax that is rounded up), minus the exponent of the largest element value of R, clamped
// to 0 ... 255. If the exponent field is all ones, as for infinity and NaN, return 255.
template <class R>
FP4KIT_DEVICE u32 shifted_exponent(u32 bits, i32 up = 0) {
  const i32 field = static_cast<i32>((bits >> 23) & 0xFFu);
  return field == 255 ? 255u : static_cast<u32>(minimum(maximum(field + up - R::Element::kEmax, 0), 255));
}

// Return the E8M0 code (shifted_exponent) of `amax` rounded to `mantissa_bits` mantissa bits, with ties away from zero.
// Return 255 for NaN, for infinity, and if rounding gives infinity.
template <class R>
FP4KIT_DEVICE u32 rounded_exponent(float amax, int mantissa_bits) {
  const u32 bits = bits_of(amax);
  return shifted_exponent<R>(bits > kInfinityBits ? bits : bits + (1u << (22 - mantissa_bits)));
}

struct block_e8m0_floor : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return shifted_exponent<R>(bits_of(amax));
  }
};

struct block_e8m0_ceil : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return shifted_exponent<R>(bits_of(amax), (bits_of(amax) & 0x7FFFFFu) != 0u);
  }
};

struct block_e8m0_even : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return rounded_exponent<R>(amax, R::Element::kMantissaBits);
  }
};

// Return the E8M0 code of amax * (1 / max), rounded up to a power of two. max is the largest value of R's element
// format. An infinite amax gives 254, and NaN gives 255.
template <class R>
FP4KIT_DEVICE u32 rceil(float amax) {
  return encode_e8m0_rp(amax * (1.0f / max_of<typename R::Element>()));
}

struct block_e8m0_rceil : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_finite(amax) ? rceil<R>(amax) : 255u;
  }
};

struct block_e8m0_te : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return rceil<R>(amax);
  }
};

// Return the E8M0 code of FlashInfer's scale: amax * rcp_approx_ftz(max), rounded up to a power of two. Subnormals are
// flushed to zero before that. max is the largest value of R's element format. An infinite amax gives 254, and NaN
// gives 255.
template <class R>
FP4KIT_DEVICE u32 code_flashinfer(float amax) {
  return encode_e8m0_rp(mul_ftz(amax, rcp_approx_ftz(max_of<typename R::Element>())));
}

// FlashInfer's rule for FP4. The factor is the reciprocal of the code's value, except that it is 0 for codes 0, 254 and
// 255. (The reciprocal for code 254 is the subnormal 2^-127, which FlashInfer's arithmetic flushes to 0.)
struct block_e8m0_flashinfer_fp4 : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return code_flashinfer<R>(amax);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u || code >= 254u ? 0.0f : inverse_e8m0(code);
  }
};

struct block_e8m0_flashinfer_fp8 : block_e8m0_flashinfer_fp4 {};

// Return ceilf(float32_log2(x)) for x > 0: the logarithm is rounded to float32 before it is rounded up. For normal x,
// the same integer is computed without a logarithm. Infinity gives 128.
//
// Let x = 2^e * (1 + m / 2^23). The rounded logarithm is e, rather than above e, if log2(1 + m / 2^23) is at most half
// an ulp at e. Let 2^k be the largest power of two that is at most |e|; k is one less if e = -2^k, where the ulp is
// half as large. Then half an ulp is 2^(k - 24), so the condition is m <= 22 / 2^(6 - k).
FP4KIT_DEVICE float ceil_float32_log2(float x) {
  if (x < 0x1p-126f) return ceilf(float32_log2(x));
  const u32 bits = bits_of(x), m = bits & 0x7FFFFFu;
  const i32 e = static_cast<i32>(bits >> 23) - 127;
  const u32 magnitude = static_cast<u32>(e < 0 ? -e - 1 : e);  // -1: for e = -2^k, k is one less
  u32 limit = 0;
  for (u32 k = 1u; k <= 6u; ++k) limit = magnitude >> k ? 22u >> (6u - k) : limit;
  return static_cast<float>(e + (m > limit));
}

struct block_e8m0_modelopt : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / max_of<typename R::Element>();
    const float exponent = ratio > 0.0f ? ceil_float32_log2(ratio) : -127.0f;
    return static_cast<u32>(static_cast<i32>(fminf(fmaxf(exponent, -127.0f), 127.0f)) + 127);
  }
};

struct block_e8m0_te_reference : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_nan(amax) ? 255u : block_e8m0_modelopt::code<R, In>(amax, t);
  }
};

struct block_e8m0_compressed_tensors : inverse_factor {
  static constexpr bool kReadsInput = true;
  // Return the amax as the producer rounds it, by an addition to its bits and a mask. Only float16 amaxes below 2^-14,
  // the smallest normal number, change: they become 2^-14, or 0 if `amax` plus half a step is still below 2^-14. The
  // step is 2^-17 if mantissa_bits is 3, and 2^-15 otherwise. Other amaxes are returned unchanged, also NaN.
  template <class In>
  FP4KIT_DEVICE float rounded_subnormal(float amax, int mantissa_bits) {
    if (In::kMantissaBits != 10 || !(amax < 0x1p-14f)) return amax;
    return amax + (mantissa_bits == 3 ? 0x1p-18f : 0x1p-16f) >= 0x1p-14f ? 0x1p-14f : 0.0f;
  }
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    constexpr int kMantissaBits = R::Element::kBits == 6 ? 3 : 1;
    const u32 code = rounded_exponent<R>(rounded_subnormal<In>(amax, kMantissaBits), kMantissaBits);
    return round_to<In>(value_of_e8m0(code)) == 0.0f ? 127u : code;
  }
};
