// Conversions between float32 and other types: one function per PTX instruction (an instruction of NVIDIA GPUs), with a
// software twin for the CPU (see ptx.cuh). A pair is a word with two 16-bit values, the first one in the low half. In
// names, `rn` means rounded to nearest even, `rz` rounded toward zero, and `satfinite` that magnitudes above the
// largest value become that value.
#pragma once

#include "types.cuh"

// Return x rounded toward zero to float32. A finite x beyond the range of float32 gives the largest finite float32,
// with the sign of x. Infinity stays infinity, and NaN stays NaN.
FP4KIT_DEVICE float narrow_rz(double x) {
#ifdef __CUDA_ARCH__
  return __double2float_rz(x);
#else
  const float rounded = static_cast<float>(x);
  const bool away = __builtin_fabs(static_cast<double>(rounded)) > __builtin_fabs(x);
  return float_of(bits_of(rounded) - away);
#endif
}

// Return the float32 that equals the float16 with the bits `half`. NaN gives a NaN without a sign bit.
FP4KIT_DEVICE float widen_f16(u16 half) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
  return y;
#else
  const u32 magnitude = half & 0x7FFFu, sign = static_cast<u32>(half & 0x8000u) << 16;
  const u32 finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  return float_of(magnitude > 0x7C00u ? 0x7FFFFFFFu : (magnitude < 0x7C00u ? finite : 0x7F800000u) | sign);
#endif
}

// Return the float16 bits of x, rounded to nearest even. Overflow gives infinity, and NaN gives a quiet NaN.
FP4KIT_DEVICE u16 narrow_f16(float x) {
#ifdef __CUDA_ARCH__
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#else
  const u32 magnitude = bits_of(x) & 0x7FFFFFFFu, sign = bits_of(x) >> 16 & 0x8000u;
  const u32 normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // the ulp of 0.5 is the smallest float16
  const u32 finite = magnitude < (113u << 23) ? subnormal : minimum(normal, 0x7C00u);
  const u32 nan = 0x7E00u | (magnitude >> 13 & 0x3FFu);
  return static_cast<u16>((magnitude > kInfinityBits ? nan : finite) | sign);
#endif
}

// Return the float32 that equals the bfloat16 with the bits x. Every payload of a NaN is kept.
FP4KIT_DEVICE float widen_bf16(u16 x) {
  return float_of(static_cast<u32>(x) << 16);
}

// Return the bfloat16 bits of x, rounded to nearest even. Overflow gives infinity, and NaN gives a quiet NaN.
FP4KIT_DEVICE u16 narrow_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;  // the instruction for a pair, because the one for a single value runs at a quarter of the rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
  return static_cast<u16>(y);
#else
  const u32 bits = bits_of(x), nan = bits >> 16 | 0x40u;
  return static_cast<u16>(is_nan(x) ? nan : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
#endif
}

// Return a pair with the bfloat16 bits of two floats, each rounded as narrow_bf16 does it: `low` in the low half,
// `high` in the high half.
FP4KIT_DEVICE u32 narrow_bf16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return narrow_bf16(low) | static_cast<u32>(narrow_bf16(high)) << 16;
#endif
}

// Return a pair with the float16 bits of two floats, each rounded as narrow_f16 does it: `low` in the low half, `high`
// in the high half.
FP4KIT_DEVICE u32 narrow_f16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return narrow_f16(low) | static_cast<u32>(narrow_f16(high)) << 16;
#endif
}

// Return a pair with the float16 bits of two floats in [0, 2^15), each rounded toward zero: `low` in the low half,
// `high` in the high half. The bits of any other float have no meaning.
FP4KIT_DEVICE u32 narrow_f16x2_rz(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  const auto narrow = [](float x) {
    if (!(x < 0x1p15f)) return 0u;
    return x < 0x1p-14f ? static_cast<u32>(x * 0x1p24f) : (bits_of(x) - (112u << 23)) >> 13;
  };
  return narrow(low) | narrow(high) << 16;
#endif
}

