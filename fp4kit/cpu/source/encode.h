// Blocks of finite elements: their amaxes, scale codes and factors, and codes; loops that a compiler makes vectors of.
//
// The rules are those of cuda/kernels/rules, which know no thread. A block that holds NaN or infinity, or whose factor is none that
// finite elements stay numbers under, is not for these loops: the caller is told, and has the specification do it.
#pragma once

#include "input.h"

constexpr i64 kWidth = 2048;              // elements of a row that are encoded together, at most
constexpr i64 kMostBlocks = kWidth / 16;  // and their blocks

// Elements that loops take together, as many as divide a block: 16 or 32.
static i64 grain_of(i64 block) { return block == 16 ? 16 : 32; }

// Magnitudes as integers of the largest element of each of `count` blocks of kBlock elements.
template <class In, int kBlock>
static void magnitudes(const void* elements, i64 count, u32* out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements);
  for (i64 b = 0; b < count; ++b) {
    Bits most = 0;
    for (int i = 0; i < kBlock; ++i) {
      const Bits a = x[b * kBlock + i] & Input<In>::kMagnitude;
      most = a > most ? a : most;
    }
    out[b] = most;
  }
}

// The scale codes of blocks and the factors of their elements, by the rules of R.
template <class R, class In>
static void scale_blocks(const float* __restrict amax, i64 count, TensorScale t, u8* __restrict codes, float* __restrict factors) {
  for (i64 b = 0; b < count; ++b) codes[b] = static_cast<u8>(R::BlockRule::template code<R, In>(amax[b], t));
  for (i64 b = 0; b < count; ++b) factors[b] = R::BlockRule::template factor<R, In>(codes[b], amax[b], t);
}

// The factor of each block for each of its elements, which are `grains` times kGrain: a length that is known is one store, or two.
template <int kGrain>
static void spread_blocks(const float* __restrict by_block, i64 count, i64 grains, float* __restrict factors) {
  for (i64 b = 0; b < count; ++b)
    for (i64 g = 0; g < grains; ++g, factors += kGrain)
      for (int i = 0; i < kGrain; ++i) factors[i] = by_block[b];
}

// What an element of E is encoded from.
template <class E, class In>
static __forceinline__ float scaled(float x, float factor, float then) {
  if constexpr (E::kFlush) x = flush(x);
  float y;
  if constexpr (E::kDivide) {
    y = x / factor;
  } else {
    y = x * factor;
  }
  if constexpr (E::kRoundScaled) y = Input<In>::rounded(y);
  if constexpr (E::kThenEncode) y = y * then;
  return y;
}

// Codes, one a byte, of elements under a factor each: one loop without blocks inside, which is three times as fast as one with them (one
// x86-64 core with AVX-512, November 2026). then: the tensor's encode scale, where elements meet it after their factors; random: a byte an
// element, where rounding is stochastic.
template <class E, class In, bool kStochastic>
static void encode_elements(const void* elements, const float* factors, float then, i64 count, const u8* random, u8* codes) {
  using Format = typename E::Format;
  const auto* x = static_cast<const typename Input<In>::Bits*>(elements);
  for (i64 i = 0; i < count; ++i) {
    if constexpr (E::kCompare) {
      codes[i] = static_cast<u8>(encode<Format, E::kRounding, E::kSign, 0u>(Input<In>::value(x[i]), factors[i]));
      continue;
    }
    const float y = scaled<E, In>(Input<In>::value(x[i]), factors[i], then);
    if constexpr (kStochastic) {
      codes[i] = static_cast<u8>(encode_stochastic<Format>(y, random[i]));
    } else if constexpr (Format::kIsInteger) {
      codes[i] = static_cast<u8>(encode<Format, Rounding::rn, Sign::signbit, 0u, E::kNarrow>(y));
    } else if constexpr (E::kRounding == Rounding::rn) {
      const u32 code = encode_finite_rn<Format>(with_code_sign<E::kSign>(y));
      codes[i] = static_cast<u8>(E::kSign == Sign::unsigned_zero && code == Format::kSignBit ? 0u : code);
    } else {
      codes[i] = static_cast<u8>(encode<Format, E::kRounding, E::kSign, 0u>(y));
    }
  }
}

// Two codes a byte, the first in the low nibble.
static void pack_codes(const u8* codes, i64 count, u8* out) {
  for (i64 i = 0; i < count / 2; ++i) {
    u16 pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    out[i] = static_cast<u8>(pair | pair >> 4);
  }
}
