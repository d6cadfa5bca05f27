// Where scales lie; the twin of fp4kit/layouts.py.
#pragma once

#include "types.cuh"

enum class ScaleLayout { linear, swizzled_128x4, swizzled_8x4 };

// Byte offset of scale (r, c) of one matrix with `columns` scales a row.
template <ScaleLayout kLayout>
FP4KIT_DEVICE i64 scale_offset(i64 r, i64 c, i64 columns) {
  const i64 tiles = (columns + 3) / 4;
  if constexpr (kLayout == ScaleLayout::swizzled_128x4)
    return (r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
  if constexpr (kLayout == ScaleLayout::swizzled_8x4) return (r / 8 * tiles + c / 4) * 32 + r % 8 * 4 + c % 4;
  return r * columns + c;
}
