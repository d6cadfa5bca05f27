// Block rules (see block_rules.cuh) of serving engines and quantizers that write E4M3 scales. They give the same
// results as the functions with these names in reference/block_rules.py. R is the recipe, In the type of
// the elements, and `amax` the largest magnitude of the block. t (TensorScale) holds the tensor's scale for encoding,
// its scale for decoding, and its amax.
#pragma once

#include "block_rules_e4m3.cuh"

// The number that Quark uses in place of 0 as a block scale, and as the divisor of elements.
constexpr float kQuarkZero = 0x1p-23f;

struct block_vllm : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(t.encode * (amax * kInv6));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code) * t.decode;
    return 1.0f / (scale == 0.0f ? 1e8f : scale);
  }
};

struct block_vllm_cuda : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return block_vllm::code<R, In>(amax, t);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code);
    return scale == 0.0f ? 0.0f : t.encode * rcp_approx_ftz(scale);
  }
};

struct block_auto_round : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return block_vllm::code<R, In>(amax, t);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code) * t.decode;
    return scale == 0.0f ? 0.0f : 1.0f / scale;
  }
};

struct block_quark : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const u32 code = encode_scale<R>(amax / (max_of<typename R::Element>() * t.decode));
    return code == 0u ? encode_scale<R>(1.0f) : code;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code) * t.decode;
    return scale == 0.0f ? kQuarkZero : scale;
  }
};

struct block_quark_file : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float scale = amax / max_of<typename R::Element>();
    const u32 first = encode_scale<R>((scale == 0.0f ? kQuarkZero : scale) / t.decode);
    return encode_scale<R>(decode_scale<R>(first) * t.decode / t.decode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return block_quark::factor<R, In>(code, amax, t);
  }
};

// Return the unrounded block scale of a fouroversix rule. It is `ratio`, which the caller has computed, or 0 if the
// tensor's amax t.amax is 0 (`ratio` may then be NaN).
FP4KIT_DEVICE float zero_of_zeros(float ratio, TensorScale t) {
  return t.amax == 0.0f ? 0.0f : ratio;
}

// Return the number by which fouroversix multiplies elements under the block scale `scale`: 1 / (t.decode * scale), or
// 0 if `scale` is 0. An infinite quotient is replaced by NaN, unless R::kKeepInfinity is true.
template <class R>
FP4KIT_DEVICE float fouroversix_factor(float scale, TensorScale t) {
  const float inverse = 1.0f / (t.decode * scale);
  return scale == 0.0f ? 0.0f : R::kKeepInfinity || is_finite(inverse) ? inverse : nan_value();
}

// Base of fouroversix's rules. They scale elements so that the amax of a block becomes kTop, or the largest element
// value if kTop is 0.
template <int kTop>
struct fouroversix_static : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float ratio = amax / (kTop ? static_cast<float>(kTop) : max_of<typename R::Element>()) * t.encode;
    return encode_scale<R>(zero_of_zeros(ratio, t));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return fouroversix_factor<R>(decode_scale<R>(code), t);
  }
};
struct block_fouroversix : fouroversix_static<0> {};
struct block_fouroversix_4 : fouroversix_static<4> {};

struct block_qwix : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(qwix_scale<R, In>(amax));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return qwix_reciprocal<In>(decode_scale<R>(code));
  }
};

struct block_vllm_kv : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(t.encode * (amax * rcp_approx_ftz(6.0f)));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code);
    return scale == 0.0f ? 0.0f : rcp_approx_ftz(scale * rcp_approx_ftz(t.encode));
  }
};

struct block_flashinfer_kv : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(mul_ftz(rcp_approx_ftz(t.decode), mul_ftz(amax, rcp_approx_ftz(6.0f))));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return block_factor(amax, rcp_approx_ftz(mul_ftz(decode_scale<R>(code), t.decode)));
  }
};

struct block_flashinfer_kv_page : by_code_or_zero {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(mul_ftz(amax, rcp_approx_ftz(mul_ftz(6.0f, t.decode))));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code);
    return block_factor(amax, scale > 0.0f ? rcp_approx_ftz(mul_ftz(scale, t.decode)) : 0.0f);
  }
};

struct block_flashinfer_cute : block_te {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return fminf(1.0f / (decode_scale<R>(code) * (1.0f / t.encode)), kFltMax);
  }
};

struct block_comfy_kitchen : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(amax / max_of<typename R::Element>() / t.decode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code) * t.decode;
    return scale == 0.0f ? nan_value() : scale;
  }
};

