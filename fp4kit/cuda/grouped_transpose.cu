// transpose.cu for a group of matrices. kAligned: whether all of them are.
#include "grouped.cuh"
#include "transpose.cu"

extern "C" __global__ void __launch_bounds__(kThreads, kResident) grouped_transpose_kernel(Group<Arguments> group) {
  for_each_part(group, [](const Arguments& a, Grid grid, bool) { transpose<S, kAligned>(a, grid); });
}
