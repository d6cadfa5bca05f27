// Matrix products D = C + A B^T with Adder::truncate, for which every term is a single product, with AVX-512.
//   K        the axis along which products are added
//   step     the elements along K whose products a matrix unit adds at once
//   term     one summand of a step
//   line     a row or a column
//   panel    kProductLanes = 16 neighboring columns of D, one per vector lane
//   chain    the steps whose products are added to one sum before that sum is added to the total ("promotion")
//   task     a tile of D that one thread computes
//   a        the decoded elements of kLanesBlock rows of A; `row` is the index of the first of these rows
//   b        the decoded elements of a panel of columns; `first` is the index of the first column of the panel
//   c, sums  the sums so far of the rows of `a` in the panel of b
//   k        an index along K
//   i        the index of the decoded element at which a step starts
//
// These are products of FP8, FP6 and 16-bit floats on NVIDIA's units, and of MX formats. matmul.h computes them on
// processors without AVX-512. A term is an integer in units of the last bit that a step keeps, so a step is an integer
// sum. float32 holds the elements and the products of two elements exactly, unless exponents are extreme. Lanes with
// extreme exponents, infinities or NaN are computed term by term.
#pragma once

#include "matmul.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__GNUC__)
#define FP4KIT_HAS_AVX512 1
#include <immintrin.h>

namespace {

constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

// ---- functions that matmul_vnni.h uses too ----

// Return a mask of the lanes whose columns exist in D, for the panel that begins at column `first`.
__mmask16 lanes_from(const ProductCall& call, i64 first) {
  const i64 count = std::min<i64>(kProductLanes, call.columns - first);
  return static_cast<__mmask16>((1u << count) - 1);
}

// Return eight floats as doubles: the lower half of x if `half` is 0, and the upper half if it is 1.
__m512d half_of(__m512 x, int half) {
  return _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
}

// Return eight integers as doubles: the lower half of x if `half` is 0, and the upper half if it is 1.
__m512d integer_half_of(__m512i x, int half) {
  return _mm512_cvtepi32_pd(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
}

// Return sixteen doubles as floats, truncated toward zero. `low` holds the first eight, and `high` the last eight.
__m512 truncated(__m512d low, __m512d high) {
  const __m512 first = _mm512_castps256_ps512(_mm512_cvt_roundpd_ps(low, kTowardZero));
  return _mm512_insertf32x8(first, _mm512_cvt_roundpd_ps(high, kTowardZero), 1);
}

// Store in `sums` the first sums of `padded` rows, starting at row `row`, in the panel that begins at column `first`:
// the elements of C, or zeros if the call has no C. Only the first `rows` of these rows exist in D. The sums of the
// other rows, and of columns that do not exist in D, are zeros.
void load_first_sums(const ProductCall& call, i64 row, i64 rows, i64 padded, i64 first, float (*sums)[kProductLanes]) {
  std::memset(sums, 0, static_cast<size_t>(padded) * sizeof *sums);
  if (!call.c) return;
  const __mmask16 exist = lanes_from(call, first);
  for (i64 r = 0; r < rows; ++r) {
    _mm512_store_ps(sums[r], _mm512_maskz_loadu_ps(exist, call.c + (row + r) * call.columns + first));
  }
}

// Multiply the sums of one row of a panel by the tensor scales, and store them in D, rounded to the dtype of the
// output. Lanes beyond the last column of D are left out. `first` is the first column of the panel. NaN is stored as by
// the function `store` of matmul.h.
void put_lanes(const ProductCall& call, i64 row, i64 first, const float* sums) {
  const float *fa = call.a.factors, *fb = call.b.factors;
  if (call.output != kFloat32 || (fb && (call.b.factors_step || call.in_turn))) {
    const i64 count = std::min<i64>(kProductLanes, call.columns - first);
    const ProductTask task{call};
    for (i64 lane = 0; lane < count; ++lane) task.put(row, first + lane, sums[lane]);
    return;
  }
  const __m512 factor = _mm512_set1_ps((fa ? fa[row * call.a.factors_step] : 1) * (fb ? *fb : 1));
  const __m512 x = _mm512_mul_ps(_mm512_load_ps(sums), factor);
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF));  // as `store` writes NaN
  const __m512 found = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  _mm512_mask_storeu_ps(static_cast<float*>(call.out) + row * call.columns + first, lanes_from(call, first), found);
}

