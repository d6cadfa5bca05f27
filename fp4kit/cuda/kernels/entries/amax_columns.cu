// amax_columns: find the largest magnitude (the amax) of each column of a stack of matrices, without transposing them.
// Magnitudes are compared as float32 bits, with NaN above infinity, so a NaN element makes the amax NaN. `a` holds the
// kernel's arguments. kAligned is true if all loads of 16 bytes are aligned.
//
// A tile is a.tile_rows rows of some neighboring columns. Each row of a tile is loaded by `lanes` neighboring threads:
// 16 bytes per thread if kAligned, otherwise one element. The other threads of the thread block load the next rows.
#include "runs.cuh"

constexpr int kThreadColumns = kAligned ? 16 / sizeof(Input::Bits) : 1;  // number of columns per thread

// The arguments of amax_columns_kernel.
struct AmaxColumnsArguments {
  const void* x;  // matrices x rows x columns elements, contiguous
  u32* amax;      // matrices x columns amaxes, as bits of float32, set to 0 before
  i64 matrices, rows, columns;
  i64 lanes;      // threads per row of a tile: a power of two that divides kThreads
  i64 tile_rows;  // rows of a tile; less than 2^32
};

// For each of kCount neighboring columns j, raise largest[j] to the largest magnitude in the column: store the larger
// of the two, as float32 bits. NaN counts as larger than infinity. The columns have `rows` rows, which are `step`
// elements apart; the first row begins at x. If `rows` is 0, nothing changes.
template <class In, int kCount>
FP4KIT_DEVICE void largest_of_columns(const typename In::Bits* x, u32 rows, i64 step, u32 (&largest)[kCount]) {
#pragma unroll 4
  for (u32 i = 0; i < rows; ++i, x += step) {
    float values[kCount];
    if constexpr (kCount == 1) {
      values[0] = In::widen(*x);
    } else {
      load_run<In, kCount, true>(x, values);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest[j] = maximum(largest[j], bits_of(values[j]) & 0x7FFFFFFFu);
  }
}

// Find the amax of each column of each matrix in a.x, and raise the column's element of a.amax to it: store the larger
// of the two, as float32 bits. The caller sets a.amax to 0 before. A NaN element makes the amax NaN. The kernel is
// launched for fp4kit.amax without a recipe if the reduced axes are consecutive and do not include the last axis. It is
// also launched for blocks of several rows with float32 scales. A thread block takes one tile at a time. Launch with
// any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) amax_columns_kernel(AmaxColumnsArguments a) {
  __shared__ u32 parts[kThreads * kThreadColumns];
  const u32 lanes = static_cast<u32>(a.lanes), tile_threads_down = kThreads / lanes, thread_row = threadIdx.x / lanes,
            tile_columns = lanes * kThreadColumns;
  const i64 tiles_across = (a.columns + tile_columns - 1) / tile_columns,
            tiles_down = (a.rows + a.tile_rows - 1) / a.tile_rows;
  const i64 tiles = a.matrices * tiles_down * tiles_across;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 tile_row = quotient(tile, tiles_across, tiles), matrix = quotient(tile_row, tiles_down, tiles);
    const i64 start = (tile - tile_row * tiles_across) * tile_columns,
              top = (tile_row - matrix * tiles_down) * a.tile_rows;
    const u32 rows = static_cast<u32>(minimum(a.tile_rows, a.rows - top));
    const i64 column = start + threadIdx.x % lanes * kThreadColumns;
    u32 largest[kThreadColumns] = {};
    if (column < a.columns && thread_row < rows) {
      const Input::Bits* x =
          static_cast<const Input::Bits*>(a.x) + (matrix * a.rows + top + thread_row) * a.columns + column;
      largest_of_columns<Input>(x, (rows - thread_row + tile_threads_down - 1) / tile_threads_down,
                                tile_threads_down * a.columns, largest);
    }
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) parts[threadIdx.x * kThreadColumns + j] = largest[j];
    __syncthreads();
    for (u32 i = threadIdx.x; i < tile_columns; i += kThreads) {
      u32 column_largest = 0u;
      for (u32 s = 0; s < tile_threads_down; ++s) column_largest = maximum(column_largest, parts[s * tile_columns + i]);
      if (start + i < a.columns) atomicMax(a.amax + matrix * a.columns + start + i, column_largest);
    }
    __syncthreads();
  }
}
