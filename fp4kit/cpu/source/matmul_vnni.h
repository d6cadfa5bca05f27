// Matrix products D = C + A B^T of block-scaled E2M1 operands with the additions of Blackwell's FP4 instructions, with
// AVX-512 VNNI.
//   K      the axis along which products are added
//   group  16 elements along K
//   step   the 64 elements along K (four groups) whose products the unit adds at once; also its number
//   term   one summand of a step: the sum of the products of a group, times both block scales
//   line   a row or a column
//   panel  16 neighboring columns of D, one per vector lane
//   task   a tile of D that one thread computes
//   a      the decoded elements of kVnniBlock rows of A; `row` is the index of the first of these rows
//   b      the decoded elements of kWidth (1 or 2) panels of columns; `first` is the index of the first column
//   c      the sums so far: c[w][r][lane] for row r of `a` and panel w of b
//   k      an index along K
//
// matmul.h computes these products on other processors. Elements are integers in units of 1/2, so the sum of a group of
// 16 products is an integer dot product. The scales of a line in a step are integers, too, in units of a power of two.
// Usually no term of a step loses bits when it is shifted to the largest exponent. Then the exact sum of the terms is
// added to C, and truncated once. A lane for which the exponents do not prove this is computed term by term.
//
// E8M0 scales of neighboring groups usually differ by a few powers of two. Then elements are shifted left to make up
// for the difference, and a step is one integer dot product.
//
// GCC keeps an array of vectors in registers only if every loop over it is unrolled.
#pragma once

#include "matmul_avx512.h"

#if FP4KIT_HAS_AVX512

namespace {

constexpr int kVnniLanes = kProductLanes;              // number of columns of a panel
constexpr int kVnniPanels = 16;                        // largest number of panels of a task
constexpr int kVnniBlock = 4;                          // number of rows that are multiplied at once
constexpr int kVnniWidth = 2;                          // number of panels that are multiplied at once
constexpr i64 kVnniRows = 128;                         // largest number of rows of a task
constexpr int kVnniStep = 64;                          // number of elements along K per step
constexpr int kVnniSteps = kProductDepth / kVnniStep;  // largest number of steps that are decoded at once
constexpr int kVnniGroups = kProductDepth / 16;        // largest number of groups that are decoded at once
static_assert(kVnniGroups == 32 && kVnniSteps == 8);   // a vector holds the scales of a line as 16-bit integers

// kMostShift: the largest number of bits by which elements are shifted to make up for different scale exponents in a
// step. Shifted elements are at most 96 in units of 1/2. kOffset: the number that is added to elements of columns, so
// that they are unsigned bytes.
constexpr int kMostShift = 3, kOffset = 96;
// Spread: the largest minus the smallest scale exponent of a line in a step. kLineSpread: the largest spread for which
// the integer scales of the line have 16 bits. kPairSpread: the largest sum of the spreads of a row and a column for
// which the products of their integer scales have 16 bits.
constexpr int kLineSpread = 11, kPairSpread = 7;
// Scale exponents must be in -kScaleLimit ... kScaleLimit, so that 2^exponent / 32 is a normal float. Lines with other
// scales, with NaN, or with a spread above kLineSpread get kWideExponent as their highest exponent, so that they are
// computed term by term. It is above kNoScale, because NaN times zero is NaN.
constexpr int kScaleLimit = 110, kWideExponent = 30000;
// The lowest exponent of a range without scales, and the negative of its highest exponent. Groups whose elements or
// scale are zero do not count, unless the scale is NaN.
constexpr int kNoScale = 10000;

// The range of the scale exponents in one step, over the groups that count (those with a nonzero element and scale, or
// with a scale of NaN). If none counts, lowest is larger than highest.
struct ScaleRange {
  int lowest = kNoScale, highest = -kNoScale;

  // Extend this range so that it also contains the exponents other_lowest ... other_highest. A range without scales
  // (kNoScale, -kNoScale) changes nothing.
  void add(int other_lowest, int other_highest) {
    lowest = std::min(lowest, other_lowest);
    highest = std::max(highest, other_highest);
  }
};

// A table with one entry per scale code of an operand: (exponent + kBias) << 4 | significand, where the value of the
// scale is significand * 2^(exponent - 3). The entry of a zero scale is 0. Scales that cannot be written in this form,
// such as NaN, have the entry kSpecial.
struct ScaleTable {
  static constexpr int kBias = 256;
  static constexpr u16 kSpecial = (kBias + 2000) << 4 | 8;
  alignas(64) u16 entries[256];

  explicit ScaleTable(const ProductOperand& x) {
    for (int code = 0; code < 256; ++code) {
      const double value = x.scale_values[code], significand = value * over(3, x.scale_powers[code]);
      const int exponent = exponent_of(x.scale_powers[code]);
      const bool is_usual = significand >= 1 && significand <= 15 && significand == static_cast<int>(significand);
      const int entry = (exponent + kBias) << 4 | (is_usual ? static_cast<int>(significand) : 0);
      entries[code] = value == 0 ? 0 : is_usual ? static_cast<u16>(entry) : kSpecial;
    }
  }

