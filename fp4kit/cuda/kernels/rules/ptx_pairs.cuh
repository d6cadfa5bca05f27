// Functions for instructions on pairs of 16-bit values in one word, with their software twins (see ptx.cuh). The
// "halves" of a word are its low and its high 16 bits. The functions compute both halves of the result in the same way
// from the low halves and from the high halves of their arguments.
#pragma once

#include "ptx_convert.cuh"

// Return the larger unsigned integer for each half.
FP4KIT_DEVICE u32 max_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return maximum(a & 0xFFFFu, b & 0xFFFFu) | maximum(a >> 16, b >> 16) << 16;
#endif
}

// Return the smaller unsigned integer for each half.
FP4KIT_DEVICE u32 min_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("min.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}

// Return max(a + b, c) for each half, as signed integers.
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

// Return the larger bfloat16 magnitude for each half. NaN counts as larger than infinity. The sign bits of the result
// have no meaning, which saves a mask before the instruction.
FP4KIT_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Return the larger float16 magnitude for each half. NaN counts as larger than infinity. The sign bits of the result
// have no meaning.
FP4KIT_DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Return the smaller bfloat16 magnitude for each half. The sign bits of the result, and the result for NaN, have no
// meaning.
FP4KIT_DEVICE u32 min_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Return the smaller float16 magnitude for each half. The sign bits of the result, and the result for NaN, have no
// meaning.
FP4KIT_DEVICE u32 min_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Return a * b + c for each half. This is the software twin of fma_bf16x2 and fma_f16x2. It rounds to float64, to
// float32 and to 16 bits in turn. For all callers, that gives the same result as one rounding, because products and
// sums have at most 24 bits or lie far from ties.
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
// Return a * b + c for each bfloat16 half, rounded once. Subnormals are kept.
FP4KIT_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_bf16, narrow_bf16>(a, b, c);
#endif
}

// Return a * b + c for each float16 half, rounded once. Subnormals are kept.
FP4KIT_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_f16, narrow_f16>(a, b, c);
#endif
}

// Return the smaller bfloat16 for each half. No half may be NaN or negative.
FP4KIT_DEVICE u32 min_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}

// Return the magnitude of each bfloat16 half. The compiler merges this instruction into a product that follows.
FP4KIT_DEVICE u32 abs_bf16x2(u32 a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("abs.bf16x2 %0, %1;" : "=r"(y) : "r"(a));
  return y;
#else
  return a & 0x7FFF7FFFu;
#endif
}
