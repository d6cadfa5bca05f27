// Products of block-scaled E2M1 matrices as Blackwell's FP4 instructions add them, with AVX-512 VNNI. matmul.h computes
// them on other processors.
//
// Elements are integers in units of 1/2, so the sum of a group of 16 products is an integer dot product. Usually no
// term of a step loses bits when it is shifted to the largest exponent. Then the sum of the terms and of C is exact in
// double, and it is truncated once. If exponents do not prove this for a lane, that lane is added term by term.
#pragma once

#include "matmul.h"

#if defined(__AVX512F__) && defined(__GNUC__)
#define FP4KIT_HAS_VNNI 1
#include <immintrin.h>

namespace {

constexpr int kVnniLanes = 16;                         // number of columns of a panel
constexpr int kVnniPanels = 16;                        // largest number of panels of a task
constexpr int kVnniBlock = 4;                          // number of rows that are multiplied at once with a panel
constexpr i64 kVnniRows = 128;                         // largest number of rows of a task
constexpr int kVnniStep = 64;                          // number of elements of K per step
constexpr int kVnniSteps = kProductDepth / kVnniStep;  // largest number of steps that are decoded at once
constexpr int kVnniGroups = kProductDepth / 16;        // largest number of groups that are decoded at once

// The range of the exponents of the scales of one row or panel in one step. Scales of zero do not count. If no scale
// counts, lowest is larger than highest. NaN makes the range wider than any that the fast way takes.
struct ScaleRange {
  int lowest, highest;

  // Return the power of two by which scales in this range become integers.
  double unit() const { return double_power(3 - std::min(std::max(lowest, -500), 500)); }

  // Extend the range by another one.
  void add(ScaleRange other) {
    lowest = std::min(lowest, other.lowest);
    highest = std::max(highest, other.highest);
  }
};
// The largest range for which the sum of a step fits 32 bits, if scales are integers in units of 2^(lowest - 3).
constexpr int kIntegerRange = 10;
constexpr ScaleRange kNoScale{1000, -1000}, kNanScale{-2000, 2000};

// The value and the range of every scale code of an operand. Values are multiplied by `factor`.
struct ScaleTable {
  double values[256];
  ScaleRange ranges[256];

  ScaleTable(const ProductOperand& x, double factor) {
    for (int code = 0; code < 256; ++code) {
      const double value = x.scale_values[code];
      const int exponent = static_cast<int>(__double_as_longlong(x.scale_powers[code]) >> 52) - 1023;
      values[code] = value * factor;
      ranges[code] = value == 0 ? kNoScale : value != value ? kNanScale : ScaleRange{exponent, exponent};
    }
  }
};

// The decoded elements of a panel of columns, for at most kProductDepth elements of K. A word holds four elements of
// one lane, in units of 1/2, each plus 12. `scales` holds the scale of each group, and `ranges` the range of each step.
struct VnniColumns {
  alignas(64) u32 words[kProductDepth / 4][kVnniLanes];
  alignas(64) double scales[kVnniGroups][kVnniLanes];
  alignas(64) i32 integers[kVnniGroups][kVnniLanes];  // scales as integers in steps with a small range
  ScaleRange ranges[kVnniSteps];
};

// The decoded elements of one row, for at most kProductDepth elements of K. A word holds four elements, in units of
// 1/2, as signed bytes. `scales` holds a quarter of the scale of each group, because products are in units of 1/4.
struct VnniRow {
  alignas(64) i32 words[kProductDepth / 4];
  i32 corrections[kVnniGroups];  // -12 times the sum of a group's elements
  double scales[kVnniGroups];
  i32 integers[kVnniGroups];  // scales as integers in steps with a small range
  ScaleRange ranges[kVnniSteps];
};

// Decode 64 * `steps` elements, of which `bytes` bytes of codes exist, and store each as a byte: its value in units of
// 1/2, plus `offset`. Elements beyond the codes are zeros.
void decode_halves(const u8* codes, i64 bytes, int steps, int offset, u8* to) {
  const __m128i magnitudes = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i table = _mm_add_epi8(magnitudes, _mm_set1_epi8(static_cast<char>(offset)));
  const __m128i low = _mm_set1_epi8(15);
  for (int i = 0; i < steps * 2; ++i) {
    const i64 left = std::max<i64>(bytes - 16 * i, 0);
    const __mmask16 exists = left < 16 ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(0xFFFF);
    const __m128i pairs = _mm_maskz_loadu_epi8(exists, codes + 16 * i);
    const __m128i first = _mm_shuffle_epi8(table, _mm_and_si128(pairs, low));
    const __m128i second = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * i), _mm_unpacklo_epi8(first, second));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * i + 16), _mm_unpackhi_epi8(first, second));
  }
}

