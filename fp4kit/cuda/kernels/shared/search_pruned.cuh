// The pruned search for the best scale code by a warp, for 32 blocks without weights whose first upward code is normal.
// The proofs in search.cuh apply here too, but fewer losses are computed. A loss is the sum of the squared rounding
// errors of a block. A block's upward codes begin with `first`, the first candidate whose scale is at least a seventh
// of the block's amax (largest magnitude).
//
// search_loss_bounds.cuh gives lower bounds of L* for the eight codes first ... first + 7 at once. The code with the
// smallest bound is tried first; let L be its loss. A code whose bound exceeds L cannot win, and neither can the codes
// with 2, 4, ... times its scale. A code below `first` cannot win if its clipped loss exceeds L.
//
// A code is open if it has not been tried and no bound excludes it, so that its loss must still be computed. A block of
// Gaussian elements has 0.8 open codes on average, and the worst among 32 such blocks has 3.5. The threads of a warp
// share the open codes of their blocks, usually in one iteration. Atomic operations keep the two smallest losses of
// each block.
//
// Twice the winner's scale need not be tried if some element is nearest to 0.5 or 1.5 times the scale, by a margin of
// at least 0.001 times the scale. With twice the scale, the loss of that element is then larger by at least 0.001
// scale^2. That is more than the uncertainty kLossMargin of a loss of at most 16 scale^2.
#pragma once

#include "search_loss_bounds.cuh"
#include "search.cuh"

constexpr u32 kMaxOpenCodes =
    14u;  // per block: seven codes below the first upward code, and seven of the eight upward codes

// Return the rank of a code: an integer that orders codes by their losses and contains the code. It is 16 * (b / 16) +
// code % 16, where b is the bits of the loss and b / 16 is rounded down. code % 16 identifies the code, because a
// block's ranked codes lie within sixteen consecutive codes.
FP4KIT_DEVICE u32 rank_of(float loss, u32 code) {
  return (bits_of(loss) & ~15u) | (code & 15u);
}
// The smallest difference of two ranks that proves which loss is smaller. The losses are then at least 482 float steps
// apart, which is more than the uncertainty kLossMargin.
constexpr i32 kMinRankGap = 512;

// Shared memory of a warp. `jobs` holds 32 * code + lane for each open code of the warp's 32 blocks, in any order.
// `lane` is the lane that has the block. `count` is the number of jobs. `least` holds the two smallest ranks per lane.
struct OpenCodes {
  u16 jobs[kMaxOpenCodes * 32u];
  u32 count;
  struct alignas(8) Least {
    u32 rank, second;
  } least[32];
};

// The tables that the pruned search reads, in shared memory. The candidates are stored separately. With weights, the
// search reads no tables.
template <bool kWeighted>
struct PruningTables {
  LossBounds bounds;
};
template <>
struct PruningTables<true> {};

// Fill the tables that the pruned search reads, or do nothing if kWeighted. All threads of a thread block must call
// this function, and then synchronize before they read the tables.
template <class R, bool kWeighted>
FP4KIT_DEVICE void make_pruning_tables(PruningTables<kWeighted>& tables) {
  if constexpr (!kWeighted) make_bounds<typename R::Scale>(tables.bounds);
}

// The state of the search for the block of one thread. least.rank is the smallest known rank. least.second is the
// second smallest rank, or 0 if some codes cannot be tried. In that case, no code can be proven best.
struct Screened {
  OpenCodes::Least least;
  u32 base, end, open = 0u;  // open: bit j is set if code base + j may win; base: first code - 24

  // Return the code with the smallest rank.
  FP4KIT_DEVICE_MEMBER u32 best() const { return base + 16u + (least.rank - base & 15u); }
};

// Return the first candidate of a block whose scale is at least amax / 7, if there is one and its code is normal.
// Otherwise return 0. The result is also 0 if the bounds are not proven for the tensor's scales (shared.ordinary is
// false).
FP4KIT_DEVICE u32 normal_first(float amax, CandidateRange range, const Candidates& shared) {
  const float value = amax * shared.per_ordinary_amax;
  const u32 first = static_cast<u32>(maximum(normal_code_at_least(value), static_cast<i32>(range.low)));
  return value >= 0x1p-6f && first <= range.high ? first : 0u;
}

