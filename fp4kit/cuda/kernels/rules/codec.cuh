// Functions that encode and decode one value, for any element format. They give the same results as reference/codec.py.
// A code is the integer that stands for a value in memory. F is the format, and kRounding and kSign say how elements
// are rounded and which codes get a sign bit (the enums below). In a format with M mantissa bits, values with exponent
// e are multiples of the step 2^(e - M).
//
// F is a struct that cuda/compiler.py writes from formats.py. Its members are kExponentBits, kMantissaBits,
// kBias, kEmin and kEmax (the exponents of the smallest and the largest normal value), kSignBit, kMaxCode, kNanCode,
// kInfinityCode, kHasNan, kIsInteger, kBits, kStoredBits (the bits that a code takes in memory) and kMaxBits (the
// float32 bits of the largest value). kIsE2m1, kIsE4m3 and kIsE5m2 say whether F is one of the formats for which there
// are special instructions or faster functions. kIsTable says whether F is a table of values (Codebook); then
// F::value(code) returns the value of a code, and F::nearest(x) the code of a number that is not NaN. MX4
// (PairedMicroexponents) is a table with other members in place of F::nearest: the type F::HasPairs, which is void, and
// F::kAmaxTargetBits, the float32 bits of its amax_target.
#pragma once

#include "ptx.cuh"
#include "ptx_pairs.cuh"
#include "e2m1_unbounded.cuh"

// How elements are rounded to values:
//   rn, rz     to nearest with ties to even; toward zero
//   rnz, rna   to nearest with ties toward zero; to nearest with ties away from zero
//   rns        as rn, except that the float just below half of the smallest value becomes that value (some producers
//              add half a step in float32, which rounds this sum up)
//   rnas       as rns, but with ties away from zero: floor(v + 0.5) with a rounded sum; see with_rounded_half
//   rnw        for E2M1 only: as rn, but without a largest value; a code beyond 7 keeps only its last four bits; NaN
//              and infinity have the code kNan
//   rnh        to float16, then as rn, without saturation: for 8-bit formats with a NaN, where the code after the
//   largest
//              is infinity or NaN
//   first      to the code with the smallest error, or the lowest one if several have it (function first_of_least)
enum class Rounding { rn, rz, rnz, rna, rns, rnw, rnh, first, rnas };
// Which codes get a sign bit:
//   signbit        codes of elements whose sign bit is set
//   negative       codes of elements below 0
//   not_positive   codes of elements that are not above 0
//   unsigned_zero  codes of elements whose sign bit is set, except the code of zero
//   unscaled       codes of elements that were below 0 before they were scaled, even if scaling has made them -0
enum class Sign { signbit, negative, not_positive, unsigned_zero, unscaled };

// Return the largest finite value of the format F, as float32.
template <class F>
FP4KIT_DEVICE float max_of() {
  return float_of(F::kMaxBits);
}

// True if F is MX4: the two codes of a pair of neighboring elements share a bit. Elements of such a format are encoded
// only by encode_beside.
template <class F, class HasPairs = void>
constexpr bool kHasPairs = false;
template <class F>
constexpr bool kHasPairs<F, typename F::HasPairs> = true;

// Return the element value to which amax rules scale the amax of a block: 1 for MX4, and the largest value of other
// formats.
template <class F>
FP4KIT_DEVICE float amax_target_of() {
  if constexpr (kHasPairs<F>) return float_of(F::kAmaxTargetBits);
  return max_of<F>();
}

