// Functions that encode several finite values into a word of codes, or decode a word of codes. They are the inner loops
// of the fastest kernels. F is an element format, and R the recipe. A pair is a word with two 16-bit numbers, the first
// one in its low half. kClamp is true if magnitudes may be large; they then saturate.
//
// On sm_80 to sm_90, minima, shifts, logic and prmt issue at half the rate of float additions and products. Codes are
// therefore computed by float additions and products as far as possible.
#pragma once

#include "runs.cuh"

// The signs of eight values, in two words of four bytes: `even` for values 0, 2, 4 and 6, and `odd` for values 1, 3, 5
// and 7. Bits 3 and 7 of a byte are both the sign bit of its value.
struct NibbleSigns {
  u32 even, odd;
};

// Return `codes`, a word of eight 4-bit codes, with sign bits added: bit 4 i + 3, the sign bit of code i, is set if the
// sign bit of value i is set. If a sign bit is set in `codes` already, it stays set. This takes two three-operand
// instructions.
FP4KIT_DEVICE u32 operator|(u32 codes, NibbleSigns signs) {
  return or_masked(or_masked(codes, signs.odd, 0x80808080u), signs.even, 0x08080808u);
}

// Return the signs of the eight floats at x. The selector nibbles B and F make prmt fill a byte with copies of a sign
// bit: B with that of the first operand, the top bit of byte 3, and F with that of the second operand.
FP4KIT_DEVICE NibbleSigns nibble_signs(const float* x) {
  return {prmt(prmt(bits_of(x[0]), bits_of(x[2]), 0x00FBu), prmt(bits_of(x[4]), bits_of(x[6]), 0x00FBu), 0x5410u),
          prmt(prmt(bits_of(x[1]), bits_of(x[3]), 0x00FBu), prmt(bits_of(x[5]), bits_of(x[7]), 0x00FBu), 0x5410u)};
}

// Return the signs of the eight 16-bit elements in the four pairs at `pairs`.
FP4KIT_DEVICE NibbleSigns nibble_signs_of_pairs(const u32* pairs) {
  const u32 low = prmt(pairs[0], pairs[1], 0xFBD9u),
            high = prmt(pairs[2], pairs[3], 0xFBD9u);  // bytes of elements 0 2 1 3 and 4 6 5 7
  return {prmt(low, high, 0x5410u), prmt(low, high, 0x7632u)};
}

// Return a word whose low 16 bits are the E2M1 code of a, rounded to nearest even or, if kBySum, as Rounding::rnas. a
// must be in [0, 7), or at least 0 if kClamp.
//
// The code is 2 a below 2, a + 2 below 4, and a / 2 + 4 below 8: the smallest of these three numbers. One fma adds each
// of them to 2^23, and so rounds it to an integer, ties to even. Even codes stay even, because 2 and 4 are even. With
// kBySum, 1/2 is added to the numbers, and they are rounded down. (The first float32 sum is 1 for the float below 1/4.)
template <bool kClamp, bool kBySum = false>
FP4KIT_DEVICE u32 code_bits_e2m1(float a) {
  if constexpr (kBySum) {
    const float sum = fma_rn(a, 2.0f, 0.5f);
    const u32 low = minimum(bits_of(fma_rz(sum, 2.0f, 8388608.0f)), bits_of(fma_rz(a, 2.0f, 8388613.0f)));
    const u32 halves = minimum(low, bits_of(fma_rz(a, 1.0f, 8388617.0f)));
    return (kClamp ? minimum(halves, bits_of(8388623.0f)) : halves) >> 1;
  }
  const u32 low = minimum(bits_of(fma_rn(a, 2.0f, 8388608.0f)), bits_of(a + 8388610.0f));
  const u32 code = minimum(low, bits_of(fma_rn(a, 0.5f, 8388612.0f)));
  return kClamp ? minimum(code, bits_of(8388615.0f)) : code;
}

// Return a word with the E2M1 codes of the eight magnitudes at a, the first code in the lowest bits. Magnitudes are
// rounded to nearest even or, if kBySum, as Rounding::rnas. They must be in [0, 7), or at least 0 if kClamp; then they
// saturate. `signs` gives the sign bits of the codes: NibbleSigns, or a word with the sign of value i at bit 4 i + 3.
template <bool kClamp, bool kBySum = false, class Signs>
FP4KIT_DEVICE u32 encode_e2m1x8(const float* a, Signs signs) {
  u32 c[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i] = code_bits_e2m1<kClamp, kBySum>(a[i]);
  const u32 low = mad(mad(c[3], 16u, c[2]), 256u, mad(c[1], 16u, c[0]));
  const u32 high = mad(mad(c[7], 16u, c[6]), 256u, mad(c[5], 16u, c[4]));
  return prmt(low, high, 0x5410u) | signs;  // drop the upper halves
}

