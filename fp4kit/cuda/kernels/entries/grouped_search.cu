// search.cu for a group of tensors. kAligned: whether all of them are. kSmall: which group it is.
#include "grouped.cuh"
#include "search.cu"

using Members = GroupOf<SearchArguments, kSmall>::Type;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_search_kernel(Members group) {
  for_each_piece(group, [](SearchArguments a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      search<R, Input, true, kWeighted>(a, grid);
    } else {
      search<R, Input, false, kWeighted>(a, grid);
    }
  });
}
