// matmul_fp4: compute matrix products of block-scaled E2M1 operands as Blackwell's FP4 instructions do, in steps of 64
// elements along K. `a` holds the arguments of a product: the operands a.a and a.b (rows of codes along K), a.c and
// a.out. A result is one element of a product, and its sum is what has been added to it so far. A thread block computes
// one tile of kTile x kTile results at a time, and a thread kSide x kSide of them. A line is a row of one of the
// operands, which is a row or a column of the tile. Each line has four groups of 16 elements per step, with one scale
// per group. A term is the sum of the 16 products of a group, times the two scales. To be added, terms are shifted to
// the largest exponent in the step, and may lose bits then.
//
// matmul.cu computes products with other steps, and products of operands at other addresses.
//
// Elements are integers in units of 1/2, so the sum of a group of 16 products is an integer dot product, which integer
// tensor cores compute. The terms of a step are integers, too. A term is a group sum times the integer scales of its
// row and column. An integer scale counts the units of the smallest scale of its row or column in the step. Usually no
// term loses bits when it is shifted to the largest exponent. Then the step is an exact sum, which is truncated once. A
// thread checks this by exponents. If a term loses bits, add_slowly adds the step term by term.
#include "matmul.cuh"

constexpr int kTile = 64;                         // number of rows, and of columns, of a tile of results
constexpr int kSide = 4;                          // number of rows, and of columns, of a thread's results
constexpr int kStep = 64;                         // number of elements of K per step
constexpr int kGroups = kStep / 16;               // number of groups of 16 elements per step
constexpr int kWords = 4;                         // number of words of a group: four elements per word
constexpr int kWarpRows = 32, kWarpColumns = 16;  // the results of a warp
constexpr int kWarpsAcross = kTile / kWarpColumns;
static_assert(kTile / kWarpRows * kWarpsAcross * 32 == kThreads, "the warps cover a tile");
// A bit of a number is kept if it is at most fraction_bits (35) below the largest exponent of the step.
constexpr i32 kBelow = 35 - 23;     // C, which has 23 fraction bits, is kept down to this much below the terms
constexpr i32 kAbove = 35 - 8;      // terms keep their 8 fraction bits: 2 of elements in 1/2, and 6 of two E4M3 scales
constexpr int kMostBits = 14;       // the largest difference of the exponents of a line's scales, if they are integers
constexpr int kUnusable = -100000;  // the bottom of a line whose scales cannot be integers, so that the check fails

// Sixteen elements of a line (row or column), as signed bytes in units of 1/2: one word of four elements from each of
// the kGroups groups of a step.
struct alignas(16) StepWords {
  i32 groups[kGroups];
};

// The exponents of the largest and the smallest scale of a line (row or column) in one step, where scales of zero do
// not count. They tell whether the sum of the step can be computed without losing bits (loses_no_bits, add_carefully).
// If all scales are zero, top is -1000 and bottom is 1000.
struct alignas(16) ScaleExponents {
  double unit;  // half of the scale that a factor of 1 stands for, because elements are in units of 1/2
  i32 top;      // the largest exponent of a scale
  i32 bottom;   // the smallest exponent of a scale; kUnusable if the scales cannot be integers
};

// The elements and scales of all rows, or of all columns, of a tile in one step.
struct Fp4Lines {
  StepWords words[kTile][kWords];  // word w of a line is at place_of(line, w)
  i32 factors[kGroups][kTile];     // the integer scales; 0 for zero scales, and if the scales cannot be integers
  ScaleExponents exponents[kTile];
};

// The elements and scales of the rows and columns of a tile in one step, in shared memory.
struct Fp4Step {
  Fp4Lines rows, columns;
};

// What a thread loads per step, before it is decoded: codes of one line, and scale codes of one line.
struct Loaded {
  Codes codes;  // half of a line's codes
  u32 scales;   // one scale code of a line per group
};

// Return the index at which word `word` (0 to 3) of line number `line` is stored in Fp4Lines::words. The words of a
// line are stored in an order that depends on the line, so that the threads of a warp access different banks of shared
// memory.
FP4KIT_DEVICE int place_of(int line, int word) {
  return word ^ (line >> 1 & 3);
}

