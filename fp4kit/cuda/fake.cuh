// The producers' own fake quantizers, one struct each under the name that reference/fake.py gives it. A rule has
//   scale<R, In>(amax, tensor_amax)   the FakeScale of a block; or, where that follows from an E4M3 code,
//   code<R>(amax, tensor_amax)        the code (kHasCodes), and
//   scale_of<R>(code, tensor_amax)    the FakeScale of a code: a table for a whole tensor
//   value<R, In>(x, scale)            what any element becomes
//   is_plain<R>(largest, scale)       whether elements up to a magnitude of these bits may go through
//   plain<R, In>(x, scale)            which gives the same in fewer instructions
#pragma once

#include "block.cuh"

// encode: what elements are multiplied with on the way in; decode: on the way out. Where a rule divides, one of them is the divisor and
// the other its rounded reciprocal, or NaN where quotients by way of the reciprocal could be wrong.
struct FakeScale {
  float encode, decode;
};

// a / divisor, rn, for any a of which the quotient is far from overflow and underflow; reciprocal = 1 / divisor, rn (Markstein).
FP4KIT_DEVICE float quotient_by(float a, float divisor, float reciprocal) {
  const float near = a * reciprocal;
  return fma_rn(fma_rn(-near, divisor, a), reciprocal, near);
}

// 1 / divisor where quotient_by may use it, else NaN.
FP4KIT_DEVICE float safe_reciprocal(float divisor) {
  return divisor > 7.888609e-31f && divisor < 1.2676506e30f ? 1.0f / divisor : nan_value();  // 2^-100, 2^100
}

// The nearest integer, ties to even, of |x| < 2^22. Zero is +0.
FP4KIT_DEVICE float nearest_integer(float x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23

FP4KIT_DEVICE float with_sign_of(float magnitude, float x) { return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u)); }

// The nearest value of a format to a >= 0, ties to even, by its code: any a; NaN becomes the format's NaN or its largest value.
template <class F>
FP4KIT_DEVICE float nearest(float a) { return decode<F>(encode<F, Rounding::rn, Sign::signbit, F::kNanCode>(a)); }

