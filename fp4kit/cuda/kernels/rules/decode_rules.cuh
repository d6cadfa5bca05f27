// Decode rules: a struct decode_<rule> computes an element from the value of its code and the scales of its block. It
// gives the same results as the function with this name in reference/dequantize.py. R is the recipe. `code` is the
// scale code of the block, and t (TensorScale, tensor_rules.cuh) holds the tensor's scale in both directions and its
// amax (largest magnitude). A rule has these members:
//   scale<R>(code, t)          return the Scale of a block: all that `apply` needs to know of its scales
//   product_scale(scale)       return the Scale with which `apply` returns value * scale; only in rules with block
//                              scales that need an amax, for tensors whose amax is unknown
//   apply(value, scale)        return the element whose code has the value `value`
//   kNeedsAmax                 true if the rule depends on the tensor's amax or encode scale too
//   kDropsZeroSign             true if the code of -0 decodes like the code of 0
//   kReadsNanAsNumber          true if NaN codes decode to the numbers that their bits would encode without NaN
#pragma once

#include "integer_or_float.cuh"

// The format F without NaN: codes that mean NaN in F decode to the numbers that their exponent and mantissa bits give.
template <class F>
struct WithoutNan : F {
  static constexpr bool kHasNan = false, kIsE4m3 = false, kIsE5m2 = false;
};
// DecodedFormat<F, kReadsNanAsNumber>::Format is the format by which codes are decoded: WithoutNan<F> if
// kReadsNanAsNumber, and otherwise F.
template <class F, bool kReadsNanAsNumber>
struct DecodedFormat {
  using Format = F;
};
template <class F>
struct DecodedFormat<F, true> {
  using Format = WithoutNan<F>;
};
// The format by which the element codes of the recipe R are decoded: R::Element, or WithoutNan<R::Element> if R's
// decode rule says so.
template <class R>
using DecodedElement = typename DecodedFormat<typename R::Element, R::DecodeRule::kReadsNanAsNumber>::Format;

struct decode_product {
  static constexpr bool kNeedsAmax = false, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = float;
  FP4KIT_DEVICE Scale product_scale(float scale) { return scale; }
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode_scale<R>(code) * t.decode;
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return value * scale; }
};
// The rule decode_product for recipes without block scales. An element is value * t.decode, and `code` is ignored.
struct decode_tensor {
  static constexpr bool kNeedsAmax = false, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = float;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return t.decode;
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return value * scale; }
};
struct decode_te : decode_product {
  static constexpr bool kNeedsAmax = true;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode_scale<R>(code) * t.amax * (1.0f / full_range<R>());
  }
};
struct decode_compressed_tensors : decode_product {
  static constexpr bool kNeedsAmax = true;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode_scale<R>(code) / t.encode;
  }
};
struct decode_stored_divisor : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode_scale<R>(code) / (1.0f / t.decode);
  }
};
// The rule Base, whose values are then rounded to bfloat16, whatever the type of the result.
template <class Base>
struct through_bfloat16 : Base {
  FP4KIT_DEVICE float apply(float value, float scale) { return round_to<Bfloat16>(value * scale); }
};
struct decode_compressed_tensors_bfloat16 : through_bfloat16<decode_compressed_tensors> {
  static constexpr bool kNeedsAmax = true;
};
struct decode_stored_divisor_bfloat16 : through_bfloat16<decode_stored_divisor> {
  static constexpr bool kNeedsAmax = false;
};
struct decode_vllm_cuda : decode_product {
  static constexpr bool kNeedsAmax = true;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode_scale<R>(code) * rcp_approx_ftz(t.encode);
  }
};
// The rules of comfy-kitchen. An element is value * block scale * tensor scale. If the result has the 16-bit type Out,
// the tensor scale and then its product with the block scale are rounded to Out.
struct decode_comfy_kitchen : decode_product {};
template <class Out>
struct comfy_kitchen_narrow : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return round_to<Out>(decode_scale<R>(code) * round_to<Out>(t.decode));
  }
};
struct decode_comfy_kitchen_float16 : comfy_kitchen_narrow<Float16> {};
struct decode_comfy_kitchen_bfloat16 : comfy_kitchen_narrow<Bfloat16> {};
// OpenVINO's rule for the layers of NNCF: an element is value * scale, and the scale is rounded to float16.
struct decode_nncf : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return round_to<Float16>(decode_scale<R>(code) * t.decode);
  }
};
struct decode_e8m0_nncf : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return round_to<Float16>(value_of_e8m0(code));
  }
};
// The rules of comfy-kitchen for FP8. An element is value * tensor scale. If the result has the 16-bit type Out, the
// tensor scale is rounded to Out first.
struct decode_fp8_comfy_kitchen : decode_tensor {};
struct decode_fp8_compressed_tensors : decode_tensor {};
template <class Out>
struct fp8_comfy_kitchen_narrow : decode_tensor {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return round_to<Out>(t.decode);
  }
};
struct decode_fp8_comfy_kitchen_float16 : fp8_comfy_kitchen_narrow<Float16> {};
struct decode_fp8_comfy_kitchen_bfloat16 : fp8_comfy_kitchen_narrow<Bfloat16> {};
// The Scale of decode_fouroversix: a block scale, the tensor's amax, and `range`, the amax that a tensor scale of 1
// covers. An element is value * scale, rounded to float16, times amax / range. If `amax` is negative, the amax is
// unknown, and an element is value * scale, not rounded.
struct ScaleOfAmax {
  float scale, amax, range;
};
// Return true if both the block scale and the tensor's amax are finite.
FP4KIT_DEVICE bool is_finite(ScaleOfAmax s) {
  return is_finite(s.scale) && is_finite(s.amax);
}

