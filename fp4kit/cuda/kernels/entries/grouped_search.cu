// The kernel of search.cu for a group of tensors. It searches block scales, and stores only amaxes, no codes. kAligned
// is true if all rows of all tensors begin at multiples of 16 bytes, and kSmall if the group is small (grouped.cuh).
#include "grouped.cuh"
#include "search.cu"

using Members = GroupOf<SearchArguments, kSmall>::Type;

// For each block of each tensor of the group, find the amax whose scale gives the smallest loss, and store it in the
// tensor's array block_amax. The kernel is launched for fp4kit.quantize_grouped and fp4kit.fake_quantize_grouped, with
// recipes that use Model-Optimizer's sweep of scales. A thread block takes one piece (part of a tensor) at a time.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kSearchThreads<kWeighted>, kWeighted ? 1 : 2)
    grouped_search_kernel(Members group) {
  __shared__ SearchMemory<kWeighted> memory;
  make_pruning_tables<R>(memory.tables);
  for_each_piece(group, [](SearchArguments a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      search<R, Input, true, kWeighted, kAll, kEight>(a, grid, memory);
    } else {
      search<R, Input, false, kWeighted, kAll, kEight>(a, grid, memory);
    }
  });
}
