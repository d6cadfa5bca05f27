// One function per PTX instruction, with a software twin of the same result where an architecture, or the host, lacks it.
// Build with -fmad=false -ftz=false -prec-div=true: plain +, *, / are then rn and keep subnormals.
#pragma once

#include "types.cuh"

// Subnormal -> zero of the same sign.
FP4KIT_DEVICE float flush(float x) { return magnitude_of(x) < kFltMin ? float_of(bits_of(x) & 0x80000000u) : x; }

// A result of an .ftz operation: zero if it is below 2^-126 after rounding to 24 bits with an unbounded exponent.
FP4KIT_DEVICE float flush_result(float result, double exact) {
  const double tiny = 0x1p-126 * (1.0 - 0x1p-25);
  return exact < tiny && exact > -tiny ? float_of(bits_of(result) & 0x80000000u) : result;
}

FP4KIT_DEVICE float mul_ftz(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return flush_result(flush(a) * flush(b), static_cast<double>(flush(a)) * flush(b));
#endif
}

FP4KIT_DEVICE float div_ftz(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return flush_result(flush(a) / flush(b), static_cast<double>(flush(a)) / flush(b));
#endif
}

// rcp.approx.ftz.f32. The host twin follows the table measured on sm_90 (see reference/arith.py).
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
float rcp_approx_ftz(float x);
#endif

// 2^22 + a-like sums toward zero; a >= 0 and b > 0.
FP4KIT_DEVICE float add_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rz(a, b);
#else
  const double exact = static_cast<double>(a) + b;  // both within 53 bits of each other where this is used
  const float near = static_cast<float>(exact);
  return near > exact ? float_of(bits_of(near) - 1) : near;
#endif
}

// a * b toward zero, subnormals too; a >= 0 and b > 0.
FP4KIT_DEVICE float mul_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rz(a, b);
#else
  const double exact = static_cast<double>(a) * b;
  const float near = static_cast<float>(exact);
  return near > exact ? float_of(bits_of(near) - 1) : near;
#endif
}

// A double toward zero.
FP4KIT_DEVICE float narrow_rz(double x) {
#ifdef __CUDA_ARCH__
  return __double2float_rz(x);
#else
  const float near = static_cast<float>(x);
  const bool away = __builtin_fabs(static_cast<double>(near)) > __builtin_fabs(x);
  return float_of(bits_of(near) - away);
#endif
}

// float16 bits <-> float32: exact one way, rn the other way (overflow to inf).
FP4KIT_DEVICE float widen_f16(u16 half) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
  return y;
#else
  _Float16 h;
  __builtin_memcpy(&h, &half, 2);
  return static_cast<float>(h);
#endif
}

FP4KIT_DEVICE u16 narrow_f16(float x) {
#ifdef __CUDA_ARCH__
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#else
  const _Float16 h = static_cast<_Float16>(x);
  u16 half;
  __builtin_memcpy(&half, &h, 2);
  return half;
#endif
}

// bfloat16 bits <-> float32: exact one way, rn the other way; NaN stays a quiet NaN.
FP4KIT_DEVICE float widen_bf16(u16 x) { return float_of(static_cast<u32>(x) << 16); }

FP4KIT_DEVICE u16 narrow_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 y;  // of two, because that of one runs at a quarter of the rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
  return static_cast<u16>(y);
#else
  const u32 bits = bits_of(x);
  if (is_nan(x)) return static_cast<u16>((bits >> 16) | 0x40u);
  return static_cast<u16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// prmt.b32: byte i of the result is the byte of (b, a), numbered 0 to 7 from the low end of a, that nibble i of the selector names; a
// nibble with its top bit set gives eight copies of that byte's top bit.
FP4KIT_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
#else
  const u64 bytes = a | static_cast<u64>(b) << 32;
  u32 result = 0u;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15u, byte = static_cast<u32>(bytes >> (8 * (nibble & 7u))) & 0xFFu;
    result |= (nibble & 8u ? (byte & 0x80u ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return result;
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
    const i32 sum = static_cast<short>(static_cast<u16>((a >> half) + (b >> half))), least = static_cast<short>(c >> half);
    y |= (static_cast<u32>(sum < least ? least : sum) & 0xFFFFu) << half;
  }
  return y;
#endif
}

