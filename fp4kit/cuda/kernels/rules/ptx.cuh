// One function per PTX instruction (an instruction of NVIDIA GPUs). Each function has a software twin with the same
// result, for the CPU ("host") and for GPUs without the instruction. Only the twin of sqrt_approx is more accurate than
// the instruction. In names, `rn` means rounded to nearest even, and `rz` rounded toward zero. `ftz` means flushed to
// zero: a subnormal argument or result becomes a zero with its sign. A result counts as subnormal if its magnitude,
// rounded to 24 bits with unbounded exponent, is below 2^-126.
//
// Compile with -fmad=false -ftz=false -prec-div=true. Then plain +, * and / round to nearest even and keep subnormals.
#pragma once

#include "types.cuh"

// Return x if it is not subnormal (zero, infinity and NaN included). If x is subnormal, return a zero with its sign.
FP4KIT_DEVICE float flush(float x) {
  return magnitude_of(x) < kFltMin ? float_of(bits_of(x) & 0x80000000u) : x;
}

// Return `result`, flushed to zero. `result` is a rounded float32, and `exact` the same number before it was rounded.
// If the magnitude of `exact`, rounded to 24 bits with unbounded exponent, is below 2^-126, return a zero with the sign
// of `result`. Otherwise, and if `exact` is NaN, return `result`.
FP4KIT_DEVICE float flush_result(float result, double exact) {
  const double tiny = 0x1p-126 * (1.0 - 0x1p-25);
  return exact < tiny && exact > -tiny ? float_of(bits_of(result) & 0x80000000u) : result;
}

// Return a * b, rounded to nearest even. A subnormal a, b or result becomes a zero with its sign: mul.rn.ftz.f32.
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

// Multiply a and b by `factor`, each rounded to nearest even. Subnormals are kept. On a Blackwell GPU, this is one
// instruction.
FP4KIT_DEVICE void mul_f32x2(float& a, float& b, float factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  asm("{ .reg .b64 x, y; mov.b64 x, {%0, %1}; mov.b64 y, {%2, %2}; mul.rn.f32x2 x, x, y; mov.b64 {%0, %1}, x; }"
      : "+f"(a), "+f"(b)
      : "f"(factor));
#else
  a *= factor;
  b *= factor;
#endif
}

// Return a / b, rounded to nearest even. A subnormal a, b or result becomes a zero with its sign: div.rn.ftz.f32.
FP4KIT_DEVICE float div_ftz(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("div.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return flush_result(flush(a) / flush(b), static_cast<double>(flush(a)) / flush(b));
#endif
}

// Return an approximation of 1 / x: rcp.approx.ftz.f32. A zero or a subnormal x gives an infinity with the sign of x.
// If the result would be subnormal, it is a zero with the sign of x.
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

// Return the power of two by which div.full.f32 multiplies both operands before it divides: 2^24 if the divisor is zero
// or subnormal, 2^-2 if it is above 2^126 (infinity included), and otherwise 1. The divisor must not be negative. NaN
// gives 1.
FP4KIT_DEVICE float division_scaling(float divisor) {
  return divisor < kFltMin ? 0x1p24f : divisor > 0x1p126f ? 0.25f : 1.0f;
}

// Return a / b with the bits that div.full.f32 gives on sm_90, for b >= 0. The quotient is approximate. Triton's
// division compiles to this instruction.
FP4KIT_DEVICE float divide_full(float a, float b) {
  const float scaling = division_scaling(b);
  return a * scaling * rcp_approx_ftz(b * scaling);
}

// Return a + b rounded toward zero, for a >= 0 and b > 0 whose sum does not overflow. The twin computes in float32
// alone, so that compilers vectorize it: `error` is the exact error of the sum (Knuth's two-sum).
FP4KIT_DEVICE float add_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rz(a, b);
#else
  const float sum = a + b, added = sum - a;
  const float error = (a - (sum - added)) + (b - added);
  return float_of(bits_of(sum) - (error < 0.0f ? 1u : 0u));
#endif
}

// Return a * b rounded toward zero, for a >= 0 and b > 0. A subnormal result is not flushed to zero.
FP4KIT_DEVICE float mul_rz(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rz(a, b);
#else
  const double exact = static_cast<double>(a) * b;
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

// Return a word of four bytes that are selected from a and b: prmt.b32. Bytes 0 to 3 are the bytes of a, from its low
// end, and bytes 4 to 7 the bytes of b. Nibble i of `selector`, also from the low end, chooses byte i of the result:
// its low three bits are the number of the selected byte. If the top bit of the nibble is set, byte i is instead 0xFF
// if the top bit of the selected byte is set, and 0 if not.
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

// Let the calling thread wait until `threads` threads of its thread block, including itself, have called this function
// with the same `number` (the number of a barrier, 1 to 15). The threads must form whole warps.
#ifdef __CUDA_ARCH__
FP4KIT_DEVICE void sync_group(u32 number, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
#else
void sync_group(u32 number, u32 threads);
#endif

// Return the low 16 bits of a times the lowest byte of b, plus the high 16 bits of a times the second-lowest byte of b.
// All are unsigned. The other bytes of b are ignored.
FP4KIT_DEVICE u32 dot_bytes(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0u));
  return y;
#else
  return (a & 0xFFFFu) * (b & 0xFFu) + (a >> 16) * (b >> 8 & 0xFFu);
#endif
}

