// transpose.cu for a group of matrices with linear scales. kAligned: whether, in all matrices, codes move by 16 bytes
// and scales by four.
#include "grouped.cuh"
#include "transpose.cu"

using Members = GroupOf<TransposeArguments, kSmall>::Type;

// The flags in a member's `aligned`: codes move by 16 bytes; scales move by four.
constexpr u32 kWholeCodes = 1u, kWordScales = 2u;

// S with scales that move one byte at a time.
struct ByteScales : S {
  static constexpr bool kScaleWords = false;
};

// Launch with any grid.
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
