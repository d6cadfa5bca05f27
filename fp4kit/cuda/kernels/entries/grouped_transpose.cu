// The kernel of transpose.cu for a group of matrices with linear scales. kAligned is true if, in all matrices, codes
// can be moved 16 bytes at a time and scales four bytes at a time. kSmall is true if the group is small (grouped.cuh).
#include "grouped.cuh"
#include "transpose.cu"

using Members = GroupOf<TransposeArguments, kSmall>::Type;

// The flags that the field `aligned` of a member (a matrix of the group) holds. kWholeCodes: its codes can be moved 16
// bytes at a time. kWordScales: its scales can be moved four bytes at a time.
constexpr u32 kWholeCodes = 1u, kWordScales = 2u;

// The struct S of transpose.cu, except that scales are moved one byte at a time.
struct ByteScales : S {
  static constexpr bool kScaleWords = false;
};

// Transpose the codes and scales of each matrix of the group, without decoding, and store them in the matrix's arrays
// codes_out and scales_out. The kernel is launched to update the columnwise copies of cast_master_weights. A thread
// block takes one piece (part of a matrix) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    grouped_transpose_kernel(Members group) {
  for_each_piece(group, [](const TransposeArguments& a, Grid grid, u32 aligned) {
    if (kAligned || aligned == (kWholeCodes | kWordScales)) {
      transpose<S, true>(a, grid);
    } else if (aligned == kWholeCodes) {
      transpose<ByteScales, true>(a, grid);
    } else {
      transpose<ByteScales, false>(a, grid);
    }
  });
}
