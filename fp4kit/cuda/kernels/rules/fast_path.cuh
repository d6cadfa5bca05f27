// The fast path encodes a block of finite elements in few instructions. Because no element becomes NaN, the rules of
// recipes for NaN make no difference. R is the recipe, and In is the type of the elements. f is the factor of the block
// (Factor), by which elements are multiplied or divided before rounding. A run is a number of neighboring elements of
// one row that one thread handles together. A pair is a word of two 16-bit elements.
//
// A block takes the fast path if its largest magnitude and its factor are finite, and if no step can underflow or
// overflow unnoticed (takes_fast_path). All other blocks take the exact path (exact_path.cuh), which is slower and
// valid for every block.
#pragma once

#include "exact_path.cuh"
#include "pack.cuh"

// The properties of a recipe's fast path for elements of type In. kExists is true if the recipe has a fast path. The
// other constants say which instructions it may use.
template <class R, class In>
struct FastPath {
  static constexpr bool kIs16Bit = sizeof(typename In::Bits) == 2;
  static constexpr bool kE2m1 = R::Element::kIsE2m1;
  static constexpr bool kPowerOfTwo = R::Scale::kMantissaBits == 0 && R::kHasScales;
  // True if elements times the factor are exact: the factor is a power of two, so the products have 8 or 11 bits. If
  // such a product is multiplied by 1 - 2^-20 or 1 + 2^-20, ties are rounded toward or away from zero, and no other
  // rounding changes. No product is the float just below 0.5, which has 24 bits. All this is false if a product is
  // flushed, or rounded to 8 or 11 bits again.
  static constexpr bool kExactProducts = kIs16Bit && kPowerOfTwo && !R::kDivide && !R::kRoundScaled && !R::kFlush;
  static constexpr bool kShrinksTies = R::kRounding == Rounding::rnz && kExactProducts && !R::kStochastic;
  static constexpr bool kGrowsTies =
      (R::kRounding == Rounding::rna || R::kRounding == Rounding::rnas) && kExactProducts && !R::kStochastic;
  static constexpr float kNudge = kShrinksTies ? 1.0f - 0x1p-20f : kGrowsTies ? 1.0f + 0x1p-20f : 1.0f;
  static constexpr bool kClamp = kPowerOfTwo;  // other recipes test the largest product first, which is below 7
  static constexpr bool kTiesToEven = R::kRounding == Rounding::rn ||
                                      (R::kRounding == Rounding::rns && kExactProducts) ||
                                      (R::kRounding == Rounding::rnw && !kClamp);
  // A smallest normal exponent above 0 is excluded, because encode_magnitude_stochastic cannot represent its powers of
  // two.
  static constexpr bool kRoundingFits = R::kStochastic ? !R::kFake && R::Element::kEmin <= 0 && !R::kStochasticFloat16
                                                       : kTiesToEven || kShrinksTies || kGrowsTies;
  // True if the sign of a zero product is known. It is not known if rounding to float16 can make -0, or if a 16-bit
  // subnormal can be flushed to -0: such a -0 looks like an element -0.
  // With Sign::unscaled, it is not known of float32 elements, whose products can underflow to -0.
  static constexpr bool kZeroSignKnown =
      (!R::kRoundScaled || In::kIsBfloat16) && !(kIs16Bit && R::kFlush) && (kIs16Bit || R::kSign != Sign::unscaled);
  static constexpr bool kKeepsInputSign =
      R::kSign == Sign::signbit ||
      R::kSign == Sign::unsigned_zero;  // codes have the elements' own signs, except codes of zero
  static constexpr bool kSignFits = R::kStochastic || kKeepsInputSign || kZeroSignKnown;
  static constexpr bool kDivisionFits = !R::kDivide || (kE2m1 && !R::kStochastic);  // see quotient_by
  // The factor of an amax rule is not always a power of two, even if scales are.
  static constexpr bool kFactorFits = !(R::kIsOwn && kPowerOfTwo);
  static constexpr bool kExists = kDivisionFits && kFactorFits && !R::kThenEncode && !R::Element::kIsInteger &&
                                  !R::Element::kIsTable && kRoundingFits && kSignFits;
  // True if two bfloat16 elements are encoded at once, in the halves of a word: by an instruction (convert_pairs) or,
  // if kComputesPairs, by arithmetic (encode_pairs_e2m1x8).
  static constexpr bool kPairsFit =
      In::kIsBfloat16 && kPowerOfTwo && kTiesToEven && !R::kDivide && !R::kRoundScaled && !R::kFake && !R::kStochastic;
  static constexpr bool kConvertsPairs =
      kPairsFit && ((FP4KIT_HAS_CVT_PAIRS && kE2m1) ||
                    (FP4KIT_HAS_CVT_FP8 && FP4KIT_FAST_BF16X2 && (R::Element::kIsE4m3 || R::Element::kIsE5m2)));
  static constexpr bool kComputesPairs = FP4KIT_FAST_BF16X2 && !FP4KIT_HAS_CVT_E2M1 && kPairsFit && kE2m1;
  static constexpr bool kByPairs = kConvertsPairs || kComputesPairs;
  static constexpr float kPairScale = kComputesPairs ? 0x1p-9f : 1.0f;  // see code_pair_e2m1
  // True if products have no more bits than 16-bit elements, as stochastic rounding of pairs requires.
  static constexpr bool kProductsFit = kExactProducts && kE2m1 && !R::kDivide;
};

