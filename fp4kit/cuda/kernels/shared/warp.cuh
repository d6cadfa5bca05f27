// Functions in which the threads of a warp exchange values.
#pragma once

#include "types.cuh"

// Return the largest value of `own` among the threads of a warp. All threads of the warp must call this function, and
// all get the result.
FP4KIT_DEVICE u32 largest_of_warp(u32 own) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFu, own);
#else
  for (int distance = 1; distance < 32; distance *= 2) own = maximum(own, __shfl_xor_sync(0xFFFFFFFFu, own, distance));
  return own;
#endif
}
