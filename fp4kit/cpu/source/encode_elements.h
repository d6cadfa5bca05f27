// Functions that encode elements under the factors of their blocks, in loops that the compiler vectorizes.
//   E               a struct of recipes.inc that describes the element arithmetic (how elements become codes)
//   In              the type of the elements
//   factor          the number by which the elements of a block are multiplied, or divided if E::kDivide
//   run             16 neighboring elements of a row, which share a factor
//   tensor_encode   the tensor's encode scale, by which some recipes multiply elements after the factor
//   scaled element  an element after these steps; rounding it gives the code
//   method          the way in which elements are scaled (enum Method); all methods give equal codes
//
// The arithmetic is that of cuda/kernels/rules. Two kinds of blocks are left to the specification (the fallback):
// blocks that contain NaN or infinity, and blocks whose factor would turn finite elements into NaN. The caller finds
// such blocks.
#pragma once

#include "blocks.h"
#include "exact_division.h"

#if defined(__AVX512F__)
constexpr bool kHasSlowDivision = true;  // with 64-byte vectors, three products are faster than one division
#else
constexpr bool kHasSlowDivision = false;  // with shorter vectors, one division is faster than three products
#endif

// Return true if the loops of this file can apply the factor: if it is positive and finite, or if it is +0 and
// allows_zero_factor is true. Return false for all others: NaN, infinity, -0 and negative numbers.
static __forceinline__ bool is_usable(float factor, bool allows_zero_factor) {
  return bits_of(factor) < kInfinityBits & (allows_zero_factor | (factor != 0.0f));
}

// True if E rounds in a way (Rounding::rnw) in which codes wrap around for scaled elements of 7 and more. Then an
// element whose product overflows gets the code of NaN.
template <class E>
constexpr bool kWraps = E::kRounding == Rounding::rnw;

// True if the code of an element is that of the nearest E2M1 value and can be computed from the element's magnitude. If
// kWraps<E>, this holds only for scaled magnitudes below kFastScaledBelow.
template <class E>
constexpr bool kNearestE2m1 =
    E::Format::kIsE2m1 && (E::kRounding == Rounding::rn || kWraps<E>) && !E::kCompare && E::kSign != Sign::not_positive;

// The ways to scale elements by their factors:
//   general     with the operations that the recipe names; valid for every usable factor
//   fast        without the operations that have no effect, and with quotients from quotient_by or Divisor; valid for
//               scaled magnitudes below kFastScaledBelow and factors below the result of fast_below. If E divides, the
//               factor must also be above kFastDivisorAbove, and is_last_significand(factor) must be false
//   multiplier  like `fast`, and valid in the same cases, but divisors are replaced by exact multipliers
//               (exact_division.h)
enum class Method { general, fast, multiplier };

// Return true if exact multipliers may replace the divisors of the arithmetic E for elements of type In. This is so if
// In is a 16-bit type, E divides, and codes are the nearest E2M1 codes of the quotients, without further steps. Whether
// a divisor has an exact multiplier is found by find_multipliers.
template <class E, class In>
constexpr bool may_use_multipliers() {
  if constexpr (!kNearestE2m1<E>) return false;
  return E::kDivide && !E::kRoundScaled && !E::kThenEncode && kUnusedBits<In> != 0u;
}

// Return the bound below which a block's factor allows a fast method (Method::fast or multiplier), for the element
// arithmetic E and elements of type In. Return 0 if there is no fast method. Below the bound, no scaled element
// underflows to a zero that would lose its sign. Elements that the recipe would flush get the code of zero with every
// method.
template <class E, class In>
constexpr float fast_below() {
  if (!kNearestE2m1<E> || E::kThenEncode) return 0.0f;
  if (!E::kDivide) return E::kFlush ? 0x1p100f : 0x1p127f;
  if (!kHasSlowDivision && !may_use_multipliers<E, In>()) return 0.0f;
  // kRoom is the number of binades from the smallest positive element down to the smallest positive quotient.
  constexpr int kRoom = E::kRoundScaled ? 0 : In::kLeastExponent + 149;
  return E::kSign == Sign::negative ? static_cast<float>(u64{1} << (kRoom < 63 ? kRoom : 63)) : kFastDivisorBelow;
}

// Blocks whose scaled amax is below this bound may take a fast method, because no scaled element then reaches 7. The
// scaled amax is computed as a product, whose relative error is at most 2^-22. A scaled element of 6.9 stays below 7
// even after rounding to bfloat16.
constexpr float kFastScaledBelow = 6.9f;

