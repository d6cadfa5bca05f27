// matmul_fp4: products of block-scaled E2M1 operands as Blackwell's FP4 instructions add them, 64 elements of K at a
// time. Other steps, and operands at other addresses, are multiplied by matmul.cu.
//
// Elements are integers in units of 1/2, so the sum of a group of 16 products is an integer dot product. The terms of a
// step are integers, too: a group sum times the integer scales of its row and column, which count in units of the
// smallest scale of that row or column in the step. Usually no term loses bits when it is shifted to the largest
// exponent; then the step is an exact sum, which is truncated once. A thread checks by exponents that this holds. If it
// does not, add_slowly adds the step term by term.
#include "matmul.cuh"

constexpr int kTile = 64;                      // number of rows, and of columns, of a tile of results
constexpr int kSide = 4;                       // number of rows, and of columns, of a thread's results
constexpr int kStep = 64;                      // number of elements of K per step
constexpr int kGroups = kStep / 16;            // number of groups of 16 elements per step
constexpr int kThreadsAcross = kTile / kSide;  // number of threads that share a row of a tile
static_assert(kThreadsAcross * kThreadsAcross == kThreads, "one thread per kSide x kSide results");
constexpr int kMostBits = 14;       // the largest difference of the exponents of a line's scales, if they are integers
constexpr int kUnusable = -100000;  // the width of a line whose scales cannot be integers, so that the check fails

// Sixteen elements in units of 1/2, as signed bytes, four per word.
struct alignas(16) Group {
  i32 words[4];
};

// The scales of one line (a row or a column of a tile) in one step.
struct LineScales {
  i32 factors[kGroups];  // the integer scale of every group; 0 for zero scales, and if the scales cannot be integers
  i32 top;               // the largest exponent of a scale that is not zero; -1000 if there is none
  i32 width;             // the smallest exponent minus the largest one; kUnusable if the scales cannot be integers
  double unit;           // half of the scale that a factor of 1 stands for, because elements are in units of 1/2
};

// One step of the rows or the columns of a tile. The arrays hold the elements and the LineScales of every line.
struct Lines {
  Group groups[kGroups][kTile];
  i32 factors[kGroups][kTile], tops[kTile], widths[kTile];
  double units[kTile];
};

// One step of a tile, in shared memory.
struct Step {
  Lines rows, columns;
};

// The part of one line that a thread loads per step.
struct Loaded {
  Codes codes;  // half of the step's codes
  u32 scales;   // one scale code per group, in the first half only; otherwise 0
};

// Return four elements in units of 1/2, as signed bytes, from four E2M1 codes in the lower 16 bits.
FP4KIT_DEVICE u32 integers_of(u32 codes) {
  const u32 magnitudes = codes & 0x7777u;
  const u32 positive = prmt(0x03020100u, 0x0C080604u, magnitudes);
  const u32 negative = prmt(0xFDFEFF00u, 0xF4F8FAFCu, magnitudes);
  const u32 mask = prmt(0x0000FF00u, 0u, codes >> 3 & 0x1111u);
  return (positive & ~mask) | (negative & mask);
}

// Return the sum of the products of four signed bytes, plus c.
FP4KIT_DEVICE i32 dot4(i32 a, i32 b, i32 c) {
#ifdef __CUDA_ARCH__
  return __dp4a(a, b, c);
#else
  for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
  return c;
#endif
}

// Return the LineScales of a line from the codes of its four scales: E8M0 codes if kE8M0, otherwise E4M3 codes, whose
// sign is ignored. The scales cannot be integers if one is NaN, if exponents differ by more than kMostBits, or if an
// exponent is not in [-40, 40].
template <bool kE8M0>
FP4KIT_DEVICE LineScales line_scales(u32 codes) {
  LineScales s;
  i32 exponents[kGroups], bottom = 1000;
  s.top = -1000;
  bool usable = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const u32 code = codes >> 8 * g & 0xFFu;
    if (kE8M0) {
      s.factors[g] = 1;
      exponents[g] = static_cast<i32>(code) - 127;
      usable = usable && code != 255u;
    } else {
      const u32 field = code >> 3 & 15u;
      s.factors[g] = static_cast<i32>((code & 7u) + (field ? 8u : 0u));
      exponents[g] = static_cast<i32>(maximum(field, 1u)) - 7;
      usable = usable && (code & 0x7Fu) != 0x7Fu;
    }
    if (s.factors[g]) {
      s.top = maximum(s.top, exponents[g]);
      bottom = minimum(bottom, exponents[g]);
    }
  }
  usable = usable && s.top - bottom <= kMostBits && (s.top < bottom || (bottom >= -40 && s.top <= 40));
