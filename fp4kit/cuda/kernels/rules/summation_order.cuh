// Sums of float32 in the order of producers, on which their last bits depend: reference/summation_order.py.
#pragma once

#include "types.cuh"

// The sum of kCount terms as PyTorch adds them on a CPU, which come in vectors of eight: four partial sums of whole
// groups of four vectors, the rest to the first; then these in their order, and then the eight lanes. Float: float, or
// several of them side by side.
template <int kCount, class Float = float>
struct LaneSums {
  Float partial[4][8] = {};

  FP4KIT_DEVICE_MEMBER void add(int vector, const Float (&terms)[8]) {
    const int sum_index = vector < kCount / 32 * 4 ? vector % 4 : 0;
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) partial[sum_index][j] = partial[sum_index][j] + terms[j];
  }

  FP4KIT_DEVICE_MEMBER Float result() const {
    Float sum = {};
    FP4KIT_UNROLL
    for (int j = 0; j < 8; ++j) sum = sum + (partial[0][j] + partial[1][j] + partial[2][j] + partial[3][j]);
    return sum;
  }
};
