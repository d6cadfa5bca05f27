// Patches of a matrix, a thread each: where they lie, their columns as runs, blocks of them, and the staging of codes along columns.
#pragma once

#include "quantize.cuh"
#include "square.cuh"

struct PatchArguments {
  const void* x;                   // rows x columns elements, contiguous
  u8 *packed, *scales;             // along rows (null: not wanted)
  u8 *column_packed, *column_scales;  // along columns: columns x rows (null: not wanted)
  void* values;                    // fake_quantize of square blocks: elements of x's type (null otherwise)
  const float* tensor_amax;        // one (null without)
  float *tensor_scale, *column_tensor_scale;
  i64 rows, columns;
};

constexpr int kSide = 8;  // rows of a patch

template <class R, class In>
struct Patches {
  static constexpr int kSpan = 32 / sizeof(typename In::Bits);  // columns of a patch: 32 bytes
  static constexpr int kTall = R::kBlock / kSide;               // patches above each other in a warp: the rows of a block
  static constexpr int kWide = 32 / kTall;                      // patches beside each other
  static constexpr int kAcross = R::kBlock / kSpan;             // of those, the patches of a block that spans columns
  static constexpr int kWarps = kThreads / 32;                  // above each other
  static constexpr int kRows = kWarps * kTall * kSide, kColumns = kWide * kSpan;  // of a tile
  static constexpr int kBits = R::Element::kStoredBits;
  static constexpr int kRowWords = kSpan * kBits / 32, kWords = kSide * kBits / 32;  // of the codes of a patch's row, column
  static constexpr int kColumnWords = kRows * kBits / 32;       // of a tile's column
  static constexpr int kBlocks = kRows / R::kBlock;             // of a tile's column
  static constexpr bool kSquare = R::kBlockRows > 1;
};

template <class P>
struct Staging {
  u32 words[P::kColumnWords][P::kColumns];
  u8 scales[P::kColumns][P::kBlocks];
};

// Where a thread is.
struct Spot {
  int tall, wide, warp;  // patch in the warp; warp in the block
  i32 row, column;       // of the patch's first element
};

// Where column j of the patches at `wide` lies in row `row` of the staging: the lanes of a warp, which write the same j, hardly meet in
// a bank.
template <class P>
FP4KIT_DEVICE int staged_column(int row, int wide, int j) {
  constexpr int kGroup = 32 / P::kSpan;  // patches that fill the banks once
  return wide * P::kSpan + (j ^ (wide / kGroup + P::kWide / kGroup * (row / P::kWords % P::kTall)) % P::kSpan);
}

// Column j of a patch as a run.
template <class In, int kSpan>
FP4KIT_DEVICE Run<In, kSide> column_run(const Run<In, kSpan> (&rows)[kSide], int j) {
  Run<In, kSide> column;
  if constexpr (sizeof(typename In::Bits) == 4) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) column.w[i] = rows[i].w[j];
  } else {
#pragma unroll
    for (int i = 0; i < kSide / 2; ++i) column.w[i] = prmt(rows[2 * i].w[j / 2], rows[2 * i + 1].w[j / 2], j % 2 ? 0x7632u : 0x5410u);
  }
  return column;
}

// Largest over the lanes whose numbers differ in the bits from `first` up to `end`.
FP4KIT_DEVICE u32 largest_of_lanes(u32 largest, int first, int end) {
#pragma unroll
  for (int lane = first; lane < end; lane *= 2) largest = maximum(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  return largest;
}

// amax of a block by the recipe's own rule: element (i, j) is x[i * row_step + j * step], rows x R::kBlock of them.
template <class R, class In>
FP4KIT_DEVICE float amax_of_block(const typename In::Bits* x, int rows, i64 row_step, i64 step) {
  constexpr AmaxNan kOver = R::kAmaxNan == AmaxNan::propagate ? AmaxNan::propagate : AmaxNan::ignore;  // rows
  float largest = 0.0f;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    BlockAmax<R::kAmaxNan> amax;
#pragma unroll 1
    for (int j = 0; j < R::kBlock; j += 2) {
      const typename In::Bits* pair = x + i * row_step + j * step;
      const float values[2] = {In::widen(pair[0]), In::widen(pair[step])};
      amax.add(values);
    }
    largest = rows == 1 ? amax.result() : larger<kOver>(largest, amax.result());
  }
  return largest;
}

// Codes of elements that lie `step` apart, of any values: small code for a rare case.
template <class R, class In, int kWords>
FP4KIT_DEVICE void encode_any(const typename In::Bits* x, i64 step, Factor f, u32 (&words)[kWords]) {
  constexpr int kPerWord = 32 / R::Element::kStoredBits;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = 0u;
#pragma unroll 1
    for (int i = 0; i < kPerWord; ++i)
      words[w] |= encode_element<R>(scaled_element<R, In>(In::widen(x[(w * kPerWord + i) * step]), f.by)) << (R::Element::kStoredBits * i);
  }
}

// The codes of a patch, along rows, into the staging, along columns.
template <class P>
FP4KIT_DEVICE void stage_transposed(Staging<P>& staging, const Spot& s, const u32 (&codes)[kSide][P::kRowWords]) {
  constexpr int kSquareSide = 32 / P::kBits;  // 8 nibbles, 4 bytes
  const int first = (s.warp * P::kTall + s.tall) * P::kWords;
#pragma unroll
  for (int row = 0; row < P::kWords; ++row) {
#pragma unroll
    for (int part = 0; part < P::kRowWords; ++part) {
      u32 w[kSquareSide];
#pragma unroll
      for (int i = 0; i < kSquareSide; ++i) w[i] = codes[row * kSquareSide + i][part];
      transpose_square(w);
#pragma unroll
      for (int i = 0; i < kSquareSide; ++i)
        staging.words[first + row][staged_column<P>(first + row, s.wide, part * kSquareSide + i)] = w[i];
    }
  }
}

// Codes of column j of a patch -> the staging.
template <class P>
FP4KIT_DEVICE void stage_column(Staging<P>& staging, const Spot& s, int j, const u32 (&words)[P::kWords]) {
  const int first = (s.warp * P::kTall + s.tall) * P::kWords;
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) staging.words[first + w][staged_column<P>(first + w, s.wide, j)] = words[w];
}

// The scale of the block that column j of a patch is in -> the staging.
template <class P>
FP4KIT_DEVICE void stage_scale(Staging<P>& staging, const Spot& s, int j, u32 code) {
  if (s.tall == 0) staging.scales[s.wide * P::kSpan + j][s.warp] = static_cast<u8>(code);
}
