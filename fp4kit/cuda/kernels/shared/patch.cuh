// Tiles of a matrix, one per thread block, and patches of a tile, one per thread. This file contains their positions,
// the loads of their elements, and the exact path for their blocks. R is the recipe, In is the type of the elements of
// x, and P is PatchTraits<R, In>, the sizes of tiles and patches. `a` holds the arguments of the kernel, such as the
// address a.x of the elements, and s is the position of a patch. kAligned is true if all rows of x begin at multiples
// of 16 bytes, and also all rows of `values` if values are stored.
//
// A tile has 128 rows. A patch is a rectangle of a tile that one thread holds in registers: 16 rows of 8 bytes for
// blocks in a column, or 8 x 8 elements for square blocks.
#pragma once

#include "quantize.cuh"

// The arguments of quantize_columns.cu. "null" means that the pointer is nullptr in that case.
struct PatchArguments {
  const void* x;                      // rows x columns elements, contiguous
  u8 *packed, *scales;                // codes and block scales along rows; zeros before if swizzled (null: not wanted)
  u8 *column_packed, *column_scales;  // the same along columns, for the transpose of x (null: not wanted)
  void* values;                       // fake_quantize of square blocks: elements of x's type (null otherwise)
  const float* tensor_amax;           // one amax; written if the kernel computes it (null without tensor scale)
  float *tensor_scale, *column_tensor_scale;  // the decode scale of each result (null: not wanted, or none)
  float *amax_out, *column_amax_out;          // receive copies of tensor_amax (null: no copy)
  i64 rows, columns;                          // of x
  i64 shift;                                  // a band has 2^shift rows of tiles
};

constexpr int kTileRows = 128;

// The sizes of patches and tiles for a recipe R and an element type In.
template <class R, class In>
struct PatchTraits {
  static constexpr bool kSquare = R::kBlockRows > 1;
  static constexpr int kPatchRows = kSquare ? 8 : 16;                                // rows of a patch
  static constexpr int kPatchColumns = kSquare ? 8 : 8 / sizeof(typename In::Bits);  // columns of a patch
  static constexpr int kPatchesDown =
      R::kBlock / kPatchRows;  // patches below each other in a warp; together they have the rows of a block
  static constexpr int kPatchesAcross = 32 / kPatchesDown;            // patches beside each other in a warp
  static constexpr int kPatchesPerBlock = R::kBlock / kPatchColumns;  // patches beside each other in a square block
  // How many warps of a tile are below each other, and how many beside each other.
  static constexpr int kWarpsDown = kTileRows / (kPatchesDown * kPatchRows),
                       kWarpsAcross = kThreads / 32 / kWarpsDown;                     // warps beside each other
  static constexpr int kTileColumns = kWarpsAcross * kPatchesAcross * kPatchColumns;  // columns of a tile
  static constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
  // The numbers of words that hold the codes of one row and of one column of a patch.
  static constexpr int kRowWords = kPatchColumns / kPerWord, kWords = kPatchRows / kPerWord;
  static constexpr int kColumnWords = kTileRows / kPerWord;  // words of the codes of a tile's column
  static constexpr int kQuads = kColumnWords / 4;
  static constexpr int kTileBlocks = kTileRows / R::kBlock;  // blocks of a tile's column
  // True if the elements of a tile fit beside its codes in the 48 KiB of shared memory of a thread block. 8-bit codes
  // of 16-bit elements do not leave enough room.
  static constexpr int kTileBytes = kTileRows * kTileColumns * sizeof(typename In::Bits),
                       kCodeBytes = kTileRows * kTileColumns * kBits / 8;
  static constexpr bool kKeepsElements = !kSquare && kTileBytes + kCodeBytes < 48 * 1024;
};

// A tile, given by the row and column of its first element.
struct Tile {
  i32 row, column;
};

// Return p + a * b, the address of element a * b of the array at p. The product is computed in 64 bits, so that it does
// not wrap.
template <class T>
FP4KIT_DEVICE T* advanced(T* p, u32 a, u32 b) {
  return p + static_cast<u64>(a) * b;
}

// Return the number of bytes that the codes of one row of the matrix take. a.columns must be a multiple of 8.
template <class P>
FP4KIT_DEVICE u32 row_bytes(const PatchArguments& a) {
  return static_cast<u32>(a.columns) / 8 * P::kBits;
}

