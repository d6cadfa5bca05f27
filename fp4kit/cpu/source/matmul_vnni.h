// Products of block-scaled E2M1 matrices as Blackwell's FP4 instructions add them, with AVX-512 VNNI. matmul.h computes
// them on other processors.
//
// Elements are integers in units of 1/2, so the sum of a group of 16 products is an integer dot product. Usually no
// term of a step loses bits when it is shifted to the largest exponent. Then the sum of the terms and of C is exact in
// double, and it is truncated once. If exponents do not prove this for a lane, that lane is added term by term.
//
// E8M0 scales of neighboring groups usually differ by a few powers of two. Then elements are shifted by the difference,
// and all products of a step are one integer dot product.
#pragma once

#include "matmul_avx512.h"

#if FP4KIT_HAS_AVX512

namespace {

constexpr int kVnniLanes = kProductLanes;              // number of columns of a panel
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

// The largest difference of the exponents of a line's scales in a step that its elements can take over. Shifted by it,
// elements are at most 96 in units of 1/2. Elements of columns are stored with the offset kOffset, as unsigned bytes.
constexpr int kMostShift = 3, kOffset = 96;

// The value and the range of every scale code of an operand. Values are multiplied by `factor`. are_powers is true if
// all values are powers of two, zero or NaN.
struct ScaleTable {
  double values[256];
  ScaleRange ranges[256];
  bool are_powers = true;

  ScaleTable(const ProductOperand& x, double factor) {
    for (int code = 0; code < 256; ++code) {
      const double value = x.scale_values[code];
      const int exponent = static_cast<int>(__double_as_longlong(x.scale_powers[code]) >> 52) - 1023;
      values[code] = value * factor;
      ranges[code] = value == 0 ? kNoScale : value != value ? kNanScale : ScaleRange{exponent, exponent};
      are_powers = are_powers && (value == 0 || value != value || value == x.scale_powers[code]);
    }
  }
};

// The scales of one line (a row or a column) in at most kVnniSteps steps. Groups beyond K have the scale 0.
//
// A step is uniform if its scales are powers of two whose exponents differ by at most kMostShift. Then all its groups
// have the smallest of these scales, and the elements of each group are shifted left by `shifts` bits instead.
struct LineScales {
  double values[kVnniGroups];
  u8 shifts[kVnniGroups];
  ScaleRange ranges[kVnniSteps];  // the ranges of the scales before shifting
  bool is_uniform[kVnniSteps];

  // Decode the scales of `steps` steps of line `line` of an operand, from element k of K on. `length` is the number of
  // elements from there on; no scale exists if it is 0 or less.
  void decode(const ProductOperand& x, const ScaleTable& table, i64 line, i64 k, i64 length, int steps) {
    const u8* codes = x.scales + line * x.scales_step + k / x.block;
    const int shift = __builtin_ctz(x.block) - 4;
    for (int step = 0; step < steps; ++step) {
      int lowest[4];
      ScaleRange range = kNoScale;
      double smallest = 0;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int g = 4 * step + i;
        const bool exists = 16 * g < length;
        const u8 code = exists ? codes[g >> shift] : 0;
        const ScaleRange own = exists ? table.ranges[code] : kNoScale;
        values[g] = exists ? table.values[code] : 0;
        lowest[i] = own.lowest;
        shifts[g] = 0;
        if (own.lowest < range.lowest) smallest = values[g];
        range.add(own);
      }
      ranges[step] = range;
      is_uniform[step] = table.are_powers && range.highest - range.lowest <= kMostShift;
      if (!is_uniform[step]) continue;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (values[4 * step + i] != 0) shifts[4 * step + i] = static_cast<u8>(lowest[i] - range.lowest);
        values[4 * step + i] = smallest;
      }
    }
  }
};

// The decoded elements of a panel of columns, for at most kProductDepth elements of K. A word holds four elements of
// one lane, in units of 1/2, shifted by LineScales::shifts, each plus kOffset. `scales` holds the scale of each group,
// and `ranges` the range of each step.
struct VnniColumns {
  alignas(64) u32 words[kProductDepth / 4][kVnniLanes];
  alignas(64) double scales[kVnniGroups][kVnniLanes];
  alignas(64) i32 integers[kVnniGroups][kVnniLanes];  // scales as integers in steps with a small range
  alignas(64) float units[kVnniSteps][kVnniLanes];    // the scale of each step that is uniform in all lanes
  ScaleRange ranges[kVnniSteps];
  bool is_uniform[kVnniSteps];  // whether the step is uniform in all lanes
};

