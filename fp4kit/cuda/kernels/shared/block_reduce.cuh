// Functions that combine the amaxes (largest magnitudes) or errors of the rows of a block of elements, which has
// R::kBlockRows rows in the recipe R. A tile is R::kBlockRows rows of TileMemory<R>::kColumns blocks side by side. Each
// thread of a thread block handles one row of one block of the tile, and the threads exchange the values of the rows in
// shared memory (`tile`).
#pragma once

#include "four_over_six.cuh"

constexpr int kTileWarps = kThreads / 32;

// The shared memory for combining rows. Blocks of one row need none. Thread row * kColumns + column handles row `row`
// of block `column` of the tile.
template <class R, bool kTall = (R::kBlockRows > 1)>
struct TileMemory {
  static constexpr int kColumns = kThreads;
};
template <class R>
struct TileMemory<R, true> {
  static constexpr int kRows = R::kBlockRows, kColumns = kThreads / R::kBlockRows;
  float values[2][kRows][kColumns];
  // The partial results of the fast path. Each warp stores one amax and two errors per block here. Threads synchronize
  // before an entry is written again.
  float parts[3][kTileWarps][kColumns];
};

// An operation for reduce_rows: `combine` returns the larger of two magnitudes. Neither may have a sign bit. NaN counts
// as larger than all numbers.
struct LargerOf {
  FP4KIT_DEVICE float combine(float a, float b) { return float_of(maximum(bits_of(a), bits_of(b))); }
};
// An operation for reduce_rows: `combine` returns the sum of two floats.
struct SumOf {
  FP4KIT_DEVICE float combine(float a, float b) { return a + b; }
};

// Combine each of kCount values over all rows of a block by Operation (LargerOf or SumOf), in any order. Each thread
// passes the values of its row in `values`, and finds the results for its block there afterwards. `column` is the index
// of the block in the tile. All threads of the thread block must call this function. It overwrites tile.parts[kPart]
// and the following kCount - 1 parts.
//
// A warp holds neighboring rows of the tile. If a row has more than 32 blocks, a warp holds a part of one row.
template <class R, class Operation, int kPart, int kCount>
FP4KIT_DEVICE void reduce_rows(TileMemory<R>& tile, float (&values)[kCount], int column) {
  constexpr int kColumns = TileMemory<R>::kColumns,
                kWarps = kColumns > 32 ? kColumns / 32 : 1;  // kWarps: warps per row of the tile
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

// Return the amax of a block of elements to each thread that handles a row of the block. `amax` is the amax of this
// thread's row, which is row `row` of block `column` of the tile. If the amax of a row is NaN, the result is NaN only
// if NaN propagates in the recipe (larger_of_rows). If blocks have one row, return `amax`. Otherwise all threads of the
// thread block must call this function.
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

// Sum two errors over the rows of a block. Each thread passes the two errors of its row in `error`, and the sums over
// all rows of its block replace them. This thread handles row `row` of block `column` of the tile. If blocks have one
// row, do nothing. All threads of the thread block must call this function.
//
// Rows are added as a tree: first rows that are kBlockRows / 2 apart, then rows at half that distance, and so on, down
// to neighboring rows.
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