// The same for x of either sign, not NaN: with e the exponent of max(|x|, 2^emin), adding and subtracting 1.5 * 2^(e + 23 - M) rounds x
// to the grid. Zero is +0.
template <class F>
FP4KIT_DEVICE float nearest_finite(float x) {
  x = fminf(fmaxf(x, -max_of<F>()), max_of<F>());
  const u32 e = bits_of(fmaxf(magnitude_of(x), float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * (1.5f * static_cast<float>(1 << (23 - F::kMantissaBits)));
  return (x + magic) - magic;
}

// Whether all products with s.encode are far from overflow: false for NaN too.
FP4KIT_DEVICE bool has_small_products(u32 largest, FakeScale s) { return float_of(largest) * s.encode < 1.2676506e30f; }  // 2^100

// ---- NVFP4: 0 <= x keeps its sign, everything else gets a minus, but zeros are +0 ----------------------------------------

struct fake_nvfp4_modelopt_division {
  static constexpr bool kHasCodes = true;
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    const float y = nearest<typename R::Element>(magnitude_of(x) / (s.decode == 0.0f ? 1.0f : s.decode)) * s.decode;
    return x >= 0.0f ? y : 0.0f - y;
  }
  template <class R>
  FP4KIT_DEVICE bool is_plain(u32 largest, FakeScale s) { return has_small_products(largest, s); }
  template <class R, class In>
  FP4KIT_DEVICE float plain(float x, FakeScale s) {
    return nearest_finite<typename R::Element>(quotient_by(x, s.decode, s.encode)) * s.decode;
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
    const float ratio = amax / (max_of<typename R::Element>() * global_scale<R>(tensor_amax));
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
    const float outer = tensor_amax * (max_of<typename R::Scale>() / static_cast<float>(R::kScaleMax)) / max_of<typename R::Element>();
    return 1.0f / (outer <= kTinyAmax ? 1.0f : outer) * max_of<typename R::Scale>();
  }
  template <class R>
  FP4KIT_DEVICE u32 code(float amax, float tensor_amax) {
    const float max = max_of<typename R::Scale>();
    return encode_scale<R>(clip(amax / max_of<typename R::Element>() * encode_scale_of<R>(tensor_amax), -max, max));
  }
  template <class R>
  FP4KIT_DEVICE FakeScale scale_of(u32 code, float tensor_amax) {
    const float scale = decode_scale<R>(code) * (1.0f / encode_scale_of<R>(tensor_amax));
    const float decode = is_finite(scale) ? scale : 1.0f;
    return {decode == 0.0f ? 0.0f : safe_reciprocal(decode), decode};
  }
};

// ---- multiplication with the reciprocal: a minus where x < 0 ----------------------------------------------------------------

struct fake_product {
  template <class R>
  FP4KIT_DEVICE bool is_plain(u32 largest, FakeScale s) { return has_small_products(largest, s); }
  template <class R, class In>
  FP4KIT_DEVICE float plain(float x, FakeScale s) {
    return with_sign_of(nearest_finite<typename R::Element>(x * s.encode) * s.decode, x + 0.0f);  // -0 + 0 = +0
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
    const double ratio = static_cast<double>(block / max_of<typename R::Element>()) * encode_scale_of<R>(tensor_amax);
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
    const u32 code = block == 0.0f ? 127u : encode_e8m0_rp(block / max_of<typename R::Element>());
    return {inverse_e8m0(code), decode_e8m0(code)};
  }
};

// ---- integers: -0 and NaN come through ---------------------------------------------------------------------------------------

// clip(rint(x * s), least, max) / s, s = max / tensor_amax.
struct fake_int_modelopt {
  static constexpr bool kHasCodes = false;
  static constexpr float kUnscaled = -1.0f;  // tensor_amax <= 2^-24; no scale is negative
  template <class R>
  FP4KIT_DEVICE float least() { return -max_of<typename R::Element>() - (R::kNarrow ? 0.0f : 1.0f); }
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float encode = tensor_amax <= kTinyAmax ? kUnscaled : max_of<typename R::Element>() / tensor_amax;
    return {encode, safe_reciprocal(encode)};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    if (s.encode == kUnscaled) return R::kTensorScaling == TensorScaling::block ? with_sign_of(0.0f, x) : 0.0f;
    return clip(rintf(x * s.encode), least<R>(), max_of<typename R::Element>()) / s.encode;
  }
  template <class R>
  FP4KIT_DEVICE bool is_plain(u32 largest, FakeScale s) { return largest < kInfinityBits && !is_nan(s.decode); }
  template <class R, class In>
  FP4KIT_DEVICE float plain(float x, FakeScale s) {
    const float clipped = fminf(fmaxf(x * s.encode, least<R>()), max_of<typename R::Element>());
    return with_sign_of(quotient_by(nearest_integer(clipped), s.encode, s.decode), x);
  }
};

// clip(rint(x / s), -max, max) * s, s = max(tensor_amax / max, 1e-5).
struct fake_int4_qat {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float ratio = tensor_amax / max_of<typename R::Element>();
    const float decode = is_nan(ratio) ? ratio : fmaxf(ratio, 1e-5f);
    return {safe_reciprocal(decode), decode};
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    return clip(rintf(x / s.decode), -max_of<typename R::Element>(), max_of<typename R::Element>()) * s.decode;
  }
  template <class R>
  FP4KIT_DEVICE bool is_plain(u32 largest, FakeScale s) { return has_small_products(largest, s); }
  template <class R, class In>
  FP4KIT_DEVICE float plain(float x, FakeScale s) {
    const float max = max_of<typename R::Element>();
    return with_sign_of(nearest_integer(fminf(fmaxf(quotient_by(x, s.decode, s.encode), -max), max)) * s.decode, x);
  }
};

// ---- microxcaling: a float32 log2, and every operation rounded to In -----------------------------------------------------------

// floor(log2(x)) with log2 rounded to In is one too large for the last values of In below a power of two: with u the exponent, or
// its complement where negative, for the last floor(ln 2 * 2^j), 2^j <= u < 2^(j + 1), counted in steps of In; somewhat fewer where
// In has few bits. Byte j of kCounts is that number; kShift turns steps into steps of float32. Equal to the log2 of the specification
// for every value of float16 and bfloat16 and, near powers of two, of float32.
template <class In>
struct BelowPower {
  static constexpr u64 kCounts = 0x582C160B05020100u;
  static constexpr int kShift = sizeof(typename In::Bits) == 4 ? 0 : 13;
};
template <>
struct BelowPower<Bfloat16> {
  static constexpr u64 kCounts = 0x4A28150A05020100u;
  static constexpr int kShift = 16;
};