struct block_comfyui : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(round_to<In>(round_to<In>(amax / max_of<typename R::Element>()) / round_to<In>(t.decode)));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return round_to<In>(decode_scale<R>(code) * round_to<In>(t.decode));
  }
};

struct block_comfyui_cuda : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(round_to<In>(round_to<In>(amax * kInv6) / round_to<In>(t.decode)));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return block_comfyui::factor<R, In>(code, amax, t);
  }
};

// Return the code of the block scale `scale`, after it is clamped to the range from the smallest positive to the
// largest value of the scale format. So 0, negative scales and NaN give the code of the smallest positive value.
template <class R>
FP4KIT_DEVICE u32 mslk_code(float scale) {
  return encode_scale<R>(fminf(fmaxf(scale, min_subnormal_of<typename R::Scale>()), max_of<typename R::Scale>()));
}

struct block_mslk : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return mslk_code<R>(amax / max_of<typename R::Element>() * t.encode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return t.encode / decode_scale<R>(code);
  }
};

struct block_mslk_fast : block_mslk {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return mslk_code<R>(amax * kInv6 * t.encode);
  }
};

struct block_mslk_power : block_mslk {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float power = float_of((minimum(bits_of(amax / 4.0f * t.encode), kInfinityBits) + 0x1FFFFFu) & kInfinityBits);
    return encode_scale<R>(power > 0.0f && is_finite(power) ? power : 1.0f);
  }
};

// Base of the rules that multiply elements by the reciprocal of the unrounded block scale, not of the stored one. So
// the factor depends on the amax, and there is no table of factors by code.
struct by_unrounded_scale {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
  // Return the number whose reciprocal multiplies elements. `scale` is the unrounded scale that the rule computes for
  // the block. If `code` is its code, return `scale`. Otherwise the caller chose another code, so return the value of
  // `code`.
  template <class R>
  FP4KIT_DEVICE float scale_or_given(u32 code, float scale) {
    return encode_scale<R>(scale) == code ? scale : decode_scale<R>(code);
  }
};

struct block_nunchaku : by_unrounded_scale {
  FP4KIT_DEVICE float scale(float amax) { return fminf(amax * kInv6, 448.0f); }
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(scale(amax));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return rcp_approx_ftz(scale_or_given<R>(code, scale(amax)));
  }
};

struct block_aiter : by_unrounded_scale {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(amax * kInv6);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return divide_full(1.0f, scale_or_given<R>(code, amax * kInv6));
  }
};

struct block_deepseek : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float max = max_of<typename R::Element>(), floor = max * min_subnormal_of<typename R::Scale>();
    return encode_scale<R>((is_nan(amax) ? amax : fmaxf(amax, floor)) / max);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return decode_scale<R>(code) * t.decode;
  }
};

// Rules whose factor is the reciprocal of the block scale or, if kTimesEncode, its product with the encode scale.
template <bool kFlushes, bool kTimesEncode>
struct jax_block : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale<R>(kFlushes ? mul_ftz(mul_ftz(amax, t.encode), kInv6) : amax * t.encode * kInv6);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float inverse = 1.0f / decode_scale<R>(code);
    return kTimesEncode ? mul_ftz(t.encode, inverse) : inverse;
  }
};
struct block_jax : jax_block<true, false> {};
struct block_jax_jit : jax_block<true, true> {};
struct block_jax_gpu : jax_block<false, false> {};

// Return the code of a block scale that is rounded to float16 first. Scales above 464 get a NaN code.
template <class R>
FP4KIT_DEVICE u32 encode_half_scale(float scale) {
  return encode<typename R::Scale, Rounding::rnh, Sign::signbit, R::Scale::kNanCode>(scale);
}

template <bool kIsSmall>
struct nncf_block : by_amax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_half_scale<R>(factor<R, In>(0u, amax, t) / t.decode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return nncf_scale<kIsSmall>(amax, max_of<typename R::Element>());
  }
};
struct block_nncf : nncf_block<false> {};
struct block_nncf_small : nncf_block<true> {};

struct block_onednn : block_jax {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_half_scale<R>(amax == 0.0f ? 1.0f : amax / max_of<typename R::Element>());
  }
};

struct block_te_1x64 : block_te {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code % 128u == 0u ? 0.0f : t.encode / decode_scale<R>(code);
  }
};

struct block_hf_kernels : block_fouroversix {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = decode_scale<R>(code);
    return t.encode / (scale < 1e-12f ? 1e-12f : scale);
  }
};
