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

constexpr int kVnniLanes = 64;                         // number of columns of a panel
constexpr int kVnniPanels = 4;                         // largest number of panels of a task
constexpr i64 kVnniRows = 256;                         // largest number of rows of a task
constexpr int kVnniStep = 64;                          // number of elements of K per step
constexpr int kVnniSteps = kProductDepth / kVnniStep;  // largest number of steps that are decoded at once
constexpr int kVnniGroups = kProductDepth / 16;        // largest number of groups that are decoded at once

// The range of the exponents of the scales of one row or panel in one step. Scales of zero do not count. If no scale
// counts, lowest is larger than highest.
struct ScaleRange {
  int lowest = 1000, highest = -1000;
  bool is_special = false;  // true if a scale is NaN

  // Extend the range by the scale with the given code.
  void add(const ProductOperand& x, u8 code) {
    const double value = x.scale_values[code];
    if (value == 0) return;
    is_special |= value != value;
    const int exponent = static_cast<int>(__double_as_longlong(x.scale_powers[code]) >> 52) - 1023;
    lowest = std::min(lowest, exponent);
    highest = std::max(highest, exponent);
  }
};

// The decoded elements of a panel of columns, for at most kProductDepth elements of K. A word holds four elements of
// one lane, in units of 1/2, each plus 12. `scales` holds the scale of each group, and `ranges` the range of each step.
struct VnniColumns {
  alignas(64) u32 words[kProductDepth / 4][kVnniLanes];
  alignas(64) double scales[kVnniGroups][kVnniLanes];
  ScaleRange ranges[kVnniSteps];
};

// The decoded elements of one row, for at most kProductDepth elements of K. A word holds four elements, in units of
// 1/2, as signed bytes. `scales` holds a quarter of the scale of each group, because products are in units of 1/4.
struct VnniRow {
  i32 words[kProductDepth / 4], corrections[kVnniGroups];  // corrections: -12 times the sum of a group's elements
  double scales[kVnniGroups];
  ScaleRange ranges[kVnniSteps];
};

// A table from bytes of two codes to their elements. Each element takes one byte of an entry, as an integer in units of
// 1/2 plus `offset`.
struct ElementPairs {
  u16 pairs[256];

  explicit ElementPairs(int offset) {
    constexpr int kMagnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    const auto integer = [&](int code) { return (code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7]) + offset; };
    for (int byte = 0; byte < 256; ++byte) {
      pairs[byte] = static_cast<u16>((integer(byte & 15) & 0xFF) | (integer(byte >> 4) & 0xFF) << 8);
    }
  }
};
const ElementPairs kSigned(0), kOffset(12);

// Return true if this file can compute a product: if the processor has AVX-512 VNNI, and the product has 4-bit codes
// and the step of Blackwell's FP4 instructions, without promotion.
bool uses_vnni(const ProductCall& call) {
  static const bool is_supported = __builtin_cpu_supports("avx512vnni");
  return is_supported && call.adder == Adder::truncate_groups && call.step == kVnniStep && call.promote == 0 &&
         call.fraction_bits == 35 && call.output_bits == 23 && call.zero_exponent <= -126 && call.a.code_bits == 4 &&
         call.b.code_bits == 4;
}

// The tasks of a call for which uses_vnni is true. A task computes a tile of at most kVnniRows rows and kVnniPanels
// panels of columns.
struct VnniTask {
  const ProductCall& call;

  // The memory of a task: the decoded elements, and the sums so far.
  struct Memory {
    VnniColumns columns[kVnniPanels];
    VnniRow row;
    alignas(64) double sums[kVnniRows][kVnniPanels][kVnniLanes];
  };

  // Return the number of tasks side by side.
  i64 panels() const { return (call.columns + kVnniPanels * kVnniLanes - 1) / (kVnniPanels * kVnniLanes); }
  // Return the number of tasks.
  i64 count() const { return panels() * ((call.rows + kVnniRows - 1) / kVnniRows); }

