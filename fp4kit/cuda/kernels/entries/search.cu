// search: for each block of 16 elements, find the amax whose scale gives the smallest loss (the sum of squared rounding
// errors, weighted per column if kWeighted). Only amaxes are stored, no codes. R is the recipe, In is the type of the
// elements of x, and kAligned is true if all rows of x begin at multiples of 16 bytes. `a` holds the kernel's
// arguments: the arrays, their sizes and the candidates. A candidate is a scale code (E4M3) whose loss is compared. The
// pruned search excludes most candidates without computing their losses.
#include "search_pruned.cuh"

// A block for which one thread could not prove the best scale. All threads of the warp then search it together.
template <bool kWeighted>
struct UnprovenBlock {
  SearchBlock<kWeighted> block;
  CandidateRange range;
};

// Shared memory of a warp: the codes that the pruned search leaves open, or a block that is searched fully. Only one
// member of the union is in use at a time.
template <bool kWeighted>
union WarpMemory {
  UnprovenBlock<kWeighted> unproven_block;
};
template <>
union WarpMemory<false> {
  OpenCodes open_codes;
  UnprovenBlock<false> unproven_block;
};

// Shared memory of a thread block: the candidates, the tables of the pruned search, and the memory of each warp.
template <bool kWeighted>
struct SearchMemory {
  Candidates candidates;
  PruningTables<kWeighted> tables;
  WarpMemory<kWeighted> warps[kThreads / 32];
};