// True if a table of factors also holds a number by which the fast path multiplies elements instead of dividing them
// (exact_multiplier). Float32 elements have too many bits: few divisors have such a number.
template <class R, class In>
constexpr bool kHasMultipliers = R::kDivide && R::kHasTable && !R::BlockRule::kReadsAmax && !R::kRoundScaled &&
                                 !R::kRepacked && FastPath<R, In>::kIs16Bit && FastPath<R, In>::kExists;

// The recipe that the fast path follows, and the factor that it takes: if kHasMultipliers, R without divisions, and the
// multiplier. f is an entry of the table of factors, adapted to the block.
template <class R, class In, bool = kHasMultipliers<R, In>>
struct FastRecipe {
  using Type = R;
  FP4KIT_DEVICE Factor factor(Factor f) { return f; }
};
template <class R, class In>
struct FastRecipe<R, In, true> {
  struct Type : R {
    static constexpr bool kDivide = false;
  };
  FP4KIT_DEVICE Factor factor(Factor f) { return {f.reciprocal, f.reciprocal}; }
};

// Return the entry of a table of factors for a scale code, for blocks that are not all zeros. If kHasMultipliers, the
// field `reciprocal` is the multiplier of the fast path, or NaN if there is none (exact_multiplier).
template <class R, class In>
FP4KIT_DEVICE Factor table_entry(u32 code, TensorScale t) {
  Factor f = factor_of_code<R, In>(code, t);
  if constexpr (kHasMultipliers<R, In>)
    f.reciprocal = exact_multiplier(f.value, f.reciprocal, (1u << (23 - In::kMantissaBits)) - 1u);
  return f;
}

// Return true if R::kRepacked leaves the codes of a block with this factor unchanged. (With R::kRepacked, the producer
// decodes the codes and encodes the values again when it packs them.) Two conditions must hold. First, no value may
// overflow the type of the elements. Second, for E8M0 scales, the type must represent the scale; for other scales, the
// error of the type must be less than half of the smallest step between codes. Under scales other than E8M0, a factor
// of 0 keeps the codes, too, because all values are then zeros.
template <class R, class In>
FP4KIT_DEVICE bool keeps_codes(float factor) {
  using E = typename R::Element;
  constexpr bool kPower = R::Scale::kMantissaBits == 0;
  constexpr int kTop = In::kMantissaBits == 10 ? 15 : 127, kMinExponent = E::kEmax - kTop + !kPower;
  constexpr int kMaxKeptExponent = kPower ? -In::kLeastExponent : E::kEmin - E::kMantissaBits - In::kLeastExponent - 1,
                kMaxExponent = kMaxKeptExponent < 127 ? kMaxKeptExponent : 127;
  const bool keeps = factor >= float_of(static_cast<u32>(127 + kMinExponent) << 23) &&
                     factor <= float_of(static_cast<u32>(127 + kMaxExponent) << 23);
  return keeps || (!kPower && factor == 0.0f);  // with factor 0 all values are zeros
}

