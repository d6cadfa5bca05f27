// Tensor rules: a struct tensor_<rule> computes the scale of a tensor (TensorScale) from the tensor's amax, its largest
// magnitude. It gives the same results as the function with this name in reference/tensor_rules.py. Its member scale<R,
// In>(amax) returns the TensorScale. R is the recipe: a struct of constants, formats (R::Element, R::Scale) and rules
// that cuda/compiler.py writes. In is the type of the elements (Float32, Float16 or Bfloat16). A code is the
// integer that stands for a value in memory.
#pragma once

#include "codec.cuh"

constexpr float kInv6 = 1.0f / 6.0f;  // rounds to 0x3E2AAAAB
constexpr float kTinyAmax = 0x1p-24f;

// A tensor's scale in both directions, and the amax from which it was computed. Elements are multiplied by `encode`
// when they are encoded, and by `decode` when they are decoded. If the recipe has no tensor scale, all three are 1.
struct TensorScale {
  float encode, decode, amax;
};

struct tensor_fouroversix_4;
// LargestElement<Rule>::kValue is the element value to which a tensor rule maps the tensor's amax. 0 stands for the
// largest value of the element format.
template <class Rule>
struct LargestElement {
  static constexpr float kValue = 0.0f;
};
template <>
struct LargestElement<tensor_fouroversix_4> {
  static constexpr float kValue = 4.0f;
};

// Return the amax that a tensor scale of 1 covers: R::kScaleMax (the largest block scale that R uses) times the element
// value to which R's tensor rule maps the amax. That is the largest element value, or 4 for tensor_fouroversix_4.
template <class R>
FP4KIT_DEVICE float full_range() {
  constexpr float kTop = LargestElement<typename R::TensorRule>::kValue;
  return (kTop > 0.0f ? kTop : max_of<typename R::Element>()) * static_cast<float>(R::kScaleMax);
}

// ---- functions for the codes of block scales

// Return the code of a block scale x in the scale format of R, rounded to nearest even. Magnitudes above the largest
// value of the format, and infinity, get the code of that value. NaN gives the NaN code of the format. If x is negative
// and the format has a sign bit, the code has it too.
template <class R>
FP4KIT_DEVICE u32 encode_scale(float x) {
#if FP4KIT_HAS_CVT_FP8
  if constexpr (R::Scale::kIsE4m3) return cvt_rn_satfinite_e4m3x2(0.0f, x) & 0xFFu;
#endif
  return encode<typename R::Scale, Rounding::rn, Sign::signbit, R::Scale::kNanCode>(x);
}

// Return the value of a block scale's code in the scale format of R, as float32.
template <class R>
FP4KIT_DEVICE float decode_scale(u32 code) {
  return decode<typename R::Scale>(code);
}

// ---- tensor rules

struct tensor_none {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    return {1.0f, 1.0f, 1.0f};
  }
};

struct tensor_te_reference {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float ratio = full_range<R>() / amax;
    float encode = is_nan(ratio) ? ratio : fminf(ratio, kFltMax);
    if (encode == 0.0f) encode = 1.0f;
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_te {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const TensorScale t = tensor_te_reference::scale<R, In>(amax);
    const float encode = amax == 0.0f ? 1.0f : t.encode;
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_te_primary_weight {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = amax > 0.0f ? fminf(full_range<R>() / fmaxf(amax, kFltMin), kFltMax) : 1.0f;
    return {encode, 1.0f / (encode <= 0.0f ? 1.0f : encode), amax};
  }
};

struct tensor_flashinfer {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float ratio = full_range<R>() / amax;
    const float encode = is_nan(ratio) ? ratio : fminf(ratio, kFltMax);
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_flashinfer_token {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const TensorScale t = tensor_te_reference::scale<R, In>(amax);
    return {t.encode, amax == 0.0f ? 0.0f : t.decode, amax};
  }
};

struct tensor_flashinfer_token_precise {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = tensor_te_reference::scale<R, In>(amax).encode;
    return {encode, div_ftz(1.0f, encode), amax};
  }
};

struct tensor_flashinfer_token_fast {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = mul_ftz(amax, 1.0f / full_range<R>());
    return {decode == 0.0f ? kFltMax : rcp_approx_ftz(decode), decode, amax};
  }
};

struct tensor_divided {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = amax / full_range<R>();
    return {1.0f / decode, decode, amax};
  }
};

// The outer scales of dual-level MXFP4, by which elements are divided.
struct tensor_msmodelslim {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = amax / max_of<typename R::Element>();
    return {1.0f / decode, decode, amax};
  }
};

// SmallestNormal<In>::kValue is the smallest normal number of the type In. bfloat16 has that of float32.
template <class In>
struct SmallestNormal {
  static constexpr float kValue = kFltMin;
};
template <>
struct SmallestNormal<Float16> {
  static constexpr float kValue = 0x1p-14f;
};