// The decoded elements of one row, for at most kProductDepth elements of K. A word holds four elements, in units of
// 1/2, shifted by LineScales::shifts, as signed bytes. `scales` holds a quarter of the scale of each group, because
// products are in units of 1/4.
struct VnniRow {
  alignas(64) i32 words[kProductDepth / 4];
  i32 corrections[kVnniGroups];      // -kOffset times the sum of a group's elements
  i32 step_corrections[kVnniSteps];  // the sum of the corrections of a step
  i32 integers[kVnniGroups];         // scales as integers in steps with a small range
  double scales[kVnniGroups];
  float units[kVnniSteps];  // a quarter of the scale of each uniform step
  ScaleRange ranges[kVnniSteps];
  bool is_uniform[kVnniSteps];
};

// Rows that are multiplied at once with a panel, and what holds for all of them in each step.
struct VnniRows {
  VnniRow rows[kVnniBlock];
  ScaleRange ranges[kVnniSteps];
  bool is_uniform[kVnniSteps];
};

// Decode 64 * `steps` elements, of which `bytes` bytes of codes exist, and store each as a byte: its value in units of
// 1/2, shifted left by the entry of `shifts` for its group, plus `offset`. Elements beyond the codes are zeros.
void decode_halves(const u8* codes, i64 bytes, int steps, const u8* shifts, int offset, u8* to) {
  __m128i tables[kMostShift + 1];
  const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int shift = 0; shift <= kMostShift; ++shift) {
    __m128i shifted = values;
    for (int i = 0; i < shift; ++i) shifted = _mm_add_epi8(shifted, shifted);
    tables[shift] = _mm_add_epi8(shifted, _mm_set1_epi8(static_cast<char>(offset)));
  }
  const __m128i low = _mm_set1_epi8(15);
  for (int i = 0; i < steps * 2; ++i) {
    const i64 left = std::max<i64>(bytes - 16 * i, 0);
    const __mmask16 exists = left < 16 ? static_cast<__mmask16>((1u << left) - 1) : static_cast<__mmask16>(0xFFFF);
    const __m128i pairs = _mm_maskz_loadu_epi8(exists, codes + 16 * i);
    const __m128i first = _mm_and_si128(pairs, low), second = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
    __m128i* group = reinterpret_cast<__m128i*>(to + 32 * i);
    _mm_storeu_si128(group, _mm_shuffle_epi8(tables[shifts[2 * i]], _mm_unpacklo_epi8(first, second)));
    _mm_storeu_si128(group + 1, _mm_shuffle_epi8(tables[shifts[2 * i + 1]], _mm_unpackhi_epi8(first, second)));
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
    VnniRows rows[kVnniRows / kVnniBlock];
    alignas(64) float sums[kVnniPanels][kVnniRows][kVnniLanes];
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
    const i64 blocks = (rows + kVnniBlock - 1) / kVnniBlock;
    const i64 columns = std::min<i64>(kVnniPanels * kVnniLanes, call.columns - first);
    const int panels = static_cast<int>((columns + kVnniLanes - 1) / kVnniLanes);
    for (int p = 0; p < panels; ++p) {
      load_first_sums(call, first_row, rows, blocks * kVnniBlock, first + p * kVnniLanes, m.sums[p]);
    }
    for (i64 k = 0; k < call.length; k += kProductDepth) {
      const int steps = static_cast<int>((std::min(kProductDepth, call.length - k) + kVnniStep - 1) / kVnniStep);
      for (i64 i = 0; i < blocks; ++i) decode_rows(m.rows[i], a_scales, first_row + i * kVnniBlock, k, steps);
      for (int p = 0; p < panels; ++p) {
        const i64 column = first + p * kVnniLanes;
        decode_columns(m.columns, b_scales, column, k, steps);
        for (i64 i = 0; i < blocks; ++i) {
          const i64 row = first_row + i * kVnniBlock;
          add_steps(m.rows[i], m.columns, row, column, k, steps, m.sums[p] + i * kVnniBlock);
        }
      }
    }
    for (int p = 0; p < panels; ++p) {
      for (i64 r = 0; r < rows; ++r) put_lanes(call, first_row + r, first + p * kVnniLanes, m.sums[p][r]);
    }
  }

  // Store in `to` the decoded elements of `steps` steps, from element k of K on, for the panel that begins at column
  // `first`. Elements and scales beyond the operand are zeros.
  void decode_columns(VnniColumns& to, const ScaleTable& table, i64 first, i64 k, int steps) const {
    for (ScaleRange& range : to.ranges) range = kNoScale;
    for (bool& is_uniform : to.is_uniform) is_uniform = true;
    for (int lane = 0; lane < kVnniLanes; ++lane) {
      const bool exists = first + lane < call.columns;
      const i64 column = exists ? first + lane : 0, length = exists ? call.length - k : 0;
      LineScales scales;
      scales.decode(call.b, table, column, k, length, steps);
      alignas(64) u32 words[kProductDepth / 4];
      decode_halves(static_cast<const u8*>(call.b.codes) + column * call.b.codes_step + k / 2, length / 2, steps,
                    scales.shifts, kOffset, reinterpret_cast<u8*>(words));
      for (int i = 0; i < steps * kVnniStep / 4; ++i) to.words[i][lane] = words[i];
      for (int g = 0; g < steps * kVnniStep / 16; ++g) to.scales[g][lane] = scales.values[g];
      for (int step = 0; step < steps; ++step) {
        to.ranges[step].add(scales.ranges[step]);
        to.is_uniform[step] = to.is_uniform[step] && scales.is_uniform[step];
        to.units[step][lane] = static_cast<float>(scales.values[4 * step]);
      }
    }
    for (int g = 0; g < steps * kVnniStep / 16; ++g) {
      if (to.ranges[g / 4].highest - to.ranges[g / 4].lowest > kIntegerRange) continue;
      const double unit = to.ranges[g / 4].unit();
      for (int lane = 0; lane < kVnniLanes; ++lane) to.integers[g][lane] = static_cast<i32>(to.scales[g][lane] * unit);
    }
  }

  // Store in `to` the decoded elements of `steps` steps of kVnniBlock rows from row `first` on, from element k of K on.
  // Elements and scales beyond the operand are zeros.
  void decode_rows(VnniRows& to, const ScaleTable& table, i64 first, i64 k, int steps) const {
    for (int step = 0; step < steps; ++step) {
      to.ranges[step] = kNoScale;
      to.is_uniform[step] = true;
    }
    for (int r = 0; r < kVnniBlock; ++r) {
      decode_row(to.rows[r], table, first + r, k, steps);
      for (int step = 0; step < steps; ++step) {
        to.ranges[step].add(to.rows[r].ranges[step]);
        to.is_uniform[step] = to.is_uniform[step] && to.rows[r].is_uniform[step];
      }
    }
  }

  // Store in `to` the decoded elements of `steps` steps of row `row`, as decode_rows does.
  __attribute__((target("avx512vnni"))) void decode_row(VnniRow& to, const ScaleTable& table, i64 row, i64 k,
                                                        int steps) const {
    const i64 length = row < call.rows ? call.length - k : 0;
    if (row >= call.rows) row = 0;
    LineScales scales;
    scales.decode(call.a, table, row, k, length, steps);
    decode_halves(static_cast<const u8*>(call.a.codes) + row * call.a.codes_step + k / 2, length / 2, steps,
                  scales.shifts, 0, reinterpret_cast<u8*>(to.words));
    for (int step = 0; step < steps; ++step) {
      const __m512i words = _mm512_load_si512(to.words + 16 * step);
      __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(kOffset), words);
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
      sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
      const __m512i groups = _mm512_maskz_compress_epi32(0x1111, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
      i32* corrections = to.corrections + 4 * step;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(corrections), _mm512_castsi512_si128(groups));
      to.step_corrections[step] = corrections[0] + corrections[1] + corrections[2] + corrections[3];
      to.ranges[step] = scales.ranges[step];
      to.is_uniform[step] = scales.is_uniform[step];
      to.units[step] = static_cast<float>(scales.values[4 * step]);
    }
    for (int g = 0; g < steps * kVnniStep / 16; ++g) {
      to.scales[g] = scales.values[g];
      if (to.ranges[g / 4].highest - to.ranges[g / 4].lowest > kIntegerRange) continue;
      to.integers[g] = static_cast<i32>(to.scales[g] * 4 * to.ranges[g / 4].unit());
    }
  }

  // How the terms of a step are added: lane by lane where necessary, as doubles, with integer scales, or as one integer
  // sum of all products, whose scale is that of the step.
  enum class Way { lanes, doubles, integers, uniform };

  // Return the fastest way that is certain, without a look at single lanes, to be exact for kVnniBlock rows. The
  // conditions for `doubles` are those of inexact_lanes, except that no sum may be zero. exist[r]: the lanes of row r
  // whose results exist; the other lanes are ignored.
  static Way way_of(const VnniRows& a, const VnniColumns& b, int step, const __m512* sums, const __mmask16* exist) {
    const int highest = a.ranges[step].highest + b.ranges[step].highest;
    const int lowest = a.ranges[step].lowest + b.ranges[step].lowest;
    if (highest - lowest > 27 || lowest < -80 || highest > 90 || highest < -80) return Way::lanes;
    // Bits of positive floats are ordered as the floats are.
    const i32 least = (highest - 12 + 127) << 23;
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), first = _mm512_set1_epi32(least);
    const __m512i count = _mm512_set1_epi32(((lowest + 28 + 127) << 23) - least);
    unsigned outside = 0;
    for (int r = 0; r < kVnniBlock; ++r) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(sums[r]), magnitude);
      outside |= _mm512_mask_cmpge_epu32_mask(exist[r], _mm512_sub_epi32(bits, first), count);
    }
    if (outside) return Way::lanes;
    if (a.is_uniform[step] && b.is_uniform[step]) return Way::uniform;
    return highest - lowest <= kIntegerRange ? Way::integers : Way::doubles;
  }

  // Return the lanes of a row whose sum may not be added exactly in double: a mask of kVnniLanes bits. x, y: the ranges
  // of the row and of the panel in this step. sums: the sums of the row.
  static __mmask16 inexact_lanes(ScaleRange x, ScaleRange y, __m512 sums) {
    const int highest = x.highest + y.highest, lowest = x.lowest + y.lowest;
    // No term loses bits if the terms' exponents differ by at most F - 8, and C is neither far below nor far above.
    if (highest - lowest > 27 || lowest < -80 || highest > 90) return 0xFFFF;
    const __m512d least = _mm512_set1_pd(double_power(std::max(highest - 12, -1000)));
    const __m512d limit = _mm512_set1_pd(double_power(std::min(lowest + 28, 1000)));
    unsigned inexact = 0;
    for (int v = 0; v < 2; ++v) {
      const __m512d c = half_of(sums, v), magnitude = _mm512_abs_pd(c);
      const __mmask8 other = _mm512_cmp_pd_mask(c, _mm512_setzero_pd(), _CMP_NEQ_UQ);
      const __mmask8 fits =
          _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(magnitude, least, _CMP_GE_OQ), magnitude, limit, _CMP_LT_OQ);
      inexact |= static_cast<unsigned>(other & static_cast<unsigned char>(~fits)) << (8 * v);
    }
    return static_cast<__mmask16>(inexact);
  }

  // Store in `products` the sums of the products of group g, in units of 1/4, for kVnniBlock rows.
  __attribute__((target("avx512vnni"), always_inline)) static inline void multiply(const VnniRow* a,
                                                                                   const VnniColumns& b, int g,
                                                                                   __m512i* products) {
    for (int r = 0; r < kVnniBlock; ++r) products[r] = _mm512_set1_epi32(a[r].corrections[g]);
    add_products<4>(a, b, 4 * g, products);
  }

  // Add to `products` the products of kWords words, from word `first` on, for kVnniBlock rows.
  template <int kWords>
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_products(const VnniRow* a,
                                                                                       const VnniColumns& b, int first,
                                                                                       __m512i* products) {
#pragma GCC unroll 16
    for (int i = first; i < first + kWords; ++i) {
      const __m512i word = _mm512_load_si512(b.words[i]);
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        products[r] = _mm512_dpbusd_epi32(products[r], word, _mm512_set1_epi32(a[r].words[i]));
      }
    }
  }

  // Add a uniform step to the sums of kVnniBlock rows and one panel. The sum of all products has less than 24 bits, so
  // a fused multiply-add toward zero adds it to C and truncates the result.
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_uniform(const VnniRow* a,
                                                                                      const VnniColumns& b, int step,
                                                                                      __m512* sums) {
    __m512i products[kVnniBlock];
    for (int r = 0; r < kVnniBlock; ++r) products[r] = _mm512_set1_epi32(a[r].step_corrections[step]);
    add_products<kVnniStep / 4>(a, b, kVnniStep / 4 * step, products);
    const __m512 units = _mm512_load_ps(b.units[step]);
    for (int r = 0; r < kVnniBlock; ++r) {
      const __m512 unit = _mm512_mul_ps(units, _mm512_set1_ps(a[r].units[step]));
      sums[r] = _mm512_fmadd_round_ps(_mm512_cvtepi32_ps(products[r]), unit, sums[r], kTowardZero);
    }
  }

  // Add a step to the sums of kVnniBlock rows and one panel, with scales as integers.
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_integers(const VnniRow* a,
                                                                                       const VnniColumns& b, int step,
                                                                                       __m512* sums) {
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
      const __m512d low = _mm512_fmadd_pd(integer_half_of(totals[r], 0), unit, half_of(sums[r], 0));
      const __m512d high = _mm512_fmadd_pd(integer_half_of(totals[r], 1), unit, half_of(sums[r], 1));
      sums[r] = truncated(low, high);
    }
  }

  // Add a step to the sums of kVnniBlock rows and one panel, with terms as doubles. The sums must fit for all lanes.
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_doubles(const VnniRow* a,
                                                                                      const VnniColumns& b, int step,
                                                                                      __m512* sums) {
    __m512d totals[kVnniBlock][2];
    for (int r = 0; r < kVnniBlock; ++r) {
      for (int v = 0; v < 2; ++v) totals[r][v] = half_of(sums[r], v);
    }
    for (int g = 4 * step; g < 4 * step + 4; ++g) {
      __m512i products[kVnniBlock];
      multiply(a, b, g, products);
      for (int r = 0; r < kVnniBlock; ++r) {
        for (int v = 0; v < 2; ++v) {
          const __m512d scale = _mm512_mul_pd(_mm512_set1_pd(a[r].scales[g]), _mm512_load_pd(b.scales[g] + 8 * v));
          totals[r][v] = _mm512_fmadd_pd(integer_half_of(products[r], v), scale, totals[r][v]);
        }
      }
    }
    for (int r = 0; r < kVnniBlock; ++r) sums[r] = truncated(totals[r][0], totals[r][1]);
  }

  // Add `steps` decoded steps, from element k of K on, to the sums c of kVnniBlock rows and one panel. `row` is the
  // first of the rows, and `first` the first column of the panel.
  __attribute__((target("avx512vnni"))) void add_steps(const VnniRows& a, const VnniColumns& b, i64 row, i64 first,
                                                       i64 k, int steps, float (*c)[kVnniLanes]) const {
    __m512 sums[kVnniBlock];
    __mmask16 exist[kVnniBlock];
    for (int r = 0; r < kVnniBlock; ++r) {
      sums[r] = _mm512_load_ps(c[r]);
      exist[r] = row + r < call.rows ? lanes_from(call, first) : static_cast<__mmask16>(0);
    }
    for (int step = 0; step < steps; ++step) {
      const Way way = way_of(a, b, step, sums, exist);
      if (way == Way::uniform) {
        add_uniform(a.rows, b, step, sums);
      } else if (way == Way::integers) {
        add_integers(a.rows, b, step, sums);
      } else {
        __mmask16 inexact[kVnniBlock] = {};
        __m512 before[kVnniBlock];
        for (int r = 0; r < kVnniBlock; ++r) {
          before[r] = sums[r];
          if (way == Way::lanes) {
            inexact[r] = exist[r] & inexact_lanes(a.rows[r].ranges[step], b.ranges[step], sums[r]);
          }
        }
        add_doubles(a.rows, b, step, sums);
        for (int r = 0; r < kVnniBlock; ++r) {
          if (inexact[r]) replace_lanes(*this, inexact[r], row + r, first, k + step * kVnniStep, before[r], sums[r]);
        }
      }
    }
    for (int r = 0; r < kVnniBlock; ++r) _mm512_store_ps(c[r], sums[r]);
  }

  // Return the sum of one result after the step that begins at element k of K, computed term by term. c is the sum
  // before the step.
  float add_slowly(i64 row, i64 column, i64 k, float c) const {
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
    return static_cast<float>(sum_of_terms(c, terms, kVnniStep / 16, largest, call.fraction_bits, call.output_bits));
  }
};

}  // namespace
#endif
