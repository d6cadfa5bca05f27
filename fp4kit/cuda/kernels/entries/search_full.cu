// search_full: for each block, try all candidate scales, and store the amax whose scale gives the smallest loss. For a
// block of several rows, the amax is stored once per row. `a` holds the kernel's arguments: the arrays, their sizes and
// the range of candidates. Set is the set of candidate scales: E4M3 codes or powers of two.
#include "search_full.cuh"

// For each block of a.x, find the candidate scale with the smallest loss, and store its amax in a.block_amax, once per
// row of the block. If several candidates have this loss, the first of them is taken. If no loss is below infinity, the
// lowest candidate is taken for E4M3 codes, and the block's own amax is stored for powers of two.
//
// Set::kLanes neighboring threads share a block. The number of blocks is added to *a.unproven, unless a.unproven is
// null, because every block has a full search. All threads of the thread block must call this function.
template <class R, class In, class Set, Objective kObjective, bool kAligned, bool kWeighted>
FP4KIT_DEVICE void search_full(const FullSearchArguments& a) {
  constexpr u32 kLanes = Set::kLanes;
  __shared__ typename Set::Shared shared;
  Set set = Set::make(a, shared);
  const i64 across = a.columns / R::kBlock, count = (a.rows + R::kBlockRows - 1) / R::kBlockRows * across;
  const i64 step = item_stride(whole_grid()) / kLanes;
  u64 done = 0;
  for (i64 warps = (first_item(whole_grid()) - threadIdx.x % 32u) / kLanes; warps < count; warps += step) {
    const i64 own_block = warps + threadIdx.x % 32u / kLanes, i = minimum(own_block, count - 1),
              row = i / across * R::kBlockRows;
    const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - row));
    const auto* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns + i % across * R::kBlock;
    const Found best = search_all_candidates<R, In, kObjective, kAligned, kWeighted>(a, set, i % across, x, rows);
    if (own_block >= count) continue;
    const float amax = set.amax_of(best);
    for (int j = static_cast<int>(threadIdx.x % kLanes); j < rows; j += kLanes)
      a.block_amax[(row + j) * across + i % across] = amax;
    done += threadIdx.x % kLanes == 0u;
  }
  if (a.unproven && done) atomicAdd(a.unproven, done);
}

// SetOf<...>::Type is the set of candidate scales for a recipe: E4M3 codes, or powers of two if kHasPowers.
template <class R, class In, bool kHessian, bool kFromFloor, bool kHasPowers>
struct SetOf {
  using Type = ScaleCodes<R, kHessian>;
};
template <class R, class In, bool kHessian, bool kFromFloor>
struct SetOf<R, In, kHessian, kFromFloor, true> {
  using Type = ScalePowers<R, In, kFromFloor>;
};

using Set = SetOf<R, Input, kHessian, kFromFloor, R::Scale::kMantissaBits == 0>::Type;
constexpr Objective kObjective = kHessian ? Objective::hessian : objective_of(kMagnitudes, kLargest, kPowers);

// For each block of a.x, find the amax whose scale gives the smallest loss, and store it in a.block_amax, once per row
// of the block. The kernel is launched for scale searches that cannot be pruned (cuda/search.py). Set::kLanes
// threads process one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) search_full_kernel(FullSearchArguments a) {
  search_full<R, Input, Set, kObjective, kAligned, kWeighted>(a);
}
