// matmul_truncate: compute matrix products for units that add single products (the adder `truncate`), if the
// significands of the elements have at most 11 bits. `a` holds the arguments of a product: the operands a.a and a.b
// (rows of codes along K), a.c and a.out. A thread block computes one tile of kTile x kTile results at a time, and a
// thread kSide x kSide of them. A line is a row of an operand, which is a row or a column of the tile.
//
// A term is a product, truncated toward zero to an integer in units of 2^(E-F). E is the largest exponent of a step and
// F is a.fraction_bits. A Term, a float or double, has more fraction bits than the sum of all terms of a step. The
// sum starts at the anchor, a Term of 1.5 * 2^(E-F) * 2^(its fraction bits), and products are added to it by fused
// multiply-adds that round down. Each then adds the floor of a product in these units.
//
// The floor of a negative product is one less than the truncated product, unless the product is an integer. Elements of
// rows are therefore made larger in magnitude, by so little that no product reaches the next integer. Then each
// negative product is one too low, and the anchor includes their number.
#include "matmul.cuh"

constexpr int kTile = 64;                      // number of rows, and of columns, of a tile of results
constexpr int kSide = 4;                       // number of rows, and of columns, of a thread's results
constexpr int kThreadsAcross = kTile / kSide;  // number of threads that share a row of a tile
constexpr int kDepth = 32;                     // number of elements of K in shared memory; also of a block with a scale
// The exponents that stand for zero, and for infinity and NaN. With kNone, a sum of two exponents is below -300 or,
// beside kSpecial, above kMost. With kSpecial twice, it fits in 16 bits.
constexpr int kNone = -4000, kSpecial = 16000;
constexpr u32 kNoProducts = 0xFED4FED4u;   // a pair of -300, less than the exponent of any product but zero
constexpr int kLeast = -100, kMost = 100;  // exponents E for which no sum is subnormal or infinite
static_assert(kThreadsAcross * kThreadsAcross == kThreads, "one thread per kSide x kSide results");
static_assert(kStep <= kDepth && kDepth % kStep == 0, "steps divide the elements in shared memory");

// The bits of a Term, and their parts. kNudge is the bit by which elements of rows become larger: it is below 2^-F for
// the largest F (26 for double, 14 for float), and products with it are exact. kZero is the upper bits of a number that
// stands for zero, 2^-300 or 2^-132: its products are below 2^(kLeast-F). The lower kLowBits of elements are 0.
template <class Term>
struct TermBits;
template <>
struct TermBits<double> {
  using Bits = u64;
  static constexpr int kFraction = 52, kBias = 1023;
  static constexpr Bits kNudge = Bits{1} << 12;
  static constexpr int kLowBits = 32;
  static constexpr u32 kZero = (1023 - 300) << 20;
  static FP4KIT_DEVICE_MEMBER Bits of(double x) { return double_bits_of(x); }
  static FP4KIT_DEVICE_MEMBER double number(Bits bits) { return double_of(bits); }
};
template <>
struct TermBits<float> {
  using Bits = u32;
  static constexpr int kFraction = 23, kBias = 127;
  static constexpr Bits kNudge = 1u << 7;
  static constexpr int kLowBits = 0;
  static constexpr u32 kZero = 1u << 17;
  static FP4KIT_DEVICE_MEMBER Bits of(float x) { return bits_of(x); }
  static FP4KIT_DEVICE_MEMBER float number(Bits bits) { return float_of(bits); }
};

using Terms = TermBits<Term>;
using Bits = Terms::Bits;

// Return a * b + c, rounded down. a * b must be exact or tiny, and c positive and larger than |a * b|.
FP4KIT_DEVICE Term add_product_rd(Term a, Term b, Term c) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Term) == 8) {
    return __fma_rd(a, b, c);
  } else {
    return __fmaf_rd(a, b, c);
  }
