// Fake quantizers (quantize and dequantize in one step) as producers implement them. A rule is a struct fake_<name> for
// one quantizer; it gives the same results as the function with this name in reference/fake.py. R is the recipe, a
// struct of constants and rules that cuda/compiler.py writes, and In is the type of the elements. `amax` is the
// largest magnitude of a block, or 1 in recipes without blocks. tensor_amax is the amax of the tensor, the row or the
// block, as R::kTensorScaling says. FakeScale (fake_arith.cuh) holds the numbers by which elements are multiplied or
// divided. A rule has these members:
//   kHasCodes                         true if the scale of a block is an E4M3 code
//   scale<R, In>(amax, tensor_amax)   return the FakeScale of a block; only if kHasCodes is false
//   code<R>(amax, tensor_amax)        return the E4M3 code of a block's scale; only if kHasCodes is true
//   scale_of<R>(code, tensor_amax)    return the FakeScale of a code, for a table per tensor; only if kHasCodes is true
//   value<R, In>(x, scale)            return the result for any element x
//   is_fast<R>(largest, scale)        return true if fast_value is valid for the elements of a block; `largest` is
//                                     the float32 bits of their largest magnitude
//   fast_value<R, In>(x, scale)       return the result for element x in fewer instructions
#pragma once

#include "fake_microxcaling.cuh"
#include "fake_ascend.cuh"

// ---- rules of NVFP4: results for x >= 0 have a plus sign, other results a minus sign, except that zeros become +0

struct fake_nvfp4_modelopt_division {
  static constexpr bool kHasCodes = true;
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    const float y = nearest<typename R::Element>(magnitude_of(x) / (s.decode == 0.0f ? 1.0f : s.decode)) * s.decode;
    return x >= 0.0f ? y : 0.0f - y;
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return has_small_products<R>(largest, s);
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    return nearest_finite<typename R::Element, R::kStatic>(quotient_by(x, s.decode, s.encode)) * s.decode;
  }
};

struct fake_nvfp4_modelopt_triton : fake_nvfp4_modelopt_division {
  template <class R>
  FP4KIT_DEVICE float global_scale(float tensor_amax) {
    const float scale = tensor_amax * (1.0f / (max_of<typename R::Element>() * max_of<typename R::Scale>()));
    return scale <= 0.0f ? 1e-12f : scale;
  }
  template <class R>
  FP4KIT_DEVICE u32 code(float amax, float tensor_amax) {
    const float divisor = max_of<typename R::Element>() * global_scale<R>(tensor_amax),
                reciprocal = safe_reciprocal(divisor);
    const float ratio =
        is_nan(reciprocal) ? amax / divisor : quotient_by(amax, divisor, reciprocal);  // NaN for an infinite amax
    return encode_scale<R>(fminf(ratio, max_of<typename R::Scale>()));
  }
  template <class R>
  FP4KIT_DEVICE FakeScale scale_of(u32 code, float tensor_amax) {
    const float scale = decode_scale<R>(code) * global_scale<R>(tensor_amax);
    const float decode = scale >= 1e-5f ? scale : 1.0f;
    return {safe_reciprocal(decode), decode};
  }
};

struct fake_nvfp4_modelopt_static : fake_nvfp4_modelopt_division {
  template <class R>
  FP4KIT_DEVICE float encode_scale_of(float tensor_amax) {
    const float max = max_of<typename R::Scale>();
    const float outer = tensor_amax * (max / static_cast<float>(R::kScaleMax)) / max_of<typename R::Element>();
    return 1.0f / (outer <= kTinyAmax ? 1.0f : outer) * max;
  }
  template <class R>
  FP4KIT_DEVICE u32 code(float amax, float tensor_amax) {
    const float max = max_of<typename R::Scale>();
    return encode_scale<R>(clip(over_max<typename R::Element>(amax) * encode_scale_of<R>(tensor_amax), -max, max));
  }
  template <class R>
  FP4KIT_DEVICE FakeScale scale_of(u32 code, float tensor_amax) {
    const float scale = decode_scale<R>(code) * (1.0f / encode_scale_of<R>(tensor_amax));
    const float decode = is_finite(scale) ? scale : 1.0f;
    return {decode == 0.0f ? 0.0f : safe_reciprocal(decode), decode};
  }
};

// ---- rules that multiply by the reciprocal: results for x < 0 have a minus sign, other results a plus sign

struct fake_product {
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return has_small_products<R>(largest, s);
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    return with_sign_of(nearest_finite<typename R::Element, R::kStatic>(x * s.encode) * s.decode,
                        x + 0.0f);  // -0 + 0 = +0
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    const float y = nearest<typename R::Element>(magnitude_of(x) * s.encode) * s.decode;
    return x < 0.0f ? -y : y;
  }
};

struct fake_nvfp4_modelopt_cuda : fake_product {
  static constexpr bool kHasCodes = true;
  static constexpr u32 kUnscaled = 0x80u;  // no scale has this code
  template <class R>
  FP4KIT_DEVICE double encode_scale_of(float tensor_amax) {
    return 448.0 * static_cast<double>(max_of<typename R::Element>() / tensor_amax);
  }
  template <class R>
  FP4KIT_DEVICE u32 code(float amax, float tensor_amax) {
    const float block = fminf(amax, kFltMax);
    if (!(block > 0.0f && tensor_amax > 0.0f && is_finite(tensor_amax))) return kUnscaled;
    const double ratio = static_cast<double>(over_max<typename R::Element>(block)) * encode_scale_of<R>(tensor_amax);
    return encode_scale<R>(static_cast<float>(ratio));
  }
  template <class R>
  FP4KIT_DEVICE FakeScale scale_of(u32 code, float tensor_amax) {
    if (code == kUnscaled) return {1.0f, 1.0f};
    const double scale = static_cast<double>(decode_scale<R>(code)) / encode_scale_of<R>(tensor_amax);
    const float decode = static_cast<float>(scale);
    return {decode == 0.0f ? 0.0f : static_cast<float>(1.0 / scale), decode};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    if (s.decode == 0.0f) return x < 0.0f ? -0.0f : 0.0f;
    return fake_product::value<R, In>(x, s);
  }
};

