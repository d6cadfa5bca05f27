// matmul: compute matrix products c + a b^T of operands of every kind. The order of additions imitates a matrix unit,
// or is another order that fp4kit defines. `a` holds the arguments of a product: the operands a.a and a.b (rows of
// codes along K, whose length is a.length), a.c and a.out. The rows of a.a are the rows of the result, and the rows of
// a.b are its columns. A result is one element of a product. A thread block computes one tile of kTile x kTile results
// at a time. A step is the a.step elements along K that the matrix unit adds at once.
//
// A thread block decodes kDepth elements along K at a time to shared memory. kAdder, kGrouped and the type Output are
// defined by the instantiation.
#include "matmul.cuh"

constexpr int kTile = 32;                        // number of rows, and of columns, of a tile
constexpr int kDepth = 128;                      // the most elements of K in shared memory; at least one step
constexpr int kScaled = 16;                      // number of elements per entry of the scales in shared memory
constexpr int kRows = kTile * kTile / kThreads;  // number of results per thread, all of one column

// The decoded elements of a tile's rows and columns along K, with their block scales, in shared memory.
struct Decoded {
  // The values of the elements, not multiplied by their block scales. The extra column avoids bank conflicts.
  float rows[kTile][kDepth], columns[kDepth][kTile + 1];
  // The block scale of every kScaled elements, and 2^exponent of the scale. Both are 0 if the scale is zero, and 1 if
  // the operand has no block scales.
  double row_scales[kTile][kDepth / kScaled], column_scales[kDepth / kScaled][kTile];
  double row_powers[kTile][kDepth / kScaled], column_powers[kDepth / kScaled][kTile];
};

// Return one decoded element of the operand x, without its block scale: element k in row `row` of matrix number
// `matrix`. Return 0 if the row is not below x.rows, or k is not below `length` (K).
FP4KIT_DEVICE float decoded(const ProductOperand& x, i64 matrix, i64 row, i64 k, i64 length) {
  return row < x.rows && k < length ? element_at(x, row_index(x, matrix, row), k) : 0.0f;
}

// Store in `scale` the block scale of one element of the operand x (element k in row `row` of matrix number `matrix`),
// and in `power` the power of two of that scale, 2^floor(log2(scale)):
//
// - `power` is at least 2^x.scale_least, but 0 if the scale is zero.
// - If the operand has no block scales, both results are 1.
// - If the row is not below x.rows, or k is not below `length` (K), both results are 0.
FP4KIT_DEVICE void decode_scale(const ProductOperand& x, i64 matrix, i64 row, i64 k, i64 length, double& scale,
                                double& power) {
  if (row >= x.rows || k >= length) {
    scale = power = 0.0;
  } else if (!x.scales) {
    scale = power = 1.0;
  } else {
    scale = x.scale_values[x.scales[row_index(x, matrix, row) * x.row_scales + k / x.block]];
    power = scale == 0.0 ? 0.0 : term_power(scale, double_power(x.scale_least));
  }
}

// Decode `depth` elements (at most kDepth) of each row and each column of a tile, from index `start` along K on, and
// store them and their block scales in d. The tile begins at (row, column) in result matrix number `matrix`. Elements
// and scales beyond the operands are 0. All threads of a thread block must call this function, and must synchronize
// before they read d.
FP4KIT_DEVICE void decode_tile(const ProductArguments& a, Decoded& d, i64 matrix, i64 row, i64 column, i64 start,
                               int depth) {
  for (int i = threadIdx.x; i < kTile * depth; i += kThreads) {
    const int line = i / depth, k = i % depth;
    d.rows[line][k] = decoded(a.a, matrix, row + line, start + k, a.length);
    d.columns[k][line] = decoded(a.b, matrix, column + line, start + k, a.length);
  }
  const int groups = (depth + kScaled - 1) / kScaled;
  for (int i = threadIdx.x; i < kTile * groups; i += kThreads) {
    const int line = i / groups, group = i % groups;
    const i64 k = start + group * kScaled;
    decode_scale(a.a, matrix, row + line, k, a.length, d.row_scales[line][group], d.row_powers[line][group]);
    decode_scale(a.b, matrix, column + line, k, a.length, d.column_scales[group][line], d.column_powers[group][line]);
  }
}

// The sum of one result of a thread. `add` adds one step to it: the a.step products of one row and one column of the
// tile.
template <Adder kAdder>
struct Sum {
  double value;  // the sum so far: a double for Adder::float64, and otherwise an exact value of float32

