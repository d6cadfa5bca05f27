// Blocks of finite elements, encoded the short way: no element of theirs becomes NaN, so every rule for NaN gives the
// same. A block takes this way if its largest magnitude and its factor are finite and the factor is in a range where no
// step underflows or overflows unseen (takes_fast_path); the exact way (exact_path.cuh) is right for every block, and
// slower.
#pragma once

#include "exact_path.cuh"
#include "pack.cuh"

template <class R, class In>
struct FastPath {
  static constexpr bool kIs16Bit = sizeof(typename In::Bits) == 2;
  static constexpr bool kE2m1 = R::Element::kIsE2m1;
  static constexpr bool kPowerOfTwo = R::Scale::kMantissaBits == 0 && R::kHasScales;
  // Ties toward and away from zero of exact products of 8 or 11 bits: what shrinks, or grows, them by 2^-20 moves ties
  // and nothing else anywhere. A product that is rounded to 8 or 11 bits again, or flushed, loses that. None is the
  // float below 0.5, of 24 bits.
  static constexpr bool kExactProducts = kIs16Bit && kPowerOfTwo && !R::kDivide && !R::kRoundScaled && !R::kFlush;
  static constexpr bool kShrinksTies = R::kRounding == Rounding::rnz && kExactProducts && !R::kStochastic;
  static constexpr bool kGrowsTies = R::kRounding == Rounding::rna && kExactProducts && !R::kStochastic;
  static constexpr float kNudge = kShrinksTies ? 1.0f - 0x1p-20f : kGrowsTies ? 1.0f + 0x1p-20f : 1.0f;
  static constexpr bool kClamp = kPowerOfTwo;  // others look at the largest product first, which is below 7
  static constexpr bool kTiesToEven = R::kRounding == Rounding::rn ||
                                      (R::kRounding == Rounding::rns && kExactProducts) ||
                                      (R::kRounding == Rounding::rnw && !kClamp);
  // encode_magnitude_stochastic has no power of two for a least exponent above 0.
  static constexpr bool kRoundingFits =
      R::kStochastic ? !R::kFake && R::Element::kEmin <= 0 : kTiesToEven || kShrinksTies || kGrowsTies;
  // -0 that rounding to float16 made is not told from what was one before; nor one that a subnormal of 16 bits was
  // flushed to.
  static constexpr bool kZeroSignKnown = (!R::kRoundScaled || In::kIsBfloat16) && !(kIs16Bit && R::kFlush);
  static constexpr bool kKeepsInputSign =
      R::kSign == Sign::signbit || R::kSign == Sign::unsigned_zero;  // elements' own, but of codes of zero
  static constexpr bool kSignFits = R::kStochastic || kKeepsInputSign || kZeroSignKnown;
  static constexpr bool kDivisionFits = !R::kDivide || (kE2m1 && !R::kStochastic);  // see quotient_by
  static constexpr bool kExists =
      kDivisionFits && !R::kThenEncode && !R::Element::kIsInteger && kRoundingFits && kSignFits;
  static constexpr bool kByPairs = FP4KIT_FAST_BF16X2 && In::kIsBfloat16 && kPowerOfTwo && kE2m1 && kTiesToEven &&
                                   !R::kDivide && !R::kRoundScaled && !R::kFake && !R::kStochastic;
  // Stochastic rounding of products that have no more bits than elements of 16 bits have.
  static constexpr bool kProductsFit = kExactProducts && kE2m1 && !R::kDivide;
};

// Whether codes that are found again (R::kRepacked) are those that they were: no value overflows the dtype of the
// elements, which also holds a power of two that is their scale, or, under other scales, keeps values to less than half
// of the least step between codes.
template <class R, class In>
FP4KIT_DEVICE bool keeps_codes(float factor) {
  using E = typename R::Element;
  constexpr bool kPower = R::Scale::kMantissaBits == 0;
  constexpr int kTop = In::kMantissaBits == 10 ? 15 : 127, kMinExponent = E::kEmax - kTop + !kPower;
  constexpr int kMaxKeptExponent = kPower ? -In::kLeastExponent : E::kEmin - E::kMantissaBits - In::kLeastExponent - 1,
                kMaxExponent = kMaxKeptExponent < 127 ? kMaxKeptExponent : 127;
  const bool keeps = factor >= float_of(static_cast<u32>(127 + kMinExponent) << 23) &&
                     factor <= float_of(static_cast<u32>(127 + kMaxExponent) << 23);
  return keeps || (!kPower && factor == 0.0f);  // all values are zeros
}

// Whether a block goes the short way. largest: float32 bits of its largest magnitude.
template <class R, class In>
FP4KIT_DEVICE bool takes_fast_path(u32 largest, Factor f) {
  using Path = FastPath<R, In>;
  // |x| * by < 7 needs no clamp; NaN and infinity fail here, of either. The reciprocal's product is within 2^-22 of the
  // quotient, and below 6.9 what is rounded to 8 or 11 bits again stays below 7.
  const float product = float_of(largest) * f.reciprocal;
  bool takes = Path::kClamp || !Path::kE2m1 ? fabsf(product) <= kFltMax : product < (R::kRoundScaled ? 6.9f : 6.99f);
  if constexpr (R::kDivide) takes = takes & (f.value > 0x1p-90f) & (f.value < 0x1p90f);
  if constexpr (R::kRepacked && !R::kStochastic) takes = takes & keeps_codes<R, In>(f.value);
  if constexpr (!Path::kKeepsInputSign && Path::kIs16Bit) {  // no product of an element underflows to a zero
    constexpr int kMinExponent = (R::kRoundScaled ? In::kLeastExponent : -149) - In::kLeastExponent;
    takes = takes & (f.reciprocal >= float_of(static_cast<u32>(127 + kMinExponent) << 23));
  }
  // Pairs do not flush; below this no subnormal makes a code.
  if constexpr (R::kFlush && Path::kByPairs) takes = takes & (f.value < 0x1p100f);
  return takes;
}