// Return c, plus the low 16 bits of a times byte 2 kHigh of b, plus the high 16 bits of a times byte 2 kHigh + 1 of b,
// modulo 2^32: dp2a.lo if kHigh is 0, and dp2a.hi if it is 1. Bytes are counted from the low end. The halves of a are
// unsigned. The bytes of b are signed if kSigned, and otherwise unsigned.
template <int kHigh, bool kSigned = false>
FP4KIT_DEVICE u32 dot_halves(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  if constexpr (kHigh && kSigned) asm("dp2a.hi.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  if constexpr (kHigh && !kSigned) asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  if constexpr (!kHigh && kSigned) asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  if constexpr (!kHigh && !kSigned) asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  const u32 bytes = b >> (16 * kHigh), low = bytes & 0xFFu, high = bytes >> 8 & 0xFFu;
  const u32 borrow = kSigned ? 256u : 0u;
  return c + (a & 0xFFFFu) * (low - (low & 0x80u ? borrow : 0u)) + (a >> 16) * (high - (high & 0x80u ? borrow : 0u));
#endif
}

// Return c plus the sum of the products of the four bytes of a and the corresponding bytes of b, modulo 2^32: dp4a. The
// bytes of a are unsigned. Those of b are signed if kSigned, and otherwise unsigned.
template <bool kSigned = false>
FP4KIT_DEVICE u32 dot_bytes4(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 y;
  if constexpr (kSigned)
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  else
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
#else
  for (int i = 0; i < 32; i += 8) {
    const u32 byte = b >> i & 0xFFu;
    c += (a >> i & 0xFFu) * (kSigned && byte & 0x80u ? byte - 256u : byte);
  }
  return c;
#endif
}

// Return a * b + c in float32, rounded once to nearest even.
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

// Two float32 numbers. On a Blackwell GPU, one instruction computes both results of a sum or of a fused multiply-add.
// Results are rounded to nearest even, and subnormals are kept.
struct TwoFloats {
  float low, high;
  FP4KIT_DEVICE_MEMBER TwoFloats(float x) : low(x), high(x) {}
  FP4KIT_DEVICE_MEMBER TwoFloats(float low, float high) : low(low), high(high) {}
  TwoFloats() = default;
};

// Return a * b + c for both numbers, rounded once.
FP4KIT_DEVICE TwoFloats fma_rn(TwoFloats a, TwoFloats b, TwoFloats c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  TwoFloats y;
  asm("{ .reg .b64 x, y, z; mov.b64 x, {%2, %3}; mov.b64 y, {%4, %5}; mov.b64 z, {%6, %7};"
      " fma.rn.f32x2 x, x, y, z; mov.b64 {%0, %1}, x; }"
      : "=f"(y.low), "=f"(y.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high), "f"(c.low), "f"(c.high));
  return y;
#else
  return {fma_rn(a.low, b.low, c.low), fma_rn(a.high, b.high, c.high)};
#endif
}
FP4KIT_DEVICE TwoFloats operator+(TwoFloats a, TwoFloats b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  TwoFloats y;
  asm("{ .reg .b64 x, y; mov.b64 x, {%2, %3}; mov.b64 y, {%4, %5}; add.rn.f32x2 x, x, y; mov.b64 {%0, %1}, x; }"
      : "=f"(y.low), "=f"(y.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high));
  return y;
#else
  return {a.low + b.low, a.high + b.high};
#endif
}
FP4KIT_DEVICE TwoFloats operator-(TwoFloats a, TwoFloats b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return fma_rn(b, TwoFloats(-1.0f), a);  // a zero, too, has the sign that it has as a difference
#else
  return {a.low - b.low, a.high - b.high};
#endif
}
FP4KIT_DEVICE TwoFloats operator*(TwoFloats a, TwoFloats b) {
  mul_f32x2(a.low, a.high, b.low);
  return a;
}

// Return a * b + c rounded toward zero, which is c + floor(a * b), for a >= 0, b > 0, an integer c in [2^23, 2^24) and
// a * b + c <= 2^24. The twin rounds a * b first, so b must be a power of two, or a * b must be exact.
FP4KIT_DEVICE float fma_rz(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rz(a, b, c);
#else
  return c + static_cast<float>(static_cast<u32>(a * b));
#endif
}

// Return the 64-bit product of two unsigned 32-bit integers. One instruction computes both halves.
FP4KIT_DEVICE u64 mul_wide(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u64 y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
#else
  return static_cast<u64>(a) * b;
#endif
}

// Return a * b + c modulo 2^32. Kernels use this function in place of shifts and logic operations, because the
// instruction does not use the pipeline that limits the fastest kernels.
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

// Return a * b, rounded to nearest even and clamped to [0, 1]. Return 0 if the product is NaN.
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

// Return the square root of x >= 0: on a GPU with a relative error below 2^-22, on the host rounded to nearest. So the
// two results may differ. If x is subnormal, return 0.
FP4KIT_DEVICE float sqrt_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_sqrtf(flush(x));
#endif
}
