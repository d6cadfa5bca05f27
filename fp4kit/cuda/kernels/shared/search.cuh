// The pruned search for a block's best scale among E4M3 codes, one block per thread. The best scale has the smallest
// loss, the sum of the squared rounding errors of the elements, weighted if kWeighted. The search skips codes that
// provably cannot win. If it cannot prove its result, a warp tries all candidates (the scales that may be chosen) of
// the block. R is the recipe, and `amax` is the largest magnitude of a block, or of the tensor where a comment says so.
//
// Let L(c) be the loss of scale code c as loss_of computes it, and L*(c) the same sum with the truly nearest value for
// every element. The upward codes are first ... end - 1, where `first` is the first candidate whose scale is above amax
// / 7. They are at most eight codes, or all codes up to 15 if `first` is below 8 (subnormal).
//
// Downward. An element above 6 scales has the residual d = |x| - 6 scale, which grows as the scale shrinks. Consider
// the sum of only these elements' losses, with zeros for the others. It is at most L(c), because rounding is monotone.
// Once it exceeds the loss of a candidate, no lower candidate wins. Without weights, the largest element alone gives
// nearly as good a bound: L(c) is at least its d^2. With weights the largest element may count for nothing, so all
// elements above 6 scales are added.
//
// Upward. Below 7 times a scale, every value that can be represented with twice the scale can also be represented with
// the scale. So doubling the scale brings no element nearer to a value, and because rounding is monotone, L*(scale) <=
// L*(2 scale). Every code from `end` on has 2, 4, 8, ... times the scale of an upward code.
//
// L(c) exceeds L*(c) only if the quotient of an element is so near to a tie t that the error of the quotient decides.
// Let h be the distance of the two neighbors of t. The error is below 2^-22 of the quotient, because the approximate
// reciprocal is off by 2^-23 and the product is rounded. The element's loss, (h/2)^2, is then too large by 2 h t 2^-22.
// That is 28 * 2^-22 of it, because t / h is at most 3.5. With the rounding of the sums, L*(c) >= kLossMargin L(c).
//
// So the smallest L among the candidates that were tried is the smallest of all, if two conditions hold. First,
// kLossMargin L(c) is at least the winner's loss for every other upward code c. Second, this also holds for the code
// with twice the winner's scale, or no element is near a tie with the winner's scale. Larger candidates come later, and
// among equal losses the first one wins. No square underflows while scales are in 2^-60 ... 2^50.
#pragma once

#include "block.cuh"
#include "hadamard.cuh"
#include "lane_search.cuh"

// The arguments of the searches for block amaxes. The elements x are a matrix of rows x columns, and block_amax gets
// the result, one amax per block.
struct SearchArguments {
  const void* x;
  const float *tensor_amax, *column_weights;  // column_weights: one weight per column, or one Hessian per 16 columns
  float* block_amax;
  u64* unproven;                    // incremented by the number of blocks that had a full search (null: not wanted)
  i64 rows, columns, lower, upper;  // E4M3 scales: candidates are the codes c + lower ... c + upper, clamped to
                                    // 1 ... 126, where c is the code of the block's own amax; -126 ... 126 for all
                                    // codes. E8M0 scales: see ScalePowers in search_full.cuh
};

// The candidates, indexed by code, and the numbers from which the first upward code of a block is computed. They are in
// shared memory of a thread block.
struct Candidates {
  Candidate by_code[128];
  float amaxes[128];
  float per_amax;           // codes whose values are above amax * per_amax have scales above amax / 7
  float per_ordinary_amax;  // per_amax if `ordinary`, otherwise NaN
  bool ordinary;            // true if the scales are in the range for which the bounds are proven

  FP4KIT_DEVICE_MEMBER Candidate at(u32 code) const { return by_code[code]; }
  FP4KIT_DEVICE_MEMBER u32 first_code(float amax) const { return code_at_least(amax * per_amax); }
};

// Fill `shared` for the tensor amax `amax`: the candidates with the codes 1 ... kLastCandidate, and the other fields of
// Candidates. Entries of other codes are not set. All threads of a thread block must call this function, and may read
// `shared` when it returns.
template <class R>
FP4KIT_DEVICE void make_candidates(Candidates& shared, float amax) {
  for (u32 code = 1u + threadIdx.x; code <= kLastCandidate; code += blockDim.x) {
    shared.by_code[code] = candidate_of<R>(code, amax);
    shared.amaxes[code] = candidate_amax<R>(code, amax);
  }
  if (threadIdx.x == 0) {
    shared.per_amax = R::kScaleMax * (6.0f / 7.0f) * (1.0f + 0x1p-12f) / amax;
    shared.ordinary = candidate_amax<R>(1u, amax) > 0x1p-57f && candidate_amax<R>(kLastCandidate, amax) < 0x1p50f;
    shared.per_ordinary_amax = shared.ordinary ? shared.per_amax : nan_value();
  }
  __syncthreads();
}

// The candidates of a block: the codes low ... high.
struct CandidateRange {
  u32 low, high;
};

// Return the candidates of a block with this amax: the codes c + a.lower ... c + a.upper, clamped to 1 ...
// kLastCandidate. c is the scale code that the block rule block_modelopt_static gives for the amax and the tensor scale
// t. If a.lower is at most -126 and a.upper at least 126, all codes 1 ... kLastCandidate are candidates.
template <class R>
FP4KIT_DEVICE CandidateRange candidate_range(const SearchArguments& a, float amax, TensorScale t) {
  if (a.lower <= -126 && a.upper >= 126) return {1u, kLastCandidate};
  // If the code is normal, compute it with a product instead of the rule's quotients, unless the product is close to a
  // tie.
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

// Find the scale code with the smallest loss for a block with a finite amax > 0, and store it in `code`. Return true if
// it is proven to be the best of all candidates in `range` (the first one in case of ties). If the result is false,
// `code` may be wrong, and the caller tries all candidates. shared.ordinary must be true.
template <bool kWeighted>
FP4KIT_DEVICE bool search_alone(const SearchBlock<kWeighted>& block, float amax, CandidateRange range,
                                const Candidates& shared, u32& code) {
  LaneBlocks<1, kWeighted> lane = {{}, {}, {amax}, {range.low}, {range.high}, {1u}};
#pragma unroll
  for (int j = 0; j < kSearchBlockSize; ++j) {
    lane.a[j][0] = block.a[j];
    if constexpr (kWeighted) lane.w[j][0] = block.w[j];
  }
  LaneSearch<1, kWeighted, Candidates> search{lane, shared};
  search.run();
  code = search.code[0];
  return search.is_proven[0];
}
