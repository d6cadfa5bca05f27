// The pruned search for the scale code of smallest loss, for kLanes blocks side by side. It is the search of
// cuda/kernels/shared/search.cuh, where the proof is.
//
// Candidate: a scale code, 1 ... 126 (E4M3), with the block amax and the scale that it stands for. Loss: the weighted
// sum of squared errors of a block under a candidate. Lane: one block; loops over lanes vectorize. Upward codes: up to
// 8 codes from the first one whose scale is above amax / 7; their losses are all computed. Downward codes: those below,
// computed until what they clip alone costs more than the smallest loss so far.
#pragma once

#include "../../cuda/kernels/rules/search_losses.cuh"
#include "simd_bytes.h"

namespace {

constexpr int kCandidates = 128;  // E4M3 codes; codes 0 and 127 are no candidates

// The candidates of all blocks of a matrix, by code: block amaxes, scales, and approximate reciprocals of the scales.
struct Candidates {
  const float *amaxes, *scales, *reciprocals;

  // Return true if the scales are in the range for which the bounds of the pruned search are proven.
  bool are_bounds_valid() const { return amaxes[1] > 0x1p-57f && amaxes[kLastCandidate] < 0x1p50f; }

  // Return a factor f for finding the first upward code of a block: every code whose value is above amax * f has a
  // scale above amax / 7. The last candidate is the code of 448.
  float per_amax() const { return 448.0f * (6.0f / 7.0f) * (1.0f + 0x1p-12f) / amaxes[kLastCandidate]; }
};

// kLanes blocks, stored by element.
//   a, w                magnitudes, and weights of their columns if kWeighted
//   amax                largest magnitude
//   min_code, max_code  the candidates of each block
//   is_open             1 if the block is searched; 0 for blocks of zeros, blocks that are not finite and unused lanes
template <bool kWeighted>
struct LaneBlocks {
  float a[kSearchBlockSize][kLanes], w[kWeighted ? kSearchBlockSize : 1][kLanes], amax[kLanes];
  u32 min_code[kLanes], max_code[kLanes], is_open[kLanes];

  // Return the block of a lane.
  __forceinline__ SearchBlock<kWeighted> block(int lane) const {
    SearchBlock<kWeighted> of_lane;
    FP4KIT_UNROLL
    for (int j = 0; j < kSearchBlockSize; ++j) of_lane.a[j] = a[j][lane];
    if constexpr (kWeighted) {
      FP4KIT_UNROLL
      for (int j = 0; j < kSearchBlockSize; ++j) of_lane.w[j] = w[j][lane];
    }
    return of_lane;
  }
};

// Store the loss of each block under its own candidate. kAny: any magnitudes and scales; else magnitudes are below
// 7 scales. noinline: compiled once instead of into each call, which took a minute.
template <bool kAny, bool kWeighted>
__attribute__((noinline)) void find_losses(const LaneBlocks<kWeighted>& blocks, const float* scales,
                                           const float* reciprocals, float* __restrict losses) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Candidate c = {scales[lane], reciprocals[lane]};
    losses[lane] = loss_of<kAny>(blocks.block(lane), c, kAny ? division_scaling(c.scale) : 1.0f);
  }
}

// Store, for each block, a lower bound of its loss: the loss of only those elements that its candidate clips.
template <bool kWeighted>
__attribute__((noinline)) void find_clipped_losses(const LaneBlocks<kWeighted>& blocks, const float* scales,
                                                   float* __restrict losses) {
  for (int lane = 0; lane < kLanes; ++lane)
    losses[lane] = clipped_loss_of(blocks.block(lane), blocks.amax[lane], scales[lane]);
}

// The state of a search; every array has one entry per lane.
template <bool kWeighted>
struct PrunedSearch {
  const LaneBlocks<kWeighted>& blocks;
  const Candidates& candidates;
  // The smallest loss so far, the second smallest loss of an upward code, and the smallest loss of an upward code.
  float loss[kLanes], second_loss[kLanes], upward_loss[kLanes];
  // The first code with `loss`, and the code of `upward_loss`. Upward codes are first ... end - 1. is_proven: 1 if
  // `code` is proven to be the result.
  u32 code[kLanes], upward_code[kLanes], first[kLanes], end[kLanes], is_proven[kLanes];
  // The codes that are tried now, their scales and reciprocals, and the losses found for them.
  u32 tried[kLanes];
  float scale[kLanes], reciprocal[kLanes], tried_loss[kLanes];

