// 4over6: each block gets the one of two scales (the candidates) that gives the smaller error.
//   six         the first candidate, which maps the amax of the block to 6. In recipes of IF4: E2M1 elements
//   four        the second candidate, which maps the amax of the block to 4. In recipes of IF4: INT4 elements under the
//               same scale; bit 7 of the scale code is set
//   R           a struct of recipes.inc that describes the recipe
//   t           the tensor scale
//   factor      the number by which elements are multiplied before they are rounded
//   lane        one of kLanes = 16 blocks of 16 columns that are handled together. Arrays of magnitudes and of error
//               terms are therefore stored by column, as [column][lane]
//   error term  the error that one element adds to its block (error_of)
//
// Only magnitudes are compared, because negating an element negates its code and keeps its error. NaN occurs only if
// the tensor's amax is NaN or infinite. Blocks with a factor that is NaN, infinite or negative need the fallback.
#pragma once

#include "../../cuda/kernels/rules/fake_arith.cuh"
#include "../../cuda/kernels/rules/four_over_six_rules.cuh"
#include "../../cuda/kernels/rules/summation_order.cuh"
#include "encode_elements.h"

constexpr int kBlockColumns = 16;  // number of columns of a block
constexpr int kMaxBlockRows = 16;  // largest number of rows of a block; equals MAX_BLOCK_ROWS of cpu/codec.py
typedef float LaneVector __attribute__((vector_size(kLanes * sizeof(float))));

// Return the kLanes floats at the address `from`, which may have any alignment.
static __forceinline__ LaneVector load_lanes(const float* from) {
  LaneVector lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// Store the magnitudes of one row of `count` neighboring blocks (16 elements each) in `out`, as [column][lane], one
// block per lane. The row begins at element `first` of `elements`, which have type In. `count` is at most kLanes; lanes
// without a block are set to 0. Elements must be finite.
template <class In>
static void load_magnitudes(const void* elements, i64 first, i64 count, float* __restrict out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements) + first;
  Bits padded[kBlockColumns * kLanes], by_column[kBlockColumns * kLanes];
  if (count < kLanes) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, x, count * kBlockColumns * sizeof(Bits));
    x = padded;
  }
  for (int b = 0; b < kLanes; b += kSide<Bits>)
    for (int j = 0; j < kBlockColumns; j += kSide<Bits>)
      transpose_square(x + b * kBlockColumns + j, kBlockColumns, by_column + j * kLanes + b, kLanes);
  for (int i = 0; i < kBlockColumns * kLanes; ++i)
    out[i] = Input<In>::value(static_cast<Bits>(by_column[i] & Input<In>::kMagnitude));
}

// The upper bound of the arguments of rounded_magnitude if codes wrap. The function adds at most 1.5 * 2^24 to its
// argument. Below the bound, the sum is below 2^25, so that neighboring floats are at most 2 apart.
constexpr float kUnboundedBelow = 0x1p22f;

// Return the value to which a scaled magnitude a >= 0 is rounded when errors are measured, with ties to even. Usually,
// magnitudes above the largest value of the format become that value. The exception is a recipe whose codes wrap
// (R::kRounding is rnw). There, values continue beyond the largest one in steps of 2, and a must be below
// kUnboundedBelow.
template <class R>
static __forceinline__ float rounded_magnitude(float a) {
  using Element = typename R::Element;
  if constexpr (R::kRounding != Rounding::rnw) return nearest_finite<Element, false>(fminf(a, max_of<Element>()));
  const float magic = float_of(bits_of(fminf(fmaxf(a, 1.0f), 4.0f)) & kInfinityBits) * 0x1.8p22f;
  return (a + magic) - magic;
}

// For one row of kLanes blocks, store in `terms` the error term of each element under one candidate, as [column][lane].
// `x` holds the magnitudes of the elements in this order. `scale` and `factor` hold the candidate's block scale and
// factor, one per lane.
template <class R>
static void find_error_terms(const float* x, const float* scale, const float* factor, TensorScale t,
                             float* __restrict terms) {
  for (int j = 0; j < kBlockColumns; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float a = x[j * kLanes + lane], scaled = (R::kFlush ? flush(a) : a) * factor[lane];
      const float value = rounded_magnitude<R>(scaled);
      terms[j * kLanes + lane] = error_of<R>(a, compared<R>(value, scale[lane], t), t);
    }
}

