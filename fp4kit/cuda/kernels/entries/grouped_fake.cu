// fake.cu for a group of tensors. kAligned: whether all of them are. kSmall: which group it is.
#include "grouped.cuh"
#include "fake.cu"

using Members = GroupOf<Arguments, kSmall>::Type;

extern "C" __global__ void __launch_bounds__(kThreads) grouped_fake_kernel(Members group) {
  for_each_piece(group, [](const Arguments& a, Grid grid, bool aligned) {
    if (kAligned || aligned) {
      fake<R, Input, true>(a, grid);
    } else {
      fake<R, Input, false>(a, grid);
    }
  });
}
