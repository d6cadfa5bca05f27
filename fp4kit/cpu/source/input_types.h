// Elements as they lie in memory: their magnitudes as integers, which grow with them, and as float32; float32 rounded
// to them and narrowed.
#pragma once

#include "simd_bytes.h"

template <class In>
struct Input;

template <>
struct Input<Float32> {
  using Bits = u32;
  static constexpr u32 kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u;
  static __forceinline__ float value(u32 bits) { return float_of(bits); }
  static __forceinline__ float rounded(float x) { return x; }
  static __forceinline__ u32 narrow(float x) { return bits_of(x); }
};

template <>
struct Input<Bfloat16> {
  using Bits = u16;
  static constexpr u16 kMagnitude = 0x7FFF, kInfinity = 0x7F80;
  static __forceinline__ float value(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }
  // Of no NaN: to nearest even.
  static __forceinline__ u32 rounded_bits(float x) { return bits_of(x) + 0x7FFFu + (bits_of(x) >> 16 & 1u); }
  static __forceinline__ float rounded(float x) { return float_of(rounded_bits(x) & 0xFFFF0000u); }
  static __forceinline__ u16 narrow(float x) { return static_cast<u16>(rounded_bits(x) >> 16); }
};

template <>
struct Input<Float16> {
  using Bits = u16;
  static constexpr u16 kMagnitude = 0x7FFF, kInfinity = 0x7C00;
  // Of finite ones: the bits in their place are the value times 2^-112.
  static __forceinline__ float value(u16 bits) {
    const u32 magnitude = static_cast<u32>(bits & 0x7FFFu) << 13, sign = static_cast<u32>(bits & 0x8000u) << 16;
    return float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);
  }
  static __forceinline__ float rounded(float x) { return round_to<Float16>(x); }
  static __forceinline__ u16 narrow(float x) { return Float16::narrow(x); }
};

// A matrix anywhere in memory; steps are in elements. hadamard: the sign mask of a transform of each 16 elements of a
// row; -1: none.
struct Source {
  const void* data;
  i64 rows, columns, row_step, column_step, hadamard;
};

// Copies rows [row, row + rows) and columns [column, column + columns) of a matrix into contiguous rows of `width`.
// Where columns are contiguous, as many rows are read together as lie in a line of the cache: 64 bytes, which rows of
// 16 bytes are transposed from.
template <class Bits>
static void gather(const Source& x, i64 row, i64 rows, i64 column, i64 columns, i64 width, Bits* out) {
  constexpr i64 kTile = 64 / sizeof(Bits), kStep = kSide<Bits>;
  const Bits* first = static_cast<const Bits*>(x.data) + row * x.row_step + column * x.column_step;
  if (x.column_step == 1) {
    for (i64 i = 0; i < rows; ++i) std::memcpy(out + i * width, first + i * x.row_step, columns * sizeof(Bits));
    return;
  }
  for (i64 i = 0; i < rows; i += kTile) {
    const i64 high = minimum(rows - i, kTile), squares = x.row_step == 1 ? high / kStep * kStep : 0;
    for (i64 j = 0; j < columns; j += kStep) {
      const i64 wide = minimum(columns - j, kStep), done = wide == kStep ? squares : 0;
      for (i64 k = 0; k < done; k += kStep)
        transpose_square(first + i + k + j * x.column_step, x.column_step, out + (i + k) * width + j, width);
      for (i64 l = j; l < j + wide; ++l)
        for (i64 k = done; k < high; ++k) out[(i + k) * width + l] = first[(i + k) * x.row_step + l * x.column_step];
    }
  }
}