struct tensor_compressed_tensors {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float floor = is_nan(amax) ? amax : fmaxf(amax, SmallestNormal<In>::kValue);
    float encode = round_to<In>(round_to<In>(1.0f / floor) * full_range<R>());
    if (!is_finite(encode)) encode = 1.0f;
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_mlx {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    return {full_range<R>() / amax, amax / full_range<R>(), amax};
  }
};

struct tensor_fp8_modelopt {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = max_of<typename R::Element>() / (amax <= kTinyAmax ? 1.0f : amax);
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_fp8_modelopt_cpu {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = 1.0f / (amax <= kTinyAmax ? 1.0f : amax) * max_of<typename R::Element>();
    return {encode, 1.0f / encode, amax};
  }
};

// Epsilon<In>::kValue is the distance from 1 to the next larger number of the type In.
template <class In>
struct Epsilon {
  static constexpr float kValue = sizeof(typename In::Bits) == 4 ? 0x1p-23f : In::kIsBfloat16 ? 0x1p-7f : 0x1p-10f;
};

struct tensor_fp8_compressed_tensors {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float rounded = round_to<In>(amax / max_of<typename R::Element>());
    const float decode = rounded == 0.0f ? Epsilon<In>::kValue : rounded;
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_fp8_comfy_kitchen {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = amax / max_of<typename R::Element>();
    return {round_to<In>(1.0f / decode), decode, amax};
  }
};

struct tensor_fp8_deepseek {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = (is_nan(amax) ? amax : fmaxf(amax, 1e-4f)) * (1.0f / max_of<typename R::Element>());
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_fp8_transformers {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = amax > 0.0f ? 1.0f / amax * max_of<typename R::Element>() : 1.0f;
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_fp8_deepgemm {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = (is_nan(amax) ? amax : fmaxf(amax, 1e-4f)) / max_of<typename R::Element>();
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_int_modelopt {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float max = max_of<typename R::Element>();
    if (amax <= kTinyAmax) return {0.0f, 0.0f, amax};
    return {max / amax, amax / max, amax};
  }
};

struct tensor_int4_qat {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float ratio = amax * (1.0f / max_of<typename R::Element>());
    const float decode = is_nan(ratio) ? ratio : fmaxf(ratio, 1e-5f);
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_vllm {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float floor = is_nan(amax) ? amax : fmaxf(amax, 1e-8f);
    const float encode = 1.0f / floor * full_range<R>();
    return {encode, 1.0f / (encode == 0.0f ? 1e8f : encode), amax};
  }
};

// `amax` is the divisor that a checkpoint stores.
struct tensor_divisor {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    return {amax, 1.0f / amax, amax};
  }
};

struct tensor_sglang_online {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = amax == 0.0f ? 1.0f : amax * (1.0f / full_range<R>());
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_te_1x64 {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const TensorScale t = tensor_te_reference::scale<R, In>(is_nan(amax) ? amax : fmaxf(amax, 1e-12f));
    return {t.encode, t.decode, amax};
  }
};

struct tensor_hf_kernels {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = 1.0f / (is_nan(amax) ? amax : fmaxf(amax, 1e-12f)) * full_range<R>();
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_auto_round {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = amax == 0.0f ? 0.0f : 1.0f / amax * full_range<R>();
    return {encode, encode == 0.0f ? 0.0f : 1.0f / encode, amax};
  }
};

struct tensor_quark {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float ratio = amax / full_range<R>(), decode = ratio == 0.0f ? 0x1p-23f : ratio;
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_fouroversix {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float encode = full_range<R>() / amax;
    return {encode, 1.0f / encode, amax};
  }
};

struct tensor_fouroversix_4 : tensor_fouroversix {};

struct tensor_comfy_kitchen {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = round_to<In>(amax / full_range<R>());
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_comfy_kitchen_cuda {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = round_to<In>(amax * (1.0f / full_range<R>()));
    return {1.0f / decode, decode, amax};
  }
};

struct tensor_jax_gpu {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float decode = amax / full_range<R>();
    return {divide_full(1.0f, decode), decode, amax};
  }
};

// Return NNCF's scale of a block or of block scales. In a small tensor, scales below 2^-23 are replaced by 2^-23,
// otherwise amaxes are.
template <bool kIsSmall>
FP4KIT_DEVICE float nncf_scale(float amax, float largest) {
  const float scaled = amax / largest, smallest = 0x1p-23f;
  if constexpr (kIsSmall) return scaled < smallest ? smallest : scaled;
  return (amax < smallest ? smallest : amax) / largest;
}

