// Quotients in few instructions: what replaces a division where it gives the same codes. A midpoint is a number halfway
// between two neighboring E2M1 values. `unused_bits` are low bits that are 0 in every element.
#pragma once

#include "ptx.cuh"

// Return 1 / d, rounded to float32, in few instructions. d must be between 2^-100 and 2^100. This was checked for all
// 2^23 significands, with the approximation of each of them that cards give.
FP4KIT_DEVICE float reciprocal_of(float d) {
  const float approximate = rcp_approx_ftz(d);
  return fma_rn(approximate, fma_rn(-d, approximate, 1.0f), approximate);
}

// Return a / divisor, rounded to float32, in few instructions. `reciprocal` is 1 / divisor, rounded to float32. No step
// may leave the range of normal numbers. -0 becomes 0.
//
// Before the last rounding, the result differs from a / divisor by at most 2^-22 ulp. For every divisor, all numbers a
// whose quotient is that close to the middle between two floats were tried.
FP4KIT_DEVICE float quotient_by(float a, float divisor, float reciprocal) {
  const float quotient = a * reciprocal;
  return fma_rn(fma_rn(-divisor, quotient, a), reciprocal, quotient);
}

// Return true if a number at or near a midpoint of E2M1 is rounded up to its E2M1 value, ties to even. `odd` is the
// midpoint divided by a power of two (1, 3, 5 or 7), and `value` is the number divided by the same power. If the number
// is the midpoint itself, 1/4, 5/4, 5/2 and 5 are rounded down, and 3/4, 7/4 and 7/2 up. If kBySum, all midpoints are
// rounded up, and so is the float below 1/4 (Rounding::rnas).
template <bool kBySum = false>
FP4KIT_DEVICE bool rounds_up(float value, u32 odd) {
  const float midpoint = static_cast<float>(odd);
  if constexpr (kBySum) return (value >= midpoint) | ((odd == 1u) & (value == 1.0f - 0x1p-24f));
  return (value > midpoint) | ((value == midpoint) & (odd % 4u == 3u));
}

// Return the x nearest to `odd` times d whose unused_bits are 0.
FP4KIT_DEVICE float nearest_element(float d, u32 odd, u32 unused_bits) {
  return float_of((bits_of(d * static_cast<float>(odd)) + (unused_bits + 1u) / 2u) & ~unused_bits);
}

// Return true if x is within 8 ulp of `odd` times d.
FP4KIT_DEVICE bool is_near_midpoint(float x, float d, u32 odd) {
  return bits_of(x) + 8u - bits_of(d * static_cast<float>(odd)) <= 16u;
}

// Return true if x * multiplier, rounded with ties to even, has the same E2M1 code as x / d for every x whose
// unused_bits are 0. `multiplier` must be within 1.5 ulp of 1 / d.
//
// Midpoints of E2M1 are 1, 3, 5 and 7 times powers of two. For each of these four numbers, only one x is tried: the x
// nearest to that multiple of d, if it is within 8 ulp of the multiple. No other x can fail, because its quotient
// differs from the midpoint by more than a relative 7 * 2^-24. Rounding changes the quotient by at most a relative
// 2^-24. The product differs from the quotient by at most a relative 4 * 2^-24.
FP4KIT_DEVICE bool is_exact_multiplier(float multiplier, float d, u32 unused_bits) {
  bool is_exact = true;
  FP4KIT_UNROLL
  for (u32 odd = 1; odd < 8; odd += 2) {
    const float x = nearest_element(d, odd, unused_bits);
    is_exact &= !is_near_midpoint(x, d, odd) | (rounds_up(x / d, odd) == rounds_up(x * multiplier, odd));
  }
  return is_exact;
}

// Return a number m for which is_exact_multiplier is true, where x / d is rounded with kBySum as given. `nearest` must
// be the rounded 1 / d. Return NaN if neither `nearest` nor one of its neighbors is such a number, or if quotients by d
// may leave the range of normal numbers.
//
// Usually no midpoint has an element next to it, and `nearest` is returned.
template <bool kBySum = false>
FP4KIT_DEVICE float exact_multiplier(float d, float nearest, u32 unused_bits) {
  if (!(d > 0x1p-90f && d < 0x1p90f)) return nan_value();
  u32 least = unused_bits;
  FP4KIT_UNROLL
  for (u32 odd = 1; odd < 8; odd += 2)
    least = minimum(least, (bits_of(d * static_cast<float>(odd)) + 8u) & unused_bits);
  if (least > 16u) return nearest;  // as is_near_midpoint
  const float candidates[3] = {nearest, float_of(bits_of(nearest) - 1u), float_of(bits_of(nearest) + 1u)};
  bool is_exact[3] = {true, true, true};
  FP4KIT_UNROLL
  for (u32 odd = 1; odd < 8; odd += 2) {
    const float x = nearest_element(d, odd, unused_bits);
    if (!is_near_midpoint(x, d, odd)) continue;
    const bool wanted = rounds_up<kBySum>(x / d, odd);
    FP4KIT_UNROLL
    for (int i = 0; i < 3; ++i) is_exact[i] &= rounds_up(x * candidates[i], odd) == wanted;
  }
  return is_exact[0] ? candidates[0] : is_exact[1] ? candidates[1] : is_exact[2] ? candidates[2] : nan_value();
}

// Return exact_multiplier<true> in fewer instructions, for d = amax / 6 rounded. The product of a quotient just below 7
// may be 7.
//
// Usually amax is itself an element. If its significand is a multiple of 3, d has few bits, and every element next to a
// midpoint has a quotient that is a midpoint. It is rounded up, and so is the product with a number two ulp above 1 /
// d. Otherwise, the only elements next to midpoints are amax / 8 times powers of two. Quotient and product are 3/4.
FP4KIT_DEVICE float exact_multiplier_of_sixth(float amax, float d, float nearest, u32 unused_bits) {
  if ((bits_of(amax) & unused_bits) == 0u) return float_of(bits_of(nearest) + 2u);
  return exact_multiplier<true>(d, nearest, unused_bits);
}