struct decode_fouroversix {
  static constexpr bool kNeedsAmax = true, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = ScaleOfAmax;
  FP4KIT_DEVICE Scale product_scale(float scale) { return {scale, -1.0f, 1.0f}; }
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    return {decode_scale<R>(code), t.amax, full_range<R>()};
  }
  FP4KIT_DEVICE float apply(float value, Scale s) {
    return s.amax < 0.0f ? value * s.scale : round_to<Float16>(value * s.scale) * s.amax / s.range;
  }
};
// The rule decode_fouroversix, but value * scale is not rounded to float16.
struct decode_fouroversix_float32 : decode_fouroversix {
  static constexpr bool kNeedsAmax = true;
  FP4KIT_DEVICE float apply(float value, Scale s) {
    return s.amax < 0.0f ? value * s.scale : value * s.scale * s.amax / s.range;
  }
};
// The Scale of decode_flashinfer_kv: a block scale and a tensor scale. An element is (value * scale) * tensor. The
// first product is exact.
struct ScaleThenTensor {
  float scale, tensor;
};
// Return true if both the block scale and the tensor scale are finite.
FP4KIT_DEVICE bool is_finite(ScaleThenTensor s) {
  return is_finite(s.scale) && is_finite(s.tensor);
}

struct decode_flashinfer_kv {
  static constexpr bool kNeedsAmax = false, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = ScaleThenTensor;
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    return {decode_scale<R>(code), t.decode};
  }
  FP4KIT_DEVICE float apply(float value, Scale s) { return value * s.scale * s.tensor; }
};
// An element is value * block scale / encode scale. The Scale holds the latter as `tensor`.
struct decode_te_1x64 : decode_flashinfer_kv {
  static constexpr bool kNeedsAmax = true;
  FP4KIT_DEVICE Scale product_scale(float scale) { return {scale, 1.0f}; }
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    return {decode_scale<R>(code), t.encode};
  }
  FP4KIT_DEVICE float apply(float value, Scale s) { return value * s.scale / s.tensor; }
};
// The rule decode_te_1x64 with block scales of at least 1e-12.
struct decode_hf_kernels : decode_te_1x64 {
  static constexpr bool kNeedsAmax = true;
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    const float stored = decode_scale<R>(code), scale = stored < 1e-12f ? 1e-12f : stored;
    return {t.encode == 0.0f ? scale / t.encode : scale, t.encode};  // infinity shows that zeros decode to NaN
  }
};
// The rule of dual-level MXFP4: the first product is exact.
struct decode_e8m0_levels : decode_flashinfer_kv {
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    return {value_of_e8m0(code), t.decode};
  }
};
struct decode_auto_round : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return inverse(inverse(decode_scale<R>(code) * t.decode));
  }
  FP4KIT_DEVICE float inverse(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }
};
struct decode_modelopt : decode_product {
  static constexpr bool kDropsZeroSign = true;
  FP4KIT_DEVICE float apply(float value, float scale) { return (value + 0.0f) * scale; }  // -0 + 0 = +0
};
// The rule of MLX 0.32.2: decode_product, except that the scale codes 7F and FF decode to 480 and -480 instead of NaN.
struct decode_mlx_0322 : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return decode<WithoutNan<typename R::Scale>>(code) * t.decode;
  }
};
struct decode_e8m0 : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return value_of_e8m0(code);
  }
};
struct decode_e8m0_flashinfer_host : decode_e8m0 {
  static constexpr bool kDropsZeroSign = true;
  FP4KIT_DEVICE float apply(float value, float scale) { return (value + 0.0f) * scale; }  // -0 + 0 = +0
};
struct decode_e8m0_flashinfer_api : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return float_of(code << 23);
  }
};
// An element is ldexp(value, code - 127), so scale code 255 means 2^128. Because 2^128 is not a float32, the Scale is
// half of the block scale, and `apply` doubles the value. The tensor scale is ignored.
struct decode_e8m0_unbounded : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return float_of(code < 2u ? 0x00200000u << code : (code - 1u) << 23);
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return 2.0f * value * scale; }
};
// llama.cpp's rule. An element is value * block scale * tensor scale. Scale code 7F means 0, scale code FF means 480,
// and bit 7 of other scale codes is ignored. Element code 8 (-0) decodes to +0.
struct decode_gguf : decode_product {
  static constexpr bool kDropsZeroSign = true;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    const float known = (code & 0x7Fu) == 0x7Fu ? 0.0f : decode_scale<R>(code & 0x7Fu);
    return (code == 0xFFu ? 480.0f : known) * t.decode;
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return (value + 0.0f) * scale; }
};
struct decode_e8m0_gguf : decode_e8m0_unbounded {
  static constexpr bool kDropsZeroSign = true;
  FP4KIT_DEVICE float apply(float value, float scale) { return decode_e8m0_unbounded::apply(value + 0.0f, scale); }
};
struct decode_e8m0_infinite : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return code == 255u ? float_of(kInfinityBits) : value_of_e8m0(code);
  }
};
struct decode_e8m0_mlx : decode_e8m0_infinite {};
struct decode_e8m0_quark : decode_e8m0_infinite {};
struct decode_e8m0_mlx_0322 : decode_e8m0_infinite {
  static constexpr bool kReadsNanAsNumber = true;
};
struct decode_e8m0_float16 : decode_product {
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return round_to<Float16>(code == 255u ? float_of(kInfinityBits) : value_of_e8m0(code));
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return round_to<Float16>(value * scale); }
};
struct decode_e8m0_float16_0322 : decode_e8m0_float16 {
  static constexpr bool kReadsNanAsNumber = true;
};
// The rule of Model-Optimizer's integers. An element is value / t.encode, or 0 if the tensor's amax is at most
// kTinyAmax. The Scale is t.encode, or -1 in the latter case; encode scales are never negative. Scale codes are
// ignored.
struct decode_int_modelopt {
  static constexpr bool kNeedsAmax = true, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = float;
  template <class R>
  FP4KIT_DEVICE float scale(u32 code, TensorScale t) {
    return t.amax <= kTinyAmax ? -1.0f : t.encode;
  }
  FP4KIT_DEVICE float apply(float value, float scale) { return scale < 0.0f ? 0.0f : value / scale; }
};