#else
  const Term product = a * b, sum = product + c;
  return product < sum - c ? Terms::number(Terms::of(sum) - 1) : sum;
#endif
}

// Compute max(a + b, c) for two pairs of signed 16-bit integers at once, and return both results in one word. Each
// argument holds one integer in its low half and one in its high half. a + b must fit in 16 bits.
FP4KIT_DEVICE u32 add_max(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __viaddmax_s16x2(a, b, c);
#else
  u32 result = 0u;
  for (int i = 0; i < 32; i += 16) {
    const i32 sum = static_cast<short>(a >> i) + static_cast<short>(b >> i), other = static_cast<short>(c >> i);
    result |= static_cast<u32>(maximum(sum, other) & 0xFFFF) << i;
  }
  return result;
#endif
}

// Values of two neighboring lines, which are read with one load.
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T values[2];
};

// kDepth elements along K of each line of an operand in a tile.
struct Lines {
  Pair<Term> elements[kDepth][kTile / 2];
  Pair<u32> exponents[kDepth / 2][kTile / 2];  // of two elements, as signed 16-bit integers
  u32 signs[kTile];                            // a bit per element: 1 if it is negative
};

// kDepth elements along K of the rows and columns of a tile, in shared memory.
struct Stage {
  Lines rows, columns;
};

// Eight codes of kBits bits, and the code of their E8M0 scale.
template <int kBits>
struct alignas(kBits < 16 ? kBits : 16) EightCodes {
  u32 words[kBits / 4];
};
template <int kBits>
struct ScaledCodes {
  EightCodes<kBits> codes;
  u32 scale;
};

// Return eight codes of a line, which is row `row` of matrix `matrix` of the operand x, starting at index `first` along
// K, and their scale: that of 1 if x has none. Outside of the operand, codes are 0. `first` and `length` (K) must be
// multiples of 8.
template <int kBits>
FP4KIT_DEVICE ScaledCodes<kBits> load_line(const ProductOperand& x, i64 matrix, i64 row, i64 first, i64 length) {
  if (row >= x.rows || first >= length) return {};
  const i64 line = row_index(x, matrix, row);
  const u8* from = x.codes + line * x.row_bytes + first * kBits / 8;
  const u32 scale = x.scales ? x.scales[line * x.row_scales + first / kDepth] : 127u;
  return {*reinterpret_cast<const EightCodes<kBits>*>(from), scale};
}

// Decode eight codes, number `group` of line number `line`, and store them in `lines`.
template <bool kIsRow, int kBits>
FP4KIT_DEVICE void store_line(const ProductOperand& x, Lines& lines, int line, int group,
                              const ScaledCodes<kBits>& loaded) {
  const u32 mask = static_cast<u32>(x.magnitude_mask), special = static_cast<u32>(x.first_special);
  const int shift = static_cast<int>(x.shift), least = static_cast<int>(x.least);
  const float factor = float_of(static_cast<u32>(least + 253) << 23);  // 2^(least + 126)
  const int scale = static_cast<int>(loaded.scale) - 127;
  u32 signs = 0u, exponents[4] = {};
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const u32 code = loaded.codes.words[i * kBits / 32] >> i * kBits % 32, magnitude = code & mask;
    const float value = float_of(magnitude << shift) * factor;
    i32 exponent = maximum(static_cast<int>(bits_of(value) >> 23) + (scale - 127), least + scale);
    if (magnitude == 0u) exponent = kNone;
    if (magnitude >= special || loaded.scale == 255u) exponent = kSpecial;
    exponents[i / 2] |= static_cast<u32>(exponent & 0xFFFF) << 16 * (i % 2);
    // The sign and the upper bits of the element. Its other bits are 0, because the significand is short.
    u32 bits = static_cast<u32>(Terms::of(value) >> Terms::kLowBits);
    if (Terms::kLowBits) bits += static_cast<u32>(scale) << 20;
    bits |= code << static_cast<int>(x.sign_shift) & 0x80000000u;
    if (magnitude == 0u) bits = Terms::kZero;
    signs = signs << 1 | bits >> 31;
    const Bits element = static_cast<Bits>(bits) << Terms::kLowBits | (kIsRow ? Terms::kNudge : 0u);
    lines.elements[8 * group + i][line / 2].values[line % 2] = Terms::number(element);
  }
  for (int i = 0; i < 4; ++i) lines.exponents[4 * group + i][line / 2].values[line % 2] = exponents[i];
  reinterpret_cast<u8*>(&lines.signs[line])[group] = static_cast<u8>(signs);
}

