// quantize_tile: quantize blocks of several rows, or blocks of one or more rows by 4over6 (each block gets the better
// of two scales). Blocks have 16 or 32 columns. The elements may have any type, and the matrix any size. R is the
// recipe. If R::kFake, the kernel stores the values to which codes decode instead of codes and scales.
#include "amax.cuh"
#include "quantize_tile.cuh"

constexpr int kBlocksPerMultiprocessor =
    R::kBlock > 16 || R::kFinders ? 2 : 4;  // the largest numbers for which no registers are spilled

// Quantize a.x, and store its codes in a.packed, its block scales in a.scales and its tensor scales in a.tensor_scale;
// or store only its values in a.values if R::kFake. The kernel is launched for recipes with 4over6 or with blocks of
// several rows, if neither quantize_columns.cu nor quantize_table.cu supports the call (launch/dispatch.py). A thread
// processes one row of one block at a time.
//
// If R::kFinders is 0, launch with any number of thread blocks. Otherwise launch with a multiple of R::kFinders thread
// blocks, which first find the tensor's amax, or the amax of each row, and store it at a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_tile_kernel(QuantizeArguments a) {
  find_amax<R, Input, kAligned>(a);
  quantize_tile<R, Input, kAligned>(a, whole_grid());
}
