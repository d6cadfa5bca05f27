// quantize_plain.cu for a group of tensors. kAligned: whether all of them are. kSmall: which group it is.
#include "grouped_quantize.cuh"
#include "quantize_plain.cu"

using Members = GroupOf<Arguments, kSmall>::Type;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_quantize_plain_kernel(Members group) {
  for_each_piece(group, [](const Arguments& given, Grid grid, bool aligned) {
    __shared__ Arguments a;  // in shared memory, so that no register holds where they are: 48 registers and not 64
    if (threadIdx.x == 0) a = given;
    __syncthreads();
    if (is_empty<R, Input>(a, grid)) return;
    if (kAligned || aligned) {
      quantize_plain<R, Input, true>(a, grid);
    } else {
      quantize_plain<R, Input, false>(a, grid);
    }
  });
}
