// The randomized Hadamard transform of runs of 16 elements. Element i of a transformed run is 1/4 of the sum of the 16
// elements, each with the sign of row i of a Hadamard matrix, after some elements were negated by `mask`. In: the type
// of the elements. Bits: the unsigned integer type of an element's bits. kLanes = 16 runs are transformed together.
// They are stored by element, as [element][run], so loops over runs vectorize.
//
// The results have the bits of reference/stochastic.py.
#pragma once

#include "input_types.h"

// Return the bits of the double x, rounded to nearest even to the type In in a single rounding. x must not be NaN.
template <class In>
static __forceinline__ typename Input<In>::Bits narrow_double(double x) {
  if constexpr (sizeof(typename Input<In>::Bits) == 4)
    return bits_of(static_cast<float>(x));
  else
    return Input<In>::narrow(round_to_odd(x));
}

// Replace a[run] by a[run] + b[run], and b[run] by a[run] - b[run], for each of kLanes runs.
static __forceinline__ void sum_and_difference(double* __restrict a, double* __restrict b) {
  for (int run = 0; run < kLanes; ++run) {
    const double low = a[run], high = b[run];
    a[run] = low + high;
    b[run] = low - high;
  }
}

// Transform kLanes runs in place. x[i][run] holds the bits of element i of a run. If bit i of `mask` is set, element i
// of every run is negated first. If any element of a run is NaN or infinite, all elements of this run become NaN.
template <class In, class Bits>
static void hadamard_lanes(Bits (&x)[16][kLanes], u32 mask) {
  alignas(64) double y[16][kLanes];
  Bits largest[kLanes] = {};
  for (int i = 0; i < 16; ++i) {
    const double sign = mask >> i & 1u ? -1.0 : 1.0;
    for (int run = 0; run < kLanes; ++run) {
      const Bits bits = x[i][run], magnitude = bits & Input<In>::kMagnitude;
      largest[run] = magnitude > largest[run] ? magnitude : largest[run];
      y[i][run] = static_cast<double>(Input<In>::value(bits)) * sign;
    }
  }
  for (int distance = 1; distance < 16; distance *= 2)
    for (int i = 0; i < 16; ++i)
      if (!(i & distance)) sum_and_difference(y[i], y[i + distance]);
  for (int i = 0; i < 16; ++i)
    for (int run = 0; run < kLanes; ++run) {
      const Bits value = narrow_double<In>(y[i][run] * 0.25);
      x[i][run] = largest[run] < Input<In>::kInfinity ? value : Input<In>::kMagnitude;
    }
}

// Transpose `from` and store the result in `to`: to[j][i] = from[i][j]. Both are 16 x 16, because kLanes is 16, and
// they must not overlap.
template <class Bits>
static __forceinline__ void transpose_lanes(const Bits (&from)[16][kLanes], Bits (&to)[16][kLanes]) {
  for (int i = 0; i < 16; i += kSide<Bits>)
    for (int j = 0; j < kLanes; j += kSide<Bits>) transpose_square(&from[i][j], kLanes, &to[j][i], kLanes);
}

// Transform `runs` contiguous runs of 16 elements in place. x holds the bits of the elements. If bit i of `mask` is
// set, element i of every run is negated first. If any element of a run is NaN or infinite, all elements of this run
// become NaN.
template <class In, class Bits>
static void hadamard_runs(Bits* x, i64 runs, u32 mask) {
  for (i64 first = 0; first < runs; first += kLanes) {
    alignas(64) Bits by_run[16][kLanes] = {}, by_element[16][kLanes];
    const size_t bytes = static_cast<size_t>(minimum<i64>(runs - first, kLanes)) * 16 * sizeof(Bits);
    std::memcpy(by_run, x + first * 16, bytes);
    transpose_lanes(by_run, by_element);
    hadamard_lanes<In>(by_element, mask);
    transpose_lanes(by_element, by_run);
    std::memcpy(x + first * 16, by_run, bytes);
  }
}