// Compute the sums of one row after a step again, this time term by term (task.add_slowly), in the lanes of the mask
// `replaced`. Store them in `sums`, whose other lanes do not change. `row` is the row, `first` the first column of the
// panel, and k the index along K at which the step starts. `before` holds the sums of the row before the step.
template <class Task>
void replace_lanes(const Task& task, __mmask16 replaced, i64 row, i64 first, i64 k, __m512 before, __m512& sums) {
  alignas(64) float old[kProductLanes], found[kProductLanes];
  _mm512_store_ps(old, before);
  _mm512_store_ps(found, sums);
  for (unsigned lanes = replaced; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    found[lane] = task.add_slowly(row, first + lane, k, old[lane]);
  }
  sums = _mm512_load_ps(found);
}

// Return the exponent e if `power` is 2^e, in the normal range of doubles. Return -1023 if `power` is 0.
int exponent_of(double power) {
  return static_cast<int>(__double_as_longlong(power) >> 52) - 1023;
}

// Return the entries of a table for 32 codes, which are 16-bit integers below 256. The table has 256 entries and is
// aligned to 64 bytes. The table is looked up in four parts of 64 entries, by the lower six bits of each code; bits 6
// and 7 choose among the four results.
__m512i looked_up(const u16* table, __m512i codes) {
  __m512i quarters[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const u16* entries = table + 64 * i;
    quarters[i] = _mm512_permutex2var_epi16(_mm512_load_si512(entries), codes, _mm512_load_si512(entries + 32));
  }
  const __mmask32 odd = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
  const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(128));
  const __m512i low = _mm512_mask_mov_epi16(quarters[0], odd, quarters[1]);
  const __m512i high = _mm512_mask_mov_epi16(quarters[2], odd, quarters[3]);
  return _mm512_mask_mov_epi16(low, upper, high);
}