// Return four elements as signed bytes, in units of 1/2, from four E2M1 codes. The codes are the lower 16 bits of
// `codes`, and the first one has the lowest bits. Its element is the lowest byte of the result. -0 becomes 0.
FP4KIT_DEVICE u32 integers_of(u32 codes) {
  const u32 magnitudes = codes & 0x7777u;
  const u32 positive = prmt(0x03020100u, 0x0C080604u, magnitudes);
  const u32 negative = prmt(0xFDFEFF00u, 0xF4F8FAFCu, magnitudes);
  const u32 mask = prmt(0x0000FF00u, 0u, codes >> 3 & 0x1111u);
  return (positive & ~mask) | (negative & mask);
}

// The position of a thread's kSide x kSide results in its tile: rows row + 8 i and columns column + 8 (j / 2) + j % 2,
// for i and j from 0 to 3.
struct Place {
  int row, column;

  FP4KIT_DEVICE_MEMBER int row_of(int i) const { return row + 8 * i; }
  FP4KIT_DEVICE_MEMBER int column_of(int j) const { return column + 8 * (j / 2) + j % 2; }
};

// Return the sum of 16 products, in units of 1/4: those of group g (0 to 3) of the step s, for one row and one column
// of a tile. Scales are not applied. Tensor cores are not used.
FP4KIT_DEVICE i32 group_sum(const Fp4Step& s, int row, int column, int g) {
  i32 sum = 0;
  for (int word = 0; word < kWords; ++word) {
    const i32 a = s.rows.words[row][place_of(row, word)].groups[g];
    const i32 b = s.columns.words[column][place_of(column, word)].groups[g];
    for (int k = 0; k < 32; k += 8) sum += static_cast<signed char>(a >> k) * static_cast<signed char>(b >> k);
  }
  return sum;
}

// The elements of a step that a thread passes to the tensor cores: word `lane % 4` of the lines.
struct Fragments {
  StepWords lines[2];
};

// Return the elements of two lines of a tile, `line` and `line` + 8, that this thread passes to the tensor cores: one
// word (threadIdx.x % 4) of each group.
FP4KIT_DEVICE Fragments load_fragments(const Fp4Lines& lines, int line) {
  const int word = threadIdx.x % 4;
  return {lines.words[line][place_of(line, word)], lines.words[line + 8][place_of(line + 8, word)]};
}

// The sums of the products of a group, for two rows and all columns of a thread. They are in units of 1/4, and at most
// 16 * 144 in magnitude.
struct GroupSums {
  i32 values[2][kSide];
};

// Return the sums of products of group g, in units of 1/4, for two rows of this thread (numbers i and i + 1 of `place`)
// and all columns of this thread. Scales are not applied. Tensor cores compute the sums from the fragments, which come
// from load_fragments. Before compute capability 8.0, and on the host, the fragments are not used; each thread reads
// its rows and columns from s. All threads of a warp must call this function.
FP4KIT_DEVICE GroupSums group_sums(const Fp4Step& s, const Fragments& rows, const Fragments& columns,
                                   const Place& place, int i, int g) {
  GroupSums sums = {};
#pragma unroll
  for (int j = 0; j < kSide; j += 2) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(sums.values[0][j]), "=r"(sums.values[0][j + 1]), "=r"(sums.values[1][j]), "=r"(sums.values[1][j + 1])
        : "r"(rows.lines[0].groups[g]), "r"(rows.lines[1].groups[g]), "r"(columns.lines[j / 2].groups[g]), "r"(0));
#else
    for (int m = 0; m < 2; ++m) {
      for (int n = j; n < j + 2; ++n) sums.values[m][n] = group_sum(s, place.row_of(i + m), place.column_of(n), g);
    }
#endif
  }
  return sums;
}

