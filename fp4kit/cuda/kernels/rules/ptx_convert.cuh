// Conversions between floats and narrower ones: an instruction each, with its software twin, as in ptx.cuh.
#pragma once

#include "types.cuh"

// A double toward zero.
FP4KIT_DEVICE float narrow_rz(double x) {
#ifdef __CUDA_ARCH__
  return __double2float_rz(x);
#else
  const float rounded = static_cast<float>(x);
  const bool away = __builtin_fabs(static_cast<double>(rounded)) > __builtin_fabs(x);
  return float_of(bits_of(rounded) - away);
#endif
}

// float16 bits <-> float32: exact one way, rn the other way (overflow to inf).
FP4KIT_DEVICE float widen_f16(u16 half) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
  return y;
#else
  const u32 magnitude = half & 0x7FFFu, sign = static_cast<u32>(half & 0x8000u) << 16;
  const u32 special = 0x7F800000u | (magnitude & 0x3FFu) << 13 | (magnitude > 0x7C00u ? 0x400000u : 0u);
  const u32 finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  return float_of((magnitude < 0x7C00u ? finite : special) | sign);
#endif
}

FP4KIT_DEVICE u16 narrow_f16(float x) {
#ifdef __CUDA_ARCH__
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#else
  const u32 magnitude = bits_of(x) & 0x7FFFFFFFu, sign = bits_of(x) >> 16 & 0x8000u;
  const u32 normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // a step of 0.5 is the least of float16
  const u32 finite = magnitude < (113u << 23) ? subnormal : minimum(normal, 0x7C00u);
  const u32 nan = 0x7E00u | (magnitude >> 13 & 0x3FFu);
  return static_cast<u16>((magnitude > kInfinityBits ? nan : finite) | sign);
#endif
}

// bfloat16 bits <-> float32: exact one way, rn the other way; NaN stays a quiet NaN.
FP4KIT_DEVICE float widen_bf16(u16 x) {
  return float_of(static_cast<u32>(x) << 16);
}

FP4KIT_DEVICE u16 narrow_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;  // of two, because that of one runs at a quarter of the rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
  return static_cast<u16>(y);
#else
  const u32 bits = bits_of(x), nan = bits >> 16 | 0x40u;
  return static_cast<u16>(is_nan(x) ? nan : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
#endif
}

// Two floats rounded to a 16-bit type, `low` in the low half.
FP4KIT_DEVICE u32 narrow_bf16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return narrow_bf16(low) | static_cast<u32>(narrow_bf16(high)) << 16;
#endif
}

FP4KIT_DEVICE u32 narrow_f16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return narrow_f16(low) | static_cast<u32>(narrow_f16(high)) << 16;
#endif
}

// FP8 codes of two floats, rn, satfinite, NaN 0x7F: `low` in the low byte. Since sm_89.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP4KIT_HAS_CVT_FP8 1
FP4KIT_DEVICE u32 cvt_rn_satfinite_e4m3x2(float high, float low) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
FP4KIT_DEVICE u32 cvt_rn_satfinite_e5m2x2(float high, float low) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
// Two FP8 codes, E4M3 or E5M2 by their mantissa bits, as float16: exact, NaN stays NaN.
template <int kMantissaBits>
FP4KIT_DEVICE u32 decode_fp8x2(u16 codes) {
  u32 halves;
  if constexpr (kMantissaBits == 3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  if constexpr (kMantissaBits == 2) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}
#else
#define FP4KIT_HAS_CVT_FP8 0
template <int kMantissaBits>
FP4KIT_DEVICE u32 decode_fp8x2(u16 codes) {
  return 0u;
}  // not called
#endif

// Two E2M1 codes of two floats, rn, satfinite: a in the low nibble. Blackwell has an instruction for it.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define FP4KIT_HAS_CVT_E2M1 1
FP4KIT_DEVICE u32 cvt_rn_satfinite_e2m1x2(float high, float low) {
  u32 packed;
  asm("{ .reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, %1, %2; cvt.u32.u8 %0, byte; }"
      : "=r"(packed)
      : "f"(high), "f"(low));
  return packed;
}
#else
#define FP4KIT_HAS_CVT_E2M1 0
#endif
