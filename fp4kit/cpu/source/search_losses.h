// Losses of a row of a block under many candidates, side by side.
#pragma once

#include "search_pruned.h"
#include "input_types.h"

namespace {

// The elements of a row of a block, infinities and NaN too.
template <class In, class Bits = typename Input<In>::Bits>
void put_row(const Bits* x, float* __restrict out) {
  for (int j = 0; j < kSearchBlockSize; ++j) {
    const Bits bits = x[j];
    out[j] = Input<In>::value(bits);
    if constexpr (std::is_same_v<In, Float16>) {
      const u32 others = static_cast<u32>(bits & 0x8000u) << 16 | kInfinityBits | static_cast<u32>(bits & 0x3FFu) << 13;
      out[j] = (bits & Input<In>::kMagnitude) < Input<In>::kInfinity ? out[j] : float_of(others);
    }
  }
}

// sum of (w) d^2 of a row of a block, under every candidate.
template <bool kWeighted>
__attribute__((noinline)) void put_squares(const float* row, const float* weights, const Candidates& all,
                                           float* __restrict losses) {
  Sixteen<kWeighted> same;
  for (int j = 0; j < kSearchBlockSize; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      same.a[j][lane] = magnitude_of(row[j]);
      if constexpr (kWeighted) same.w[j][lane] = weights[j];
    }
  for (int code = 0; code < kCandidates; code += kLanes)
    put_losses<true>(same, all.scales + code, all.reciprocals + code, losses + code);
}

// sum of (w) |d|^p of a row of a block, or the largest (w) |d|, under sixteen candidates.
template <Objective kObjective, bool kWeighted>
__attribute__((noinline)) void put_others(const float* row, const float* weights, const float* scales,
                                          const float* reciprocals, double power, float* __restrict losses) {
  float sums[kSearchBlockSize / 4][kLanes];
  for (int j : {1, 0, 2, 3})
    for (int four = 0; four < kSearchBlockSize / 4; ++four) {
      const float a = magnitude_of(row[4 * four + j]);
      float d[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        d[lane] = magnitude_of(residual<true>(a, {scales[lane], reciprocals[lane]}, division_scaling(scales[lane])));
      if constexpr (kObjective == Objective::powers) {
        double wide[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) wide[lane] = static_cast<double>(d[lane]);
        raise_to_power(wide, power);
        for (int lane = 0; lane < kLanes; ++lane) d[lane] = static_cast<float>(wide[lane]);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        const float term = kWeighted ? weights[4 * four + j] * d[lane] : d[lane];
        sums[four][lane] = j == 1 ? term : combined_loss<kObjective>(sums[four][lane], term);
      }
    }
  for (int lane = 0; lane < kLanes; ++lane)
    losses[lane] = combined_loss<kObjective>(combined_loss<kObjective>(sums[0][lane], sums[2][lane]),
                                             combined_loss<kObjective>(sums[1][lane], sums[3][lane]));
}

// d^T H d of a row of a block under sixteen candidates: d^T H by fma, then pairs, the second first, then folded.
__attribute__((noinline)) void put_quadratic(const float* row, const float* hessian, const float* scales,
                                             const float* reciprocals, float* __restrict losses) {
  float d[kSearchBlockSize][kLanes], pairs[kSearchBlockSize / 2][kLanes];
  for (int j = 0; j < kSearchBlockSize; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float left =
          residual<true>(magnitude_of(row[j]), {scales[lane], reciprocals[lane]}, division_scaling(scales[lane]));
      d[j][lane] = row[j] >= 0.0f ? left : -left;
    }
  for (int j = 0; j < kSearchBlockSize; j += 2)
    for (int lane = 0; lane < kLanes; ++lane) {
      float even = 0.0f, odd = 0.0f;
      FP4KIT_UNROLL
      for (int i = 0; i < kSearchBlockSize; ++i) {
        even = fma_rn(d[i][lane], hessian[i * kSearchBlockSize + j], even);
        odd = fma_rn(d[i][lane], hessian[i * kSearchBlockSize + j + 1], odd);
      }
      pairs[j / 2][lane] = fma_rn(d[j][lane], even, d[j + 1][lane] * odd);
    }
  for (int half = kSearchBlockSize / 4; half; half /= 2)
    for (int i = 0; i < half; ++i)
      for (int lane = 0; lane < kLanes; ++lane) pairs[i][lane] += pairs[i + half][lane];
  std::memcpy(losses, pairs[0], sizeof pairs[0]);
}

}  // namespace
