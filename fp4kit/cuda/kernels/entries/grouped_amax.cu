// The kernels of amax.cu for a group of tensors: they find the amax (the largest magnitude) of each tensor, or of each
// row of each tensor, as float32 bits. kAligned is true if all tensors begin at multiples of 16 bytes (for amaxes of
// rows: if all their rows do), and kSmall if the group is small (grouped.cuh). The constant kCounted says which
// elements count: all of them, with NaN above infinity, all except NaN, or only finite ones.
#include "grouped.cuh"
#include "amax.cu"

// Pieces are taken from the last one to the first one. So the next launch, which takes pieces in order, begins with the
// data that was read last, and finds it in the L2 cache. The amax and quantization of 8 tensors of 1856 x 2688 take 49
// us instead of 54 us (H200, 2026-11-21).
using Members = GroupOf<AmaxArguments, kSmall>::Type;

// Find the amax of each tensor of the group, and raise the tensor's *amax to it: store the larger of the two, as
// float32 bits. The caller sets *amax to 0 before. If no element of a tensor counts, its *amax does not change. The
// kernel is launched for fp4kit.amax_grouped, and before the tensors of a group are quantized or their gradients are
// clipped. A thread block takes one piece (part of a tensor) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax<Input, kCounted, true>(a, grid);
    } else {
      amax<Input, kCounted, false>(a, grid);
    }
  });
}

// Store the amax of each row of each tensor of the group in the tensor's array `amax`, as float32 bits. Old contents
// are overwritten. If no element of a row counts, its amax is 0. The kernel is launched for recipes with one tensor
// scale per row, and for block amaxes. A thread block takes one piece (part of a tensor) at a time. Launch with any
// number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_amax_rows_kernel(Members group) {
  for_each_piece<true>(group, [](const AmaxArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      amax_rows<Input, kCounted, true>(a, grid);
    } else {
      amax_rows<Input, kCounted, false>(a, grid);
    }
  });
}
