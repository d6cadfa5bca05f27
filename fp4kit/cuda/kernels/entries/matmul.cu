// matmul: matrix products as a matrix unit adds them, or in another stated order, for operands of every kind.
//
// A thread block computes tiles of kTile x kTile results. It decodes kDepth elements of K at a time to shared memory.
// kAdder and the type Output are defined by the instantiation.
#include "matmul.cuh"

constexpr int kTile = 32;                        // number of rows, and of columns, of a tile
constexpr int kDepth = 128;                      // the most elements of K in shared memory; at least one step
constexpr int kScaled = 16;                      // number of elements per entry of the scales in shared memory
constexpr int kRows = kTile * kTile / kThreads;  // number of results per thread, all of one column

// The decoded elements of a tile's rows and columns along K, in shared memory.
struct Decoded {
  // The values of the elements, not multiplied by their block scales. The extra column avoids bank conflicts.
  float rows[kTile][kDepth], columns[kDepth][kTile + 1];
  // The block scale of every kScaled elements, and 2^exponent of the scale. Both are 0 for a scale of zero, and 1
  // without block scales.
  double row_scales[kTile][kDepth / kScaled], column_scales[kDepth / kScaled][kTile];
  double row_powers[kTile][kDepth / kScaled], column_powers[kDepth / kScaled][kTile];
};

// Return the value of element k of row `row` of matrix `matrix` of an operand, not multiplied by its block scale.
// Return 0 beyond the operand.
FP4KIT_DEVICE float decoded(const ProductOperand& x, i64 matrix, i64 row, i64 k, i64 length) {
  return row < x.rows && k < length ? element_at(x, row_index(x, matrix, row), k) : 0.0f;
}

// Store the block scale of element k of a row in `scale`, and 2^exponent of the scale in `power`. Both are 0 beyond the
// operand, and 1 without block scales. The power of a zero scale is 0.
FP4KIT_DEVICE void decode_scale(const ProductOperand& x, i64 matrix, i64 row, i64 k, i64 length, double& scale,
                                double& power) {
  if (row >= x.rows || k >= length) {
    scale = power = 0.0;
  } else if (!x.scales) {
    scale = power = 1.0;
  } else {
    scale = x.scale_values[x.scales[row_index(x, matrix, row) * x.row_scales + k / x.block]];
    power = scale == 0.0 ? 0.0 : power_of(scale, power_of_two(x.scale_least));
  }
}

// Store in d the decoded elements and scales of `depth` elements from element `start` of K on, for the tile that begins
// at (row, column) of a matrix. All threads of a thread block must call this function.
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

// An exact sum of doubles with exponents from -400 to 400: an integer in units of 2^-kUnit, in digits of 32 bits.
struct ExactSum {
  static constexpr int kDigits = 30, kUnit = 480;
  i64 digits[kDigits];  // the lowest digit comes first; between carries, a digit may exceed 32 bits or be negative
  double special;       // the sum of the infinities and NaN that were added
  int added;            // the number of additions since the last carry

  // Set the sum to 0.
  FP4KIT_DEVICE_MEMBER void clear() {
    for (int i = 0; i < kDigits; ++i) digits[i] = 0;
    special = 0.0;
    added = 0;
  }

  // Add x, which may be infinite or NaN, but not a subnormal double.
  FP4KIT_DEVICE_MEMBER void add(double x) {
    const u64 bits = double_bits_of(x);
    const int field = static_cast<int>(bits >> 52 & 0x7FF);
    if (field == 0x7FF) special += x;
    if (field == 0x7FF || field == 0) return;  // no product is a subnormal double
    const i64 magnitude = static_cast<i64>((bits & ((u64{1} << 52) - 1)) | u64{1} << 52);
    const i64 sign = bits >> 63 ? -1 : 1;
    const int shift = field - 1075 + kUnit, digit = shift / 32, offset = shift % 32;
    // The magnitude, shifted left by `offset`, in three digits.
    const u64 low = static_cast<u64>(magnitude) << offset;
    const u64 high = offset ? static_cast<u64>(magnitude) >> (64 - offset) : 0u;
    digits[digit] += sign * static_cast<i64>(low & 0xFFFFFFFFu);
    digits[digit + 1] += sign * static_cast<i64>(low >> 32);
    digits[digit + 2] += sign * static_cast<i64>(high);
    if (++added == 1 << 29) carry();
  }

  // Make every digit but the last one non-negative and below 2^32.
  FP4KIT_DEVICE_MEMBER void carry() {
    for (int i = 0; i + 1 < kDigits; ++i) {
      digits[i + 1] += digits[i] >> 32;
      digits[i] &= 0xFFFFFFFF;
    }
    added = 0;
  }

