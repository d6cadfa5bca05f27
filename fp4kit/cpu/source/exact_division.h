// Functions that find the E2M1 codes of quotients x / d without a division per element x. The quotient is replaced by a
// number that has the same E2M1 code. One such number is computed from the reciprocal of the divisor d and the error of
// the reciprocal (Divisor). Another one is the product of x and one multiplier, if there is a multiplier that gives the
// same codes for every x (Multipliers).
//   midpoint     a number halfway between two neighboring E2M1 values
//   In           the type of the elements
//   unused_bits  kUnusedBits<In>: the low bits that are 0 in every x
#pragma once

#include "input_types.h"

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;  // because a fused multiply-add would be a function call
#endif

// Codes may be found without divisions only for divisors d with kFastDivisorAbove < d < kFastDivisorBelow. For some
// element arithmetics, the upper bound is smaller (fast_below in encode_elements.h).
constexpr float kFastDivisorAbove = 0x1p-90f, kFastDivisorBelow = 0x1p90f;

// A divisor `value`, its rounded reciprocal, and the rounded difference correction = 1 / value - reciprocal.
//
// q = fma(x, reciprocal, x * correction) takes two operations, where quotient_by takes three. For every x of at most 24
// bits, q is on the same side of every midpoint of E2M1 as the rounded quotient x / value. If the quotient is a
// midpoint, q is that midpoint. So q and the quotient have the same code, though they may differ. The one exception is
// a divisor with the largest significand (is_last_significand). tests/cpu/test_exact_division.py checks this for all
// divisors.
struct Divisor {
  float value, reciprocal, correction;
};

// Return the Divisor of a value: the value, its rounded reciprocal and the correction. The correction is 0 if the
// processor has no fused multiply-add (kHasFma is false).
static __forceinline__ Divisor divisor_of(float value) {
  const float reciprocal = 1.0f / value;
  return {value, reciprocal, kHasFma ? fma_rn(-value, reciprocal, 1.0f) * reciprocal : 0.0f};
}

// Return true if all 23 stored bits of the significand of `value` are 1. For such a divisor, codes found with a Divisor
// may be wrong.
static __forceinline__ bool is_last_significand(float value) {
  return (~bits_of(value) & 0x7FFFFFu) == 0u;
}

// A mask of the low bits of a float32 that are 0 in every element of the type In, if it is a 16-bit type. It is 0 for
// float32 elements.
template <class In>
constexpr u32 kUnusedBits = sizeof(typename Input<In>::Bits) == 2 ? (1u << (23 - In::kMantissaBits)) - 1u : 0u;

// One multiplier per scale code, for recipes whose divisor depends only on the scale code of the block and the tensor
// scale. all_exact is true if every divisor between kFastDivisorAbove and kFastDivisorBelow has an exact multiplier
// (is_exact_multiplier). If it is false, the multipliers must not be used.
struct Multipliers {
  float of_code[256];
  bool all_exact;
};

// For each of the 256 scale codes, store in out.of_code the multiplier that replaces the divisor divisors[code]. Three
// candidates are tried in this order: the rounded reciprocal, the float just below it, and the float just above it. The
// first exact one is stored, or the last candidate if none is exact. Set out.all_exact to true if every divisor between
// kFastDivisorAbove and kFastDivisorBelow has an exact multiplier, otherwise to false.
static void find_multipliers(const float* __restrict divisors, u32 unused_bits, Multipliers& out) {
  u32 missing = 0;
  for (int code = 0; code < 256; ++code) {
    const float d = divisors[code], nearest = 1.0f / d, below = float_of(bits_of(nearest) - 1u),
                above = float_of(bits_of(nearest) + 1u);
    const bool is_nearest_exact = is_exact_multiplier(nearest, d, unused_bits),
               is_below_exact = is_exact_multiplier(below, d, unused_bits),
               is_above_exact = is_exact_multiplier(above, d, unused_bits);
    out.of_code[code] = is_nearest_exact ? nearest : is_below_exact ? below : above;
    missing |=
        (d > kFastDivisorAbove) & (d < kFastDivisorBelow) & !(is_nearest_exact | is_below_exact | is_above_exact);
  }
  out.all_exact = !missing;
}
