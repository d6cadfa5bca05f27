// Functions that transpose the codes of a matrix by tiles. kBits is the number of bits per code. 4-bit codes are stored
// two per byte, so (rows, columns / 2) bytes become (columns, rows / 2) bytes. 8-bit codes of (rows, columns) bytes
// become (columns, rows) bytes. A chunk is 16 bytes.
//
// A tile is kThreads rows of 128 bytes. A thread loads 16 bytes of each of 8 rows, which keeps 8 loads in flight. It
// transposes squares of codes in registers, and stores the words in the transposed tile in shared memory. From there,
// whole lines are stored in memory.
#pragma once

#include "runs.cuh"
#include "transpose_square.cuh"

// Return a chunk with the first `count` of the 16 bytes at `from`, and zeros in place of the other bytes, which are not
// read. If `count` is 0 or less, all bytes are zero. If kAligned, `count` must be 16 or at most 0, and the address a
// multiple of 16.
template <bool kAligned>
FP4KIT_DEVICE Chunk load_chunk(const u8* from, int count) {
  Chunk chunk{};
  if constexpr (kAligned) {
    if (count > 0) chunk = *reinterpret_cast<const Chunk*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) chunk.w[i / 4] |= static_cast<u32>(from[i]) << (8 * (i % 4));
  }
  return chunk;
}

// Store the first `count` of the 16 bytes of a chunk at `to`. If `count` is 0 or less, store nothing. If kAligned,
// `count` must be 16 or at most 0, and the address a multiple of 16.
template <bool kAligned>
FP4KIT_DEVICE void store_chunk(u8* to, int count, const Chunk& chunk) {
  if constexpr (kAligned) {
    if (count > 0) *reinterpret_cast<Chunk*>(to) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) to[i] = static_cast<u8>(chunk.w[i / 4] >> (8 * (i % 4)));
  }
}

// A matrix of codes and its transpose.
struct CodeMatrix {
  const u8* in;
  u8* out;
  i64 rows, columns;  // rows and columns are counted in codes
};

// The sizes of a tile and of the transposed tile. The rows (lines) of both consist of chunks of 16
// bytes.
template <int kBits>
struct CodeTile {
  static constexpr int kRows = kThreads, kLine = 8, kColumns = kLine * 128 / kBits, kOutLine = kRows * kBits / 128;
  static constexpr int kChunks = kRows * kLine;
  static constexpr int kCodes = 32 / kBits;    // codes per word; a square consists of kCodes words
  static constexpr int kSquares = 8 / kCodes;  // squares below each other in each of the 4 words of a thread
  static_assert(kThreads % kOutLine == 0, "threads store whole lines");

  // Return a reference to chunk `chunk` of line `line` of the transposed tile. The order of chunks is permuted so that
  // there are no bank conflicts, neither when words are stored nor when chunks are loaded.
  FP4KIT_DEVICE Chunk& chunk(Chunk* tile, int line, int chunk) {
    return tile[line * kOutLine + (chunk ^ (line / (4 * kCodes) & 7))];
  }
};

// Load the codes of the tile at (row, column) of a.in, transpose them, and store them in `tile`, which is in shared
// memory. `row` and `column` are counted in codes. Places outside of the matrix get zeros. The threads of a thread
// block share the work, and must synchronize before they read the tile. If kAligned, rows of codes have whole chunks of
// 16 bytes and begin at multiples of 16 bytes.
template <int kBits, bool kAligned>
FP4KIT_DEVICE void read_tile(const CodeMatrix& a, i64 row, i64 column, Chunk* tile) {
  using T = CodeTile<kBits>;
  const int chunk = threadIdx.x % T::kLine, group = threadIdx.x / T::kLine;
  const i64 first = row + group * 8, bytes = a.columns * kBits / 8, byte = column * kBits / 8 + 16 * chunk;
  const int lines = static_cast<int>(minimum<i64>(a.rows - first, 8));
  const int count = static_cast<int>(minimum<i64>(bytes - byte, 16));
  const u8* from = a.in + first * bytes + byte;
  Chunk rows[8];
#pragma unroll
  for (int r = 0; r < 8; ++r, from += bytes) rows[r] = load_chunk<kAligned>(from, r < lines ? count : 0);
#pragma unroll
  for (int s = 0; s < T::kSquares; ++s) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 square[T::kCodes];
#pragma unroll
      for (int r = 0; r < T::kCodes; ++r) square[r] = rows[s * T::kCodes + r].w[w];
      transpose_square(square);
      const int word = group * T::kSquares + s;
#pragma unroll
      for (int r = 0; r < T::kCodes; ++r)
        T::chunk(tile, (4 * chunk + w) * T::kCodes + r, word / 4).w[word % 4] = square[r];
    }
  }
}

// Store the transposed codes of `tile` at (row, column) of a.out, which are counted in codes of the output. Codes
// outside of the output are left out. The threads of a thread block share the work, and must synchronize after
// read_tile. If kAligned, rows of a.out have whole chunks of 16 bytes and begin at multiples of 16 bytes.
template <int kBits, bool kAligned>
FP4KIT_DEVICE void write_tile(const CodeMatrix& a, i64 row, i64 column, Chunk* tile) {
  using T = CodeTile<kBits>;
  constexpr int kStep = kThreads / T::kOutLine;  // lines stored at a time
  const int chunk = threadIdx.x % T::kOutLine, line = threadIdx.x / T::kOutLine;
  const i64 first = row + line, bytes = a.rows * kBits / 8, byte = column * kBits / 8 + 16 * chunk;
  const int lines = static_cast<int>(minimum<i64>(a.columns - first, T::kColumns));
  const int count = static_cast<int>(minimum<i64>(bytes - byte, 16));
  u8* to = a.out + first * bytes + byte;
#pragma unroll
  for (int r = 0; r < T::kColumns; r += kStep, to += kStep * bytes)
    store_chunk<kAligned>(to, r < lines ? count : 0, T::chunk(tile, line + r, chunk));
}
