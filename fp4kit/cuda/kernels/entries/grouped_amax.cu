// amax.cu for a group of tensors: the amax of each tensor, or the amax of each row of each tensor. kAligned: all
// tensors are aligned. kSmall: the group is small (grouped.cuh).
#include "grouped.cuh"
#include "amax.cu"

// Pieces are taken from the last to the first. The next launch then begins with the data that was read last, and finds
// it in the L2 cache. amax and quantize of 8 tensors of 1856 x 2688: 49 us instead of 54 us (H200, 2026-11-21).
using Members = GroupOf<AmaxArguments, kSmall>::Type;

// Compute the amax of each tensor of the group and store it in its member's `amax`. A thread block takes one piece at
// a time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax<Input, kCounted, true>(a, grid);
    } else {
      amax<Input, kCounted, false>(a, grid);
    }
  });
}

// Compute the amax of each row of each tensor of the group and store it in its member's `amax`. A thread block takes
// one piece at a time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_rows_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax_rows<Input, kCounted, true>(a, grid);
    } else {
      amax_rows<Input, kCounted, false>(a, grid);
    }
  });
}
