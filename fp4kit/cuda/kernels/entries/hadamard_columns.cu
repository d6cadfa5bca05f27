// hadamard_columns: Hadamard transforms of blocks along an axis that is not the last one in memory. The axes of x are
// (outer, length, inner), and blocks of kSize elements lie along the middle axis. A thread block takes one tile at a
// time. A tile is kWide neighboring blocks, which are its columns; its rows lie along the inner axis. `a` holds the
// kernel's arguments: x, out, the signs and the lengths of the axes. If kHasSigns, elements are multiplied by their
// signs before the transform, or after it if kIsInverse.
//
// The results are bit-identical to the results of reference/stochastic.py. rotate.cu transforms arrays at other
// addresses.
//
// A thread first holds 16 neighboring elements of each of kColumns blocks in registers, and adds and subtracts them.
// After an exchange through shared memory, a thread holds elements that are 16 apart, and completes the transform.
#include "rotate.cuh"

// The arguments of hadamard_columns_kernel.
struct HadamardColumnsArguments {
  const void* x;
  void* out;
  const u8* signs;           // one per position along the middle axis, 1 if it is negative; read only if kHasSigns
  i64 outer, length, inner;  // length is a multiple of kSize, and inner one of kColumns
};

using Bits = Input::Bits;
constexpr int kTile = 8192, kWide = kTile / kSize;      // the elements of a tile, and the elements of its rows
constexpr int kRows = 16, kColumns = 4 / sizeof(Bits);  // rows and columns of a thread before the exchange
constexpr int kLastRows = kSize / kRows;                // rows of a thread after the exchange
constexpr int kLastColumns = kLastRows > 16 ? 1 : kColumns;

// kCount neighboring elements of a row. Stored holds them as they are in memory, and Widened as float32.
template <int kCount>
struct alignas(kCount * sizeof(Bits)) Stored {
  Bits elements[kCount];
};
template <int kCount>
struct alignas(kCount * sizeof(float)) Widened {
  float values[kCount];
};

// The elements of a tile in shared memory, as float32. The element at (row, column) has the index place_of(row,
// column). If blocks have 16 elements, shared memory is not used.
struct alignas(8) ColumnTileElements {
  float values[kLastRows == 1 ? 1 : kTile + kLastRows * kWide];
};

// A tile: the index of its blocks along the middle axis, the index of its first element in a.x, and the number of
// elements per row, which is less than kWide at the end of the inner axis.
struct ColumnTile {
  i64 block, first;
  int wide;
};

// Return the number of tiles into which the array a.x is divided.
FP4KIT_DEVICE i64 tile_count(const HadamardColumnsArguments& a) {
  return a.outer * (a.length / kSize) * ((a.inner + kWide - 1) / kWide);
}

// Return the tile with number `index`, for indices below tile_count. Tiles are numbered along the inner axis, then
// along the middle axis, then along the outer axis.
FP4KIT_DEVICE ColumnTile tile_at(const HadamardColumnsArguments& a, i64 index) {
  const i64 across = (a.inner + kWide - 1) / kWide, column = index % across * kWide, position = index / across;
  return {position % (a.length / kSize), position * kSize * a.inner + column,
          static_cast<int>(minimum<i64>(a.inner - column, kWide))};
}

// Return the index in shared memory of the element at (row, column) of a tile. The gap after every 16 rows avoids bank
// conflicts.
FP4KIT_DEVICE int place_of(int row, int column) {
  return (row + row / kRows) * kWide + column;
}

// Return the sign of row `row` of a tile, as bits to combine with float32 elements by an exclusive or: 2^31, which
// negates them, if a.signs is 1 for this row, and otherwise 0. If there are no signs (kHasSigns is false), the result
// is 0.
FP4KIT_DEVICE u32 sign_bit(const HadamardColumnsArguments& a, const ColumnTile& tile, int row) {
  return kHasSigns ? static_cast<u32>(a.signs[tile.block * kSize + row]) << 31 : 0u;
}

// Replace pairs of rows of y by their sums and differences, in place: first rows that are 1 apart, then rows that are
// 2, 4, ..., kCount / 2 apart. This is a Hadamard transform of kCount rows without the final factor kFactor.
template <int kCount, int kAcross>
FP4KIT_DEVICE void transform(Widened<kAcross> (&y)[kCount]) {
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        if (i & distance) continue;
        const float low = y[i].values[j], high = y[i + distance].values[j];
        y[i].values[j] = low + high;
        y[i + distance].values[j] = low - high;
      }
    }
  }
}