// Return the code of a >= 0, without sign. a must not be NaN. kRounding must not be `first`. Values above the largest
// value of the format saturate, unless kRounding is rnw.
//   e = max(exponent of a, emin);   code = ((e - emin) << M) + round(a * 2^(M - e))
// M is the number of mantissa bits. Adding 2^(e + 23 - M) rounds a to the grid of the format. The difference of the
// bits of the sum and of 2^(e + 23 - M) is the rounded significand.
template <class F, Rounding kRounding>
FP4KIT_DEVICE u32 encode_magnitude(float a) {
  if constexpr (kRounding == Rounding::rnw) return wrapped_magnitude(a);
  if constexpr (kRounding == Rounding::rnh) {
    constexpr float kBeyond = static_cast<float>(1 << (F::kEmax - F::kMantissaBits));
    a = fminf(widen_f16(narrow_f16(a)), max_of<F>() + kBeyond);
  } else {
    a = fminf(a, max_of<F>());
  }
  const u32 min_exponent = static_cast<u32>(F::kEmin + 127) << 23;
  const u32 e = maximum(bits_of(a) & kInfinityBits, min_exponent);
  const u32 base = ((e - min_exponent) >> 23) << F::kMantissaBits;
  const float magic = float_of(e + (static_cast<u32>(23 - F::kMantissaBits) << 23));
  if constexpr (kRounding == Rounding::rn || kRounding == Rounding::rnh)
    return base + (bits_of(a + magic) - bits_of(magic));
  if constexpr (kRounding == Rounding::rns) {  // producers compute floor(v + 0.5) with a rounded sum, so that the float
                                               // below 0.5 gives 1
    const float scaled = a * float_of((static_cast<u32>(F::kMantissaBits + 254) << 23) - e);
    return bits_of(scaled) == bits_of(0.5f) - 1u ? 1u : base + (bits_of(a + magic) - bits_of(magic));
  }
  if constexpr (kRounding == Rounding::rz) return base + (bits_of(add_rz(a, magic)) - bits_of(magic));
  const float scaled = a * float_of((static_cast<u32>(F::kMantissaBits + 254) << 23) - e);  // exact
  if constexpr (kRounding == Rounding::rnas) return base + static_cast<u32>(static_cast<i32>(scaled + 0.5f));
  if constexpr (kRounding == Rounding::rna)
    return base + static_cast<u32>(floorf(scaled)) + (scaled - floorf(scaled) >= 0.5f);
  return base + static_cast<u32>(ceilf(scaled - 0.5f));  // rnz: ties toward zero
}

template <class F>
FP4KIT_DEVICE float decode(u32 code);

// Return the code that minimizes |value * step - a|, where `value` is the value of the code. In case of ties, return
// the lowest code. a must be at least 0 and not NaN. If a is infinite, return 0. The function gives the same results as
// first_of_least in reference/codec.py.
template <class F>
FP4KIT_DEVICE u32 first_of_least(float a, float step) {
  u32 best = 0u;
  float least_error = a;
#ifdef __CUDACC__
#pragma unroll 8
#else
#pragma GCC unroll 8  // without it, g++ neither unrolls nor vectorizes the loop over elements
#endif
  for (u32 code = 1u; code <= F::kMaxCode; ++code) {
    const float error = magnitude_of(decode<F>(code) * step - a);
    if (error < least_error) {
      least_error = error;
      best = code;
    }
  }
  return best;
}

// Return true if the code of x gets a sign bit, as kSign says. x must not be NaN. `code` is the code of |x|. For
// `unscaled`, the caller has added 0 to the element before it was scaled.
template <Sign kSign>
FP4KIT_DEVICE bool has_sign(float x, u32 code) {
  if constexpr (kSign == Sign::signbit || kSign == Sign::unscaled) return sign_of(x) != 0;
  if constexpr (kSign == Sign::unsigned_zero) return sign_of(x) != 0 && code != 0u;
  if constexpr (kSign == Sign::negative) return x < 0.0f;
  return !(x > 0.0f);
}

// Return y with the sign bit that the code of y gets under kSign. Only zeros change: `negative` turns -0 into 0, and
// `not_positive` turns 0 into -0. `unscaled` counts as `negative`: the caller knows that scaling made no -0. For
// `unsigned_zero`, y is returned unchanged. If its code is 0, the caller must clear the sign bit of the code.
template <Sign kSign>
FP4KIT_DEVICE float with_code_sign(float y) {
  if constexpr (kSign == Sign::negative || kSign == Sign::unscaled) return y + 0.0f;  // -0 -> 0
  if constexpr (kSign == Sign::not_positive) return -(0.0f - y);                      // 0 -> -0
  return y;
}

