// The element types as they are stored in memory, and matrices of elements. In: the type of the elements (Float32,
// Float16 or Bfloat16). Bits: the unsigned integer type of an element's bits.
#pragma once

#include "simd_bytes.h"

// The properties of an element type that loops use:
//   Bits            the unsigned integer type as which elements are loaded
//   kMagnitude      mask of all bits except the sign; magnitudes have the order of these bits as integers
//   kInfinity       bits of infinity; NaN has a larger magnitude
//   value(bits)     return the element with these bits as float32; a float16 element must be finite
//   rounded(x)      return a float32, not NaN, rounded to the type (to nearest even), as float32
//   narrow(x)       return the bits of rounded(x) in the type
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
  static __forceinline__ u32 rounded_bits(float x) { return bits_of(x) + 0x7FFFu + (bits_of(x) >> 16 & 1u); }
  static __forceinline__ float rounded(float x) { return float_of(rounded_bits(x) & 0xFFFF0000u); }
  static __forceinline__ u16 narrow(float x) { return static_cast<u16>(rounded_bits(x) >> 16); }
};

template <>
struct Input<Float16> {
  using Bits = u16;
  static constexpr u16 kMagnitude = 0x7FFF, kInfinity = 0x7C00;
  // Return the element with these bits, which must be finite. Shifting its exponent and significand to the fields of a
  // float32 gives the element times 2^-112.
  static __forceinline__ float value(u16 bits) {
    const u32 magnitude = static_cast<u32>(bits & 0x7FFFu) << 13, sign = static_cast<u32>(bits & 0x8000u) << 16;
    return float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);
  }
  static __forceinline__ float rounded(float x) { return round_to<Float16>(x); }
  static __forceinline__ u16 narrow(float x) { return Float16::narrow(x); }
};

// A matrix in memory. Steps are in elements. `hadamard` is 1 + the sign mask of the transform of each 16 elements of a
// row (hadamard.h), or 0 for no transform. cpu/library.py mirrors this struct as SourceMatrix.
struct Source {
  const void* data;
  i64 rows, columns, row_step, column_step, hadamard;
};

// Copy rows [row, row + rows) and columns [column, column + columns) of the matrix x to `out`, as contiguous rows that
// begin `width` elements apart. Elements are copied as they are; x.hadamard is ignored.
//
// If the columns of x are contiguous instead of its rows, one cache line (64 bytes) of each column is copied at a time.
// Its elements are transposed in squares whose rows have 16 bytes. If neither rows nor columns are contiguous, elements
// are copied one at a time.
template <class Bits>
static void gather(const Source& x, i64 row, i64 rows, i64 column, i64 columns, i64 width, Bits* out) {
  constexpr i64 kLine = 64 / sizeof(Bits), kStep = kSide<Bits>;
  const Bits* first = static_cast<const Bits*>(x.data) + row * x.row_step + column * x.column_step;
  if (x.column_step == 1) {
    for (i64 i = 0; i < rows; ++i) std::memcpy(out + i * width, first + i * x.row_step, columns * sizeof(Bits));
    return;
  }
  for (i64 i = 0; i < rows; i += kLine) {
    const i64 line_rows = minimum(rows - i, kLine), square_rows = x.row_step == 1 ? line_rows / kStep * kStep : 0;
    for (i64 j = 0; j < columns; j += kStep) {
      const i64 step_columns = minimum(columns - j, kStep), done = step_columns == kStep ? square_rows : 0;
      for (i64 k = 0; k < done; k += kStep)
        transpose_square(first + i + k + j * x.column_step, x.column_step, out + (i + k) * width + j, width);
      for (i64 l = j; l < j + step_columns; ++l)
        for (i64 k = done; k < line_rows; ++k)
          out[(i + k) * width + l] = first[(i + k) * x.row_step + l * x.column_step];
    }
  }
}
