// Quantize by 4over6 if each row has its own tensor scale. Then each row would need its own tables
// (four_over_six_table.cuh), so this file computes sums instead. Each block gets the better of two scales, which map
// its amax (largest magnitude) to the element values 6 ("six") and 4 ("four"). Exact integers decide which one. The
// results are bit-identical to those of the exact path (four_over_six.cuh). R is the recipe, and In is the type of the
// elements of x. t is the tensor scale of the row (TensorScale). All threads of a warp call these functions together,
// and each thread handles one block of 16 elements.
//
// Let U = 2^(e - 11) * t.decode, where e is the exponent field of six's scale code. An element with the value q decodes
// to V U with the integer V = 2 q * steps. For six, steps is 8 plus the significand bits of its scale code. For four,
// steps is 8 plus four's own significand bits, doubled if four's exponent field is e + 1 (it is e or e + 1).
//
// Let D be four's sum of errors minus six's. For squared errors, in units of U^2,
//     D = sum (V4^2 - V6^2) - c * sum n (V4 - V6)
// with n = |x| * 2^(15 - floor(log2(amax))) and c = 2 / (2^(15 - floor(log2(amax))) U). For bfloat16 and float16, n is
// an exact integer below 2^16, unless |x| is so small that both codes are 0. So both sums are exact integers. The
// instructions dp4a and dp2a (dot_bytes4, dot_halves) add several products at once. For float32, 14 takes the place of
// 15 in both formulas, and n is rounded, to at most 2^15.
//
// For magnitudes of errors, in units of U,
//     D = sum (s4 V4 - s6 V6) - c / 2 * sum n (s4 - s6)
// Here s is 1 if |x| was rounded up, and otherwise -1.
//
// If D is within `slack` of 0, the warp computes the reference's rounded sums. Let r = 2^-24, and let u be the decoded
// value of the element value 1, which is at most 30 U for six. An error is at most u6 under six and 1.27 u6 under four.
// An error of the reference differs by at most 62 r u from the error that D contains: by 36 from products and
// quotients, 2 from rounding, and 24 because the rounded factor decides which neighbor of |x| is taken; at ties, which
// are always rounded up here, the three numbers add up to less. The reference's additions change a sum by at most 42 r
// times the sum. So D differs by at most 0.4 U^2 for squares, or 0.007 U for magnitudes. The float32 operations that
// compute D add 0.1 U^2, or 0.0015 U. For float32 elements, rounding n adds 12.8 U^2, or 0.19 U.
#pragma once

#include "four_over_six.cuh"

// True if the functions of this file support the recipe R.
template <class R>
constexpr bool kHasSums =
    R::Element::kIsE2m1 && R::kRounding == Rounding::rn && R::kBlock == 16 && R::kBlockRows == 1 &&
    !kHasTwoFormats<R> && !R::kFlush && !R::kIsCute && !R::kLaneSums && !R::kLargestError && !R::kFake && !R::kDivide &&
    !R::kRoundScaled && !R::kThenEncode && !R::kRepacked;

// Numbers that all blocks of a row share. They differ between the threads of a warp only in `factor`.
struct RowFacts {
  float limit;    // the amax of the row, or -1 if no block may be encoded by the functions of this file
  float inverse;  // 1 / (8 t.decode)
  float factor;   // for thread i of the warp: 2^-14 / ((8 + i % 8) * 2^-10 * t.decode). See factor_of
  u32 ties;       // see ties_of_row
};

// The result for one block. If `valid` is false, the block must take the exact path, and the other fields have no
// meaning. `code` is the scale code, and `words` hold the codes of the elements, the first code in the lowest bits.
struct EncodedBlock {
  bool valid;
  u32 code, words[2];
};

// Return 1 / x, rounded to nearest even. x and 1 / x must be normal numbers.
FP4KIT_DEVICE float reciprocal_rn(float x) {
#ifdef __CUDA_ARCH__
  const float y = rcp_approx_ftz(x);
  return fma_rn(y, -fma_rn(x, y, -1.0f), y);
#else
  return 1.0f / x;
#endif
}