// Return the code of x in the format F:
//   - x is NaN, or infinite with the rounding rnw: kNan.
//   - F is a table of values: the code of the nearest value.
//   - F has integers: x rounded to nearest even, clamped to [-max - 1, max], or to [-max, max] if kNarrow. max is the
//     largest value of F. The result is the lowest F::kBits bits of the integer in two's complement.
//   - Other formats: the code of |x| by encode_magnitude or, if kRounding is `first`, by first_of_least. kSign says
//     when the code gets a sign bit (has_sign).
// For tables and integers, kSign is ignored. So is kRounding, except that infinity gives kNan with rnw. Only
// first_of_least reads `step`.
template <class F, Rounding kRounding, Sign kSign, u32 kNan, bool kNarrow = false>
FP4KIT_DEVICE u32 encode(float x, float step = 1.0f) {
  if (is_nan(x) || (kRounding == Rounding::rnw && !is_finite(x))) return kNan;
  if constexpr (F::kIsTable) {
    return F::nearest(x);
  } else if constexpr (F::kIsInteger) {
    const float lowest = -max_of<F>() - (kNarrow ? 0.0f : 1.0f);
    return static_cast<u32>(static_cast<i32>(fminf(fmaxf(rintf(x), lowest), max_of<F>()))) & ((1u << F::kBits) - 1u);
  } else {
    u32 code;
    if constexpr (kRounding == Rounding::first) {
      code = first_of_least<F>(magnitude_of(x), step);
    } else {
      code = encode_magnitude<F, kRounding>(magnitude_of(x));
    }
    return code | (has_sign<kSign>(x, code) ? F::kSignBit : 0u);
  }
}

// Return the code of x in a format with kHasPairs (MX4). `partner` is the other element of the pair. Return kNan if x
// is NaN.
//   bits of a code, from the highest: [microexponent] [sign] [mantissa 1] [mantissa 0]
// The microexponent is 1 if the magnitudes of x and `partner` are both below 1. Otherwise, and if `partner` is NaN, it
// is 0. If the microexponent is 1, the step between values is 1/4, otherwise 1/2. The magnitude of x is rounded to a
// whole number of steps, ties to even, 3 at most. The results equal those of PairedMicroexponents in formats.py.
template <u32 kNan>
FP4KIT_DEVICE u32 encode_beside(float x, float partner) {
  if (is_nan(x)) return kNan;
  const bool is_small = magnitude_of(x) < 1.0f && magnitude_of(partner) < 1.0f;
  const float steps = fminf(magnitude_of(x), 2.0f) * (is_small ? 4.0f : 2.0f);
  return static_cast<u32>(fminf(rintf(steps), 3.0f)) | (sign_of(x) ? 4u : 0u) | (is_small ? 8u : 0u);
}

// Return the code of x in the format F, rounded to nearest even. Magnitudes above the largest value saturate. The code
// has the sign bit of x, also for zeros. x must not be NaN; callers pass elements of finite blocks.
template <class F>
FP4KIT_DEVICE u32 encode_finite_rn(float x) {
  const u32 min_exponent = static_cast<u32>(F::kEmin + 127) << 23;
  const float a = fminf(magnitude_of(x), max_of<F>());
  const u32 e = maximum(bits_of(a) & kInfinityBits, min_exponent);
  const u32 magic = e + (static_cast<u32>(23 - F::kMantissaBits) << 23);
  const u32 rounded =
      bits_of(a + float_of(magic)) - magic + (e >> (23 - F::kMantissaBits)) - (min_exponent >> (23 - F::kMantissaBits));
  return rounded | (bits_of(x) >> (32 - F::kBits) & F::kSignBit);
}

// Return the code of x, rounded stochastically by `random`, a random byte (0 ... 255). It is the code of |x| + random /
// 256 * step(|x|), rounded toward zero, with the sign bit of x. So |x| is rounded up with a probability that equals its
// distance, in steps, from the value below. Values above the largest value of the format, and infinity, saturate. NaN
// gives the NaN code of the format. The function gives the same results as reference/stochastic.py.
template <class F>
FP4KIT_DEVICE u32 encode_stochastic(float x, u32 random) {
  if (is_nan(x)) return F::kNanCode;
  const float a = fminf(magnitude_of(x), max_of<F>());
  const u32 e = maximum(bits_of(a) & kInfinityBits, static_cast<u32>(F::kEmin + 127) << 23);
  const float step = float_of(e - (static_cast<u32>(F::kMantissaBits) << 23));
  const float t = a + static_cast<float>(random) * (1.0f / 256.0f) * step;
  return encode_magnitude<F, Rounding::rz>(t) | (sign_of(x) ? F::kSignBit : 0u);
}