// Transpose 16 lines of 16 words of 4 bytes: word i of lines[l] becomes to[i][l]. T: a type of 4 bytes. `to` must be
// aligned to 64 bytes.
template <class T>
void transpose(const __m512i* lines, T (*to)[kProductLanes]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(lines[2 * i], lines[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(lines[2 * i], lines[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  }
  // b[4i + j] holds words j, 4 + j, 8 + j and 12 + j of lines 4i to 4i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88),
                  odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD);
    _mm512_store_si512(to[j], _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_store_si512(to[4 + j], _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_store_si512(to[8 + j], _mm512_shuffle_i32x4(even_low, even_high, 0xDD));
    _mm512_store_si512(to[12 + j], _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD));
  }
}

// ---- matrix products whose terms are single products ----

constexpr i64 kLanesDepth = 256;  // largest number of elements along K that are decoded at once
constexpr i64 kLanesRows = 128;   // largest number of rows of a task
constexpr int kLanesPanels = 16;  // largest number of panels of a task
constexpr int kLanesBlock = 4;    // number of rows that are multiplied at once with a panel
constexpr int kLanesChunk = 16;   // the most terms whose sum fits 32 bits

// float32 computes the terms of a step if the largest exponent of the step is in kLowest ... kHighest. Elements of zero
// have the exponent kNoExponent. Infinities, NaN and elements that float32 cannot hold have kSpecialExponent, so that
// even their products with zero are above kHighest.
constexpr int kLowest = -90, kHighest = 100;
constexpr int16_t kNoExponent = -8000, kSpecialExponent = 20000;

// At most kLanesDepth decoded elements of one row or column: their values times the block scales, and the exponents of
// these values.
struct LaneLine {
  alignas(64) float values[kLanesDepth];
  alignas(64) int16_t exponents[kLanesDepth];
};

// The decoded elements of a panel of columns, transposed. pairs[i] holds the exponents of elements 2i and 2i + 1 of
// each column.
struct LaneColumns {
  alignas(64) float values[kLanesDepth][kProductLanes];
  alignas(64) i32 pairs[kLanesDepth / 2][kProductLanes];

  // Store the first `depth` elements of the lines of a panel (one line per column) in `values` and `pairs`. If `depth`
  // is not a multiple of 32, up to 28 more elements per line are stored too; callers ignore them.
  void transpose(const LaneLine* lines, i64 depth) {
    __m512i rows[kProductLanes];
    for (i64 i = 0; i < depth; i += 16) {
      for (int lane = 0; lane < kProductLanes; ++lane) rows[lane] = _mm512_load_si512(lines[lane].values + i);
      ::transpose(rows, values + i);
    }
    for (i64 i = 0; i < depth; i += 32) {
      for (int lane = 0; lane < kProductLanes; ++lane) rows[lane] = _mm512_load_si512(lines[lane].exponents + i);
      ::transpose(rows, pairs + i / 2);
    }
  }
};

// Decoder of the elements of an operand x, sixteen at a time. 16-bit codes are float16 or bfloat16, and 32-bit codes
// float32. Codes of at most 8 bits are looked up in a table.
struct LaneDecoder {
  const ProductOperand& x;
  const bool is_bfloat16;
  const int least;             // the exponent of subnormal elements
  alignas(64) u16 table[256];  // the values of codes of at most 8 bits, as bfloat16, which holds them exactly

  explicit LaneDecoder(const ProductOperand& operand)
      : x(operand),
        is_bfloat16(operand.code_bits == 16 && operand.values[0x3F80] == 1),
        least(operand.code_bits == 32 ? -126 : exponent_of(operand.powers[0])) {
    for (int code = 0; code < 256; ++code) {
      const bool exists = x.code_bits <= 8 && code < 1 << x.code_bits;
      const float value = exists ? static_cast<float>(x.values[code]) : 0;
      u32 bits;
      std::memcpy(&bits, &value, sizeof bits);
      table[code] = static_cast<u16>(bits >> 16);
    }
  }

  // Decode `depth` elements of row `row` of the operand into `to`, starting at index k along K: their values times the
  // block scales, and the exponents of these values. Elements at index `length` along K and beyond are zeros. k and the
  // block length must be multiples of 16.
  void decode(LaneLine& to, i64 row, i64 length, i64 k, i64 depth) const {
    const u8* codes = static_cast<const u8*>(x.codes) + row * x.codes_step;
    const __m512i absolute = _mm512_set1_epi32(0x7FFFFFFF);
    for (i64 i = 0; i < depth; i += 16) {
      const i64 count = std::min<i64>(16, length - k - i);
      if (count <= 0) {
        _mm512_store_ps(to.values + i, _mm512_setzero_ps());
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.exponents + i), _mm256_set1_epi16(kNoExponent));
        continue;
      }
      __m512 values = sixteen(codes, k + i, count);
      const __m512i field = _mm512_srli_epi32(_mm512_and_si512(_mm512_castps_si512(values), absolute), 23);
      __m512i exponents = _mm512_sub_epi32(field, _mm512_set1_epi32(127));
      exponents = _mm512_max_epi32(exponents, _mm512_set1_epi32(least));
      if (x.scales) {
        const u8 code = x.scales[row * x.scales_step + (k + i) / x.block];
        values = _mm512_mul_ps(values, _mm512_set1_ps(static_cast<float>(x.scale_values[code])));
        exponents = _mm512_add_epi32(exponents, _mm512_set1_epi32(exponent_of(x.scale_powers[code])));
      }
      // Numbers below 2^-126, which may have lost bits, and numbers of 2^127 and more are special.
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(values), absolute);
      const __mmask16 zeros = _mm512_cmpeq_epi32_mask(bits, _mm512_setzero_si512());
      const __m512i above = _mm512_sub_epi32(bits, _mm512_set1_epi32(1 << 23));
      const __mmask16 special = _mm512_cmpge_epu32_mask(above, _mm512_set1_epi32(253 << 23));
      exponents = _mm512_mask_mov_epi32(exponents, special, _mm512_set1_epi32(kSpecialExponent));
      exponents = _mm512_mask_mov_epi32(exponents, zeros, _mm512_set1_epi32(kNoExponent));
      _mm512_store_ps(to.values + i, values);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.exponents + i), _mm512_cvtepi32_epi16(exponents));
    }
  }

  // Return the values of elements k to k + 15, without block scales, of the row whose codes begin at `codes`. Only the
  // first `count` of them (1 to 16) exist; the others are zeros, and their codes are not read.
  __m512 sixteen(const u8* codes, i64 k, i64 count) const {
    const auto exist = static_cast<__mmask16>((1u << count) - 1);
    __m256i halves;
    if (x.code_bits == 32) return _mm512_maskz_loadu_ps(exist, codes + 4 * k);
    if (x.code_bits == 16) {
      halves = _mm256_maskz_loadu_epi16(exist, codes + 2 * k);
      if (!is_bfloat16) return _mm512_cvtph_ps(halves);
    } else if (x.code_bits == 8) {
      halves = looked_up_sixteen(_mm_maskz_loadu_epi8(exist, codes + k));
    } else {
      const auto pairs_exist = static_cast<__mmask16>((1u << (count + 1) / 2) - 1);
      const __m128i pairs = _mm_maskz_loadu_epi8(pairs_exist, codes + k / 2), low = _mm_set1_epi8(15);
      const __m128i second = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
      halves = looked_up_sixteen(_mm_unpacklo_epi8(_mm_and_si128(pairs, low), second));
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  // Return the values of sixteen codes of at most 8 bits, as the bits of bfloat16 numbers.
  __m256i looked_up_sixteen(__m128i codes) const {
    const __m512i index = _mm512_castsi256_si512(_mm256_cvtepu8_epi16(codes));
    return _mm512_castsi512_si256(looked_up(table, index));
  }
};

// Return true if LaneTask can compute the matrix product of a call. All of this must hold:
//   - The adder is `truncate`, with at most 25 fraction bits and an exponent of zero below kLowest.
//   - A step has at most 32 elements, a multiple of 4 that divides kLanesDepth.
//   - The blocks of both operands, if any, have a multiple of 16 elements that divides kLanesDepth.
bool uses_lanes(const ProductCall& call) {
  const auto fits = [](const ProductOperand& x) {
    return !x.scales || (x.block % 16 == 0 && kLanesDepth % x.block == 0);
  };
  return call.adder == Adder::truncate && call.step % 4 == 0 && call.step <= 2 * kLanesChunk &&
         kLanesDepth % call.step == 0 && call.fraction_bits <= 25 && call.zero_exponent < kLowest && fits(call.a) &&
         fits(call.b);
}

// The tasks of a call for which uses_lanes is true. A task computes a tile of at most kLanesRows rows and kLanesPanels
// panels of columns.
struct LaneTask {
  const ProductCall& call;

  // The memory of a task: the decoded elements of a panel and of all rows, the sums of the current chains and, with
  // promotion, the totals of the completed chains.
  struct Memory {
    LaneColumns columns;
    LaneLine lines[kProductLanes], rows[kLanesRows];
    alignas(64) float sums[kLanesPanels][kLanesRows][kProductLanes], totals[kLanesPanels][kLanesRows][kProductLanes];
  };

  // Return the number of tasks that lie next to each other across the columns of D.
  i64 across() const { return (call.columns + kLanesPanels * kProductLanes - 1) / (kLanesPanels * kProductLanes); }
  // Return the number of all tasks.
  i64 count() const { return across() * ((call.rows + kLanesRows - 1) / kLanesRows); }

  // Compute the tile of D that belongs to task `index`, and store it in call.out.
  void run(i64 index) const {
    const std::unique_ptr<Memory> memory(new Memory);  // not make_unique, which would set the memory to zeros
    Memory& m = *memory;
    const LaneDecoder rows_of(call.a), columns_of(call.b);
    const i64 first_row = index / across() * kLanesRows, first = index % across() * kLanesPanels * kProductLanes;
    const i64 rows = std::min(kLanesRows, call.rows - first_row);
    const i64 padded = (rows + kLanesBlock - 1) / kLanesBlock * kLanesBlock;
    const i64 columns = std::min<i64>(kLanesPanels * kProductLanes, call.columns - first);
    const int panels = static_cast<int>((columns + kProductLanes - 1) / kProductLanes);
    for (int p = 0; p < panels; ++p) {
      const i64 column = first + p * kProductLanes;
      load_first_sums(call, first_row, rows, padded, column, call.promote ? m.totals[p] : m.sums[p]);
      if (call.promote) std::memset(m.sums[p], 0, static_cast<size_t>(padded) * sizeof m.sums[p][0]);
    }
    for (i64 k = 0; k < call.length; k += kLanesDepth) {
      const i64 depth = std::min(kLanesDepth, (call.length - k + call.step - 1) / call.step * call.step);
      for (i64 r = 0; r < padded; ++r) rows_of.decode(m.rows[r], first_row + r, r < rows ? call.length : 0, k, depth);
      for (int p = 0; p < panels; ++p) {
        const i64 column = first + p * kProductLanes;
        for (int lane = 0; lane < kProductLanes; ++lane) {
          const i64 length = column + lane < call.columns ? call.length : 0;
          columns_of.decode(m.lines[lane], column + lane, length, k, depth);
        }
        m.columns.transpose(m.lines, depth);
        for (i64 r = 0; r < padded; r += kLanesBlock) {
          add_steps(m.rows + r, m.columns, first_row + r, column, k, depth, m.sums[p] + r, m.totals[p] + r);
        }
      }
    }
    const auto& sums = call.promote ? m.totals : m.sums;
    for (i64 r = 0; r < rows; ++r) {
      for (int p = 0; p < panels; ++p) put_lanes(call, first_row + r, first + p * kProductLanes, sums[p][r]);
    }
  }

  // Multiply kLanesBlock rows of A by one panel of columns, and add the products to `sums`, step by step. a and b hold
  // `depth` decoded elements of the rows and columns, starting at index k along K. `row` is the index of the first row,
  // and `first` that of the first column. With promotion, the sums of each chain that ends are added to `totals` and
  // set to 0.
  //
  // GCC keeps an array of vectors in registers only if every loop over it is unrolled.
  __attribute__((noinline)) void add_steps(const LaneLine* a, const LaneColumns& b, i64 row, i64 first, i64 k,
                                           i64 depth, float (*sums)[kProductLanes],
                                           float (*totals)[kProductLanes]) const {
    __mmask16 exist[kLanesBlock];
    for (int r = 0; r < kLanesBlock; ++r) exist[r] = row + r < call.rows ? lanes_from(call, first) : 0;
    const bool is_small = i64{4} * (call.step + 1) << call.fraction_bits <= i64{1} << 31;
    for (i64 i = 0; i < depth; i += call.step) {
      is_small ? add_step<true>(a, b, row, first, k, i, exist, sums)
               : add_step<false>(a, b, row, first, k, i, exist, sums);
      const i64 done = k + i + call.step;
      if (call.promote && (done % call.promote == 0 || done >= call.length)) {
        for (int r = 0; r < kLanesBlock; ++r) {
          for (int l = 0; call.a.chains && exist[r] >> l; ++l) {
            totals[r][l] = promoted(call, row + r, first + l, (k + i) / call.promote, totals[r][l], sums[r][l]);
          }
          const __m512 total = _mm512_load_ps(totals[r]);
          _mm512_store_ps(totals[r], call.a.chains ? total : _mm512_add_ps(total, _mm512_load_ps(sums[r])));
          _mm512_store_ps(sums[r], _mm512_setzero_ps());
        }
      }
    }
  }

  // Return how many terms of a step are added in 32 bits at a time: all terms of the step if their sum fits, otherwise
  // at most kLanesChunk. A term is less than 4 * 2^fraction_bits.
  i64 chunk() const {
    return i64{4} * call.step << call.fraction_bits <= i64{1} << 31 ? call.step : std::min(call.step, kLanesChunk);
  }

  // Add the products of one step, which starts at decoded element i (index k + i along K), to the sums c of kLanesBlock
  // rows and one panel. kSmall: true if the sum of a step and C fits 32 bits. exist[r]: mask of the lanes of row r that
  // exist in D. Lanes whose exponents are extreme are computed term by term.
  template <bool kSmall>
  __attribute__((always_inline)) inline void add_step(const LaneLine* a, const LaneColumns& b, i64 row, i64 first,
                                                      i64 k, i64 i, const __mmask16* exist,
                                                      float (*c)[kProductLanes]) const {
    __m512i exponents[kLanesBlock], totals[kLanesBlock];
    __m512 inverses[kLanesBlock], sums[kLanesBlock];
    // 1. Find the largest exponent of each lane, and turn C into an integer.
    find_exponents(a, b, i, exponents);
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) {
      const __m512i above = above_lowest(exponents[r], c[r]);
      most = _mm512_mask_max_epu32(most, exist[r], most, above);
      // 2^(fraction_bits - largest), the factor that turns terms into integers
      const __m512i biased = _mm512_sub_epi32(_mm512_set1_epi32(127 + call.fraction_bits - kLowest), above);
      inverses[r] = _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
      totals[r] = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_load_ps(c[r]), inverses[r]));
    }
    // 2. Add the terms, as integers.
    if (kSmall) {
      add_terms(a, b, i, call.step, inverses, totals);
    } else {
      add_chunks(a, b, i, inverses, totals, sums);
    }
    // 3. Turn the sums into floats, and keep output_bits of their 23 fraction bits.
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) {
      if (kSmall) sums[r] = _mm512_cvt_roundepi32_ps(totals[r], kTowardZero);
      // 1 / inverses[r]: the biased exponents of 2^n and 2^-n add up to 254
      const __m512i unit = _mm512_sub_epi32(_mm512_set1_epi32(254 << 23), _mm512_castps_si512(inverses[r]));
      const __m512i kept = _mm512_set1_epi32(-1 << (23 - call.output_bits));
      const __m512i sum = _mm512_and_si512(_mm512_castps_si512(sums[r]), kept);
      sums[r] = _mm512_mul_ps(_mm512_castsi512_ps(sum), _mm512_castsi512_ps(unit));
    }
    if (is_extreme(most)) add_slow_lanes(a, b, row, first, k, i, c, sums);
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) _mm512_store_ps(c[r], sums[r]);
  }

  // Add the terms of a step to `totals`, the integer terms of C, and store the results in `sums`, truncated toward zero
  // to float32. If a result does not fit 32 bits, `totals` wraps, but `sums` is right. inverses: one factor per row,
  // which turns terms into integers.
  __attribute__((always_inline)) inline void add_chunks(const LaneLine* a, const LaneColumns& b, i64 i,
                                                        const __m512* inverses, __m512i* totals, __m512* sums) const {
    __m512i wrong = _mm512_setzero_si512();  // the sign bit of a lane is set if a sum does not fit 32 bits
    const i64 count = chunk();
    __m512i own[kLanesBlock];
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) own[r] = totals[r];
    for (i64 j = i; j < i + call.step; j += count) {
      __m512i terms[kLanesBlock];
#pragma GCC unroll 4
      for (int r = 0; r < kLanesBlock; ++r) terms[r] = _mm512_setzero_si512();
      add_terms(a, b, j, std::min(count, i + call.step - j), inverses, terms);
#pragma GCC unroll 4
      for (int r = 0; r < kLanesBlock; ++r) {
        const __m512i sum = _mm512_add_epi32(totals[r], terms[r]);
        // (total ^ sum) & (term ^ sum)
        wrong = _mm512_or_si512(wrong, _mm512_ternarylogic_epi32(totals[r], terms[r], sum, 0x42));
        totals[r] = sum;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) sums[r] = _mm512_cvt_roundepi32_ps(totals[r], kTowardZero);
    if (_mm512_movepi32_mask(wrong)) add_wide(a, b, i, inverses, own, sums);
  }

  // Return, per lane, the largest exponent in a step of one row, minus kLowest. c: the sums of the row before the step.
  // exponents: the largest exponents of the products of the step.
  static __m512i above_lowest(__m512i exponents, const float* c) {
    const __m512i bits = _mm512_slli_epi32(_mm512_load_si512(c), 1);  // without the sign
    const __m512i products = _mm512_add_epi32(exponents, _mm512_set1_epi32(127));
    const __m512i largest = _mm512_max_epi32(products, _mm512_srli_epi32(bits, 24));
    return _mm512_sub_epi32(largest, _mm512_set1_epi32(127 + kLowest));
  }

  // Return a mask of the lanes for which float32 cannot compute the terms of a step, because the largest exponent is
  // outside of kLowest ... kHighest. above: the result of above_lowest.
  static __mmask16 is_extreme(__m512i above) {
    return _mm512_cmpgt_epu32_mask(above, _mm512_set1_epi32(kHighest - kLowest));
  }

  // Add the terms of a step to `own`, the integer terms of C, for kLanesBlock rows, and store the results in `sums`,
  // truncated toward zero to float32. The sums are computed as doubles, because they may have more than 32 bits.
  // inverses: one factor per row, which turns terms into integers.
  __attribute__((noinline)) void add_wide(const LaneLine* a, const LaneColumns& b, i64 i, const __m512* inverses,
                                          const __m512i* own, __m512* sums) const {
    const i64 count = chunk();
    __m512d totals[kLanesBlock][2];
    for (int r = 0; r < kLanesBlock; ++r) {
      for (int v = 0; v < 2; ++v) totals[r][v] = integer_half_of(own[r], v);
    }
    for (i64 j = i; j < i + call.step; j += count) {
      __m512i terms[kLanesBlock] = {};
      add_terms(a, b, j, std::min(count, i + call.step - j), inverses, terms);
      for (int r = 0; r < kLanesBlock; ++r) {
        for (int v = 0; v < 2; ++v) totals[r][v] = _mm512_add_pd(totals[r][v], integer_half_of(terms[r], v));
      }
    }
    for (int r = 0; r < kLanesBlock; ++r) sums[r] = truncated(totals[r][0], totals[r][1]);
  }

  // Store in exponents[r] the largest exponent of the products of the step that starts at decoded element i, per lane,
  // for each row r of kLanesBlock rows.
  __attribute__((always_inline)) inline void find_exponents(const LaneLine* a, const LaneColumns& b, i64 i,
                                                            __m512i* exponents) const {
    __m512i pairs[kLanesBlock];
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) pairs[r] = _mm512_set1_epi16(-0x8000);
    for (i64 j = i; j < i + call.step; j += 4) {
      const auto pairs_of_columns = b.pairs + j / 2;
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        const __m512i columns = _mm512_load_si512(pairs_of_columns[n]);
#pragma GCC unroll 4
        for (int r = 0; r < kLanesBlock; ++r) {
          i32 pair;
          std::memcpy(&pair, a[r].exponents + j + 2 * n, sizeof pair);
          pairs[r] = _mm512_max_epi16(pairs[r], _mm512_adds_epi16(columns, _mm512_set1_epi32(pair)));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) {
      exponents[r] = _mm512_srai_epi32(_mm512_max_epi16(pairs[r], _mm512_slli_epi32(pairs[r], 16)), 16);
    }
  }

  // Add `count` products per lane as integer terms, starting at decoded element i, to the `totals` of kLanesBlock rows.
  // `count` must be a multiple of 4. inverses: one factor per row, which turns terms into integers.
  __attribute__((always_inline)) static inline void add_terms(const LaneLine* a, const LaneColumns& b, i64 i, i64 count,
                                                              const __m512* inverses, __m512i* totals) {
    __m512i sums[kLanesBlock];
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) sums[r] = totals[r];
    for (i64 j = i; j < i + count; j += 4) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        const __m512 column = _mm512_load_ps(b.values[j + n]);