  // Return the entries for 32 scale codes, which are stored one per byte in `codes`, as 16-bit integers.
  __m512i of(__m256i codes) const { return looked_up(entries, _mm512_cvtepu8_epi16(codes)); }
};

// The integer scales of one line (a row or a column) in at most kVnniSteps steps, one per group. The unit of a step is
// 2^(lowest - 3), where `lowest` is the lowest scale exponent of the step. Groups whose elements are all zero have the
// scale 0.
struct LineScales {
  alignas(64) int16_t integers[kVnniGroups];
  alignas(32) u8 shifts[kVnniGroups];  // the exponent of each scale minus the lowest one of the step
  alignas(32) i32 lowest[kVnniSteps], highest[kVnniSteps];
  alignas(32) float units[kVnniSteps];
  unsigned may_shift;  // a bit per step: whether its scales are powers of two, and its shifts are at most kMostShift

  // Decode the scales of a line of the operand x, starting at index k along K, and store them in the fields of this
  // struct. `elements` points to the element codes of the line at k. `table` is the table of the scale codes. `length`
  // is the number of elements from k to the end of the line; if it is 0 or less, the line has no scales, and all
  // integers become 0.
  void decode(const ProductOperand& x, const ScaleTable& table, i64 line, i64 k, i64 length, const u8* elements) {
    const int groups = static_cast<int>(std::min<i64>((std::max<i64>(length, 0) + 15) / 16, kVnniGroups));
    const int shift = __builtin_ctz(x.block) - 4;
    const __mmask32 exist = groups < 32 ? (1u << groups) - 1 : ~0u;
    const int count = (groups + (1 << shift) - 1) >> shift;  // number of scale codes
    const __mmask32 codes_exist = count < 32 ? (1u << count) - 1 : ~0u;
    const __m256i codes = _mm256_maskz_loadu_epi8(codes_exist, x.scales + line * x.scales_step + k / x.block);
    __m512i entries = table.of(codes);
    if (shift) entries = _mm512_permutexvar_epi16(_mm512_srl_epi16(iota(), _mm_cvtsi32_si128(shift)), entries);
    const __m512i significands = _mm512_and_si512(entries, _mm512_set1_epi16(15));
    const __m512i exponents = _mm512_sub_epi16(_mm512_srli_epi16(entries, 4), _mm512_set1_epi16(ScaleTable::kBias));
    const __mmask32 special = _mm512_cmpgt_epi16_mask(exponents, _mm512_set1_epi16(1000));
    const __mmask32 scaled = _mm512_mask_test_epi16_mask(exist, significands, significands);
    const __mmask32 nonzero = nonzero_groups(elements, std::max<i64>(length, 0));
    const __mmask32 counts = scaled & (special | nonzero);
    const __m512i low = least_of_step(_mm512_mask_mov_epi16(_mm512_set1_epi16(kNoScale), counts, exponents));
    const __m512i negative = _mm512_sub_epi16(_mm512_setzero_si512(), exponents);
    const __m512i minus_high = least_of_step(_mm512_mask_mov_epi16(_mm512_set1_epi16(kNoScale), counts, negative));
    const __m512i differences = _mm512_maskz_sub_epi16(counts, exponents, low);
    _mm512_store_si512(integers, _mm512_maskz_sllv_epi16(counts, significands, differences));
    _mm256_store_si256(reinterpret_cast<__m256i*>(shifts), _mm512_cvtepi16_epi8(differences));
    const __mmask32 other = _mm512_mask_cmpneq_epi16_mask(counts, significands, _mm512_set1_epi16(8));
    const __mmask32 far = _mm512_mask_cmpgt_epi16_mask(counts, differences, _mm512_set1_epi16(kMostShift));
    // A step with nonzero elements under a scale of 0 must not be shifted, because all groups of a shifted step have
    // the scale 8.
    const __mmask32 fixed = other | far | (nonzero & ~scaled);
    may_shift = 0;
    for (int step = 0; step < kVnniSteps; ++step) may_shift |= (fixed >> 4 * step & 15 ? 0u : 1u) << step;

    const __m256i lows = _mm256_cvtepi16_epi32(_mm512_cvtepi64_epi16(low));
    const __m256i highs =
        _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepi16_epi32(_mm512_cvtepi64_epi16(minus_high)));
    const __mmask8 wide =
        _mm256_cmpgt_epi32_mask(highs, _mm256_min_epi32(_mm256_add_epi32(lows, _mm256_set1_epi32(kLineSpread)),
                                                        _mm256_set1_epi32(kScaleLimit))) |
        _mm256_cmplt_epi32_mask(lows, _mm256_set1_epi32(-kScaleLimit));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lowest), lows);
    _mm256_store_si256(reinterpret_cast<__m256i*>(highest),
                       _mm256_mask_mov_epi32(highs, wide, _mm256_set1_epi32(kWideExponent)));
    // Steps without scales, and lines that are computed term by term, may have any finite unit.
    const __m256i above = _mm256_add_epi32(lows, _mm256_set1_epi32(kScaleLimit));
    const __mmask8 usual = _mm256_cmple_epu32_mask(above, _mm256_set1_epi32(2 * kScaleLimit));
    const __m256i fields = _mm256_add_epi32(_mm256_maskz_mov_epi32(usual, lows), _mm256_set1_epi32(127 - 3));
    _mm256_store_si256(reinterpret_cast<__m256i*>(units), _mm256_slli_epi32(fields, 23));
  }

  // Return the integers from 0 to 31.
  static __m512i iota() {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(1)), 16));
  }

  // Return x with each integer replaced by the smallest of the four integers of its step. x has one 16-bit integer per
  // group, and a step has four groups.
  static __m512i least_of_step(__m512i x) {
    x = _mm512_min_epi16(x, _mm512_rol_epi64(x, 16));
    return _mm512_min_epi16(x, _mm512_rol_epi64(x, 32));
  }

  // Return a mask with one bit per group of 16 elements: 1 if the group has a nonzero element. The elements are the
  // first `length` nibbles (4-bit codes) at `codes`, at most 512. Groups beyond them get 0.
  static __mmask32 nonzero_groups(const u8* codes, i64 length) {
    __mmask32 found = 0;
    for (int i = 0; i < 4; ++i) {
      const i64 bytes = std::min<i64>(std::max<i64>((length + 1) / 2 - 64 * i, 0), 64);
      const __mmask64 exist = bytes < 64 ? (u64{1} << bytes) - 1 : ~u64{0};
      const __m512i x = _mm512_maskz_loadu_epi8(exist, codes + 64 * i);
      found |= static_cast<__mmask32>(_mm512_test_epi64_mask(x, _mm512_set1_epi8(0x77))) << 8 * i;
    }
    return found;
  }
};