struct fake_mx_modelopt : fake_product {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float block = fminf(amax, kFltMax);
    const u32 code = block == 0.0f ? 127u : encode_e8m0_rp(over_max<typename R::Element>(block));
    return {inverse_e8m0(code), value_of_e8m0(code)};
  }
};

// ---- rules of integers: -0 and NaN are kept

// The rule of Model-Optimizer's integers. The result for an element x is clip(rint(x * s), lowest, max) / s, with s =
// max / tensor_amax. lowest and max are the smallest and the largest integer of the format; lowest is -max if
// R::kNarrow. If tensor_amax is at most 2^-24, the result is +0, or 0 * x in recipes with one scale per block
// (R::kTensorScaling is `block`).
struct fake_int_modelopt {
  static constexpr bool kHasCodes = false;
  static constexpr float kUnscaled = -1.0f;  // stands for tensor_amax <= 2^-24; no scale is negative
  template <class R>
  FP4KIT_DEVICE float lowest() {
    return -max_of<typename R::Element>() - (R::kNarrow ? 0.0f : 1.0f);
  }
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float encode = tensor_amax <= kTinyAmax ? kUnscaled : max_of<typename R::Element>() / tensor_amax;
    return {encode, safe_reciprocal(encode)};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    if (s.encode == kUnscaled) return R::kTensorScaling == TensorScaling::block ? 0.0f * x : 0.0f;
    return clip(rintf(x * s.encode), lowest<R>(), max_of<typename R::Element>()) / s.encode;
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return largest < kInfinityBits && !is_nan(s.decode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    const float clipped = fminf(fmaxf(x * s.encode, lowest<R>()), max_of<typename R::Element>());
    return with_sign_of(quotient_by(nearest_integer(clipped), s.encode, s.decode), x);
  }
};

// The rule of INT4 quantization-aware training (recipe int4-qat). The result for an element x is clip(rint(x / s),
// -max, max) * s, where max is the largest integer of the format and s = max(tensor_amax * (1 / max), 1e-5). The recipe
// has one float32 scale per block, so tensor_amax is the amax of the block. If it is NaN, s is NaN too.
struct fake_int4_qat {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float ratio = tensor_amax * (1.0f / max_of<typename R::Element>());
    const float decode = is_nan(ratio) ? ratio : fmaxf(ratio, 1e-5f);
    return {safe_reciprocal(decode), decode};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    return clip(rintf(x / s.decode), -max_of<typename R::Element>(), max_of<typename R::Element>()) * s.decode;
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return float_of(largest) * s.encode < 0x1p80f;
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    const float max = max_of<typename R::Element>();
    return with_sign_of(nearest_integer(fminf(fmaxf(quotient_by(x, s.decode, s.encode), -max), max)) * s.decode, x);
  }
};

// The rule of FP-Quant with method abs_max. The result for an element x is round(x / s) * s. `round` rounds to the
// nearest element value, ties toward zero; it returns -0 if x is a zero of either sign. s is 2^(floor(log2(amax)) - 2)
// / 0.75. s is 0 if that power of two is below 2^-126, and NaN if the amax is not finite.
struct fake_fp_quant {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    if (!is_finite(amax)) return {nan_value(), nan_value()};
    const float exponent = floorf(float32_log2(amax)) - 2.0f;
    if (!(exponent >= -126.0f)) return {0.0f, 0.0f};
    const float decode = float_of(static_cast<u32>(static_cast<i32>(exponent) + 127) << 23) / 0.75f;
    return {decode, decode};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    using E = typename R::Element;
    return decode<E>(encode<E, Rounding::rnz, Sign::not_positive, E::kSignBit>(x / s.decode)) * s.decode;
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return true;
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    return value<R, In>(x, s);
  }
};

// The rule of FP-Quant for NVFP4 with method abs_max. The result for an element x is round(x * 3 / s) * s / 3. `round`
// rounds to the nearest element value, ties toward zero; it returns -0 if x is a zero of either sign. s is the E4M3
// value nearest to amax * 3 / 6, or NaN if the amax is not finite. The factor 3 is FP-Quant's global scale.
struct fake_nvfp4_fp_quant {
  static constexpr bool kHasCodes = false;
  static constexpr float kGlobal = 3.0f;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    if (!is_finite(amax)) return {nan_value(), nan_value()};
    const float scale = divide_full(amax * kGlobal, max_of<typename R::Element>());
    const float decode = decode_scale<R>(encode_scale<R>(scale));
    return {decode, decode};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    using E = typename R::Element;
    const float scaled = divide_full(x * kGlobal, s.decode);
    return divide_full(decode<E>(encode<E, Rounding::rnz, Sign::not_positive, E::kSignBit>(scaled)) * s.decode,
                       kGlobal);
  }
  template <class R>
  FP4KIT_DEVICE bool is_fast(u32 largest, FakeScale s) {
    return true;
  }
  template <class R, class In>
  FP4KIT_DEVICE float fast_value(float x, FakeScale s) {
    return value<R, In>(x, s);
  }
};