// Return true if a block with the factor f takes the fast path, which then gives the codes of the exact path. `largest`
// is the float32 bits of the largest magnitude of its elements. Return false if an element or the factor is infinite or
// NaN. Also return false if a step may overflow or underflow in a way that changes a code.
template <class R, class In>
FP4KIT_DEVICE bool takes_fast_path(u32 largest, Factor f) {
  using Path = FastPath<R, In>;
  // If |x| * factor < 7, no clamp is needed. The comparison is false for infinity and NaN. If R divides, the product
  // with the reciprocal is within a relative 2^-22 of the quotient. A product below 6.9 stays below 7 even if it is
  // rounded to 8 or 11 bits.
  const float product = float_of(largest) * f.reciprocal;
  bool takes = Path::kComputesPairs           ? product < kPairsEnd
               : Path::kClamp || !Path::kE2m1 ? fabsf(product) <= kFltMax
                                              : product < (R::kRoundScaled ? 6.9f : 6.99f);
  if constexpr (R::kDivide) takes = takes & (f.value > 0x1p-90f) & (f.value < 0x1p90f);
  if constexpr (R::kRepacked && !R::kStochastic) takes = takes & keeps_codes<R, In>(f.value);
  if constexpr (!Path::kKeepsInputSign && Path::kIs16Bit) {  // require that no product of an element underflows to zero
    constexpr int kMinExponent = (R::kRoundScaled ? In::kLeastExponent : -149) - In::kLeastExponent;
    takes = takes & (f.reciprocal >= float_of(static_cast<u32>(127 + kMinExponent) << 23));
  }
  // The factor times kPairScale must not underflow. A factor of 0 is allowed: its bits minus 1 are the largest integer.
  if constexpr (Path::kComputesPairs) takes = takes & (bits_of(f.value) - 1u >= bits_of(0x1p-124f) - 1u);
  // Instructions on pairs do not flush. Below this factor, every subnormal element has the code 0 anyway.
  if constexpr (R::kFlush && Path::kByPairs) takes = takes & (f.value < 0x1p100f);
  return takes;
}

// Return the finite element x, scaled by the factor f of its block: the number whose rounding gives the code of x. It
// differs from the result of scaled_element in three ways that change no code: it has the rounding of quotient_by if R
// divides, it is multiplied by FastPath::kNudge, and the recipe's rules for NaN are left out.
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

// Return y with the sign bit that the code of element x gets. y must be scaled_finite of x. If R::kDivide and R::kSign
// is `signbit`, take the sign from x, because quotient_by turns -0 into 0. Otherwise, take it from y (with_code_sign).
template <class R>
FP4KIT_DEVICE float with_code_sign_of(float y, float x) {
  if constexpr (R::kDivide && R::kSign == Sign::signbit) return float_of(bits_of(y) | (bits_of(x) & 0x80000000u));
  return with_code_sign<R::kSign>(y);
}

// Return a pair in which each element has the sign bit that its code gets. Factors are positive here, so a code has the
// sign of its element. Only zeros change: -0 becomes 0 if R::kSign is `negative` or `unscaled`, and 0 becomes -0 if it
// is `not_positive`.
template <class R, class In>
FP4KIT_DEVICE u32 pair_with_code_signs(u32 pair) {
  if constexpr (R::kSign == Sign::negative || R::kSign == Sign::unscaled) return In::add_zero(pair);
  if constexpr (R::kSign == Sign::not_positive) return In::add_zero(pair ^ 0x80008000u) ^ 0x80008000u;
  return pair;
}

// Store in `a` the scaled magnitudes (scaled_finite) of elements first ... first + 7 of a run, and return the signs of
// their codes. Taking |x| costs no instruction if x is an operand of a product. In the fused multiply-add of a quotient
// it would cost one instruction per element. So, if R divides, the sign bits of whole words are cleared instead.
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

