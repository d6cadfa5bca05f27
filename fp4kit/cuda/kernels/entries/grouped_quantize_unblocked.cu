// quantize_unblocked.cu for a group of tensors. kAligned: whether all of them are. kSmall: which group it is.
#include "grouped_quantize.cuh"
#include "quantize_unblocked.cu"

using Members = GroupOf<QuantizeArguments, kSmall>::Type;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_quantize_unblocked_kernel(Members group) {
  for_each_piece(group, [](const QuantizeArguments& given, Grid grid, bool aligned) {
    __shared__ QuantizeArguments
        a;  // in shared memory, so that no register holds where they are: 48 registers and not 64
    if (threadIdx.x == 0) a = given;
    __syncthreads();
    if (is_empty<R, Input>(a, grid)) return;
    if (kAligned || aligned) {
      quantize_unblocked<R, Input, true>(a, grid);
    } else {
      quantize_unblocked<R, Input, false>(a, grid);
    }
  });
}
