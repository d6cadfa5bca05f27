// Codes of elements under the factors of their blocks; loops that a compiler makes vectors of.
//
// The rules are those of cuda/kernels/rules, which know no thread. A block that holds NaN or infinity, or whose factor
// is none that finite elements stay numbers under, is not for these loops: the caller is told, and has the
// specification do it.
#pragma once

#include "blocks.h"
#include "exact_division.h"

#if defined(__AVX512F__)
constexpr bool kHasSlowDivision = true;  // three products take less; with vectors of 32 bytes they do not
#else
constexpr bool kHasSlowDivision = false;
#endif

// Whether elements may meet a factor here.
static __forceinline__ bool is_usable(float factor, bool by_zero) {
  return bits_of(factor) < kInfinityBits & (by_zero | (factor != 0.0f));
}

// Whether codes from 7 scales on wrap around, and are NaN where a product overflows.
template <class E>
constexpr bool kWraps = E::kRounding == Rounding::rnw;

// Whether codes are nearest ones of E2M1, found of magnitudes; those that wrap, of elements below kShortMost scales
// alone.
template <class E>
constexpr bool kNearestE2m1 =
    E::Format::kIsE2m1 && (E::kRounding == Rounding::rn || kWraps<E>) && !E::kCompare && E::kSign != Sign::not_positive;

// How elements meet their factors: as the recipe says; or, where what they are encoded from is below kShortMost and
// factors are usual, without what cannot be then, and divisors by quotient_by or as divisor_of says; or divisors as
// multipliers.
enum class Way { any, usual, multiplied };

// Whether divisors may be multipliers.
template <class E, class In>
constexpr bool may_multiply() {
  if constexpr (!kNearestE2m1<E>) return false;
  return E::kDivide && !E::kRoundScaled && !E::kThenEncode && kBeyond<In> != 0u;
}

// Factors below this are usual; 0: there is no such way. None then underflows to a zero where that would lose a sign.
// What would be flushed has the code of zero anyway.
template <class E, class In>
constexpr float usual_below() {
  if (!kNearestE2m1<E> || E::kThenEncode) return 0.0f;
  if (!E::kDivide) return E::kFlush ? 0x1p100f : 0x1p127f;
  if (!kHasSlowDivision && !may_multiply<E, In>()) return 0.0f;
  constexpr int kRoom =
      E::kRoundScaled ? 0 : In::kLeastExponent + 149;  // binades from the least element down to the least quotient
  return E::kSign == Sign::negative ? static_cast<float>(u64{1} << (kRoom < 63 ? kRoom : 63)) : kShortBelow;
}
constexpr float kShortMost = 6.9f;  // by a product within 2^-22; rounded to 8 bits again it stays below 7

// 1.5 * 2^23: floats from here to 2^24 are integers, whose last bits are those of the floats.
constexpr float kIntegers = 0x1.8p23f;

// The lesser of two positive floats, or of one and a NaN, as bits: integers are compared where that can be done, by
// units that products leave free.
static __forceinline__ u32 least_bits(float a, float b) {
#if defined(__x86_64__) && !defined(__SSE4_1__)
  return bits_of(fminf(a, b));
#else
  return minimum(bits_of(a), bits_of(b));
#endif
}

// The code of the nearest value of E2M1, ties to even, in the last three bits; a >= 0, or NaN for 7. Below 2, 4 and 8
// values are 1/2, 1 and 2 apart, so that codes are 2 a, a + 2 and a / 2 + 4, rounded: whichever is least, up to 7,
// which values below 7 keep to.
template <bool kBelow7>
static __forceinline__ u32 nearest_e2m1_of(float a) {
  const auto plus = [=](float by, float more) {
    return kHasFma ? fma_rn(a, by, kIntegers + more) : a * by + (kIntegers + more);
  };
  const u32 low = least_bits(plus(2.0f, 0.0f), a + (kIntegers + 2.0f));
  const float high = kBelow7 ? plus(0.5f, 4.0f) : float_of(least_bits(plus(0.5f, 4.0f), kIntegers + 7.0f));
  return least_bits(float_of(low), high);
}