// True if the signs of codes follow from pair_with_code_signs: if a product is zero, its element is zero.
template <class R, class In>
constexpr bool kSignsByPairs = FastPath<R, In>::kIs16Bit && !R::kDivide;

// Replace elements by scaled_finite of them, with the sign bits that their codes get. If kSignsByPairs, the elements
// must have these signs already. kCount must be even. Without kPacked, a Blackwell GPU needs fewer registers.
template <class R, class In, bool kPacked = true, int kCount>
FP4KIT_DEVICE void scale_with_signs(float (&x)[kCount], Factor f) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float low = x[i], high = x[i + 1];
    if constexpr (!kPacked || R::kFlush || R::kDivide || R::kRoundScaled) {
      low = scaled_finite<R, In>(low, f);
      high = scaled_finite<R, In>(high, f);
    } else {
      mul_f32x2(low, high, f.value * FastPath<R, In>::kNudge);
    }
    x[i] = kSignsByPairs<R, In> ? low : with_code_sign_of<R>(low, x[i]);
    x[i + 1] = kSignsByPairs<R, In> ? high : with_code_sign_of<R>(high, x[i + 1]);
  }
}

// Encode a run of finite elements in a block with the factor f, and store their codes in `words`, the first code in the
// lowest bits. If takes_fast_path is true for the block, the words equal those of exact_codes; otherwise they have no
// meaning. Rounding must not be stochastic.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_finite(const Run<In, kRun>& run, Factor f,
                                 u32 (&words)[kRun * R::Element::kStoredBits / 32]) {
  using Path = FastPath<R, In>;
  if constexpr (Path::kByPairs) {
    const u32 factor = prmt(bits_of(f.value * Path::kPairScale), 0u, 0x3232u);
    u32 signs[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) signs[i] = pair_with_code_signs<R, In>(run.w[i]);
    constexpr int kPairs = kRun / 2 / (kRun * R::Element::kStoredBits / 32);  // per word
#pragma unroll
    for (int i = 0; i < kRun / 2 / kPairs; ++i) {
      if constexpr (Path::kConvertsPairs)
        words[i] = convert_pairs<typename R::Element>(signs + kPairs * i, factor);
      else
        words[i] = encode_pairs_e2m1x8(run.w + kPairs * i, signs + kPairs * i, factor);
      words[i] = with_signs_of_codes<R>(words[i]);
    }
  } else if constexpr (Path::kE2m1 && !FP4KIT_HAS_CVT_E2M1) {
#pragma unroll
    for (int i = 0; i < kRun / 8; ++i) {
      float a[8];
      const NibbleSigns signs = magnitudes_x8<R, In>(run, f, 8 * i, a);
      words[i] = with_signs_of_codes<R>(encode_e2m1x8<Path::kClamp>(a, signs));
    }
  } else {
    Run<In, kRun> x = run;
    if constexpr (kSignsByPairs<R, In>) {
#pragma unroll
      for (int i = 0; i < run.kWords; ++i) x.w[i] = pair_with_code_signs<R, In>(x.w[i]);
    }
    float y[kRun];
    widen_run(x, y);
    scale_with_signs<R, In>(y, f);
#pragma unroll
    for (int i = 0; i < kRun * R::Element::kStoredBits / 32; ++i)
      words[i] = with_signs_of_codes<R>(encode_word<typename R::Element>(y + i * 32 / R::Element::kStoredBits));
  }
}

// Return the value of the format F nearest to a >= 0, ties to even, as float32. If a is above the largest value, return
// the largest value. a must not be NaN. Let e be the exponent of a, at least emin. Adding and subtracting 2^(e + 23 -
// M) rounds a to the grid of a format with M mantissa bits.
template <class F>
FP4KIT_DEVICE float round_magnitude(float a) {
  a = fminf(a, max_of<F>());
  const u32 e = bits_of(fmaxf(a, float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits;
  const float magic = float_of(e) * static_cast<float>(1 << (23 - F::kMantissaBits));
  return (a + magic) - magic;
}

// Quantize and dequantize a run of finite elements: store in `values` the values to which its codes decode in a block
// with the factor f and the given Scale (decode_rules.cuh). takes_fast_path must be true for the block.
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
