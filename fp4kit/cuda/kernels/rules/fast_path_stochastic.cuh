// The fast path (fast_path.cuh) for stochastic rounding: a magnitude is rounded up or down by a random byte. R is the
// recipe, F an element format, and In the type of the elements. f is the factor of the block, by which elements are
// multiplied before rounding.
#pragma once

#include "fast_path.cuh"

// Return a word whose top byte is the code, without sign, that encode_stochastic gives for the magnitude 2^kShift * a.
// `byte` is the random byte at bits 16 to 23. 2^kShift * a must not exceed the largest value of the format. For E2M1,
// it may be up to 8, and the code may then be 8, which the caller must replace by 7. kFewBits: a has at most 16 bits.
//
// Multiplying by 2^(-126 - emin) moves the smallest normal exponent of the format, and its subnormals, to those of
// float32. The bits from bit 23 - M upward are then the code, and the next eight bits are compared with the byte: their
// sum carries into the code. M is the number of mantissa bits. encode_stochastic rounds its sum to float32. That
// matters only below half of the smallest value, where a has finer bits than the sum: `half` is half an ulp of the sum.
template <class F, int kShift, bool kFewBits>
FP4KIT_DEVICE u32 encode_magnitude_stochastic(float a, u32 byte) {
  const float half = float_of(static_cast<u32>(127 - 25 + F::kEmin - F::kMantissaBits - kShift) << 23);
  const float scaled = mul_rz(kFewBits ? a : add_rz(a, half), float_of(static_cast<u32>(1 - F::kEmin + kShift) << 23));
  return (bits_of(scaled) << (1 + F::kMantissaBits)) + byte;
}

// Return a word of the top bytes of four words, the first one in the lowest bits.
FP4KIT_DEVICE u32 top_bytes(u32 a, u32 b, u32 c, u32 d) {
  return prmt(prmt(a, b, 0x0073u), prmt(c, d, 0x0073u), 0x5410u);
}

// Encode a run of finite elements in a block with the factor f by stochastic rounding, and store the codes in `words`,
// the first code in the lowest bits. takes_fast_path must have returned true for the block. `random` holds four random
// bytes per word, the byte of the first element in the lowest bits. The codes are those of exact_codes. A code has the
// sign bit of the scaled element, as in encode_stochastic, whatever R::kSign is.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_finite_stochastic(const Run<In, kRun>& run, Factor f, const u32 (&random)[kRun / 4],
                                            u32 (&words)[kRun * R::Element::kStoredBits / 32]) {
  using F = typename R::Element;
  using Path = FastPath<R, In>;
  constexpr bool kSaturates = Path::kProductsFit, kClamp = Path::kClamp || !Path::kE2m1;
  constexpr int kPerWord = 32 / F::kStoredBits, kShift = kSaturates ? 3 : 0;
#pragma unroll
  for (int w = 0; w < kRun / kPerWord; ++w) {
    u32 codes[kPerWord];
    float y[8];
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) {
      const int index = w * kPerWord + i;
      float a;
      if constexpr (kSaturates) {
        a = mul_sat(fabsf(element(run, index)), f.value * 0.125f);
      } else {
        y[i] = scaled_finite<R, In>(element(run, index), f);
        a = kClamp ? fminf(fabsf(y[i]), max_of<F>()) : fabsf(y[i]);
      }
      codes[i] = encode_magnitude_stochastic<F, kShift, Path::kExactProducts>(
          a, prmt(random[index / 4], 0u, 0x4044u + (index % 4 << 8)));
      if constexpr (!Path::kE2m1) codes[i] = or_masked(codes[i], bits_of(y[i]) >> (8 - F::kBits), F::kSignBit << 24);
    }
    if constexpr (F::kStoredBits == 8) {
      words[w] = top_bytes(codes[0], codes[1], codes[2], codes[3]);
    } else {
      u32 word = mad(top_bytes(codes[1], codes[3], codes[5], codes[7]), 16u,
                     top_bytes(codes[0], codes[2], codes[4], codes[6]));
      if constexpr (Path::kE2m1) {
        if constexpr (kSaturates || !kClamp) word -= word >> 3 & 0x11111111u;  // code 8 is above the largest code
        word = word | (Path::kIs16Bit ? nibble_signs_of_pairs(run.w + 4 * w) : nibble_signs(y));
      }
      words[w] = word;
    }
  }
}
