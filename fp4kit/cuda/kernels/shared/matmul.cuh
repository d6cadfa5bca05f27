// Types and functions that all kernels of matrix products use: operands, arguments, tiles, initial sums and results. A
// product is c + a b^T, where the rows of a and b are rows of codes along K, the dimension that is summed. The "unit"
// is the matrix unit whose arithmetic a kernel follows.
#pragma once

#include "codec.cuh"
#include "matmul_terms.cuh"
#include "ptx.cuh"

// How the codes of an operand are stored: two 4-bit codes per byte (the first code in the low bits), one code per byte,
// or floats that are their own codes.
enum class CodeKind { nibbles, bytes, float16, bfloat16, float32 };

// One operand of a matrix product: rows of codes along K.
struct ProductOperand {
  const u8* codes;            // the codes of all matrices, contiguous
  const u8* scales;           // the codes of the block scales; null without block scales
  const float* factors;       // the tensor scale of every row; null if all tensor scales are 1
  const float* chains;        // the scale of every chain (promote elements) of each row; null without such scales
  const float* values;        // the value of every element code; null for floats
  const float* scale_values;  // the magnitude of every scale code; null without block scales
  i64 kind;                   // a CodeKind, as an integer
  i64 block;                  // the number of elements per block scale
  i64 least;                  // the smallest exponent of an element, which subnormal elements have too
  i64 scale_least;            // the smallest exponent of a block scale, which subnormal scales have too
  i64 row_bytes, row_scales;  // the number of bytes of codes, and of block scales, per row
  i64 rows;                   // the number of rows per matrix
  i64 is_stack;               // 1 if the operand has a matrix per product; 0 if all products share its only matrix
  i64 magnitude_mask;         // the bits of a code that are its magnitude
  i64 shift, sign_shift;      // how far left to shift the mantissa to that of a float32, and the sign to that of one
  i64 first_special;          // the smallest magnitude that is infinite or NaN; above all magnitudes if there is none
};

// A matrix product (batch, rows of a, rows of b) = c + a b^T. The fields after `promote` matter only for the adders
// truncate, truncate_to_half, truncate_groups and floor.
//   c              what products are added to, contiguous, with the shape of the result; null for zeros
//   out            the result, contiguous
//   batch, length  the number of matrices, and K
//   step           the number of elements along K that the unit sums at once
//   promote        the number of elements along K per chain; sums of chains are added in float32; 0 for one chain
//   fraction_bits  the number of fraction bits that a term keeps after alignment to the largest exponent
//   output_bits    the number of fraction bits to which the significand of a sum is truncated; sum_bits for floor
//   zero_exponent  the exponent that a zero term counts with
//   sums           floor: the number of sums of products, 1 or 2
//   c_vanishes     floor: 1 if C counts as 0 when its exponent is far below the largest (FloorDotAdd)
//   group          truncate_groups: the number of products per term
//   in_turn        1 to multiply a sum by the factor of its column and then by that of its row, 0 by their product
struct ProductArguments {
  ProductOperand a, b;
  const float* c;
  void* out;
  i64 batch, length;
  i64 step, promote, fraction_bits, output_bits, zero_exponent, sums, c_vanishes, group, in_turn;
};

// A group of products, in device memory. ends[i] is the number of tiles of products 0 to i. `tiles` is the number of
// tiles of all products.
struct ProductGroup {
  const ProductArguments* products;
  const i64* ends;
  i64 count, tiles;
};

// ProductsOf<kGrouped>::Type is the type of the argument of a kernel: a group, or one product.
template <bool kGrouped>
struct ProductsOf {
  using Type = ProductArguments;
};
template <>
struct ProductsOf<true> {
  using Type = ProductGroup;
};

// Sixteen bytes of codes.
struct alignas(16) Codes {
  u32 words[4];
};

// A tile (a square of results that one thread block computes), which begins at (row, column) of a matrix.
struct ProductTile {
  i64 matrix, row, column;
};

// Return the number of tiles of kTile x kTile results in all a.batch matrices of results. Tiles at the right and lower
// edges of a matrix count too, although they have fewer results.
template <int kTile>
FP4KIT_DEVICE i64 tile_count(const ProductArguments& a) {
  return a.batch * ((a.a.rows + kTile - 1) / kTile) * ((a.b.rows + kTile - 1) / kTile);
}

// Return the tile of kTile x kTile results with the number `index`, from 0 to tile_count - 1. Tiles are numbered matrix
// by matrix, and in a matrix along rows of tiles.
template <int kTile>
FP4KIT_DEVICE ProductTile tile_at(const ProductArguments& a, i64 index) {
  const i64 rows = (a.a.rows + kTile - 1) / kTile, columns = (a.b.rows + kTile - 1) / kTile;
  return {index / columns / rows, index / columns % rows * kTile, index % columns * kTile};
}

