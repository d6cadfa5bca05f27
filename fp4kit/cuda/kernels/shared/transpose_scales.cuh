// Functions that transpose the scales of a tile of codes: out(k, m) = in(m * kBlock, k / kBlock). kBlock is the number
// of rows and columns of a block of codes, which has one scale. Both matrices of scales store a scale once per row of
// codes. `in` is (rows, columns / kBlock), and `out` is (columns, rows / kBlock), in the same layout. Padding is set to
// zero. T is the ScaleTile (the sizes of a tile).
#pragma once

#include "scale_layout.cuh"
#include "runs.cuh"
#include "transpose_square.cuh"

// A matrix of scales and its transpose.
struct ScaleMatrix {
  const u8* in;
  u8* out;
  i64 rows, columns;  // rows and columns are counted in codes
};

// The kTall x kWide scales of a tile of kRows x kColumns codes. They are kept transposed in shared memory, as kWide
// lines of kTall scales.
template <ScaleLayout kLayout_, int kBlock_, int kRows, int kColumns_>
struct ScaleTile {
  static constexpr ScaleLayout kLayout = kLayout_;
  static constexpr int kBlock = kBlock_, kColumns = kColumns_, kTall = kRows / kBlock, kWide = kColumns / kBlock;
  static constexpr int kScales = kTall * kWide;
  static constexpr int kPitch = kTall + (kTall > 16 ? 4 : 0);  // long lines are padded against bank conflicts
  static_assert(kTall % 4 == 0, "blocks of 16, 32 and 64");
};

// Return scale number `thread` of the tile whose first code is at (row, column) of the matrix of codes. Scales of a
// tile are numbered along its rows. Return 0 if the tile has no scale with this number, or if it is outside of the
// matrix.
template <class T>
FP4KIT_DEVICE u8 load_scale(const ScaleMatrix& a, i64 row, i64 column, int thread) {
  const i64 r = row + thread / T::kWide * T::kBlock, c = column / T::kBlock + thread % T::kWide,
            columns = a.columns / T::kBlock;
  return thread < T::kScales && r < a.rows && c < columns ? a.in[scale_offset<T::kLayout>(r, c, columns)] : 0;
}

// Store scale number `thread` of a tile, the result of load_scale, at its transposed position in `tile`, which is in
// shared memory. Do nothing if the tile has no scale with this number.
template <class T>
FP4KIT_DEVICE void put_scale(u8* tile, u8 scale, int thread) {
  if (thread < T::kScales) tile[thread % T::kWide * T::kPitch + thread / T::kWide] = scale;
}

// Store a transposed tile of scales, `tile`, at row k, column m of a swizzled a.out, 16 bytes at a time. The padding of
// scale tiles that have any scale of the matrix is stored too, as zeros; other scale tiles are left out. `threads`
// threads share the work, and `thread` is the number of this thread. 16 bytes are four columns of four rows. The four
// rows are 32 apart in 128x4, and neighbors in 8x4.
template <class T>
FP4KIT_DEVICE void write_scale_chunks(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  constexpr bool kFarRows = T::kLayout == ScaleLayout::swizzled_128x4;
  constexpr int kWords = T::kTall / 4, kStep = kFarRows ? 32 : 1;
  const i64 columns = a.rows / T::kBlock;
#pragma unroll
  for (int t = thread; t < T::kColumns / 4 * kWords; t += threads) {
    const int word = kFarRows ? t / 32 % kWords : t / 2 % kWords;
    const int row = kFarRows ? t / (32 * kWords) * 128 + t % 32 : t / (2 * kWords) * 8 + t % 2 * 4;
    if (k + (kFarRows ? row - t % 32 : row) >= a.columns || m + 4 * word >= columns) continue;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      chunk.w[i] = reinterpret_cast<const u32*>(tile + (row + i * kStep) / T::kBlock * T::kPitch)[word];
    *reinterpret_cast<Chunk*>(a.out + scale_offset<T::kLayout>(k + row, m + 4 * word, columns)) = chunk;
  }
}

// Store a transposed tile of scales, `tile`, at row k, column m of an a.out with any layout and alignment, one byte at
// a time. Scales outside of the matrix are left out, except that the padding of swizzled layouts is stored as zeros.
// `threads` threads share the work, and `thread` is the number of this thread.
template <class T>
FP4KIT_DEVICE void write_scale_bytes(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  const i64 columns = a.rows / T::kBlock,
            padded_columns = T::kLayout == ScaleLayout::linear ? columns : (columns + 3) / 4 * 4;
  for (int i = thread; i < T::kColumns * T::kTall; i += threads) {
    const i64 row = k + i / T::kTall, column = m + i % T::kTall;
    if (row < padded_rows<T::kLayout>(a.columns) && column < padded_columns)
      a.out[scale_offset<T::kLayout>(row, column, columns)] = tile[i / T::kTall / T::kBlock * T::kPitch + i % T::kTall];
  }
}

// A tile of 2048 blocks, for transposing scales in layout 8x4 separately from the codes. More scales are contiguous in
// memory in this tile than in a tile of codes.
template <ScaleLayout kLayout, int kBlock>
using LargeScaleTile = ScaleTile<kLayout, kBlock, 4 * kBlock * kBlock, 512>;

// Load the large tile of scales (LargeScaleTile) whose first code is at (row, column) of the matrix of codes, transpose
// it in shared memory, and store it in a.out, whose layout must be swizzled (write_scale_chunks). `thread` is the index
// of this thread in the thread block. All kThreads threads of the thread block must call this function.
template <class T>
FP4KIT_DEVICE void transpose_scale_tile(const ScaleMatrix& a, i64 row, i64 column, int thread) {
  constexpr int kEach = T::kScales / kThreads;
  __shared__ u32 words[T::kWide * T::kPitch / 4];
  u8* tile = reinterpret_cast<u8*>(words);
  u8 scales[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) scales[i] = load_scale<T>(a, row, column, thread + i * kThreads);
#pragma unroll
  for (int i = 0; i < kEach; ++i) put_scale<T>(tile, scales[i], thread + i * kThreads);
  __syncthreads();
  write_scale_chunks<T>(a, column, row / T::kBlock, tile, thread, kThreads);
  __syncthreads();
}

// Transpose the linear scales of 4 x 4 blocks, from a.in to a.out: block rows 4 i ... 4 i + 3 and block columns 4 j ...
// 4 j + 3. One thread does this alone. Each scale is stored kBlock times, once per row of codes of its block. The rows
// of both matrices of scales must be whole words. No tile in shared memory is used: it would store only 16 bytes of a
// row at a time and fill no sector.
template <int kBlock>
FP4KIT_DEVICE void transpose_linear_scales(const ScaleMatrix& a, i64 i, i64 j) {
  const i64 in_columns = a.columns / kBlock, out_columns = a.rows / kBlock;
  const u8* in = a.in + 4 * i * kBlock * in_columns + 4 * j;
  u8* out = a.out + 4 * j * kBlock * out_columns + 4 * i;
  u32 words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) words[q] = *reinterpret_cast<const u32*>(in + q * kBlock * in_columns);
  transpose_square(words);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll 4
    for (int t = 0; t < kBlock; ++t, out += out_columns) *reinterpret_cast<u32*>(out) = words[q];
  }
}