// Return true if this file can compute a product: if the processor has AVX-512 VNNI, and the product has 4-bit codes
// and the step of Blackwell's FP4 instructions, without promotion.
bool uses_vnni(const ProductCall& call) {
  static const bool is_supported = __builtin_cpu_supports("avx512vnni");
  const auto is_power = [](i32 block) { return block >= 16 && (block & (block - 1)) == 0; };
  return is_supported && is_power(call.a.block) && is_power(call.b.block) && call.adder == Adder::truncate_groups &&
         call.step == kVnniStep && call.promote == 0 && call.fraction_bits == 35 && call.output_bits == 23 &&
         call.zero_exponent <= -126 && call.a.code_bits == 4 && call.b.code_bits == 4;
}

// The tasks of a call for which uses_vnni is true. A task computes a tile of at most kVnniRows rows and kVnniPanels
// panels of columns.
struct VnniTask {
  const ProductCall& call;

  // The memory of a task: the decoded elements of a panel and of all rows, and the sums so far.
  struct Memory {
    VnniColumns columns;
    VnniRow rows[kVnniRows];
    alignas(64) double sums[kVnniPanels][kVnniRows][kVnniLanes];
  };

  // Return the number of tasks side by side.
  i64 across() const { return (call.columns + kVnniPanels * kVnniLanes - 1) / (kVnniPanels * kVnniLanes); }
  // Return the number of tasks.
  i64 count() const { return across() * ((call.rows + kVnniRows - 1) / kVnniRows); }

  // Compute and store the results of task `index`.
  void run(i64 index) const {
    const std::unique_ptr<Memory> memory(new Memory);  // not make_unique, which would set the memory to zeros
    Memory& m = *memory;
    const ScaleTable a_scales(call.a, 0.25), b_scales(call.b, 1);
    const i64 first_row = index / across() * kVnniRows, first = index % across() * kVnniPanels * kVnniLanes;
    const i64 rows = std::min(kVnniRows, call.rows - first_row);
    const i64 padded = (rows + kVnniBlock - 1) / kVnniBlock * kVnniBlock;
    const i64 columns = std::min<i64>(kVnniPanels * kVnniLanes, call.columns - first);
    const int panels = static_cast<int>((columns + kVnniLanes - 1) / kVnniLanes);
    for (int p = 0; p < panels; ++p) {
      std::memset(m.sums[p], 0, static_cast<size_t>(padded) * sizeof m.sums[p][0]);
      if (call.c) {
        const i64 column = first + p * kVnniLanes, count = std::min<i64>(kVnniLanes, call.columns - column);
        for (i64 r = 0; r < rows; ++r) {
          const float* c = call.c + (first_row + r) * call.columns + column;
          for (i64 lane = 0; lane < count; ++lane) m.sums[p][r][lane] = c[lane];
        }
      }
    }
    for (i64 k = 0; k < call.length; k += kProductDepth) {
      const int steps = static_cast<int>((std::min(kProductDepth, call.length - k) + kVnniStep - 1) / kVnniStep);
      for (i64 r = 0; r < padded; ++r) decode_row(m.rows[r], a_scales, first_row + r, k, steps);
      for (int p = 0; p < panels; ++p) {
        const i64 column = first + p * kVnniLanes;
        decode_columns(m.columns, b_scales, column, k, steps);
        for (i64 r = 0; r < padded; r += kVnniBlock) {
          add_steps(m.rows + r, m.columns, first_row + r, column, k, steps, m.sums[p] + r);
        }
      }
    }
    const ProductTask finish{call};
    for (int p = 0; p < panels; ++p) {
      for (i64 r = 0; r < rows; ++r) put_row(finish, first_row + r, first + p * kVnniLanes, m.sums[p][r]);
    }
  }

