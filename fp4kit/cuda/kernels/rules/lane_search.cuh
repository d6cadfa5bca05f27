// The pruned search for the scale code with the smallest loss, for kLanes blocks together: 16 on a CPU, where loops
// over lanes vectorize, and 1 in a thread of a GPU. shared/search.cuh has its proof.
//   candidate       one of the E4M3 codes 1 ... 126, with its scale. In each lane, those from min_code to max_code
//   Candidates      candidates.at(code) is a Candidate, and candidates.first_code(amax) the first code whose scale is
//                   above amax / 7
//   loss            the sum of the squared errors of a block under a candidate, weighted if kWeighted
//   upward codes    the candidates from first_code on, eight codes at most. If the first one is below 8 (a subnormal
//                   number), they are all candidates from it up to code 15
//   downward codes  the candidates below the upward codes
//   clipped loss    a lower bound of the loss (clipped_loss_of)
//
// The search computes the losses of all upward codes. Then it computes the losses of downward codes in descending
// order, until the clipped loss alone exceeds the smallest loss so far.
#pragma once

#include "search_losses.cuh"

// noinline makes g++ compile a function of loops over lanes once instead of once per call, which took a minute.
#ifdef __CUDACC__
#define FP4KIT_LANES __device__ __forceinline__
#else
#define FP4KIT_LANES __attribute__((noinline))
#endif

// The data of kLanes blocks, one per lane.
//   a, w                a[j][lane]: magnitude of element j; w[j][lane]: weight of its column if kWeighted, else unused
//   amax                largest magnitude of each block
//   min_code, max_code  first and last candidate of each block
//   is_open             1 if the block is searched; 0 for blocks of zeros, blocks that are not finite, and unused lanes
template <int kLanes, bool kWeighted>
struct LaneBlocks {
  float a[kSearchBlockSize][kLanes], w[kWeighted ? kSearchBlockSize : 1][kLanes], amax[kLanes];
  u32 min_code[kLanes], max_code[kLanes], is_open[kLanes];

  // Return the block of a lane as a SearchBlock, in which its elements, and its weights if kWeighted, are contiguous.
  FP4KIT_DEVICE_MEMBER SearchBlock<kWeighted> block(int lane) const {
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

// Store in losses[lane] the loss of the block of each lane under the candidate with the scale scales[lane] and its
// reciprocal reciprocals[lane]. If kAny, magnitudes and scales may have any size. Otherwise, magnitudes must be below 7
// times the scale, which is faster.
template <bool kAny, int kLanes, bool kWeighted>
FP4KIT_LANES void find_losses(const LaneBlocks<kLanes, kWeighted>& blocks, const float* scales,
                              const float* reciprocals, float* __restrict__ losses) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Candidate c = {scales[lane], reciprocals[lane]};
    losses[lane] = loss_of<kAny>(blocks.block(lane), c, kAny ? division_scaling(c.scale) : 1.0f);
  }
}

// Store in losses[lane] the clipped loss of the block of each lane under the scale scales[lane].
template <int kLanes, bool kWeighted>
FP4KIT_LANES void find_clipped_losses(const LaneBlocks<kLanes, kWeighted>& blocks, const float* scales,
                                      float* __restrict__ losses) {
  for (int lane = 0; lane < kLanes; ++lane)
    losses[lane] = clipped_loss_of(blocks.block(lane), blocks.amax[lane], scales[lane]);
}

// The state of a pruned search. Every array has one entry per lane. `run` does all of the search, by calling the other
// functions.
template <int kLanes, bool kWeighted, class Candidates>
struct LaneSearch {
  const LaneBlocks<kLanes, kWeighted>& blocks;
  const Candidates& candidates;
  // `loss` is the smallest loss so far. `upward_loss` and `second_loss` are the smallest and the second smallest loss
  // of an upward code.
  float loss[kLanes], second_loss[kLanes], upward_loss[kLanes];
  // `code` is the first code with the loss `loss`, and `upward_code` is the code of upward_loss. The upward codes are
  // first ... end - 1. `is_proven` is 1 if `code` is proven to be the result.
  u32 code[kLanes], upward_code[kLanes], first[kLanes], end[kLanes], is_proven[kLanes];
  // The codes that are tried now, their scales and reciprocals, and the losses found for them.
  u32 tried[kLanes];
  float scale[kLanes], reciprocal[kLanes], tried_loss[kLanes];

