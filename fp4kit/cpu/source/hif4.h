// Functions that encode and decode rows of HiF4 blocks: 64 elements with one E6M2 scale, and exponent bits for groups
// of 8 and 4 elements (rules/hif4.cuh).
//   R         a struct of recipes.inc with the element format and the block rule or the decode rule of a recipe
//   In, Out   the type of the elements; the type of the values
//   inverse   1 / scale of a block, rounded to bfloat16
//   fallback  the specification, which computes NaN and infinities
#pragma once

#include "decode_block.h"

// Return eight numbers 0 or 1 as the bits of a byte, the first one in bit 7.
static __forceinline__ u8 packed_bits(const u8* flags) {
  u64 word = 0;
  for (unsigned i = 0; i < 8; ++i) word |= static_cast<u64>(flags[i]) << (8 * i);
  return static_cast<u8>(word * 0x8040201008040201u >> 56);  // flag i is shifted to bit 63 - i, and nothing carries
}

// Return x rounded to In if the arithmetic of R rounds to the type of the elements; otherwise x.
template <class R, class In, class Number>
static __forceinline__ Number hif4_rounded(Number x) {
  if constexpr (R::FakeRule::kRoundsToInput) return Input<In>::rounded(x);
  return x;
}

// Encode kBlocks neighboring blocks as encode_hif4 does.
//
// Halving an element for each set bit is exact or gives a number so small that its code is 0, so both halvings and the
// steps per unit of the element format are part of the factor. Rounding to float16 is different: there, the halves of
// subnormal elements are rounded.
template <class R, class In, int kBlocks>
static void encode_hif4_blocks(const typename Input<In>::Bits* x, const float* amax, u8* packed, u8* scales) {
  constexpr int kSize = kBlocks * kHif4Block, kInner = kSize / kHif4Inner, kOuter = kSize / kHif4Outer;
  constexpr u32 kSteps = 1u << R::Element::kMantissaBits;  // per unit; codes of magnitudes count steps
  constexpr bool kRoundsHalves = R::FakeRule::kRoundsToInput && In::kMantissaBits == 10;
  using Bits = typename Input<In>::Bits;
  using Number = typename R::FakeRule::Number;
  float a[kSize], factors[kSize], largest[kInner], group_factors[kInner], inverses[kBlocks];
  u32 is_outer[kOuter], is_inner[kInner], outer_of[kInner];
  u8 scale_codes[kBlocks], outer[kOuter], inner[kInner], codes[kSize];
  for (int b = 0; b < kBlocks; ++b) {
    const u32 code = hif4_scale_code(amax[b]);
    scale_codes[b] = static_cast<u8>(code), inverses[b] = hif4_inverse(code);
  }
  for (int i = 0; i < kSize; ++i) a[i] = Input<In>::value(static_cast<Bits>(x[i] & Input<In>::kMagnitude));
  for (int g = 0; g < kInner; ++g)
    largest[g] = maximum(maximum(a[4 * g], a[4 * g + 1]), maximum(a[4 * g + 2], a[4 * g + 3]));
  for (int b = 0; b < kBlocks; ++b)
    for (int g = 16 * b; g < 16 * b + 16; ++g) group_factors[g] = inverses[b];
  Number scaled[kInner];
  for (int g = 0; g < kInner; ++g)
    scaled[g] = hif4_rounded<R, In>(static_cast<Number>(largest[g]) * static_cast<Number>(group_factors[g]));
  for (int p = 0; p < kOuter; ++p) {
    const u32 is_set = maximum(scaled[2 * p], scaled[2 * p + 1]) >= static_cast<Number>(4);
    is_outer[p] = is_set, outer_of[2 * p] = is_set, outer_of[2 * p + 1] = is_set;
  }
  for (int g = 0; g < kInner; ++g)
    is_inner[g] = scaled[g] >= (outer_of[g] ? static_cast<Number>(4) : static_cast<Number>(2));
  if constexpr (kRoundsHalves) {
    for (int i = 0; i < kSize; ++i) a[i] = hif4_rounded<R, In>(outer_of[i / kHif4Inner] ? a[i] * 0.5f : a[i]);
    for (int i = 0; i < kSize; ++i) a[i] = hif4_rounded<R, In>(is_inner[i / kHif4Inner] ? a[i] * 0.5f : a[i]);
  }
  for (int g = 0; g < kInner; ++g) {
    const u32 halvings = kRoundsHalves ? 0u : outer_of[g] + is_inner[g];
    group_factors[g] = float_of(bits_of(group_factors[g] * static_cast<float>(kSteps)) - (halvings << 23));
  }
  for (int g = 0; g < kInner; ++g)
    for (int j = 0; j < kHif4Inner; ++j) factors[kHif4Inner * g + j] = group_factors[g];
  for (int first = 0; first < kSize; first += kNarrowCount<u8>) {
    u32 wide[kNarrowCount<u8>];
    for (int i = 0; i < kNarrowCount<u8>; ++i) {
      Number steps = hif4_rounded<R, In>(static_cast<Number>(a[first + i]) * static_cast<Number>(factors[first + i]));
      if constexpr (R::BlockRule::kIsAmct) steps = Input<Bfloat16>::rounded(steps);
      steps = hif4_rounded<R, In>(steps + static_cast<Number>(0.5f));
      steps = minimum(steps, static_cast<Number>(2.0f * kSteps - 0.5f));
      const u32 is_negative = x[first + i] > Input<In>::kMagnitude + 1;  // -0 has no sign
      wide[i] = static_cast<u32>(static_cast<i32>(steps)) | is_negative * R::Element::kSignBit;
    }
    store_narrow<u8>(wide, codes + first);
  }
  if constexpr (R::Element::kStoredBits == 4)
    pack_codes(codes, kSize, packed);
  else
    std::memcpy(packed, codes, kSize);
  for (int p = 0; p < kOuter; ++p) outer[p] = static_cast<u8>(is_outer[p]);
  for (int g = 0; g < kInner; ++g) inner[g] = static_cast<u8>(is_inner[g]);
  for (int b = 0; scales && b < kBlocks; ++b) {
    const u8 bytes[kHif4ScaleBytes] = {scale_codes[b], packed_bits(outer + 8 * b), packed_bits(inner + 16 * b),
                                       packed_bits(inner + 16 * b + 8)};
    std::memcpy(scales + b * kHif4ScaleBytes, bytes, sizeof bytes);
  }
}

