// Rounding of magnitudes to element values as the producers for Ascend NPUs do it.
#pragma once

#include "codec.cuh"

// Return a >= 0 rounded to the values of the format F: floor(a / step + 0.5) * step, at most max_of<F>(). The sum is
// rounded to T; a is a number of T. NaN gives the largest value.
template <class F, class T = Float32>
FP4KIT_DEVICE float nearest_by_a_sum(float a) {
  constexpr u32 kMantissa = static_cast<u32>(F::kMantissaBits) << 23, kLeast = static_cast<u32>(F::kEmin + 127) << 23;
  if (sizeof(typename T::Bits) == 2) a = with_rounded_half<F, T>(a);
  const u32 bits = minimum(bits_of(a), bits_of(max_of<F>()));
  const u32 power = maximum(bits, kLeast) & kInfinityBits;
  const i32 steps = static_cast<i32>(float_of(bits) * float_of((254u << 23) + kMantissa - power) + 0.5f);
  return static_cast<float>(steps) * float_of(power - kMantissa);
}