// The number 1.5 * 2^23. Floats from here to 2^24 are integers. So adding this number to a small float rounds the float
// to an integer, which is in the last bits of the sum.
constexpr float kRoundToInteger = 0x1.8p23f;

// Return the bits of the smaller of two floats, which must be +0 or positive. If a is a positive NaN, return the bits
// of b. b must not be NaN. Floats are compared as integers where the processor can, because products leave the integer
// units free.
static __forceinline__ u32 min_bits(float a, float b) {
#if defined(__x86_64__) && !defined(__SSE4_1__)
  return bits_of(fminf(a, b));
#else
  return minimum(bits_of(a), bits_of(b));
#endif
}

// Return the nearest E2M1 code of a >= 0, ties to even, in the last three bits. The other bits are undefined.
// Magnitudes above 6 give 7, the code of 6, and so does NaN. kBelow7: true if the caller knows that a < 7, which saves
// an instruction.
//
// E2M1 values are 1/2 apart below 2, 1 apart below 4, and 2 apart below 8. So the code is the smallest of 2 a, a + 2
// and a / 2 + 4, each rounded, and at most 7.
template <bool kBelow7>
static __forceinline__ u32 nearest_e2m1_of(float a) {
  const auto rounded = [=](float times, float plus) {
    return kHasFma ? fma_rn(a, times, kRoundToInteger + plus) : a * times + (kRoundToInteger + plus);
  };
  const u32 low = min_bits(rounded(2.0f, 0.0f), a + (kRoundToInteger + 2.0f));
  const float high = kBelow7 ? rounded(0.5f, 4.0f) : float_of(min_bits(rounded(0.5f, 4.0f), kRoundToInteger + 7.0f));
  return min_bits(float_of(low), high);
}

// Return the scaled element of x, before it is rounded to a code. It is x multiplied or divided by the block's factor,
// then rounded to In if E::kRoundScaled. If E::kThenEncode, it is also multiplied by tensor_encode: before the factor
// if E::kEncodeFirst, otherwise at the end. If E::kFlush, the method `general` first replaces a subnormal x by zero;
// with the other methods, such an x has the code of zero anyway.
template <class E, class In, Method kMethod>
static __forceinline__ float scaled(float x, Divisor factor, float tensor_encode) {
  if constexpr (E::kEncodeFirst) x = E::kFlush ? mul_ftz(x, tensor_encode) : x * tensor_encode;
  if constexpr (E::kFlush && kMethod == Method::general) x = flush(x);
  float y;
  if constexpr (!E::kDivide || kMethod == Method::multiplier) {
    y = x * factor.value;
  } else if constexpr (kMethod == Method::general) {
    y = x / factor.value;
  } else if constexpr (E::kRoundScaled) {
    y = quotient_by(x, factor.value, factor.reciprocal);
  } else {
    y = fma_rn(x, factor.reciprocal, x * factor.correction);
  }
  if constexpr (E::kRoundScaled) y = Input<In>::rounded(y);
  if constexpr (E::kThenEncode && !E::kEncodeFirst) y = y * tensor_encode;
  return y;
}

// Return true if -0 is replaced by +0 when elements are loaded. This is done if two conditions hold. The method is
// `fast` or `multiplier`. The arithmetic E divides, and gives a sign only to the codes of elements below 0, so that -0
// has the code of +0.
template <class E, Method kMethod>
constexpr bool loads_without_negative_zero() {
  if constexpr (kMethod != Method::general) return E::kSign == Sign::negative && E::kDivide;
  return false;
}

// Return the nearest E2M1 code of an element in the last four bits; the other bits are undefined. `bits` are the bits
// of the element; bits above its type are ignored. `factor` and tensor_encode are the arguments of `scaled`.
// kNearestE2m1<E> must hold.
template <class E, class In, Method kMethod>
static __forceinline__ u32 nearest_code_of(u32 bits, Divisor factor, float tensor_encode) {
  using Bits = typename Input<In>::Bits;
  const float x = Input<In>::value(static_cast<Bits>(bits & Input<In>::kMagnitude)),
              a = scaled<E, In, kMethod>(x, factor, tensor_encode);
  const u32 code = nearest_e2m1_of<kMethod != Method::general>(a),
            signed_code = bits_from<7u, 8u>(code, bits >> (8 * sizeof(Bits) - 4));
  if constexpr (E::kSign == Sign::negative && !loads_without_negative_zero<E, kMethod>())
    return a > 0.0f ? signed_code : code & 7u;
  if constexpr (E::kSign == Sign::unscaled) return bits & Input<In>::kMagnitude ? signed_code : code & 7u;
  if constexpr (E::kSign == Sign::unsigned_zero) return code & 7u ? signed_code : 0u;
  return signed_code;
}