// At most kProductDepth decoded elements along K, for a panel of columns. An entry of `words` holds four elements of
// one lane, in units of 1/2, each plus kOffset. pairs[i] holds the integer scales of groups 2i and 2i + 1, in units of
// `units` of their step.
//
// A step is shifted if LineScales::may_shift allows it for all lanes. Then elements are shifted left by
// LineScales::shifts, and the scales of all groups are 8.
struct VnniColumns {
  alignas(64) u32 words[kProductDepth / 4][kVnniLanes];
  alignas(64) i32 pairs[kVnniGroups / 2][kVnniLanes];
  alignas(64) float units[kVnniSteps][kVnniLanes];
  alignas(64) i32 lowest[kVnniSteps][kVnniLanes], highest[kVnniSteps][kVnniLanes];  // of the scales before shifting
  ScaleRange ranges[kVnniSteps];
  int spreads[kVnniSteps];  // the largest difference of the exponents of a lane's scales, after shifting
  unsigned shifted;         // a bit per step
};

// At most kProductDepth decoded elements along K, for kVnniBlock rows. An entry of `words` holds four elements, in
// units of 1/2, as signed bytes. The fields without a comment are like those of VnniColumns, except that `units` are
// divided by 4, because products of elements are in units of 1/4.
struct VnniRows {
  alignas(64) i32 words[kVnniBlock][kProductDepth / 4];
  i32 corrections[kVnniBlock][kVnniGroups];      // -kOffset times the sum of a group's elements, to undo the offset
  i32 step_corrections[kVnniBlock][kVnniSteps];  // the sum of the corrections of a step
  i32 pairs[kVnniBlock][kVnniGroups / 2];
  float units[kVnniBlock][kVnniSteps];
  i32 lowest[kVnniBlock][kVnniSteps], highest[kVnniBlock][kVnniSteps];
  ScaleRange ranges[kVnniSteps];
  int spreads[kVnniSteps];
  unsigned shifted;
};