#pragma unroll
  for (int g = 0; g < kGroups; ++g) s.factors[g] = usable && s.factors[g] ? s.factors[g] << (exponents[g] - bottom) : 0;
  s.width = usable ? bottom - s.top : kUnusable;
  s.unit = usable && s.top >= bottom ? double_power(bottom - 1 - (kE8M0 ? 0 : 3)) : 1.0;
  return s;
}

// Load half `half` (0 or 1) of step `step` of a line. Beyond the operand, codes are 0. Scale codes are 0 there too,
// except that E8M0 scales beyond K repeat the last one.
template <bool kE8M0>
FP4KIT_DEVICE Loaded load_line(const ProductOperand& x, i64 matrix, i64 row, i64 step, int half, i64 length) {
  Loaded l = {};
  const i64 first = step * kStep + half * (kStep / 2);
  if (row >= x.rows) return l;
  const i64 index = row_index(x, matrix, row);
  if (first < length) {
    l.codes = *reinterpret_cast<const Codes*>(x.codes + index * x.row_bytes + first / 2);
  }
  if (half == 0) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const i64 k = step * kStep + 16 * g;
      // Beyond K, an E8M0 scale repeats the last one, because no E8M0 scale is zero.
      const i64 block = (k < length ? k : length - 1) / x.block;
      const u32 code = k < length || kE8M0 ? x.scales[index * x.row_scales + block] : 0u;
      l.scales |= code << 8 * g;
    }
  }
  return l;
}

// Store in `lines` the elements that load_line loaded of half `half` of a line, and if `half` is 0 also the scales.
template <bool kE8M0>
FP4KIT_DEVICE void store_line(Lines& lines, int line, int half, const Loaded& l) {
#pragma unroll
  for (int g = 0; g < kGroups / 2; ++g) {
    Group group;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 codes = l.codes.words[2 * g + i / 2];
      group.words[i] = static_cast<i32>(integers_of(i % 2 ? codes >> 16 : codes & 0xFFFFu));
    }
    lines.groups[half * (kGroups / 2) + g][line] = group;
  }
  if (half == 0) {
    const LineScales s = line_scales<kE8M0>(l.scales);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) lines.factors[g][line] = s.factors[g];
    lines.tops[line] = s.top;
    lines.widths[line] = s.width;
    lines.units[line] = s.unit;
  }
}

// Return the sum of one result after step `step`, computed term by term. c is the sum before the step. Return 0 for a
// result outside of the matrix.
FP4KIT_DEVICE_CALL double add_slowly(const ProductArguments& a, i64 matrix, i64 row, i64 column, i64 step, double c) {
  if (!is_inside(a, row, column)) return 0.0;
  const i64 m = row_index(a.a, matrix, row), n = row_index(a.b, matrix, column);
  const double zero_power = double_power(a.zero_exponent);
  double terms[kGroups], largest = sum_power(c, zero_power);
  for (int g = 0; g < kGroups; ++g) {
    float sum = 0.0f;
    bool any = false;
    double scale = 0.0, power = 0.0;
    const i64 first = step * kStep + 16 * g;
    for (i64 k = first; k < first + 16 && k < a.length; ++k) {
      const float product = element_at(a.a, m, k) * element_at(a.b, n, k);
      sum += product;
      any = any || product != 0.0f;
    }
    if (first < a.length) {
      const double x = a.a.scale_values[a.a.scales[m * a.a.row_scales + first / a.a.block]];
      const double y = a.b.scale_values[a.b.scales[n * a.b.row_scales + first / a.b.block]];
      scale = x * y;
      power = scale == 0.0
                  ? 0.0
                  : term_power(x, double_power(a.a.scale_least)) * term_power(y, double_power(a.b.scale_least));
    }
    terms[g] = sum * scale;
    largest = maximum(largest, any && power != 0.0 ? power : zero_power);
  }
  return sum_of_terms(c, terms, kGroups, largest, a.fraction_bits, a.output_bits);
}

// The sums of a thread, as exact doubles. values[i][j] belongs to row thread_row + i and column thread_column +
// kThreadsAcross * j of the tile.
struct Sums {
  double values[kSide][kSide];
};