// The position of the first element of a patch, in its tile and in the matrix.
struct PatchPosition {
  int tile_row, tile_column;
  i32 row, column;
};

// Return the position of the patch of a tile that this thread holds. It may be outside of the matrix (rows_inside).
template <class P>
FP4KIT_DEVICE PatchPosition patch_position(Tile tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_row = (warp / P::kWarpsAcross * P::kPatchesDown + lane / P::kPatchesAcross) * P::kPatchRows;
  const int tile_column = (warp % P::kWarpsAcross * P::kPatchesAcross + lane % P::kPatchesAcross) * P::kPatchColumns;
  return {tile_row, tile_column, tile.row + tile_row, tile.column + tile_column};
}

// The order in which the tiles of a matrix are processed: band by band, and column by column within a band. A band is
// 2^shift rows of tiles. So the tiles that are processed at the same time form a square, and their stores fill whole
// lines and pages in both directions.
template <class P>
struct TileOrder {
  u32 wide, tall, shift;

  FP4KIT_DEVICE_MEMBER explicit TileOrder(const PatchArguments& a)
      : wide((static_cast<u32>(a.columns) + P::kTileColumns - 1) / P::kTileColumns),
        tall((static_cast<u32>(a.rows) + kTileRows - 1) / kTileRows),
        shift(static_cast<u32>(a.shift)) {}

  // Return the number of tiles, including tiles of the last band that are below the matrix.
  FP4KIT_DEVICE_MEMBER u32 count() const { return wide * ((tall + (1u << shift) - 1) >> shift << shift); }

  // Return the tile with number i in this order.
  FP4KIT_DEVICE_MEMBER Tile tile(u32 i) const {
    const u32 column = i >> shift, band = column / wide;
    return {static_cast<i32>(((band << shift) + (i & ((1u << shift) - 1))) * kTileRows),
            static_cast<i32>((column - band * wide) * P::kTileColumns)};
  }
};

// Return how many rows the matrix has from the first row of a patch on, which may be more than the patch has. The
// result is 0 if the first column of the patch is outside of the matrix, and 0 or less if its first row is.
FP4KIT_DEVICE int rows_inside(const PatchArguments& a, const PatchPosition& s) {
  return s.column < static_cast<i32>(a.columns) ? static_cast<i32>(a.rows) - s.row : 0;
}

// Return the address in a.x of the first element of a patch, whose position is s.
template <class In>
FP4KIT_DEVICE const typename In::Bits* first_element(const PatchArguments& a, const PatchPosition& s) {
  return advanced(static_cast<const typename In::Bits*>(a.x), static_cast<u32>(a.columns), s.row) + s.column;
}

// Load row i of the patch at position s into x[i], for all its rows. Positions outside of the matrix get copies of
// other elements of the matrix, and results for such positions are never stored. If a square block extends below the
// matrix, the copies come from the matrix's last row, so that the amax of the block does not change.
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

// Return the maximum of `largest` over a group of lanes: those whose index differs from this lane's only in the bits
// `first`, 2 `first`, ..., `end` / 2. `first` and `end` are powers of two; with 1 and 4, groups are four neighboring
// lanes. All threads of the warp must call this function.
FP4KIT_DEVICE u32 largest_of_lanes(u32 largest, int first, int end) {
#pragma unroll
  for (int lane = first; lane < end; lane *= 2) largest = maximum(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  return largest;
}

// Return the amax (largest magnitude) of a block, computed by the exact path. R::kAmaxNan says what NaN elements do to
// the amax. The block has `rows` rows of R::kBlock elements, and its element (i, j) is x[i * row_step + j * step].
template <class R, class In>
FP4KIT_DEVICE float amax_of_block(const typename In::Bits* x, int rows, i64 row_step, i64 step) {
  return exact_amax<R, 2>(rows, [=](int i, int j, float (&pair)[2]) {
    const typename In::Bits* first = x + i * row_step + j * step;
    pair[0] = In::widen(first[0]);
    pair[1] = In::widen(first[step]);
  });
}

// Encode the kRun elements x[0], x[step], x[2 step], ... by the exact path, and store their codes in `words`, the first
// code in the lowest bits. f is the factor of their block, by which elements are multiplied or divided before rounding.
template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_any(const typename In::Bits* x, i64 step, Factor f, u32 (&words)[kCodeWords<R, kRun>]) {
  exact_codes_of<R, In, kRun>([=](int i) { return widen_exactly<R, In>(x[i * step]); }, f, words);
}
