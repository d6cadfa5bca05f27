// One function per PTX instruction, with a software twin of the same result where an architecture, or the host, lacks
// it. Build with -fmad=false -ftz=false -prec-div=true: plain +, *, / are then rn and keep subnormals.
#pragma once

#include "types.cuh"

// Subnormal -> zero of the same sign.
FP4KIT_DEVICE float flush(float x) {
  return magnitude_of(x) < kFltMin ? float_of(bits_of(x) & 0x80000000u) : x;
}

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
  // 2^24 times the product is rounded to 24 bits where the product is subnormal; it overflows only where that is not.
  // By a mask: a choice between floats keeps loops from becoming vectors.
  const float x = flush(a), y = flush(b), product = x * y;
  return float_of(bits_of(product) & (magnitude_of(x * 0x1p24f * y) < 0x1p-102f ? 0x80000000u : 0xFFFFFFFFu));
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
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

// a * b toward zero, subnormals too; a >= 0 and b > 0.
FP4KIT_DEVICE float mul_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rz(a, b);
#else
  const double exact = static_cast<double>(a) * b;
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

// prmt.b32: byte i of the result is the byte of (b, a), numbered 0 to 7 from the low end of a, that nibble i of the
// selector names; a nibble with its top bit set gives eight copies of that byte's top bit.
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

// Barrier `number` (1 ... 15) of `threads` threads of a block, whole warps.
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE void sync_group(u32 number, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
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

// a * b + c toward zero; a >= 0, b > 0, a * b <= 2^22, c an integer in [2^23, 2^24). Where b is no power of two the
// twin rounds a * b before.
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

// The same number, of which the compiler knows nothing: so that it adds to a pointer what it is told to, and does not
// find other ways.
FP4KIT_DEVICE u32 opaque(u32 x) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(x));
#endif
  return x;
}

// What memory holds is read again after this: loops would keep it in more registers than there are.
FP4KIT_DEVICE void forget_memory() {
  asm volatile("" : : : "memory");
}

// The square root of x >= 0, off by less than 2^-22 of it; a subnormal is 0.
FP4KIT_DEVICE float sqrt_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_sqrtf(flush(x));
#endif
}