// Store the integer scales (factors) and the exponents of line number `line` in `lines`, computed from the codes of its
// four scales. `codes` holds one code per byte, the first in the lowest byte: E8M0 codes if kE8M0, otherwise E4M3
// codes, whose sign is ignored. A scale of zero has the factor 0.
//
// The scales cannot be integers if one is NaN, or if the exponents of scales other than zero differ by more than
// kMostBits or are not all in [-40, 40]. Then the factors become 0, and the bottom of the exponents becomes kUnusable.
template <bool kE8M0>
FP4KIT_DEVICE void store_scales(Fp4Lines& lines, int line, u32 codes) {
  i32 factors[kGroups], exponents[kGroups];
  ScaleExponents e = {1.0, -1000, 1000};
  bool usable = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const u32 code = codes >> 8 * g & 0xFFu;
    if (kE8M0) {
      factors[g] = 1;
      exponents[g] = static_cast<i32>(code) - 127;
      usable = usable && code != 255u;
    } else {
      const u32 field = code >> 3 & 15u;
      factors[g] = static_cast<i32>((code & 7u) + (field ? 8u : 0u));
      exponents[g] = static_cast<i32>(maximum(field, 1u)) - 7;
      usable = usable && (code & 0x7Fu) != 0x7Fu;
    }
    if (factors[g]) {
      e.top = maximum(e.top, exponents[g]);
      e.bottom = minimum(e.bottom, exponents[g]);
    }
  }
  const bool any = e.top >= e.bottom;
  usable = usable && e.top - e.bottom <= kMostBits && (!any || (e.bottom >= -40 && e.top <= 40));
  if (usable && any) e.unit = double_power(e.bottom - 1 - (kE8M0 ? 0 : 3));
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    lines.factors[g][line] = usable && factors[g] ? factors[g] << (exponents[g] - e.bottom) : 0;
  }
  if (!usable) e.bottom = kUnusable;
  lines.exponents[line] = e;
}

// Return 32 codes of a line: half number `half` (0 or 1) of its codes in step number `step`. The line is row `row` of
// matrix number `matrix` of the operand x. If the row is not below x.rows, or the half begins beyond `length` (K), all
// codes are 0.
FP4KIT_DEVICE Codes load_codes(const ProductOperand& x, i64 matrix, i64 row, i64 step, int half, i64 length) {
  Codes codes = {};
  const i64 first = step * kStep + half * (kStep / 2);
  if (row < x.rows && first < length) {
    codes = *reinterpret_cast<const Codes*>(x.codes + row_index(x, matrix, row) * x.row_bytes + first / 2);
  }
  return codes;
}

// Return the four scale codes of a line in step number `step`, one per byte, the first in the lowest byte. The line is
// row `row` of matrix `matrix` of the operand x. If the row is not below x.rows, return 0. Beyond `length` (K), E4M3
// codes are 0, but E8M0 codes repeat the last code, because no E8M0 scale is zero.
template <bool kE8M0>
FP4KIT_DEVICE u32 load_scales(const ProductOperand& x, i64 matrix, i64 row, i64 step, i64 length) {
  if (row >= x.rows) return 0u;
  const u8* scales = x.scales + row_index(x, matrix, row) * x.row_scales;
  const u32 groups = static_cast<u32>((length + 15) / 16), per_scale = static_cast<u32>(x.block / 16);
  u32 codes = 0;
#pragma unroll
  for (u32 g = 0; g < kGroups; ++g) {
    u32 group = static_cast<u32>(step) * kGroups + g;
    if (!kE8M0 && group >= groups) break;
    group = minimum(group, groups - 1);
    const u32 block = per_scale == 1 ? group : per_scale == 2 ? group >> 1 : group / per_scale;
    codes |= static_cast<u32>(scales[block]) << 8 * g;
  }
  return codes;
}

// Store 32 elements of line number `line` in `lines`, as signed bytes in units of 1/2. `codes` holds their codes, which
// are half number `half` (0 or 1) of the line's codes in a step. The other half does not change.
FP4KIT_DEVICE void store_codes(Fp4Lines& lines, int line, int half, const Codes& codes) {
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    i32* groups = lines.words[line][place_of(line, word)].groups;
#pragma unroll
    for (int g = 0; g < kGroups / 2; ++g) {
      const u32 pair = codes.words[2 * g + word / 2];
      groups[half * (kGroups / 2) + g] = static_cast<i32>(integers_of(word % 2 ? pair >> 16 : pair & 0xFFFFu));
    }
  }
}

// Return the sum of one result after step number `step`, computed term by term, as the FP4 instruction defines it. The
// function reads codes and scales from the operands. c is the sum before the step. (row, column) is the position of the
// result in matrix `matrix`; if it is outside of the matrix, return 0.
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

// The sums of a thread's results, as exact doubles. values[i][j] belongs to row place.row_of(i) and column
// place.column_of(j).
struct Fp4Sums {
  double values[kSide][kSide];
};

// Return exact * unit + c, truncated toward zero to 23 fraction bits of its significand. This is the sum of a result
// after a step in which no term loses bits: c is the sum before the step, and exact * unit is the sum of the terms.
// `exact` must be an integer below 2^52 in magnitude.
FP4KIT_DEVICE double add_exactly(double exact, double unit, double c) {
  return double_of(double_bits_of(fma_rn(exact, unit, c)) & ~((u64{1} << 29) - 1));
}