// Add step `step`, whose elements are in s, to the sums of a thread. The tile begins at (row, column) of a matrix.
FP4KIT_DEVICE void add_step(const ProductArguments& a, const Step& s, Sums& sums, int thread_row, int thread_column,
                            i64 matrix, i64 row, i64 column, i64 step) {
  i64 exact[kSide][kSide] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    Group rows[kSide];
    i32 row_factors[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      rows[i] = s.rows.groups[g][thread_row + i];
      row_factors[i] = s.rows.factors[g][thread_row + i];
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const Group other = s.columns.groups[g][thread_column + kThreadsAcross * j];
      const i32 factor = s.columns.factors[g][thread_column + kThreadsAcross * j];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        i32 products = 0;  // in units of 1/4: at most 16 * 144
#pragma unroll
        for (int w = 0; w < 4; ++w) products = dot4(rows[i].words[w], other.words[w], products);
        exact[i][j] += static_cast<i64>(products * row_factors[i]) * factor;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const i32 top = s.rows.tops[thread_row + i], width = s.rows.widths[thread_row + i];
    const double unit = s.rows.units[thread_row + i];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int line = thread_column + kThreadsAcross * j;
      const double c = sums.values[i][j];
      // Exponents of C for which no bit is lost: from the largest of the terms - (F - 23) to the smallest + F - 8.
      const i32 lowest = top + s.columns.tops[line] - 12, range = width + s.columns.widths[line] + 39;
      const i32 exponent = static_cast<i32>(double_bits_of(c) >> 52 & 0x7FFu) - 1023;
      const bool keeps_c = c == 0.0 || static_cast<u32>(exponent - lowest) <= static_cast<u32>(range);
      if (range >= 12 && keeps_c) {
        const double sum = static_cast<double>(exact[i][j]) * (unit * s.columns.units[line]) + c;
        sums.values[i][j] = double_of(double_bits_of(sum) & ~((u64{1} << 29) - 1)) + 0.0;
      } else {
        sums.values[i][j] = add_slowly(a, matrix, row + thread_row + i, column + line, step, c);
      }
    }
  }
}

// Compute and store the results of the tile that begins at (row, column) of a matrix, as far as they are inside of it.
// All threads of a thread block must call this function.
template <bool kE8M0, class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Step& s, i64 matrix, i64 row, i64 column) {
  const int thread = threadIdx.x;
  const int thread_row = thread / kThreadsAcross * kSide, thread_column = thread % kThreadsAcross;
  // The line that the thread loads: two threads per row, then two per column.
  const int line = thread / 2 % kTile, half = thread % 2;
  const bool is_row = thread < 2 * kTile;
  const ProductOperand& x = is_row ? a.a : a.b;
  const i64 loaded_row = (is_row ? row : column) + line, steps = (a.length + kStep - 1) / kStep;
  Sums sums;
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      const i64 m = row + thread_row + i, n = column + thread_column + kThreadsAcross * j;
      sums.values[i][j] = first_sum(a, matrix, m, n);
    }
  }
  Loaded loaded = load_line<kE8M0>(x, matrix, loaded_row, 0, half, a.length);
  for (i64 step = 0; step < steps; ++step) {
    store_line<kE8M0>(is_row ? s.rows : s.columns, line, half, loaded);
    __syncthreads();
    if (step + 1 < steps) loaded = load_line<kE8M0>(x, matrix, loaded_row, step + 1, half, a.length);
    add_step(a, s, sums, thread_row, thread_column, matrix, row, column, step);
    __syncthreads();
  }
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      const i64 m = row + thread_row + i, n = column + thread_column + kThreadsAcross * j;
      store_product<Out>(a, matrix, m, n, static_cast<float>(sums.values[i][j]));
    }
  }
}

using Products = ProductsOf<kGrouped>::Type;

// Compute and store the products of all matrices. Rows of codes must begin at multiples of 16 bytes, and K must be a
// multiple of 32. fraction_bits must be 35, output_bits 23, step 64 and promote 0. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads, 2) matmul_fp4_kernel(Products products) {
  __shared__ Step memory[1];
  for_each_tile<kTile>(products, [&](const ProductArguments& a, const ProductTile& tile) {
    multiply_tile<kScalesAreE8M0, Output>(a, memory[0], tile.matrix, tile.row, tile.column);
  });
}