// cvt_rn_satfinite_e4m3x2 and cvt_rn_satfinite_e5m2x2 return the E4M3 or E5M2 codes of two floats: the code of `low` in
// the low byte, and the code of `high` in the next byte. Floats are rounded to nearest even. Magnitudes above the
// largest value, and infinity, become the largest value. NaN gives 0x7F. The functions exist only if FP4KIT_HAS_CVT_FP8
// is 1, which means sm_89 or later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP4KIT_HAS_CVT_FP8 1
FP4KIT_DEVICE u16 cvt_rn_satfinite_e4m3x2(float high, float low) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
FP4KIT_DEVICE u16 cvt_rn_satfinite_e5m2x2(float high, float low) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
// Store in `pairs` the float16 bits of four FP8 codes, the lowest byte of `codes` in the low half of pairs[0]. The
// codes are E5M2 if kMantissaBits is 2, and E4M3 if it is 3. The conversion is exact, and NaN gives NaN. There is no
// software twin: if FP4KIT_HAS_CVT_FP8 is 0, the function stores nothing, so callers must test that constant first.
template <int kMantissaBits>
FP4KIT_DEVICE void decode_fp8x4(u32 codes, u32 (&pairs)[2]) {
  u16 low, high;  // an instruction reads the high half of a register without a shift
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(codes));
  if constexpr (kMantissaBits == 3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[0]) : "h"(low));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[1]) : "h"(high));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pairs[0]) : "h"(low));
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pairs[1]) : "h"(high));
  }
}
#else
#define FP4KIT_HAS_CVT_FP8 0
template <int kMantissaBits>
FP4KIT_DEVICE void decode_fp8x4(u32 codes, u32 (&pairs)[2]) {}
#endif

// Return the E2M1 codes of the eight floats at v, the first code in the lowest bits. Floats are rounded to nearest
// even, and magnitudes above 6 become 6. The function exists only if FP4KIT_HAS_CVT_E2M1 is 1, which means a Blackwell
// GPU.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define FP4KIT_HAS_CVT_E2M1 1
FP4KIT_DEVICE u32 cvt_rn_satfinite_e2m1x8(const float* v) {
  u32 word;
  asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;"
      " cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
      : "=r"(word)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return word;
}
#else
#define FP4KIT_HAS_CVT_E2M1 0
#endif

// The functions below convert bfloat16 pairs to E2M1 and FP8 codes. Numbers are rounded to nearest even and saturate.
// cvt_pairs_e2m1 exists only if FP4KIT_HAS_CVT_PAIRS is 1, which means a Blackwell GPU and NVRTC 13.1 or later, and
// cvt_pair_fp8 only if FP4KIT_HAS_CVT_FP8 is 1.
#if FP4KIT_HAS_CVT_E2M1 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1301
#define FP4KIT_HAS_CVT_PAIRS 1
// Return the E2M1 codes of four pairs. The codes of pair a are in the lowest byte, that of its low half in the low
// bits.
FP4KIT_DEVICE u32 cvt_pairs_e2m1(u32 a, u32 b, u32 c, u32 d) {
  u32 word;
  asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.bf16x2 a, %1; cvt.rn.satfinite.e2m1x2.bf16x2 b, %2;"
      " cvt.rn.satfinite.e2m1x2.bf16x2 c, %3; cvt.rn.satfinite.e2m1x2.bf16x2 d, %4; mov.b32 %0, {a, b, c, d}; }"
      : "=r"(word)
      : "r"(a), "r"(b), "r"(c), "r"(d));
  return word;
}
#else
#define FP4KIT_HAS_CVT_PAIRS 0
FP4KIT_DEVICE u32 cvt_pairs_e2m1(u32 a, u32 b, u32 c, u32 d) {
  return 0u;
}
#endif
// Return the two FP8 codes of a pair, that of the low half in the low byte: E5M2 if kMantissaBits is 2, and E4M3 if it
// is 3.
template <int kMantissaBits>
FP4KIT_DEVICE u16 cvt_pair_fp8(u32 pair) {
  u16 codes = 0u;
#if FP4KIT_HAS_CVT_PAIRS
  if constexpr (kMantissaBits == 3) asm("cvt.rn.satfinite.e4m3x2.bf16x2 %0, %1;" : "=h"(codes) : "r"(pair));
  if constexpr (kMantissaBits == 2) asm("cvt.rn.satfinite.e5m2x2.bf16x2 %0, %1;" : "=h"(codes) : "r"(pair));
#elif FP4KIT_HAS_CVT_FP8
  const float low = float_of(pair << 16), high = float_of(pair & 0xFFFF0000u);
  codes = kMantissaBits == 3 ? cvt_rn_satfinite_e4m3x2(high, low) : cvt_rn_satfinite_e5m2x2(high, low);
#endif
  return codes;
}

// Return a word of two halves. The compiler merges this into conversions that compute the halves.
FP4KIT_DEVICE u32 word_of(u16 low, u16 high) {
#ifdef __CUDA_ARCH__
  u32 word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
#else
  return low | static_cast<u32>(high) << 16;
#endif
}