// Add step number `step`, whose elements are in s, to the sums of a thread, one result at a time. If no term of a
// result loses bits, add_exactly is used, otherwise add_slowly. `place` says which results of the tile the thread has,
// and the tile begins at (row, column) of matrix `matrix`. add_step calls this function if loses_no_bits is false.
FP4KIT_DEVICE_CALL void add_carefully(const ProductArguments& a, const Fp4Step& s, Fp4Sums& sums, const Place& place,
                                      i64 matrix, i64 row, i64 column, i64 step) {
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      const int m = place.row_of(i), n = place.column_of(j);
      const ScaleExponents x = s.rows.exponents[m], y = s.columns.exponents[n];
      const double c = sums.values[i][j];
      // From `lowest` on, the terms shift no bit of C out. Up to `highest`, C shifts no bit of a term out.
      const i32 lowest = x.top + y.top - kBelow, highest = x.bottom + y.bottom + kAbove;
      const i32 exponent = static_cast<i32>(double_bits_of(c) >> 52 & 0x7FFu) - 1023;
      if (highest - lowest >= kBelow && (c == 0.0 || (lowest <= exponent && exponent <= highest))) {
        i64 exact = 0;
        for (int g = 0; g < kGroups; ++g) {
          exact += static_cast<i64>(group_sum(s, m, n, g) * s.rows.factors[g][m]) * s.columns.factors[g][n];
        }
        sums.values[i][j] = add_exactly(static_cast<double>(exact), x.unit * y.unit, c);
      } else {
        sums.values[i][j] = add_slowly(a, matrix, row + m, column + n, step, c);
      }
    }
  }
}

// Return true if no term loses bits in any result of a thread in this step, so that add_exactly may be used for all of
// them. s holds the step, `place` says which results the thread has, and `sums` are their sums before the step. The
// function checks the largest and smallest exponents of the thread's rows and columns, so the result may be false
// although no bits are lost.
FP4KIT_DEVICE bool loses_no_bits(const Fp4Step& s, const Place& place, const Fp4Sums& sums) {
  i32 row_top = -1000, row_bottom = 1000, column_top = -1000, column_bottom = 1000;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const ScaleExponents& x = s.rows.exponents[place.row_of(i)];
    const ScaleExponents& y = s.columns.exponents[place.column_of(i)];
    row_top = maximum(row_top, x.top);
    row_bottom = minimum(row_bottom, x.bottom);
    column_top = maximum(column_top, y.top);
    column_bottom = minimum(column_bottom, y.bottom);
  }
  const i32 lowest = row_top + column_top - kBelow, highest = row_bottom + column_bottom + kAbove;
  // The exponent of a sum is checked by the upper half of its bits.
  const u32 least = static_cast<u32>(maximum(lowest + 1023, 0)) << 20;
  const u32 range = (static_cast<u32>(maximum(minimum(highest, 1023), -1024) + 1024) << 20) - least;
  bool keeps = highest - lowest >= kBelow;  // no term shifts bits of another out
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const u32 magnitude = static_cast<u32>(double_bits_of(sums.values[i][j]) >> 32) & 0x7FFFFFFFu;
      keeps = keeps && (magnitude == 0u || magnitude - least < range);
    }
  }
  return keeps;
}