  // Look up scale and reciprocal of the tried codes; codes beyond the last candidate get those of the last.
  void look_up() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const i32 index = static_cast<i32>(minimum(tried[lane], kLastCandidate));
      scale[lane] = candidates.scales[index];
      reciprocal[lane] = candidates.reciprocals[index];
    }
  }

  // Set the upward codes and the initial state.
  void begin() {
    const float per_amax = candidates.per_amax();
    for (int lane = 0; lane < kLanes; ++lane) {
      first[lane] = tried[lane] = maximum(code_at_least(blocks.amax[lane] * per_amax), blocks.min_code[lane]);
      end[lane] =
          blocks.is_open[lane] ? minimum(first[lane] < 8u ? 16u : first[lane] + 8u, blocks.max_code[lane] + 1u) : 0u;
      loss[lane] = second_loss[lane] = float_of(kInfinityBits);
      code[lane] = blocks.min_code[lane];
      is_proven[lane] = 1u;
    }
    if constexpr (kWeighted) {
      look_up();
      for (int lane = 0; lane < kLanes; ++lane)
        is_proven[lane] = keeps_squares(blocks.block(lane), blocks.amax[lane], scale[lane]);
    }
  }

  // Try all upward codes.
  void search_upward() {
    u32 steps = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      steps = maximum(steps, end[lane] > first[lane] ? end[lane] - first[lane] : 0u);
    for (u32 step = 0; step < steps; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) tried[lane] = first[lane] + step;
      look_up();
      find_losses<false>(blocks, scale, reciprocal, tried_loss);
      for (int lane = 0; lane < kLanes; ++lane) {
        const float found = tried[lane] < end[lane] ? tried_loss[lane] : float_of(kInfinityBits);
        second_loss[lane] = fminf(second_loss[lane], fmaxf(found, loss[lane]));
        code[lane] = found < loss[lane] ? tried[lane] : code[lane];
        loss[lane] = fminf(found, loss[lane]);
      }
    }
  }

  // Try downward codes until none is left whose clipped loss is at most the smallest loss.
  void search_downward() {
    u32 is_open[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      upward_code[lane] = code[lane];
      upward_loss[lane] = loss[lane];
      tried[lane] = minimum(first[lane], blocks.max_code[lane] + 1u) - 1u;
      is_open[lane] = blocks.is_open[lane];
    }
    for (;;) {
      u32 any_open = 0;
      look_up();
      find_clipped_losses(blocks, scale, tried_loss);
      for (int lane = 0; lane < kLanes; ++lane) {
        is_open[lane] = tried_loss[lane] > loss[lane] || tried[lane] < blocks.min_code[lane] ? 0u : is_open[lane];
        any_open |= is_open[lane];
      }
      if (!any_open) return;
      find_losses<true>(blocks, scale, reciprocal, tried_loss);
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_better = is_open[lane] && tried_loss[lane] <= loss[lane];
        code[lane] = is_better ? tried[lane] : code[lane];
        loss[lane] = is_better ? tried_loss[lane] : loss[lane];
        --tried[lane];
      }
    }
  }

  // Clear is_proven in lanes whose code may not be the first one of smallest loss among all candidates. The winner's
  // lead over the other upward codes must be certain. If twice the winner's scale is no upward code, either the lead
  // over it is certain too, or no element of the winner is near a tie.
  void prove() {
    u32 is_doubtful[kLanes], any_doubtful = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool is_downward = code[lane] != upward_code[lane];
      const bool is_certain =
          is_downward ? kLossMargin * upward_loss[lane] >= loss[lane] : kLossMargin * second_loss[lane] >= loss[lane];
      tried[lane] = code[lane] + minimum(code[lane], 8u);  // twice the scale
      is_doubtful[lane] = blocks.is_open[lane] && is_certain && !is_downward && tried[lane] >= end[lane] &&
                          tried[lane] <= blocks.max_code[lane];
      is_proven[lane] = !blocks.is_open[lane] || (is_certain && is_proven[lane]);
      any_doubtful |= is_doubtful[lane];
    }
    if (!any_doubtful) return;
    look_up();
    find_losses<false>(blocks, scale, reciprocal, tried_loss);
    any_doubtful = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      is_doubtful[lane] = is_doubtful[lane] && kLossMargin * tried_loss[lane] < loss[lane];
      tried[lane] = code[lane];
      any_doubtful |= is_doubtful[lane];
    }
    if (!any_doubtful) return;
    look_up();
    for (int lane = 0; lane < kLanes; ++lane)
      is_proven[lane] =
          is_doubtful[lane] && is_near_tie(blocks.block(lane), {scale[lane], reciprocal[lane]}) ? 0u : is_proven[lane];
  }

  // Search all lanes. Afterwards `code` is the first code of smallest loss in every lane where is_proven is 1.
  __attribute__((noinline)) void run() {
    begin();
    search_upward();
    search_downward();
    prove();
  }
};

}  // namespace
