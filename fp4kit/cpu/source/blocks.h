// Functions that compute the amaxes (largest magnitudes), scale codes and factors of blocks of finite elements, in
// loops that the compiler vectorizes.
//   R          a struct of recipes.inc with the block rule and the formats of a recipe
//   In         the type of the elements
//   amax bits  the largest magnitude of some elements, as an integer: its bit pattern in the type of the elements
//   segment    16 or 32 neighboring elements whose amax bits are found by one loop; a block has one or more segments
//   factor     the number by which the elements of a block are multiplied or divided before they are rounded
#pragma once

#include "input_types.h"

constexpr i64 kPanelColumns =
    2048;  // largest number of columns of a panel (README.md); equals PANEL_COLUMNS of cpu/codec.py
constexpr i64 kMaxPanelBlocks = kPanelColumns / 16;  // largest number of blocks of a panel
constexpr int kRun = 16;                             // number of elements of a run, which share one factor

// Return the number of elements per segment of a block with `block` columns: 16 if `block` is 16, otherwise 32. `block`
// is 16 or a multiple of 32.
static i64 segment_of(i64 block) {
  return block == 16 ? 16 : 32;
}

// Store the amax bits of each of `count` contiguous segments of kSegment elements in out[0] ... out[count - 1].
// `elements` points to elements of type In. NaN counts as larger than infinity, so a segment with NaN gets the bits of
// a NaN.
template <class In, int kSegment>
static void segment_amax_bits(const void* elements, i64 count, u32* out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements);
  i64 s = 0;
#if FP4KIT_HAS_LOOK_UP
  // A vector of 16 bytes has kSide elements. Take kSide segments at a time and reduce each of them to one vector. Then
  // interleave vectors in pairs and keep the larger elements, until one vector holds the amax bits of all kSide
  // segments.
  constexpr int kRow = kSide<Bits>;
  for (; s + kRow <= count; s += kRow) {
    Bytes rows[kRow];
    for (int k = 0; k < kRow; ++k) {
      const Bits* segment = x + (s + k) * kSegment;
      rows[k] = magnitudes_at(segment);
      for (int i = kRow; i < kSegment; i += kRow) rows[k] = larger_of<Bits>(rows[k], magnitudes_at(segment + i));
    }
    for (int half = kRow / 2; half; half /= 2)
      for (int k = 0; k < half; ++k)
        rows[k] = larger_of<Bits>(zip_elements_low<Bits>(rows[k], rows[k + half]),
                                  zip_elements_high<Bits>(rows[k], rows[k + half]));
    Bits largest[kRow];
    store(reinterpret_cast<u8*>(largest), rows[0]);
    for (int k = 0; k < kRow; ++k) out[s + k] = largest[k];
  }
#endif
  for (; s < count; ++s) {
    Bits largest = 0;
    for (int i = 0; i < kSegment; ++i) {
      const Bits magnitude = x[s * kSegment + i] & Input<In>::kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    out[s] = largest;
  }
}

// Store the scale code of each of `count` blocks in `codes`. The block rule of R computes it from the amax of the block
// and the tensor scale t. Rules with kReadsInput also depend on In; for other rules, In is ignored.
template <class R, class In>
static void scale_codes(const float* __restrict amax, i64 count, TensorScale t, u8* __restrict codes) {
  for (i64 b = 0; b < count; ++b) codes[b] = static_cast<u8>(R::BlockRule::template code<R, In>(amax[b], t));
}

// Store the factor of each of `count` blocks in `factors`. The block rule of R computes it from the block's scale code,
// its amax and the tensor scale t. A factor may be NaN, infinite or negative; callers check it.
template <class R, class In>
static void scale_factors(const u8* __restrict codes, const float* __restrict amax, i64 count, TensorScale t,
                          float* __restrict factors) {
  for (i64 b = 0; b < count; ++b) factors[b] = R::BlockRule::template factor<R, In>(codes[b], amax[b], t);
}
