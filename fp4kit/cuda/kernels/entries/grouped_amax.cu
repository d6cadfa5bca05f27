// amax.cu for a group of tensors: of each of them, or of each row of each. kAligned: whether all of them are. kSmall:
// which group it is.
#include "grouped.cuh"
#include "amax.cu"

// Backwards: a launch that follows begins with what was read last, and finds it in the L2 cache. 8 tensors of 1856 x
// 2688, amax and quantize: 54 us, 49 us (H200, 2026-11-21).
using Members = GroupOf<AmaxArguments, kSmall>::Type;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax<Input, kCounted, true>(a, grid);
    } else {
      amax<Input, kCounted, false>(a, grid);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_rows_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax_rows<Input, kCounted, true>(a, grid);
    } else {
      amax_rows<Input, kCounted, false>(a, grid);
    }
  });
}
