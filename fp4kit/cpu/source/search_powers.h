// The searches of msmodelslim (rules/msmodelslim_choice.cuh): for each block, choose one of two powers of two by the
// squared errors of elements. In: the type of the elements. F: the element format.
#pragma once

#include "../../cuda/kernels/rules/msmodelslim_choice.cuh"
#include "search_quest.h"

// The arguments of these searches. cpu/library.py mirrors this struct.
//   x                        the matrix
//   out                      output: the power of each block, rows out_step apart
//   tile_rows, tile_columns  rows and columns of a tile
//   input                    type of the elements, as an InputKind
//   block                    columns of a block, a multiple of 8 up to 256
//   emax                     2 for elements E2M1 (method 4over6), 8 for E4M3 (mse)
//   threads                  largest number of threads to use
using SearchPowersCall = SearchQuestCall;

namespace {

struct ChosenE2m1 {
  static constexpr int kMantissaBits = 1, kEmin = 0, kEmax = 2;
  static constexpr u32 kMaxBits = 0x40C00000u;  // 6
  static constexpr bool kHasNan = false;
};
struct ChosenE4m3 {
  static constexpr int kMantissaBits = 3, kEmin = -6, kEmax = 8;
  static constexpr u32 kMaxBits = 0x43E00000u;  // 448
  static constexpr bool kHasNan = true;
};

// Return the sum of `count` terms in the order of LaneSums.
inline float sum_of_lanes(const float* terms, i64 count) {
  float partial[4][8] = {};
  const i64 vectors = count / 8, grouped = vectors / 4 * 4;
  for (i64 v = 0; v < vectors; ++v)
    for (int j = 0; j < 8; ++j) partial[v < grouped ? v % 4 : 0][j] += terms[8 * v + j];
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) sum += partial[0][j] + partial[1][j] + partial[2][j] + partial[3][j];
  return sum;
}

// Return the power of two that is chosen for the `block` elements whose bits are at x, or amax_without_choice.
template <class F, class In>
float chosen_power(const typename Input<In>::Bits* x, i64 block) {
  using Bits = typename Input<In>::Bits;
  Bits largest = 0;
  for (i64 i = 0; i < block; ++i) largest = maximum<Bits>(largest, x[i] & Input<In>::kMagnitude);
  if (largest > Input<In>::kInfinity) return nan_value();
  if (largest == Input<In>::kInfinity) return amax_without_choice<F>(float_of(kInfinityBits));
  const float amax = Input<In>::value(largest);
  if (amax == 0.0f) return amax_without_choice<F>(amax);
  PowerCandidate candidates[2];
  power_candidates<F, In>(amax, candidates);
  if (candidates[0].amax == candidates[1].amax) return candidates[0].amax;
  float errors[2][256];
  for (int k = 0; k < 2; ++k)
    for (i64 i = 0; i < block; ++i)
      errors[k][i] =
          squared_error<F, In>(Input<In>::value(static_cast<Bits>(x[i] & Input<In>::kMagnitude)), candidates[k]);
  return candidates[second_wins<F, In>(sum_of_lanes(errors[0], block), sum_of_lanes(errors[1], block),
                                       static_cast<float>(block))]
      .amax;
}

// Store the chosen power of every block of a tile in call.out.
template <class In>
void search_powers_tile(const SearchPowersCall& call, const Rectangle& tile) {
  const auto x = view<In>(call.x, tile);
  for (i64 i = 0; i < tile.rows; ++i) {
    float* out = call.out + (tile.row + i) * call.out_step + tile.column / call.block;
    for (i64 b = 0; b < tile.columns / call.block; ++b) {
      const auto* block = x.data + i * x.step + b * call.block;
      out[b] = call.emax == 2 ? chosen_power<ChosenE2m1, In>(block, call.block)
                              : chosen_power<ChosenE4m3, In>(block, call.block);
    }
  }
}

}  // namespace