// Return three sets of significands of scale codes, 8 bits each, from the low end. Bit m stands for the significand m.
// Ties below an odd code must be rounded down: |x| / u = 0.25, 1.25, 2.5 or 5, where u is the decoded block scale.
//   bits 0 to 7    an element of type In can be such a tie
//   bits 8 to 15   in addition, an element can be so little above a tie that a smaller factor would move it below
//   bits 16 to 23  an element can be a tie at 1.25, 2.5 or 5
// Thread i passes scale = (8 + i % 8) * t.decode, and its reciprocal.
template <class In>
FP4KIT_DEVICE u32 ties_of_row(float scale, float reciprocal) {
  const float tie = threadIdx.x % 32u < 8u ? 1.0f : 1.25f;
  constexpr u32 kHalf = 1u << (22 - In::kMantissaBits);
  const float x = float_of((bits_of(scale * tie) + kHalf) & ~(2u * kHalf - 1u)), scaled = x * reciprocal;
  const u32 equal = __ballot_sync(0xFFFFFFFFu, scaled == tie);
  const u32 above = __ballot_sync(0xFFFFFFFFu, scaled > tie && scaled < tie + 0x1p-20f);
  const u32 any = (equal | equal >> 8) & 0xFFu;
  return any | (any & (above | above >> 8)) << 8 | (equal & 0xFF00u) << 8;
}

// Return the RowFacts of a row with the tensor scale t. In a row of zeros, 1 takes the place of t.decode.
template <class R, class In>
FP4KIT_DEVICE RowFacts row_facts(TensorScale t) {
  const bool zero = t.amax == 0.0f && is_finite(t.encode);
  const float scale = static_cast<float>(8u + threadIdx.x % 8u) * (zero ? 1.0f : t.decode);
  const float reciprocal = reciprocal_rn(scale);
  bool valid = is_ordinary(t);
  if constexpr (!R::kFastError) {  // the reference decodes with t.amax / full_range<R>() instead of t.decode
    const float unit = t.amax * (1.0f / full_range<R>());
    valid = valid & (fabsf(unit - t.decode) <= t.decode * 0x1p-22f);
  }
  // Otherwise the reference's squares would lose bits. The scales of encode_by_sums are at least 2^-6.
  if constexpr (R::kSquaredError && !R::kFastError) valid = valid & (t.decode > 0x1p-54f);
  // Both scales of the tensor must agree, so that no element is 7 or more in units of its block scale. `least` is the
  // smallest factor of a block.
  valid = valid & (fabsf(t.encode * t.decode - 1.0f) <= 0x1p-20f);
  const float least = reciprocal_rn(448.0f * t.decode);
  valid = valid & takes_fast_path<R, In>(bits_of(t.amax), {least, least});
  u32 ties = 0u;
  if constexpr (sizeof(typename In::Bits) == 2) ties = ties_of_row<In>(scale, reciprocal);
  return {valid || zero ? t.amax : -1.0f, float_of(__shfl_sync(0xFFFFFFFFu, bits_of(reciprocal), 0u)),
          reciprocal * 0x1p-4f, ties};
}

// Return 2^-14 times the factor by which elements are multiplied under a scale code. The code is byte kByte of `codes`.
// If its exponent field is 0, the result has no meaning. The threads of a warp hold the factors of the eight
// significands.
template <int kByte>
FP4KIT_DEVICE float factor_of(const RowFacts& row, u32 codes) {
  const u32 significand = __shfl_sync(0xFFFFFFFFu, bits_of(row.factor), codes >> (8 * kByte));  // lane modulo 32
  return float_of(mad(codes & 0x78u << (8 * kByte), 0u - (1u << (20 - 8 * kByte)), significand));
}

// Return a word with the scale code of six in the lowest byte, and that of four in the next byte. `six` and `four` are
// the scales before they are rounded. They must not be negative.
template <class R>
FP4KIT_DEVICE u32 scale_codes(float six, float four) {
#if FP4KIT_HAS_CVT_FP8
  return cvt_rn_satfinite_e4m3x2(four, six);
#else
  return encode_scale<R>(six) | encode_scale<R>(four) << 8;
#endif
}

// Store the codes of 16 magnitudes, without signs, in `words`. `factor` is 2^-14 times the factor of the block. If the
// product of a magnitude and the block's factor is 7 or more, or NaN, the codes have no meaning. Ties are rounded up.
// If kDirections, byte j of directions[i] becomes 1 if magnitude 4 i + j is rounded up, and otherwise -1.
//
// Multiplied by 2^-14, the values of E2M1 have the exponents of float16: those in [1, 2) get the smallest normal
// exponent, and those below 1 are subnormal. A step of E2M1 is 2^9 steps of float16. So this function converts to
// float16, rounding toward zero. The upper byte of the result is twice the code of the next lower value, plus 1 if the
// magnitude must be rounded up.
template <bool kDirections>
FP4KIT_DEVICE void encode_ties_up(const float (&magnitudes)[16], float factor, u32 (&words)[2], u32 (&directions)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 nibbles[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* m = magnitudes + 8 * i + 4 * j;
      const u32 bytes =
          prmt(narrow_f16x2_rz(m[0] * factor, m[1] * factor), narrow_f16x2_rz(m[2] * factor, m[3] * factor), 0x7531u);
      nibbles[j] = mad(bytes, 0x88u, 0x88888888u);  // bytes 1 and 3: the codes (byte + 1) / 2 of two neighbors
      if constexpr (kDirections) directions[2 * i + j] = mad(bytes & 0x01010101u, 0u - 0xFEu, 0xFFFFFFFFu);
    }
    words[i] = prmt(nibbles[0], nibbles[1], 0x7531u) & 0x77777777u;
  }
}

