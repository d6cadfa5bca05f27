// search: the amax of each block of 16 that gives the scale of least loss; nothing else of the matrix is written.
#include "search.cuh"

// What a warp's thread leaves for the others: a block that all of them search.
template <bool kWeighted>
struct Left {
  Searched<kWeighted> block;
  Span span;
};

// The first code of least loss in a span, by all threads of a warp.
template <bool kWeighted>
FP4KIT_DEVICE u32 search_fully(const Left<kWeighted>& left, const Candidates& shared) {
  Best best = {float_of(kInfinityBits), left.span.low};
  for (u32 code = left.span.low + threadIdx.x % 32u; code <= left.span.high; code += 32u) {
    const Candidate c = shared.of[code];
    const float loss = loss_of<true>(left.block, c, moved_by(c.scale));
    if (loss < best.loss) best = {loss, code};
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float loss = float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(best.loss), distance));
    const u32 code = __shfl_xor_sync(0xFFFFFFFFu, best.code, distance);
    if (loss < best.loss || (loss == best.loss && code < best.code)) best = {loss, code};
  }
  return best.code;
}

template <class R, class In, bool kAligned, bool kWeighted>
FP4KIT_DEVICE Searched<kWeighted> load_block(const SearchArguments& a, i64 i, i64 blocks) {
  Searched<kWeighted> block;
  Run<In, kSearched> run = read_run<In, kSearched, kAligned>(static_cast<const typename In::Bits*>(a.x) + i * kSearched);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
  widen_run(run, block.a);
#pragma unroll
  for (int j = 0; j < kSearched; ++j) block.a[j] = magnitude_of(block.a[j]);
  if constexpr (kWeighted) load_run<Float32, kSearched, true>(a.of_columns + i % blocks * kSearched, block.w);
  return block;
}

template <class R, class In, bool kAligned, bool kWeighted>
FP4KIT_DEVICE void search(const SearchArguments& a, Grid grid) {
  __shared__ Candidates shared;
  __shared__ Left<kWeighted> all_left[kThreads / 32];
  const float amax_of_tensor = *a.tensor_amax;
  make_candidates<R>(shared, amax_of_tensor);
  const TensorScale t = R::TensorRule::template scale<R, Float32>(amax_of_tensor);
  Left<kWeighted>& left = all_left[threadIdx.x / 32u];
  const i64 blocks = a.columns / kSearched, count = a.rows * blocks;
  u64 unproven = 0;
  for (i64 first = first_item(grid) - threadIdx.x % 32u; first < count; first += item_stride(grid)) {
    const i64 i = first + threadIdx.x % 32u;
    const bool is_block = i < count;
    Searched<kWeighted> block = load_block<R, In, kAligned, kWeighted>(a, is_block ? i : count - 1, blocks);
    u32 largest = 0u;
#pragma unroll
    for (int j = 0; j < kSearched; ++j) largest = maximum(largest, bits_of(block.a[j]));
    const float amax = float_of(largest);
    const Span span = span_of<R>(a, amax, t);
    Best best = {float_of(kInfinityBits), span.low};
    bool proven = !is_block || amax == 0.0f || !is_finite(amax);  // without errors, or with none but those
    if (!proven && shared.ordinary) proven = search_near(block, amax, span, shared, best);
    for (u32 open = __ballot_sync(0xFFFFFFFFu, !proven); open; open &= open - 1u) {
      const u32 lane = 31u - __clz(open & (0u - open));
      if (threadIdx.x % 32u == lane) left = {block, span};
      __syncwarp();
      const u32 code = search_fully(left, shared);
      if (threadIdx.x % 32u == lane) best.code = code, ++unproven;
      __syncwarp();
    }
    if (is_block) a.block_amax[i] = candidate_amax<R>(best.code, amax_of_tensor);
  }
  if (a.unproven && unproven) atomicAdd(a.unproven, unproven);
}

extern "C" __global__ void __launch_bounds__(kThreads) search_kernel(SearchArguments a) {
  search<R, Input, kAligned, kWeighted>(a, whole_grid());
}
