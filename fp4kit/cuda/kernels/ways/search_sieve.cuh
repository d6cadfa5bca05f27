// The pruned search of blocks without weights, from the normal codes on, by a warp: what is proven as in search.cuh is proven with fewer losses.
//
// loss_bounds.cuh has lower bounds of L* of first ... first + 7 together. The code of the least is tried. One whose bound exceeds the loss of
// that is out, with its doubles, and so is one below first whose clipped loss does: 0.7 codes of a Gaussian block stay open, 3 of the one among 32
// that has most. So the threads of a warp share out what is open of its blocks, mostly in one turn. Nor need twice the winner be tried if an
// element is nearest to 0.5 or 1.5 scales by 0.001 of one at least: twice the scale leaves 0.001 scale^2 more of it, which is more than kSure takes
// from a loss of at most 16 scale^2.
#pragma once

#include "loss_bounds.cuh"
#include "search.cuh"

// Of a thread block. Without weights, two of them, with a table each, have all registers of a multiprocessor: engine/search_scales.py.
template <bool kWeighted>
constexpr int kSearchThreads = kWeighted ? kThreads : 512;
constexpr u32 kJobs = 256u;  // losses that a warp shares out at most

// What threads of a thread block share beside candidates: bounds, and what is open of each warp's blocks.
template <bool kWeighted>
struct Sieve {
  LossBounds bounds;
  u32 jobs[kSearchThreads<kWeighted> / 32][kJobs];
};
template <>
struct Sieve<true> {};

template <class R, bool kWeighted>
FP4KIT_DEVICE void make_sieve(Sieve<kWeighted>& sieve) {
  if constexpr (!kWeighted) make_bounds<typename R::Scale>(sieve.bounds);
}

// A block in the hands of its thread: best has the least loss that is known, second the least of the others; -1 if not all can be tried.
struct Screened {
  Best best;
  float second;
  u32 first, end, open;  // open: bit j if code first - 8 + j may win
};

// The first of the codes that have scales from amax / 7 on and that a block may have, if it is normal; else 0.
FP4KIT_DEVICE u32 normal_first(float amax, Span span, const Candidates& shared) {
  const float value = amax * shared.per_amax;
  const u32 first = static_cast<u32>(maximum(normal_code_above(value), static_cast<i32>(span.low)));
  return value >= 0x1p-6f && first <= span.high ? first : 0u;
}

// What bounds leave open once the likeliest code is tried.
FP4KIT_DEVICE Screened screen(const Searched<false>& block, float amax, Span span, u32 first, const Candidates& shared, const LossBounds& bounds) {
  const u32 end = minimum(first + 8u, span.high + 1u);
  const float reciprocal = shared.of[first].reciprocal;
  const Eight sums = bounds_of(block, first, end - first, reciprocal, bounds);
  const u32 likely = least_of(sums);
  const float loss = loss_of<false>(block, shared.of[first + likely], 1.0f);
  const float most = fminf(loss * reciprocal * reciprocal * (kUnits * (1.0f + 0x1p-12f)), 2047.0f);
  const u32 above = within(sums, static_cast<u32>(most)) & ~(1u << likely);
  const float over = amax - sqrt_approx(loss);  // 6 scales of a code that may win are no less
  const i32 low = maximum(normal_code_above(over * (shared.per_amax * (7.0f / 6.0f - 0x1p-11f))), static_cast<i32>(span.low));
  const i32 lost = low - static_cast<i32>(first) + 8;  // of the eight codes below first
  const u32 below = 0xFFu & 0xFFFFFFFFu << minimum(maximum(lost, 0), 8);
  return {{loss, first + likely}, lost < 0 ? -1.0f : float_of(kInfinityBits), first, end, above << 8 | below};
}

// The highest bit that is set, and it is no longer.
FP4KIT_DEVICE u32 take_highest(u32& bits) {
  const u32 bit = 31u - __clz(bits);
  bits ^= 1u << bit;
  return bit;
}

// The losses of what is open of a warp's blocks, as many of them at a time as it has threads. What has no place is not proven.
FP4KIT_DEVICE void try_open(const Searched<false>& block, Screened& s, const Candidates& shared, u32 (&jobs)[kJobs]) {
  const u32 lane = threadIdx.x % 32u, count = static_cast<u32>(__popc(s.open));
  u32 end = count;
  __syncwarp();
#pragma unroll
  for (u32 distance = 1u; distance < 32u; distance *= 2u) {
    const u32 before = __shfl_up_sync(0xFFFFFFFFu, end, distance);
    if (lane >= distance) end += before;
  }
  const u32 fitting = __ballot_sync(0xFFFFFFFFu, end <= kJobs), total = __shfl_sync(0xFFFFFFFFu, end, 31u - __clz(fitting));
  if (end > kJobs) s.open = 0u, s.second = -1.0f;
  u32* mine = jobs + end - count;
#pragma unroll 1
  for (u32 open = s.open, *job = mine; open;) *job++ = (s.first - 8u + take_highest(open)) * 32u + lane;
  __syncwarp();
#pragma unroll 1
  for (u32 at = lane; at < total + lane; at += 32u) {
    const u32 job = at < total ? jobs[at] : 32u;
    Searched<false> other;
#pragma unroll
    for (int j = 0; j < kSearched; ++j) other.a[j] = float_of(__shfl_sync(0xFFFFFFFFu, bits_of(block.a[j]), job % 32u));
    const float loss = loss_of<true>(other, shared.of[job / 32u], 1.0f);
    if (at < total) jobs[at] = bits_of(loss);
  }
  __syncwarp();
#pragma unroll 1
  for (u32 open = s.open, *job = mine; open;) {
    const float loss = float_of(*job++);
    const u32 code = s.first - 8u + take_highest(open);
    s.second = fminf(s.second, fmaxf(loss, s.best.loss));
    if (loss < s.best.loss) s.best = {loss, code};
  }
}

// Whether one code alone has the least loss of those that were tried, and none beyond s.end can win.
FP4KIT_DEVICE bool is_proven(const Searched<false>& block, const Screened& s, Span span, const Candidates& shared) {
  if (kSure * s.second < s.best.loss || s.second == s.best.loss) return false;
  const u32 twice = s.best.code + 8u;
  if (twice < s.end || twice > span.high || has_own_value(block, shared.of[s.best.code])) return true;
  return kSure * loss_of<false>(block, shared.of[twice], 1.0f) >= s.best.loss || !is_near_tie(block, shared.of[s.best.code]);
}