// Return the block scale of element k of a row, or 1 if the operand x has no block scales.
FP4KIT_DEVICE double scale_at(const ProductOperand& x, i64 row, i64 k) {
  return x.scales ? x.scale_values[x.scales[row * x.row_scales + k / x.block]] : 1.0;
}

// Return the sum of one result after a step, computed in float64 term by term. It is right for all elements, infinities
// and NaN included. The step starts at index `first` along K; elements beyond K count as zero. c is the sum before the
// step. (row, column) is the position of the result in matrix `matrix`; if it is outside of the matrix, return 0.
FP4KIT_DEVICE_CALL float add_slowly(const ProductArguments& a, i64 matrix, i64 row, i64 column, i64 first, float c) {
  if (!is_inside(a, row, column)) return 0.0f;
  const i64 m = row_index(a.a, matrix, row), n = row_index(a.b, matrix, column);
  const double zero_power = double_power(a.zero_exponent);
  const double least_a = double_power(a.a.least), least_b = double_power(a.b.least);
  double terms[kStep], largest = sum_power(c, zero_power);
#pragma unroll 1
  for (int i = 0; i < kStep; ++i) {
    const i64 k = first + i;
    const bool is_element = k < a.length;
    const double x = is_element ? element_at(a.a, m, k) : 0.0f, y = is_element ? element_at(a.b, n, k) : 0.0f;
    const double scale = is_element ? scale_at(a.a, m, k) * scale_at(a.b, n, k) : 1.0;
    const double power = x == 0.0 || y == 0.0 ? zero_power : term_power(x, least_a) * term_power(y, least_b) * scale;
    terms[i] = x * y * scale;
    largest = maximum(largest, power);
  }
  return static_cast<float>(sum_of_terms(c, terms, kStep, largest, a.fraction_bits, a.output_bits));
}

// A thread's results, or other numbers of the results. [i][j] belongs to row row_of(i) and column column_of(j) of the
// tile.
template <class T>
using Results = T[kSide][kSide];

FP4KIT_DEVICE int row_of(int i) {
  return static_cast<int>(threadIdx.x) / kThreadsAcross * kSide + i;
}
FP4KIT_DEVICE int column_of(int j) {
  return j / 2 * (kTile / 2) + static_cast<int>(threadIdx.x) % kThreadsAcross * 2 + j % 2;
}

// Read the numbers at a thread's rows or columns from shared memory.
template <class T>
FP4KIT_DEVICE void read_rows(const Pair<T>* from, T* to) {
#pragma unroll
  for (int i = 0; i < kSide; i += 2) {
    const Pair<T> pair = from[row_of(i) / 2];
    to[i] = pair.values[0], to[i + 1] = pair.values[1];
  }
}
template <class T>
FP4KIT_DEVICE void read_columns(const Pair<T>* from, T* to) {
#pragma unroll
  for (int j = 0; j < kSide; j += 2) {
    const Pair<T> pair = from[column_of(j) / 2];
    to[j] = pair.values[0], to[j + 1] = pair.values[1];
  }
}

