// The kernel of quantize_tile.cu for a group of tensors. R is the recipe. If R::kFake, the kernel stores the values to
// which codes decode instead of codes and scales. kAligned is true if, in all tensors, all rows of x (and of `values`,
// if they are stored) begin at multiples of 16 bytes. kSmall is true if the group is small (grouped.cuh).
#include "grouped_quantize.cuh"
#include "quantize_tile.cuh"

using Members = GroupOf<QuantizeArguments, kSmall>::Type;

// Quantize each tensor of the group: store its codes, block scales and tensor scales, or only its values if R::kFake.
// Blocks have several rows, or R uses 4over6 (each block gets the better of two scales). The amaxes for tensor scales
// are inputs. For a tensor without elements, only its tensor scales are stored. The kernel is launched for
// fp4kit.quantize_grouped and, for recipes without a fake_rule, for fp4kit.fake_quantize_grouped. A thread block takes
// one piece (part of a tensor) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_quantize_tile_kernel(Members group) {
  for_each_piece(group, [](const QuantizeArguments& a, Grid grid, bool aligned) {
    if (is_empty<R, Input>(a, grid)) return;
    if (kAligned || aligned) {
      quantize_tile<R, Input, true>(a, grid);
    } else {
      quantize_tile<R, Input, false>(a, grid);
    }
  });
}
