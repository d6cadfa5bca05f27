// Blocks of finite elements: their amaxes, scale codes and factors; loops that a compiler makes vectors of.
#pragma once

#include "input_types.h"

constexpr i64 kWidth = 2048;              // elements of a row that are encoded together, at most
constexpr i64 kMostBlocks = kWidth / 16;  // and their blocks
constexpr int kRun = 16;                  // elements that have one factor

// Elements that loops take together, as many as divide a block: 16 or 32.
static i64 grain_of(i64 block) {
  return block == 16 ? 16 : 32;
}

// Magnitudes as integers of the largest element of each of `count` blocks of kBlock elements.
template <class In, int kBlock>
static void magnitudes(const void* elements, i64 count, u32* out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements);
  i64 b = 0;
#if FP4KIT_HAS_LOOK_UP
  // As many blocks as a row of sixteen bytes has elements, a row each: two rows are zipped, and the larger halves kept,
  // until one is left.
  constexpr int kRow = kSide<Bits>;
  for (; b + kRow <= count; b += kRow) {
    Bytes rows[kRow];
    for (int k = 0; k < kRow; ++k) {
      const Bits* block = x + (b + k) * kBlock;
      rows[k] = magnitudes_at(block);
      for (int i = kRow; i < kBlock; i += kRow) rows[k] = larger_of<Bits>(rows[k], magnitudes_at(block + i));
    }
    for (int half = kRow / 2; half; half /= 2)
      for (int k = 0; k < half; ++k)
        rows[k] = larger_of<Bits>(zip_elements_low<Bits>(rows[k], rows[k + half]),
                                  zip_elements_high<Bits>(rows[k], rows[k + half]));
    Bits most[kRow];
    store(reinterpret_cast<u8*>(most), rows[0]);
    for (int k = 0; k < kRow; ++k) out[b + k] = most[k];
  }
#endif
  for (; b < count; ++b) {
    Bits most = 0;
    for (int i = 0; i < kBlock; ++i) {
      const Bits a = x[b * kBlock + i] & Input<In>::kMagnitude;
      most = a > most ? a : most;
    }
    out[b] = most;
  }
}

// The scale codes of blocks, and the factors of their elements, by the rules of R.
template <class R, class In>
static void scale_codes(const float* __restrict amax, i64 count, TensorScale t, u8* __restrict codes) {
  for (i64 b = 0; b < count; ++b) codes[b] = static_cast<u8>(R::BlockRule::template code<R, In>(amax[b], t));
}
template <class R, class In>
static void scale_factors(const u8* __restrict codes, const float* __restrict amax, i64 count, TensorScale t,
                          float* __restrict factors) {
  for (i64 b = 0; b < count; ++b) factors[b] = R::BlockRule::template factor<R, In>(codes[b], amax[b], t);
}
