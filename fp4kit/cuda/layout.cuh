// Where scales lie; the twin of fp4kit/layouts.py.
#pragma once

#include "types.cuh"

enum class ScaleLayout { linear, swizzled_128x4, swizzled_8x4 };

// Byte offset of scale (r, c) of one matrix with `columns` scales a row.
template <ScaleLayout kLayout, class Index>
FP4KIT_DEVICE Index scale_offset(Index r, Index c, Index columns) {
  const Index tiles = (columns + 3) / 4;
  if constexpr (kLayout == ScaleLayout::swizzled_128x4)
    return (r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
  if constexpr (kLayout == ScaleLayout::swizzled_8x4) return (r / 8 * tiles + c / 4) * 32 + r % 8 * 4 + c % 4;
  return r * columns + c;
}

// Rows of a matrix of scales, padding included.
template <ScaleLayout kLayout>
FP4KIT_DEVICE i64 padded_rows(i64 rows) {
  constexpr i64 kTile = kLayout == ScaleLayout::swizzled_128x4 ? 128 : kLayout == ScaleLayout::swizzled_8x4 ? 8 : 1;
  return (rows + kTile - 1) / kTile * kTile;
}

// Bytes of a matrix of scales, padding included.
template <ScaleLayout kLayout>
FP4KIT_DEVICE i64 scale_bytes(i64 rows, i64 columns) {
  return padded_rows<kLayout>(rows) * (kLayout == ScaleLayout::linear ? columns : (columns + 3) / 4 * 4);
}