// What an element of E is encoded from.
template <class E, class In, Way kWay>
static __forceinline__ float scaled(float x, Divisor factor, float then) {
  if constexpr (E::kFlush && kWay == Way::any) x = flush(x);
  float y;
  if constexpr (!E::kDivide || kWay == Way::multiplied) {
    y = x * factor.by;
  } else if constexpr (kWay == Way::any) {
    y = x / factor.by;
  } else if constexpr (E::kRoundScaled) {
    y = quotient_by(x, factor.by, factor.reciprocal);
  } else {
    y = fma_rn(x, factor.reciprocal, x * factor.rest);
  }
  if constexpr (E::kRoundScaled) y = Input<In>::rounded(y);
  if constexpr (E::kThenEncode) y = y * then;
  return y;
}

// Whether elements have their signs but a negative zero, which is therefore none where elements are read.
template <class E, Way kWay>
constexpr bool spares_zeros() {
  if constexpr (kWay != Way::any) return E::kSign == Sign::negative && E::kDivide;
  return false;
}

// The code of an element where kNearestE2m1, in the last four bits.
template <class E, class In, Way kWay>
static __forceinline__ u32 nearest_code_of(u32 bits, Divisor factor, float then) {
  using Bits = typename Input<In>::Bits;
  const float x = Input<In>::value(static_cast<Bits>(bits & Input<In>::kMagnitude)),
              a = scaled<E, In, kWay>(x, factor, then);
  const u32 code = nearest_e2m1_of<kWay != Way::any>(a), both = bits_from<7u, 8u>(code, bits >> (8 * sizeof(Bits) - 4));
  if constexpr (E::kSign == Sign::negative && !spares_zeros<E, kWay>()) return a > 0.0f ? both : code & 7u;
  if constexpr (E::kSign == Sign::unsigned_zero) return code & 7u ? both : 0u;
  return both;
}

// The code of an element, of one of four bits in the last four. then: the tensor's encode scale, where elements meet it
// after their factors; random: a byte.
template <class E, class In, bool kStochastic, Way kWay>
static __forceinline__ u32 code_of(u32 bits, Divisor factor, float then, u32 random) {
  using Format = typename E::Format;
  if constexpr (!kStochastic)
    if constexpr (kNearestE2m1<E> && (kWay != Way::any || !kWraps<E>))
      return nearest_code_of<E, In, kWay>(bits, factor, then);
  const float x = Input<In>::value(static_cast<typename Input<In>::Bits>(bits));
  if constexpr (E::kCompare) return encode<Format, E::kRounding, E::kSign, 0u>(x, factor.by);
  const float y = scaled<E, In, Way::any>(x, factor, then);
  if constexpr (kStochastic)
    return encode_stochastic<Format>(y, random);
  else if constexpr (Format::kIsInteger)
    return encode<Format, Rounding::rn, Sign::signbit, 0u, E::kNarrow>(y);
  else if constexpr (E::kRounding == Rounding::rn) {
    const u32 code = encode_finite_rn<Format>(with_code_sign<E::kSign>(y));
    return E::kSign == Sign::unsigned_zero && code == Format::kSignBit ? 0u : code;
  } else
    return encode<Format, E::kRounding, E::kSign, 0u>(y);
}

// The factors of runs of kRun elements, and their way. reciprocals, rests: of divisors that are usual (see Divisor).
// codes, multipliers: those of the blocks that runs are, and what to multiply with by code.
struct Factors {
  const float *by, *reciprocals = nullptr, *rests = nullptr;
  const u8* codes = nullptr;
  const float* multipliers = nullptr;
  Way way = Way::any;

