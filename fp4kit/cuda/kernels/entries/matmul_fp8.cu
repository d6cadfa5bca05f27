// matmul_fp8: compute matrix products of E4M3 and E5M2 operands without block scales, for units whose terms keep at
// most 13 fraction bits (Hopper's and Ada's FP8 instructions). `a` holds the arguments of a product: the operands a.a
// and a.b (rows of codes along K), a.c and a.out. A result is one element of a product, and its sum is what has been
// added to it so far. A thread block computes one tile of kTile x kTile results at a time, and a thread kSide x kSide
// of them. A line is a row of one of the operands, which is a row or a column of the tile. A step is the 16 or 32
// elements along K that the unit sums at once. A quad is four neighboring elements.
//
// matmul.cu computes products for other units, and products of operands at other addresses.
//
// A term is a product, shifted to the largest exponent E of a step and truncated to an integer in units of 2^(E-F). F
// is a.fraction_bits. To truncate it, a thread adds |a| * |b| to 2^(E-F+23) and rounds toward zero: the term is the low
// bits of the float32. Terms have 15 bits, so two of them are multiplied by their signs and added in one instruction.
#include "matmul.cuh"

constexpr int kTile = 64;                      // number of rows, and of columns, of a tile of results
constexpr int kSide = 4;                       // number of rows, and of columns, of a thread's results
constexpr int kThreadsAcross = kTile / kSide;  // number of threads that share a row of a tile
constexpr int kStep = 32;                      // number of elements of K in shared memory: one or two steps of the unit
constexpr int kQuads = kStep / 4;              // number of groups of four elements in shared memory
constexpr int kNone = -4000;                   // the exponent that stands for an element of zero
constexpr i32 kLeast = -90, kMost = 100;       // the exponents between which float32 can truncate terms
static_assert(kThreadsAcross * kThreadsAcross == kThreads, "one thread per kSide x kSide results");

// The magnitudes of the four elements of a quad, which are read with one load.
struct alignas(16) QuadMagnitudes {
  float values[4];
};
// The exponents of the four elements of a quad, as signed 16-bit integers, two per word. An element that is zero has
// the exponent kNone.
struct alignas(8) QuadExponents {
  u32 words[2];
};

// kStep elements along K of each line (row or column) of a tile.
struct Fp8Lines {
  QuadMagnitudes magnitudes[kQuads][kTile];
  QuadExponents exponents[kQuads][kTile];
  u32 signs[kQuads][kTile];  // a byte per element: 0xFE if it is negative, else 0
  u32 special[2][kTile];     // one word per half of kStep: 1 if an element is infinite or NaN, else 0
};

// kStep elements along K of the rows and columns of a tile, in shared memory.
struct Fp8Step {
  Fp8Lines rows, columns;
};

