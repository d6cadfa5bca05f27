// The device-neutral rules of cuda/kernels/rules, compiled for the processor: what they ask of CUDA, for loops that
// become vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__

struct NoIndex {
  unsigned x;
};
static const NoIndex threadIdx{}, blockIdx{}, blockDim{}, gridDim{};  // named by functions that nothing here calls

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

static __forceinline__ int __clz(unsigned x) {
  return x ? __builtin_clz(x) : 32;
}

// fminf and fmaxf as one instruction. Only the first operand may be NaN, as it may be wherever the rules say so: the
// second is then the result, as C has it.
static __forceinline__ float least_of(float a, float b) {
  return a < b ? a : b;
}
static __forceinline__ float most_of(float a, float b) {
  return a > b ? a : b;
}
#define fminf least_of
#define fmaxf most_of

#include "../../cuda/kernels/rules/block.cuh"
#include "../../cuda/kernels/rules/block_rules_e4m3.cuh"
#include "../../cuda/kernels/rules/block_rules_e8m0.cuh"
#include "../../cuda/kernels/rules/block_rules_gguf_mlx.cuh"
#include "../../cuda/kernels/rules/block_rules_e8m0_serving.cuh"
#include "../../cuda/kernels/rules/block_rules_e4m3_serving.cuh"
#include "../../cuda/kernels/rules/block_rules_torchao.cuh"
#include "../../cuda/kernels/rules/implied_amax.cuh"
#include "../../cuda/kernels/rules/random.cuh"

// rcp.approx.ftz.f32 of sm_90: its difference from the rounded reciprocal, in ulp, for every significand: the table of
// reference/arith.py, which Python hands over before all else: from then on a result depends on x alone.
inline const signed char* reciprocal_table = nullptr;

__attribute__((const, noinline)) inline float rcp_approx_ftz(float x) {
  const u32 bits = bits_of(x);
  const float exact = 1.0f / flush(x);
  if (!is_finite(exact) || !is_finite(x)) return exact;
  const float significand = float_of((bits & 0x7FFFFFu) | 0x3F800000u);
  const u32 near = bits_of(1.0f / significand) + static_cast<u32>(static_cast<i32>(reciprocal_table[bits & 0x7FFFFFu]));
  const double power = __builtin_bit_cast(double, static_cast<u64>(1023 + 127 - (bits >> 23 & 0xFFu)) << 52);
  const double scaled = static_cast<double>(float_of(near)) * power;  // exact
  const float magnitude = scaled < kFltMin ? 0.0f : static_cast<float>(scaled);
  return std::copysign(magnitude, x);
}