// For one row of kLanes blocks, store in `terms` the error term of each element, as [column][lane], if the elements are
// encoded as INT4 (for the recipe IF4). `x` holds the magnitudes of the elements in this order. `scale` and `factor`
// hold the block scale and the factor, one per lane.
template <class R>
static void find_integer_terms(const float* x, const float* scale, const float* factor, TensorScale t,
                               float* __restrict terms) {
  for (int j = 0; j < kBlockColumns; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float a = x[j * kLanes + lane];
      terms[j * kLanes + lane] = integer_error_of<R>(a, a * factor[lane], scale[lane], t);
    }
}

using ErrorTermsFunction = void (*)(const float*, const float*, const float*, TensorScale, float*);  // find_error_terms

// The next three structs combine error terms into the errors of kLanes blocks, each for one kind of recipe. add(row,
// terms) adds the error terms of row `row` of the blocks. result(block_rows) returns the errors of the blocks, one per
// lane.

// The error of a block is the sum of its terms. Add the terms of each row in order. Then add the sums of rows as a
// tree: first those of rows at the distance block_rows / 2, then of rows at half that distance, and so on, down to
// neighboring rows.
template <int kRows>
struct RowSums {
  LaneVector rows[kRows] = {};
  __forceinline__ void add(i64 row, const float* terms) {
    LaneVector sum = load_lanes(terms);
    for (int j = 1; j < kBlockColumns; ++j) sum = sum + load_lanes(terms + j * kLanes);
    rows[row] = sum;
  }
  __forceinline__ LaneVector result(i64 block_rows) {
    for (i64 half = kRows == 1 ? 0 : block_rows / 2; half; half /= 2)
      for (i64 i = 0; i < half; ++i) rows[i] = rows[i] + rows[i + half];
    return rows[0];
  }
};

// The error of a block is the sum of its terms, added in the order of PyTorch's vectors of eight elements on a CPU
// (summation_order.cuh).
template <int kRows>
struct VectorSums {
  LaneSums<kRows * kBlockColumns, LaneVector> sums;
  __forceinline__ void add(i64 row, const float* terms) {
    for (int half = 0; half < 2; ++half) {
      LaneVector eight[8];
      for (int j = 0; j < 8; ++j) eight[j] = load_lanes(terms + (half * 8 + j) * kLanes);
      sums.add(static_cast<int>(row) * 2 + half, eight);
    }
  }
  __forceinline__ LaneVector result(i64) const { return sums.result(); }
};

// The error of a block is its largest term. It is NaN if any term is NaN.
struct LargestError {
  float largest[kLanes] = {};
  __forceinline__ void add(i64, const float* terms) {
    for (int j = 0; j < kBlockColumns; ++j)
      for (int lane = 0; lane < kLanes; ++lane)
        largest[lane] = larger<AmaxNan::propagate>(largest[lane], terms[j * kLanes + lane]);
  }
  __forceinline__ LaneVector result(i64) const { return load_lanes(largest); }
};
template <class R, int kRows>
using Errors = std::conditional_t<R::kLargestError, LargestError,
                                  std::conditional_t<R::kLaneSums, VectorSums<kRows>, RowSums<kRows>>>;

// The two candidates of each block of a panel: scale codes, block scales and factors. Index 0 is the candidate "six",
// and index 1 the candidate "four".
struct SixAndFour {
  u8 codes[2][kMaxPanelBlocks];
  float scales[2][kMaxPanelBlocks] = {}, factors[2][kMaxPanelBlocks] = {};

