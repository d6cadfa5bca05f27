// The fast path (fast_path.cuh) for stochastic rounding: a magnitude is rounded up or down by a random byte. R is the
// recipe, F an element format, and In the type of the elements. f is the factor of the block, by which elements are
// multiplied before rounding.
#pragma once

#include "fast_path.cuh"

// Return the code that encode_stochastic gives for a magnitude a, without sign. `byte` is 2^23 + the random byte. a
// must not exceed the largest value of the format. For E2M1, a may be anything below 7, and the code may then be 8,
// which the caller must replace by 7.
//
// Multiplying by 2^(-126 - emin) moves the smallest normal exponent of the format, and its subnormals, to those of
// float32. The bits from bit 23 - M upward are then the code, rounded toward zero. M is the number of mantissa bits.
template <class F>
FP4KIT_DEVICE u32 encode_magnitude_stochastic(float a, float byte) {
  constexpr float kStep = 1.0f / (256 << F::kMantissaBits);
  const float e = float_of(bits_of(fmaxf(a, float_of(static_cast<u32>(F::kEmin + 127) << 23))) & kInfinityBits);
  const float t =
      fma_rn(fma_rn(byte, kStep, -8388608.0f * kStep), e, a);  // the byte's part and its product with e are exact
  return bits_of(mul_rz(t, float_of(static_cast<u32>(1 - F::kEmin) << 23))) >> (23 - F::kMantissaBits);
}

// Encode a run of finite elements in a block with the factor f by stochastic rounding, and store the codes in `words`,
// the first code in the lowest bits. takes_fast_path must have returned true for the block. `random` holds four random
// bytes per word, the byte of the first element in the lowest bits. The codes are those of exact_codes. A code has the
// sign bit of the scaled element, as in encode_stochastic, whatever R::kSign is.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_finite_stochastic(const Run<In, kRun>& run, Factor f, const u32 (&random)[kRun / 4],
                                            u32 (&words)[kRun * R::Element::kStoredBits / 32]) {
  using F = typename R::Element;
  if constexpr (FastPath<R, In>::kProductsFit) {
#pragma unroll
    for (int w = 0; w < kRun / 8; ++w) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = mul_sat(fabsf(element(run, 8 * w + i)), f.value * 0.125f);
      words[w] = encode_stochastic_e2m1x8(x, random + 2 * w, nibble_signs_of_pairs(run.w + 4 * w));
    }
    return;
  }
  constexpr bool kClamp = FastPath<R, In>::kClamp || !FastPath<R, In>::kE2m1;
  constexpr int kPerWord = 32 / F::kStoredBits;
#pragma unroll
  for (int w = 0; w < kRun / kPerWord; ++w) {
    u32 word = 0u, signs = 0u;
    float y[8];
#pragma unroll
    for (int i = kPerWord - 1; i >= 0; --i) {
      const int index = w * kPerWord + i;
      y[i] = scaled_finite<R, In>(element(run, index), f);
      const float a = kClamp ? fminf(fabsf(y[i]), max_of<F>()) : magnitude_of(y[i]);
      const float byte =
          float_of(prmt(random[index / 4], 0x4B000000u, 0x7440u + index % 4));  // 2^23 + the byte, by its bits
      word = mad(word, 1u << F::kStoredBits, encode_magnitude_stochastic<F>(a, byte));
      if constexpr (!FastPath<R, In>::kE2m1)
        signs = mad(signs, 1u << F::kStoredBits, bits_of(y[i]) >> (32 - F::kBits) & F::kSignBit);
    }
    if constexpr (FastPath<R, In>::kE2m1) {
      if constexpr (!kClamp) word -= (word & 0x88888888u) >> 3;  // code 8 is above the largest code
      word = word | (FastPath<R, In>::kIs16Bit ? nibble_signs_of_pairs(run.w + 4 * w) : nibble_signs(y));
    }
    words[w] = word | signs;
  }
}
