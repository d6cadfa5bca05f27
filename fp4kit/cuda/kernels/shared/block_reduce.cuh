// Combine the amaxes or errors of the rows of a block. Each thread of a thread block holds one row of one block, and
// the values of the rows meet in shared memory.
#pragma once

#include "four_over_six.cuh"

constexpr int kTileWarps = kThreads / 32;

// Shared memory of the reduction. Blocks of one row need none. Thread row * kColumns + column holds row `row` of block
// `column`.
template <class R, bool kTall = (R::kBlockRows > 1)>
struct TileMemory {
  static constexpr int kColumns = kThreads;
};
template <class R>
struct TileMemory<R, true> {
  static constexpr int kRows = R::kBlockRows, kColumns = kThreads / R::kBlockRows;
  float values[2][kRows][kColumns];
  // For the fast path: the amax and two errors. There is a barrier before each is written again.
  float parts[3][kTileWarps][kColumns];
};

// An operation for reduce_rows: the larger of two magnitudes, with NaN above all.
struct LargerOf {
  FP4KIT_DEVICE float combine(float a, float b) { return float_of(maximum(bits_of(a), bits_of(b))); }
};
// An operation for reduce_rows: the sum of two floats.
struct SumOf {
  FP4KIT_DEVICE float combine(float a, float b) { return a + b; }
};

// Combine each value over all rows of a block, in any order, and return the results to all threads of the thread block.
// Uses tile.parts[kPart] and the following ones. A warp has neighboring rows, or part of one row if a row has more than
// 32 blocks.
template <class R, class Operation, int kPart, int kCount>
FP4KIT_DEVICE void reduce_rows(TileMemory<R>& tile, float (&values)[kCount], int column) {
  constexpr int kColumns = TileMemory<R>::kColumns, kWarps = kColumns > 32 ? kColumns / 32 : 1;  // kWarps: per row
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = kWarps > 1 ? column / 32 : 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int distance = kColumns; distance < 32; distance *= 2)
      values[k] = Operation::combine(values[k], float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(values[k]), distance)));
    if (lane < kColumns) tile.parts[kPart + k][warp][column] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = tile.parts[kPart + k][first][column];
#pragma unroll
    for (int w = kWarps; w < kTileWarps; w += kWarps)
      values[k] = Operation::combine(values[k], tile.parts[kPart + k][first + w][column]);
  }
}

// Return the amax of a block to all threads of the thread block. `amax` is that of this thread's row.
template <class R>
FP4KIT_DEVICE float amax_of_rows(TileMemory<R>& tile, float amax, int row, int column) {
  if constexpr (R::kBlockRows == 1) {
    return amax;
  } else {
    tile.values[0][row][column] = amax;
    __syncthreads();
    float result = 0.0f;
    for (int r = 0; r < R::kBlockRows; ++r) result = larger_of_rows<R>(result, tile.values[0][r][column]);
    __syncthreads();
    return result;
  }
}

// Add both errors over the rows of a block as a tree (row i and i + 8, then + 4, + 2, + 1) and return the sums to all
// threads of the thread block.
template <class R>
FP4KIT_DEVICE void sum_rows(TileMemory<R>& tile, float (&error)[2], int row, int column) {
  if constexpr (R::kBlockRows > 1) {
    tile.values[0][row][column] = error[0];
    tile.values[1][row][column] = error[1];
    __syncthreads();
    for (int half = R::kBlockRows / 2; half > 0; half /= 2) {
      if (row < half) {
        for (int k = 0; k < 2; ++k)
          tile.values[k][row][column] = tile.values[k][row][column] + tile.values[k][row + half][column];
      }
      __syncthreads();
    }
    for (int k = 0; k < 2; ++k) error[k] = tile.values[k][0][column];
    __syncthreads();
  }
}
