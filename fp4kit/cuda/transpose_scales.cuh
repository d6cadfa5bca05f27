// The scales of one tile of codes -> those of the transposed tile: out(k, m) = in(m * kBlock, k / kBlock), both stored once
// per row of codes: in (rows, columns / kBlock), out (columns, rows / kBlock), both in one layout. Padding is set to zero.
#pragma once

#include "layout.cuh"
#include "memory.cuh"

struct ScaleMatrix {
  const u8* in;
  u8* out;
  i64 rows, columns;  // of codes
};

// A tile of kRows x kColumns codes has kTall x kWide blocks, whose scales lie transposed in shared memory: kWide lines of kTall.
template <ScaleLayout kLayout_, int kBlock_, int kRows, int kColumns_>
struct ScaleTile {
  static constexpr ScaleLayout kLayout = kLayout_;
  static constexpr int kBlock = kBlock_, kColumns = kColumns_, kTall = kRows / kBlock, kWide = kColumns / kBlock;
  static constexpr int kScales = kTall * kWide;
  static_assert(kTall % 4 == 0 && kTall <= 16 && kScales <= 256, "blocks of 16, 32 and 64");
};

template <int kBytes>
struct alignas(kBytes) ScaleRun { u32 w[kBytes / 4]; };

// What a thread reads of the tile at (row, column) of the codes; zero where there is nothing.
template <class T>
FP4KIT_DEVICE u8 load_scale(const ScaleMatrix& a, i64 row, i64 column, int thread) {
  const i64 r = row + thread / T::kWide * T::kBlock, c = column / T::kBlock + thread % T::kWide, columns = a.columns / T::kBlock;
  return thread < T::kScales && r < a.rows && c < columns ? a.in[scale_offset<T::kLayout>(r, c, columns)] : 0;
}

template <class T>
FP4KIT_DEVICE void put_scale(u8* tile, u8 scale, int thread) {
  if (thread < T::kScales) tile[thread % T::kWide * T::kTall + thread / T::kWide] = scale;
}

// Writes the tile to row k, column m of the output, by runs: kRun bytes of a row where scales are linear; else 16, which are 4
// columns of the 4 rows that 128x4 puts together, or of 4 rows of 8x4. Runs of the output begin at multiples of their size.
template <class T, int kRun>
FP4KIT_DEVICE void write_scale_runs(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  constexpr bool kLinear = T::kLayout == ScaleLayout::linear, kFarRows = T::kLayout == ScaleLayout::swizzled_128x4;
  constexpr int kBytes = !kLinear ? 16 : kRun < T::kTall ? kRun : T::kTall, kRuns = T::kColumns * T::kTall / kBytes;
  constexpr int kPerRow = T::kTall / kBytes, kWords = T::kTall / 4, kStep = kLinear ? 0 : kFarRows ? 32 : 1;
  const i64 columns = a.rows / T::kBlock;
#pragma unroll
  for (int t = thread; t < kRuns; t += threads) {
    // Run t is of this row, or of four that are kStep apart, and begins in this column.
    const int column = kLinear ? t % kPerRow * kBytes : kFarRows ? t / 32 % kWords * 4 : t / 2 % kWords * 4;
    const int row = kLinear ? t / kPerRow : kFarRows ? t / (32 * kWords) * 128 + t % 32 : t / (2 * kWords) * 8 + t % 2 * 4;
    if (k + (kFarRows ? row - t % 32 : row) >= a.columns || m + column >= columns) continue;
    ScaleRun<kBytes> run;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      const int word = (row + i * kStep) / T::kBlock * kWords + column / 4 + (kLinear ? i : 0);
      run.w[i] = reinterpret_cast<const u32*>(tile)[word];
    }
    *reinterpret_cast<ScaleRun<kBytes>*>(a.out + scale_offset<T::kLayout>(k + row, m + column, columns)) = run;
  }
}

// The same at any address, a byte at a time.
template <class T>
FP4KIT_DEVICE void write_scale_bytes(const ScaleMatrix& a, i64 k, i64 m, const u8* tile, int thread, int threads) {
  const i64 columns = a.rows / T::kBlock, padded_columns = T::kLayout == ScaleLayout::linear ? columns : (columns + 3) / 4 * 4;
  for (int i = thread; i < T::kColumns * T::kTall; i += threads) {
    const i64 row = k + i / T::kTall, column = m + i % T::kTall;
    if (row < padded_rows<T::kLayout>(a.columns) && column < padded_columns)
      a.out[scale_offset<T::kLayout>(row, column, columns)] = tile[i / T::kTall / T::kBlock * T::kTall + i % T::kTall];
  }
}