  template <Way kWay, bool kDivide>
  __forceinline__ Divisor of(i64 run) const {
    if constexpr (kWay == Way::multiplied) return {multipliers[codes[run]], 0.0f, 0.0f};
    if constexpr (kWay == Way::usual && kDivide) return {by[run], reciprocals[run], rests[run]};
    return {by[run], 0.0f, 0.0f};
  }
};

// Codes as they are stored. Two elements are a lane of what the loop becomes, and their codes together: to bring single
// codes together, across lanes, would take as long as to find them.
template <class E, class In, bool kStochastic, Way kWay>
static void encode_runs(const void* elements, Factors factors, float then, i64 count, const u8* random, u8* out) {
  using Bits = typename Input<In>::Bits;
  constexpr bool kFour = E::Format::kStoredBits == 4;
  using Stored = std::conditional_t<kFour, u8, u16>;
  const auto* x = static_cast<const Bits*>(elements);
  const auto divisor = [=](i64 run) { return factors.of<kWay, E::kDivide>(run); };
  const auto two = [=](i64 pair, Divisor factor) {
    u32 low, high;
    load_two(x + 2 * pair, low, high, spares_zeros<E, kWay>());
    u16 bytes = 0;
    if constexpr (kStochastic) std::memcpy(&bytes, random + 2 * pair, 2);
    const u32 first = code_of<E, In, kStochastic, kWay>(low, factor, then, bytes & 0xFFu);
    const u32 second = code_of<E, In, kStochastic, kWay>(high, factor, then, bytes >> 8);
    return kFour ? bits_from<0x0Fu, 0xF0u>(first, second << 4) & 0xFFu : first | second << 8;
  };
  const auto some = [=](i64 run, auto& found) {  // of whole runs, two for each sixteen that are found
    for (int k = 0; k < static_cast<int>(sizeof found / sizeof(u32) / kRun); ++k) {
      const i64 at = run + 2 * k;
      const Divisor first = divisor(at), second = divisor(at + 1);
      for (int j = 0; j < kRun; ++j) {
        const bool is_first = j < kRun / 2;
        const Divisor factor{is_first ? first.by : second.by, is_first ? first.reciprocal : second.reciprocal,
                             is_first ? first.rest : second.rest};
        found[kRun * k + j] = two(at * (kRun / 2) + j, factor);
      }
    }
    store_narrow<Stored>(found, out + run * (kRun / 2) * sizeof(Stored));
  };
  constexpr int kMany = kNarrowed<Stored> / kRun * 2;
  const i64 runs = count / (2 * kRun) * 2;
  i64 run = 0;
  for (; run + kMany <= runs; run += kMany) {
    u32 found[kNarrowed<Stored>];
    some(run, found);
  }
  for (; kMany > 2 && run < runs; run += 2) {
    u32 found[kRun];
    some(run, found);
  }
  for (i64 pair = runs * (kRun / 2); pair < count / 2; ++pair) {
    const Stored found = static_cast<Stored>(two(pair, divisor(2 * pair / kRun)));
    std::memcpy(out + pair * sizeof(Stored), &found, sizeof found);
  }
  if (kFour || count % 2 == 0) return;
  const u32 byte = kStochastic ? random[count - 1] : 0u;
  out[count - 1] = static_cast<u8>(code_of<E, In, kStochastic, kWay>(x[count - 1], divisor(count / kRun), then, byte));
}

template <class E, class In, bool kStochastic>
static void encode_elements(const void* elements, Factors factors, float then, i64 count, const u8* random, u8* out) {
  if constexpr (!kStochastic) {
    if constexpr (may_multiply<E, In>())
      if (factors.way == Way::multiplied)
        return encode_runs<E, In, false, Way::multiplied>(elements, factors, then, count, random, out);
    if constexpr (usual_below<E, In>() > 0.0f && (!E::kDivide || kHasSlowDivision))
      if (factors.way == Way::usual)
        return encode_runs<E, In, false, Way::usual>(elements, factors, then, count, random, out);
  }
  encode_runs<E, In, kStochastic, Way::any>(elements, factors, then, count, random, out);
}