// Return a * b + c, rounded toward zero to float32, for a, b >= 0 and c > 0. a * b must be exact in float32, and the
// sum must be exact in float64.
FP4KIT_DEVICE float add_product_rz(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  return add_rz(a * b, c);
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

// Return c + low * signs[kFirst] + high * signs[kFirst + 1]. `low` and `high` are the signed 16-bit halves of `terms`.
// signs[i] is byte i of `signs`, a signed byte. kFirst is 0 or 2.
template <int kFirst>
FP4KIT_DEVICE i32 add_signed(u32 terms, u32 signs, i32 c) {
#ifdef __CUDA_ARCH__
  const i32 a = static_cast<i32>(terms), b = static_cast<i32>(signs);
  return kFirst == 0 ? __dp2a_lo(a, b, c) : __dp2a_hi(a, b, c);
#else
  for (int i = 0; i < 2; ++i) {
    c += static_cast<short>(terms >> 16 * i) * static_cast<signed char>(signs >> 8 * (kFirst + i));
  }
  return c;
#endif
}

// Return the exact magnitude of a finite code: E4M3 if kMantissaBits is 3, E5M2 if it is 2. The sign bit of the code is
// ignored. For codes of infinity and NaN, the result is a finite number that must not be used.
template <int kMantissaBits>
FP4KIT_DEVICE float magnitude_of_code(u32 code) {
  return float_of((code & 0x7Fu) << (23 - kMantissaBits)) * (kMantissaBits == 3 ? 0x1p120f : 0x1p112f);
}

// Return sixteen codes of a line, which is row `row` of matrix `matrix` of the operand x, starting at index `first`
// along K. If `row` is not below x.rows, or `first` is not below `length` (K), all codes are 0. `first` and x.row_bytes
// must be multiples of 16, so that the codes never cross the end of a row.
FP4KIT_DEVICE Codes load_line(const ProductOperand& x, i64 matrix, i64 row, i64 first, i64 length) {
  if (row >= x.rows || first >= length) return {};
  return *reinterpret_cast<const Codes*>(x.codes + row_index(x, matrix, row) * x.row_bytes + first);
}

// Decode sixteen codes, which are half `half` (0 or 1) of line number `line`. Store in `lines` the magnitudes,
// exponents and signs of the elements, and a flag that says whether any element is infinite or NaN. kMantissaBits is 3
// for E4M3, 2 for E5M2. The exponent of zero is kNone.
template <int kMantissaBits>
FP4KIT_DEVICE void store_line(Fp8Lines& lines, int line, int half, const Codes& codes) {
  constexpr i32 kBias = kMantissaBits == 3 ? 7 : 15;
  constexpr u32 kFirstSpecial = kMantissaBits == 3 ? 0x7Fu : 0x7Cu;
  u32 special = 0u;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    QuadMagnitudes magnitudes;
    QuadExponents exponents = {};
    u32 signs = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 code = codes.words[q] >> 8 * i & 0xFFu, magnitude = code & 0x7Fu, field = magnitude >> kMantissaBits;
      magnitudes.values[i] = magnitude_of_code<kMantissaBits>(code);
      const i32 exponent = magnitude ? static_cast<i32>(maximum(field, 1u)) - kBias : kNone;
      exponents.words[i / 2] |= static_cast<u32>(exponent & 0xFFFF) << 16 * (i % 2);
      signs |= (code >> 7) * 0xFEu << 8 * i;
      special |= magnitude >= kFirstSpecial ? 1u : 0u;
    }
    lines.magnitudes[4 * half + q][line] = magnitudes;
    lines.exponents[4 * half + q][line] = exponents;
    lines.signs[4 * half + q][line] = signs;
  }
  lines.special[half][line] = special;
}

// Return the sum of one result after a step, computed in float64 term by term. It is right for all elements, infinities
// and NaN included. The step has `count` elements, starting at index `first` along K; elements beyond K count as zero.
// c is the sum before the step. (row, column) is the position of the result in matrix `matrix`; if it is outside of the
// matrix, return 0.
FP4KIT_DEVICE_CALL float add_slowly(const ProductArguments& a, i64 matrix, i64 row, i64 column, i64 first, i64 count,
                                    float c) {
  if (!is_inside(a, row, column)) return 0.0f;
  const i64 m = row_index(a.a, matrix, row), n = row_index(a.b, matrix, column);
  const double zero_power = double_power(a.zero_exponent);
  const double least_a = double_power(a.a.least), least_b = double_power(a.b.least);
  double largest = sum_power(c, zero_power);
  for (i64 k = first; k < first + count; ++k) {
    const double x = k < a.length ? element_at(a.a, m, k) : 0.0f, y = k < a.length ? element_at(a.b, n, k) : 0.0f;
    const bool is_zero = x == 0.0 || y == 0.0;
    largest = maximum(largest, is_zero ? zero_power : term_power(x, least_a) * term_power(y, least_b));
  }
  const double inverse = over(a.fraction_bits, largest);
  double sum = toward_zero(c * inverse);
  for (i64 k = first; k < minimum(first + count, a.length); ++k) {
    sum += toward_zero(static_cast<double>(element_at(a.a, m, k)) * element_at(a.b, n, k) * inverse);
  }
  return static_cast<float>(truncated_sum(sum * (largest * double_power(-a.fraction_bits)), a.output_bits));
}