// For each half x of a bfloat16 pair, return the E2M1 code of y = |x| * factor, rounded to nearest even and saturated.
// y must be exact and below kPairsEnd. `factors` holds 2^-9 times the factor of each half, as bfloat16.
//
// The code is the smallest of 2 y, y + 2 and 51/512 y + 6, rounded to integers. (The third number is above 6.5 if y is
// above 5. Unlike y / 2 + 4, it stays below 7.5, so that no fourth number is needed.) In units of the smallest
// bfloat16, 2^-133, rounding gives integers, which are the bits of the results.
constexpr float kPairsEnd = 15.0f;
FP4KIT_DEVICE u32 code_pair_e2m1(u32 pair, u32 factors) {
  const u32 y = fma_bf16x2(pair & 0x7FFF7FFFu, factors, 0x80008000u);  // times 2^-9
  const u32 low = fma_bf16x2(y, 0x02000200u, 0x80008000u), middle = fma_bf16x2(y, 0x01800180u, 0x00020002u);
  return min_bf16x2(min_bf16x2(low, middle), fma_bf16x2(y, 0x00330033u, 0x00060006u));
}

// Return a word with the E2M1 codes of eight elements, in the order in which pairs hold them. codes[i] holds the codes
// without signs of a pair in its halves. The codes get the sign bits of the pairs at `signs`.
FP4KIT_DEVICE u32 packed_pairs_e2m1(const u32 (&codes)[4], const u32* signs) {
  u32 four[2];  // elements 0 2 1 3 and 4 6 5 7 in bytes
#pragma unroll
  for (int i = 0; i < 2; ++i)
    four[i] = or_masked(mad(codes[2 * i + 1], 256u, codes[2 * i]), prmt(signs[2 * i], signs[2 * i + 1], 0xFBD9u),
                        0x08080808u);
  return mad(prmt(four[0], four[1], 0x7632u), 16u, prmt(four[0], four[1], 0x5410u));
}

// Multiply the magnitudes of four bfloat16 pairs by a power of two, and return a word with the E2M1 codes of the eight
// products, the first code in the lowest bits. Products are rounded to nearest even and saturate. The codes get the
// sign bits of the four pairs at `signs`. `factors` holds 2^-9 times the power of two as bfloat16 in both halves.
FP4KIT_DEVICE u32 encode_pairs_e2m1x8(const u32* pairs, const u32* signs, u32 factors) {
  u32 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = code_pair_e2m1(pairs[i], factors);
  return packed_pairs_e2m1(codes, signs);
}

// Multiply bfloat16 pairs by a power of two per half (`factors`), and return a word with the codes of the products in
// the format F, the first code in the lowest bits: four pairs for E2M1, two for FP8. Products must be exact; they are
// rounded to nearest even and saturate. cvt_pairs_e2m1 or cvt_pair_fp8 must exist.
template <class F>
FP4KIT_DEVICE u32 convert_pairs(const u32* pairs, u32 factors) {
  u32 products[16 / F::kStoredBits];
#pragma unroll
  for (int i = 0; i < 16 / F::kStoredBits; ++i) products[i] = fma_bf16x2(pairs[i], factors, 0x80008000u);
  if constexpr (F::kStoredBits == 4) return cvt_pairs_e2m1(products[0], products[1], products[2], products[3]);
  return word_of(cvt_pair_fp8<F::kMantissaBits>(products[0]), cvt_pair_fp8<F::kMantissaBits>(products[1]));
}

// Return a word with the codes of the four finite values at v in a format F with one code per byte, the first code in
// the lowest byte. Values are rounded to nearest even and saturate; codes have the sign bits of the values, also for
// -0.
template <class F>
FP4KIT_DEVICE u32 encode_x4(const float* v) {
#if FP4KIT_HAS_CVT_FP8
  if constexpr (F::kIsE4m3) return word_of(cvt_rn_satfinite_e4m3x2(v[1], v[0]), cvt_rn_satfinite_e4m3x2(v[3], v[2]));
  if constexpr (F::kIsE5m2) return word_of(cvt_rn_satfinite_e5m2x2(v[1], v[0]), cvt_rn_satfinite_e5m2x2(v[3], v[2]));
#endif
  return encode_finite_rn<F>(v[0]) | encode_finite_rn<F>(v[1]) << 8 | encode_finite_rn<F>(v[2]) << 16 |
         encode_finite_rn<F>(v[3]) << 24;
}

