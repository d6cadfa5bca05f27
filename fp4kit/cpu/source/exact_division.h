// Quotients of elements, of which the codes of E2M1 are found, without divisions: by a divisor's reciprocal and what
// that leaves, or by one multiplier, where one does.
#pragma once

#include "input_types.h"

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;  // it would be the call of a function
#endif

constexpr float kShortFrom = 0x1p-90f, kShortBelow = 0x1p90f;  // divisors between these

// A divisor's rounded reciprocal, and what that leaves of 1 / by, rounded. x * reciprocal + (x * rest) rounded once, in
// two operations where quotient_by takes three, is on the same side of every midpoint of E2M1 as the rounded quotient,
// or on it where that is: of any x of 24 bits by any divisor but the largest significand, which is_last_significand
// tells. It may differ from the quotient elsewhere.
struct Divisor {
  float by, reciprocal, rest;
};
static __forceinline__ Divisor divisor_of(float by) {
  const float reciprocal = 1.0f / by;
  return {by, reciprocal, kHasFma ? fma_rn(-by, reciprocal, 1.0f) * reciprocal : 0.0f};
}
static __forceinline__ bool is_last_significand(float by) {
  return (~bits_of(by) & 0x7FFFFFu) == 0u;
}

// Bits of a float32 that elements of 16 bits have none of.
template <class In>
constexpr u32 kBeyond = sizeof(typename Input<In>::Bits) == 2 ? (1u << (23 - In::kMantissaBits)) - 1u : 0u;

// Whether a value near an odd multiple of a power of two, which is a midpoint of E2M1, is rounded up: 1/4, 5/4, 5/2 and
// 5 are rounded down to even codes, 3/4, 7/4 and 7/2 up.
static __forceinline__ bool goes_up(float value, u32 odd) {
  const float midpoint = static_cast<float>(odd);
  return (value > midpoint) | ((value == midpoint) & (odd % 4u == 3u));
}

// Whether x * multiplier has the code of x / d, in E2M1, for all x without the bits `beyond`. Midpoints are 1, 3, 5 and
// 7 times powers of two. The x that is nearest to such a multiple of d is tried where it is within 8 ulp of it. The
// quotient of any other is more than 7 * 2^-24 of itself from the midpoint; it is rounded by 2^-24 of itself at most,
// and the product is within 4 * 2^-24 of it, as the multiplier is within 1.5 ulp of 1 / d.
static __forceinline__ bool serves(float multiplier, float d, u32 beyond) {
  bool all = true;
  FP4KIT_UNROLL
  for (u32 odd = 1; odd < 8; odd += 2) {
    const u32 multiple = bits_of(d * static_cast<float>(odd)), nearest = (multiple + (beyond + 1u) / 2u) & ~beyond;
    const float x = float_of(nearest);
    all &= (nearest + 8u - multiple > 16u) | (goes_up(x / d, odd) == goes_up(x * multiplier, odd));
  }
  return all;
}

// Multipliers by the code of a block's scale, of divisors that depend on it alone; serve: whether each has one, of
// those that are usual.
struct Multipliers {
  float by_code[256];
  bool serve;
};
static void put_multipliers(const float* __restrict divisors, u32 beyond, Multipliers& out) {
  u32 missing = 0;
  for (int code = 0; code < 256; ++code) {
    const float d = divisors[code], reciprocal = 1.0f / d, less = float_of(bits_of(reciprocal) - 1u),
                more = float_of(bits_of(reciprocal) + 1u);
    const bool near = serves(reciprocal, d, beyond), below = serves(less, d, beyond), above = serves(more, d, beyond);
    out.by_code[code] = near ? reciprocal : below ? less : more;
    missing |= (d > kShortFrom) & (d < kShortBelow) & !(near | below | above);
  }
  out.serve = !missing;
}