// Return true if the reference chooses four for the block of the thread `source` of the warp. The warp computes the
// reference's float32 sums: thread i computes the error of element i under six, and thread 16 + i under four. `codes`
// is the result of scale_codes for the calling thread's block x.
template <class R, class In>
FP4KIT_DEVICE bool is_four_better(const Run<In, R::kBlock>& x, u32 codes, u32 source, TensorScale t) {
  constexpr u32 kPerWord = Run<In, R::kBlock>::kPerWord;
  const u32 lane = threadIdx.x % 32u, i = lane % R::kBlock;
  u32 word = 0u;
#pragma unroll
  for (u32 j = 0; j < x.kWords; ++j) {
    const u32 other = __shfl_sync(0xFFFFFFFFu, x.w[j], source);
    if (i / kPerWord == j) word = other;
  }
  const Run<In, kPerWord> own = {{word}};
  const float value = i % kPerWord == 0u ? element(own, 0) : element(own, kPerWord - 1);
  const u32 code = __shfl_sync(0xFFFFFFFFu, codes, source) >> (lane < 16u ? 0 : 8) & 0xFFu;
  const float scale = decode_scale<R>(code), factor = candidate_factor<R>(scale, t);
  const float error = error_of<R>(value, compared<R>(rounded<R>(multiply<R>(value, factor)), scale, t), t);
  float sum = 0.0f;
#pragma unroll 4
  for (u32 j = 0; j < R::kBlock; ++j) sum = sum + float_of(__shfl_sync(0xFFFFFFFFu, bits_of(error), (lane & 16u) + j));
  return float_of(__shfl_sync(0xFFFFFFFFu, bits_of(sum), 16u)) < float_of(__shfl_sync(0xFFFFFFFFu, bits_of(sum), 0u));
}

// Return true if a magnitude of the 16-bit elements x equals a quarter of the decoded block scale, rounded to In. It
// may be a tie between the element values 0 and 0.5. `code` is the scale code of the block.
template <class In>
FP4KIT_DEVICE bool has_quarter(const Run<In, 16>& x, u32 code, TensorScale t) {
  const float quarter = float_of(mad(code, 1u << 20, 120u << 23)) * t.decode * 0.25f;  // E4M3 in float32: bias 120 + 7
  const u32 pair = In::narrow_pair(quarter, quarter);
  u32 least = 0xFFFFFFFFu;
#pragma unroll
  for (int i = 0; i < 8; ++i) least = min_u16x2(least, (x.w[i] & 0x7FFF7FFFu) ^ pair);
  return (least & 0xFFFFu) == 0u || least >> 16 == 0u;
}

// Store the codes of a block of 16-bit elements, with signs, in `words`. On entry, `words` holds the codes of the
// magnitudes from encode_ties_up. `factor` and `code` are those of the chosen scale. A code is corrected if its element
// is a tie that must be rounded down, to the even code below.
template <class R, class In>
FP4KIT_DEVICE void finish_codes(const Run<In, 16>& x, const float (&magnitudes)[16], float factor, u32 code,
                                const RowFacts& row, TensorScale t, u32 (&words)[2]) {
  const u32 ties = row.ties >> (code & 7u) & 0x10101u;
  if (ties & 0x100u) return encode_finite<R, In>(x, {factor * 0x1p14f, factor * 0x1p14f}, words);
  if (ties > 1u || (ties == 1u && has_quarter<In>(x, code, t))) {
    u32 below[2], unused[4];
    encode_ties_up<false>(magnitudes, float_of(bits_of(factor) - 4u), below, unused);  // all ties are rounded down
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] &= below[i] | 0xEEEEEEEEu;  // the even one of the two codes
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = pair_with_code_signs<R, In>(x.w[4 * i + j]);
    words[i] = with_signs_of_codes<R>(words[i] | nibble_signs_of_pairs(pairs));
  }
}

