// search_msmodelslim: for each block, choose one of two powers of two by msmodelslim's methods 4over6 (E2M1 elements)
// and mse (E4M3), and store it as the amax of the block. ceil_x_errors and ceil_x: choose the constant of its method
// ceil_x for the whole array, and store amaxes that give the scales. R is the recipe, In is the type of the elements of
// x, and kAligned is true if all rows of x begin at multiples of 16 bytes. `a` holds the kernel's arguments.
#include "exact_path.cuh"
#include "hadamard.cuh"
#include "msmodelslim_choice.cuh"
#include "runs.cuh"
#include "summation_order.cuh"

// The arguments of all three kernels.
struct SearchMsmodelslimArguments {
  const void* x;
  const float* tensor_amax;
  float* block_amax;
  u64* bins;  // for ceil_x: kCeilXConstants x kCeilXFields, zeros before the first kernel
  i64 rows, columns;
};

constexpr int kRun = 8;  // elements that are loaded together, whose errors are added together

// Load the elements j ... j + kRun - 1 of the block at x. If R::kHadamard, they are transformed.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void load_searched(const typename In::Bits* x, int j, float (&values)[kRun]) {
  static_assert(R::kBlock % kRun == 0);
  if constexpr (R::kHadamard) {
    Run<In, 16> run = read_run<In, 16, kAligned>(x + j / 16 * 16);
    hadamard_run<R::kSignMask>(run);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = element(run, j % 16 + i);
  } else {
    widen_run(read_run<In, kRun, kAligned>(x + j), values);
  }
}

// Return the amax of the block of R::kBlock elements at x.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float searched_amax(const typename In::Bits* x) {
  return exact_amax<R, kRun>(1,
                             [&](int, int j, float (&values)[kRun]) { load_searched<R, In, kAligned>(x, j, values); });
}

// Store in `errors` the sum of the squared errors of the block of R::kBlock elements at x under each candidate.
template <class R, class In, bool kAligned, int kCount>
FP4KIT_DEVICE void searched_errors(const typename In::Bits* x, const PowerCandidate (&candidates)[kCount],
                                   float (&errors)[kCount]) {
  LaneSums<R::kBlock> sums[kCount];
#pragma unroll
  for (int j = 0; j < R::kBlock; j += kRun) {
    float values[kRun], squares[kRun];
    load_searched<R, In, kAligned>(x, j, values);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        squares[i] = squared_error<typename R::Element, In>(magnitude_of(values[i]), candidates[k]);
      sums[k].add(j / kRun, squares);
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) errors[k] = sums[k].result();
}

// Return the power of two that is chosen for the block of R::kBlock elements at x, or amax_without_choice. If
// R::kHadamard, the elements are transformed first.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float chosen_power(const typename In::Bits* x) {
  using F = typename R::Element;
  const float amax = searched_amax<R, In, kAligned>(x);
  if (!(amax > 0.0f && is_finite(amax))) return amax_without_choice<F>(amax);
  PowerCandidate candidates[2];
  power_candidates<F, In>(amax, candidates);
  float errors[2];
  searched_errors<R, In, kAligned>(x, candidates, errors);
  const bool is_second = second_wins<F, In>(errors[0], errors[1], static_cast<float>(R::kBlock));
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

// Store the amax of each block of a.x in a.block_amax, and add the errors of all constants to a.bins
// (add_ceil_x_errors). One thread computes one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) ceil_x_errors_kernel(SearchMsmodelslimArguments a) {
  const i64 count = a.rows * (a.columns / R::kBlock);
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid())) {
    const auto* x = static_cast<const Input::Bits*>(a.x) + i * R::kBlock;
    const float amax = searched_amax<R, Input, kAligned>(x);
    a.block_amax[i] = amax;
    const auto error_under = [&](i32 exponent) {
      const PowerCandidate candidates[1] = {power_candidate<R::Element, Input>(exponent)};
      float errors[1];
      searched_errors<R, Input, kAligned>(x, candidates, errors);
      return errors[0];
    };
    const i32 exponent = ceil_x_exponent<Input>(amax, 0), last = ceil_x_exponent<Input>(amax, kCeilXConstants - 1);
    add_ceil_x_errors<Input>(amax, exponent, ceil_x_count<Input>(amax, exponent), last, error_under,
                             [&](i32 bin, u64 n) { atomicAdd(a.bins + bin, n); });
  }
}

// Replace each amax in a.block_amax by one that gives the scale of the block under the best constant. Every thread
// block finds the constant, the first one with the smallest mean error. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) ceil_x_kernel(SearchMsmodelslimArguments a) {
  __shared__ float means[kCeilXConstants];
  if (threadIdx.x < kCeilXConstants) {
    double sum = 0.0, power = 0x1p-149;
    u64 bin = 0u;
    for (i32 field = 0; field < kCeilXFields; ++field) {
      bin = 0u;
      for (u32 i = 0; i <= threadIdx.x; ++i) bin += a.bins[i * kCeilXFields + field];
      if (field < kCeilXFields - 1) sum = sum + static_cast<double>(static_cast<i64>(bin)) * power;
      power = field ? 2.0 * power : power;
    }
    const float mean = round_to<Input>(static_cast<float>(sum) / static_cast<float>(a.rows * a.columns));
    means[threadIdx.x] = bin == 0u && is_finite(mean) ? mean : float_of(kInfinityBits);  // the last bin: infinity, NaN
  }
  __syncthreads();
  i32 best = 0;
  for (i32 i = 1; i < kCeilXConstants; ++i) best = means[i] < means[best] ? i : best;
  const i64 count = a.rows * (a.columns / R::kBlock);
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid())) {
    a.block_amax[i] = ceil_x_amax<Input>(a.block_amax[i], best);
  }
}
