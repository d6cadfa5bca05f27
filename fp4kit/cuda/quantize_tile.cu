// Blocks of several rows, and 4over6, whatever the type and the size of the matrix.
#include "quantize_tile.cuh"

// As many as spill no registers, but one less where that was faster.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMost = 4;  // sm_75 has threads for 4
#else
constexpr int kMost = R::kBlockRows == 1 && sizeof(Input::Bits) == 2 ? 5 : 4;
#endif
constexpr int kTilesPerMultiprocessor = R::kBlock > 16 ? 2 : kMost;

extern "C" __global__ void __launch_bounds__(kTileThreads, kTilesPerMultiprocessor) quantize_tile_kernel(Arguments a) {
  quantize_tile<R, Input, kAligned>(a, whole_grid());
}
