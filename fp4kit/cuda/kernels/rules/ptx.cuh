// One function per PTX instruction. Each function has a software twin with the same result, for the host and for
// architectures without the instruction. Only the twin of sqrt_approx is more accurate than the instruction.
//
// Compile with -fmad=false -ftz=false -prec-div=true. Then plain +, * and / round to nearest even and keep subnormals.
#pragma once

#include "types.cuh"

// Return x, or a zero with the sign of x if x is subnormal.
FP4KIT_DEVICE float flush(float x) {
  return magnitude_of(x) < kFltMin ? float_of(bits_of(x) & 0x80000000u) : x;
}

// Return the result of an operation that flushes subnormals to zero (.ftz). `exact` is the unrounded result and
// `result` the rounded one. Return a zero with the sign of `result` if the magnitude of `exact`, rounded to 24 bits
// with unbounded exponent, is below 2^-126. Otherwise return `result`.
FP4KIT_DEVICE float flush_result(float result, double exact) {
  const double tiny = 0x1p-126 * (1.0 - 0x1p-25);
  return exact < tiny && exact > -tiny ? float_of(bits_of(result) & 0x80000000u) : result;
}

// Return a * b with subnormal operands and results flushed to zero: mul.rn.ftz.f32.
FP4KIT_DEVICE float mul_ftz(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  // If the product is subnormal, 2^24 times the product is normal and is rounded to 24 bits. Otherwise 2^24 times the
  // product may overflow, which does no harm. Use a bit mask, because a select between floats prevents loop
  // vectorization.
  const float x = flush(a), y = flush(b), product = x * y;
  return float_of(bits_of(product) & (magnitude_of(x * 0x1p24f * y) < 0x1p-102f ? 0x80000000u : 0xFFFFFFFFu));
#endif
}

// Return a / b with subnormal operands and results flushed to zero: div.rn.ftz.f32.
FP4KIT_DEVICE float div_ftz(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return flush_result(flush(a) / flush(b), static_cast<double>(flush(a)) / flush(b));
#endif
}

// Return an approximation of 1 / x, with subnormals flushed to zero: rcp.approx.ftz.f32.
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The host twin follows a table measured on sm_90 (reference/arith.py). Each engine defines it.
#else
float rcp_approx_ftz(float x);
#endif

// Return the power of two with which div.full.f32 multiplies both operands before it divides: 2^24 for a subnormal
// divisor, 2^-2 for a divisor above 2^126, and otherwise 1. The divisor must not be negative.
FP4KIT_DEVICE float division_scaling(float divisor) {
  return divisor < kFltMin ? 0x1p24f : divisor > 0x1p126f ? 0.25f : 1.0f;
}

// Return a / b as div.full.f32 computes it on sm_90, for b >= 0. Triton's division compiles to this instruction.
FP4KIT_DEVICE float divide_full(float a, float b) {
  const float scaling = division_scaling(b);
  return a * scaling * rcp_approx_ftz(b * scaling);
}

// Return a + b rounded toward zero, for a >= 0 and b > 0. The twin is right only if a + b is exact in float64, as it is
// for all callers.
FP4KIT_DEVICE float add_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rz(a, b);
#else
  const double exact = static_cast<double>(a) + b;
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

// Return a * b rounded toward zero, for a >= 0 and b > 0. A subnormal result is kept.
FP4KIT_DEVICE float mul_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rz(a, b);
#else
  const double exact = static_cast<double>(a) * b;
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

// Return four bytes selected from a and b: prmt.b32. Bytes 0 to 3 are those of a, from its low end, and bytes 4 to 7
// those of b. Nibble i of the selector is the number of the byte that becomes byte i of the result. If the top bit of
// the nibble is set, byte i is eight copies of the selected byte's top bit instead.
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

// Wait until `threads` threads of the thread block have reached barrier `number` (1 to 15). The threads must form whole
// warps.
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE void sync_group(u32 number, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
#else
void sync_group(u32 number, u32 threads);
#endif

// Return the low half of a times the lowest byte of b, plus the high half of a times the second-lowest byte of b. All
// are unsigned.
FP4KIT_DEVICE u32 dot_bytes(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0u));
  return y;
#else
  return (a & 0xFFFFu) * (b & 0xFFu) + (a >> 16) * (b >> 8 & 0xFFu);
#endif
}

// Return a * b + c, rounded once to nearest even.
FP4KIT_DEVICE float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Return a * b + c in float64, rounded once to nearest even.
FP4KIT_DEVICE double fma_rn(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// Return a * b + c rounded toward zero, for a >= 0, b > 0, an integer c in [2^23, 2^24) and a * b + c <= 2^24. The twin
// rounds a * b first, so b must be a power of two or a * b exact.
FP4KIT_DEVICE float fma_rz(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  return c + static_cast<float>(static_cast<u32>(a * b));
#endif
}

// Return the 64-bit product a * b. One instruction computes both halves.
FP4KIT_DEVICE u64 mul_wide(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u64 y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
#else
  return static_cast<u64>(a) * b;
#endif
}

// Return a * b + c modulo 2^32. Unlike shifts and logic, the instruction does not use the pipeline that limits the
// fastest kernels.
FP4KIT_DEVICE u32 mad(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  return a * b + c;
#endif
}

// Return a | (b & mask), computed by one instruction. Without this function, the compiler would combine the masked
// operands of several calls first, which takes more instructions.
FP4KIT_DEVICE u32 or_masked(u32 a, u32 b, u32 mask) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xF8;" : "=r"(y) : "r"(a), "r"(b), "r"(mask));
  return y;
#else
  return a | (b & mask);
#endif
}

// Return a * b clamped to [0, 1], or 0 if the product is NaN.
FP4KIT_DEVICE float mul_sat(float a, float b) {
#ifdef __CUDA_ARCH__
  return __saturatef(a * b);
#else
  const float product = a * b;
  return product > 0.0f ? minimum(product, 1.0f) : 0.0f;
#endif
}

// Return x, but hide from the compiler how x was computed. This keeps the compiler from rewriting address arithmetic
// that uses x.
FP4KIT_DEVICE u32 opaque(u32 x) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(x));
#endif
  return x;
}

// Make the compiler read memory again after this point. Otherwise it would keep more values of a loop in registers than
// there are registers.
FP4KIT_DEVICE void forget_memory() {
  asm volatile("" : : : "memory");
}

// Return the square root of x >= 0 with a relative error below 2^-22, or 0 if x is subnormal. On the host the root is
// rounded to nearest, so its result may differ from that of the GPU.
FP4KIT_DEVICE float sqrt_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_sqrtf(flush(x));
#endif
}
