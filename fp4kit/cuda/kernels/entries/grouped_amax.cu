// The kernels of amax.cu for a group of tensors. They compute the amax of each tensor, or the amax of each row of each
// tensor. kAligned is true if all tensors are aligned, and kSmall if the group is small (grouped.cuh).
#include "grouped.cuh"
#include "amax.cu"

// Pieces are taken from the last one to the first one. So the next launch, which takes pieces in order, begins with the
// data that was read last, and finds it in the L2 cache. The amax and quantization of 8 tensors of 1856 x 2688 take 49
// us instead of 54 us (H200, 2026-11-21).
using Members = GroupOf<AmaxArguments, kSmall>::Type;

// Compute the amax of each tensor of the group, and raise *amax in the arguments of the tensor to it. Used by
// fp4kit.amax_grouped, and before the tensors of a group are quantized or their gradients are clipped. A thread block
// takes one piece (part of a tensor) at a time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax<Input, kCounted, true>(a, grid);
    } else {
      amax<Input, kCounted, false>(a, grid);
    }
  });
}

// Compute the amax of each row of each tensor of the group, and store it in the array `amax` of the tensor. Used for
// recipes with one tensor scale per row, and for block amaxes. A thread block takes one piece (part of a tensor) at a
// time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_rows_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax_rows<Input, kCounted, true>(a, grid);
    } else {
      amax_rows<Input, kCounted, false>(a, grid);
    }
  });
}
