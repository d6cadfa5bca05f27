// What the kernels of the amax of tensors share: which elements count, the largest of a run, and of a thread block.
#pragma once

#include "block.cuh"
#include "hadamard.cuh"

template <AmaxInput kInput>
FP4KIT_DEVICE u32 counted_bits(float x) {
  const u32 bits = bits_of(x) & 0x7FFFFFFFu;
  if constexpr (kInput == AmaxInput::no_nan) return bits > kInfinityBits ? 0u : bits;
  if constexpr (kInput == AmaxInput::finite) return bits >= kInfinityBits ? 0u : bits;
  return bits;
}

// Largest of a run's elements, transformed first where Transform says so.
template <class Transform, class In, AmaxInput kInput, int kCount>
FP4KIT_DEVICE u32 largest_of_run(Run<In, kCount> run) {
  u32 largest;
  if constexpr (Transform::kHadamard) {
    largest = hadamard_run<Transform::kSignMask>(run);
  } else {
    largest = largest_bits_of(run);
  }
  if (largest < kInfinityBits) return largest;
  largest = 0u;
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = maximum(largest, counted_bits<kInput>(element(run, i)));
  return largest;
}

template <int kThreads>
FP4KIT_DEVICE u32 largest_of_block(u32 mine) {
  __shared__ u32 parts[kThreads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] = maximum(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  const u32 result = parts[0];
  __syncthreads();
  return result;
}
