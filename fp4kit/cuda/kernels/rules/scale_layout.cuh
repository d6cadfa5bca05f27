// The positions of block scales in memory: row-major (linear), or in scale tiles of 128 x 4 or 8 x 4 scales (swizzled).
// A scale takes one byte. The functions give the same results as fp4kit/layouts/__init__.py. `Index` is the integer
// type of the positions, and `columns` is the number of scales per row, without padding.
#pragma once

#include "types.cuh"

enum class ScaleLayout { linear, swizzled_128x4, swizzled_8x4 };

// Return the byte offset of the scale in row r and column c of a matrix with `columns` scales per row.
template <ScaleLayout kLayout, class Index>
FP4KIT_DEVICE Index scale_offset(Index r, Index c, Index columns) {
  const Index tiles = (columns + 3) / 4;
  if constexpr (kLayout == ScaleLayout::swizzled_128x4)
    return (r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
  if constexpr (kLayout == ScaleLayout::swizzled_8x4) return (r / 8 * tiles + c / 4) * 32 + r % 8 * 4 + c % 4;
  return r * columns + c;
}

// A divisor n and floor((2^32 - 1) / n). With it, `divide` computes many quotients by n, but only one division is
// needed.
struct IntegerDivisor {
  u32 n, inverse;
};
// Return the IntegerDivisor of n. The IntegerDivisor of 0 must not be used to divide.
FP4KIT_DEVICE IntegerDivisor integer_divisor_of(u32 n) {
  return {n, 0xFFFFFFFFu / maximum(n, 1u)};
}
// Return floor(i / n) for the divisor n of `divisor`, which must not be 0. The product with the inverse is too small by
// at most one, and the comparison corrects that.
FP4KIT_DEVICE u32 divide(u32 i, IntegerDivisor divisor) {
  const u32 estimate = high_product(i, divisor.inverse);
  return estimate + (i - estimate * divisor.n >= divisor.n);
}

// Return the number of bytes of a scale tile: 512 for swizzled_128x4, and 32 for swizzled_8x4. For the linear layout,
// which has no tiles, the result is 32 too.
template <ScaleLayout kLayout>
FP4KIT_DEVICE constexpr int tile_bytes() {
  return kLayout == ScaleLayout::swizzled_128x4 ? 512 : 32;
}

// The row and the column of a scale in the matrix of scales.
struct ScalePlace {
  u32 row, column;
};
// Return the row and the column of the scale that is stored in byte `byte` of the 32-byte sector `sector`, in a
// swizzled layout. `tiles` is the number of scale tiles side by side in the matrix.
template <ScaleLayout kLayout>
FP4KIT_DEVICE ScalePlace scale_place(u32 sector, u32 byte, IntegerDivisor tiles) {
  constexpr u32 kSectors = tile_bytes<kLayout>() / 32;
  const u32 tile = sector / kSectors, down = divide(tile, tiles), column = (tile - down * tiles.n) * 4 + byte % 4;
  if constexpr (kLayout == ScaleLayout::swizzled_128x4)
    return {down * 128 + byte / 4 % 4 * 32 + sector % kSectors * 2 + byte / 16, column};
  return {down * 8 + byte / 4, column};
}

// Return the distance in bytes from a scale to the scale in the next row, in a matrix with `columns` scales per row.
// Both rows must be among eight rows that begin at a multiple of eight.
template <ScaleLayout kLayout, class Index>
FP4KIT_DEVICE Index scale_row_step(Index columns) {
  return kLayout == ScaleLayout::linear ? columns : kLayout == ScaleLayout::swizzled_128x4 ? 16 : 4;
}

// Return the number of rows of a matrix of scales, including padding to whole scale tiles. Linear matrices are not
// padded.
template <ScaleLayout kLayout>
FP4KIT_DEVICE i64 padded_rows(i64 rows) {
  constexpr i64 kTile = kLayout == ScaleLayout::swizzled_128x4 ? 128 : kLayout == ScaleLayout::swizzled_8x4 ? 8 : 1;
  return (rows + kTile - 1) / kTile * kTile;
}

// Return the number of bytes of a matrix of scales, including padding to whole scale tiles. Linear matrices are not
// padded.
template <ScaleLayout kLayout>
FP4KIT_DEVICE i64 scale_bytes(i64 rows, i64 columns) {
  return padded_rows<kLayout>(rows) * (kLayout == ScaleLayout::linear ? columns : (columns + 3) / 4 * 4);
}