// The sums of a thread's results. values[i][j] belongs to row thread_row + i and column thread_column + kThreadsAcross
// * j of the tile.
struct Fp8Sums {
  float values[kSide][kSide];
};

// Add one step to the sums of a thread. The step is kQuadsPerStep quads of s, starting at quad number `quad`, and
// `start` is its first index along K. The tile begins at (row, column) of matrix `matrix`, and (thread_row,
// thread_column) is the place of the thread's first result in the tile. A result is computed by add_slowly in two
// cases: if an element of its row or column is infinite or NaN, or if the largest exponent is outside of the range in
// which float32 can truncate terms.
template <int kQuadsPerStep>
FP4KIT_DEVICE void add_step(const ProductArguments& a, const Fp8Step& s, Fp8Sums& sums, int thread_row,
                            int thread_column, i64 matrix, i64 row, i64 column, int quad, i64 start) {
  u32 largest[kSide][kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) largest[i][j] = 0x80008000u;
  }
#pragma unroll 2
  for (int q = quad; q < quad + kQuadsPerStep; ++q) {
    QuadExponents rows[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) rows[i] = s.rows.exponents[q][thread_row + i];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const QuadExponents other = s.columns.exponents[q][thread_column + kThreadsAcross * j];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        largest[i][j] = add_max(rows[i].words[0], other.words[0], largest[i][j]);
        largest[i][j] = add_max(rows[i].words[1], other.words[1], largest[i][j]);
      }
    }
  }
  const int bits = static_cast<int>(a.fraction_bits);
  float anchors[kSide][kSide];  // 2^(E - F + 23)
  i32 totals[kSide][kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const u32 c = bits_of(sums.values[i][j]);
      const i32 c_exponent = c & 0x7FFFFFFFu ? static_cast<i32>(c >> 23 & 0xFFu) - 127 : kNone;
      i32 top = maximum<i32>(static_cast<short>(largest[i][j]), static_cast<short>(largest[i][j] >> 16));
      top = minimum(maximum(maximum(top, c_exponent), kLeast), kMost);
      anchors[i][j] = float_of(static_cast<u32>(top - bits + 23 + 127) << 23);
      const i32 first =
          static_cast<i32>(bits_of(add_product_rz(magnitude_of(sums.values[i][j]), 1.0f, anchors[i][j])) & 0x7FFFFFu);
      totals[i][j] = c >> 31 ? -first : first;
    }
  }
#pragma unroll 2
  for (int q = quad; q < quad + kQuadsPerStep; ++q) {
    QuadMagnitudes rows[kSide];
    u32 row_signs[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      rows[i] = s.rows.magnitudes[q][thread_row + i];
      row_signs[i] = s.rows.signs[q][thread_row + i];
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const QuadMagnitudes other = s.columns.magnitudes[q][thread_column + kThreadsAcross * j];
      const u32 other_signs = s.columns.signs[q][thread_column + kThreadsAcross * j];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        u32 terms[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          terms[k] = bits_of(add_product_rz(rows[i].values[k], other.values[k], anchors[i][j]));
        }
        const u32 signs = (row_signs[i] ^ other_signs) | 0x01010101u;
        totals[i][j] = add_signed<0>(prmt(terms[0], terms[1], 0x5410u), signs, totals[i][j]);
        totals[i][j] = add_signed<2>(prmt(terms[2], terms[3], 0x5410u), signs, totals[i][j]);
      }
    }
  }
  const u32 kept = ~((1u << (23 - a.output_bits)) - 1u);
  const int half = quad / 4;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    u32 row_special = s.rows.special[half][thread_row + i];
    if (kQuadsPerStep == kQuads) row_special |= s.rows.special[1][thread_row + i];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int line = thread_column + kThreadsAcross * j;
      u32 special = row_special | s.columns.special[half][line];
      if (kQuadsPerStep == kQuads) special |= s.columns.special[1][line];
      const i32 top = static_cast<i32>(bits_of(anchors[i][j]) >> 23) - 127 - 23 + bits;
      if (special == 0u && top > kLeast && top < kMost) {
        const float unit = float_of(static_cast<u32>(top - bits + 127) << 23);
        sums.values[i][j] = float_of(bits_of(static_cast<float>(totals[i][j])) & kept) * unit + 0.0f;
      } else {
        sums.values[i][j] =
            add_slowly(a, matrix, row + thread_row + i, column + line, start, 4 * kQuadsPerStep, sums.values[i][j]);
      }
    }
  }
}

