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
__forceinline__ float sum_of_lanes(const float* terms, i64 count) {
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
__forceinline__ float searched_amax(const typename Input<In>::Bits* x, i64 block) {
  typename Input<In>::Bits largest = 0;
  for (i64 i = 0; i < block; ++i)
    largest = maximum(largest, static_cast<decltype(largest)>(x[i] & Input<In>::kMagnitude));
  if (largest < Input<In>::kInfinity) return Input<In>::value(largest);
  return largest == Input<In>::kInfinity ? float_of(kInfinityBits) : nan_value();
}

// Return the sum of the squared errors of `block` finite elements under a candidate. Only squares are rounded, because
// a value is a multiple of the last bit of its element, or the element itself if its step is smaller. The sum of a
// square and `magic` is rounded to a multiple of the last bit that a float16 of this size has.
template <class F, class In>
__attribute__((noinline)) float error_of(const typename Input<In>::Bits* x, i64 block, PowerCandidate candidate) {
  // The product with kUp, which kDown undoes, makes float16 numbers infinite that are 2^16 or larger.
  constexpr float kUp = In::kMantissaBits == 10 ? 0x1p112f : 1.0f, kDown = 1.0f / kUp;
  float errors[256];
  for (i64 i = 0; i < block; ++i) {
    const float element = Input<In>::value(x[i] & Input<In>::kMagnitude);
    const float value = nearest_by_a_sum<F>(element * candidate.factor) * (candidate.power * kUp) * kDown;
    const float square = (element - value) * (element - value);
    const float magic = float_of((maximum(bits_of(square), 113u << 23) & kInfinityBits) + (13u << 23));
    errors[i] = In::kMantissaBits == 10 ? ((square + magic) - magic) * kUp * kDown : Input<In>::rounded(square);
  }
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
  if (first_cannot_lose<F, In>(amax, candidates)) return candidates[0].amax;
  const float first = error_of<F, In>(x, block, candidates[0]), second = error_of<F, In>(x, block, candidates[1]);
  return candidates[second_wins<F, In>(first, second, static_cast<float>(block))].amax;
}

// Call work(x, block, count, out) for groups of at most kLanes neighboring blocks of a tile: `count` blocks of `block`
// columns whose elements begin at x, and whose places in call.out begin at `out`.
template <class In, class Work>
void for_each_group(const SearchPowersCall& call, const Rectangle& tile, Work work) {
  const auto x = view<In>(call.x, tile);
  for (i64 i = 0; i < tile.rows; ++i)
    for (i64 j = 0; j < tile.columns; j += kLanes * call.block) {
      const auto* first = x.data + i * x.step + j;
      float* out = call.out + (tile.row + i) * call.out_step + (tile.column + j) / call.block;
      const i64 count = minimum<i64>((tile.columns - j) / call.block, kLanes);
      work(first, call.block, count, out);
    }
}

// Store the chosen power of every block of a tile in call.out.
template <class In>
void search_powers_tile(const SearchPowersCall& call, const Rectangle& tile) {
  for_each_group<In>(call, tile, [&](const auto* x, i64 block, i64 count, float* out) __attribute__((always_inline)) {
    for (i64 b = 0; b < count; ++b, x += block)
      out[b] = call.emax == 2 ? chosen_power<ChosenE2m1, In>(x, block) : chosen_power<ChosenE4m3, In>(x, block);
  });
}

// Store the amax of every block of a tile in call.out, and add its errors to `bins` (add_ceil_x_errors).
template <class In>
void search_ceil_x_tile(const SearchPowersCall& call, const Rectangle& tile, u64* bins) {
  constexpr size_t kBins = kCeilXConstants * kCeilXFields;
  u64 own[kBins] = {};
  for_each_group<In>(call, tile, [&](const auto* x, i64 block, i64 count, float* out) __attribute__((always_inline)) {
    float amax[kLanes] = {};
    i32 exponent[kLanes], last[kLanes], counts[kLanes];
    for (i64 b = 0; b < count; ++b) out[b] = amax[b] = searched_amax<In>(x + b * block, block);
    for (int l = 0; l < kLanes; ++l) {
      exponent[l] = ceil_x_exponent<In>(amax[l], 0);
      last[l] = ceil_x_exponent<In>(amax[l], kCeilXConstants - 1);
      counts[l] = ceil_x_count<In>(amax[l], exponent[l]);
    }
    for (i64 b = 0; b < count; ++b) {
      const auto error_under = [&](i32 e) __attribute__((always_inline)) {
        return error_of<ChosenE2m1, In>(x + b * block, block, power_candidate<ChosenE2m1, In>(e));
      };
      if (is_finite(amax[b]))
        add_ceil_x_errors<In>(amax[b], exponent[b], counts[b], last[b], error_under,
                              [&](i32 bin, u64 n) { own[bin] += n; });
      else
        ++own[kCeilXFields - 1];
    }
  });
  for (size_t i = 0; i < kBins; ++i)
    if (own[i]) __atomic_fetch_add(bins + i, own[i], __ATOMIC_RELAXED);
}

}  // namespace
