// Blocks of several rows, and 4over6, whatever the type and the size of the matrix.
#include "quantize_tile.cuh"

constexpr int kTilesPerMultiprocessor = R::kBlock > 16 ? 2 : 4;  // as many as spill no registers

extern "C" __global__ void __launch_bounds__(kThreads, kTilesPerMultiprocessor) quantize_tile_kernel(Arguments a) {
  quantize_tile<R, Input, kAligned>(a, whole_grid());
}