  // Store the candidates of `count` blocks, computed from their amaxes and the tensor scale t. Return true on success.
  // Return false if the fallback is needed: if a factor is NaN, infinite or negative or, if codes wrap, a scaled amax
  // is not below kUnboundedBelow.
  template <class R>
  bool find(const float* amax, i64 count, TensorScale t) {
    u32 is_bad = 0;
    for (i64 b = 0; b < count; ++b) {
      u32 six, four;
      scales_of<R>(divide<R>(amax[b], max_of<typename R::Element>()), t, six, four);
      codes[0][b] = static_cast<u8>(six);
      codes[1][b] = static_cast<u8>(four);
    }
    for (int k = 0; k < 2; ++k)
      for (i64 b = 0; b < count; ++b) {
        scales[k][b] = decode_scale<R>(e4m3_of<R>(codes[k][b]));
        factors[k][b] = candidate_factor<R>(scales[k][b], t);
        is_bad |= static_cast<u32>(bits_of(factors[k][b]) >= kInfinityBits);
        if constexpr (R::kRounding == Rounding::rnw)
          is_bad |= static_cast<u32>(!(amax[b] * factors[k][b] < kUnboundedBelow));
      }
    return is_bad == 0;
  }
};

// The elements of one row of `blocks` blocks: `rows` rows that begin `step` elements apart. `rows` is block_rows,
// except that the last row of blocks of a matrix may have fewer rows. `load` is load_magnitudes of the input type.
struct BlockRows {
  const void* data;
  i64 step, rows, blocks, block_rows;
  void (*load)(const void*, i64, i64, float*);
};

// Store the scale codes and factors of up to kLanes blocks, starting at block `first`, in `codes` and `factors` at the
// indices of the blocks. A block gets the candidate "four" if its error is smaller, and otherwise "six" (also if the
// errors are equal). `candidates` holds both candidates of every block. find_terms[0] finds the error terms of "six",
// and find_terms[1] those of "four". Sums combines the error terms of a block into its error.
template <class Sums>
static void choose_lanes(const BlockRows& x, i64 first, const SixAndFour& candidates, TensorScale t, u8* codes,
                         float* factors, const ErrorTermsFunction (&find_terms)[2]) {
  const i64 count = minimum<i64>(x.blocks - first, kLanes);
  Sums six, four;
  for (i64 i = 0; i < x.rows; ++i) {
    float row[kBlockColumns * kLanes], terms[kBlockColumns * kLanes];
    x.load(x.data, i * x.step + first * kBlockColumns, count, row);
    find_terms[0](row, candidates.scales[0] + first, candidates.factors[0] + first, t, terms);
    six.add(i, terms);
    find_terms[1](row, candidates.scales[1] + first, candidates.factors[1] + first, t, terms);
    four.add(i, terms);
  }
  float errors[2][kLanes];
  const LaneVector results[2] = {six.result(x.block_rows), four.result(x.block_rows)};
  std::memcpy(errors, results, sizeof errors);
  for (i64 b = 0; b < count; ++b) {
    const int k = errors[1][b] < errors[0][b];
    codes[first + b] = candidates.codes[k][first + b];
    factors[first + b] = candidates.factors[k][first + b];
  }
}

// Return the function that finds the error terms of the candidate "four", for choose_scales: find_integer_terms for the
// recipe IF4, whose second candidate is INT4, and otherwise find_error_terms.
template <class R>
constexpr ErrorTermsFunction second_terms() {
  if constexpr (kHasTwoFormats<R>) return find_integer_terms<R>;
  return find_error_terms<R>;
}

// Store the scale codes and factors of all blocks of x: for each block, those of the candidate with the smaller error,
// or of "six" if the errors are equal. `amax` holds the amaxes of the blocks. Return true on success. If
// SixAndFour::find returns false, the fallback is needed: store nothing, and return false.
template <class R>
static bool choose_scales(const BlockRows& x, const float* amax, TensorScale t, u8* codes, float* factors) {
  SixAndFour candidates;
  if (!candidates.find<R>(amax, x.blocks, t)) return false;
  const ErrorTermsFunction find_terms[2] = {find_error_terms<R>, second_terms<R>()};
  for (i64 first = 0; first < x.blocks; first += kLanes)
    (x.block_rows == 1 ? choose_lanes<Errors<R, 1>>
                       : choose_lanes<Errors<R, kMaxBlockRows>>)(x, first, candidates, t, codes, factors, find_terms);
  return true;
}