#pragma GCC unroll 4
        for (int r = 0; r < kLanesBlock; ++r) {
          const __m512 product = _mm512_mul_ps(column, _mm512_set1_ps(a[r].values[j + n]));
          sums[r] = _mm512_add_epi32(sums[r], _mm512_cvttps_epi32(_mm512_mul_ps(product, inverses[r])));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kLanesBlock; ++r) totals[r] = sums[r];
  }

  // Correct `sums`, the sums after a step, in lanes that exist and whose exponents are extreme. If all products of such
  // a lane and its sum before the step are zero, the new sum is +0. Otherwise it is computed term by term. c: the sums
  // before the step, which starts at decoded element i (index k + i along K).
  __attribute__((noinline)) void add_slow_lanes(const LaneLine* a, const LaneColumns& b, i64 row, i64 first, i64 k,
                                                i64 i, const float (*c)[kProductLanes], __m512* sums) const {
    __m512i exponents[kLanesBlock];
    find_exponents(a, b, i, exponents);
    for (int r = 0; r < kLanesBlock && row + r < call.rows; ++r) {
      const __mmask16 extreme = is_extreme(above_lowest(exponents[r], c[r]));
      const __mmask16 slow = extreme & lanes_from(call, first);
      const __m512 before = _mm512_load_ps(c[r]);
      const __mmask16 empty = _mm512_mask_cmplt_epi32_mask(slow, exponents[r], _mm512_set1_epi32(kNoExponent / 2));
      const __mmask16 zeros = _mm512_mask_cmp_ps_mask(empty, before, _mm512_setzero_ps(), _CMP_EQ_OQ);
      sums[r] = _mm512_mask_mov_ps(sums[r], zeros, _mm512_setzero_ps());
      const __mmask16 replaced = slow & static_cast<__mmask16>(~zeros);
      if (replaced) replace_lanes(*this, replaced, row + r, first, k + i, before, sums[r]);
    }
  }

  // Return the sum of D[row, column] after the step that starts at index k along K, computed term by term. c is the sum
  // before the step.
  float add_slowly(i64 row, i64 column, i64 k, float c) const {
    const double zero_power = double_power(call.zero_exponent);
    double terms[2 * kLanesChunk] = {}, largest = sum_power(c, zero_power);
    for (int i = 0; i < call.step; ++i) {
      double power = zero_power;
      if (k + i < call.length) {
        const auto [x, x_power] = element(call.a, row, k + i);
        const auto [y, y_power] = element(call.b, column, k + i);
        terms[i] = x * y;
        if (x_power * y_power != 0) power = x_power * y_power;
      }
      largest = std::max(largest, power);
    }
    return static_cast<float>(sum_of_terms(c, terms, call.step, largest, call.fraction_bits, call.output_bits));
  }

  // Return two numbers: element k of row `row` of an operand, times its block scale if there is one, and the power
  // (2^exponent) of this product. The power is 0 if the product is 0.
  static std::pair<double, double> element(const ProductOperand& x, i64 row, i64 k) {
    auto [value, power] = Row::element_at(x, static_cast<const u8*>(x.codes) + row * x.codes_step, k);
    if (value == 0) power = 0;
    if (x.scales) {
      const u8 scale = x.scales[row * x.scales_step + k / x.block];
      value *= x.scale_values[scale];
      power *= x.scale_values[scale] == 0 ? 0 : x.scale_powers[scale];
    }
    return {value, power};
  }
};

}  // namespace
#else
#define FP4KIT_HAS_AVX512 0
#endif
