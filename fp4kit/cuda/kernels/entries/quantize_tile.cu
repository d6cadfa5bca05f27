// quantize blocks of several rows, and 4over6, for any type and any size of the matrix.
#include "amax.cuh"
#include "quantize_tile.cuh"

constexpr int kBlocksPerMultiprocessor = R::kBlock > 16 || R::kFinders ? 2 : 4;  // as many as spill no registers

// Launch with any grid, a multiple of R::kFinders if that is not 0.
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_tile_kernel(QuantizeArguments a) {
  find_amax<R, Input, kAligned>(a);
  quantize_tile<R, Input, kAligned>(a, whole_grid());
}
