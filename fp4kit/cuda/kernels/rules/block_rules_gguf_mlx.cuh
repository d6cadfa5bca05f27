// Block rules (see block_rules.cuh) of llama.cpp and MLX. They give the same results as the functions with these names
// in reference/block_rules.py. R is the recipe, In the type of the elements, and `amax` the largest magnitude
// of the block. t (TensorScale) holds the tensor's scale for encoding, its scale for decoding, and its amax.
#pragma once

#include "block_rules_e4m3.cuh"
#include "block_rules_e8m0.cuh"

// llama.cpp's rule with E4M3 scales. The scale is amax / max, where max is the largest element value, rounded to the
// nearest E4M3 value. Halfway between two values, it is rounded up, not to even. Scales of 248 and more become 448.
// Scales below 2^-6, the smallest normal value, become subnormal values, at most the largest one. An amax of NaN counts
// as 0. The factor is the value of the code; elements are compared with the element values times the factor
// (R::kCompare).
struct block_gguf : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    using F = typename R::Scale;
    const float d = amax > 0.0f ? amax / max_of<typename R::Element>() : 0.0f;
    if (d < min_normal_of<F>()) return static_cast<u32>(static_cast<i32>(fminf(d * 512.0f + 0.5f, 7.0f)));
    constexpr u32 kBias = static_cast<u32>(127 - F::kBias) << F::kMantissaBits, k256 = static_cast<u32>(F::kBias + 8)
                                                                                       << F::kMantissaBits;
    const u32 code = ((bits_of(fminf(d, max_of<F>())) + 0x80000u) >> 20) - kBias;
    return code >= k256 ? F::kMaxCode : code;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return decode_scale<R>(code);
  }
};

// Return floor(log2(a)) for a finite a > 0, with log2 rounded to float32.
//
// The result is the exponent of a, plus 1 for the last n floats below a power of two 2^k, for which log2 rounds up to
// k. There half an ulp of log2 is 2^b / 2^24, where 2^b is the largest power of two that is at most |log2|. So n is
// floor(2^b * ln 2): 0, 1, 2, 5, 11, 22 or 44 for b = 0 ... 6.
FP4KIT_DEVICE i32 floor_of_log2(float a) {
  const bool is_subnormal = a < kFltMin;
  const u32 bits = bits_of(is_subnormal ? a * 0x1p24f : a);
  const i32 k = static_cast<i32>(bits >> 23) - 126 - (is_subnormal ? 24 : 0);  // a < 2^k
  const u32 below = static_cast<u32>(k > 0 ? k - 1 : -k);  // |log2| just below k is in [below, below + 1]
  const u32 binade = below ? 0x80000000u >> __clz(below) : 0u;
  return k - 1 +
         (0x800000u - (bits & 0x7FFFFFu) <= (binade * 177u >> 8));  // 177 / 256 is ln 2, accurate enough for all seven
}

// llama.cpp's rule with E8M0 scales. The code is the low byte of floor(log2(amax)) - emax + 127, where emax is the
// exponent of the largest element value. The code is 0 if the amax is 0, infinite or NaN. The factor is the value of
// the code, or infinity for code 255; elements are compared with the element values times the factor (R::kCompare).
struct block_e8m0_gguf : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    if (!(amax > 0.0f) || !is_finite(amax)) return 0u;
    return static_cast<u32>(floor_of_log2(amax) - R::Element::kEmax + 127) & 0xFFu;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 255u ? float_of(kInfinityBits) : value_of_e8m0(code);
  }
};

// Return the E4M3 code of a block scale `scaled`, rounded to nearest even. Scales above 448 get the code of 448. `amax`
// is the block's amax. If it is NaN, return the code of 448 too. If only `scaled` is NaN, because it was computed as 0
// * infinity, return the code of -448.
template <class R>
FP4KIT_DEVICE u32 encode_scale_saturated(float scaled, float amax) {
  if (is_nan(amax)) return R::Scale::kMaxCode;
  return is_nan(scaled) ? R::Scale::kSignBit | R::Scale::kMaxCode : encode_scale<R>(scaled);
}

