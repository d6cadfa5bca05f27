// search_hessian: for each block of 16 elements, find the amax whose scale gives the smallest loss d^T H d. d is the
// error of the block, and H is the Hessian of its 16 columns. A thread block processes the blocks of one Hessian. `a`
// holds the kernel's arguments: the arrays, their sizes and the range of candidates. A candidate is a scale code whose
// loss is compared. The pruned search excludes most candidates without computing their losses.
#include "search_hessian.cuh"

// For each block in the 16 columns of one Hessian that this thread block processes, find the candidate with the
// smallest loss, and store its amax in a.block_amax. A block of zeros gets its lowest candidate without a search. The
// number of blocks that had a full search, because the bounds of the pruned search are not valid for them, is added to
// *a.unproven, unless a.unproven is null. The number of thread blocks must be a multiple of the number of Hessians. All
// threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void search_hessian(const SearchArguments& a) {
  __shared__ Candidates shared;
  __shared__ Hessian h;
  __shared__ u32 positive;  // 32 times mu, the largest mu for which is_positive returns true
  const i64 blocks = a.columns / kSearchBlockSize, column = blockIdx.x % blocks,
            blocks_per_hessian = gridDim.x / blocks;
  const float amax_of_tensor = amax_at(a.tensor_amax, 0);
  if (threadIdx.x == 0) positive = 0u;
  make_candidates<R>(shared, amax_of_tensor);
  for (u32 code = 1u + threadIdx.x; code <= kLastCandidate; code += kThreads)
    shared.by_code[code] = stored_candidate_of<R>(code, amax_of_tensor);
  h.values[threadIdx.x / kSearchBlockSize][threadIdx.x % kSearchBlockSize] =
      a.column_weights[column * kThreads + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32u && is_positive(h, static_cast<float>(threadIdx.x) * 0x1p-5f)) atomicMax(&positive, threadIdx.x);
  __syncthreads();
  const bool is_usual = shared.ordinary && amax_of_tensor > 0x1p-20f &&
                        keeps_squares(h, shared);  // below 2^-20, stored scales differ from those of their codes
  const float margin = is_usual ? static_cast<float>(positive) * 0x1p-5f - 0x1p-12f : 0.0f;
  const TensorScale t = R::TensorRule::template scale<R, Float32>(amax_of_tensor);
  u64 unproven = 0;
  for (i64 row = blockIdx.x / blocks * kThreads + threadIdx.x; row < a.rows; row += blocks_per_hessian * kThreads) {
    float x[kSearchBlockSize];
    load_run<In, kSearchBlockSize, kAligned>(
        static_cast<const typename In::Bits*>(a.x) + row * a.columns + column * kSearchBlockSize, x);
    u32 largest = 0u;
#pragma unroll
    for (int j = 0; j < kSearchBlockSize; ++j) largest = maximum(largest, bits_of(magnitude_of(x[j])));
    const float amax = float_of(largest);
    const CandidateRange range = candidate_range<R>(a, amax, t);
    const float block_margin =
        is_finite(amax) ? margin : 0.0f;  // with infinities, a Hessian may give any candidate the smallest loss
    u32 code = range.low;
    if (amax != 0.0f)
      code = search_by_hessian(x, amax, range, shared, h, block_margin).code, unproven += !(block_margin > 0.0f);
    a.block_amax[row * blocks + column] = candidate_amax<R>(code, amax_of_tensor);
  }
  if (a.unproven && unproven) atomicAdd(a.unproven, unproven);
}

// For each block of a.x, find the amax whose scale gives the smallest loss by the Hessian of its columns
// (a.column_weights), and store it in a.block_amax. The kernel is launched for pruned scale searches with Hessians. A
// thread processes one block at a time. Launch with a multiple of columns / 16 thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2) search_hessian_kernel(SearchArguments a) {
  search_hessian<R, Input, kAligned>(a);
}