// Decide for each of `steps` steps whether it is shifted: whether its elements are shifted left to make up for
// different scale exponents. `lines` holds `count` lines: those of a panel or of a block of rows. A step is shifted if
// may_shift allows it for all of them. For each step, store in `to` the range of all scale exponents, the largest
// spread of a line (0 if the step is shifted), and whether the step is shifted. In `lines`, set the scales of shifted
// steps to 8, and the shifts of other steps to 0. To: VnniColumns or VnniRows.
template <class To>
void combine_scales(To& to, LineScales* lines, int count, int steps) {
  to.shifted = ~0u;
  for (int line = 0; line < count; ++line) to.shifted &= lines[line].may_shift;
  for (int step = 0; step < steps; ++step) {
    ScaleRange range;
    int spread = 0;
    for (int line = 0; line < count; ++line) {
      range.add(lines[line].lowest[step], lines[line].highest[step]);
      spread = std::max(spread, lines[line].highest[step] - lines[line].lowest[step]);
    }
    to.ranges[step] = range;
    const bool is_shifted = to.shifted >> step & 1;
    to.spreads[step] = is_shifted ? 0 : spread;
    for (int line = 0; line < count; ++line) {
      if (is_shifted) {
        for (int g = 4 * step; g < 4 * step + 4; ++g) lines[line].integers[g] = 8;
      } else {
        std::memset(lines[line].shifts + 4 * step, 0, 4);
      }
    }
  }
}

// Decode 64 * `steps` E2M1 elements and store them in `to`, one byte per element: its value in units of 1/2, shifted
// left by the entry of `shifts` for its group of 16, plus `offset`. `codes` has `bytes` bytes with two codes each;
// elements beyond them are zeros, stored as `offset`.
void decode_halves(const u8* codes, i64 bytes, int steps, const u8* shifts, int offset, u8* to) {
  __m128i tables[kMostShift + 1];
  const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int shift = 0; shift <= kMostShift; ++shift) {
    __m128i shifted = values;
    for (int i = 0; i < shift; ++i) shifted = _mm_add_epi8(shifted, shifted);
    tables[shift] = _mm_add_epi8(shifted, _mm_set1_epi8(static_cast<char>(offset)));
  }
  for (int i = 0; i < steps; ++i) {
    const i64 left = std::min<i64>(std::max<i64>(bytes - 32 * i, 0), 32);
    const __mmask32 exist = left < 32 ? (1u << left) - 1 : ~0u;
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(exist, codes + 32 * i));
    // Spread each pair of codes to two bytes: the first code is in the low byte, and the second in the high byte.
    const __m512i apart = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    __m512i table = _mm512_broadcast_i32x4(tables[shifts[4 * i]]);
    table = _mm512_mask_broadcast_i32x4(table, 0x00F0, tables[shifts[4 * i + 1]]);
    table = _mm512_mask_broadcast_i32x4(table, 0x0F00, tables[shifts[4 * i + 2]]);
    table = _mm512_mask_broadcast_i32x4(table, 0xF000, tables[shifts[4 * i + 3]]);
    _mm512_storeu_si512(to + 64 * i, _mm512_shuffle_epi8(table, apart));
  }
}

// Return true if VnniTask can compute the matrix product of a call. All of this must hold:
//   - The processor has AVX-512 VNNI.
//   - Both operands have 4-bit codes, and blocks of 16 elements or a larger power of two.
//   - The additions are those of Blackwell's FP4 instructions: truncate_groups, with 64 elements per step, 35 fraction
//     bits, 23 output bits, and an exponent of zero of at most -126, without promotion.
bool uses_vnni(const ProductCall& call) {
  static const bool is_supported = __builtin_cpu_supports("avx512vnni");
  const auto is_power = [](i32 block) { return block >= 16 && (block & (block - 1)) == 0; };
  return is_supported && is_power(call.a.block) && is_power(call.b.block) && call.adder == Adder::truncate_groups &&
         call.step == kVnniStep && call.group == 16 && call.promote == 0 && call.fraction_bits == 35 &&
         call.output_bits == 23 && call.zero_exponent <= -126 && call.a.code_bits == 4 && call.b.code_bits == 4;
}

// The tasks of a call for which uses_vnni is true. A task computes a tile of at most kVnniRows rows and kVnniPanels
// panels of columns.
struct VnniTask {
  const ProductCall& call;

  // The memory of a task: the decoded elements of kVnniWidth panels and of all rows, and the sums so far.
  struct Memory {
    VnniColumns columns[kVnniWidth];
    VnniRows rows[kVnniRows / kVnniBlock];
    alignas(64) float sums[kVnniPanels][kVnniRows][kVnniLanes];
  };

  // Return the number of tasks that lie next to each other across the columns of D.
  i64 across() const { return (call.columns + kVnniPanels * kVnniLanes - 1) / (kVnniPanels * kVnniLanes); }
  // Return the number of all tasks.
  i64 count() const { return across() * ((call.rows + kVnniRows - 1) / kVnniRows); }

