// search_sweep: the amax of each block whose scale has the least loss, of all candidates; that of a block in each of
// its rows.
#include "search_sweep.cuh"

template <class R, class In, class Set, Objective kObjective, bool kAligned, bool kWeighted>
FP4KIT_DEVICE void search_sweep(const SweepArguments& a) {
  constexpr u32 kLanes = Set::kLanes;
  __shared__ typename Set::Shared shared;
  Set set = Set::make(a, shared);
  const i64 across = a.columns / R::kBlock, count = (a.rows + R::kBlockRows - 1) / R::kBlockRows * across;
  const i64 step = item_stride(whole_grid()) / kLanes;
  u64 done = 0;
  for (i64 of_warp = (first_item(whole_grid()) - threadIdx.x % 32u) / kLanes; of_warp < count; of_warp += step) {
    const i64 mine = of_warp + threadIdx.x % 32u / kLanes, i = minimum(mine, count - 1),
              row = i / across * R::kBlockRows;
    const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - row));
    const auto* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns + i % across * R::kBlock;
    const Found best = sweep<R, In, kObjective, kAligned, kWeighted>(a, set, i % across, x, rows);
    if (mine >= count) continue;
    const float amax = set.amax_of(best);
    for (int j = static_cast<int>(threadIdx.x % kLanes); j < rows; j += kLanes)
      a.block_amax[(row + j) * across + i % across] = amax;
    done += threadIdx.x % kLanes == 0u;
  }
  if (a.unproven && done) atomicAdd(a.unproven, done);
}

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

extern "C" __global__ void __launch_bounds__(kThreads) search_sweep_kernel(SweepArguments a) {
  search_sweep<R, Input, Set, kObjective, kAligned, kWeighted>(a);
}
