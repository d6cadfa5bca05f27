// search_factors: for each block, find the multiple of its amax whose codes have the smallest squared error, and store
// it. kFactors holds the multiples to try, in order. The operations and results equal those in
// reference/search.py. R is the recipe, In is the type of the elements of x, and kAligned is true if all rows
// of x begin at multiples of 16 bytes. `a` holds the kernel's arguments, and t is a tensor scale. A Factor is what the
// elements of a block are multiplied or divided by before they are rounded.
//
// A multiple is skipped if the previous multiple or the first multiple has the same scale. Its error is then the same
// too, so it would not win. (Rules that read the amax skip no multiple.) The multiples after the first one rise. So all
// multiples with one scale are consecutive, except those with the scale of the first multiple. 102 multiples from 0.5
// to 1.51 have about 14 different E4M3 scales.
#include "exact_path.cuh"
#include "hadamard.cuh"
#include "implied_amax.cuh"
#include "runs.cuh"
#include "summation_order.cuh"

// The arguments of search_factors_kernel.
struct SearchFactorsArguments {
  const void* x;
  const float* tensor_amax;
  float* block_amax;
  i64 rows, columns;
};

constexpr int kRun = 16, kVector = 8;  // elements that are loaded together; errors that are added together

// Return the sum of the squared rounding errors of a block, if it is quantized with the scale code scale_code, the
// Factor f and the tensor scale t. load(0, j, values) stores elements j ... j + kRun - 1 of the block in `values`.
template <class R, class In, class Load>
FP4KIT_DEVICE float error_under(u32 scale_code, Factor f, TensorScale t, const Load& load) {
  static_assert(R::kBlock % kRun == 0);
  constexpr int kUnroll = R::kBlock <= 32 ? R::kBlock / kRun : 1;
  const auto scale = stored_scale<R>(scale_code, t);
  LaneSums<R::kBlock> sums;
#pragma unroll kUnroll
  for (int j = 0; j < R::kBlock; j += kRun) {
    float x[kRun], squares[kRun / kVector][kVector];
    load(0, j, x);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float difference = exact_value<R>(exact_code<R, In>(x[i], f, 0u), scale) - x[i];
      squares[i / kVector][i % kVector] = difference * difference;
    }
#pragma unroll
    for (int v = 0; v < kRun / kVector; ++v) sums.add(j / kVector + v, squares[v]);
  }
  return sums.result();
}

// Return the block's amax times the multiple of kFactors that gives the smallest sum of squared errors. If several
// multiples have this error, the first of them is chosen. If the error of the very first multiple is NaN, that multiple
// is chosen. Later multiples with a NaN error are never chosen. `load` loads elements of the block, as error_under
// describes.
template <class R, class In, class Load>
FP4KIT_DEVICE float best_multiple(float amax, TensorScale t, const Load& load) {
  u32 first = 0u, last = 0u;
  float chosen = 0.0f, least_error = 0.0f;
#pragma unroll 1
  for (const float& multiple : kFactors) {
    const float candidate = amax * multiple;
    const bool is_first = &multiple == kFactors;
    const u32 code = R::BlockRule::template code<R, In>(candidate, t);
    if (!is_first && !R::BlockRule::kReadsAmax && (code == first || code == last)) continue;
    const float error = error_under<R, In>(code, factor_of<R, In>(code, candidate, t), t, load);
    if (is_first) first = code;
    if (is_first || error < least_error) chosen = candidate, least_error = error;
    last = code;
  }
  return chosen;
}

// For each block of a.x, find the multiple of its amax whose codes have the smallest squared error, and store the amax
// times this multiple in a.block_amax. If R::kHadamard, blocks are transformed first. A thread processes one block at a
// time.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void search_factors(const SearchFactorsArguments& a) {
  const i64 blocks = a.columns / R::kBlock, count = a.rows * blocks;
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid())) {
    const auto* x = static_cast<const typename In::Bits*>(a.x) + i * R::kBlock;
    const auto load = [&](int, int j, float (&values)[kRun]) {
      Run<In, kRun> run = read_run<In, kRun, kAligned>(x + j);
      if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
      widen_run(run, values);
    };
    const i64 row = quotient(i, blocks, count);
    const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, row, i - row * blocks, blocks);
    a.block_amax[i] = best_multiple<R, In>(exact_amax<R, kRun>(1, load), t, load);
  }
}

// For each block of a.x, find the multiple of its amax whose codes have the smallest squared error, and store the amax
// times this multiple in a.block_amax. The kernel is launched before a matrix is quantized, for recipes whose
// Recipe.search is in FACTORS (reference/search.py). A thread processes one block at a time. Launch with any
// number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) search_factors_kernel(SearchFactorsArguments a) {
  search_factors<R, Input, kAligned>(a);
}