// Add step number `step`, whose elements are in s, to the sums of a thread. `place` says which results of the tile the
// thread has, and the tile begins at (row, column) of matrix `matrix`. If a term may lose bits (loses_no_bits is
// false), all sums of the thread are computed by add_carefully. All threads of a warp must call this function.
FP4KIT_DEVICE void add_step(const ProductArguments& a, const Fp4Step& s, Fp4Sums& sums, const Place& place, i64 matrix,
                            i64 row, i64 column, i64 step) {
  // Integers up to 2^51 are added to the bits of 1.5 * 2^52, so that no instruction converts them to double.
  constexpr double kZero = 0x1.8p52;
  const bool keeps = loses_no_bits(s, place, sums);
  const Fragments fragments = load_fragments(s.columns, place.column / 8 * 8 + threadIdx.x % 32 / 4);
#pragma unroll
  for (int first = 0; first < kSide; first += 2) {
    const Fragments row_fragments = load_fragments(s.rows, place.row_of(first));
    i64 exact[2][kSide];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) exact[i][j] = static_cast<i64>(double_bits_of(kZero));
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const GroupSums products = group_sums(s, row_fragments, fragments, place, first, g);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const i32 factor = s.rows.factors[g][place.row_of(first + i)];
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const i32 other = s.columns.factors[g][place.column_of(j)];
          exact[i][j] += static_cast<i64>(products.values[i][j] * factor) * other;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double unit = s.rows.exponents[place.row_of(first + i)].unit;
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const double sum = double_of(static_cast<u64>(exact[i][j])) - kZero, c = sums.values[first + i][j];
        const double other = s.columns.exponents[place.column_of(j)].unit;
        sums.values[first + i][j] = keeps ? add_exactly(sum, unit * other, c) : c;
      }
    }
  }
  if (!keeps) {
    Fp4Sums copy = sums;  // the address of sums must not be taken, so that sums is in registers
    add_carefully(a, s, copy, place, matrix, row, column, step);
    sums = copy;
  }
}

// Compute the results of the tile that begins at (row, column) of matrix `matrix`, and store them in a.out as Out
// (store_product). Results outside of the matrix are left out. Scales are E8M0 if kE8M0, otherwise E4M3. `steps` is
// shared memory for two steps: while one is added, the next is stored in the other. All threads of a thread block must
// call this function.
template <bool kE8M0, class Out>
FP4KIT_DEVICE void multiply_tile(const ProductArguments& a, Fp4Step* steps, i64 matrix, i64 row, i64 column) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Place place = {warp / kWarpsAcross * kWarpRows + lane / 4, warp % kWarpsAcross * kWarpColumns + lane % 4 * 2};
  // The codes that the thread loads: two threads per row, then two per column. The first threads also load the scales
  // of a row, and then of a column.
  const int line = thread / 2 % kTile, half = thread % 2, scaled = thread % kTile;
  const bool is_row = thread < 2 * kTile, scales_row = thread < kTile, loads_scales = thread < 2 * kTile;
  const ProductOperand& x = is_row ? a.a : a.b;
  const ProductOperand& y = scales_row ? a.a : a.b;
  const i64 x_row = (is_row ? row : column) + line, y_row = (scales_row ? row : column) + scaled;
  const i64 count = (a.length + kStep - 1) / kStep;
  const auto load = [&](i64 step) {
    return Loaded{load_codes(x, matrix, x_row, step, half, a.length),
                  loads_scales ? load_scales<kE8M0>(y, matrix, y_row, step, a.length) : 0u};
  };
  const auto store = [&](const Loaded& loaded, i64 step) {
    Fp4Step& s = steps[step % 2];
    store_codes(is_row ? s.rows : s.columns, line, half, loaded.codes);
    if (loads_scales) store_scales<kE8M0>(scales_row ? s.rows : s.columns, scaled, loaded.scales);
  };
  Fp4Sums sums;
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      sums.values[i][j] = first_sum(a, matrix, row + place.row_of(i), column + place.column_of(j));
    }
  }
  Loaded loaded = {};
  if (count > 0) store(load(0), 0);
  if (count > 1) loaded = load(1);
  __syncthreads();
  for (i64 step = 0; step < count; ++step) {
    if (step + 1 < count) store(loaded, step + 1);
    if (step + 2 < count) loaded = load(step + 2);
    add_step(a, steps[step % 2], sums, place, matrix, row, column, step);
    __syncthreads();
  }
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      store_product<Out>(a, matrix, row + place.row_of(i), column + place.column_of(j),
                         static_cast<float>(sums.values[i][j]));
    }
  }
}

using Products = ProductsOf<kGrouped>::Type;

// Compute the products of all matrices, or of all products of a group, and store them. The kernel is launched for
// fp4kit.matmul and fp4kit.matmul_grouped, if the operands have block scales and these conditions hold: rows of codes
// begin at multiples of 16 bytes, K is a multiple of 32, fraction_bits is 35, output_bits 23, step 64 and promote 0. A
// thread block takes one tile at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2) matmul_fp4_kernel(Products products) {
  __shared__ Fp4Step memory[2];
  for_each_tile<kTile>(products, [&](const ProductArguments& a, const ProductTile& tile) {
    multiply_tile<kScalesAreE8M0, Output>(a, memory, tile.matrix, tile.row, tile.column);
  });
}