// The Scale of an IF4 block: the Scale of the base decode rule (the rule that two_formats extends), and whether the
// codes of the block are INT4. Otherwise they are E2M1.
template <class BaseScale>
struct ScaleAndFormat {
  BaseScale scale;
  bool is_integer;
};
// Return true if the Scale of the base decode rule is finite. s.is_integer makes no difference.
template <class BaseScale>
FP4KIT_DEVICE bool is_finite(ScaleAndFormat<BaseScale> s) {
  return is_finite(s.scale);
}

// IntegerRounding<Rule>::kToFloat16 is true if a rule rounds the values of INT4 codes to float16 before it multiplies
// them by a scale. If the tensor's amax is unknown, the values are not rounded in any case.
template <class Rule>
struct IntegerRounding {
  static constexpr bool kToFloat16 = false;
};
template <>
struct IntegerRounding<decode_fouroversix> {
  static constexpr bool kToFloat16 = true;
};

// The decode rule Base for elements of IF4, whose codes are E2M1 or INT4. Bit 7 of a scale code is set for INT4; Base
// gets the other bits. In `apply`, `value` is the value of the element's code as a 4-bit integer. For INT4, Base is
// applied to value * If4::kIntegerStep, and otherwise to the E2M1 value that has the four bits of the integer as its
// code.
template <class Base>
struct two_formats {
  static constexpr bool kNeedsAmax = Base::kNeedsAmax, kReadsNanAsNumber = Base::kReadsNanAsNumber;
  using Scale = ScaleAndFormat<typename Base::Scale>;
  // Return the Scale with which Base's `apply` multiplies by |scale|. `scale` is the value of a scale code. Its sign
  // bit is bit 7 of the code: if it is set, the codes of the block are INT4.
  FP4KIT_DEVICE Scale product_scale(float scale) {
    return {Base::product_scale(magnitude_of(scale)), sign_of(scale) != 0u};
  }
  template <class R>
  FP4KIT_DEVICE Scale scale(u32 code, TensorScale t) {
    return {Base::template scale<R>(code & ~If4::kIntegerBit, t), (code & If4::kIntegerBit) != 0u};
  }
  FP4KIT_DEVICE float apply(float value, Scale s) {
    if (!s.is_integer) return Base::apply(e2m1_value(static_cast<u32>(static_cast<i32>(value)) & 15u), s.scale);
    const float integer = value * If4::kIntegerStep;
    if constexpr (IntegerRounding<Base>::kToFloat16)
      return Base::apply(s.scale.amax < 0.0f ? integer : round_to<Float16>(integer), s.scale);
    return Base::apply(integer, s.scale);
  }
};
