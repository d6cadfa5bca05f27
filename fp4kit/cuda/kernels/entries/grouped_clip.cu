// The kernel of clip.cu for a group of tensors: the backward pass of fake_quantize with a clip mask. kAligned is true
// if all arrays of all tensors begin at multiples of 16 bytes, and kSmall if the group is small (grouped.cuh).
#include "grouped.cuh"
#include "clip.cu"

using Members = GroupOf<ClipArguments, kSmall>::Type;

// Store the clipped gradient of each tensor of the group in the tensor's array `out`. It is the gradient where |x| <=
// amax, compared in float32, and +0 elsewhere (also if x or the amax is NaN). The kernel is launched for
// fp4kit.fake_quantize_grouped_backward. A thread block takes one piece (part of a tensor) at a time. Launch with any
// number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_clip_kernel(Members group) {
  for_each_piece(group, [](const ClipArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      clip_gradient<Input, Gradient, true>(a, grid);
    } else {
      clip_gradient<Input, Gradient, false>(a, grid);
    }
  });
}