// Add one step to the sums of a thread: elements `first` to first + kStep - 1 of s. `start` is the index of the first
// along K. A result is computed by add_slowly if an element of its row or column is infinite or NaN, or if E is not
// between kLeast and kMost.
FP4KIT_DEVICE void add_step(const ProductArguments& a, const Stage& s, Results<Term>& sums, const ProductTile& tile,
                            int first, i64 start) {
  Results<u32> largest;
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) largest[n / kSide][n % kSide] = kNoProducts;
#pragma unroll 8
  for (int k = first / 2; k < (first + kStep) / 2; ++k) {
    u32 rows[kSide], columns[kSide];
    read_rows(s.rows.exponents[k], rows);
    read_columns(s.columns.exponents[k], columns);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) largest[i][j] = add_max(rows[i], columns[j], largest[i][j]);
    }
  }
  // E of each result, and the smallest and largest E of the thread.
  constexpr Bits kHalf = Bits{1} << (Terms::kFraction - 1), kMagnitude = ~Bits{0} >> 1;
  Results<i32> exponents;
  i32 low = kMost, high = kLeast;
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) {
    const u32 pair = largest[n / kSide][n % kSide];
    const i32 product = maximum<i32>(static_cast<short>(pair), static_cast<short>(pair >> 16));
    const Bits c = Terms::of(sums[n / kSide][n % kSide]) & kMagnitude;
    const i32 exponent = maximum(product, static_cast<i32>(c >> Terms::kFraction) - Terms::kBias);
    exponents[n / kSide][n % kSide] = exponent;
    low = minimum(low, exponent);
    high = maximum(high, exponent);
  }
  u32 slow = 0u;  // a bit per result that add_slowly computes
  Term kept[kSide * kSide];
  if (low < kLeast || high > kMost) {
#pragma unroll
    for (int n = 0; n < kSide * kSide; ++n) {
      i32& exponent = exponents[n / kSide][n % kSide];
      const Bits c = Terms::of(sums[n / kSide][n % kSide]) & kMagnitude;
      const bool is_zero = largest[n / kSide][n % kSide] == kNoProducts && c == 0u;
      slow |= (exponent < kLeast && !is_zero) || exponent > kMost ? 1u << n : 0u;
      exponent = minimum(maximum(exponent, kLeast), kMost);
      kept[n] = sums[n / kSide][n % kSide];
    }
  }
  const u32 step_mask = (0xFFFFFFFFu >> (32 - kStep)) << first;
  const int unit = Terms::kFraction + Terms::kBias - static_cast<int>(a.fraction_bits);
  const Bits base = (static_cast<Bits>(unit) << Terms::kFraction) + kHalf;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const u32 row_signs = s.rows.signs[row_of(i)];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const Bits c = Terms::of(sums[i][j]);
      const u32 negative = __popc((row_signs ^ s.columns.signs[column_of(j)]) & step_mask) + (c > kMagnitude ? 1 : 0);
      const Bits anchor = (static_cast<Bits>(exponents[i][j]) << Terms::kFraction) + base;
      // c gets a lower bit as elements of rows do. Its last bit may be set only if it is below 2^(E-F) in float.
      sums[i][j] = add_product_rd(Terms::number(c | 1u), Term{1}, Terms::number(anchor + negative));
    }
  }
#pragma unroll 8
  for (int k = first; k < first + kStep; ++k) {
    Term rows[kSide], columns[kSide];
    read_rows(s.rows.elements[k], rows);
    read_columns(s.columns.elements[k], columns);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) sums[i][j] = add_product_rd(rows[i], columns[j], sums[i][j]);
    }
  }
  const Bits cut = (Bits{1} << (Terms::kFraction - static_cast<int>(a.output_bits))) - 1;
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) {
    Term& sum = sums[n / kSide][n % kSide];
    const Bits anchor = (Terms::of(sum) >> Terms::kFraction << Terms::kFraction) | kHalf;
    sum = Terms::number(Terms::of(sum - Terms::number(anchor)) & ~cut);
  }
  if (slow == 0u) return;
