// Functions that compute the losses of one row of a block (16 elements) under candidate scales.
//   candidate  a scale that the search may choose, with its approximate reciprocal
//   d          the rounding error of an element under a candidate
//   w          the weight of the element's column, or 1 without weights
//   loss       a number computed from all d of a block; the search chooses the candidate with the smallest one
//   lane       one of kLanes = 16 candidates that are handled together
//   In         the type of the elements
//
// The losses are those of reference/search.py, operation by operation. The loss of a block with several rows is
// the sum of the losses of its rows, or the largest of them for Objective::largest.
#pragma once

#include "../../cuda/kernels/rules/lane_search.cuh"
#include "input_types.h"
#include "simd_bytes.h"

namespace {

constexpr int kCandidates = 128;  // number of E4M3 codes without sign; codes 0 and 127 are not candidates

// The candidates of all blocks of a matrix, in arrays indexed by code: block amaxes, scales, and approximate
// reciprocals of the scales. Amaxes and scales rise with the code.
struct CandidateArrays {
  const float *amaxes, *scales, *reciprocals;

  // Return true if the block amaxes of all candidates are above 2^-57 and below 2^50. Only in this range, the bounds of
  // the pruned search are proven; otherwise, callers use the full search.
  bool are_bounds_valid() const { return amaxes[1] > 0x1p-57f && amaxes[kLastCandidate] < 0x1p50f; }

  __forceinline__ Candidate at(u32 code) const {
    return {scales[static_cast<i32>(code)], reciprocals[static_cast<i32>(code)]};
  }
  // Return the first code whose scale is above amax / 7. The last candidate is the code of 448.
  __forceinline__ u32 first_code(float amax) const {
    return code_at_least(amax * (448.0f * (6.0f / 7.0f) * (1.0f + 0x1p-12f) / amaxes[kLastCandidate]));
  }
};

// Store the 16 elements of one row of a block, whose bits are at x, in `out` as float32. Infinities stay infinite, and
// NaN stays NaN.
template <class In, class Bits = typename Input<In>::Bits>
void load_row(const Bits* x, float* __restrict out) {
  for (int j = 0; j < kSearchBlockSize; ++j) {
    const Bits bits = x[j];
    out[j] = Input<In>::value(bits);
    if constexpr (std::is_same_v<In, Float16>) {  // whose value() is for finite elements only
      const u32 special =
          static_cast<u32>(bits & 0x8000u) << 16 | kInfinityBits | static_cast<u32>(bits & 0x3FFu) << 13;
      out[j] = (bits & Input<In>::kMagnitude) < Input<In>::kInfinity ? out[j] : float_of(special);
    }
  }
}

// For one row of a block, store in losses[c] the loss under candidate c, for every code c of `candidates`: the sum of
// d^2, or of w d^2 if kWeighted. `row` holds the 16 elements. `weights` holds the weights of their columns, and is read
// only if kWeighted.
template <bool kWeighted>
__attribute__((noinline)) void find_squared_losses(const float* row, const float* weights,
                                                   const CandidateArrays& candidates, float* __restrict losses) {
  LaneBlocks<kLanes, kWeighted> copies;  // the row in every lane
  for (int j = 0; j < kSearchBlockSize; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      copies.a[j][lane] = magnitude_of(row[j]);
      if constexpr (kWeighted) copies.w[j][lane] = weights[j];
    }
  for (int code = 0; code < kCandidates; code += kLanes)
    find_losses<true>(copies, candidates.scales + code, candidates.reciprocals + code, losses + code);
}

// For one row of a block (16 elements), store in losses[c] the loss under candidate scale c, for each of kLanes
// candidates. d is the rounding error of an element. w is the weight of its column if kWeighted, and otherwise 1.
//   Objective::powers      the sum of w |d|^power
//   Objective::magnitudes  the sum of w |d|; `power` is not read
//   Objective::largest     the largest w |d|; `power` is not read
// `scales` and `reciprocals` hold the candidate scales and their reciprocals. `weights` is read only if kWeighted.
template <Objective kObjective, bool kWeighted>
__attribute__((noinline)) void find_power_losses(const float* row, const float* weights, const float* scales,
                                                 const float* reciprocals, double power, float* __restrict losses) {
  float sums[kSearchBlockSize / 4][kLanes];
  for (int j : {1, 0, 2, 3})
    for (int group = 0; group < kSearchBlockSize / 4; ++group) {
      const float a = magnitude_of(row[4 * group + j]);
      float d[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        d[lane] = magnitude_of(residual<true>(a, {scales[lane], reciprocals[lane]}, division_scaling(scales[lane])));
      if constexpr (kObjective == Objective::powers) {
        double powers[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) powers[lane] = static_cast<double>(d[lane]);
        raise_to_power(powers, power);
        for (int lane = 0; lane < kLanes; ++lane) d[lane] = static_cast<float>(powers[lane]);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        const float term = kWeighted ? weights[4 * group + j] * d[lane] : d[lane];
        sums[group][lane] = j == 1 ? term : combined_loss<kObjective>(sums[group][lane], term);
      }
    }
  for (int lane = 0; lane < kLanes; ++lane)
    losses[lane] = combined_loss<kObjective>(combined_loss<kObjective>(sums[0][lane], sums[2][lane]),
                                             combined_loss<kObjective>(sums[1][lane], sums[3][lane]));
}

// For one row of a block (16 elements), store in losses[c] the loss d^T H d under candidate scale c, for each of kLanes
// candidates. d is the vector of the rounding errors of the 16 elements, with signs, and H is `hessian`, 16 x 16 in
// row-major order. `scales` and `reciprocals` hold the candidate scales and their reciprocals.
//
// Order of operations: e = d^T H with fused multiply-adds; for each pair of columns, fma(d_j, e_j, d_(j+1) * e_(j+1));
// then these pairs are added as a tree.
__attribute__((noinline)) void find_hessian_losses(const float* row, const float* hessian, const float* scales,
                                                   const float* reciprocals, float* __restrict losses) {
  float d[kSearchBlockSize][kLanes], pairs[kSearchBlockSize / 2][kLanes];
  for (int j = 0; j < kSearchBlockSize; ++j)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float error =
          residual<true>(magnitude_of(row[j]), {scales[lane], reciprocals[lane]}, division_scaling(scales[lane]));
      d[j][lane] = row[j] >= 0.0f ? error : -error;
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
