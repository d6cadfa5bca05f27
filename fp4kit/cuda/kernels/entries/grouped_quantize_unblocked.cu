// The kernel of quantize_unblocked.cu for a group of tensors. R is the recipe. If R::kFake, the kernel stores the
// values to which codes decode instead of codes and scales. kAligned is true if, in all tensors, all rows of x (and of
// `values`, if they are stored) begin at multiples of 16 bytes. kSmall is true if the group is small (grouped.cuh).
#include "grouped_quantize.cuh"
#include "quantize_unblocked.cu"

using Members = GroupOf<QuantizeArguments, kSmall>::Type;

// Quantize each tensor of the group without block scales: store its codes and tensor scales, or only its values if
// R::kFake. The amaxes for tensor scales are inputs. For a tensor without elements, only its tensor scales are stored.
// The kernel is launched for fp4kit.quantize_grouped and, for recipes without a fake_rule, for
// fp4kit.fake_quantize_grouped. A thread block takes one piece (part of a tensor) at a time. Launch with any number of
// thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_quantize_unblocked_kernel(Members group) {
  for_each_piece(group, [](const QuantizeArguments& given, Grid grid, bool aligned) {
    __shared__ QuantizeArguments a;  // in shared memory, which takes 48 registers per thread instead of 64
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