// Return the scale code with the smallest loss among all codes of unproven_block.range, or the lowest of them if
// several have this loss. The block is one for which the pruned search proved no result. If no loss is below infinity,
// return the lowest code of the range. `shared` holds the candidates. The threads of a warp share the work; all of them
// must call this function, and all get the result.
template <bool kWeighted>
FP4KIT_DEVICE u32 search_fully(const UnprovenBlock<kWeighted>& unproven_block, const Candidates& shared) {
  BestCode best = {float_of(kInfinityBits), unproven_block.range.low};
  for (u32 code = unproven_block.range.low + threadIdx.x % 32u; code <= unproven_block.range.high; code += 32u) {
    const Candidate c = shared.by_code[code];
    const float loss = loss_of<true>(unproven_block.block, c, division_scaling(c.scale));
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

// Return block number i of a.x: the magnitudes of its elements, after the Hadamard transform if R::kHadamard, and the
// weights of its columns if kWeighted. `blocks` is the number of blocks per row.
template <class R, class In, bool kAligned, bool kWeighted>
FP4KIT_DEVICE SearchBlock<kWeighted> load_block(const SearchArguments& a, u32 i, u32 blocks) {
  SearchBlock<kWeighted> block;
  Run<In, kSearchBlockSize> run = read_run<In, kSearchBlockSize, kAligned>(static_cast<const typename In::Bits*>(a.x) +
                                                                           static_cast<i64>(i) * kSearchBlockSize);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
  widen_run(run, block.a);
#pragma unroll
  for (int j = 0; j < kSearchBlockSize; ++j)
    block.a[j] = float_of(opaque(bits_of(block.a[j]) & 0x7FFFFFFFu));  // opaque: clear the sign once, not for each use
  if constexpr (kWeighted)
    load_run<Float32, kSearchBlockSize, true>(a.column_weights + i % blocks * kSearchBlockSize, block.w);
  return block;
}

// For each block that `grid` assigns to this thread block, find the scale code with the smallest loss, and store its
// amax in a.block_amax. The candidates are the scale codes from a.lower to a.upper, relative to the block's own code
// (the code of its amax). Three cases are compiled:
//
//   kAll           all codes 1 ... kLastCandidate are candidates, whatever a.lower and a.upper are
//   kEight         a.lower <= -8 and a.upper >= 8
//   neither        any other a.lower and a.upper
//
// A block whose amax is 0, infinite or NaN gets its lowest candidate. The number of blocks that had a full search,
// because the pruned search proved no result, is added to *a.unproven, unless a.unproven is null. All threads of the
// thread block must call this function, after make_pruning_tables.
template <class R, class In, bool kAligned, bool kWeighted, bool kAll, bool kEight>
FP4KIT_DEVICE void search(const SearchArguments& a, Grid grid, SearchMemory<kWeighted>& memory) {
  Candidates& shared = memory.candidates;
  const float amax_of_tensor = amax_at(a.tensor_amax, 0);
  make_candidates<R>(shared, amax_of_tensor);
  const TensorScale t = R::TensorRule::template scale<R, Float32>(amax_of_tensor);
  const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  UnprovenBlock<kWeighted>& unproven_block = memory.warps[warp].unproven_block;
  const u32 blocks = static_cast<u32>(a.columns / kSearchBlockSize), count = static_cast<u32>(a.rows) * blocks;
  // The own code of a block is the code of its amax. It is one of first ... first + 3, because `first` is at least 6/7
  // of the value to which the own code is nearest, or the own code is the last code. If there are at least eight
  // candidates in each direction, at most two of the codes that `screen` leaves open are not candidates. So the own
  // code is computed only if `screen` does not decide.
  constexpr bool kLater = !kAll && kEight && !kWeighted;
  u32 unproven = 0u;
  const u32 stride = static_cast<u32>(item_stride(grid));
  for (u32 first = static_cast<u32>(first_item(grid)) - lane; first < count; first += stride) {
    const u32 i = minimum(first + lane, count - 1u);  // threads beyond the last block repeat it
    SearchBlock<kWeighted> block = load_block<R, In, kAligned, kWeighted>(a, i, blocks);
    if constexpr (!kWeighted)  // prefetch the thread's next block
      prefetch_sector(static_cast<const typename In::Bits*>(a.x) +
                      static_cast<i64>(minimum(i + stride, count - 1u)) * kSearchBlockSize);
    u32 largest = 0u;
#pragma unroll
    for (int j = 0; j < kSearchBlockSize; ++j) largest = maximum(largest, bits_of(block.a[j]));
    const float amax = float_of(opaque(largest));
    CandidateRange range = {1u, kLastCandidate};
    if constexpr (!kAll && !kLater) range = candidate_range<R>(a, amax, t);
    u32 best = range.low;
    bool proven = false;
    u32 normal = 0u;
    if constexpr (!kWeighted) {
      normal = normal_first(amax, range, shared);
      Screened screened;
      if (normal) screened = screen(block, amax, range, normal, kLater ? 2 : 0, shared, memory.tables.bounds);
      try_open_codes(block, screened, shared, memory.warps[warp].open_codes);
      if (normal) best = screened.best(), proven = is_proven(block, screened, range, shared);
    }
    if constexpr (kLater) {
      if (!proven) range = candidate_range<R>(a, amax, t);
      if (!normal) best = range.low;
    }
    if (!normal) {
      proven = amax == 0.0f || !is_finite(amax);  // all losses are 0 then, or none is below infinity
      if (!proven && shared.ordinary) proven = search_alone(block, amax, range, shared, best);
    }
    for (u32 open = __ballot_sync(0xFFFFFFFFu, !proven); open; open &= open - 1u) {
      const u32 owner = 31u - __clz(open & (0u - open));
      if (lane == owner) unproven_block = {block, range};
      __syncwarp();
      const u32 code = search_fully(unproven_block, shared);
      if (lane == owner) best = code, unproven += first + lane < count;
      __syncwarp();
    }
    a.block_amax[i] = shared.amaxes[best];
  }
  if (a.unproven && unproven) atomicAdd(a.unproven, static_cast<u64>(unproven));
}

// For each block of a.x, find the amax whose scale gives the smallest loss, and store it in a.block_amax. The kernel is
// launched for pruned scale searches by squared errors, with or without weights per column. A thread processes one
// block at a time. Launch with any number of thread blocks. In the launch bounds, 2 is SEARCH_BLOCKS of cuda/launch.py.
extern "C" __global__ void __launch_bounds__(kThreads, kWeighted ? 1 : 2) search_kernel(SearchArguments a) {
  __shared__ SearchMemory<kWeighted> memory;
  make_pruning_tables<R>(memory.tables);
  search<R, Input, kAligned, kWeighted, kAll, kEight>(a, whole_grid(), memory);
}