  // Compute and store the results of task `index`.
  void run(i64 index) const {
    const std::unique_ptr<Memory> memory(new Memory);  // not make_unique, which would set the memory to zeros
    Memory& m = *memory;
    const i64 first_row = index / panels() * kVnniRows, first = index % panels() * kVnniPanels * kVnniLanes;
    const i64 rows = std::min(kVnniRows, call.rows - first_row);
    const i64 columns = std::min<i64>(kVnniPanels * kVnniLanes, call.columns - first);
    const int used = static_cast<int>((columns + kVnniLanes - 1) / kVnniLanes);
    for (i64 r = 0; r < rows; ++r) {
      for (i64 j = 0; j < used * kVnniLanes; ++j) {
        m.sums[r][j / kVnniLanes][j % kVnniLanes] =
            call.c && j < columns ? call.c[(first_row + r) * call.columns + first + j] : 0;
      }
    }
    for (i64 k = 0; k < call.length; k += kProductDepth) {
      const int steps = static_cast<int>((std::min(kProductDepth, call.length - k) + kVnniStep - 1) / kVnniStep);
      for (int p = 0; p < used; ++p) decode_columns(m.columns[p], first + p * kVnniLanes, k, steps);
      for (i64 r = 0; r < rows; ++r) {
        decode_row(m.row, first_row + r, k, steps);
        for (int p = 0; p < used; ++p) {
          add_steps(m.row, m.columns[p], first_row + r, first + p * kVnniLanes, k, steps, m.sums[r][p]);
        }
      }
    }
    const ProductTask finish{call};
    for (i64 r = 0; r < rows; ++r) {
      for (i64 j = 0; j < columns; ++j) {
        const float sum = static_cast<float>(m.sums[r][j / kVnniLanes][j % kVnniLanes]);
        finish.put(first_row + r, first + j, sum);
      }
    }
  }

  // Store in `to` the decoded elements of `steps` steps, from element k of K on, for the panel that begins at column
  // `first`. Elements and scales beyond the operand are zeros.
  void decode_columns(VnniColumns& to, i64 first, i64 k, int steps) const {
    for (ScaleRange& range : to.ranges) range = {};
    for (int lane = 0; lane < kVnniLanes; ++lane) {
      const i64 column = first + lane;
      const bool exists = column < call.columns;
      const u8* codes = static_cast<const u8*>(call.b.codes) + (exists ? column : 0) * call.b.codes_step;
      for (int i = 0; i < steps * kVnniStep / 4; ++i) {
        const i64 at = k + 4 * i;
        const bool inside = exists && at < call.length;
        to.words[i][lane] =
            inside ? kOffset.pairs[codes[at / 2]] | kOffset.pairs[codes[at / 2 + 1]] << 16 : 0x0C0C0C0Cu;
      }
      for (int g = 0; g < steps * kVnniStep / 16; ++g) {
        const i64 at = k + 16 * g;
        double scale = 0;
        if (exists && at < call.length) {
          const u8 code = call.b.scales[column * call.b.scales_step + at / call.b.block];
          scale = call.b.scale_values[code];
          to.ranges[g / 4].add(call.b, code);
        }
        to.scales[g][lane] = scale;
      }
    }
  }

  // Store in `to` the decoded elements of `steps` steps of row `row`, from element k of K on. Elements and scales
  // beyond the operand are zeros.
  void decode_row(VnniRow& to, i64 row, i64 k, int steps) const {
    for (ScaleRange& range : to.ranges) range = {};
    const u8* codes = static_cast<const u8*>(call.a.codes) + row * call.a.codes_step;
    for (int i = 0; i < steps * kVnniStep / 4; ++i) {
      const i64 at = k + 4 * i;
      to.words[i] = at < call.length ? kSigned.pairs[codes[at / 2]] | kSigned.pairs[codes[at / 2 + 1]] << 16 : 0;
    }
    for (int g = 0; g < steps * kVnniStep / 16; ++g) {
      const i64 at = k + 16 * g;
      int sum = 0;
      for (int i = 4 * g; i < 4 * g + 4; ++i) {
        for (int shift = 0; shift < 32; shift += 8) sum += static_cast<signed char>(to.words[i] >> shift);
      }
      to.corrections[g] = -12 * sum;
      to.scales[g] = 0;
      if (at < call.length) {
        const u8 code = call.a.scales[row * call.a.scales_step + at / call.a.block];
        to.scales[g] = call.a.scale_values[code] * 0.25;
        to.ranges[g / 4].add(call.a, code);
      }
    }
  }

