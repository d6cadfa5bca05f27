// Functions that load, store and prefetch by one PTX instruction (an instruction of NVIDIA GPUs). Each function has a
// software twin for the CPU ("host"), as in ptx.cuh. Addresses are in global memory, except in the last two functions.
#pragma once

#include "types.cuh"

// Return the value at address `from`, for data that is read only once: when the caches need space, they evict its cache
// line before others. T must have 2, 4 or 8 bytes.
template <class T>
FP4KIT_DEVICE T load_streaming(const T* from) {
#ifdef __CUDA_ARCH__
  T y;
  if constexpr (sizeof(T) == 8) asm volatile("ld.global.cs.b64 %0, [%1];" : "=l"(y) : "l"(from));
  if constexpr (sizeof(T) == 4) asm volatile("ld.global.cs.b32 %0, [%1];" : "=r"(y) : "l"(from));
  if constexpr (sizeof(T) == 2) asm volatile("ld.global.cs.b16 %0, [%1];" : "=h"(y) : "l"(from));
  return y;
#else
  return *from;
#endif
}

// Store the words a, b, c and d (16 bytes) at address `to`, which must be a multiple of 16. This is for data that is
// not read again soon: when the caches need space, they evict its cache line before others.
FP4KIT_DEVICE void store_streaming(void* to, u32 a, u32 b, u32 c, u32 d) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#else
  struct alignas(16) Four {
    u32 w[4];
  };
  Four& four = *static_cast<Four*>(to);  // a reference, because sanitizers check its alignment
  four = {{a, b, c, d}};
#endif
}

// Prefetch kBytes bytes, from address `from` on, into the L2 cache. `from` and kBytes must be multiples of 16. Before
// sm_90, no instruction prefetches that much, and the function does nothing. On the host, the function only reads the
// first and the last byte, so that sanitizers check the addresses.
template <int kBytes>
FP4KIT_DEVICE void prefetch_l2(const void* from) {
#ifndef __CUDA_ARCH__
  struct alignas(16) Sixteen {
    volatile u8 bytes[16];
  };
  const Sixteen* lines = static_cast<const Sixteen*>(from);  // sanitizers check the address
  static_cast<void>(lines[0].bytes[0] + lines[kBytes / 16 - 1].bytes[15]);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(kBytes) : "memory");
#endif
}

// Prefetch the 32-byte sector that contains the address `from` into the L2 cache. On the host, the function only reads
// the byte at `from`.
FP4KIT_DEVICE void prefetch_sector(const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
  static_cast<void>(*static_cast<const volatile u8*>(from));  // sanitizers check the address
#endif
}

// Return the offset by which load_shared finds `place`, an address inside the shared variable `memory`. On a GPU, it
// counts from the beginning of shared memory; on the host, from `memory`.
template <class T>
FP4KIT_DEVICE u32 shared_offset(const T& memory, const void* place) {
#ifdef __CUDA_ARCH__
  return static_cast<u32>(__cvta_generic_to_shared(place));
#else
  return static_cast<u32>(static_cast<const char*>(place) - reinterpret_cast<const char*>(&memory));
#endif
}

// Return the eight bytes at `offset` in shared memory. `offset` is a result of shared_offset for the variable `memory`,
// plus any number of bytes inside that variable.
template <class T>
FP4KIT_DEVICE u64 load_shared(const T& memory, u32 offset) {
#ifdef __CUDA_ARCH__
  u64 y;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(y) : "r"(offset));
  return y;
#else
  return *reinterpret_cast<const u64*>(reinterpret_cast<const char*>(&memory) + offset);
#endif
}