// Encode a row of `blocks` blocks: store their codes in `packed`, and kHif4ScaleBytes bytes per block in `scales`
// unless it is nullptr. Scales are computed from `amax`, one per block. Return false if an amax is NaN, or if the
// inverse of a scale is infinite in the arithmetic of R; otherwise true. The elements must be finite.
template <class R, class In>
static bool encode_hif4(const void* elements, const float* amax, i64 blocks, u8* packed, u8* scales) {
  constexpr int kBatch = 8;
  constexpr bool kIsHalf = R::FakeRule::kRoundsToInput && In::kMantissaBits == 10;
  const u32 first = kIsHalf ? (48u - 16u) * 4u + 1u : 0u;  // the code of 1.25 / 2^16, whose inverse is finite
  const auto* x = static_cast<const typename Input<In>::Bits*>(elements);
  bool is_done = true;
  for (i64 b = 0; b < blocks; ++b) is_done &= hif4_scale_code(amax[b]) - first < kHif4NanCode - first;
  for (i64 b = 0; is_done && b < blocks;) {
    const bool is_batch = b + kBatch <= blocks;
    const auto encode = is_batch ? encode_hif4_blocks<R, In, kBatch> : encode_hif4_blocks<R, In, 1>;
    encode(x + b * kHif4Block, amax + b, packed + b * kHif4Block * R::Element::kStoredBits / 8,
           scales ? scales + b * kHif4ScaleBytes : nullptr);
    b += is_batch ? kBatch : 1;
  }
  return is_done;
}

// Decode a row of `blocks` blocks, and store the bits of their values in `out`. Return false if a scale is NaN; the
// values of its block are then not valid. Products of an element, its bits and its scale are exact in float32.
template <class R, class Out>
static bool decode_hif4_blocks(const u8* codes, const u8* scales, i64 blocks, typename Input<Out>::Bits* out) {
  constexpr int kSize = kHif4Block;
  constexpr bool kIsNibble = R::Element::kStoredBits == 4;
  bool is_done = true;
  for (i64 b = 0; b < blocks; ++b, scales += kHif4ScaleBytes, out += kSize) {
    is_done &= scales[0] != kHif4NanCode;
    const float step = hif4_scale(scales[0]) * (1.0f / (1u << R::Element::kMantissaBits));
    const u32 outer = scales[1], inner = static_cast<u32>(scales[2]) << 8 | scales[3];
    float steps[kSize];
    for (int g = 0; g < kSize / kHif4Inner; ++g) {
      const u32 bits = (outer >> (7 - g / 2) & 1u) + (inner >> (15 - g) & 1u);
      for (int j = 0; j < kHif4Inner; ++j) steps[kHif4Inner * g + j] = float_of(bits_of(step) + (bits << 23));
    }
    u8 bytes[kSize];
    if constexpr (kIsNibble)
      for (int i = 0; i < kSize / 2; ++i) {
        const u8 pair = codes[b * (kSize / 2) + i];
        bytes[2 * i] = pair & 15u, bytes[2 * i + 1] = pair >> 4;
      }
    else
      std::memcpy(bytes, codes + b * kSize, kSize);
    for (int i = 0; i < kSize; ++i) {
      const float magnitude = static_cast<float>(static_cast<i32>(bytes[i] & (R::Element::kSignBit - 1u))) * steps[i];
      const u32 sign = bytes[i] & R::Element::kSignBit ? 0x80000000u : 0u;
      out[i] = Input<Out>::narrow(float_of(bits_of(magnitude) | sign));
    }
  }
  return is_done;
}

// Decode a row of codes as decode_row of decode_rows.h does. HiF4 has no tensor scales and no value tables.
template <class R, class Out>
static bool decode_hif4_row(const u8* codes, const u8* scales, i64 count, i64 size, const struct DecodeTables*,
                            const TensorScales&, i64, i64, void* values) {
  return decode_hif4_blocks<R, Out>(codes, scales, count / size, static_cast<typename Input<Out>::Bits*>(values));
}
