// Block rules (see block_rules.cuh) of serving engines and quantizers that write E8M0 scales: powers of two, with code
// = exponent + 127, and code 255 for NaN. They give the same results as the functions with these names in
// reference/block_rules.py. R is the recipe, In the type of the elements, and `amax` the largest magnitude
// of the block. t (TensorScale) holds the tensor's scale for encoding, its scale for decoding, and its amax.
#pragma once

#include "block_rules_e8m0.cuh"

// Base of the rules whose factor depends on the amax in addition to the code. They have no table of factors by code.
struct by_amax {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};

// Return the E8M0 code of 2^exponent: the exponent, clamped to [-127, 127] and truncated toward zero to an integer,
// plus 127. Return 0 if the exponent is NaN.
FP4KIT_DEVICE u32 clipped_exponent(float exponent) {
  return is_nan(exponent) ? 0u : static_cast<u32>(static_cast<i32>(fminf(fmaxf(exponent, -127.0f), 127.0f)) + 127);
}

// ---- rules that compute the scale from the bits of the amax

// Round amax to as many mantissa bits as R's element format has, with ties away from zero. Return the exponent field of
// the result minus the exponent of the largest element value; this may be negative. Return 255 for infinity, for NaN,
// and if rounding gives infinity. NaN is tested first, because a payload of ones, which GPU instructions produce, would
// carry into the sign bit.
template <class R>
FP4KIT_DEVICE i32 even_exponent(float amax) {
  if (is_nan(amax)) return 255;
  const i32 field = static_cast<i32>((bits_of(amax) + (1u << (22 - R::Element::kMantissaBits))) >> 23 & 0xFFu);
  return field == 255 ? 255 : field - R::Element::kEmax;
}

struct block_e8m0_even_finite : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return static_cast<u32>(minimum(maximum(even_exponent<R>(amax), 0), 254));
  }
};

struct block_e8m0_quark_even : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_nan(amax) ? 127u : static_cast<u32>(minimum(maximum(even_exponent<R>(amax), 1), 254));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (is_nan(amax)) return nan_value();
    return code == 1u && even_exponent<R>(amax) < 1 ? 0x1p127f : inverse_e8m0(code);
  }
};

// Return the exponent field (bits 23 to 30) of the float32 x, plus 1 if any mantissa bit is set. For x > 0 this is the
// biased exponent of x rounded up to a power of two. Infinity gives 255, and NaN gives 256.
FP4KIT_DEVICE u32 exponent_up(float x) {
  return (bits_of(x) >> 23 & 0xFFu) + ((bits_of(x) & 0x7FFFFFu) != 0u);
}

struct block_e8m0_triton_up : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return exponent_up(amax / max_of<typename R::Element>()) & 255u;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u || code == 255u ? 0.0f : inverse_e8m0(code);
  }
};

struct block_e8m0_triton_down : block_e8m0_triton_up {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return bits_of(amax / max_of<typename R::Element>()) >> 23 & 255u;
  }
};

struct block_e8m0_fouroversix : block_e8m0_triton_up {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u ? nan_value() : code == 255u ? 0.0f : inverse_e8m0(code);
  }
};

struct block_e8m0_fouroversix_4 : block_e8m0_fouroversix {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return exponent_up(amax / 4.0f) & 255u;
  }
};

struct block_e8m0_even_normal : block_e8m0_triton_up {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return block_e8m0_even_finite::code<R, In>(amax, t);
  }
};

struct block_e8m0_deepgemm : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float floor = is_nan(amax) ? amax : fmaxf(amax, 1e-4f);
    return minimum(maximum(exponent_up(floor / max_of<typename R::Element>()), 1u), 254u);
  }
};

// ---- rules that compute the scale from a logarithm, in float32 or in the type of the elements

// Base of the rules whose factor is the reciprocal of the scale's value (inverse_e8m0), or NaN if the amax is infinite
// or NaN.
struct finite_inverse : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return is_finite(amax) ? inverse_e8m0(code) : nan_value();
  }
};

struct block_e8m0_auto_round : finite_inverse {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    if (!is_finite(amax)) return 0u;
    constexpr float kEmax = static_cast<float>(R::Element::kEmax);
    return clipped_exponent(amax == 0.0f ? 1.0f - kEmax : floorf(float32_log2(amax)) - kEmax);
  }
};

// Return the E8M0 code of 2^ceil(log2(ratio)). `ratio` is the block's amax divided by the element value to which the
// rule maps the amax. If the amax is 0, return 128. If it is infinite or NaN, return 0.
FP4KIT_DEVICE u32 auto_round_up(float amax, float ratio) {
  if (!is_finite(amax)) return 0u;
  return clipped_exponent(amax == 0.0f ? 1.0f : ceilf(float32_log2(ratio)));
}

