// The kernel of fake_ms_eden.cu for a group of tensors. kAligned is true if, in all tensors, all rows of x and `values`
// begin at multiples of 16 bytes. kSmall is true if the group is small (grouped.cuh).
#include "grouped.cuh"
#include "fake_ms_eden.cu"

using Members = GroupOf<QuantizeArguments, kSmall>::Type;

// Fake-quantize each tensor of the group by MS-EDEN, and store the results in the tensor's array `values`. The amaxes
// for tensor scales are inputs. The kernel is launched for fp4kit.fake_quantize_grouped with the fake rules of MS-EDEN.
// A thread block takes one piece (part of a tensor) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_fake_ms_eden_kernel(Members group) {
  for_each_piece(group, [](const QuantizeArguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      fake_ms_eden<R, Input, true>(a, grid);
    } else {
      fake_ms_eden<R, Input, false>(a, grid);
    }
  });
}
