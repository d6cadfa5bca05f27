// QuEST's amaxes (for FP-Quant): for each block, compute the amax from the standard deviation of its elements, instead
// of from the largest element. In: the type of the elements. The results are those of search_quest in
// reference/search.py.
#pragma once

#include "../../cuda/kernels/rules/quest.cuh"
#include "tiles.h"

// The arguments of QuEST's search. cpu/library.py mirrors this struct.
//   x                        the matrix
//   out                      output: one amax per block, rows out_step apart
//   tile_rows, tile_columns  rows and columns of a tile
//   input                    type of the elements, as an InputKind
//   block                    columns of a block, a multiple of 32
//   emax                     exponent of the largest element value
//   threads                  largest number of threads to use
struct SearchQuestCall {
  Source x;
  float* out;
  i64 out_step;
  i64 tile_rows, tile_columns;
  i32 input, block, emax, threads;
};

namespace {

// A stand-in for a recipe whose largest element value has the exponent 0. With it, quest_amax gives amaxes without the
// factor 2^emax, so that all recipes share one compiled function.
struct QuestRecipe {
  struct Element {
    static constexpr int kEmax = 0;
  };
};

// Return QuEST's amax of a block, the `block` elements whose bits are at x. `block` must be a multiple of 32. `top` is
// 2^emax, where emax is the exponent of the largest element value. Return NaN if an element is NaN or infinite, or if
// the computed standard deviation is NaN or infinite. Elements are checked first, because Input<In>::value is valid for
// finite elements only.
template <class In>
float quest_amax_of(const typename Input<In>::Bits* x, i64 block, float top) {
  constexpr int kLanes = 32;
  using Bits = typename Input<In>::Bits;
  Bits largest = 0;
  for (i64 i = 0; i < block; ++i) largest = maximum<Bits>(largest, x[i] & Input<In>::kMagnitude);
  if (largest >= Input<In>::kInfinity) return nan_value();
  HalvedSum<kLanes> sum, squares;
  for (i64 first = 0; first < block; first += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const float value = Input<In>::value(x[first + j]);
      sum.add(j, value);
      squares.add(j, value * value);
    }
  return quest_amax<QuestRecipe>(sum.result(), squares.result(), static_cast<float>(block)) * top;
}

// Store QuEST's amax of every block of a tile in call.out. It is NaN for a block with NaN or infinity.
template <class In>
void search_quest_tile(const SearchQuestCall& call, const Rectangle& tile) {
  const auto x = view<In>(call.x, tile);
  const float top = float_of(static_cast<u32>(call.emax + 127) << 23);
  for (i64 i = 0; i < tile.rows; ++i) {
    float* out = call.out + (tile.row + i) * call.out_step + tile.column / call.block;
    for (i64 b = 0; b < tile.columns / call.block; ++b)
      out[b] = quest_amax_of<In>(x.data + i * x.step + b * call.block, call.block, top);
  }
}

}  // namespace