// Store the results y of a thread in a.out, in row `row` of the tile, starting at column `column`. First multiply them
// by kFactor and, if kIsInverse, by the sign of the row. Then round them to the type of the elements; NaN becomes the
// positive quiet NaN.
template <int kAcross>
FP4KIT_DEVICE void store_row(const HadamardColumnsArguments& a, const ColumnTile& tile, int row, int column,
                             const Widened<kAcross>& y) {
  const u32 sign = kIsInverse ? sign_bit(a, tile, row) : 0u;
  Stored<kAcross> stored;
#pragma unroll
  for (int j = 0; j < kAcross; ++j) {
    stored.elements[j] = stored_rotation<Input>(float_of(bits_of(y.values[j] * kFactor) ^ sign));
  }
  *reinterpret_cast<Stored<kAcross>*>(static_cast<Bits*>(a.out) + tile.first + row * a.inner + column) = stored;
}

// Do the first part of the transform of a tile: each thread loads 16 neighboring rows of some columns from a.x,
// multiplies them by their signs unless kIsInverse, and adds and subtracts them. The results go to `memory` for
// transform_rest. If a block has only 16 elements, they are final and go to a.out. Columns beyond the end of the inner
// axis are left out.
FP4KIT_DEVICE void transform_neighbors(const HadamardColumnsArguments& a, const ColumnTile& tile, float* memory) {
  for (int unit = threadIdx.x; unit < kTile / kRows / kColumns; unit += kThreads) {
    const int column = unit % (kWide / kColumns) * kColumns, first = unit / (kWide / kColumns) * kRows;
    if (column >= tile.wide) continue;
    const Bits* x = static_cast<const Bits*>(a.x) + tile.first + first * a.inner + column;
    Widened<kColumns> y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Stored<kColumns> stored = *reinterpret_cast<const Stored<kColumns>*>(x + i * a.inner);
      const u32 sign = kIsInverse ? 0u : sign_bit(a, tile, first + i);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) y[i].values[j] = float_of(bits_of(Input::widen(stored.elements[j])) ^ sign);
    }
    transform(y);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kLastRows == 1) {
        store_row(a, tile, first + i, column, y[i]);
      } else {
        *reinterpret_cast<Widened<kColumns>*>(memory + place_of(first + i, column)) = y[i];
      }
    }
  }
}

// Do the second part of the transform of a tile: each thread loads rows that are 16 apart from `memory`, where
// transform_neighbors stored them, and adds and subtracts them. The results are final and go to a.out (store_row).
// Columns beyond the end of the inner axis are left out. Threads must synchronize before the call.
FP4KIT_DEVICE void transform_rest(const HadamardColumnsArguments& a, const ColumnTile& tile, const float* memory) {
  for (int unit = threadIdx.x; unit < kTile / kLastRows / kLastColumns; unit += kThreads) {
    const int column = unit % (kWide / kLastColumns) * kLastColumns, first = unit / (kWide / kLastColumns);
    if (column >= tile.wide) continue;
    Widened<kLastColumns> y[kLastRows];
#pragma unroll
    for (int i = 0; i < kLastRows; ++i) {
      y[i] = *reinterpret_cast<const Widened<kLastColumns>*>(memory + place_of(first + i * kRows, column));
    }
    transform(y);
#pragma unroll
    for (int i = 0; i < kLastRows; ++i) store_row(a, tile, first + i * kRows, column, y[i]);
  }
}

// Transform the blocks of a.x by a Hadamard transform with the factor kFactor, and store the results in a.out. The
// kernel is launched for fp4kit.hadamard if blocks lie along an axis other than the last one. The addresses of both
// arrays must be multiples of 4 bytes. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) hadamard_columns_kernel(HadamardColumnsArguments a) {
  __shared__ ColumnTileElements memory[1];
  const i64 count = tile_count(a);
  for (i64 index = blockIdx.x; index < count; index += gridDim.x) {
    const ColumnTile tile = tile_at(a, index);
    transform_neighbors(a, tile, memory->values);
    if constexpr (kLastRows > 1) {
      __syncthreads();
      transform_rest(a, tile, memory->values);
      __syncthreads();
    }
  }
}
