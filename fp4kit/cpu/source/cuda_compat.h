// This file lets a C++ compiler compile the rules of cuda/kernels/rules for a processor. It defines the few CUDA names
// that the rules use, in a form that lets the compiler vectorize loops. Then it includes the rules that the CPU engine
// needs.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__

struct NoIndex {
  unsigned x;
};
// A stand-in for the type of threadIdx and similar variables of CUDA. Some functions of the rules mention these
// variables, so the compiler must find them, although the CPU engine never calls such functions.
static const NoIndex threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

// Return the bits of a float or double as an integer (__float_as_uint, __double_as_longlong), or the float or double
// that has the given bits (the other two). These four functions replace CUDA functions of the same names.
static __forceinline__ unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
static __forceinline__ float __uint_as_float(unsigned bits) {
  return __builtin_bit_cast(float, bits);
}
static __forceinline__ long long __double_as_longlong(double x) {
  return __builtin_bit_cast(long long, x);
}
static __forceinline__ double __longlong_as_double(long long bits) {
  return __builtin_bit_cast(double, bits);
}

// Return the number of leading zero bits of x, or 32 if x is 0.
static __forceinline__ int __clz(unsigned x) {
  return x ? __builtin_clz(x) : 32;
}

// Return the smaller (smaller_float) or the larger (larger_float) of two floats, with one instruction each. These
// functions replace fminf and fmaxf in the rules. If a is NaN, b is returned, as fminf and fmaxf do. b must not be NaN;
// the rules pass a possible NaN as a.
static __forceinline__ float smaller_float(float a, float b) {
  return a < b ? a : b;
}
static __forceinline__ float larger_float(float a, float b) {
  return a > b ? a : b;
}
#define fminf smaller_float
#define fmaxf larger_float

#include "../../cuda/kernels/rules/block.cuh"
#include "../../cuda/kernels/rules/block_rules_e4m3.cuh"
#include "../../cuda/kernels/rules/block_rules_e8m0.cuh"
#include "../../cuda/kernels/rules/block_rules_gguf_mlx.cuh"
#include "../../cuda/kernels/rules/block_rules_e8m0_serving.cuh"
#include "../../cuda/kernels/rules/block_rules_e4m3_serving.cuh"
#include "../../cuda/kernels/rules/block_rules_ascend.cuh"
#include "../../cuda/kernels/rules/block_rules_torchao.cuh"
#include "../../cuda/kernels/rules/hif4.cuh"
#include "../../cuda/kernels/rules/implied_amax.cuh"
#include "../../cuda/kernels/rules/matmul_terms.cuh"
#include "../../cuda/kernels/rules/random.cuh"

// For each of the 2^23 significands: rcp.approx.ftz.f32 of sm_90 minus the correctly rounded reciprocal, in ulp. The
// values are those of reference/arith.py. Python passes the table by fp4kit_set_reciprocals before any other call, and
// the table never changes.
inline const signed char* reciprocal_table = nullptr;
inline std::atomic<bool> lacks_reciprocals{false};  // a call needed the table before it was set

// Return the number that rcp.approx.ftz.f32 of sm_90 returns for x: an approximate 1 / x. Subnormal operands and
// results are flushed to zero, with their sign. So zeros and subnormal x give infinity, and infinities give zero. NaN
// gives NaN. The attribute `const` is valid because reciprocal_table does not change after it was set.
__attribute__((const, noinline)) inline float rcp_approx_ftz(float x) {
  const u32 bits = bits_of(x);
  const float exact = 1.0f / flush(x);
  if (!is_finite(exact) || !is_finite(x)) return exact;
  if (!reciprocal_table) {
    lacks_reciprocals = true;
    return nan_value();
  }
  const float significand = float_of((bits & 0x7FFFFFu) | 0x3F800000u);
  const u32 approximate =
      bits_of(1.0f / significand) + static_cast<u32>(static_cast<i32>(reciprocal_table[bits & 0x7FFFFFu]));
  const double power = __builtin_bit_cast(double, static_cast<u64>(1023 + 127 - (bits >> 23 & 0xFFu)) << 52);
  const double scaled = static_cast<double>(float_of(approximate)) * power;  // exact
  const float magnitude = scaled < kFltMin ? 0.0f : static_cast<float>(scaled);
  return std::copysign(magnitude, x);
}