// The scales of a tensor or, if kIsOfBlocks, of a block without another scale.
template <bool kSmallBlocks, bool kSmallScales, bool kIsOfBlocks = false>
struct nncf_tensor {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float block = nncf_scale<kSmallBlocks>(amax, max_of<typename R::Element>());
    const float decode = kIsOfBlocks ? block : nncf_scale<kSmallScales>(block, static_cast<float>(R::kScaleMax));
    return {1.0f / decode, decode, amax};
  }
};
struct tensor_nncf : nncf_tensor<false, false> {};
struct tensor_nncf_medium : nncf_tensor<false, true> {};
struct tensor_nncf_small : nncf_tensor<true, true> {};
struct tensor_fp4_nncf : nncf_tensor<false, false, true> {};
struct tensor_fp4_nncf_small : nncf_tensor<true, true, true> {};

// ---- rules for user-defined formats (custom_recipe)

// Return the factor by which elements are multiplied to divide them by `scale`: 1 / scale, or 1 / 1e-38 if the
// magnitude of `scale` is below 1e-38. NaN gives NaN.
FP4KIT_DEVICE float reciprocal_of_scale(float scale) {
  return 1.0f / (magnitude_of(scale) < 1e-38f ? 1e-38f : scale);
}

// Return x >= 0, rounded to the 16-bit type T, as float32. It is rounded to nearest even if kDirection is 0, up if it
// is 1, and down if it is -1. Numbers above the largest finite number of T, and infinity, become that number. NaN stays
// NaN.
template <class T, int kDirection>
FP4KIT_DEVICE float narrowed(float x) {
  if (is_nan(x)) return x;
  constexpr u32 kLargest = T::kIsBfloat16 ? 0x7F7Fu : 0x7BFFu;
  x = fminf(x, T::widen(static_cast<u16>(kLargest)));
  const u32 bits = T::narrow(x);
  const float value = T::widen(static_cast<u16>(bits));
  if (kDirection > 0 && value < x) return T::widen(static_cast<u16>(bits + 1u));
  if (kDirection < 0 && value > x) return T::widen(static_cast<u16>(bits - 1u));
  return value;
}

// Base of the amax rules, the tensor rules of user-defined formats: decode = amax / (largest element * largest block
// scale), or amax / largest element if the recipe has no block scales. decode is then rounded to the type T as
// kDirection says (`narrowed`); for Float32, it is not rounded. encode is reciprocal_of_scale(decode).
template <class T, int kDirection>
struct own_tensor_rule {
  template <class R, class In>
  FP4KIT_DEVICE TensorScale scale(float amax) {
    const float range =
        R::kHasScales ? max_of<typename R::Element>() * max_of<typename R::Scale>() : max_of<typename R::Element>();
    float decode = amax / range;
    if constexpr (sizeof(typename T::Bits) == 2) decode = narrowed<T, kDirection>(decode);
    return {reciprocal_of_scale(decode), decode, amax};
  }
};
struct tensor_amax : own_tensor_rule<Float32, 0> {};
struct tensor_amax_float16 : own_tensor_rule<Float16, 0> {};
struct tensor_amax_float16_up : own_tensor_rule<Float16, 1> {};
struct tensor_amax_float16_down : own_tensor_rule<Float16, -1> {};
struct tensor_amax_bfloat16 : own_tensor_rule<Bfloat16, 0> {};
struct tensor_amax_bfloat16_up : own_tensor_rule<Bfloat16, 1> {};
struct tensor_amax_bfloat16_down : own_tensor_rule<Bfloat16, -1> {};

// Return the amax at `index` of an array that a caller gave, without its sign bit. A kept sign bit of -0 would become
// the sign of scales and codes.
FP4KIT_DEVICE float amax_at(const float* amaxes, i64 index) {
  return magnitude_of(amaxes[index]);
}

// How many tensor scales a tensor has: none, one (`tensor`), one per row, or one per block.
enum class TensorScaling { none, tensor, row, block };

// Return the tensor scale of block `block` in row `row`. R's tensor rule computes it from an amax in the array
// tensor_amax, which has one amax per tensor, row or block, as R::kTensorScaling says. `blocks` is the number of blocks
// per row. If R has no tensor scales, return {1, 1, 1}, and tensor_amax is not read.
template <class R, class In>
FP4KIT_DEVICE TensorScale tensor_scale_of(const float* tensor_amax, i64 row, i64 block, i64 blocks) {
  if constexpr (R::kTensorScaling == TensorScaling::none) {
    return {1.0f, 1.0f, 1.0f};
  } else {
    i64 index = 0;
    if constexpr (R::kTensorScaling == TensorScaling::row) index = row;
    if constexpr (R::kTensorScaling == TensorScaling::block) index = row * blocks + block;
    return R::TensorRule::template scale<R, In>(amax_at(tensor_amax, index));
  }
}
