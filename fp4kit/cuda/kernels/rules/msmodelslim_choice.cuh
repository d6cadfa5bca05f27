// The searches of msmodelslim, which try two powers of two per block and keep the one with the smaller mean squared
// error. They give the same results as CHOICES in reference/ascend.py. The search of ceil_x chooses a constant for the
// whole array, as ceil_x_constant in reference/search.py. F is the element format, E2M1 (method 4over6) or
// E4M3 (mse), and In the type of the elements, to which every operation on errors is rounded.
#pragma once

#include "block_rules_ascend.cuh"
#include "nearest_by_a_sum.cuh"

// A candidate: the factor that multiplies elements, the power of two that multiplies their values, rounded to In, and
// the amax by which the block rule finds the power.
struct PowerCandidate {
  float factor, power, amax;
};

// Return the candidate 2^exponent. Below 2^-127, all values are zeros. Under a power that is 0 in float16, E4M3
// elements become infinite, and values NaN.
template <class F, class In>
FP4KIT_DEVICE PowerCandidate power_candidate(i32 exponent) {
  if (exponent < -127) return {0.0f, 0.0f, float_of(1u << (exponent + 149))};
  const float amax = value_of_e8m0(static_cast<u32>(exponent + 127)), power = round_to<In>(amax);
  return {inverse_power<In>(exponent), F::kHasNan && power == 0.0f ? nan_value() : power, amax};
}

// Return the exponent of the power of two nearest to amax / top, by the logarithm. If it is halfway, return the odd
// neighbor. A quotient of 0 counts as 1. Quotients whose logarithms are almost halfway have logarithms that are more
// than 2^-34 of them away from the middle between two floats, so that any log2 decides in the same way.
template <class In>
FP4KIT_DEVICE i32 nearest_exponent(float amax, float top) {
  const float s = round_to<In>(amax / top);
  const u32 bits = bits_of(s), significand = bits & 0x7FFFFFu;
  // If 2^-16 <= s < 2^16, rounding moves the logarithm by 2^-5 at most. log2(1.375) < 0.46, and log2(1.46875) > 0.55.
  if (bits - (111u << 23) < 32u << 23 && significand - 0x300000u > 0xC0000u)
    return static_cast<i32>(bits >> 23) - 127 + (significand > 0x300000u);
  const float log = round_to<In>(float32_log2(s > 0.0f ? s : 1.0f)), below = floorf(log);
  const float fraction = round_to<In>(log - below);
  const i32 exponent = static_cast<i32>(below);
  const bool is_up = fraction < round_to<In>(0.5f - 1e-6f) ? false : !(exponent & 1);
  return exponent + (fraction > round_to<In>(0.5f + 1e-6f) || is_up);
}

// Store the two candidates of a block with a finite amax > 0, the usual one first.
template <class F, class In>
FP4KIT_DEVICE void power_candidates(float amax, PowerCandidate (&candidates)[2]) {
  if constexpr (F::kHasNan) {
    const bool is_tiny = amax < kFltMin;
    const u32 bits = bits_of(is_tiny ? kFltMin : amax);
    candidates[0] = power_candidate<F, In>(maximum(log2_floor<In>(bits) - F::kEmax, -127));
    candidates[1] = power_candidate<F, In>(maximum(log2_ceil<In>(bits) - F::kEmax, -127));
  } else {
    candidates[0] = power_candidate<F, In>(nearest_exponent<In>(amax, 6.0f));
    candidates[1] = power_candidate<F, In>(nearest_exponent<In>(amax, 4.0f));
  }
}

// Return the squared error of an element with the magnitude a under a candidate.
template <class F, class In>
FP4KIT_DEVICE float squared_error(float a, PowerCandidate c) {
  const float difference = round_to<In>(a - round_to<In>(nearest_by_a_sum<F>(a * c.factor) * c.power));
  return round_to<In>(difference * difference);
}

