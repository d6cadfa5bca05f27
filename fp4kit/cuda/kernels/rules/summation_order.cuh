// Sums of float32 numbers in the order in which producers add them. The last bits of a sum depend on the order. The
// struct gives the same results as reference/arith.py.
#pragma once

#include "types.cuh"

// The sum of kCount terms in the order in which PyTorch sums on a CPU. The terms are summed as vectors of eight lanes,
// in four partial sums: vector v is added to partial sum v % 4. Vectors after the last whole group of four are added to
// the first partial sum. At the end, the four partial sums are added in order, and then the eight lanes. `Float` is
// float, or a vector of floats for several sums at once.
template <int kCount, class Float = float>
struct LaneSums {
  Float partial[4][8] = {};

  // Add the eight terms of vector number `vector` (terms 8 * vector ... 8 * vector + 7), one to each lane.
  FP4KIT_DEVICE_MEMBER void add(int vector, const Float (&terms)[8]) {
    const int sum_index = vector < kCount / 32 * 4 ? vector % 4 : 0;
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) partial[sum_index][j] = partial[sum_index][j] + terms[j];
  }

  // Return the sum of all terms that were added, or 0 if there are none.
  FP4KIT_DEVICE_MEMBER Float result() const {
    Float sum = {};
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) sum = sum + (partial[0][j] + partial[1][j] + partial[2][j] + partial[3][j]);
    return sum;
  }
};

// The sum of terms in kLanes lanes, a power of two. Term i is added to lane i % kLanes, in order. At the end, the upper
// half of the lanes is added to the lower half, until one lane is left.
template <int kLanes>
struct HalvedSum {
  float lanes[kLanes] = {};

  // Add a term to lane `lane`.
  FP4KIT_DEVICE_MEMBER void add(int lane, float term) { lanes[lane] = lanes[lane] + term; }

  // Return the sum of all terms that were added. The lanes are overwritten, so call this function only once, at the
  // end.
  FP4KIT_DEVICE_MEMBER float result() {
    FP4KIT_UNROLL
    for (int half = kLanes / 2; half > 0; half /= 2) {
      FP4KIT_UNROLL
      for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    }
    return lanes[0];
  }
};