// Return the code of a scaled element y in the format of E, rounded stochastically with the random byte `random`. If
// E::kStochasticFloat16, the arithmetic is that of float16 (encode_stochastic_float16 in codec.cuh), otherwise that of
// float32 (encode_stochastic).
template <class E>
static __forceinline__ u32 stochastic_code(float y, u32 random) {
  if constexpr (E::kStochasticFloat16) return encode_stochastic_float16<typename E::Format>(y, random);
  return encode_stochastic<typename E::Format>(y, random);
}

// Return the code of the element with the bits `bits`. A 4-bit code is in the last four bits, and the bits above it are
// undefined. `factor` and tensor_encode are the arguments of `scaled`. If kStochastic, the code is rounded
// stochastically with the random byte `random`; otherwise `random` is ignored.
template <class E, class In, bool kStochastic, Method kMethod>
static __forceinline__ u32 code_of(u32 bits, Divisor factor, float tensor_encode, u32 random) {
  using Format = typename E::Format;
  if constexpr (!kStochastic)
    if constexpr (kNearestE2m1<E> && (kMethod != Method::general || !kWraps<E>))
      return nearest_code_of<E, In, kMethod>(bits, factor, tensor_encode);
  float x = Input<In>::value(static_cast<typename Input<In>::Bits>(bits));
  if constexpr (E::kCompare) return encode<Format, E::kRounding, E::kSign, 0u>(x, factor.value);
  if constexpr (!kStochastic)
    if constexpr (E::kSign == Sign::unscaled) x = x + 0.0f;  // -0 -> 0
  float y = scaled<E, In, Method::general>(x, factor, tensor_encode);
  if constexpr (!kStochastic)
    if constexpr (E::kRoundScaled && E::kRounding == Rounding::rnas) y = with_rounded_half<Format, In>(y);
  if constexpr (kStochastic)
    return stochastic_code<E>(y, random);
  else if constexpr (Format::kIsInteger)
    return encode<Format, Rounding::rn, Sign::signbit, 0u, E::kNarrow>(y);
  else if constexpr (E::kRounding == Rounding::rn) {
    const u32 code = encode_finite_rn<Format>(E::kSign == Sign::unscaled ? y : with_code_sign<E::kSign>(y));
    return E::kSign == Sign::unsigned_zero && code == Format::kSignBit ? 0u : code;
  } else
    return encode<Format, E::kRounding, E::kSign, 0u>(y);
}

// The factors of runs, and the method that applies them. Arrays of factors are indexed by run.
//   values                    one factor per run
//   reciprocals, corrections  the reciprocal and correction of each run's divisor (see Divisor), for Method::fast
//   codes, multipliers        the scale code of each run's block, and one multiplier per scale code, for the method
//                             `multiplier`
struct Factors {
  const float *values, *reciprocals = nullptr, *corrections = nullptr;
  const u8* codes = nullptr;
  const float* multipliers = nullptr;
  Method method = Method::general;

  // Return the factor of a run as a Divisor. For Method::multiplier, its value is the multiplier instead. The
  // reciprocal and the correction are set only for Method::fast if kDivide, and are otherwise 0.
  template <Method kMethod, bool kDivide>
  __forceinline__ Divisor of(i64 run) const {
    if constexpr (kMethod == Method::multiplier) return {multipliers[codes[run]], 0.0f, 0.0f};
    if constexpr (kMethod == Method::fast && kDivide) return {values[run], reciprocals[run], corrections[run]};
    return {values[run], 0.0f, 0.0f};
  }
};

