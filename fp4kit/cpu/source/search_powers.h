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
//   block                    columns of a block, 16 or a multiple of 32 up to 256
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

// Return the amax of the `block` elements whose bits are at x. It is NaN or infinite if an element is.
template <class In>
float searched_amax(const typename Input<In>::Bits* x, i64 block) {
  typename Input<In>::Bits largest = 0;
  for (i64 i = 0; i < block; ++i)
    largest = maximum(largest, static_cast<decltype(largest)>(x[i] & Input<In>::kMagnitude));
  if (largest < Input<In>::kInfinity) return Input<In>::value(largest);
  return largest == Input<In>::kInfinity ? float_of(kInfinityBits) : nan_value();
}

// Return the sum of the squared errors of `block` finite elements under a candidate. If In holds the values,
// differences are exact, because values are multiples of the last bit of their elements. Then only squares are rounded.
template <class F, class In>
float error_of(const typename Input<In>::Bits* x, i64 block, PowerCandidate candidate) {
  using Bits = typename Input<In>::Bits;
  const float least = candidate.power * float_of(static_cast<u32>(F::kEmin - F::kMantissaBits + 127) << 23);
  const bool is_exact = round_to<In>(least) == least && is_finite(round_to<In>(candidate.power * max_of<F>()));
  float errors[256];
  const auto fill = [&](auto error) {
    for (i64 i = 0; i < block; i += 16)
      for (i64 j = i; j < i + 16; ++j)
        errors[j] = error(Input<In>::value(static_cast<Bits>(x[j] & Input<In>::kMagnitude)));
  };
  if (is_exact)
    fill([=](float value) {
      const float difference = value - nearest_by_a_sum<F>(value * candidate.factor) * candidate.power;
      return round_to<In>(difference * difference);
    });
  else
    fill([=](float value) { return squared_error<F, In>(value, candidate); });
  return sum_of_lanes(errors, block);
}

// Return the power of two that is chosen for the `block` elements whose bits are at x, or amax_without_choice.
template <class F, class In>
float chosen_power(const typename Input<In>::Bits* x, i64 block) {
  const float amax = searched_amax<In>(x, block);
  if (is_nan(amax)) return amax;
  if (!(amax > 0.0f && is_finite(amax))) return amax_without_choice<F>(amax);
  PowerCandidate candidates[2];
  power_candidates<F, In>(amax, candidates);
  if (candidates[0].amax == candidates[1].amax) return candidates[0].amax;
  const float first = error_of<F, In>(x, block, candidates[0]), second = error_of<F, In>(x, block, candidates[1]);
  return candidates[second_wins<F, In>(first, second, static_cast<float>(block))].amax;
}

// Call work(block, out) for every block of a tile, where `out` is its place in call.out.
template <class In, class Work>
void for_each_block(const SearchPowersCall& call, const Rectangle& tile, Work work) {
  const auto x = view<In>(call.x, tile);
  for (i64 i = 0; i < tile.rows; ++i) {
    float* out = call.out + (tile.row + i) * call.out_step + tile.column / call.block;
    for (i64 b = 0; b < tile.columns / call.block; ++b) work(x.data + i * x.step + b * call.block, out + b);
  }
}

// Store the chosen power of every block of a tile in call.out.
template <class In>
void search_powers_tile(const SearchPowersCall& call, const Rectangle& tile) {
  for_each_block<In>(call, tile, [&](const auto* x, float* out) {
    *out = call.emax == 2 ? chosen_power<ChosenE2m1, In>(x, call.block) : chosen_power<ChosenE4m3, In>(x, call.block);
  });
}

// Store the amax of every block of a tile in call.out, and add its errors to `bins` (add_ceil_x_errors).
template <class In>
void search_ceil_x_tile(const SearchPowersCall& call, const Rectangle& tile, u64* bins) {
  constexpr size_t kBins = kCeilXConstants * kCeilXFields;
  u64 own[kBins] = {};
  for_each_block<In>(call, tile, [&](const auto* x, float* out) {
    const float amax = *out = searched_amax<In>(x, call.block);
    const auto error_under = [&](i32 exponent) {
      return error_of<ChosenE2m1, In>(x, call.block, power_candidate<ChosenE2m1, In>(exponent));
    };
    if (is_finite(amax))
      add_ceil_x_errors<In>(amax, error_under, [&](i32 bin, u64 n) { own[bin] += n; });
    else
      ++own[kCeilXFields - 1];
  });
  for (size_t i = 0; i < kBins; ++i)
    if (own[i]) __atomic_fetch_add(bins + i, own[i], __ATOMIC_RELAXED);
}

}  // namespace