#pragma unroll 1
  for (int n = 0; n < kSide * kSide; ++n) {
    if (!(slow >> n & 1u)) continue;
    const i64 row = tile.row + row_of(n / kSide), column = tile.column + column_of(n % kSide);
    kept[n] = add_slowly(a, tile.matrix, row, column, start, static_cast<float>(kept[n]));
  }
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) {
    if (slow >> n & 1u) sums[n / kSide][n % kSide] = kept[n];
  }
}

// Compute the results of a tile, and store them in a.out as Out (store_product). Results outside of the matrix are left
// out. If a.promote is not 0, a new sum (a chain) begins after every a.promote elements along K, and the chains are
// added in float32. All threads of a thread block must call this function.
template <class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Stage& s, const ProductTile& tile) {
  // Each thread loads eight elements of a row and eight of a column.
  const int line = threadIdx.x % kTile, group = threadIdx.x / kTile;
  Results<Term> sums;
  Results<float> totals;         // with promotion, the sums of the chains that ended
  float numbers[kSide * kSide];  // initial sums, later results; loops of one body use fewer registers
#pragma unroll 1
  for (int n = 0; n < kSide * kSide; ++n) {
    numbers[n] = first_sum(a, tile.matrix, tile.row + row_of(n / kSide), tile.column + column_of(n % kSide));
  }
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) {
    totals[n / kSide][n % kSide] = numbers[n];
    sums[n / kSide][n % kSide] = a.promote ? 0.0f : numbers[n];
  }
  auto rows = load_line<kRowBits>(a.a, tile.matrix, tile.row + line, 8 * group, a.length);
  auto columns = load_line<kColumnBits>(a.b, tile.matrix, tile.column + line, 8 * group, a.length);
  for (i64 start = 0; start < a.length; start += kDepth) {
    store_line<true>(a.a, s.rows, line, group, rows);
    store_line<false>(a.b, s.columns, line, group, columns);
    __syncthreads();
    const i64 next = start + kDepth + 8 * group;
    rows = load_line<kRowBits>(a.a, tile.matrix, tile.row + line, next, a.length);
    columns = load_line<kColumnBits>(a.b, tile.matrix, tile.column + line, next, a.length);
#pragma unroll 1
    for (int first = 0; first < kDepth && start + first < a.length; first += kStep) {
      add_step(a, s, sums, tile, first, start + first);
      const i64 done = start + first + kStep;
      if (a.promote && (done % a.promote == 0 || done >= a.length)) {
        for (int i = 0; i < kSide; ++i) {
          for (int j = 0; j < kSide; ++j) {
            totals[i][j] = promoted(a, tile.matrix, tile.row + row_of(i), tile.column + column_of(j), start + first,
                                    totals[i][j], static_cast<float>(sums[i][j]));
            sums[i][j] = 0.0f;
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kSide * kSide; ++n) {
    numbers[n] = a.promote ? totals[n / kSide][n % kSide] : static_cast<float>(sums[n / kSide][n % kSide]);
  }
#pragma unroll 1
  for (int n = 0; n < kSide * kSide; ++n) {
    store_product<Out>(a, tile.matrix, tile.row + row_of(n / kSide), tile.column + column_of(n % kSide), numbers[n]);
  }
}

using Products = ProductsOf<kGrouped>::Type;

// Compute the products of all matrices, or of all products of a group, and store them. The kernel is launched for
// fp4kit.matmul and fp4kit.matmul_grouped; cuda/matmul.py states the conditions. Row codes have kRowBits bits and
// column codes kColumnBits, and a step has kStep elements. A thread block takes one tile at a time. Launch with any
// number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2) matmul_truncate_kernel(Products products) {
  __shared__ Stage memory[1];
  for_each_tile<kTile>(
      products, [&](const ProductArguments& a, const ProductTile& tile) { multiply_tile<Output>(a, memory[0], tile); });
}