// Return the number by which elements are multiplied: the reciprocal of the value of `code`, which auto_round_up
// returned for this amax and ratio. Return NaN if the amax is infinite or NaN, or if `ratio` underflows to 0 for a
// positive amax (its log2 is then -infinity).
FP4KIT_DEVICE float auto_round_up_factor(u32 code, float amax, float ratio) {
  return is_finite(amax) && (ratio != 0.0f || amax == 0.0f) ? inverse_e8m0(code) : nan_value();
}

struct block_e8m0_auto_round_rceil : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return auto_round_up(amax, amax / max_of<typename R::Element>());
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return auto_round_up_factor(code, amax, amax / max_of<typename R::Element>());
  }
};

struct block_e8m0_auto_round_rceil_v2 : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return auto_round_up(amax, amax / 7.25f);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return auto_round_up_factor(code, amax, amax / 7.25f);
  }
};

// Return Quark's scale T(2^(round(T(log2(amax))) - emax)). T rounds to the type In, and emax is the exponent of R's
// largest element value. `round` is ceil if kUp, and otherwise floor. If the scale is 0 in T, return 2^-23. If the
// power is above 2^127, return infinity. If the amax is not finite, return the amax.
template <class R, class In, bool kUp>
FP4KIT_DEVICE float quark_scale(float amax) {
  if (!is_finite(amax)) return amax;
  const float logarithm = round_to<In>(float32_log2(amax)), rounded = kUp ? ceilf(logarithm) : floorf(logarithm);
  const i32 e = static_cast<i32>(fminf(fmaxf(rounded, -200.0f), 200.0f)) - R::Element::kEmax;
  if (e > 127) return float_of(kInfinityBits);
  const float power = e < -149 ? 0.0f : float_of(e < -126 ? 1u << (e + 149) : static_cast<u32>(e + 127) << 23),
              scale = round_to<In>(power);
  return scale == 0.0f ? 0x1p-23f : scale;
}

// Base of Quark's rules whose scale is a power of two (quark_scale): the logarithm of the amax is rounded up if kUp,
// and down otherwise. Elements are divided by the factor, which is the scale.
template <bool kUp>
struct quark_by_log : by_amax {
  static constexpr bool kReadsInput = true;
  // Return the code of `scale`, which quark_scale computed from this amax: the exponent field of the scale, clamped to
  // 1 ... 254. Return 127 if the amax is infinite or NaN.
  FP4KIT_DEVICE u32 code_of(float amax, float scale) {
    return is_finite(amax) ? minimum(maximum(bits_of(scale) >> 23 & 0xFFu, 1u), 254u) : 127u;
  }
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return code_of(amax, quark_scale<R, In, kUp>(amax));
  }
  // Return the number by which elements are divided. If `code` is the code of the scale that follows from the amax,
  // return that scale, even if the code decodes to a different number. Otherwise the caller chose another code, so
  // return the value of `code`.
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = quark_scale<R, In, kUp>(amax);
    return code == code_of(amax, scale) ? scale : value_of_e8m0(code);
  }
};
struct block_e8m0_quark_floor : quark_by_log<false> {};
struct block_e8m0_quark_ceil : quark_by_log<true> {};

struct block_e8m0_sglang : finite_inverse {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    if (!is_finite(amax)) return 0u;
    return clipped_exponent(ceilf(round_to<In>(float32_log2(round_to<In>(amax / max_of<typename R::Element>())))));
  }
};

struct block_e8m0_sglang_kv : finite_inverse {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    if (!is_finite(amax)) return 0u;
    const float ratio = fmaxf(round_to<In>(amax / max_of<typename R::Element>()), round_to<In>(1e-10f));
    return clipped_exponent(ceilf(round_to<In>(float32_log2(ratio))));
  }
};

struct block_e8m0_qwix : by_amax {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float scale = qwix_scale<R, In>(amax);
    if (!is_finite(scale)) return 255u;
    const float logarithm = round_to<In>(static_cast<float>(log(static_cast<double>(scale))));
    return clipped_exponent(ceilf(round_to<In>(logarithm * qwix_reciprocal<In>(round_to<In>(0.69314718f)))));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return !is_nan(amax) && !is_finite(amax) ? 0.0f : inverse_e8m0(code);
  }
};

// ---- rules of comfy-kitchen, MSLK, aiter and DeepSeek

struct block_e8m0_comfy_kitchen : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_finite(amax) ? block_e8m0_modelopt::code<R, In>(amax, t) : 0u;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code != 0u ? inverse_e8m0(code) : amax == 0.0f ? 1.0f : float_of(kInfinityBits);
  }
};

// Base of MSLK's rules that compute the code from the bits of the amax. The code is the exponent field of the amax
// after kAddend is added to its bits, minus emax, the exponent of R's largest element value. It is clamped to 0 ... 254
// - emax. A NaN amax counts as infinity.
template <u32 kAddend>
struct mslk_bits : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const i32 field = static_cast<i32>((minimum(bits_of(amax), kInfinityBits) + kAddend) >> 23);
    return static_cast<u32>(minimum(maximum(field - R::Element::kEmax, 0), 254 - R::Element::kEmax));
  }
};
struct block_e8m0_mslk_ceil : mslk_bits<0x7FFFFFu> {};
struct block_e8m0_mslk_even : mslk_bits<0x1FFFFFu> {};