// Return true if the first candidate certainly wins a block with this amax.
//
// Up to half a step above the largest value under candidate 0, its values contain those under candidate 1, which is not
// smaller, so that no error is larger. Rounding keeps this order. In float32, an element next to the middle of two
// values may get the farther one (nearest_by_a_sum). Scaled elements of other types have too few bits for that.
template <class F, class In>
FP4KIT_DEVICE bool first_cannot_lose(float amax, const PowerCandidate (&candidates)[2]) {
  constexpr float kHalfStep = 0.5f * static_cast<float>(1 << (F::kEmax - F::kMantissaBits));
  const bool is_below = sizeof(typename In::Bits) == 2 && amax * candidates[0].factor <= max_of<F>() + kHalfStep;
  return is_below | candidates[0].amax == candidates[1].amax;
}

// Return true if the second candidate wins, given the sums of the squared errors of `count` elements.
template <class F, class In>
FP4KIT_DEVICE bool second_wins(float first_sum, float second_sum, float count) {
  const float first = round_to<In>(first_sum / count), second = round_to<In>(second_sum / count);
  if constexpr (F::kHasNan) return is_finite(second) && (second < first || !is_finite(first));
  return !(second >= first);
}

// Return the amax of a block for which there is nothing to choose: NaN or infinite, or 0. E4M3 scales of infinite
// blocks are NaN. A block of zeros has the power 1 with E2M1 elements, and keeps 0 with E4M3 elements.
template <class F>
FP4KIT_DEVICE float amax_without_choice(float amax) {
  if (amax == 0.0f) return F::kHasNan ? 0.0f : 1.0f;
  return F::kHasNan ? nan_value() : amax;
}

constexpr i32 kCeilXConstants = 25, kCeilXFields = 256;  // 6, 6.25 to 12; exponent fields of float32

// Return the exponent of the scale of a block for constant number i.
template <class In>
FP4KIT_DEVICE i32 ceil_x_exponent(float amax, i32 i) {
  return msmodelslim_exponent<true, In>(amax, 6.0f + 0.25f * static_cast<float>(i));
}

// Return the amax for which the constant 7.25 gives the exponent that a block has for constant number i.
template <class In>
FP4KIT_DEVICE float ceil_x_amax(float amax, i32 i) {
  const float power = value_of_e8m0(static_cast<u32>(ceil_x_exponent<In>(amax, i) + 127));
  return is_nan(amax) ? amax : fmaxf(0.75f * power - 9.6e-7f, 0.0f) * 7.25f;
}

// Return the number of constants that give a block the exponent `exponent` or a larger one. They are the first ones.
template <class In>
FP4KIT_DEVICE i32 ceil_x_count(float amax, i32 exponent) {
  i32 count = 0;
  FP4KIT_UNROLL
  for (i32 bit = 4; bit >= 0; --bit) {
    const i32 larger = minimum(count + (1 << bit), kCeilXConstants);
    count = ceil_x_exponent<In>(amax, larger - 1) >= exponent ? larger : count;
  }
  return count;
}

// Add the errors of a block to bins (constants, fields): add(i, n) adds n to bin number i. The sums of the bins of
// constants 0 to i are the bins of constant i, because few constants change the exponent. The first `count` constants
// give the block the exponent `exponent`, and the last one gives it the exponent `last`. error_under(exponent) returns
// the sum of the squared errors of the block.
template <class In, class ErrorUnder, class Add>
FP4KIT_DEVICE void add_ceil_x_errors(float amax, i32 exponent, i32 count, i32 last, const ErrorUnder& error_under,
                                     const Add& add) {
  for (i32 i = 0, next = count; i < kCeilXConstants; --exponent) {
    const u32 bits = bits_of(error_under(exponent)), field = bits >> 23 & 0xFFu;
    const u64 significand = (bits & 0x7FFFFFu) + (field ? 0x800000u : 0u);
    add(i * kCeilXFields + static_cast<i32>(field), significand);
    if (next < kCeilXConstants) add(next * kCeilXFields + static_cast<i32>(field), 0u - significand);
    i = next;
    next = exponent - 1 <= last ? kCeilXConstants : ceil_x_count<In>(amax, exponent - 1);
  }
}
