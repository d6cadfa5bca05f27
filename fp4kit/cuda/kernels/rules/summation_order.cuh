// Sums of float32 in the order in which producers add. Their last bits depend on it. Twin of
// reference/summation_order.py.
#pragma once

#include "types.cuh"

// The sum of kCount terms in the order of PyTorch on a CPU. The terms come in vectors of eight lanes. Four partial sums
// take the vectors of each whole group of four in turn; the first partial sum takes the vectors after the last whole
// group. The result adds the four partial sums in order, and then the eight lanes. `Float` is float, or several floats
// side by side.
template <int kCount, class Float = float>
struct LaneSums {
  Float partial[4][8] = {};

  // Add vector number `vector`.
  FP4KIT_DEVICE_MEMBER void add(int vector, const Float (&terms)[8]) {
    const int sum_index = vector < kCount / 32 * 4 ? vector % 4 : 0;
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) partial[sum_index][j] = partial[sum_index][j] + terms[j];
  }

  // Return the sum of all vectors that were added.
  FP4KIT_DEVICE_MEMBER Float result() const {
    Float sum = {};
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) sum = sum + (partial[0][j] + partial[1][j] + partial[2][j] + partial[3][j]);
    return sum;
  }
};