// Begin the search of a block: compute the loss of the upward code with the smallest bound. Return the state of the
// block's search, which holds the rank of this code and, in `open`, the other codes that may still win. `first` is the
// result of normal_first, and must not be 0. The lowest `unsure` of the seven codes below `first` are possibly no
// candidates. If one of them may still win, least.second is 0, so that no code is proven best; otherwise it is the bits
// of infinity.
FP4KIT_DEVICE Screened screen(const SearchBlock<false>& block, float amax, CandidateRange range, u32 first, i32 unsure,
                              const Candidates& shared, const LossBounds& bounds) {
  const u32 end = minimum(first + 8u, range.high + 1u);
  const float reciprocal = shared.by_code[first].reciprocal;
  const EightBounds sums = bounds_of(block, first, end - first, reciprocal, bounds);
  const u32 likely = index_of_smallest(sums);
  const float loss = loss_of<false>(block, shared.by_code[first + likely], 1.0f);
  const u32 above = codes_within(sums, loss * reciprocal * reciprocal) & ~(0x1000000u << likely);
  const float threshold = amax - sqrt_approx(loss);  // if a code may win, 6 times its scale is at least this
  const i32 low = maximum(normal_code_at_least(threshold * (shared.per_amax * (7.0f / 6.0f - 0x1p-11f))),
                          static_cast<i32>(range.low));
  const i32 lost = low - static_cast<i32>(first) +
                   7;  // how many of the seven codes below `first` cannot win, counted from the lowest one; 10 at most
  const u32 below = 0xFE0000u << maximum(lost, 0) & 0xFE0000u;
  return {{rank_of(loss, first + likely), lost < unsure ? 0u : kInfinityBits}, first - 24u, end, above | below};
}

// Compute the losses of all open codes of a warp's blocks, one code per thread at a time. Update s.least, the two
// smallest ranks among all codes of this thread's block that have been tried so far. `block` and s belong to this
// thread, and open_codes to the warp. s.open is not changed. All threads of the warp must call this function.
FP4KIT_DEVICE void try_open_codes(const SearchBlock<false>& block, Screened& s, const Candidates& shared,
                                  OpenCodes& open_codes) {
  const u32 lane = threadIdx.x % 32u;
  __syncwarp();
  open_codes.least[lane] = s.least;
  if (lane == 0u) open_codes.count = 0u;
  __syncwarp();
  u16* job =
      open_codes.jobs;  // a thread reserves its part of the queue with an atomic, which is faster than a sum over lanes
  if (s.open) job += atomicAdd(&open_codes.count, static_cast<u32>(__popc(s.open)));
  const u32 least_job = opaque(s.base * 32u + lane);
#pragma unroll 1
  for (u32 open = s.open; open;) {
    const u32 bit = opaque(31u - __clz(open));
    *job++ = static_cast<u16>(least_job + bit * 32u);
    open ^= 1u << bit;
  }
  __syncwarp();
  const u32 total = open_codes.count;
#pragma unroll 1
  for (u32 start = 0u; start < total; start += 32u) {
    const u32 job = start + lane < total ? open_codes.jobs[start + lane] : 32u, code = job / 32u;
    SearchBlock<false> other;
#pragma unroll
    for (int j = 0; j < kSearchBlockSize; ++j)
      other.a[j] = float_of(__shfl_sync(0xFFFFFFFFu, bits_of(block.a[j]), job % 32u));
    const u32 rank = rank_of(loss_of<true>(other, shared.by_code[code], 1.0f), code);
    if (start + lane < total) {
      OpenCodes::Least& least = open_codes.least[job % 32u];
      atomicMin(&least.second, maximum(atomicMin(&least.rank, rank), rank));
    }
  }
  __syncwarp();
  s.least = open_codes.least[lane];
}

// Return true if the code s.best() is proven to be the best candidate of a block. Two conditions must hold: its rank is
// below the rank of every other tried code by at least kMinRankGap, and no code from s.end upward can win. Call this
// function after try_open_codes; if it returns false, the block needs a full search.
FP4KIT_DEVICE bool is_proven(const SearchBlock<false>& block, const Screened& s, CandidateRange range,
                             const Candidates& shared) {
  const bool is_alone = static_cast<i32>(s.least.second - s.least.rank) >= kMinRankGap;
  const u32 best = s.best(), doubled = best + 8u;
  if (!is_alone | doubled<s.end | doubled> range.high) return is_alone;
  if (has_own_value(block, shared.by_code[best])) return true;
  return kLossMargin * loss_of<false>(block, shared.by_code[doubled], 1.0f) >= float_of(s.least.rank | 15u) ||
         !is_near_tie(block, shared.by_code[best]);
}
