// search: the amax of each block of 16 that gives the scale of least loss; nothing else of the matrix is written.
#include "search_sieve.cuh"

// What a warp's thread leaves for the others: a block that all of them search.
template <bool kWeighted>
struct Left {
  Searched<kWeighted> block;
  Span span;
};

// What the threads of a warp share, for one thing after the other.
template <bool kWeighted>
union OfWarp {
  Left<kWeighted> left;
};
template <>
union OfWarp<false> {
  Shares shares;
  Left<false> left;
};

// What the threads of a thread block share.
template <bool kWeighted>
struct Common {
  Candidates candidates;
  Sieve<kWeighted> sieve;
  OfWarp<kWeighted> of_warp[kSearchThreads<kWeighted> / 32];
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
FP4KIT_DEVICE Searched<kWeighted> load_block(const SearchArguments& a, u32 i, u32 blocks) {
  Searched<kWeighted> block;
  Run<In, kSearched> run =
      read_run<In, kSearched, kAligned>(static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(i) * kSearched);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
  widen_run(run, block.a);
#pragma unroll
  for (int j = 0; j < kSearched; ++j)
    block.a[j] = float_of(opaque(bits_of(block.a[j]) & 0x7FFFFFFFu));  // once, not for each use
  if constexpr (kWeighted) load_run<Float32, kSearched, true>(a.of_columns + i % blocks * kSearched, block.w);
  return block;
}

template <class R, class In, bool kAligned, bool kWeighted, bool kAll, bool kEight>
FP4KIT_DEVICE void search(const SearchArguments& a, Grid grid, Common<kWeighted>& common) {
  Candidates& shared = common.candidates;
  const float amax_of_tensor = amax_at(a.tensor_amax, 0);
  make_candidates<R>(shared, amax_of_tensor);
  const TensorScale t = R::TensorRule::template scale<R, Float32>(amax_of_tensor);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  Left<kWeighted>& left = common.of_warp[warp].left;
  const u32 blocks = static_cast<u32>(a.columns / kSearched), count = static_cast<u32>(a.rows) * blocks;
  // A block's own code is one of first ... first + 3: the nearest to a value of which first is no less than 6/7, or the
  // last. So with eight codes each way or more around it, no more than two that a screen leaves open are no candidates:
  // only where it does is the own code asked for.
  constexpr bool kLater = !kAll && kEight && !kWeighted;
  u32 unproven = 0u;
  const u32 stride = static_cast<u32>(item_stride(grid));
  for (u32 first = static_cast<u32>(first_item(grid)) - lane; first < count; first += stride) {
    const u32 i = minimum(first + lane, count - 1u);  // of the last block, too, what is beyond
    Searched<kWeighted> block = load_block<R, In, kAligned, kWeighted>(a, i, blocks);
    if constexpr (!kWeighted)  // the block that the thread has next
      prefetch_sector(static_cast<const typename In::Bits*>(a.x) +
                      static_cast<i64>(minimum(i + stride, count - 1u)) * kSearched);
    u32 largest = 0u;
#pragma unroll
    for (int j = 0; j < kSearched; ++j) largest = maximum(largest, bits_of(block.a[j]));
    const float amax = float_of(opaque(largest));
    Span span = {1u, kLastCandidate};
    if constexpr (!kAll && !kLater) span = span_of<R>(a, amax, t);
    Best best = {float_of(kInfinityBits), span.low};
    bool proven = false;
    u32 normal = 0u;
    if constexpr (!kWeighted) {
      normal = normal_first(amax, span, shared);
      Screened screened;
      if (normal) screened = screen(block, amax, span, normal, kLater ? 2 : 0, shared, common.sieve.bounds);
      try_open(block, screened, shared, common.of_warp[warp].shares);
      if (normal) best.code = screened.best(), proven = is_proven(block, screened, span, shared);
    }
    if constexpr (kLater) {
      if (!proven) span = span_of<R>(a, amax, t);
      if (!normal) best.code = span.low;
    }
    if (!normal) {
      proven = amax == 0.0f || !is_finite(amax);  // without errors, or with none but those
      if (!proven && shared.ordinary) proven = search_near(block, amax, span, shared, best);
    }
    for (u32 open = __ballot_sync(0xFFFFFFFFu, !proven); open; open &= open - 1u) {
      const u32 owner = 31u - __clz(open & (0u - open));
      if (lane == owner) left = {block, span};
      __syncwarp();
      const u32 code = search_fully(left, shared);
      if (lane == owner) best.code = code, unproven += first + lane < count;
      __syncwarp();
    }
    a.block_amax[i] = shared.amaxes[best.code];
  }
  if (a.unproven && unproven) atomicAdd(a.unproven, static_cast<u64>(unproven));
}

extern "C" __global__ void __launch_bounds__(kSearchThreads<kWeighted>, kWeighted ? 1 : 2)
    search_kernel(SearchArguments a) {
  __shared__ Common<kWeighted> common;
  make_sieve<R>(common.sieve);
  search<R, Input, kAligned, kWeighted, kAll, kEight>(a, whole_grid(), common);
}