// Encode the block x of a row with the tensor scale t and the RowFacts `row`, and return the result.
template <class R, class In>
FP4KIT_DEVICE EncodedBlock encode_by_sums(const Run<In, R::kBlock>& x, TensorScale t, const RowFacts& row) {
  constexpr bool k32Bit = sizeof(typename In::Bits) == 4;
  const float amax = float_of(largest_bits_of(x)), base = quotient_by(amax, 6.0f, kInv6) * t.encode;
  const u32 both = scale_codes<R>(base, base * 1.5f), codes[2] = {both & 0xFFu, both >> 8};
  const bool valid = amax <= row.limit && ((both & 0x78u) != 0u || amax == 0.0f);
  float magnitudes[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) magnitudes[i] = fabsf(element(x, i));
  const float factors[2] = {factor_of<0>(row, both), factor_of<1>(row, both)};
  u32 words[2][2], directions[2][4], low[2], high[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    encode_ties_up<!R::kSquaredError>(magnitudes, factors[k], words[k], directions[k]);
    const u32 steps = ((codes[k] & 7u) + 8u) << ((codes[k] >> 3) - (codes[0] >> 3));
    low[k] = mad(steps, 0x03020100u, 0u);   // V of the codes 0 to 3, one byte each
    high[k] = mad(steps, 0x0C080604u, 0u);  // V of the codes 4 to 7; four does not use code 7 if steps is above 21
  }
  const u32 exponent = bits_of(amax) & kInfinityBits;
  constexpr u32 kTop = k32Bit ? 14u : 15u;  // n is 2^kTop or more for the amax
  const float to_n = float_of(((kTop + 254u) << 23) - exponent);
  u32 sums[2] = {}, products[2] = {};  // sums of V^2 and n V, or of s V and s n
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 pairs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // two n per word; 46336 cancels the upper half of the first float, 0x4B00
      const float* m = magnitudes + 4 * i + 2 * j;
      pairs[j] =
          mad(bits_of(fma_rn(m[1], to_n, 8388608.0f + 46336.0f)), 65536u, bits_of(fma_rn(m[0], to_n, 8388608.0f)));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32 word = words[k][i / 2], selector = i % 2 ? dot_halves<0>(word, 0x0100u, 0u) : word;  // or word >> 16
      const u32 values = prmt(low[k], high[k], selector), factors_of_n = R::kSquaredError ? values : directions[k][i];
      sums[k] = dot_bytes4<!R::kSquaredError>(values, factors_of_n, sums[k]);
      products[k] = dot_halves<0, !R::kSquaredError>(pairs[0], factors_of_n, products[k]);
      products[k] = dot_halves<1, !R::kSquaredError>(pairs[1], factors_of_n, products[k]);
    }
  }
  const u32 c_bits = bits_of(row.inverse) + exponent + ((15u - kTop - 127u) << 23);
  const float c = float_of(mad(both & 0x78u, 0u - (1u << 20), c_bits));  // minus the exponent field of six
  const float first = static_cast<float>(static_cast<i32>(sums[1] - sums[0]));
  const float second = static_cast<float>(static_cast<i32>(products[1] - products[0]));
  const float difference = fma_rn(second, R::kSquaredError ? -c : -0.5f * c, first);
  constexpr float slack = R::kSquaredError ? (k32Bit ? 16.0f : 0.5f) : k32Bit ? 0.25f : 0x1p-6f;
  bool four = difference < 0.0f;  // false if both scales are equal, because then all differences are 0
  u32 undecided = __ballot_sync(0xFFFFFFFFu, valid && codes[0] != codes[1] && !(fabsf(difference) > slack));
#pragma unroll 1
  while (undecided != 0u) {
    const u32 source = 31u - __clz(undecided);
    undecided ^= 1u << source;
    const bool better = is_four_better<R, In>(x, both, source, t);
    if (threadIdx.x % 32u == source) four = better;
  }
  const u32 code = four ? codes[1] : codes[0];
  const float factor = four ? factors[1] : factors[0];
  EncodedBlock block = {valid, code, {four ? words[1][0] : words[0][0], four ? words[1][1] : words[0][1]}};
  if constexpr (k32Bit)
    encode_finite<R, In>(x, {factor * 0x1p14f, factor * 0x1p14f}, block.words);
  else
    finish_codes<R, In>(x, magnitudes, factor, code, row, t, block.words);
  return block;
}
