// Instructions on pairs of 16 bits, with their software twins, as in ptx.cuh.
#pragma once

#include "ptx_convert.cuh"

// The larger of the low halves and of the high halves, unsigned.
FP4KIT_DEVICE u32 max_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return maximum(a & 0xFFFFu, b & 0xFFFFu) | maximum(a >> 16, b >> 16) << 16;
#endif
}

// The smaller of the low halves and of the high halves, unsigned.
FP4KIT_DEVICE u32 min_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("min.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}

// Pairs of integers: the larger of a + b and c, signed.
FP4KIT_DEVICE u32 add_max_s16x2(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  return __viaddmax_s16x2(a, b, c);
#else
  u32 y = 0u;
  for (int half = 0; half < 32; half += 16) {
    const i32 sum = static_cast<short>(static_cast<u16>((a >> half) + (b >> half))),
              lower = static_cast<short>(c >> half);
    y |= (static_cast<u32>(sum < lower ? lower : sum) & 0xFFFFu) << half;
  }
  return y;
#endif
}

// The larger magnitudes of two pairs of 16-bit floats, NaN above infinity; sign bits are not meant. One instruction, no
// mask before it.
FP4KIT_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

FP4KIT_DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// The smaller magnitudes of two pairs of 16-bit floats; sign bits are not meant, nor is what becomes of NaN.
FP4KIT_DEVICE u32 min_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

FP4KIT_DEVICE u32 min_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// a * b + c of pairs of 16-bit floats, rounded once; subnormals are kept. The twin of bfloat16 rounds twice where
// double and float32 both round, which no use of it here can reach: products and sums have at most 24 bits, or lie far
// from ties.
template <float (*kWiden)(u16), u16 (*kNarrow)(float)>
FP4KIT_DEVICE u32 fma_of_halves(u32 a, u32 b, u32 c) {
  u32 y = 0u;
  for (int half = 0; half < 32; half += 16) {
    const double product =
        static_cast<double>(kWiden(static_cast<u16>(a >> half))) * kWiden(static_cast<u16>(b >> half));
    y |= static_cast<u32>(kNarrow(static_cast<float>(product + kWiden(static_cast<u16>(c >> half))))) << half;
  }
  return y;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FP4KIT_FAST_BF16X2 1
#else
#define FP4KIT_FAST_BF16X2 0
#endif
FP4KIT_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_bf16, narrow_bf16>(a, b, c);
#endif
}

FP4KIT_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_f16, narrow_f16>(a, b, c);
#endif
}

// The smaller of pairs of bfloat16 that are not NaN and not negative.
FP4KIT_DEVICE u32 min_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}

// Magnitudes of a pair of bfloat16: an instruction that a product after it takes in.
FP4KIT_DEVICE u32 abs_bf16x2(u32 a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("abs.bf16x2 %0, %1;" : "=r"(y) : "r"(a));
  return y;
#else
  return a & 0x7FFF7FFFu;
#endif
}
