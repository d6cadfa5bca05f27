// A tile (the part of a matrix that one thread block takes at a time) in shared memory: its elements, and the staging
// buffer. The staging buffer holds the codes and scales of the tile along columns, until whole sectors can be stored in
// memory. P is PatchTraits<R, In>: the sizes of tiles, and of patches (the part of a tile that one thread holds), for
// the recipe R and the element type In. `a` holds the arguments of the kernel.
#pragma once

#include "patch.cuh"
#include "transpose_square.cuh"

// The elements of a tile in shared memory. They are loaded once for blocks in a column, and read from here for blocks
// in a row. Without this buffer, two of three elements were evicted from the L1 cache before the second use. The reason
// is that the cache has few places for rows that are a power of two apart. The speed of nvfp4-te in both directions,
// relative to a copy, is 0.73 without this buffer and 0.75 with it (H200, 2026-11-21).
template <class P>
struct TileElements {
  static constexpr int kRowChunks = P::kTileBytes / kTileRows / 16;
  Chunk rows[P::kKeepsElements ? kTileRows : 1][kRowChunks];

  // Return the index in rows[row] of the chunk with number `chunk` of a row. The order of chunks is permuted so that
  // lanes that read runs of 2 or 4 chunks each have no bank conflicts.
  FP4KIT_DEVICE int place(int row, int chunk) { return chunk ^ (chunk >> 3 & 1) ^ ((row & 1) << 1); }
};

// The staging buffer: the codes (`words`) and the scales of a tile along columns.
template <class P>
struct Staging {
  alignas(16) u32 words[P::kColumnWords][P::kTileColumns];
  alignas(16) u8 scales[P::kTileBlocks][P::kTileColumns];
};

// Return the index at which column `column` of the tile is stored in the rows of quad number `quad`. Quad q is the four
// rows staging.words[4 q] ... staging.words[4 q + 3]. Each quad has its own order of columns, to avoid bank
// conflicts between lanes that store neighboring patches, and between lanes that load the quads of a few columns. Four
// columns that begin at a multiple of four stay contiguous.
template <class P>
FP4KIT_DEVICE int staged_column(int quad, int column) {
  const int moved = column ^ (32 / P::kQuads * quad);
  return P::kPatchColumns == 8 ? moved ^ (column >> 3 & 4) : moved;
}

// Store the codes of column j of a patch in the staging buffer. `words` holds the column's codes from top to bottom,
// the first one in the lowest bits of words[0]. `s` is the position of the patch. Callers use this function for the
// rare columns that take the exact path.
template <class P>
FP4KIT_DEVICE void stage_column(Staging<P>& staging, const PatchPosition& s, int j, const u32 (&words)[P::kWords]) {
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) {
    const int row = s.tile_row / P::kPerWord + w;
    staging.words[row][staged_column<P>(row / 4, s.tile_column + j)] = words[w];
  }
}

// Store one word of codes of each column of a patch in the staging buffer: words[j] is word w of column j. Word w of a
// column holds the codes of P::kPerWord rows, from row w * P::kPerWord of the patch on. `s` is the position of the
// patch.
template <class P>
FP4KIT_DEVICE void stage_words(Staging<P>& staging, const PatchPosition& s, int w,
                               const u32 (&words)[P::kPatchColumns]) {
  const int row = s.tile_row / P::kPerWord + w;
  if constexpr (P::kPatchColumns <= 4) {
    store_words(&staging.words[row][staged_column<P>(row / 4, s.tile_column)], words);
  } else {
#pragma unroll
    for (int j = 0; j < P::kPatchColumns; j += 4) {
      const u32 four[4] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
      store_words(&staging.words[row][staged_column<P>(row / 4, s.tile_column + j)], four);
    }
  }
}

// Store the elements of a patch (16 rows of 8 bytes) in `elements`, the shared memory from which tile_run reads them.
// x[i] is row i of the patch, and s is its position. The threads must synchronize before they call tile_run.
template <class In, class P>
FP4KIT_DEVICE void store_patch_elements(TileElements<P>& elements, const PatchPosition& s,
                                        const Run<In, P::kPatchColumns> (&x)[P::kPatchRows]) {
  const int half = s.tile_column / P::kPatchColumns;
#pragma unroll
  for (int i = 0; i < P::kPatchRows; ++i)
    store_words(elements.rows[s.tile_row + i][elements.place(i, half / 2)].w + half % 2 * 2, x[i].w);
}

