// TileOrder of a matrix, a thread block each, and patches of a tile, a thread each: where they lie, and blocks
// that are not finite.
#pragma once

#include "quantize.cuh"

struct PatchArguments {
  const void* x;                      // rows x columns elements, contiguous
  u8 *packed, *scales;                // along rows (null: not wanted)
  u8 *column_packed, *column_scales;  // along columns: columns x rows (null: not wanted)
  void* values;                       // fake_quantize of square blocks: elements of x's type (null otherwise)
  const float* tensor_amax;           // one (null without)
  float *tensor_scale, *column_tensor_scale;
  float *amax_out, *column_amax_out;  // where tensor_amax is copied to (null: nowhere)
  i64 rows, columns;
  i64 shift;  // bands of tiles are of 2^shift
};

constexpr int kTileRows = 128;

template <class R, class In>
struct PatchTraits {
  static constexpr bool kSquare = R::kBlockRows > 1;
  static constexpr int kPatchRows = kSquare ? 8 : 16;                                // rows of a patch
  static constexpr int kPatchColumns = kSquare ? 8 : 8 / sizeof(typename In::Bits);  // columns of a patch
  static constexpr int kPatchesDown =
      R::kBlock / kPatchRows;                               // patches above each other in a warp: the rows of a block
  static constexpr int kPatchesAcross = 32 / kPatchesDown;  // patches beside each other
  static constexpr int kPatchesPerBlock = R::kBlock / kPatchColumns;  // of those, the patches of a square block
  static constexpr int kWarpsDown = kTileRows / (kPatchesDown * kPatchRows),
                       kWarpsAcross = kThreads / 32 / kWarpsDown;                     // warps
  static constexpr int kTileColumns = kWarpsAcross * kPatchesAcross * kPatchColumns;  // of a tile
  static constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
  static constexpr int kRowWords = kPatchColumns / kPerWord,
                       kWords = kPatchRows / kPerWord;       // of the codes of a patch's row, column
  static constexpr int kColumnWords = kTileRows / kPerWord;  // of a tile's column
  static constexpr int kQuads = kColumnWords / 4;
  static constexpr int kTileBlocks = kTileRows / R::kBlock;  // of a tile's column
  // Whether a tile's elements fit beside its codes in the 48 KiB of shared memory that a thread block has: codes of 8
  // bits of elements of 16 do not.
  static constexpr int kTileBytes = kTileRows * kTileColumns * sizeof(typename In::Bits),
                       kCodeBytes = kTileRows * kTileColumns * kBits / 8;
  static constexpr bool kKeepsElements = !kSquare && kTileBytes + kCodeBytes < 48 * 1024;
};

// A tile: where its first element is.
struct Tile {
  i32 row, column;
};

// What lies a * b elements after p, where both fit in 32 bits.
template <class T>
FP4KIT_DEVICE T* advanced(T* p, u32 a, u32 b) {
  return p + static_cast<u64>(a) * b;
}

// Bytes of a row of codes.
template <class P>
FP4KIT_DEVICE u32 row_bytes(const PatchArguments& a) {
  return static_cast<u32>(a.columns) / 8 * P::kBits;
}

// Where a thread's patch is: in the tile, and in the matrix.
struct PatchPosition {
  int tile_row, tile_column;
  i32 row, column;
};

template <class P>
FP4KIT_DEVICE PatchPosition patch_position(Tile tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_row = (warp / P::kWarpsAcross * P::kPatchesDown + lane / P::kPatchesAcross) * P::kPatchRows;
  const int tile_column = (warp % P::kWarpsAcross * P::kPatchesAcross + lane % P::kPatchesAcross) * P::kPatchColumns;
  return {tile_row, tile_column, tile.row + tile_row, tile.column + tile_column};
}

// TileOrder of a matrix: a band of them below each other, then the next ones beside them, then the next band. So the
// tiles that are under way at a time lie in a square, and what they write in either direction is in whole lines and
// pages of memory.
template <class P>
struct TileOrder {
  u32 wide, tall, shift;

  FP4KIT_DEVICE_MEMBER explicit TileOrder(const PatchArguments& a)
      : wide((static_cast<u32>(a.columns) + P::kTileColumns - 1) / P::kTileColumns),
        tall((static_cast<u32>(a.rows) + kTileRows - 1) / kTileRows),
        shift(static_cast<u32>(a.shift)) {}

  // How many there are, with those below the matrix in the last band.
  FP4KIT_DEVICE_MEMBER u32 count() const { return wide * ((tall + (1u << shift) - 1) >> shift << shift); }

  FP4KIT_DEVICE_MEMBER Tile tile(u32 i) const {
    const u32 column = i >> shift, band = column / wide;
    return {static_cast<i32>(((band << shift) + (i & ((1u << shift) - 1))) * kTileRows),
            static_cast<i32>((column - band * wide) * P::kTileColumns)};
  }
};

// A patch's rows in the matrix, from its first one on: none or less outside.
FP4KIT_DEVICE int rows_inside(const PatchArguments& a, const PatchPosition& s) {
  return s.column < static_cast<i32>(a.columns) ? static_cast<i32>(a.rows) - s.row : 0;
}

// A patch's first element.
template <class In>
FP4KIT_DEVICE const typename In::Bits* first_element(const PatchArguments& a, const PatchPosition& s) {
  return advanced(static_cast<const typename In::Bits*>(a.x), static_cast<u32>(a.columns), s.row) + s.column;
}

// The rows of a patch. What is outside does not matter, and is read from inside: of a square block that ends below the
// matrix, the last row again; other blocks are whole.
template <class In, bool kAligned, class P>
FP4KIT_DEVICE void load_patch(const PatchArguments& a, const PatchPosition& s,
                              Run<In, P::kPatchColumns> (&x)[P::kPatchRows]) {
  const i32 last = static_cast<i32>(a.rows) - 1;
  const PatchPosition valid = {0, 0,
                               s.row <= last ? s.row
                               : P::kSquare  ? last
                                             : 0,
                               s.column < static_cast<i32>(a.columns) ? s.column : 0};
  const typename In::Bits* from = first_element<In>(a, valid);
#pragma unroll
  for (int i = 0; i < P::kPatchRows; ++i) {
    x[i] = read_run<In, P::kPatchColumns, kAligned>(from);
    from += opaque(!P::kSquare || s.row + i < last ? static_cast<u32>(a.columns) : 0u);
  }
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
  return exact_amax<R, 2>(rows, [=](int i, int j, float (&pair)[2]) {
    const typename In::Bits* first = x + i * row_step + j * step;
    pair[0] = In::widen(first[0]);
    pair[1] = In::widen(first[step]);
  });
}

// Codes of kRun elements that lie `step` apart, of any values.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_any(const typename In::Bits* x, i64 step, Factor f, u32 (&words)[kCodeWords<R, kRun>]) {
  exact_codes_of<R, In, kRun>([=](int i) { return In::widen(x[i * step]); }, f, words);
}