  // Set scale[lane] and reciprocal[lane] to those of the code tried[lane], for all lanes. Codes beyond the last
  // candidate get the scale and reciprocal of the last candidate.
  FP4KIT_DEVICE_MEMBER void look_up() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Candidate c = candidates.at(minimum(tried[lane], kLastCandidate));
      scale[lane] = c.scale;
      reciprocal[lane] = c.reciprocal;
    }
  }

  // Set the first state of each lane:
  //   first, end         the upward codes are first ... end - 1; there are none if the lane is not open (end = 0)
  //   loss, second_loss  infinity
  //   code               the first candidate, min_code
  //   is_proven          1. With weights, 0 if squares of errors may underflow or overflow (keeps_squares)
  FP4KIT_DEVICE_MEMBER void begin() {
    for (int lane = 0; lane < kLanes; ++lane) {
      first[lane] = tried[lane] = maximum(candidates.first_code(blocks.amax[lane]), blocks.min_code[lane]);
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

  // Compute the losses of all upward codes. Store the two smallest losses of each lane in `loss` and second_loss, and
  // the first code with the smallest loss in `code`. If there is no second code, or none at all, the loss stays
  // infinite and `code` stays the first candidate.
  FP4KIT_DEVICE_MEMBER void search_upward() {
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

  // Keep the results of search_upward in upward_code and upward_loss. Then compute the losses of the downward codes
  // (those below `first`) in descending order, and update `code` and `loss`. If losses are equal, the lower code wins.
  // A lane is finished when the clipped loss of its next code exceeds `loss`, or when no candidate is left. Lanes that
  // are not open stay as they are.
  FP4KIT_DEVICE_MEMBER void search_downward() {
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

  // In open lanes, set is_proven to 0 if `code` may not be the first code with the smallest loss among all candidates.
  // In lanes that are not open, set it to 1. An open lane keeps its is_proven only if both of these conditions hold:
  //   - The loss of `code` is smaller than that of all other upward codes by a safe margin (kLossMargin).
  //   - If `code` is an upward code, and the code with twice its scale is a candidate but no upward code: the loss of
  //     that candidate is larger by the margin, or no element is near a rounding tie under `code`.
  FP4KIT_DEVICE_MEMBER void prove() {
    u32 is_doubtful[kLanes], any_doubtful = 0;
    // 1. Compare the losses that are known. A lane is doubtful if the candidate with twice the scale was not tried.
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
    // 2. Try that candidate. The lane stays doubtful if its loss is not larger by the margin.
    look_up();
    find_losses<false>(blocks, scale, reciprocal, tried_loss);
    any_doubtful = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      is_doubtful[lane] = is_doubtful[lane] && kLossMargin * tried_loss[lane] < loss[lane];
      tried[lane] = code[lane];
      any_doubtful |= is_doubtful[lane];
    }
    if (!any_doubtful) return;
    // 3. A doubtful lane is proven only if no element is near a rounding tie.
    look_up();
    for (int lane = 0; lane < kLanes; ++lane)
      is_proven[lane] =
          is_doubtful[lane] && is_near_tie(blocks.block(lane), {scale[lane], reciprocal[lane]}) ? 0u : is_proven[lane];
  }

  // Search all lanes. Afterwards, `code` of a lane is the code with the smallest loss if is_proven is 1; if several
  // codes have that loss, it is the first of them. In lanes where is_proven is 0, `code` may be wrong, and callers
  // search the block again. In lanes that are not open, `code` is the first candidate.
  FP4KIT_LANES void run() {
    begin();
    search_upward();
    search_downward();
    prove();
  }
};