// Return 16 neighboring elements of row `row` of the tile, from column `column` on, which must be a multiple of 16.
// They are read from the tile's elements in shared memory (store_patch_elements).
template <class In, class P>
FP4KIT_DEVICE Run<In, 16> tile_run(const TileElements<P>& elements, int row, int column) {
  constexpr int kChunks = sizeof(typename In::Bits);
  Run<In, 16> run;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const Chunk chunk = elements.rows[row][elements.place(row, column / 16 * kChunks + i)];
#pragma unroll
    for (int j = 0; j < 4; ++j) run.w[4 * i + j] = chunk.w[j];
  }
  return run;
}

// Copy the codes of a tile along columns from the staging buffer to a.column_packed. Codes outside of the matrix are
// left out. If the columns of codes begin at multiples of 16 bytes, 16 bytes are stored at a time. The threads of the
// thread block share the work. They must synchronize after the buffer is filled and before this call.
template <class P>
FP4KIT_DEVICE void write_codes(const PatchArguments& a, const Staging<P>& staging, Tile tile) {
  const u32 bytes = static_cast<u32>(a.rows) / 8 * P::kBits;  // bytes of codes per column
#pragma unroll
  for (int start = 0; start < P::kTileColumns / 2 * P::kQuads; start += kThreads) {
    const int item = start + threadIdx.x, quad = item % P::kQuads, tile_column = item / P::kQuads * 2;
    const i32 row = tile.row + quad * 4 * P::kPerWord, column = tile.column + tile_column;
    if (tile_column >= P::kTileColumns || column >= static_cast<i32>(a.columns) || row >= static_cast<i32>(a.rows))
      continue;
    u32 words[2][4];
    const u32* staged = &staging.words[4 * quad][staged_column<P>(quad, tile_column)];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const HalfChunk two = *reinterpret_cast<const HalfChunk*>(staged + w * P::kTileColumns);
      words[0][w] = two.w[0];
      words[1][w] = two.w[1];
    }
    u8* out = advanced(a.column_packed, bytes, column) + row / 8 * P::kBits;
#pragma unroll
    for (int j = 0; j < 2; ++j, out += bytes) {
      if (column + j >= static_cast<i32>(a.columns)) continue;
      if (bytes % 16 == 0) {
        store_words(out, words[j]);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (row + w * P::kPerWord < static_cast<i32>(a.rows)) reinterpret_cast<u32*>(out)[w] = words[j][w];
      }
    }
  }
}

// Copy the scales of a tile along columns from the staging buffer to a.column_scales. Scales outside of the matrix are
// left out. A thread copies scales of four columns: for the linear layout those of all blocks, and for other layouts
// those of four blocks that are contiguous in the layout. The threads of the thread block share the work. They must
// synchronize after the buffer is filled and before this call.
template <class R, class P>
FP4KIT_DEVICE void write_scales(const PatchArguments& a, const Staging<P>& staging, Tile tile) {
  constexpr int kCount = R::kLayout == ScaleLayout::linear ? P::kTileBlocks : 4, kFours = P::kTileColumns / 4;
  if (threadIdx.x >= kFours * P::kTileBlocks / kCount) return;
  const int four = threadIdx.x % kFours, tile_block = threadIdx.x / kFours * kCount;
  const u32 column = tile.column + 4 * four, block = tile.row / R::kBlock + tile_block,
            blocks = static_cast<u32>(a.rows) / R::kBlock;
  const bool whole = block + kCount <= blocks && (R::kLayout != ScaleLayout::linear || blocks % kCount == 0);
  u32 codes[4][kCount / 4];  // for each of four columns: the scales of its blocks
#pragma unroll
  for (int part = 0; part < kCount / 4; ++part) {
    u32 square[4];  // square[i]: scales of block i in four columns; transposed: of column i in four blocks
#pragma unroll
    for (int i = 0; i < 4; ++i)
      square[i] = reinterpret_cast<const u32*>(staging.scales[tile_block + 4 * part + i])[four];
    transpose_square(square);
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j][part] = square[j];
  }
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    if (column + j >= static_cast<u32>(a.columns)) return;
    if (whole) {
      store_words(a.column_scales + scale_offset<R::kLayout, u32>(column + j, block, blocks), codes[j]);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < kCount && block + i < blocks; ++i)
        a.column_scales[scale_offset<R::kLayout, u32>(column + j, block + i, blocks)] =
            staging.scales[tile_block + i][4 * four + j];
    }
  }
}