// floor(log2(x)) of a normal x > 0 that is the value of these bits times 2^-down.
template <class In>
FP4KIT_DEVICE i32 log2_floor(u32 bits, i32 down = 0) {
  const i32 exponent = static_cast<i32>(bits >> 23) - 127 - down;
  const u32 u = static_cast<u32>(exponent < 0 ? ~exponent : exponent) | 1u;
  const u32 count = static_cast<u32>(BelowPower<In>::kCounts >> (8 * (31 - __clz(u)))) & 0xFFu;
  return static_cast<i32>((bits + (count << BelowPower<In>::kShift)) >> 23) - 127 - down;
}

enum class HalfWay { away, even, none };

// s = 2^(floor(log2(amax)) - emax); y = round(x / s) * s.
template <HalfWay kHalfWay, bool kFlushBlocks = false>
struct fake_microxcaling {
  static constexpr bool kHasCodes = false;
  template <class R, class In>
  FP4KIT_DEVICE FakeScale scale(float amax, float tensor_amax) {
    const float positive = amax == 0.0f ? round_to<In>(kFltMin) : amax;
    if (!(positive > 0.0f && is_finite(positive))) return {nan_value(), nan_value()};  // float16 has no 2^-126: log2(0)
    const bool subnormal = positive < kFltMin;
    const i32 shared = log2_floor<In>(bits_of(subnormal ? positive * 18446744073709551616.0f : positive), subnormal ? 64 : 0);
    const i32 exponent = maximum(shared - R::Element::kEmax, -127);
    const float decode = round_to<In>(decode_e8m0(static_cast<u32>(exponent + 127)));  // NaN for 2^128
    if (!(decode > 0.0f && is_finite(decode))) return {nan_value(), nan_value()};  // x / 0 * 0
    return {kFlushBlocks && shared <= -127 ? 0.0f : inverse_e8m0(static_cast<u32>(exponent + 127)), decode};
  }
  template <class In>
  FP4KIT_DEVICE float rounded(float a) {
    if constexpr (kHalfWay == HalfWay::none) return floorf(a);
    const float up = floorf(round_to<In>(a + 0.5f));
    if constexpr (kHalfWay == HalfWay::away) return up;
    const float half = (a - 0.5f) * 0.5f;  // whole, for a = 0.5, 2.5, 4.5, ...
    return floorf(half) == half ? up - 1.0f : up;
  }
  // 2^floor(log2(a)), at least 2^emin, as the bits of a float32. Where halves are rounded, the few values below a power of two that
  // count as one there become it by either exponent.
  template <class R, class In>
  FP4KIT_DEVICE u32 power_below(float a) {
    const u32 bits = bits_of(fmaxf(a, float_of(static_cast<u32>(R::Element::kEmin + 127) << 23)));
    if constexpr (kHalfWay != HalfWay::none) return bits & kInfinityBits;
    return static_cast<u32>(log2_floor<In>(bits) + 127) << 23;
  }
  template <class R, class In>
  FP4KIT_DEVICE float value(float x, FakeScale s) {
    constexpr u32 kMantissa = static_cast<u32>(R::Element::kMantissaBits) << 23;
    if (kFlushBlocks && s.encode == 0.0f) x = 0.0f;
    const float scaled = round_to<In>(x * s.encode);
    float a = magnitude_of(scaled);  // below 2^(emax + 1), if amax is that of the block
    if constexpr (R::kStatic) a = fminf(a, float_of(static_cast<u32>(R::Element::kEmax + 2 + 127) << 23));
    const u32 power = power_below<R, In>(a);
    const float steps = a * float_of((254u << 23) + kMantissa - power);
    float y = fminf(rounded<In>(steps) * float_of(power - kMantissa), max_of<typename R::Element>());
    if constexpr (R::kStatic) y = is_finite(scaled) ? y : magnitude_of(scaled);
    return with_sign_of(y * s.decode, scaled + 0.0f);  // -0 + 0 = +0
  }
  template <class R>
  FP4KIT_DEVICE bool is_plain(u32 largest, FakeScale s) { return true; }
  template <class R, class In>
  FP4KIT_DEVICE float plain(float x, FakeScale s) { return value<R, In>(x, s); }
};
struct fake_microxcaling_nearest : fake_microxcaling<HalfWay::away> {};
struct fake_microxcaling_nearest_flush : fake_microxcaling<HalfWay::away, true> {};
struct fake_microxcaling_even : fake_microxcaling<HalfWay::even> {};
struct fake_microxcaling_floor : fake_microxcaling<HalfWay::none> {};