  // Return the sum, rounded to float32 to nearest even. A sum of zero is +0, and a negative sum that rounds to zero is
  // -0. The function changes the digits, so it must be called last.
  FP4KIT_DEVICE_MEMBER float rounded() {
    if (special != 0.0) return static_cast<float>(special);
    carry();
    const bool is_negative = digits[kDigits - 1] < 0;
    if (is_negative) {
      for (int i = 0; i < kDigits; ++i) digits[i] = -digits[i];
      carry();
    }
    int top = kDigits - 1;
    while (top > 1 && digits[top] == 0) --top;
    // The 64 bits from the highest digit on, and whether a lower bit is set.
    u64 head = static_cast<u64>(digits[top]) << 32 | static_cast<u64>(digits[top - 1]);
    bool rest = false;
    for (int i = 0; i < top - 1; ++i) rest = rest || digits[i] != 0;
    if (head == 0u) return 0.0f;
    int bits = 64;
    while (!(head >> (bits - 1))) --bits;
    int exponent = 32 * (top - 1) - kUnit;
    if (bits < 40 && top > 1) {  // take bits of the next digit, so that the head has more than float32 keeps
      head = head << 24 | static_cast<u64>(digits[top - 2]) >> 8;
      rest = (digits[top - 2] & 0xFF) != 0;
      for (int i = 0; i < top - 2; ++i) rest = rest || digits[i] != 0;
      exponent -= 24;
      bits += 24;
    }
    const int lowest = maximum(exponent + bits - 24, -149);  // exponent of the last bit that the result keeps
    const int drop = lowest - exponent;
    u64 kept = head;
    if (drop > 63) return is_negative ? -0.0f : 0.0f;
    if (drop > 0) {
      const u64 cut = head & ((u64{1} << drop) - 1), half = u64{1} << (drop - 1);
      kept = head >> drop;
      kept += cut > half || (cut == half && (rest || (kept & 1))) ? 1 : 0;
      exponent = lowest;
    }
    const float result = static_cast<float>(static_cast<double>(kept) * power_of_two(exponent));
    return is_negative ? -result : result;
  }
};

// The sum of one result. Its functions add one step: the a.step products of row `row` and column `column` of the tile,
// from element i of the shared memory on.
template <Adder kAdder>
struct Sum {
  double value;  // the sum so far: a double for Adder::float64, and otherwise an exact value of float32

  // Set the sum to c.
  FP4KIT_DEVICE_MEMBER void begin(float c) { value = c; }
  // Return the sum, rounded to float32.
  FP4KIT_DEVICE_MEMBER float end() { return static_cast<float>(value); }

  // Add one step as kAdder says.
  FP4KIT_DEVICE_MEMBER void add(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    if constexpr (kAdder == Adder::truncate) {
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

  // Add one step as NVIDIA's units do, with every product as a term.
  FP4KIT_DEVICE_MEMBER void truncate(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = power_of_two(a.zero_exponent);
    const double least_a = power_of_two(a.a.least), least_b = power_of_two(a.b.least);
    double largest = value == 0.0 ? zero_power : power_of(value, 0x1p-126);
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k], y = d.columns[k][column];
      const double scale = d.row_powers[row][k / kScaled] * d.column_powers[k / kScaled][column];
      const bool is_zero = x == 0.0 || y == 0.0 || scale == 0.0;
      largest = maximum(largest, is_zero ? zero_power : power_of(x, least_a) * power_of(y, least_b) * scale);
    }
    const double inverse = over(a.fraction_bits, largest);
    double sum = trunc(value * inverse);
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k] * d.row_scales[row][k / kScaled];
      const double y = d.columns[k][column] * d.column_scales[k / kScaled][column];
      sum += trunc(x * y * inverse);
    }
    value = truncated_sum(sum * (largest * power_of_two(-a.fraction_bits)), a.output_bits);
  }

  // Add one step as NVIDIA's units do, with the exact sum of 16 products as a term.
  FP4KIT_DEVICE_MEMBER void truncate_groups(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = power_of_two(a.zero_exponent);
    double largest = value == 0.0 ? zero_power : power_of(value, 0x1p-126);
    double terms[kDepth / 16];
    const int groups = static_cast<int>(a.step) / 16;
    for (int g = 0; g < groups; ++g) {
      const int first = i + 16 * g, group = first / kScaled;
      float sum = 0.0f;
      bool any = false;
      for (int k = first; k < first + 16; ++k) {
        const float product = d.rows[row][k] * d.columns[k][column];
        sum += product;
        any = any || product != 0.0f;
      }
      const double power = d.row_powers[row][group] * d.column_powers[group][column];
      terms[g] = sum * (d.row_scales[row][group] * d.column_scales[group][column]);
      largest = maximum(largest, any && power != 0.0 ? power : zero_power);
    }
    const double inverse = over(a.fraction_bits, largest);
    double total = trunc(value * inverse);
    for (int g = 0; g < groups; ++g) total += trunc(terms[g] * inverse);
    value = truncated_sum(total * (largest * power_of_two(-a.fraction_bits)), a.output_bits);
  }

  // Add one step as CDNA3 does; FloorDotAdd of fp4kit/units.py says how. Block scales are ignored.
  FP4KIT_DEVICE_MEMBER void add_floored(const ProductArguments& a, const Decoded& d, int row, int column, int i) {
    const double zero_power = power_of_two(a.zero_exponent), unit = power_of_two(-a.fraction_bits);
    const double least_a = power_of_two(a.a.least), least_b = power_of_two(a.b.least);
    double highest = 0.0, largest[2] = {0.0, 0.0}, sums[2] = {-0.0, -0.0};
    for (int k = i; k < i + a.step; ++k) {
      const double x = d.rows[row][k], y = d.columns[k][column];
      const double power = x == 0.0 || y == 0.0 ? zero_power : power_of(x, least_a) * power_of(y, least_b);
      double& top = largest[(k - i) % a.sums];
      top = maximum(top, power);
      highest = maximum(highest, power);
    }
    for (int k = i; k < i + a.step; ++k) {
      const int s = (k - i) % static_cast<int>(a.sums);
      double product = static_cast<double>(d.rows[row][k]) * d.columns[k][column];
      if (a.sums == 1 && fabs(product) >= 0x1p128) product *= double_of(0x7FF0000000000000u);
      sums[s] += trunc(product * over(a.fraction_bits, largest[s]));
    }
    for (int s = 0; s < a.sums && a.sums > 1; ++s) sums[s] = floor(sums[s] * (largest[s] / highest));
    double products = (a.sums > 1 ? sums[0] + sums[1] : sums[0]) * unit;
    const double c_power = power_of(value, 0x1p-126), top = maximum(highest, c_power);
    const double fine = power_of_two(a.output_bits + 1);
    products = floor(products * (highest / top) * fine) / fine;
    double first = floor(value * over(a.fraction_bits, top)) * unit;
    if (a.c_vanishes && c_power < top * unit / 2 && first - first == 0.0) first = 0.0;  // not infinite, not NaN
    const double total = (products + first) * top, power = power_of(total, 0x1p-126);
    value = static_cast<float>(floor(total * over(a.output_bits, power)) * (power * 2.0 / fine));
  }
};

