// Names of types and qualifiers, and the bit casts. No CUDA header is needed: NVRTC knows the rest.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#define FP4KIT_DEVICE static __device__ __forceinline__
#define FP4KIT_DEVICE_CALL static __device__ __noinline__
#define FP4KIT_DEVICE_MEMBER __device__ __forceinline__

// Of a loop, in full: where one around it is to become vectors. g++ has a name of its own for it.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define FP4KIT_UNROLL _Pragma("GCC unroll 16")
#else
#define FP4KIT_UNROLL _Pragma("unroll")
#endif

constexpr int kThreads = 256;  // of a thread block, unless a kernel has its own: THREADS of geometry.py
constexpr float kFltMax = 0x1.fffffep127f;
constexpr float kFltMin = 0x1p-126f;  // smallest normal
constexpr u32 kInfinityBits = 0x7F800000u;

FP4KIT_DEVICE u32 bits_of(float x) {
  return __float_as_uint(x);
}
FP4KIT_DEVICE float float_of(u32 bits) {
  return __uint_as_float(bits);
}
FP4KIT_DEVICE u64 double_bits_of(double x) {
  return static_cast<u64>(__double_as_longlong(x));
}
FP4KIT_DEVICE double double_of(u64 bits) {
  return __longlong_as_double(static_cast<i64>(bits));
}
FP4KIT_DEVICE bool is_nan(float x) {
  return (bits_of(x) & 0x7FFFFFFFu) > kInfinityBits;
}
FP4KIT_DEVICE bool is_finite(float x) {
  return (bits_of(x) & 0x7FFFFFFFu) < kInfinityBits;
}
FP4KIT_DEVICE float magnitude_of(float x) {
  return float_of(bits_of(x) & 0x7FFFFFFFu);
}
FP4KIT_DEVICE u32 sign_of(float x) {
  return bits_of(x) >> 31;
}
FP4KIT_DEVICE float nan_value() {
  return float_of(0x7FC00000u);
}

FP4KIT_DEVICE u32 high_product(u32 a, u32 b) {
  return static_cast<u32>((static_cast<u64>(a) * b) >> 32);
}

// i / n for 0 <= i < count: in 32 bits where they are enough, which is several times as fast.
FP4KIT_DEVICE i64 quotient(i64 i, i64 n, i64 count) {
  if (n == 1) return i;
  return count <= 0x7FFFFFFF ? static_cast<i64>(static_cast<u32>(i) / static_cast<u32>(n)) : i / n;
}

template <class T>
FP4KIT_DEVICE T minimum(T a, T b) {
  return a < b ? a : b;
}
template <class T>
FP4KIT_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}

// The thread blocks that share one piece of work: the number of this one, and how many they are.
struct Grid {
  i64 block, blocks;
};
FP4KIT_DEVICE Grid whole_grid() {
  return {static_cast<i64>(blockIdx.x), static_cast<i64>(gridDim.x)};
}
FP4KIT_DEVICE i64 first_item(Grid g) {
  return g.block * blockDim.x + threadIdx.x;
}
FP4KIT_DEVICE i64 item_stride(Grid g) {
  return g.blocks * blockDim.x;
}