// Barrier `number` (1 ... 15) of `threads` threads of a block, whole warps.
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE void sync_group(u32 number, u32 threads) { asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory"); }
#else
void sync_group(u32 number, u32 threads);
#endif

// The low half of a times the lowest byte of b, plus the high half times the next one.
FP4KIT_DEVICE u32 dot_bytes(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0u));
  return y;
#else
  return (a & 0xFFFFu) * (b & 0xFFu) + (a >> 16) * (b >> 8 & 0xFFu);
#endif
}

// The larger magnitudes of two pairs of 16-bit floats, NaN above infinity; sign bits are not meant. One instruction, no mask before it.
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

// a * b + c of pairs of 16-bit floats, rounded once; subnormals are kept. The twin of bfloat16 rounds twice where double and float32
// both round, which no use of it here can reach: products and sums have at most 24 bits, or lie far from ties.
template <float (*kWiden)(u16), u16 (*kNarrow)(float)>
FP4KIT_DEVICE u32 fma_of_halves(u32 a, u32 b, u32 c) {
  u32 y = 0u;
  for (int half = 0; half < 32; half += 16) {
    const double product = static_cast<double>(kWiden(static_cast<u16>(a >> half))) * kWiden(static_cast<u16>(b >> half));
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

// What is read or written once: the caches give up its lines first.
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

FP4KIT_DEVICE void store_streaming(void* to, u32 a, u32 b, u32 c, u32 d) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#else
  struct alignas(16) Four { u32 w[4]; };
  Four& four = *static_cast<Four*>(to);  // a reference, because sanitizers check its alignment
  four = {{a, b, c, d}};
#endif
}

// Fetch kBytes, a multiple of 16 at a multiple of 16, into the L2; nothing before sm_90, where no instruction takes so many.
template <int kBytes>
FP4KIT_DEVICE void prefetch_l2(const void* from) {
#ifndef __CUDA_ARCH__
  struct alignas(16) Sixteen { volatile u8 bytes[16]; };
  const Sixteen* lines = static_cast<const Sixteen*>(from);  // for sanitizers to check
  static_cast<void>(lines[0].bytes[0] + lines[kBytes / 16 - 1].bytes[15]);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(kBytes) : "memory");
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

// a * b + c, rounded once.
FP4KIT_DEVICE float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FP4KIT_DEVICE double fma_rn(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// a * b + c toward zero; a >= 0, b a power of two with a * b <= 2^22, c an integer in [2^23, 2^24).
FP4KIT_DEVICE float fma_rz(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  return c + static_cast<float>(static_cast<u32>(a * b));
#endif
}

// a * b of 64 bits, in one instruction where both halves are used.
FP4KIT_DEVICE u64 mul_wide(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u64 y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
#else
  return static_cast<u64>(a) * b;
#endif
}

// a * b + c of integers, modulo 2^32: kept off the pipe of shifts and logic, which limits the hot kernels.
FP4KIT_DEVICE u32 mad(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return a * b + c;
#endif
}

// a | b & mask in one instruction: the compiler would gather the masked ones first.
FP4KIT_DEVICE u32 or_masked(u32 a, u32 b, u32 mask) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xF8;" : "=r"(y) : "r"(a), "r"(b), "r"(mask));
  return y;
#else
  return a | (b & mask);
#endif
}

// a * b in [0, 1], NaN to 0.
FP4KIT_DEVICE float mul_sat(float a, float b) {
#ifdef __CUDA_ARCH__
  return __saturatef(a * b);
#else
  const float product = a * b;
  return product > 0.0f ? minimum(product, 1.0f) : 0.0f;
#endif
}

// The same number, of which the compiler knows nothing: so that it adds to a pointer what it is told to, and does not find other ways.
FP4KIT_DEVICE u32 opaque(u32 x) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(x));
#endif
  return x;
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
FP4KIT_DEVICE u32 decode_fp8x2(u16 codes) { return 0u; }  // not called
#endif

// Two E2M1 codes of two floats, rn, satfinite: a in the low nibble. Blackwell has an instruction for it.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define FP4KIT_HAS_CVT_E2M1 1
FP4KIT_DEVICE u32 cvt_rn_satfinite_e2m1x2(float high, float low) {
  u32 packed;
  asm("{ .reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, %1, %2; cvt.u32.u8 %0, byte; }" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#else
#define FP4KIT_HAS_CVT_E2M1 0
#endif
