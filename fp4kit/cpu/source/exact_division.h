// Codes of quotients x / d without a division per element. The quotient is replaced by a number with the same E2M1
// code: from the divisor's reciprocal and the error of that reciprocal, or by one multiplier, if a multiplier with the
// same codes exists.
#pragma once

#include "input_types.h"

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;  // a fused multiply-add would be a function call
#endif

// The fast methods take divisors d with kFastDivisorAbove < d < kFastDivisorBelow.
constexpr float kFastDivisorAbove = 0x1p-90f, kFastDivisorBelow = 0x1p90f;

// A divisor, its rounded reciprocal, and correction = 1 / value - reciprocal, rounded.
//
// q = fma(x, reciprocal, x * correction) takes two operations where quotient_by takes three. For every x of 24 bits, q
// is on the same side of every midpoint of E2M1 as the rounded quotient x / value, or on the midpoint if the quotient
// is. So q has the quotient's code, though q may differ from the quotient. The one exception is the largest significand
// (is_last_significand). Checked for all divisors by tests/test_cpu_arithmetic.py.
struct Divisor {
  float value, reciprocal, correction;
};

// Return a divisor with its reciprocal and correction; the correction is 0 without fused multiply-add.
static __forceinline__ Divisor divisor_of(float value) {
  const float reciprocal = 1.0f / value;
  return {value, reciprocal, kHasFma ? fma_rn(-value, reciprocal, 1.0f) * reciprocal : 0.0f};
}

// Return true if all 23 bits of the significand are 1.
static __forceinline__ bool is_last_significand(float value) {
  return (~bits_of(value) & 0x7FFFFFu) == 0u;
}

// The low bits of a float32 that are 0 in every element of a 16-bit type; 0 for float32.
template <class In>
constexpr u32 kUnusedBits = sizeof(typename Input<In>::Bits) == 2 ? (1u << (23 - In::kMantissaBits)) - 1u : 0u;

// Return true if a value near a midpoint of E2M1 is rounded up. The midpoint is `odd` times a power of two, and
// `value` is scaled by that power. At a midpoint, ties to even round 1/4, 5/4, 5/2 and 5 down, and 3/4, 7/4 and 7/2 up.
static __forceinline__ bool rounds_up(float value, u32 odd) {
  const float midpoint = static_cast<float>(odd);
  return (value > midpoint) | ((value == midpoint) & (odd % 4u == 3u));
}

// Return true if x * multiplier has the E2M1 code of x / d for every x whose unused_bits are 0.
//
// Midpoints are 1, 3, 5 and 7 times powers of two. For each of these, the x nearest to that multiple of d is tried, if
// it is within 8 ulp of it. Any other x needs no trial: its quotient is more than 7 * 2^-24 of itself from the
// midpoint. Rounding moves the quotient by at most 2^-24 of itself. The product is within 4 * 2^-24 of the quotient,
// because the multiplier is within 1.5 ulp of 1 / d.
static __forceinline__ bool is_exact_multiplier(float multiplier, float d, u32 unused_bits) {
  bool is_exact = true;
  FP4KIT_UNROLL
  for (u32 odd = 1; odd < 8; odd += 2) {
    const u32 multiple = bits_of(d * static_cast<float>(odd)),
              nearest = (multiple + (unused_bits + 1u) / 2u) & ~unused_bits;
    const float x = float_of(nearest);
    is_exact &= (nearest + 8u - multiple > 16u) | (rounds_up(x / d, odd) == rounds_up(x * multiplier, odd));
  }
  return is_exact;
}

// Multipliers, by the code of a block's scale, for recipes whose divisor depends on that code alone. all_exact: every
// divisor that the fast methods take has an exact multiplier.
struct Multipliers {
  float of_code[256];
  bool all_exact;
};

// Store a multiplier for each of 256 divisors. Candidates are the rounded reciprocal and its two neighbours, in the
// order nearest, below, above; the last one is stored if none is exact.
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
