// amax.cu for a group of tensors: the amax of each tensor, or of each row of each. kAligned: whether all tensors are
// aligned. kSmall: whether the group is small (grouped.cuh).
#include "grouped.cuh"
#include "amax.cu"

// The last pieces come first: a launch that follows begins with what was read last, and finds it in the L2 cache. amax
// and quantize of 8 tensors of 1856 x 2688: 49 us instead of 54 us (H200, 2026-11-21).
using Members = GroupOf<AmaxArguments, kSmall>::Type;

// Launch with any grid: the amax of each tensor.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax<Input, kCounted, true>(a, grid);
    } else {
      amax<Input, kCounted, false>(a, grid);
    }
  });
}

// Launch with any grid: the amax of each row of each tensor.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_rows_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax_rows<Input, kCounted, true>(a, grid);
    } else {
      amax_rows<Input, kCounted, false>(a, grid);
    }
  });
}
