// The pruned search of a block's scale among E4M3 codes, a block a thread. What it cannot prove, a warp searches in
// full.
//
// Let L(c) be the loss of code c as loss_of adds it, and L*(c) the same with the truly nearest value for every element.
//
// Down. An element above 6 scales is left with d = |x| - 6 scale, which grows as the scale falls. The same sum with
// zeros in place of the other elements' losses is no larger, since rounding is monotone: once it exceeds L of a
// candidate, no lower one wins. Without weights, the largest element alone says nearly as much: the sum is at least its
// d^2. With weights it may count for nothing, so all of them are added.
//
// Up. Below 7 scales, twice a scale has no value that the scale has not. So no element comes nearer, and since rounding
// is monotone, L*(scale) <= L*(2 scale). Every code from `end` on is 2, 4, 8, ... times one of first ... end - 1, whose
// scales are above amax / 7. L(c) exceeds L*(c) only where a quotient is so near to a tie t, between neighbours h
// apart, that its own error decides: under 2^-22 of it, since the approximate reciprocal is off by 2^-23 and the
// product rounded. The element's loss, (h/2)^2, is then too large by 2 h t 2^-22, which is 28 * 2^-22 of it, for t / h
// is at most 3.5. With what rounding adds, L*(c) >= kLossMargin L(c). So the least L of all that were looked at is that
// of the full search if kLossMargin L(c) is no less for the other c of first ... end - 1, and if the same holds for
// twice the winner, or no element of the winner is near a tie: what is beyond comes later, and the first of equals
// wins. No square is lost while scales are in 2^-60 ... 2^50.
#pragma once

#include "block.cuh"
#include "hadamard.cuh"
#include "search_losses.cuh"

struct SearchArguments {
  const void* x;
  const float *tensor_amax, *column_weights;  // a weight for each column, or a Hessian for each 16
  float* block_amax;
  u64* unproven;                    // blocks for which every candidate was tried are added; null if nobody asks
  i64 rows, columns, lower, upper;  // codes beside that of amax / 6 that are candidates: -126 ... 126 for all
};

// What threads of a thread block share: the candidates by code, and what finds the first code of a block.
struct Candidates {
  Candidate of[128];
  float amaxes[128];
  float per_amax;           // codes of values above amax times this have scales above amax / 7
  float per_ordinary_amax;  // the same where the bounds hold, else NaN
  bool ordinary;            // the bounds hold
};

template <class R>
FP4KIT_DEVICE void make_candidates(Candidates& shared, float amax) {
  for (u32 code = 1u + threadIdx.x; code <= kLastCandidate; code += blockDim.x) {
    shared.of[code] = candidate_of<R>(code, amax);
    shared.amaxes[code] = candidate_amax<R>(code, amax);
  }
  if (threadIdx.x == 0) {
    shared.per_amax = R::kScaleMax * (6.0f / 7.0f) * (1.0f + 0x1p-12f) / amax;
    shared.ordinary = candidate_amax<R>(1u, amax) > 0x1p-57f && candidate_amax<R>(kLastCandidate, amax) < 0x1p50f;
    shared.per_ordinary_amax = shared.ordinary ? shared.per_amax : nan_value();
  }
  __syncthreads();
}

// Codes low ... high.
struct CandidateRange {
  u32 low, high;
};

// The candidates of a block: all, or those beside the code of its own amax.
template <class R>
FP4KIT_DEVICE CandidateRange candidate_range(const SearchArguments& a, float amax, TensorScale t) {
  if (a.lower <= -126 && a.upper >= 126) return {1u, kLastCandidate};
  // A normal code, from a product in place of the rule's quotients where that is far from a tie.
  const float factor = t.amax > 0x1p-60f && t.amax < 0x1p60f ? t.encode * (1.0f / 6.0f) : nan_value();
  const u32 ratio_bits = bits_of(amax * factor), halfway = ratio_bits + 0x80000u;
  i32 own = static_cast<i32>(halfway >> 20) - (120 << 3);
  const bool is_usual = ratio_bits - bits_of(0x1p-6f) < bits_of(440.0f) - bits_of(0x1p-6f);
  if (!is_usual | (halfway + 64u & 0xFFFFFu) <= 128u)
    own = static_cast<i32>(block_modelopt_static::code<R, Float32>(amax, t));
  const auto within = [own](i64 offset) {
    const i32 code = own + static_cast<i32>(minimum<i64>(maximum<i64>(offset, -126), 126));
    return static_cast<u32>(minimum(maximum(code, 1), static_cast<i32>(kLastCandidate)));
  };
  return {within(a.lower), within(a.upper)};
}

// Whether the search of a block, amax > 0, is proven; best: its result.
template <bool kWeighted>
FP4KIT_DEVICE bool search_from_first(const SearchBlock<kWeighted>& block, float amax, CandidateRange range,
                                     const Candidates& shared, BestCode& best) {
  const u32 first = maximum(code_at_least(amax * shared.per_amax), range.low);
  const u32 end = minimum(first < 8u ? 16u : first + 8u, range.high + 1u);
  float second = float_of(kInfinityBits);
#pragma unroll 1
  for (u32 code = first; code < end; ++code) {
    const float loss = loss_of<false>(block, shared.of[code], 1.0f);
    second = fminf(second, fmaxf(loss, best.loss));
    if (loss < best.loss) best = {loss, code};
  }
  if (!keeps_squares(block, amax, shared.of[minimum(first, kLastCandidate)].scale)) return false;
  const BestCode above = best;
#pragma unroll 1
  for (u32 code = minimum(first, range.high + 1u) - 1u; code >= range.low; --code) {
    const Candidate c = shared.of[code];
    if (clipped_loss_of(block, amax, c.scale) > best.loss) break;
    const float loss = loss_of<true>(block, c, 1.0f);
    if (loss <= best.loss) best = {loss, code};
  }
  if (best.code != above.code) return kLossMargin * above.loss >= best.loss;
  if (kLossMargin * second < best.loss) return false;
  const u32 doubled = best.code + minimum(best.code, 8u);
  if (doubled < end || doubled > range.high) return true;
  return kLossMargin * loss_of<false>(block, shared.of[doubled], 1.0f) >= best.loss ||
         !is_near_tie(block, shared.of[best.code]);
}