// Compute the results of the tile that begins at (row, column) of matrix `matrix`, and store them in a.out as Out
// (store_product). Results outside of the matrix are left out. kRowBits and kColumnBits are the numbers of mantissa
// bits of the operands: 3 for E4M3, 2 for E5M2. A step has kQuadsPerStep quads. If a.promote is not 0, a new sum (a
// chain) begins after every a.promote elements along K, and the chains are added in float32. s is shared memory for one
// step or two. All threads of a thread block must call this function.
template <int kRowBits, int kColumnBits, int kQuadsPerStep, class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Fp8Step& s, i64 matrix, i64 row, i64 column) {
  const int thread = threadIdx.x;
  const int thread_row = thread / kThreadsAcross * kSide, thread_column = thread % kThreadsAcross;
  // The line that the thread loads: two threads per row, then two per column.
  const int line = thread / 2 % kTile, half = thread % 2;
  const bool is_row = thread < 2 * kTile;
  const ProductOperand& x = is_row ? a.a : a.b;
  const i64 loaded_row = (is_row ? row : column) + line;
  Fp8Sums sums, totals;  // totals: with promotion, the sums of the chains that ended
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      const i64 m = row + thread_row + i, n = column + thread_column + kThreadsAcross * j;
      totals.values[i][j] = first_sum(a, matrix, m, n);
      sums.values[i][j] = a.promote ? 0.0f : totals.values[i][j];
    }
  }
  Codes codes = load_line(x, matrix, loaded_row, 16 * half, a.length);
  for (i64 start = 0; start < a.length; start += kStep) {
    if (is_row) {
      store_line<kRowBits>(s.rows, line, half, codes);
    } else {
      store_line<kColumnBits>(s.columns, line, half, codes);
    }
    __syncthreads();
    codes = load_line(x, matrix, loaded_row, start + kStep + 16 * half, a.length);
#pragma unroll 1
    for (int quad = 0; quad < kQuads; quad += kQuadsPerStep) {
      const i64 first = start + 4 * quad, done = first + 4 * kQuadsPerStep;
      if (first >= a.length) break;
      add_step<kQuadsPerStep>(a, s, sums, thread_row, thread_column, matrix, row, column, quad, first);
      if (a.promote && (done % a.promote == 0 || done >= a.length)) {
        for (int i = 0; i < kSide; ++i) {
          for (int j = 0; j < kSide; ++j) {
            totals.values[i][j] += sums.values[i][j];
            sums.values[i][j] = 0.0f;
          }
        }
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      const i64 m = row + thread_row + i, n = column + thread_column + kThreadsAcross * j;
      store_product<Out>(a, matrix, m, n, a.promote ? totals.values[i][j] : sums.values[i][j]);
    }
  }
}

using Products = ProductsOf<kGrouped>::Type;

// Compute the products of all matrices, or of all products of a group, and store them. The kernel is launched for
// fp4kit.matmul and fp4kit.matmul_grouped, if both operands have 8-bit elements without block scales and these
// conditions hold: rows of codes begin at multiples of 16 bytes, K is a multiple of 16, a step has 16 or 32 elements,
// and fraction_bits and output_bits are at most 13. A thread block takes one tile at a time. Launch with any number of
// thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2) matmul_fp8_kernel(Products products) {
  __shared__ Fp8Step memory[1];
  for_each_tile<kTile>(products, [&](const ProductArguments& a, const ProductTile& tile) {
    multiply_tile<kRowsAreE5M2 ? 2 : 3, kColumnsAreE5M2 ? 2 : 3, kWideStep ? 8 : 4, Output>(a, memory[0], tile.matrix,
                                                                                            tile.row, tile.column);
  });
}