// Return the value of a code of the format F, as float32:
//   - F is a table: F::value(code).
//   - F has integers: the lowest F::kBits bits of the code as a signed integer.
//   - Other formats: the value with its sign. A NaN code gives a NaN with the sign of the code, and an infinity code
//     gives an infinity.
// For other formats, the exponent and mantissa bits are moved to their places in a float32, which then is the value
// times 2^(bias - 127).
template <class F>
FP4KIT_DEVICE float decode(u32 code) {
  if constexpr (F::kIsTable) {
    return F::value(code);
  } else if constexpr (F::kIsInteger) {
    return static_cast<float>(static_cast<i32>(code << (32 - F::kBits)) >> (32 - F::kBits));
  } else {
    const u32 magnitude = code & (F::kSignBit - 1u);
    float value = float_of(magnitude << (23 - F::kMantissaBits)) * float_of(static_cast<u32>(254 - F::kBias) << 23);
    if constexpr (F::kHasNan) {
      if (magnitude > F::kMaxCode) value = magnitude == F::kInfinityCode ? float_of(kInfinityBits) : nan_value();
    }
    return float_of(bits_of(value) | (code & F::kSignBit ? 0x80000000u : 0u));
  }
}

// Return the E8M0 code of x, rounded up: the exponent of the smallest power of two that is at least x, plus 127. Return
// 0 for 0 <= x <= 2^-127, 254 for x above 2^126 (infinity included), and 255 for NaN and x < 0. x must not be -0.
// Equals PTX cvt.rp.satfinite.ue8m0.
FP4KIT_DEVICE u32 encode_e8m0_rp(float x) {
  const u32 bits = bits_of(x), up = minimum(bits, 0x7F000000u) + 0x7FFFFFu >> 23;
  return (bits > 0x400000u ? up : 0u) + (bits > kInfinityBits);
}

// Return the value 2^(code - 127) of an E8M0 code. Code 0 gives the subnormal 2^-127, code 255 gives NaN.
FP4KIT_DEVICE float value_of_e8m0(u32 code) {
  return float_of(maximum(code << 23, 0x00400000u) | (code == 255u ? 0x00400000u : 0u));
}

// Return the reciprocal 2^(127 - code) of the value of an E8M0 code. Code 254 gives the subnormal 2^-127, code 255
// gives NaN.
FP4KIT_DEVICE float inverse_e8m0(u32 code) {
  return code == 255u ? nan_value() : float_of(maximum((254u - code) << 23, 0x00400000u));
}

// Float32, Float16 and Bfloat16 are the types of elements and values. `Bits` is the type in memory, and kLeastExponent
// the exponent of the smallest subnormal number. widen(bits) returns the element as float32, which is exact. narrow(x)
// returns the bits of a float32 that is rounded to nearest even. The 16-bit types have functions for pairs (words of
// two elements):
//   narrow_pair(low, high)                  return the pair of two floats, each rounded as by narrow
//   max_magnitude(a, b), min_magnitude      see max_magnitude_bf16x2 and min_magnitude_bf16x2 in ptx_pairs.cuh
//   add_zero(pair)                          return the pair plus 0, which turns each -0 into 0
struct Float32 {
  using Bits = float;
  static constexpr bool kIsBfloat16 = false;
  static constexpr int kMantissaBits = 23, kLeastExponent = -149;
  FP4KIT_DEVICE float widen(float x) { return x; }
  FP4KIT_DEVICE float narrow(float x) { return x; }
};
struct Float16 {
  using Bits = u16;
  static constexpr bool kIsBfloat16 = false;
  static constexpr int kMantissaBits = 10, kLeastExponent = -24;
  FP4KIT_DEVICE float widen(u16 x) { return widen_f16(x); }
  FP4KIT_DEVICE u16 narrow(float x) { return narrow_f16(x); }
  FP4KIT_DEVICE u32 narrow_pair(float low, float high) { return narrow_f16x2(low, high); }
  FP4KIT_DEVICE u32 max_magnitude(u32 a, u32 b) { return max_magnitude_f16x2(a, b); }
  FP4KIT_DEVICE u32 min_magnitude(u32 a, u32 b) { return min_magnitude_f16x2(a, b); }
  FP4KIT_DEVICE u32 add_zero(u32 pair) { return fma_f16x2(pair, 0x3C003C00u, 0u); }  // -0 + 0 = 0
};
struct Bfloat16 {
  using Bits = u16;
  static constexpr bool kIsBfloat16 = true;
  static constexpr int kMantissaBits = 7, kLeastExponent = -133;
  FP4KIT_DEVICE float widen(u16 x) { return widen_bf16(x); }
  FP4KIT_DEVICE u16 narrow(float x) { return narrow_bf16(x); }
  FP4KIT_DEVICE u32 narrow_pair(float low, float high) { return narrow_bf16x2(low, high); }
  FP4KIT_DEVICE u32 max_magnitude(u32 a, u32 b) { return max_magnitude_bf16x2(a, b); }
  FP4KIT_DEVICE u32 min_magnitude(u32 a, u32 b) { return min_magnitude_bf16x2(a, b); }
  FP4KIT_DEVICE u32 add_zero(u32 pair) { return fma_bf16x2(pair, 0x3F803F80u, 0u); }
};