  // Compute the tile of D that belongs to task `index`, and store it in call.out.
  void run(i64 index) const {
    const std::unique_ptr<Memory> memory(new Memory);  // not make_unique, which would set the memory to zeros
    Memory& m = *memory;
    const ScaleTable a_scales(call.a), b_scales(call.b);
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
      for (int p = 0; p < panels; p += kVnniWidth) {
        const i64 column = first + p * kVnniLanes;
        const int width = std::min(kVnniWidth, panels - p);
        for (int w = 0; w < width; ++w) decode_columns(m.columns[w], b_scales, column + w * kVnniLanes, k, steps);
        for (i64 i = 0; i < blocks; ++i) {
          const i64 row = first_row + i * kVnniBlock;
          float (*sums)[kVnniRows][kVnniLanes] = m.sums + p;
          width == kVnniWidth ? add_steps<kVnniWidth>(m.rows[i], m.columns, row, column, k, steps, sums)
                              : add_steps<1>(m.rows[i], m.columns, row, column, k, steps, sums);
        }
      }
    }
    for (i64 r = 0; r < rows; ++r) {
      for (int p = 0; p < panels; ++p) put_lanes(call, first_row + r, first + p * kVnniLanes, m.sums[p][r]);
    }
  }

  // Decode `steps` steps of the panel whose first column is `first`, starting at index k along K, and store the
  // elements and scales in `to`. `table` is the table of scale codes. Columns, elements and scales beyond the operand
  // count as zeros.
  void decode_columns(VnniColumns& to, const ScaleTable& table, i64 first, i64 k, int steps) const {
    LineScales scales[kVnniLanes];
    for (int lane = 0; lane < kVnniLanes; ++lane) {
      const i64 column = first + lane < call.columns ? first + lane : 0;
      const i64 length = first + lane < call.columns ? call.length - k : 0;
      scales[lane].decode(call.b, table, column, k, length, codes_of(call.b, column, k));
    }
    combine_scales(to, scales, kVnniLanes, steps);
    alignas(64) u32 words[kVnniLanes][kProductDepth / 4];
    __m512i lines[kVnniLanes];
    for (int lane = 0; lane < kVnniLanes; ++lane) {
      const i64 column = first + lane < call.columns ? first + lane : 0;
      const i64 length = first + lane < call.columns ? call.length - k : 0;
      decode_halves(codes_of(call.b, column, k), (length + 1) / 2, steps, scales[lane].shifts, kOffset,
                    reinterpret_cast<u8*>(words[lane]));
      lines[lane] = _mm512_load_si512(scales[lane].integers);
      for (int step = 0; step < steps; ++step) {
        to.units[step][lane] = scales[lane].units[step];
        to.lowest[step][lane] = scales[lane].lowest[step];
        to.highest[step][lane] = scales[lane].highest[step];
      }
    }
    transpose(lines, to.pairs);
    for (int step = 0; step < steps; ++step) {
      for (int lane = 0; lane < kVnniLanes; ++lane) lines[lane] = _mm512_load_si512(words[lane] + 16 * step);
      transpose(lines, to.words + 16 * step);
    }
  }

  // Return the address of the 4-bit codes of row `row` of an operand, starting at index k along K. k must be even.
  static const u8* codes_of(const ProductOperand& x, i64 row, i64 k) {
    return static_cast<const u8*>(x.codes) + row * x.codes_step + k / 2;
  }

  // Decode `steps` steps of the kVnniBlock rows from row `first` on, starting at index k along K, and store the
  // elements and scales in `to`. `table` is the table of scale codes. Rows, elements and scales beyond the operand
  // count as zeros.
  __attribute__((target("avx512vnni"))) void decode_rows(VnniRows& to, const ScaleTable& table, i64 first, i64 k,
                                                         int steps) const {
    LineScales scales[kVnniBlock];
    for (int r = 0; r < kVnniBlock; ++r) {
      const i64 row = first + r < call.rows ? first + r : 0, length = first + r < call.rows ? call.length - k : 0;
      scales[r].decode(call.a, table, row, k, length, codes_of(call.a, row, k));
    }
    combine_scales(to, scales, kVnniBlock, steps);
    for (int r = 0; r < kVnniBlock; ++r) {
      const i64 row = first + r < call.rows ? first + r : 0, length = first + r < call.rows ? call.length - k : 0;
      decode_halves(codes_of(call.a, row, k), (length + 1) / 2, steps, scales[r].shifts, 0,
                    reinterpret_cast<u8*>(to.words[r]));
      std::memcpy(to.pairs[r], scales[r].integers, sizeof to.pairs[r]);
      std::memcpy(to.lowest[r], scales[r].lowest, sizeof to.lowest[r]);
      std::memcpy(to.highest[r], scales[r].highest, sizeof to.highest[r]);
      for (int step = 0; step < steps; ++step) {
        to.units[r][step] = scales[r].units[step] * 0.25f;
        const __m512i words = _mm512_load_si512(to.words[r] + 16 * step);
        __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(kOffset), words);
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
        const __m512i groups = _mm512_maskz_compress_epi32(0x1111, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
        i32* corrections = to.corrections[r] + 4 * step;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(corrections), _mm512_castsi512_si128(groups));
        to.step_corrections[r][step] = corrections[0] + corrections[1] + corrections[2] + corrections[3];
      }
    }
  }

  // Multiply kWords words (of four elements each) of the kVnniBlock rows of a and the kWidth panels of b, starting at
  // word `first`, and store the integer dot products in products[row][panel]. They include entry `index` of the
  // corrections of each row, which undo the offset kOffset of the elements of columns.
  template <int kWords, int kWidth, int kCount>
  __attribute__((target("avx512vnni"), always_inline)) static inline void multiply(
      const VnniRows& a, const VnniColumns* b, int first, const i32 (&corrections)[kVnniBlock][kCount], int index,
      __m512i (&products)[kVnniBlock][kWidth]) {
#pragma GCC unroll 4
    for (int r = 0; r < kVnniBlock; ++r) {
#pragma GCC unroll 2
      for (int w = 0; w < kWidth; ++w) products[r][w] = _mm512_set1_epi32(corrections[r][index]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWords; ++i) {
      __m512i columns[kWidth];
#pragma GCC unroll 2
      for (int w = 0; w < kWidth; ++w) columns[w] = _mm512_load_si512(b[w].words[first + i]);
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512i row = _mm512_set1_epi32(a.words[r][first + i]);
#pragma GCC unroll 2
        for (int w = 0; w < kWidth; ++w) products[r][w] = _mm512_dpbusd_epi32(products[r][w], columns[w], row);
      }
    }
  }

  // Return true if the exponent ranges of all lanes together prove that step number `step` loses no bits: neither of
  // its terms nor of the sums c before it, when they are shifted to the largest exponent. If the result is false,
  // single lanes must be checked by inexact_lanes. The conditions are those of inexact_lanes, except that no sum may be
  // zero.
  template <int kWidth>
  static bool is_exact(const VnniRows& a, const VnniColumns* b, int step, float (*c)[kVnniRows][kVnniLanes]) {
    int highest = -kNoScale, lowest = kNoScale;
    for (int w = 0; w < kWidth; ++w) {
      highest = std::max(highest, b[w].ranges[step].highest);
      lowest = std::min(lowest, b[w].ranges[step].lowest);
    }
    highest += a.ranges[step].highest;
    lowest += a.ranges[step].lowest;
    if (highest - lowest > 27 || lowest < -80 || highest > 90 || highest < -80) return false;
    // The bits of positive floats have the order of the floats. Doubling the bits drops the sign.
    const u32 least = static_cast<u32>(highest - 12 + 127) << 24, end = static_cast<u32>(lowest + 28 + 127) << 24;
    const __m512i first = _mm512_set1_epi32(static_cast<int>(least));
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512i bits = _mm512_load_si512(c[w][r]);
        most = _mm512_max_epu32(most, _mm512_sub_epi32(_mm512_add_epi32(bits, bits), first));
      }
    }
    return !_mm512_cmpge_epu32_mask(most, _mm512_set1_epi32(static_cast<int>(end - least)));
  }

  // Return a mask of the lanes in which step number `step` may lose bits, for row r of a and the panel b. These lanes
  // must be computed term by term. `sums` holds the sums of the row before the step.
  static __mmask16 inexact_lanes(const VnniRows& a, int r, const VnniColumns& b, int step, __m512 sums) {
    const __m512i lowest = _mm512_add_epi32(_mm512_load_si512(b.lowest[step]), _mm512_set1_epi32(a.lowest[r][step]));
    const __m512i highest = _mm512_add_epi32(_mm512_load_si512(b.highest[step]), _mm512_set1_epi32(a.highest[r][step]));
    // No term loses bits if the exponents of the terms differ by at most F - 8 = 27, and C is neither far below nor far
    // above the terms. F is fraction_bits.
    unsigned inexact = _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(highest, lowest), _mm512_set1_epi32(27));
    inexact |= _mm512_cmplt_epi32_mask(lowest, _mm512_set1_epi32(-80));
    inexact |= _mm512_cmpgt_epi32_mask(highest, _mm512_set1_epi32(90));
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(sums), _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i least =
        _mm512_max_epi32(_mm512_add_epi32(highest, _mm512_set1_epi32(127 - 12)), _mm512_setzero_si512());
    const __m512i end = _mm512_min_epi32(_mm512_add_epi32(lowest, _mm512_set1_epi32(127 + 28)), _mm512_set1_epi32(255));
    unsigned outside = _mm512_cmplt_epu32_mask(bits, _mm512_slli_epi32(least, 23));
    outside |= _mm512_cmpge_epu32_mask(bits, _mm512_slli_epi32(end, 23));
    return static_cast<__mmask16>(inexact | (outside & _mm512_test_epi32_mask(bits, bits)));
  }

  // Add the products of step number `step` to the sums c of all rows of a and panels b. The step must be shifted in a
  // and in all panels. The sum of all products has fewer than 24 bits, so one fused multiply-add that rounds toward
  // zero adds it to C and truncates the result.
  template <int kWidth>
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_shifted(
      const VnniRows& a, const VnniColumns* b, int step, float (*c)[kVnniRows][kVnniLanes]) {
    __m512i products[kVnniBlock][kWidth];
    multiply<kVnniStep / 4>(a, b, kVnniStep / 4 * step, a.step_corrections, step, products);
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
      const __m512 units = _mm512_mul_ps(_mm512_load_ps(b[w].units[step]), _mm512_set1_ps(64));  // scales are 8
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512 unit = _mm512_mul_ps(units, _mm512_set1_ps(a.units[r][step]));
        const __m512 product = _mm512_cvtepi32_ps(products[r][w]);
        _mm512_store_ps(c[w][r], _mm512_fmadd_round_ps(product, unit, _mm512_load_ps(c[w][r]), kTowardZero));
      }
    }
  }

  // Add the products of step number `step` to the sums c of all rows of a and panels b, for steps that are not shifted
  // in all of them. The scales of two groups are multiplied at once, as pairs of 16-bit integers. The spreads of a and
  // b must add up to at most kPairSpread.
  template <int kWidth>
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_pairs(const VnniRows& a,
                                                                                    const VnniColumns* b, int step,
                                                                                    float (*c)[kVnniRows][kVnniLanes]) {
    __m512i totals[kVnniBlock][kWidth];
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      __m512i first[kVnniBlock][kWidth], second[kVnniBlock][kWidth];
      const int g = 4 * step + 2 * pair;
      multiply<4>(a, b, 4 * g, a.corrections, g, first);
      multiply<4>(a, b, 4 * g + 4, a.corrections, g + 1, second);
#pragma GCC unroll 2
      for (int w = 0; w < kWidth; ++w) {
        const __m512i scales = _mm512_load_si512(b[w].pairs[g / 2]);
#pragma GCC unroll 4
        for (int r = 0; r < kVnniBlock; ++r) {
          const __m512i both = _mm512_mask_mov_epi16(first[r][w], 0xAAAAAAAA, _mm512_slli_epi32(second[r][w], 16));
          const __m512i scale = _mm512_mullo_epi16(scales, _mm512_set1_epi32(a.pairs[r][g / 2]));
          totals[r][w] = pair ? _mm512_dpwssd_epi32(totals[r][w], both, scale) : _mm512_madd_epi16(both, scale);
        }
      }
    }
    const __m512i limit = _mm512_set1_epi32(1 << 24);
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) most = _mm512_max_epu32(most, _mm512_add_epi32(totals[r][w], limit));
    }
    const bool is_wide = _mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(2 << 24));  // a total has more than 24 bits
