// Functions for PTX instructions (instructions of NVIDIA GPUs) on pairs of 16-bit values, with software twins for the
// CPU (see ptx.cuh). A pair is a 32-bit word, and its "halves" are its low and its high 16 bits. The functions compute
// the low half of the result from the low halves of the arguments, and the high half in the same way from the high
// halves.
#pragma once

#include "ptx_convert.cuh"

// For each half, return the larger one of two unsigned integers.
FP4KIT_DEVICE u32 max_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return maximum(a & 0xFFFFu, b & 0xFFFFu) | maximum(a >> 16, b >> 16) << 16;
#endif
}

// For each half, return the smaller one of two unsigned integers.
FP4KIT_DEVICE u32 min_u16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 y;
  asm("min.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}

// For each half, return max(a + b, c) of signed integers. The sum a + b wraps modulo 2^16.
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

// For each half, return the larger one of two bfloat16 magnitudes. NaN counts as larger than infinity. The sign bits of
// the result have no meaning. (So no mask is needed before the instruction.)
FP4KIT_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// For each half, return the larger one of two float16 magnitudes. NaN counts as larger than infinity. The sign bits of
// the result have no meaning.
FP4KIT_DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// For each half, return the smaller one of two bfloat16 magnitudes. The sign bits of the result have no meaning. If one
// of the two is NaN, the half has no meaning.
FP4KIT_DEVICE u32 min_magnitude_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// For each half, return the smaller one of two float16 magnitudes. The sign bits of the result have no meaning. If one
// of the two is NaN, the half has no meaning.
FP4KIT_DEVICE u32 min_magnitude_f16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  u32 y;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return min_u16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// For each half, return a * b + c. This is the software twin of fma_bf16x2 and fma_f16x2. kWiden converts a 16-bit
// number to float32, and kNarrow a float32 to 16 bits. The result is rounded to float64, to float32 and to 16 bits in
// turn. For all callers, that gives the same result as one rounding, because products and sums have at most 24 bits or
// lie far from ties.
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
// For each half, return a * b + c in bfloat16, rounded once to nearest even. Subnormals are kept.
FP4KIT_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_bf16, narrow_bf16>(a, b, c);
#endif
}

// For each half, return a * b + c in float16, rounded once to nearest even. Subnormals are kept.
FP4KIT_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return fma_of_halves<widen_f16, narrow_f16>(a, b, c);
#endif
}

// For each half, return the smaller one of two bfloat16 numbers. Neither may be NaN or negative.
FP4KIT_DEVICE u32 min_bf16x2(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return minimum(a & 0xFFFFu, b & 0xFFFFu) | minimum(a >> 16, b >> 16) << 16;
#endif
}