// Return x rounded to nearest even in the type T (Float32, Float16 or Bfloat16), as float32.
template <class T>
FP4KIT_DEVICE float round_to(float x) {
#ifndef __CUDA_ARCH__
  // Without 16-bit integers, which halve the vectors of a processor, and without subnormal float32 numbers.
  if constexpr (sizeof(typename T::Bits) == 2) {
    constexpr u32 kKept = ~0u << (23 - T::kMantissaBits);
    const u32 magnitude = bits_of(x) & 0x7FFFFFFFu;
    u32 rounded = (magnitude + (~kKept >> 1) + (magnitude >> (23 - T::kMantissaBits) & 1u)) & kKept;
    // The ulp of 0.5 is the smallest float16, and the largest one is 65504, 0x477FE000.
    if (!T::kIsBfloat16 && magnitude < (113u << 23)) rounded = bits_of((float_of(magnitude) + 0.5f) - 0.5f);
    if (!T::kIsBfloat16 && rounded > 0x477FE000u) rounded = kInfinityBits;
    if (magnitude > kInfinityBits) rounded = (magnitude | 0x400000u) & kKept;
    return float_of(rounded | (bits_of(x) & 0x80000000u));
  }
#endif
  return T::widen(T::narrow(x));
}

// Return the scaled element y, a number of In, for Rounding::rnas with a sum that is rounded to In too: the number of
// In just below half of the smallest magnitude of F becomes this half, which is rounded up.
template <class F, class In>
FP4KIT_DEVICE float with_rounded_half(float y) {
  const float half = float_of(static_cast<u32>(F::kEmin - F::kMantissaBits + 126) << 23);
  const float below = half * (1.0f - 0.5f / static_cast<float>(1 << In::kMantissaBits));
  return magnitude_of(y) == below ? float_of(bits_of(half) | (bits_of(y) & 0x80000000u)) : y;
}

// Return log2(x), computed in float64 and rounded to float32: -infinity for 0, and NaN for x below 0.
FP4KIT_DEVICE float float32_log2(float x) {
  return static_cast<float>(log2(static_cast<double>(x)));
}

// Return the code of x in the format F, rounded stochastically by `random`, a random byte (0 ... 255), with arithmetic
// in float16:
//   - NaN gives F::kNanCode.
//   - If the magnitude of x, rounded to float16, is 0: code 0, without a sign bit.
//   - Otherwise the code has the sign of x. Magnitudes above the largest value saturate.
// The results equal those of encode_stochastic_float16 in reference/stochastic.py.
template <class F>
FP4KIT_DEVICE u32 encode_stochastic_float16(float x, u32 random) {
  if (is_nan(x)) return F::kNanCode;
  const float a = round_to<Float16>(fminf(magnitude_of(x), max_of<F>()));
  if (a == 0.0f) return 0u;
  const float exponent = floorf(round_to<Float16>(float32_log2(a)));
  const bool is_normal = exponent >= static_cast<float>(F::kEmin);
  const u32 power = static_cast<u32>((is_normal ? static_cast<i32>(exponent) : F::kEmin) + 127) << 23;
  const float step = float_of(power - (static_cast<u32>(F::kMantissaBits) << 23));
  const float base = is_normal ? float_of(power) : 0.0f;
  const float count = floorf(round_to<Float16>((a - base) / step + static_cast<float>(random) * (1.0f / 256.0f)));
  return encode_magnitude<F, Rounding::rn>(base + count * step) | (sign_of(x) ? F::kSignBit : 0u);
}

// Return x rounded to odd in float32: x rounded toward zero, with the last bit set to 1 if that was not exact. Rounding
// the result to 8 or 11 bits gives the same number as rounding x itself to that many bits.
FP4KIT_DEVICE float round_to_odd(double x) {
  const float toward_zero = narrow_rz(x);
  return float_of(bits_of(toward_zero) | (static_cast<double>(toward_zero) != x));
}

// Return a float64 number x, rounded to nearest even in the type T, as float32. x is rounded only once, not first to
// float32 and then to T.
template <class T>
FP4KIT_DEVICE float round_double_to(double x) {
  if constexpr (sizeof(typename T::Bits) == 4) return static_cast<float>(x);
  return round_to<T>(round_to_odd(x));
}