  // Multiply the sums of one row of a panel by the tensor scales, and store them. column: the panel's first column.
  void put_row(const ProductTask& finish, i64 row, i64 column, const double* sums) const {
    const i64 count = std::min<i64>(kVnniLanes, call.columns - column);
    const float *fa = call.a.factors, *fb = call.b.factors;
    if (call.output != kFloat32 || (fb && call.b.factors_step)) {
      for (i64 lane = 0; lane < count; ++lane) finish.put(row, column + lane, static_cast<float>(sums[lane]));
      return;
    }
    const __m512 factor = _mm512_set1_ps((fa ? fa[row * call.a.factors_step] : 1) * (fb ? *fb : 1));
    const __m256 low = _mm512_cvtpd_ps(_mm512_load_pd(sums)), high = _mm512_cvtpd_ps(_mm512_load_pd(sums + 8));
    const __m512 x = _mm512_mul_ps(_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1), factor);
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF));  // as `store` writes NaN
    const __m512 found = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    const __mmask16 exists = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_storeu_ps(static_cast<float*>(call.out) + row * call.columns + column, exists, found);
  }

  // Store in `to` the decoded elements of `steps` steps, from element k of K on, for the panel that begins at column
  // `first`. Elements and scales beyond the operand are zeros.
  void decode_columns(VnniColumns& to, const ScaleTable& table, i64 first, i64 k, int steps) const {
    const int shift = __builtin_ctz(call.b.block) - 4;
    for (ScaleRange& range : to.ranges) range = kNoScale;
    for (int lane = 0; lane < kVnniLanes; ++lane) {
      const i64 column = first + lane;
      const i64 length = column < call.columns ? call.length - k : 0;
      const i64 row = column < call.columns ? column : 0;
      alignas(64) u32 words[kProductDepth / 4];
      decode_halves(static_cast<const u8*>(call.b.codes) + row * call.b.codes_step + k / 2, length / 2, steps, 12,
                    reinterpret_cast<u8*>(words));
      for (int i = 0; i < steps * kVnniStep / 4; ++i) to.words[i][lane] = words[i];
      const u8* scales = call.b.scales + row * call.b.scales_step + k / call.b.block;
      for (int step = 0; step < steps; ++step) {
        ScaleRange range = to.ranges[step];
        for (int g = 4 * step; g < 4 * step + 4; ++g) {
          const bool exists = 16 * g < length;
          const u8 code = exists ? scales[g >> shift] : 0;
          to.scales[g][lane] = exists ? table.values[code] : 0;
          range.add(exists ? table.ranges[code] : kNoScale);
        }
        to.ranges[step] = range;
      }
    }
    for (int g = 0; g < steps * kVnniStep / 16; ++g) {
      if (to.ranges[g / 4].highest - to.ranges[g / 4].lowest > kIntegerRange) continue;
      const double unit = to.ranges[g / 4].unit();
      for (int lane = 0; lane < kVnniLanes; ++lane) to.integers[g][lane] = static_cast<i32>(to.scales[g][lane] * unit);
    }
  }

  // Store in `to` the decoded elements of `steps` steps of row `row`, from element k of K on. Elements and scales
  // beyond the operand are zeros.
  __attribute__((target("avx512vnni"))) void decode_row(VnniRow& to, const ScaleTable& table, i64 row, i64 k,
                                                        int steps) const {
    const i64 length = row < call.rows ? call.length - k : 0;
    if (row >= call.rows) row = 0;
    decode_halves(static_cast<const u8*>(call.a.codes) + row * call.a.codes_step + k / 2, length / 2, steps, 0,
                  reinterpret_cast<u8*>(to.words));
    for (int step = 0; step < steps; ++step) {
      const __m512i words = _mm512_load_si512(to.words + 16 * step);
      __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(12), words);
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
      const __m512i groups = _mm512_maskz_compress_epi32(0x1111, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to.corrections + 4 * step), _mm512_castsi512_si128(groups));
    }
    const u8* scales = call.a.scales + row * call.a.scales_step + k / call.a.block;
    const int shift = __builtin_ctz(call.a.block) - 4;
    for (int step = 0; step < steps; ++step) {
      ScaleRange range = kNoScale;
      for (int g = 4 * step; g < 4 * step + 4; ++g) {
        const bool exists = 16 * g < length;
        const u8 code = exists ? scales[g >> shift] : 0;
        to.scales[g] = exists ? table.values[code] : 0;
        range.add(exists ? table.ranges[code] : kNoScale);
      }
      to.ranges[step] = range;
    }
    for (int g = 0; g < steps * kVnniStep / 16; ++g) {
      if (to.ranges[g / 4].highest - to.ranges[g / 4].lowest > kIntegerRange) continue;
      to.integers[g] = static_cast<i32>(to.scales[g] * 4 * to.ranges[g / 4].unit());
    }
  }

  // How the terms of a step are added: lane by lane where necessary, as doubles, or as integers.
  enum class Way { lanes, doubles, integers };

  // Return the fastest way that is certain, without a look at single lanes, to be exact for kVnniBlock rows. The
  // conditions for `doubles` are those of inexact_lanes, except that no sum may be zero.
  static Way way_of(const VnniRow* a, ScaleRange y, int step, const __m512d (*sums)[2]) {
    ScaleRange x = a[0].ranges[step];
    for (int r = 1; r < kVnniBlock; ++r) x.add(a[r].ranges[step]);
    const int highest = x.highest + y.highest, lowest = x.lowest + y.lowest;
    if (highest - lowest > 27 || lowest < -80 || highest > 90 || highest < -80) return Way::lanes;
    // Bits of positive doubles are ordered as the doubles are.
    const __m512i magnitude = _mm512_set1_epi64(0x7FFFFFFFFFFFFFFF);
    const i64 least = __double_as_longlong(double_power(highest - 12));
    const __m512i first = _mm512_set1_epi64(least);
    const __m512i count = _mm512_set1_epi64(__double_as_longlong(double_power(lowest + 28)) - least);
    unsigned outside = 0;
    for (int r = 0; r < kVnniBlock; ++r) {
      for (int v = 0; v < 2; ++v) {
        const __m512i bits = _mm512_and_si512(_mm512_castpd_si512(sums[r][v]), magnitude);
        outside |= _mm512_cmpge_epu64_mask(_mm512_sub_epi64(bits, first), count);
      }
    }
    if (outside) return Way::lanes;
    return highest - lowest <= kIntegerRange ? Way::integers : Way::doubles;
  }

  // Return the lanes of a row whose sum may not be added exactly in double: a mask of kVnniLanes bits. x, y: the ranges
  // of the row and of the panel in this step. sums: the sums of the row.
  static __mmask16 inexact_lanes(ScaleRange x, ScaleRange y, const __m512d* sums) {
    const int highest = x.highest + y.highest, lowest = x.lowest + y.lowest;
    // No term loses bits if the terms' exponents differ by at most F - 8, and C is neither far below nor far above.
    if (highest - lowest > 27 || lowest < -80 || highest > 90) return 0xFFFF;
    const __m512d least = _mm512_set1_pd(double_power(std::max(highest - 12, -1000)));
    const __m512d limit = _mm512_set1_pd(double_power(std::min(lowest + 28, 1000)));
    unsigned inexact = 0;
    for (int v = 0; v < 2; ++v) {
      const __m512d magnitude = _mm512_abs_pd(sums[v]);
      const __mmask8 other = _mm512_cmp_pd_mask(sums[v], _mm512_setzero_pd(), _CMP_NEQ_UQ);
      const __mmask8 fits =
          _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(magnitude, least, _CMP_GE_OQ), magnitude, limit, _CMP_LT_OQ);
      inexact |= static_cast<unsigned>(other & static_cast<unsigned char>(~fits)) << (8 * v);
    }
    return static_cast<__mmask16>(inexact);
  }

  // Return doubles with the 24 highest bits of their significands, rounded toward zero.
  static __m512d truncated(__m512d x) {
    return _mm512_castsi512_pd(_mm512_and_si512(_mm512_castpd_si512(x), _mm512_set1_epi64(~((1LL << 29) - 1))));
  }

  // Store in `products` the sums of the products of group g, in units of 1/4, for kVnniBlock rows.
  __attribute__((target("avx512vnni"), always_inline)) static inline void multiply(const VnniRow* a,
                                                                                   const VnniColumns& b, int g,
                                                                                   __m512i* products) {
    for (int r = 0; r < kVnniBlock; ++r) products[r] = _mm512_set1_epi32(a[r].corrections[g]);
#pragma GCC unroll 4
    for (int i = 4 * g; i < 4 * g + 4; ++i) {
      const __m512i word = _mm512_load_si512(b.words[i]);
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        products[r] = _mm512_dpbusd_epi32(products[r], word, _mm512_set1_epi32(a[r].words[i]));
      }
    }
  }

  // Add a step to the sums of kVnniBlock rows and one panel, with scales as integers.
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_integers(const VnniRow* a,
                                                                                       const VnniColumns& b, int step,
                                                                                       __m512d (*sums)[2]) {
    __m512i totals[kVnniBlock];
    for (int r = 0; r < kVnniBlock; ++r) totals[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int g = 4 * step; g < 4 * step + 4; ++g) {
      __m512i products[kVnniBlock];
      multiply(a, b, g, products);
      const __m512i scales = _mm512_load_si512(b.integers[g]);
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512i scale = _mm512_mullo_epi32(scales, _mm512_set1_epi32(a[r].integers[g]));
        totals[r] = _mm512_add_epi32(totals[r], _mm512_mullo_epi32(products[r], scale));
      }
    }
    for (int r = 0; r < kVnniBlock; ++r) {
      const __m512d unit = _mm512_set1_pd(0.25 / (a[r].ranges[step].unit() * b.ranges[step].unit()));
      const __m512d low = _mm512_cvtepi32_pd(_mm512_castsi512_si256(totals[r]));
      const __m512d high = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(totals[r], 1));
      sums[r][0] = truncated(_mm512_fmadd_pd(low, unit, sums[r][0]));
      sums[r][1] = truncated(_mm512_fmadd_pd(high, unit, sums[r][1]));
    }
  }

  // Add `steps` decoded steps, from element k of K on, to the sums c of kVnniBlock rows and one panel. `row` is the
  // first of the rows, and `first` the first column of the panel.
  __attribute__((target("avx512vnni"))) void add_steps(const VnniRow* a, const VnniColumns& b, i64 row, i64 first,
                                                       i64 k, int steps, double (*c)[kVnniLanes]) const {
    __m512d sums[kVnniBlock][2];
    for (int r = 0; r < kVnniBlock; ++r) {
      for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_load_pd(c[r] + 8 * v);
    }
    for (int step = 0; step < steps; ++step) {
      __mmask16 inexact[kVnniBlock];
      bool any = false;
      const Way way = way_of(a, b.ranges[step], step, sums);
      if (way == Way::integers) {
        add_integers(a, b, step, sums);
        continue;
      }
      if (way == Way::lanes) {
        for (int r = 0; r < kVnniBlock; ++r) {
          inexact[r] = inexact_lanes(a[r].ranges[step], b.ranges[step], sums[r]);
          any |= inexact[r] != 0;
        }
      }
      if (any) {
        for (int r = 0; r < kVnniBlock; ++r) {
          for (int v = 0; v < 2; ++v) _mm512_store_pd(c[r] + 8 * v, sums[r][v]);
        }
      }
      for (int g = 4 * step; g < 4 * step + 4; ++g) {
        __m512i products[kVnniBlock];
        multiply(a, b, g, products);
        const __m512d scales[2] = {_mm512_load_pd(b.scales[g]), _mm512_load_pd(b.scales[g] + 8)};
        for (int r = 0; r < kVnniBlock; ++r) {
          const __m512d scale = _mm512_set1_pd(a[r].scales[g]);
          const __m512d low = _mm512_cvtepi32_pd(_mm512_castsi512_si256(products[r]));
          const __m512d high = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(products[r], 1));
          sums[r][0] = _mm512_fmadd_pd(low, _mm512_mul_pd(scale, scales[0]), sums[r][0]);
          sums[r][1] = _mm512_fmadd_pd(high, _mm512_mul_pd(scale, scales[1]), sums[r][1]);
        }
      }
      for (int r = 0; r < kVnniBlock; ++r) {
        for (int v = 0; v < 2; ++v) sums[r][v] = truncated(sums[r][v]);
      }
      if (any) {
        for (int r = 0; r < kVnniBlock; ++r)
          replace_inexact(inexact[r], row + r, first, k + step * kVnniStep, c[r], sums[r]);
      }
    }
    for (int r = 0; r < kVnniBlock; ++r) {
      for (int v = 0; v < 2; ++v) _mm512_store_pd(c[r] + 8 * v, sums[r][v]);
    }
  }

  // Replace the sums of the lanes in `inexact` by those that add_slowly finds. k: the first element of the step.
  // before: the sums of the row before the step. sums: the sums after the step.
  void replace_inexact(__mmask16 inexact, i64 row, i64 first, i64 k, const double* before, __m512d* sums) const {
    alignas(64) double found[kVnniLanes];
    for (int v = 0; v < 2; ++v) _mm512_store_pd(found + 8 * v, sums[v]);
    for (unsigned lanes = inexact; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (row < call.rows && first + lane < call.columns) found[lane] = add_slowly(row, first + lane, k, before[lane]);
    }
    for (int v = 0; v < 2; ++v) sums[v] = _mm512_load_pd(found + 8 * v);
  }

  // Return the sum of one result after the step that begins at element k of K, computed term by term. c is the sum
  // before the step.
  double add_slowly(i64 row, i64 column, i64 k, double c) const {
    const double zero_power = double_power(call.zero_exponent);
    double terms[kVnniStep / 16] = {}, largest = sum_power(c, zero_power);
    const u8* x = static_cast<const u8*>(call.a.codes) + row * call.a.codes_step;
    const u8* y = static_cast<const u8*>(call.b.codes) + column * call.b.codes_step;
    for (int g = 0; g < kVnniStep / 16; ++g) {
      double power = zero_power;
      const i64 first = k + 16 * g;
      if (first < call.length) {
        double sum = 0;
        bool any = false;
        for (i64 i = first; i < std::min(first + 16, call.length); ++i) {
          const double product =
              call.a.values[x[i / 2] >> (i % 2 * 4) & 15] * call.b.values[y[i / 2] >> (i % 2 * 4) & 15];
          sum += product;
          any |= product != 0;
        }
        const u8 p = call.a.scales[row * call.a.scales_step + first / call.a.block];
        const u8 q = call.b.scales[column * call.b.scales_step + first / call.b.block];
        const double scale = call.a.scale_values[p] * call.b.scale_values[q];
        terms[g] = sum * scale;
        if (any && scale != 0) power = call.a.scale_powers[p] * call.b.scale_powers[q];
      }
      largest = std::max(largest, power);
    }
    return sum_of_terms(c, terms, kVnniStep / 16, largest, call.fraction_bits, call.output_bits);
  }
};

}  // namespace
#else
#define FP4KIT_HAS_VNNI 0
#endif