// Return a word with the codes of the finite values at v in the format F, the first code in the lowest bits: eight
// 4-bit codes, or four codes of one byte each. Values are rounded to nearest even and saturate; codes have the sign
// bits of the values, also for -0.
template <class F>
FP4KIT_DEVICE u32 encode_word(const float* v) {
#if FP4KIT_HAS_CVT_E2M1
  if constexpr (F::kIsE2m1) return cvt_rn_satfinite_e2m1x8(v);
#endif
  if constexpr (F::kStoredBits == 4) {
    u32 word = 0u;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= encode_finite_rn<F>(v[i]) << (4 * i);
    return word;
  } else {
    return encode_x4<F>(v);
  }
}

// Return the word of codes of the format F, with the sign bits of zero codes cleared.
template <class F>
FP4KIT_DEVICE u32 without_zero_signs(u32 word) {
  constexpr u32 kOnes = 0xFFFFFFFFu / ((1u << F::kStoredBits) - 1u), kSigns = kOnes * F::kSignBit,
                kMagnitudes = kSigns - kOnes;
  return word & (((word & kMagnitudes) + kMagnitudes) | ~kSigns);  // a nonzero magnitude carries into its sign bit
}

// Return the word of codes with the signs that R::kSign requires. For unsigned_zero, the sign bits of zero codes are
// cleared. For other values of R::kSign, return the word unchanged, because its signs are right already.
template <class R>
FP4KIT_DEVICE u32 with_signs_of_codes(u32 word) {
  return R::kSign == Sign::unsigned_zero ? without_zero_signs<typename R::Element>(word) : word;
}

// The values of the E2M1 codes 0 to 7 in a 16-bit type, possibly times a scale: their low bytes and their high bytes.
struct alignas(16) E2m1Table {
  u32 low[2], high[2];
};

// Return the table of the values of a run, which belong to the codes 0 to 7.
template <class Out>
FP4KIT_DEVICE E2m1Table table_of(Run<Out, 8> run) {
  return {{prmt(run.w[0], run.w[1], 0x6420u), prmt(run.w[2], run.w[3], 0x6420u)},
          {prmt(run.w[0], run.w[1], 0x7531u), prmt(run.w[2], run.w[3], 0x7531u)}};
}

// Store the values of kCount E2M1 codes in kCount / 2 pairs of a 16-bit type. The first code is in the lowest bits of
// `word`, and `table` holds the values of the codes 0 to 7. The instruction prmt (ptx.cuh) looks up the low and the
// high bytes of four values at a time. Another prmt brings the sign bits of four codes to the tops of four bytes.
template <int kCount>
FP4KIT_DEVICE void decode_pairs_e2m1(u32 word, E2m1Table table, u32 (&pairs)[kCount / 2]) {
  const u32 magnitudes = word & 0x77777777u, evens = word << 4;  // the top of a byte: an odd code's sign, an even one's
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const u32 selector = magnitudes >> (16 * i), signs = prmt(word, evens, i ? 0x3726u : 0x1504u);
    const u32 low = prmt(table.low[0], table.low[1], selector);
    const u32 high = prmt(table.high[0], table.high[1], selector) ^ (signs & 0x80808080u);
    pairs[2 * i] = prmt(low, high, 0x5140u);
    pairs[2 * i + 1] = prmt(low, high, 0x7362u);
  }
}

// Store the values of kCount codes of the format F as float32 in `values`. The first code is in the lowest bits of
// `codes`.
template <class F, int kCount>
FP4KIT_DEVICE void decode_values(u64 codes, float (&values)[kCount]) {
  if constexpr (F::kIsE2m1) {
    u32 pairs[kCount / 2];
    const E2m1Table bfloat16 = {{0xC0800000u, 0xC0804000u}, {0x3F3F3F00u, 0x40404040u}};
    decode_pairs_e2m1<kCount>(static_cast<u32>(codes), bfloat16, pairs);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = float_of(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
  } else if constexpr ((F::kIsE4m3 || F::kIsE5m2) && FP4KIT_HAS_CVT_FP8) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      u32 pairs[2];
      decode_fp8x4<F::kMantissaBits>(static_cast<u32>(codes >> (8 * i)), pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i + j] = widen_f16(static_cast<u16>(pairs[j / 2] >> (16 * (j % 2))));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      values[i] = decode<F>(static_cast<u32>(codes >> (F::kStoredBits * i)) & ((1u << F::kStoredBits) - 1u));
  }
}
