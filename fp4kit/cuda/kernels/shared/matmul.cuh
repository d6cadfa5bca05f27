// What the kernels of matrix products share: operands, arithmetic of terms, tiles (fp4kit/reference/matmul.py is the
// specification).
//
// Every term is an exact double, and exponents are kept as powers of two. Truncating a term to F bits behind the point
// of the largest exponent 2^E is truncating term * 2^(F-E) to an integer.
#pragma once

#include "codec.cuh"

// How the codes of an operand are stored.
enum class CodeKind { nibbles, bytes, float16, bfloat16 };

// One operand of a product: rows of codes along K.
struct ProductOperand {
  const u8* codes;       // of the first matrix; rows are contiguous
  const u8* scales;      // codes of block scales; null without block scales
  const float* factors;  // tensor scale of every row; null if they are 1
  const float* values;   // of every code; null for 16-bit floats
  const float* scale_values;
  i64 kind;                   // a CodeKind
  i64 block;                  // elements per block scale
  i64 least;                  // exponent of subnormal elements
  i64 scale_least;            // exponent of subnormal block scales
  i64 row_bytes, row_scales;  // bytes and block scales per row
  i64 rows;                   // per matrix
  i64 is_stack;               // 0 if one matrix belongs to all matrices of the other operand
};

// The sums of a step; the values are those of MatmulKind in cuda/launch/matmul.py.
enum class Adder { truncate, truncate_groups, floor, exact, float64, float32_blocks, float32 };

// A product (batch, rows of a, rows of b) = c + a b^T.
struct ProductArguments {
  ProductOperand a, b;
  const float* c;  // null for zeros
  void* out;
  i64 batch, length;  // length: K
  i64 step, promote, fraction_bits, output_bits, zero_exponent, sums, c_vanishes;
};

// Return 2^exponent, for exponents from -1022 to 1023.
FP4KIT_DEVICE double power_of_two(i64 exponent) {
  return double_of(static_cast<u64>(exponent + 1023) << 52);
}

// Return 2^exponent of a number as a term: at least 2^least, and 2^least for zero, infinities and NaN.
FP4KIT_DEVICE double power_of(double x, double least) {
  const u64 bits = double_bits_of(x) & 0x7FF0000000000000u;
  const double power = double_of(bits);
  return bits == 0x7FF0000000000000u || power < least ? least : power;
}

// Return 2^shift / power for a power of two.
FP4KIT_DEVICE double over(i64 shift, double power) {
  return double_of((static_cast<u64>(2046 + shift) << 52) - double_bits_of(power));
}

// Return a sum that is exact in double as an NVIDIA unit rounds it: truncated to `bits` bits behind the point, with
// -126 as the least exponent. Zero is +0, and 2^128 and more are infinite.
FP4KIT_DEVICE double truncated_sum(double sum, i64 bits) {
  const double normal = double_of(double_bits_of(sum) & ~((u64{1} << (52 - bits)) - 1));
  const double tiny = trunc(sum * power_of_two(126 + bits)) * power_of_two(-126 - bits);
  const double result = (fabs(sum) < 0x1p-126 ? tiny : normal) + 0.0;
  return static_cast<float>(result);
}

// Return row `row` of matrix `matrix` of an operand, as an index of rows.
FP4KIT_DEVICE i64 row_index(const ProductOperand& x, i64 matrix, i64 row) {
  return (x.is_stack ? matrix * x.rows : 0) + row;
}

// Return the value of element k of a row: exact, without block scale. row: from row_index.
FP4KIT_DEVICE float element_at(const ProductOperand& x, i64 row, i64 k) {
  const u8* codes = x.codes + row * x.row_bytes;
  switch (static_cast<CodeKind>(x.kind)) {
    case CodeKind::nibbles:
      return x.values[codes[k >> 1] >> (k & 1 ? 4 : 0) & 15];
    case CodeKind::bytes:
      return x.values[codes[k]];
    case CodeKind::float16:
      return Float16::widen(reinterpret_cast<const u16*>(codes)[k]);
    default:
      return Bfloat16::widen(reinterpret_cast<const u16*>(codes)[k]);
  }
}

// Multiply a sum by the tensor scales of its row and column, and store it as an Out, rounded to nearest even. NaN is
// 0x7FFFFFFF, or 0x7FFF in 16 bits.
template <class Out>
FP4KIT_DEVICE void store_product(const ProductArguments& a, i64 matrix, i64 row, i64 column, float sum) {
  const float* row_factor = a.a.factors;
  const float* column_factor = a.b.factors;
  const i64 m = row_index(a.a, matrix, row), n = row_index(a.b, matrix, column);
  if (row_factor && column_factor) {
    sum *= row_factor[m] * column_factor[n];
  } else if (row_factor) {
    sum *= row_factor[m];
  } else if (column_factor) {
    sum *= column_factor[n];
  }
  const i64 index = (matrix * a.a.rows + row) * a.b.rows + column;
  if constexpr (sizeof(typename Out::Bits) == 4) {
    static_cast<u32*>(a.out)[index] = is_nan(sum) ? 0x7FFFFFFFu : bits_of(sum);
  } else {
    static_cast<u16*>(a.out)[index] = is_nan(sum) ? u16{0x7FFF} : Out::narrow(sum);
  }
}

// Return what a sum begins with.
FP4KIT_DEVICE float first_sum(const ProductArguments& a, i64 matrix, i64 row, i64 column) {
  return a.c ? a.c[(matrix * a.a.rows + row) * a.b.rows + column] : 0.0f;
}