  // Add `steps` decoded steps, from element k of K on, to the sums c of row `row` and of the panel that begins at
  // column `first`.
  __attribute__((target("avx512vnni"))) void add_steps(const VnniRow& a, const VnniColumns& b, i64 row, i64 first,
                                                       i64 k, int steps, double* c) const {
    constexpr int kVectors = kVnniLanes / 8;
    __m512d sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = _mm512_load_pd(c + 8 * v);
    const __m512i kept = _mm512_set1_epi64(~((1LL << 29) - 1));
    for (int step = 0; step < steps; ++step) {
      const ScaleRange &x = a.ranges[step], &y = b.ranges[step];
      const int highest = x.highest + y.highest, lowest = x.lowest + y.lowest;
      u64 bad = ~u64{0};
      // No term loses bits if the terms' exponents differ by at most F - 8, and C is neither far below nor far above.
      if (!x.is_special && !y.is_special && highest - lowest <= 27 && lowest >= -80 && highest <= 90) {
        const __m512d least = _mm512_set1_pd(double_power(std::max(highest - 12, -1000)));
        const __m512d limit = _mm512_set1_pd(double_power(std::min(lowest + 28, 1000)));
        const __m512d zero = _mm512_setzero_pd();
        bad = 0;
        for (int v = 0; v < kVectors; ++v) {
          const __m512d magnitude = _mm512_abs_pd(sums[v]);
          const __mmask8 other = _mm512_cmp_pd_mask(sums[v], zero, _CMP_NEQ_UQ);
          const __mmask8 fits =
              _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(magnitude, least, _CMP_GE_OQ), magnitude, limit, _CMP_LT_OQ);
          bad |= static_cast<u64>(static_cast<u8>(other & ~fits)) << (8 * v);
        }
      }
      if (bad) {
        for (int v = 0; v < kVectors; ++v) _mm512_store_pd(c + 8 * v, sums[v]);
      }
      for (int g = 4 * step; g < 4 * step + 4; ++g) {
        __m512i products[kVectors / 2];
        for (int v = 0; v < kVectors / 2; ++v) products[v] = _mm512_set1_epi32(a.corrections[g]);
        for (int i = 4 * g; i < 4 * g + 4; ++i) {
          const __m512i word = _mm512_set1_epi32(a.words[i]);
          for (int v = 0; v < kVectors / 2; ++v) {
            products[v] = _mm512_dpbusd_epi32(products[v], _mm512_load_si512(b.words[i] + 16 * v), word);
          }
        }
        const __m512d scale = _mm512_set1_pd(a.scales[g]);
        for (int v = 0; v < kVectors; ++v) {
          const __m512i both = products[v / 2];
          const __m256i half = v % 2 ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both);
          const __m512d scales = _mm512_mul_pd(scale, _mm512_load_pd(b.scales[g] + 8 * v));
          sums[v] = _mm512_fmadd_pd(_mm512_cvtepi32_pd(half), scales, sums[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = _mm512_castsi512_pd(_mm512_and_si512(_mm512_castpd_si512(sums[v]), kept));
      }
      if (bad) {
        alignas(64) double found[kVnniLanes];
        for (int v = 0; v < kVectors; ++v) _mm512_store_pd(found + 8 * v, sums[v]);
        for (; bad; bad &= bad - 1) {
          const int lane = __builtin_ctzll(bad);
          if (first + lane < call.columns) found[lane] = add_slowly(row, first + lane, k + step * kVnniStep, c[lane]);
        }
        for (int v = 0; v < kVectors; ++v) sums[v] = _mm512_load_pd(found + 8 * v);
      }
    }
    for (int v = 0; v < kVectors; ++v) _mm512_store_pd(c + 8 * v, sums[v]);
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
