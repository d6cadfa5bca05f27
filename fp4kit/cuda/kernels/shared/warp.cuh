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

// Return the largest `own` among kLanes neighboring threads. kLanes must be a power of two, at most 32. All threads of
// the warp must call this function.
template <int kLanes>
FP4KIT_DEVICE u32 largest_of_lanes(u32 own) {
  if constexpr (kLanes == 32) return largest_of_warp(own);
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) own = maximum(own, __shfl_xor_sync(0xFFFFFFFFu, own, lane));
  return own;
}
