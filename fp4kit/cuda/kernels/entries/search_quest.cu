// search_quest: for each block, compute the amax by FP-Quant's method "quest" (from the standard deviation), and store
// it. The operations and results equal those of search_quest in reference/search.py. R is the recipe, In is the
// type of the elements of x, and kAligned is true if all rows of x begin at multiples of 16 bytes. `a` holds the
// kernel's arguments.
#include "exact_path.cuh"
#include "hadamard.cuh"
#include "quest.cuh"
#include "runs.cuh"

// The arguments of search_quest_kernel.
struct SearchQuestArguments {
  const void* x;
  const float* tensor_amax;
  float* block_amax;
  i64 rows, columns;
};

constexpr int kRun = 16, kLanes = 32;  // elements that are loaded together; lanes that add the elements of a block

// Return the amax that QuEST chooses for the block of R::kBlock elements at x, computed from the standard deviation of
// its elements. If R::kHadamard, the elements are transformed first. Return NaN if the standard deviation is not
// finite.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float quest_amax_at(const typename In::Bits* x) {
  static_assert(R::kBlock % kLanes == 0);
  HalvedSum<kLanes> sum, squares;
#pragma unroll 1
  for (int first = 0; first < R::kBlock; first += kLanes) {
#pragma unroll
    for (int j = 0; j < kLanes; j += kRun) {
      Run<In, kRun> run = read_run<In, kRun, kAligned>(x + first + j);
      if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
      float values[kRun];
      widen_run(run, values);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        sum.add(j + i, values[i]);
        squares.add(j + i, values[i] * values[i]);
      }
    }
  }
  return quest_amax<R>(sum.result(), squares.result(), static_cast<float>(R::kBlock));
}

// Store in a.block_amax the amax that QuEST chooses for each block of a.x, which is transformed first if R::kHadamard.
// It is computed from the standard deviation
// of the block, and is NaN if that is not finite. The kernel is launched before a matrix is quantized, for recipes
// whose Recipe.search is "quest". One thread computes one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) search_quest_kernel(SearchQuestArguments a) {
  const i64 count = a.rows * (a.columns / R::kBlock);
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid()))
    a.block_amax[i] = quest_amax_at<R, Input, kAligned>(static_cast<const typename Input::Bits*>(a.x) + i * R::kBlock);
}