  // Start a new sum at c.
  FP4KIT_DEVICE_MEMBER void begin(float c) { value = c; }
  // Return the sum, rounded to float32 to nearest even. The sum itself does not change.
  FP4KIT_DEVICE_MEMBER float end() { return static_cast<float>(value); }

  // Add one step to the sum by the adder kAdder (enum Adder in matmul_terms.cuh). The step is the products of row `row`
  // and column `column` of the tile at elements i ... i + a.step - 1 of the shared memory d.
  FP4KIT_DEVICE_MEMBER void add(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    if constexpr (kAdder == Adder::truncate || kAdder == Adder::truncate_to_half) {
      truncate(a, d, row, column, i);
    } else if constexpr (kAdder == Adder::truncate_groups) {
      truncate_groups(a, d, row, column, i);
    } else if constexpr (kAdder == Adder::floor) {
      add_floored(a, d, row, column, i);
    } else if constexpr (kAdder == Adder::float32_blocks) {
      float sum = 0.0f;
      for (int k = i; k < i + a.step; ++k) sum += d.rows[row][k] * d.columns[k][column];
      const int group = i / kScaled;
      const float scale =
          static_cast<float>(d.row_scales[row][group]) * static_cast<float>(d.column_scales[group][column]);
      const float product = scale * sum;
      value = static_cast<float>(value) + product;
    } else {
      const double x = d.rows[row][i] * d.row_scales[row][i / kScaled];
      const double y = d.columns[i][column] * d.column_scales[i / kScaled][column];
      if constexpr (kAdder == Adder::float64) {
        value += x * y;
      } else {
        const float product = static_cast<float>(x) * static_cast<float>(y);
        value = static_cast<float>(value) + product;
      }
    }
  }

  // Add the products of one step to the sum as NVIDIA's matrix units do: the sum and all products are aligned to the
  // largest exponent among them, truncated to a.fraction_bits, and added. The result is truncated to a.output_bits, or
  // rounded to float16. The arguments are those of `add`.
  FP4KIT_DEVICE_MEMBER void truncate(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = double_power(a.zero_exponent);
    const double least_a = double_power(a.a.least), least_b = double_power(a.b.least);
    double largest = sum_power(value, zero_power);
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k], y = d.columns[k][column];
      const double scale = d.row_powers[row][k / kScaled] * d.column_powers[k / kScaled][column];
      const bool is_zero = x == 0.0 || y == 0.0 || scale == 0.0;
      largest = maximum(largest, is_zero ? zero_power : term_power(x, least_a) * term_power(y, least_b) * scale);
    }
    const double inverse = over(a.fraction_bits, largest);
    double sum = toward_zero(value * inverse);
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k] * d.row_scales[row][k / kScaled];
      const double y = d.columns[k][column] * d.column_scales[k / kScaled][column];
      sum += toward_zero(x * y * inverse);
    }
    sum *= largest * double_power(-a.fraction_bits);
    value = kAdder == Adder::truncate ? truncated_sum(sum, a.output_bits) : rounded_to_half(sum);
  }

  // Add the products of one step to the sum as NVIDIA's FP4 units do. Each term is the exact sum of a.group products of
  // elements, times the product of both block scales. The sum and the terms are aligned to the largest exponent among
  // them, truncated to a.fraction_bits, and added. The result is truncated to a.output_bits. The arguments are those of
  // `add`.
  FP4KIT_DEVICE_MEMBER void truncate_groups(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = double_power(a.zero_exponent);
    double largest = sum_power(value, zero_power);
    double terms[kDepth / 4];
    const int size = static_cast<int>(a.group), groups = static_cast<int>(a.step) / size;
    for (int g = 0; g < groups; ++g) {
      const int first = i + size * g, group = first / kScaled;
      float sum = 0.0f;
      bool any = false;
      for (int k = first; k < first + size; ++k) {
        const float product = d.rows[row][k] * d.columns[k][column];
        sum += product;
        any = any || product != 0.0f;
      }
      const double power = d.row_powers[row][group] * d.column_powers[group][column];
      terms[g] = sum * (d.row_scales[row][group] * d.column_scales[group][column]);
      largest = maximum(largest, any && power != 0.0 ? power : zero_power);
    }
    value = sum_of_terms(value, terms, groups, largest, a.fraction_bits, a.output_bits);
  }

  // Add the products of one step to the sum as AMD's CDNA3 does (see FloorDotAdd in fp4kit/units.py): products are
  // aligned and truncated, and their sum is rounded down. Block scales are ignored. The arguments are those of `add`.
  FP4KIT_DEVICE_MEMBER void add_floored(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = double_power(a.zero_exponent);
    const double least_a = double_power(a.a.least), least_b = double_power(a.b.least);
    const int count = static_cast<int>(a.sums);
    double largest[2] = {0.0, 0.0}, sums[2] = {0.0, 0.0};
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k], y = d.columns[k][column];
      const double power = x == 0.0 || y == 0.0 ? zero_power : term_power(x, least_a) * term_power(y, least_b);
      double& top = largest[(k - i) % count];
      top = maximum(top, power);
    }
    for (int k = i; k < i + a.step; ++k) {
      const int s = (k - i) % count;
      double product = static_cast<double>(d.rows[row][k]) * d.columns[k][column];
      if (count == 1 && fabs(product) >= 0x1p128) product *= double_of(0x7FF0000000000000u);
      sums[s] += toward_zero(product * over(a.fraction_bits, largest[s]));
    }
    value = floored_sum(value, sums, largest, count, a.fraction_bits, a.output_bits, a.c_vanishes != 0);
  }
};