// The exact sum of one result. A step is one product.
template <>
struct Sum<Adder::exact> {
  ExactSum sum;  // the sum so far

  // Set the sum to c.
  FP4KIT_DEVICE_MEMBER void begin(float c) {
    sum.clear();
    sum.add(c);
  }
  // Return the sum, rounded to float32 to nearest even. The sum must not be used afterwards.
  FP4KIT_DEVICE_MEMBER float end() { return sum.rounded(); }

  // Add the product at element i of the shared memory.
  FP4KIT_DEVICE_MEMBER void add(const ProductArguments&, const Decoded& d, int row, int column, int i) {
    const double x = d.rows[row][i] * d.row_scales[row][i / kScaled];
    sum.add(x * (d.columns[i][column] * d.column_scales[i / kScaled][column]));
  }
};

// Compute and store the results of the tile that begins at (row, column) of a matrix, as far as they are inside of it.
// Every thread computes kRows results of one column. All threads of a thread block must call this function.
template <Adder kAdder, class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Decoded& d, i64 matrix, i64 row, i64 column) {
  const int lane = threadIdx.x % kTile, first = threadIdx.x / kTile;
  constexpr int kStride = kTile / kRows;  // rows between the results of a thread
  Sum<kAdder> sums[kRows];
  float totals[kRows];  // with promotion, the sums of the chains that ended
  for (int r = 0; r < kRows; ++r) {
    const i64 m = row + first + r * kStride, n = column + lane;
    totals[r] = m < a.a.rows && n < a.b.rows ? first_sum(a, matrix, m, n) : 0.0f;
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
          totals[r] += sums[r].end();
          sums[r].begin(0.0f);
        }
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kRows; ++r) {
    const i64 m = row + first + r * kStride, n = column + lane;
    if (m < a.a.rows && n < a.b.rows) store_product<Out>(a, matrix, m, n, a.promote ? totals[r] : sums[r].end());
  }
}

// Compute and store the products of all matrices. A thread block takes one tile at a time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) matmul_kernel(ProductArguments a) {
  __shared__ Decoded decoded_tile[1];
  const i64 row_tiles = (a.a.rows + kTile - 1) / kTile, column_tiles = (a.b.rows + kTile - 1) / kTile;
  const i64 tiles = a.batch * row_tiles * column_tiles;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 column = tile % column_tiles, row = tile / column_tiles % row_tiles;
    const i64 matrix = tile / column_tiles / row_tiles;
    multiply_tile<kAdder, Output>(a, decoded_tile[0], matrix, row * kTile, column * kTile);
  }
}
