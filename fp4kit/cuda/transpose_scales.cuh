// The scales of one tile of codes -> those of the transposed tile: out(k, m) = in(m * kBlock, k / kBlock), both stored once per row of
// codes, in (rows, columns / kBlock), out (columns, rows / kBlock), both in layout kLayout; padding is set to zero.
#pragma once

#include "layout.cuh"
#include "memory.cuh"

struct ScaleMatrix {
  const u8* in;
  u8* out;
  i64 rows, columns;  // of codes
};

// Scales of a tile of kRows x kColumns codes: kTall x kWide blocks. A thread reads one of them.
template <int kBlock, int kRows, int kColumns>
struct ScaleTile {
  static constexpr int kTall = kRows / kBlock, kWide = kColumns / kBlock;
  static_assert(kTall % 4 == 0 && kTall <= 16 && kTall * kWide <= 256, "blocks of 16, 32 and 64");
};

// Output scales that lie together and hold kBytes.
template <int kBytes>
struct alignas(kBytes) ScaleRun { u32 w[kBytes / 4]; };

// What thread `thread` reads of the tile at (row, column) of the codes; zero where there is none.
template <ScaleLayout kLayout, int kBlock, class T>
FP4KIT_DEVICE u8 load_scale(const ScaleMatrix& a, i64 row, i64 column, int thread) {
  const i64 r = row + thread / T::kWide * kBlock, c = column / kBlock + thread % T::kWide, columns = a.columns / kBlock;
  return thread < T::kTall * T::kWide && r < a.rows && c < columns ? a.in[scale_offset<kLayout>(r, c, columns)] : 0;
}

// Puts it into the transposed tile: kWide lines of kTall.
template <class T>
FP4KIT_DEVICE void put_scale(u8* tile, u8 scale, int thread) {
  if (thread < T::kTall * T::kWide) tile[thread % T::kWide * T::kTall + thread / T::kWide] = scale;
}

// Writes the tile at row k, column m of the output, by runs: kRun bytes of a row where scales are linear; else 16: 4 columns of the 4 rows that
// 128x4 puts together, or of 4 rows of 8x4. Runs of the output begin at multiples of their size.
template <ScaleLayout kLayout, int kBlock, int kColumns, int kRun, class T>
FP4KIT_DEVICE void write_scale_runs(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  constexpr bool kLinear = kLayout == ScaleLayout::linear, kFarRows = kLayout == ScaleLayout::swizzled_128x4;
  constexpr int kBytes = kLinear && kRun > T::kTall ? T::kTall : kRun, kRuns = kColumns * T::kTall / kBytes, kWords = T::kTall / 4;
  const i64 columns = a.rows / kBlock;
#pragma unroll
  for (int t = thread; t < kRuns; t += threads) {
    // Run t is of this row, or of this and those kStep apart, from this column on.
    constexpr int kStep = kLinear ? 0 : kFarRows ? 32 : 1, kPerRow = T::kTall / kBytes;
    const int column = kLinear ? t % kPerRow * kBytes : kFarRows ? t / 32 % kWords * 4 : t / 2 % kWords * 4;
    const int row = kLinear ? t / kPerRow : kFarRows ? t / (32 * kWords) * 128 + t % 32 : t / (2 * kWords) * 8 + t % 2 * 4;
    if (k + (kFarRows ? row - t % 32 : row) >= a.columns || m + column >= columns) continue;
    ScaleRun<kBytes> run;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      run.w[i] = reinterpret_cast<const u32*>(tile)[(row + i * kStep) / kBlock * kWords + column / 4 + (kLinear ? i : 0)];
    *reinterpret_cast<ScaleRun<kBytes>*>(a.out + scale_offset<kLayout>(k + row, m + column, columns)) = run;
  }
}

// The same at any address, a byte at a time.
template <ScaleLayout kLayout, int kBlock, int kColumns, class T>
FP4KIT_DEVICE void write_scale_bytes(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  const i64 columns = a.rows / kBlock, padded_columns = kLayout == ScaleLayout::linear ? columns : (columns + 3) / 4 * 4;
  for (int i = thread; i < kColumns * T::kTall; i += threads) {
    const int row = i / T::kTall, column = i % T::kTall;
    if (k + row < padded_rows<kLayout>(a.columns) && m + column < padded_columns)
      a.out[scale_offset<kLayout>(k + row, m + column, columns)] = tile[row / kBlock * T::kTall + column];
  }
}
