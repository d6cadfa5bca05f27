// The pruned search of ways/search.cuh, whose proof is there, for sixteen blocks side by side: a lane each, loops over
// which become vectors.
#pragma once

#include "../../cuda/kernels/rules/search_losses.cuh"
#include "cuda_compat.h"

namespace {

constexpr int kLanes = 16;
constexpr int kCandidates = 128;  // E4M3 codes; the first and the last of them are none

// What every block of a matrix may have, by code: block amaxes, their scales, and the approximate reciprocals of those.
struct Candidates {
  const float *amaxes, *scales, *reciprocals;

  // Whether the bounds hold.
  bool ordinary() const { return amaxes[1] > 0x1p-57f && amaxes[kLastCandidate] < 0x1p50f; }
  // Codes of values above amax times this have scales above amax / 7; the last code is of 448.
  float per_amax() const { return 448.0f * (6.0f / 7.0f) * (1.0f + 0x1p-12f) / amaxes[kLastCandidate]; }
};

// Magnitudes of blocks, and the weights of their columns if kWeighted; the codes that each may have; whether it is to
// be searched.
template <bool kWeighted>
struct Sixteen {
  float a[kSearchBlockSize][kLanes], w[kWeighted ? kSearchBlockSize : 1][kLanes], amax[kLanes];
  u32 low[kLanes], high[kLanes], open[kLanes];

  __forceinline__ SearchBlock<kWeighted> block(int lane) const {
    SearchBlock<kWeighted> found;
    FP4KIT_UNROLL
    for (int j = 0; j < kSearchBlockSize; ++j) found.a[j] = a[j][lane];
    if constexpr (kWeighted) {
      FP4KIT_UNROLL
      for (int j = 0; j < kSearchBlockSize; ++j) found.w[j] = w[j][lane];
    }
    return found;
  }
};

// Losses of blocks, each under a candidate of its own. Compiled once, not into each of its calls, which took a minute.
template <bool kAny, bool kWeighted>
__attribute__((noinline)) void put_losses(const Sixteen<kWeighted>& blocks, const float* scales,
                                          const float* reciprocals, float* __restrict losses) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Candidate c = {scales[lane], reciprocals[lane]};
    losses[lane] = loss_of<kAny>(blocks.block(lane), c, kAny ? division_scaling(c.scale) : 1.0f);
  }
}

// What these candidates cut off.
template <bool kWeighted>
__attribute__((noinline)) void put_clipped_losses(const Sixteen<kWeighted>& blocks, const float* scales,
                                                  float* __restrict losses) {
  for (int lane = 0; lane < kLanes; ++lane)
    losses[lane] = clipped_loss_of(blocks.block(lane), blocks.amax[lane], scales[lane]);
}

template <bool kWeighted>
struct Near {
  const Sixteen<kWeighted>& blocks;
  const Candidates& all;
  float loss[kLanes], second[kLanes],
      above_loss[kLanes];  // of the first least one, of the next, of the least of first ... end - 1
  u32 code[kLanes], above[kLanes], first[kLanes], end[kLanes], proven[kLanes];
  u32 at[kLanes];  // codes that are looked at, and what they are and give
  float scale[kLanes], reciprocal[kLanes], found[kLanes];

  void look_up() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const i32 code = static_cast<i32>(minimum(at[lane], kLastCandidate));
      scale[lane] = all.scales[code];
      reciprocal[lane] = all.reciprocals[code];
    }
  }

  void begin() {
    const float per_amax = all.per_amax();
    for (int lane = 0; lane < kLanes; ++lane) {
      first[lane] = at[lane] = maximum(code_at_least(blocks.amax[lane] * per_amax), blocks.low[lane]);
      end[lane] = blocks.open[lane] ? minimum(first[lane] < 8u ? 16u : first[lane] + 8u, blocks.high[lane] + 1u) : 0u;
      loss[lane] = second[lane] = float_of(kInfinityBits);
      code[lane] = blocks.low[lane];
      proven[lane] = 1u;
    }
    if constexpr (kWeighted) {
      look_up();
      for (int lane = 0; lane < kLanes; ++lane)
        proven[lane] = keeps_squares(blocks.block(lane), blocks.amax[lane], scale[lane]);
    }
  }

  void upward() {
    u32 steps = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      steps = maximum(steps, end[lane] > first[lane] ? end[lane] - first[lane] : 0u);
    for (u32 step = 0; step < steps; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) at[lane] = first[lane] + step;
      look_up();
      put_losses<false>(blocks, scale, reciprocal, found);
      for (int lane = 0; lane < kLanes; ++lane) {
        const float here = at[lane] < end[lane] ? found[lane] : float_of(kInfinityBits);
        second[lane] = fminf(second[lane], fmaxf(here, loss[lane]));
        code[lane] = here < loss[lane] ? at[lane] : code[lane];
        loss[lane] = fminf(here, loss[lane]);
      }
    }
  }

  void downward() {
    u32 open[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      above[lane] = code[lane];
      above_loss[lane] = loss[lane];
      at[lane] = minimum(first[lane], blocks.high[lane] + 1u) - 1u;
      open[lane] = blocks.open[lane];
    }
    for (;;) {
      u32 any = 0;
      look_up();
      put_clipped_losses(blocks, scale, found);
      for (int lane = 0; lane < kLanes; ++lane) {
        open[lane] = found[lane] > loss[lane] || at[lane] < blocks.low[lane] ? 0u : open[lane];
        any |= open[lane];
      }
      if (!any) return;
      put_losses<true>(blocks, scale, reciprocal, found);
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool better = open[lane] && found[lane] <= loss[lane];
        code[lane] = better ? at[lane] : code[lane];
        loss[lane] = better ? found[lane] : loss[lane];
        --at[lane];
      }
    }
  }

  void prove() {
    u32 asks[kLanes], any = 0;  // what is twice the winner's scale
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool moved = code[lane] != above[lane];
      const bool sure = moved ? kLossMargin * above_loss[lane] >= loss[lane] : kLossMargin * second[lane] >= loss[lane];
      at[lane] = code[lane] + minimum(code[lane], 8u);
      asks[lane] = blocks.open[lane] && sure && !moved && at[lane] >= end[lane] && at[lane] <= blocks.high[lane];
      proven[lane] = !blocks.open[lane] || (sure && proven[lane]);
      any |= asks[lane];
    }
    if (!any) return;
    look_up();
    put_losses<false>(blocks, scale, reciprocal, found);
    any = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      asks[lane] = asks[lane] && kLossMargin * found[lane] < loss[lane];
      at[lane] = code[lane];
      any |= asks[lane];
    }
    if (!any) return;
    look_up();
    for (int lane = 0; lane < kLanes; ++lane)
      proven[lane] = asks[lane] && is_near_tie(blocks.block(lane), {scale[lane], reciprocal[lane]}) ? 0u : proven[lane];
  }

  // code: of the first least loss, where it is proven to be that of all.
  __attribute__((noinline)) void run() {
    begin();
    upward();
    downward();
    prove();
  }
};

}  // namespace