// Call body(a, tile) for each tile of the product `a` that this thread block computes: the thread blocks of the grid
// take turns. All threads of a thread block get the same calls of `body`.
template <int kTile, class Body>
FP4KIT_DEVICE void for_each_tile(const ProductArguments& a, Body body) {
  const i64 tiles = tile_count<kTile>(a);
  for (i64 i = blockIdx.x; i < tiles; i += gridDim.x) body(a, tile_at<kTile>(a, i));
}

// Call body(arguments, tile) for each tile of a group of products that this thread block computes: the thread blocks of
// the grid take turns. `arguments` belongs to the product of the tile, and is in shared memory. All threads of a thread
// block must call this function, and get the same calls of `body`.
template <int kTile, class Body>
FP4KIT_DEVICE void for_each_tile(const ProductGroup& group, Body body) {
  __shared__ ProductArguments arguments[1];
  for (i64 i = blockIdx.x; i < group.tiles; i += gridDim.x) {
    i64 low = 0, high = group.count - 1;  // the product of the tile is among low to high
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (group.ends[middle] > i) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    __syncthreads();  // until then, threads may use the arguments of the previous tile
    if (threadIdx.x == 0) arguments[0] = group.products[low];
    __syncthreads();
    body(arguments[0], tile_at<kTile>(arguments[0], low == 0 ? i : i - group.ends[low - 1]));
  }
}

// Return the index of row `row` of matrix number `matrix` among all rows of an operand. If x.is_stack is 0, the operand
// has only one matrix, and `matrix` is ignored.
FP4KIT_DEVICE i64 row_index(const ProductOperand& x, i64 matrix, i64 row) {
  return (x.is_stack ? matrix * x.rows : 0) + row;
}

// Return the value of element k of a row as float32, which is exact. Neither the block scale nor the tensor scale is
// applied. `row` is a result of row_index.
FP4KIT_DEVICE float element_at(const ProductOperand& x, i64 row, i64 k) {
  const u8* codes = x.codes + row * x.row_bytes;
  switch (static_cast<CodeKind>(x.kind)) {
    case CodeKind::nibbles:
      return x.values[codes[k >> 1] >> (k & 1 ? 4 : 0) & 15];
    case CodeKind::bytes:
      return x.values[codes[k]];
    case CodeKind::float16:
      return Float16::widen(reinterpret_cast<const u16*>(codes)[k]);
    case CodeKind::float32:
      return reinterpret_cast<const float*>(codes)[k];
    default:
      return Bfloat16::widen(reinterpret_cast<const u16*>(codes)[k]);
  }
}

// Return true if each matrix of results has an element (row, column). Neither index may be negative.
FP4KIT_DEVICE bool is_inside(const ProductArguments& a, i64 row, i64 column) {
  return row < a.a.rows && column < a.b.rows;
}

// Multiply a sum by the tensor scales of its row of a and its row of b, if there are any, and store it in a.out as
// result (row, column) of matrix number `matrix`, rounded to nearest even in the type Out. NaN is stored as 0x7FFFFFFF,
// or as 0x7FFF in 16 bits. Do nothing if (row, column) is outside of the matrix.
template <class Out>
FP4KIT_DEVICE void store_product(const ProductArguments& a, i64 matrix, i64 row, i64 column, float sum) {
  if (!is_inside(a, row, column)) return;
  const float* row_factor = a.a.factors;
  const float* column_factor = a.b.factors;
  const i64 m = row_index(a.a, matrix, row), n = row_index(a.b, matrix, column);
  if (row_factor && column_factor) {
    const float of_row = row_factor[m], of_column = column_factor[n];
    sum = a.in_turn ? sum * of_column * of_row : sum * (of_row * of_column);
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

// Return the total of a result after the chain that begins at index k along K. `total` is the total before, and `sum`
// the sum of the chain. Scales of chains multiply the sum, in turn or by their product, and a fused multiply-add adds
// it.
FP4KIT_DEVICE float promoted(const ProductArguments& a, i64 matrix, i64 row, i64 column, i64 k, float total,
                             float sum) {
  if (!a.a.chains) return total + sum;
  if (!is_inside(a, row, column)) return 0.0f;
  const i64 count = (a.length + a.promote - 1) / a.promote, chain = k / a.promote;
  const float x = a.a.chains[row_index(a.a, matrix, row) * count + chain];
  const float y = a.b.chains[row_index(a.b, matrix, column) * count + chain];
  return a.in_turn ? fma_rn(sum * x, y, total) : fma_rn(sum, x * y, total);
}

// Return the start value for the sum of a result: its element of c, or 0 if c is null or the result is outside of the
// matrix.
FP4KIT_DEVICE float first_sum(const ProductArguments& a, i64 matrix, i64 row, i64 column) {
  return a.c && is_inside(a, row, column) ? a.c[(matrix * a.a.rows + row) * a.b.rows + column] : 0.0f;
}
