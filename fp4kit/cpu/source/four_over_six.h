// 4over6: of the two scales that a block may have, the one with the lesser error; sixteen blocks side by side, a lane
// each.
//
// Signs do not matter: an element of the other sign has the code of the other sign and the same error. Nothing here is
// NaN but where a tensor's amax is none or infinite; blocks with a factor that is NaN, infinite or negative are for the
// specification.
#pragma once

#include "../../cuda/kernels/rules/fake_arith.cuh"
#include "../../cuda/kernels/rules/four_over_six_rules.cuh"
#include "../../cuda/kernels/rules/summation_order.cuh"
#include "encode_elements.h"

constexpr int kAcross = 16;    // columns of a block
constexpr int kAbreast = 16;   // blocks side by side
constexpr int kMostRows = 16;  // of a block: MOST_ROWS of cpu/coverage.py
typedef float Lanes __attribute__((vector_size(kAbreast * sizeof(float))));

static __forceinline__ Lanes lanes_at(const float* from) {
  Lanes found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// Magnitudes of a row of sixteen blocks by column, the blocks of a column side by side: `count` blocks, the others are
// of zeros.
template <class In>
static void put_magnitudes(const void* elements, i64 first, i64 count, float* __restrict out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements) + first;
  Bits few[kAcross * kAbreast], turned[kAcross * kAbreast];
  if (count < kAbreast) {
    std::memset(few, 0, sizeof few);
    std::memcpy(few, x, count * kAcross * sizeof(Bits));
    x = few;
  }
  for (int b = 0; b < kAbreast; b += kSide<Bits>)
    for (int j = 0; j < kAcross; j += kSide<Bits>)
      transpose_square(x + b * kAcross + j, kAcross, turned + j * kAbreast + b, kAbreast);
  for (int i = 0; i < kAcross * kAbreast; ++i)
    out[i] = Input<In>::value(static_cast<Bits>(turned[i] & Input<In>::kMagnitude));
}

// The value of a >= 0 whose error counts; where codes wrap, a < kUnboundedMost: 1.5 * 2^24 and more have steps of 2.
constexpr float kUnboundedMost = 0x1p22f;
template <class R>
static __forceinline__ float rounded_magnitude(float a) {
  using Element = typename R::Element;
  if constexpr (R::kRounding != Rounding::rnw) return nearest_finite<Element, false>(fminf(a, max_of<Element>()));
  const float magic = float_of(bits_of(fminf(fmaxf(a, 1.0f), 4.0f)) & kInfinityBits) * 0x1.8p22f;
  return (a + magic) - magic;
}

// What a row of sixteen blocks adds to their errors under a scale and a factor each, by column as the magnitudes are.
template <class R>
__attribute__((noinline)) static void put_terms(const float* x, const float* scale, const float* factor, TensorScale t,
                                                float* __restrict terms) {
  for (int j = 0; j < kAcross; ++j)
    for (int lane = 0; lane < kAbreast; ++lane) {
      const float a = x[j * kAbreast + lane], scaled = (R::kFlush ? flush(a) : a) * factor[lane];
      const float value = rounded_magnitude<R>(scaled);
      terms[j * kAbreast + lane] = error_of<R>(a, compared<R>(value, scale[lane], t), t);
    }
}