struct block_mlx : by_code {
  static constexpr bool kReadsInput = true;
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale_saturated<R>(round_to<In>(amax / max_of<typename R::Element>()) * t.encode, amax);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return magnitude_of(decode_scale<R>(code));
  }
};

struct block_mlx_metal : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_scale_saturated<R>(amax / max_of<typename R::Element>() * t.encode, amax);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = magnitude_of(decode_scale<R>(code));
    return scale == 0.0f ? 0.0f : t.encode / scale;
  }
};

// Return 2^exponent for an exponent of at most 127. The result may be subnormal, and is 0 for exponents below -149.
FP4KIT_DEVICE float power_or_zero(i32 exponent) {
  if (exponent < -149) return 0.0f;
  return float_of(exponent < -126 ? 1u << (exponent + 149) : static_cast<u32>(exponent + 127) << 23);
}

// Base of the two rules of MLX on a CPU. MLX stores the exponent n of the scale as a byte, and loses the higher bits of
// n + 127. The factor is 2^n with the full exponent n, or 0 if the amax is infinite or NaN.
struct wrapped_power {
  static constexpr bool kReadsAmax = true, kReadsInput = true;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return is_finite(amax) ? factor : 0.0f; }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    if (!is_finite(amax)) return 0.0f;
    const bool wraps = code >= 127u - 149u + 256u && amax > 0.0f && amax / max_of<typename R::Element>() < 0x1p-127f;
    const i32 exponent = static_cast<i32>(code) - 127 - (wraps ? 256 : 0);
    return exponent > 127 ? float_of(kInfinityBits) : power_or_zero(exponent);
  }
  // Return the code of a finite scale s that MLX rounds to 2^n: the low byte of n + 127, or 127 if s is 0.
  template <class In>
  FP4KIT_DEVICE u32 wrapped(i32 n, float s) {
    return s == 0.0f ? 127u : static_cast<u32>(n + 127) & 0xFFu;
  }
  // Return the code of a scale that is infinite or NaN: 128 for float32 elements, and 0 for 16-bit elements. MLX casts
  // the scale to a byte, which gives these results on x86-64.
  template <class In>
  FP4KIT_DEVICE u32 not_finite() {
    return sizeof(typename In::Bits) == 4 ? 128u : 0u;
  }
};

struct block_e8m0_mlx : wrapped_power {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float s = round_to<In>(amax / max_of<typename R::Element>());
    if (!is_finite(s)) return not_finite<In>();
    const u32 bits = bits_of(s), top = bits & 0x7FFFFFu ? 31u - __clz(bits & 0x7FFFFFu) : 0u;
    const bool is_subnormal = bits < 0x800000u;  // then the value is `bits` times 2^-149
    const i32 floor = is_subnormal ? static_cast<i32>(top) - 149 : static_cast<i32>(bits >> 23) - 127;
    const bool is_power = is_subnormal ? bits == 1u << top : (bits & 0x7FFFFFu) == 0u;
    return wrapped<In>(floor + !is_power, s);
  }
};

// Return log2(x), computed in float64 and rounded to float32: -infinity for 0, and NaN for x below 0.
FP4KIT_DEVICE float log2_of(float x) {
  return static_cast<float>(log2(static_cast<double>(x)));
}

struct block_e8m0_mlx_0321 : wrapped_power {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float s = round_to<In>(amax / max_of<typename R::Element>());
    if (!is_finite(s)) return not_finite<In>();
    return wrapped<In>(s > 0.0f ? static_cast<i32>(rintf(round_to<In>(log2_of(s)))) : 0, s);
  }
};

struct block_e8m0_mlx_metal_0321 : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    const float d = amax / max_of<typename R::Element>();
    if (!is_finite(d)) return 255u;
    if (d == 0.0f) return 0u;
    const float exponent = log2_of(d), size = fabsf(exponent), whole = floorf(size);
    const float rounded = size - whole >= 0.5f ? whole + 1.0f : whole;  // exact
    return static_cast<u32>(static_cast<i32>(fminf(fmaxf(exponent < 0.0f ? -rounded : rounded, -127.0f), 127.0f)) +
                            127);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 255u ? 0.0f : inverse_e8m0(code);
  }
};