// The exact sum of one result of a thread, for Adder::exact. A step is one product.
template <>
struct Sum<Adder::exact> {
  ExactSum sum;  // the sum so far

  // Start a new sum at c.
  FP4KIT_DEVICE_MEMBER void begin(float c) {
    sum.clear();
    sum.add(c);
  }
  // Return the sum, rounded to float32 to nearest even. The sum must not be used afterwards.
  FP4KIT_DEVICE_MEMBER float end() { return sum.rounded(); }

  // Add one product to the sum exactly: that of row `row` and column `column` of the tile at element i of the shared
  // memory d, with their block scales.
  FP4KIT_DEVICE_MEMBER void add(const ProductArguments&, const Decoded& d, int row, int column, int i) {
    const double x = d.rows[row][i] * d.row_scales[row][i / kScaled];
    sum.add(x * (d.columns[i][column] * d.column_scales[i / kScaled][column]));
  }
};

// Compute the results of the tile that begins at (row, column) of matrix `matrix`, and store them in a.out as Out
// (store_product). Results outside of the matrix are left out. d is shared memory for the decoded elements. Every
// thread computes kRows results of one column. If a.promote is not 0, a new sum (a chain) begins after every a.promote
// elements along K, and the chains are added in float32, or in float16 for Adder::truncate_to_half. All threads of a
// thread block must call this function.
template <Adder kAdder, class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Decoded& d, i64 matrix, i64 row, i64 column) {
  const int lane = threadIdx.x % kTile, first = threadIdx.x / kTile;
  constexpr int kStride = kTile / kRows;  // rows between the results of a thread
  Sum<kAdder> sums[kRows];
  float totals[kRows];  // with promotion, the sums of the chains that ended
  for (int r = 0; r < kRows; ++r) {
    const i64 m = row + first + r * kStride, n = column + lane;
    totals[r] = first_sum(a, matrix, m, n);
    sums[r].begin(a.promote ? 0.0f : totals[r]);
  }
  const i64 chunk = kDepth / a.step * a.step;
  for (i64 start = 0; start < a.length; start += chunk) {
    const int depth = static_cast<int>(minimum(chunk, (a.length - start + a.step - 1) / a.step * a.step));
    decode_tile(a, d, matrix, row, column, start, depth);
    __syncthreads();
    for (int i = 0; i < depth; i += static_cast<int>(a.step)) {
      const i64 done = start + i + a.step;
      const bool ends = a.promote && (done % a.promote == 0 || done >= a.length);
      for (int r = 0; r < kRows; ++r) {
        sums[r].add(a, d, first + r * kStride, lane, i);
        if (ends) {
          totals[r] =
              promoted(a, matrix, row + first + r * kStride, column + lane, start + i, totals[r], sums[r].end());
          if (kAdder == Adder::truncate_to_half) totals[r] = static_cast<float>(rounded_to_half(totals[r]));
          sums[r].begin(0.0f);
        }
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kRows; ++r) {
    const i64 m = row + first + r * kStride, n = column + lane;
    store_product<Out>(a, matrix, m, n, a.promote ? totals[r] : sums[r].end());
  }
}

using Products = ProductsOf<kGrouped>::Type;

// Compute the products of all matrices, or of all products of a group, and store them. The kernel is launched for
// fp4kit.matmul and fp4kit.matmul_grouped, if neither matmul_fp4.cu nor matmul_truncate.cu supports the call. A thread
// block takes one tile at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) matmul_kernel(Products products) {
  __shared__ Decoded decoded_tile[1];
  for_each_tile<kTile>(products, [&](const ProductArguments& a, const ProductTile& tile) {
    multiply_tile<kAdder, Output>(a, decoded_tile[0], tile.matrix, tile.row, tile.column);
  });
}