// Errors of blocks of kRows rows at most, as the recipe puts those of elements together.
template <int kRows>
struct RowSums {  // each row in order, and the rows as a tree: row i with i + 8, then + 4, + 2, + 1
  Lanes rows[kRows] = {};
  __forceinline__ void add(i64 row, const float* terms) {
    Lanes sum = lanes_at(terms);
    for (int j = 1; j < kAcross; ++j) sum = sum + lanes_at(terms + j * kAbreast);
    rows[row] = sum;
  }
  __forceinline__ Lanes result(i64 block_rows) {
    for (i64 half = kRows == 1 ? 0 : block_rows / 2; half; half /= 2)
      for (i64 i = 0; i < half; ++i) rows[i] = rows[i] + rows[i + half];
    return rows[0];
  }
};
template <int kRows>
struct VectorSums {
  LaneSums<kRows * kAcross, Lanes> sums;
  __forceinline__ void add(i64 row, const float* terms) {
    for (int half = 0; half < 2; ++half) {
      Lanes eight[8];
      for (int j = 0; j < 8; ++j) eight[j] = lanes_at(terms + (half * 8 + j) * kAbreast);
      sums.add(static_cast<int>(row) * 2 + half, eight);
    }
  }
  __forceinline__ Lanes result(i64) const { return sums.result(); }
};
struct Largest {
  float most[kAbreast] = {};
  __forceinline__ void add(i64, const float* terms) {
    for (int j = 0; j < kAcross; ++j)
      for (int lane = 0; lane < kAbreast; ++lane)
        most[lane] = larger<AmaxNan::propagate>(most[lane], terms[j * kAbreast + lane]);
  }
  __forceinline__ Lanes result(i64) const { return lanes_at(most); }
};
template <class R, int kRows>
using Errors =
    std::conditional_t<R::kLargestError, Largest, std::conditional_t<R::kLaneSums, VectorSums<kRows>, RowSums<kRows>>>;

// The candidates of blocks: amax at 6 and at 4.
struct SixAndFour {
  u8 codes[2][kMostBlocks];
  float scales[2][kMostBlocks] = {}, factors[2][kMostBlocks] = {};

  // false where a factor is of no use.
  template <class R>
  bool put(const float* amax, i64 count, TensorScale t) {
    u32 bad = 0;
    for (i64 b = 0; b < count; ++b) {
      u32 six, four;
      scales_of<R>(divide<R>(amax[b], max_of<typename R::Element>()), t, six, four);
      codes[0][b] = static_cast<u8>(six);
      codes[1][b] = static_cast<u8>(four);
    }
    for (int k = 0; k < 2; ++k)
      for (i64 b = 0; b < count; ++b) {
        scales[k][b] = decode_scale<R>(codes[k][b]);
        factors[k][b] = candidate_factor<R>(scales[k][b], t);
        bad |= static_cast<u32>(bits_of(factors[k][b]) >= kInfinityBits);
        if constexpr (R::kRounding == Rounding::rnw)
          bad |= static_cast<u32>(!(amax[b] * factors[k][b] < kUnboundedMost));
      }
    return bad == 0;
  }
};

// Rows of one row of blocks, of `step` elements each; load: put_magnitudes.
struct BlockRows {
  const void* data;
  i64 step, rows, blocks, block_rows;
  void (*load)(const void*, i64, i64, float*);
};

// The codes of the scales of sixteen blocks, from block `first` on, and their factors.
template <class R, int kRows>
static void choose_sixteen(const BlockRows& x, i64 first, const SixAndFour& all, TensorScale t, u8* codes,
                           float* factors) {
  const i64 count = minimum<i64>(x.blocks - first, kAbreast);
  Errors<R, kRows> six, four;
  for (i64 i = 0; i < x.rows; ++i) {
    float row[kAcross * kAbreast], terms[kAcross * kAbreast];
    x.load(x.data, i * x.step + first * kAcross, count, row);
    put_terms<R>(row, all.scales[0] + first, all.factors[0] + first, t, terms);
    six.add(i, terms);
    put_terms<R>(row, all.scales[1] + first, all.factors[1] + first, t, terms);
    four.add(i, terms);
  }
  float errors[2][kAbreast];
  const Lanes found[2] = {six.result(x.block_rows), four.result(x.block_rows)};
  std::memcpy(errors, found, sizeof errors);
  for (i64 b = 0; b < count; ++b) {
    const int k = errors[1][b] < errors[0][b];
    codes[first + b] = all.codes[k][first + b];
    factors[first + b] = all.factors[k][first + b];
  }
}

// The same of all blocks; false where they are not for these loops.
template <class R>
static bool choose_scales(const BlockRows& x, const float* amax, TensorScale t, u8* codes, float* factors) {
  SixAndFour all;
  if (!all.put<R>(amax, x.blocks, t)) return false;
  for (i64 first = 0; first < x.blocks; first += kAbreast)
    (x.block_rows == 1 ? choose_sixteen<R, 1> : choose_sixteen<R, kMostRows>)(x, first, all, t, codes, factors);
  return true;
}
