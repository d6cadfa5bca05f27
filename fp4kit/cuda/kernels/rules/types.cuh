// Short names of integer types, function qualifiers, bit casts and index arithmetic. "Bits" of a number are its memory
// representation as an unsigned integer. This file includes no CUDA header, because NVRTC (the compiler of the kernels)
// declares what it uses.
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

// FP4KIT_UNROLL unrolls the following loop completely, so that a loop around it can be vectorized. The spelling for g++
// differs from that for other compilers.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define FP4KIT_UNROLL _Pragma("GCC unroll 16")
#else
#define FP4KIT_UNROLL _Pragma("unroll")
#endif

// The number of threads per thread block for which the kernel is compiled; the row of its launch states it
// (cuda/launch.py).
#ifndef FP4KIT_THREADS
#define FP4KIT_THREADS 256
#endif
constexpr int kThreads = FP4KIT_THREADS;
constexpr float kFltMax = 0x1.fffffep127f;
constexpr float kFltMin = 0x1p-126f;  // smallest normal
constexpr u32 kInfinityBits = 0x7F800000u;

// Return the 32 bits of a float, NaN payloads included.
FP4KIT_DEVICE u32 bits_of(float x) {
  return __float_as_uint(x);
}
// Return the float that has the given bits.
FP4KIT_DEVICE float float_of(u32 bits) {
  return __uint_as_float(bits);
}
// Return the 64 bits of a double.
FP4KIT_DEVICE u64 double_bits_of(double x) {
  return static_cast<u64>(__double_as_longlong(x));
}
// Return the double that has the given bits.
FP4KIT_DEVICE double double_of(u64 bits) {
  return __longlong_as_double(static_cast<i64>(bits));
}
// Return true if x is NaN. The function tests bits, so that compiler options for fast arithmetic do not change its
// result.
FP4KIT_DEVICE bool is_nan(float x) {
  return (bits_of(x) & 0x7FFFFFFFu) > kInfinityBits;
}
// Return true if x is neither infinite nor NaN.
FP4KIT_DEVICE bool is_finite(float x) {
  return (bits_of(x) & 0x7FFFFFFFu) < kInfinityBits;
}
// Return x with its sign bit cleared. The payload of a NaN is kept.
FP4KIT_DEVICE float magnitude_of(float x) {
  return float_of(bits_of(x) & 0x7FFFFFFFu);
}
// Return 1 if the sign bit of x is set (-0 and negative NaN included), else 0.
FP4KIT_DEVICE u32 sign_of(float x) {
  return bits_of(x) >> 31;
}
// Return the positive quiet NaN without payload.
FP4KIT_DEVICE float nan_value() {
  return float_of(0x7FC00000u);
}

// Return the upper 32 bits of the 64-bit product a * b.
FP4KIT_DEVICE u32 high_product(u32 a, u32 b) {
  return static_cast<u32>((static_cast<u64>(a) * b) >> 32);
}

// Return floor(i / n) for 0 <= i < count and 0 < n < 2^32. If count < 2^31, the function divides 32-bit integers, which
// is several times faster; `count` has no other effect.
FP4KIT_DEVICE i64 quotient(i64 i, i64 n, i64 count) {
  if (n == 1) return i;
  return count <= 0x7FFFFFFF ? static_cast<i64>(static_cast<u32>(i) / static_cast<u32>(n)) : i / n;
}

// Return the smaller of a and b. Return b if they are equal (also for 0 and -0), or if one of them is NaN.
template <class T>
FP4KIT_DEVICE T minimum(T a, T b) {
  return a < b ? a : b;
}
// Return the larger of a and b. Return a if they are equal (also for 0 and -0), or if one of them is NaN.
template <class T>
FP4KIT_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}

// The thread blocks that process one matrix together: `block` is the index of this thread block among them, and
// `blocks` is their number. For a group of tensors, `block` is the index of a piece of work, and `blocks` is the number
// of pieces.
struct Grid {
  i64 block, blocks;
};
// Return the Grid of this launch, for kernels in which all thread blocks of the launch share one matrix.
FP4KIT_DEVICE Grid whole_grid() {
  return {static_cast<i64>(blockIdx.x), static_cast<i64>(gridDim.x)};
}
// Return the number of this thread among all threads of the Grid g, from 0 on. It is the first item in a loop that
// gives each thread one item per iteration.
FP4KIT_DEVICE i64 first_item(Grid g) {
  return g.block * blockDim.x + threadIdx.x;
}
// Return the number of threads of the Grid g. It is the stride of a loop that gives each thread one item per iteration.
FP4KIT_DEVICE i64 item_stride(Grid g) {
  return g.blocks * blockDim.x;
}