// The element to encode, of magnitude |x| if kMagnitude, before NaN rules, which do not matter here.
template <class R, class In>
FP4KIT_DEVICE float scaled_finite(float x, Factor f) {
  float y;
  if constexpr (R::kFlush) {
    y = mul_ftz(x, f.value);
  } else if constexpr (R::kDivide) {
    y = quotient_by(x, f.value, f.reciprocal);
  } else {
    y = x * (f.value * FastPath<R, In>::kNudge);
  }
  if constexpr (R::kRoundScaled) y = round_to<In>(y);
  return y;
}

// with_code_sign of what scaled_finite makes of x: the fma of a quotient makes 0 of -0.
template <class R>
FP4KIT_DEVICE float with_code_sign_of(float y, float x) {
  if constexpr (R::kDivide && R::kSign == Sign::signbit) return float_of(bits_of(y) | (bits_of(x) & 0x80000000u));
  return with_code_sign<R::kSign>(y);
}

// The same of a pair of 16-bit elements, whose signs are their products' too.
template <class R, class In>
FP4KIT_DEVICE u32 pair_with_code_signs(u32 pair) {
  if constexpr (R::kSign == Sign::negative) return In::add_zero(pair);
  if constexpr (R::kSign == Sign::not_positive) return In::add_zero(pair ^ 0x80008000u) ^ 0x80008000u;
  return pair;
}

// Magnitudes to encode, and the signs of eight codes: of elements `first` and on of a run. A product takes the
// magnitude of an operand for nothing; the fma of a quotient does not.
template <class R, class In, int kRun>
FP4KIT_DEVICE NibbleSigns magnitudes_x8(const Run<In, kRun>& run, Factor f, int first, float (&a)[8]) {
  Run<In, kRun> magnitudes = run;
  if constexpr (R::kDivide) {
#pragma unroll
    for (int i = 0; i < run.kWords; ++i) magnitudes.w[i] &= FastPath<R, In>::kIs16Bit ? 0x7FFF7FFFu : 0x7FFFFFFFu;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = scaled_finite<R, In>(fabsf(element(magnitudes, first + i)), f);
  if constexpr (FastPath<R, In>::kIs16Bit) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pair_with_code_signs<R, In>(run.w[first / 2 + i]);
    return nibble_signs_of_pairs(pairs);
  } else {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 sign = run.w[first + i];
      y[i] = FastPath<R, In>::kKeepsInputSign
                 ? float_of(sign)
                 : with_code_sign<R::kSign>(float_of(bits_of(a[i]) | (sign & 0x80000000u)));
    }
    return nibble_signs(y);
  }
}

// Codes of a run, packed as exact_codes packs them.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_finite(const Run<In, kRun>& run, Factor f,
                                 u32 (&words)[kRun * R::Element::kStoredBits / 32]) {
  using Path = FastPath<R, In>;
  if constexpr (Path::kByPairs) {
    const u32 half = bits_of(f.value) >> 16, factor = half | half << 16;
    u32 signs[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) signs[i] = pair_with_code_signs<R, In>(run.w[i]);
#pragma unroll
    for (int i = 0; i < kRun / 8; ++i)
      words[i] = with_signs_of_codes<R>(encode_pairs_e2m1x8(run.w + 4 * i, signs + 4 * i, factor));
  } else if constexpr (Path::kE2m1 && !FP4KIT_HAS_CVT_E2M1) {
#pragma unroll
    for (int i = 0; i < kRun / 8; ++i) {
      float a[8];
      const NibbleSigns signs = magnitudes_x8<R, In>(run, f, 8 * i, a);
      words[i] = with_signs_of_codes<R>(encode_e2m1x8<Path::kClamp>(a, signs));
    }
  } else {
    float y[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      y[i] = with_code_sign_of<R>(scaled_finite<R, In>(element(run, i), f), element(run, i));
#pragma unroll
    for (int i = 0; i < kRun * R::Element::kStoredBits / 32; ++i)
      words[i] = with_signs_of_codes<R>(encode_word<typename R::Element>(y + i * 32 / R::Element::kStoredBits));
  }
}

// a >= 0 rounded to the values of a format, rn: adding 2^(e + 23 - M), e the exponent of a, drops the bits below.
template <class F>
FP4KIT_DEVICE float round_magnitude(float a) {
  a = fminf(a, max_of<F>());
  const u32 e = bits_of(fmaxf(a, float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * static_cast<float>(1 << (23 - F::kMantissaBits));
  return (a + magic) - magic;
}

// The values that a run's codes have, as the decode rule makes them of a block's scale.
template <class R, class In, int kRun>
FP4KIT_DEVICE void round_finite(const Run<In, kRun>& run, Factor f, typename R::DecodeRule::Scale scale,
                                float (&values)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float y = scaled_finite<R, In>(element(run, i), f);
    const float value = round_magnitude<typename R::Element>(magnitude_of(y));
    const u32 sign = bits_of(with_code_sign_of<R>(y, element(run, i))) & 0x80000000u;
    const bool is_unsigned = R::kSign == Sign::unsigned_zero && value == 0.0f;
    values[i] = R::DecodeRule::apply(is_unsigned ? value : float_of(bits_of(value) | sign), scale);
  }
}
