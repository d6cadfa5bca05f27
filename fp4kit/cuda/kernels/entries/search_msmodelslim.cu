// search_msmodelslim: for each block, choose one of two powers of two by msmodelslim's methods 4over6 (E2M1 elements)
// and mse (E4M3), and store it as the amax of the block. R is the recipe, In is the type of the elements of x, and
// kAligned is true if all rows of x begin at multiples of 16 bytes. `a` holds the kernel's arguments.
#include "exact_path.cuh"
#include "hadamard.cuh"
#include "msmodelslim_choice.cuh"
#include "runs.cuh"
#include "summation_order.cuh"

// The arguments of search_msmodelslim_kernel.
struct SearchMsmodelslimArguments {
  const void* x;
  const float* tensor_amax;
  float* block_amax;
  i64 rows, columns;
};

constexpr int kRun = 8;  // elements that are loaded together, whose errors are added together

// Return the power of two that is chosen for the block of R::kBlock elements at x, or amax_without_choice. If
// R::kHadamard, the elements are transformed first.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float chosen_power(const typename In::Bits* x) {
  using F = typename R::Element;
  static_assert(R::kBlock % kRun == 0);
  const auto load = [&](int, int j, float (&values)[kRun]) {
    if constexpr (R::kHadamard) {
      Run<In, 16> run = read_run<In, 16, kAligned>(x + j / 16 * 16);
      hadamard_run<R::kSignMask>(run);
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = element(run, j % 16 + i);
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = In::widen(x[j + i]);
    }
  };
  const float amax = exact_amax<R, kRun>(1, load);
  if (!(amax > 0.0f && is_finite(amax))) return amax_without_choice<F>(amax);
  PowerCandidate candidates[2];
  power_candidates<F, In>(amax, candidates);
  LaneSums<R::kBlock> sums[2];
#pragma unroll
  for (int j = 0; j < R::kBlock; j += kRun) {
    float values[kRun], errors[2][kRun];
    load(0, j, values);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) errors[k][i] = squared_error<F, In>(magnitude_of(values[i]), candidates[k]);
      sums[k].add(j / kRun, errors[k]);
    }
  }
  const bool is_second = second_wins<F, In>(sums[0].result(), sums[1].result(), static_cast<float>(R::kBlock));
  return is_second ? candidates[1].amax : candidates[0].amax;
}

// Store in a.block_amax the power of two that is chosen for each block of a.x. The kernel is launched before a matrix
// is quantized, for recipes whose Recipe.search is in CHOICES (reference/ascend.py). One thread computes one block at a
// time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) search_msmodelslim_kernel(SearchMsmodelslimArguments a) {
  const i64 count = a.rows * (a.columns / R::kBlock);
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid()))
    a.block_amax[i] = chosen_power<R, Input, kAligned>(static_cast<const typename Input::Bits*>(a.x) + i * R::kBlock);
}