// Encode `count` elements of type In by the element arithmetic E and the method kMethod, and store their codes in
// `out`: 4-bit codes two per byte, the first one in the low half, and 8-bit codes one per byte.
//   elements       `count` contiguous elements, an even number for 4-bit codes; every 16 of them are a run
//   factors        the factors of the runs
//   tensor_encode  the tensor's encode scale, which `scaled` uses if E::kThenEncode
//   random         one byte per element if kStochastic; otherwise not read
//
// Two neighboring elements are computed in one 32-bit lane, and their codes are combined there. Combining the codes of
// separate lanes would take as long as computing them.
template <class E, class In, bool kStochastic, Method kMethod>
static void encode_runs(const void* elements, Factors factors, float tensor_encode, i64 count, const u8* random,
                        u8* out) {
  using Bits = typename Input<In>::Bits;
  constexpr bool kIsNibble = E::Format::kStoredBits == 4;
  using Stored = std::conditional_t<kIsNibble, u8, u16>;  // the codes of a pair
  const auto divisor = [=](i64 run) { return factors.of<kMethod, E::kDivide>(run); };
  // Encode as many pairs of x as fit into `pairs`, starting at run `run`, and store their codes in `to`. Every 16 pairs
  // are two whole runs, of which only the first exists if is_last_run.
  const auto encode_whole_runs = [=](const Bits* x, const u8* bytes, i64 run, bool is_last_run, auto& pairs, u8* to) {
    for (int k = 0; k < static_cast<int>(sizeof pairs / sizeof(u32) / kRun); ++k) {
      const Divisor first = divisor(run + 2 * k), second = is_last_run ? first : divisor(run + 2 * k + 1);
      for (int j = 0; j < kRun; ++j) {
        const bool is_first = j < kRun / 2;
        const Divisor factor{is_first ? first.value : second.value, is_first ? first.reciprocal : second.reciprocal,
                             is_first ? first.correction : second.correction};
        const int pair = kRun * k + j;
        u32 low, high;
        load_pair(x + 2 * pair, low, high, loads_without_negative_zero<E, kMethod>());
        u16 two = 0;
        if constexpr (kStochastic) std::memcpy(&two, bytes + 2 * pair, 2);
        const u32 one = code_of<E, In, kStochastic, kMethod>(low, factor, tensor_encode, two & 0xFFu);
        const u32 other = code_of<E, In, kStochastic, kMethod>(high, factor, tensor_encode, two >> 8);
        pairs[pair] = kIsNibble ? bits_from<0x0Fu, 0xF0u>(one, other << 4) & 0xFFu : one | other << 8;
      }
    }
    store_narrow<Stored>(pairs, to);
  };
  const auto* x = static_cast<const Bits*>(elements);
  constexpr int kRunsAtOnce = kNarrowCount<Stored> / kRun * 2;
  const auto bytes_from = [=](i64 start) { return kStochastic ? random + start : nullptr; };
  constexpr i64 kCodesPerByte = kIsNibble ? 2 : 1;
  i64 run = 0;
  for (; (run + kRunsAtOnce) * kRun <= count && kRunsAtOnce > 2; run += kRunsAtOnce) {
    u32 pairs[kNarrowCount<Stored>];
    encode_whole_runs(x + run * kRun, bytes_from(run * kRun), run, false, pairs, out + run * kRun / kCodesPerByte);
  }
  // Fewer than two runs are encoded in a copy, so that nothing beyond the arrays is touched.
  Bits copy[2 * kRun] = {};
  u8 copied_bytes[2 * kRun] = {}, codes[2 * kRun];
  for (; run * kRun < count; run += 2) {
    const i64 start = run * kRun, rest = count - start;
    const bool is_whole = rest >= 2 * kRun;
    if (!is_whole) {
      std::memcpy(copy, x + start, rest * sizeof(Bits));
      if (kStochastic) std::memcpy(copied_bytes, random + start, rest);
    }
    u32 pairs[kRun];
    encode_whole_runs(is_whole ? x + start : copy, is_whole ? bytes_from(start) : copied_bytes, run, rest <= kRun,
                      pairs, is_whole ? out + start / kCodesPerByte : codes);
    if (!is_whole) std::memcpy(out + start / kCodesPerByte, codes, rest / kCodesPerByte);
  }
}

// Encode `count` elements of type In by the element arithmetic E and the method factors.method, and store their codes
// in `out`: 4-bit codes two per byte, the first one in the low half, and 8-bit codes one per byte. The method `general`
// is used instead if kStochastic, or if factors.method is not compiled for E and In. All methods give equal codes.
//   elements       `count` contiguous elements, an even number for 4-bit codes; every 16 of them are a run
//   factors        the factors of the runs, and the method that applies them
//   tensor_encode  the tensor's encode scale, which is used if E::kThenEncode
//   random         one byte per element if kStochastic; otherwise not read
template <class E, class In, bool kStochastic>
static void encode_elements(const void* elements, Factors factors, float tensor_encode, i64 count, const u8* random,
                            u8* out) {
  if constexpr (!kStochastic) {
    if constexpr (may_use_multipliers<E, In>())
      if (factors.method == Method::multiplier)
        return encode_runs<E, In, false, Method::multiplier>(elements, factors, tensor_encode, count, random, out);
    if constexpr (fast_below<E, In>() > 0.0f && (!E::kDivide || kHasSlowDivision))
      if (factors.method == Method::fast)
        return encode_runs<E, In, false, Method::fast>(elements, factors, tensor_encode, count, random, out);
  }
  encode_runs<E, In, kStochastic, Method::general>(elements, factors, tensor_encode, count, random, out);
}