#pragma GCC unroll 2
    for (int w = 0; w < kWidth; ++w) {
      const __m512 units = _mm512_load_ps(b[w].units[step]);
#pragma GCC unroll 4
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512 unit = _mm512_mul_ps(units, _mm512_set1_ps(a.units[r][step]));
        const __m512 old = _mm512_load_ps(c[w][r]);
        __m512 sum;
        if (is_wide) {
          const __m512d low = _mm512_fmadd_pd(integer_half_of(totals[r][w], 0), half_of(unit, 0), half_of(old, 0));
          const __m512d high = _mm512_fmadd_pd(integer_half_of(totals[r][w], 1), half_of(unit, 1), half_of(old, 1));
          sum = truncated(low, high);
        } else {
          sum = _mm512_fmadd_round_ps(_mm512_cvtepi32_ps(totals[r][w]), unit, old, kTowardZero);
        }
        _mm512_store_ps(c[w][r], sum);
      }
    }
  }

  // Add the products of step number `step` to the sums c of all rows of a and panels b, with terms as doubles. This is
  // used if the exponents of scales differ too much for add_pairs.
  template <int kWidth>
  __attribute__((target("avx512vnni"), noinline)) static void add_doubles(const VnniRows& a, const VnniColumns* b,
                                                                          int step, float (*c)[kVnniRows][kVnniLanes]) {
    __m512d totals[kVnniBlock][kWidth][2] = {};
    for (int g = 4 * step; g < 4 * step + 4; ++g) {
      __m512i products[kVnniBlock][kWidth];
      multiply<4>(a, b, 4 * g, a.corrections, g, products);
      for (int w = 0; w < kWidth; ++w) {
        const int side = 16 * (g % 2);  // the number of bits below the scale of group g in its pair
        const __m512i scales = _mm512_and_si512(
            _mm512_srl_epi32(_mm512_load_si512(b[w].pairs[g / 2]), _mm_cvtsi32_si128(side)), _mm512_set1_epi32(0xFFFF));
        for (int r = 0; r < kVnniBlock; ++r) {
          const __m512i scale = _mm512_mullo_epi32(scales, _mm512_set1_epi32(a.pairs[r][g / 2] >> side & 0xFFFF));
          for (int v = 0; v < 2; ++v) {
            totals[r][w][v] =
                _mm512_fmadd_pd(integer_half_of(products[r][w], v), integer_half_of(scale, v), totals[r][w][v]);
          }
        }
      }
    }
    for (int w = 0; w < kWidth; ++w) {
      for (int r = 0; r < kVnniBlock; ++r) {
        const __m512 unit = _mm512_mul_ps(_mm512_load_ps(b[w].units[step]), _mm512_set1_ps(a.units[r][step]));
        __m512d sums[2];
        for (int v = 0; v < 2; ++v) {
          sums[v] = _mm512_fmadd_pd(totals[r][w][v], half_of(unit, v), half_of(_mm512_load_ps(c[w][r]), v));
        }
        _mm512_store_ps(c[w][r], truncated(sums[0], sums[1]));
      }
    }
  }

  // Add the products of step number `step` to the sums c of all rows of a and panels b, in the fastest way that their
  // scales allow: add_shifted, add_pairs or add_doubles. Lanes that may lose bits get wrong sums, which add_steps
  // corrects.
  template <int kWidth>
  __attribute__((target("avx512vnni"), always_inline)) static inline void add_step(const VnniRows& a,
                                                                                   const VnniColumns* b, int step,
                                                                                   float (*c)[kVnniRows][kVnniLanes]) {
    if (kWidth == 2 && (b[0].shifted ^ b[kWidth - 1].shifted) >> step & 1) {
      add_step<1>(a, b, step, c);
      add_step<1>(a, b + 1, step, c + 1);
      return;
    }
    int spread = 0;
    for (int w = 0; w < kWidth; ++w) spread = std::max(spread, b[w].spreads[step]);
    if (a.shifted >> step & b[0].shifted >> step & 1) {
      add_shifted<kWidth>(a, b, step, c);
    } else if (a.spreads[step] + spread <= kPairSpread) {
      add_pairs<kWidth>(a, b, step, c);
    } else {
      add_doubles<kWidth>(a, b, step, c);
    }
  }

  // Add the products of `steps` steps, starting at index k along K, to the sums of kVnniBlock rows and kWidth panels. a
  // and b hold the decoded rows and panels. `row` is the index of the first row of D, and `first` that of the first
  // column. all_sums: the sums of the panels, starting at the first row of the task. Lanes in which a step may lose
  // bits are computed term by term.
  template <int kWidth>
  __attribute__((target("avx512vnni"), noinline)) void add_steps(const VnniRows& a, const VnniColumns* b, i64 row,
                                                                 i64 first, i64 k, int steps,
                                                                 float (*all_sums)[kVnniRows][kVnniLanes]) const {
    const auto c = reinterpret_cast<float (*)[kVnniRows][kVnniLanes]>(all_sums[0][row % kVnniRows]);
    for (int step = 0; step < steps; ++step) {
      __mmask16 inexact[kVnniBlock][kWidth];
      __m512 before[kVnniBlock][kWidth];
      unsigned any = 0;
      if (!is_exact<kWidth>(a, b, step, c)) {
        for (int w = 0; w < kWidth; ++w) {
          for (int r = 0; r < kVnniBlock; ++r) {
            before[r][w] = _mm512_load_ps(c[w][r]);
            const __mmask16 exist = row + r < call.rows ? lanes_from(call, first + w * kVnniLanes) : 0;
            inexact[r][w] = exist & inexact_lanes(a, r, b[w], step, before[r][w]);
            any |= inexact[r][w];
          }
        }
      }
      add_step<kWidth>(a, b, step, c);
      if (any) replace_inexact<kWidth>(inexact, before, row, first, k + step * kVnniStep, c);
    }
  }

  // Correct the sums c after the step that starts at index k along K: in the lanes of the masks inexact[row][panel],
  // compute them term by term. Other lanes are left as they are. `before` holds the sums before the step. `row` and
  // `first` are the indices of the first row and the first column.
  template <int kWidth>
  __attribute__((noinline)) void replace_inexact(const __mmask16 (*inexact)[kWidth], const __m512 (*before)[kWidth],
                                                 i64 row, i64 first, i64 k, float (*c)[kVnniRows][kVnniLanes]) const {
    for (int w = 0; w < kWidth; ++w) {
      for (int r = 0; r < kVnniBlock; ++r) {
        if (!inexact[r][w]) continue;
        __m512 sums = _mm512_load_ps(c[w][r]);
        replace_lanes(*this, inexact[r][w], row + r, first + w * kVnniLanes, k, before[r][w], sums);
        _mm512_store_ps(c[w][r], sums);
      }
    }
  }

  // Return the sum of D[row, column] after the step that starts at index k along K, computed term by term. c is the sum
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