struct block_e8m0_mslk_nearest : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    if (!is_finite(amax)) return static_cast<u32>(254 - R::Element::kEmax);
    const float exponent = floorf(float32_log2(amax > 0.0f ? amax : kFltMin) + 0.5f);
    const i32 code = static_cast<i32>(exponent) + 127 - R::Element::kEmax;
    return static_cast<u32>(minimum(maximum(code, 0), 254 - R::Element::kEmax));
  }
};

struct block_e8m0_aiter_up : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return minimum(exponent_up(amax / max_of<typename R::Element>()), 255u);
  }
};

struct block_e8m0_aiter_ceil : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return minimum(exponent_up(amax / static_cast<float>(1 << R::Element::kEmax)), 255u);
  }
};

struct block_e8m0_deepseek : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return minimum(exponent_up((is_nan(amax) ? amax : fmaxf(amax, 6.0f * kFltMin)) * kInv6), 255u);
  }
};

struct block_e8m0_deepseek_fp8 : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = (is_nan(amax) ? amax : fmaxf(amax, 1e-4f)) * (1.0f / max_of<typename R::Element>());
    return minimum(exponent_up(ratio), 255u);
  }
};

// ---- rules of JAX, miles and NNCF

// JAX up to 0.11: XLA on a CPU flushes subnormals, and takes 1 / max as a constant of float16 or float32. On a GPU it
// divides float16 amaxes, except that jax.jit (kJit) makes it multiply by a constant of type In.
template <bool kGpu, bool kJit>
struct jax_power : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    constexpr bool kIsHalf = In::kMantissaBits == 10;
    const float max = max_of<typename R::Element>(), exact = 1.0f / max;
    const float inverse = kIsHalf || (kGpu && kJit) ? round_to<In>(exact) : exact;
    const float q = kGpu ? kIsHalf && !kJit ? divide_full(amax, max) : amax * inverse : mul_ftz(amax, inverse);
    const u32 bits = bits_of(round_to<In>(q)), field = bits >> 23 & 0xFFu, mantissa = bits & 0x7FFFFFu;
    return field + (mantissa > 0u && field != 254u && (field > 0u || mantissa > 0x400000u)) & 255u;  // wraps for NaN
  }
  // Return the reciprocal of the value that the code has in the type In, where code 255 is infinity.
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (kJit && !kGpu && sizeof(typename In::Bits) == 4 && code == 0u) return 0x1p127f;
    const float zero = In::kMantissaBits == 10 ? 0x1p-15f : 0x1p-127f;
    const float value = round_to<In>(code == 0u ? zero : float_of(code << 23));
    return round_to<In>(kGpu ? 1.0f / value : div_ftz(1.0f, value));
  }
};
struct block_e8m0_jax_011 : jax_power<false, false> {};
struct block_e8m0_jax_011_jit : jax_power<false, true> {};
struct block_e8m0_jax_gpu : jax_power<true, false> {};
struct block_e8m0_jax_gpu_jit : jax_power<true, true> {};

// JAX since 0.12 computes in float32, whatever the type of the elements.
template <bool kJit>
struct jax_float32 : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return jax_power<false, kJit>::template code<R, Float32>(amax, t);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return jax_power<false, kJit>::template factor<R, Float32>(code, amax, t);
  }
};
struct block_e8m0_jax : jax_float32<false> {};
struct block_e8m0_jax_jit : jax_float32<true> {};

template <bool kDsv4>
struct miles_ceil : block_e8m0_modelopt {
  static constexpr bool kReadsAmax = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return kDsv4 && amax > kFltMax ? 0u : block_e8m0_modelopt::code<R, In>(amax, t);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (kDsv4) return amax > kFltMax ? 0.0f : inverse_e8m0(code);
    return is_nan(amax) ? nan_value() : inverse_e8m0(code);
  }
};
struct block_e8m0_miles_ceil : miles_ceil<false> {};
struct block_e8m0_miles_dsv4 : miles_ceil<true> {};

struct block_e8m0_miles_even : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return static_cast<u32>(maximum(minimum(even_exponent<R>(amax), 255 - R::Element::kEmax), 0));
  }
};

template <bool kIsSmall>
struct nncf_power : inverse_factor {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float scale = nncf_scale<kIsSmall>(amax, max_of<typename R::Element>());
    if (is_nan(scale)) return 255u;
    const float natural = static_cast<float>(log(static_cast<double>(scale)));
    return clipped_exponent(ceilf(kIsSmall ? float32_log2(scale) : natural * (1.0f / 0.69314718f)));
  }
};
struct block_e8m0_nncf : nncf_power<false> {};
struct block_e8m0_nncf_small : nncf_power<true> {};
