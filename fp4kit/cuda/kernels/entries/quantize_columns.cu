// quantize_columns: quantize a matrix along its columns, or along both rows and columns in one read. It also quantizes
// blocks of several rows (16x16, 32x32) in either direction. A thread block processes a tile of 128 rows at a time. R
// is the recipe, In is the type of the elements of x, and P holds the sizes of tiles (PatchTraits). kAligned is true if
// all rows of x (and of `values`, if they are stored) begin at multiples of 16 bytes. `a` holds the kernel's arguments:
// the arrays and their sizes. t is the tensor scale: its encode and decode factors. A Factor is what the elements of a
// block are multiplied or divided by; `table` holds one for each scale code if R::kHasTable. The fast path encodes
// blocks of finite elements in few instructions; the exact path is valid for all blocks.
//
// A thread holds a patch (a small rectangle) of the tile in registers, and loads the patch while the table of factors
// is filled. For blocks in a column, a patch is 16 rows of 8 bytes. Finding the amax of a block then needs at most one
// shuffle, for two 16-bit columns at once. Codes along columns are collected in shared memory, because the columns of a
// whole tile are long enough to be stored as whole sectors.
//
// For blocks in a row, the tile is also kept in shared memory, and a thread processes runs of 16 neighboring elements.
#include "amax.cuh"
#include "patch_column_blocks.cuh"
#include "patch_square_blocks.cuh"

// The runs of a tile that one thread processes: kCount runs that are kStep rows apart. A run is 16 neighboring elements
// of a row.
template <class P>
struct TileRuns {
  static constexpr int kAcross = P::kTileColumns / 16, kStep = kThreads / kAcross, kCount = kTileRows / kStep;
  i32 row, column;  // row and column of the first run
  int inside;       // how many of the runs are in the matrix

  FP4KIT_DEVICE_MEMBER TileRuns(const PatchArguments& a, Tile tile)
      : row(tile.row + static_cast<i32>(threadIdx.x / kAcross)),
        column(tile.column + static_cast<i32>(threadIdx.x % kAcross) * 16) {
    const i32 under = column < static_cast<i32>(a.columns) ? static_cast<i32>(a.rows) - row : 0;
    inside = under > 0 ? static_cast<int>(static_cast<u32>(under + kStep - 1) / kStep) : 0;
  }
};

// Store the codes of this thread's run k, which are in `words`, at address `out`. If the run begins a block, also store
// the block's scale code `code` in a.scales.
template <class R, class P>
FP4KIT_DEVICE void store_run(const PatchArguments& a, const TileRuns<P>& runs, int k, u8* out,
                             const u32 (&words)[16 / P::kPerWord], u32 code) {
  const u32 column = runs.column, blocks = static_cast<u32>(a.columns) / R::kBlock;
  store_words(out, words);
  if (R::kBlock > 16 && column % R::kBlock) return;
  a.scales[scale_offset<R::kLayout, u32>(runs.row + k * runs.kStep, column / R::kBlock, blocks)] =
      static_cast<u8>(code);
}

// Quantize the runs of this thread that must not take the fast path: load them from a.x again, encode them by the exact
// path, and store their codes and the scale codes of their blocks. Bit k of `pending` is set if run k is one of these
// runs. Runs outside of the matrix are left out. `out` is the address of the codes of run 0.
template <class R, class In, class P>
FP4KIT_DEVICE void quantize_pending_runs(const PatchArguments& a, const TileRuns<P>& runs, u8* out, u32 pending,
                                         TensorScale t, const Factor* table) {
#pragma unroll 1
  for (int k = 0; pending >> k && k < runs.inside; ++k) {
    if (!(pending >> k & 1u)) continue;
    const typename In::Bits* x = first_element<In>(a, {0, 0, runs.row + k * runs.kStep, runs.column});
    Factor f;
    const u32 code = scale_block<R, In>(amax_of_block<R, In>(x - runs.column % R::kBlock, 1, 0, 1), t, table, f);
    u32 words[16 / P::kPerWord];
    encode_any<R, In, 16>(x, 1, f, words);
    store_run<R>(a, runs, k, advanced(out, row_bytes<P>(a), k * runs.kStep), words, code);
  }
}

// Quantize a tile along its rows, for blocks in a row, and store codes in a.packed and scale codes in a.scales. Rows
// and columns outside of the matrix are left out. If P::kKeepsElements, the elements are read from `elements`,
// otherwise from a.x. A thread takes one run of 16 elements at a time, and the runs of a block are in neighboring
// lanes. Fast is the FastRecipe. All threads of the warp must call this function.
template <class R, class In, bool kAligned, class P, class Fast>
FP4KIT_DEVICE void quantize_rows(const PatchArguments& a, Tile tile, TensorScale t, const Factor* table,
                                 const TileElements<P>& elements) {
  using Path = FastPath<R, In>;
  constexpr int kUnroll = P::kKeepsElements ? 1 : TileRuns<P>::kCount;  // loads in flight
  const TileRuns<P> runs(a, tile);
  const PatchPosition first = {0, 0, runs.inside ? runs.row : 0,
                               runs.inside ? runs.column : 0};  // any position if there is no run
  const typename In::Bits* from = first_element<In>(a, first);
  u8* const out = advanced(a.packed, row_bytes<P>(a), first.row) + static_cast<u32>(first.column) / 8 * P::kBits;
  u8* row_out = out;
  u32 pending = 0u;
#pragma unroll
  for (int start = 0; start < runs.kCount; start += kUnroll) {
    Run<In, 16> x[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if constexpr (P::kKeepsElements) {
        x[i] = tile_run<In>(elements, runs.row - tile.row + start * runs.kStep, runs.column - tile.column);
      } else {
        x[i] = read_run<In, 16, kAligned>(from);
        from = advanced(from, opaque(i + 1 < runs.inside ? static_cast<u32>(a.columns) : 0u),
                        runs.kStep);  // the address does not change if no run follows
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i, row_out = advanced(row_out, opaque(row_bytes<P>(a)), runs.kStep)) {
      const u32 largest = largest_of_lanes(largest_bits_of(x[i]), 1, R::kBlock / 16);
      Factor f;
      const u32 code = scale_block<R, In>(float_of(largest), t, table, f);
      f = Fast::factor(f);
      if (!Path::kExists || !takes_fast_path<typename Fast::Type, In>(largest, f)) pending |= 1u << (start + i);
      u32 words[16 / P::kPerWord] = {};
      if constexpr (Path::kExists) encode_finite<typename Fast::Type, In>(x[i], f, words);
      if (start + i < runs.inside) store_run<R>(a, runs, start + i, row_out, words, code);
    }
  }
  if (pending) quantize_pending_runs<R, In>(a, runs, out, pending, t, table);
}

// Quantize tiles of a.x, from number i on, every `step`th: along columns if a.column_packed is not nullptr, and along
// rows if a.packed is not nullptr. x holds the elements of this thread's patch of the first tile. Fast is the
// FastRecipe.
template <class R, class In, bool kAligned, class Fast, class P>
FP4KIT_DEVICE void quantize_tiles(const PatchArguments& a, const TileOrder<P>& tiles, u32 i, u32 step,
                                  Run<In, P::kPatchColumns> (&x)[P::kPatchRows], TensorScale t, const Factor* table,
                                  Staging<P>& staging, TileElements<P>& elements) {
  const u32 count = tiles.count();
  Tile tile = tiles.tile(i);
  while (i < count) {
    const PatchPosition s = patch_position<P>(tile);
    if constexpr (P::kSquare) {
      quantize_square<R, In, kAligned, P>(a, s, x, t, staging);
    } else {
      if (P::kKeepsElements && a.packed) store_patch_elements<In>(elements, s, x);
      if (a.column_packed) quantize_column_blocks<R, In, P, Fast>(a, s, x, t, table, staging);
    }
    if (a.column_packed || P::kKeepsElements) __syncthreads();
    if (a.column_packed) {
      write_codes<P>(a, staging, tile);
      write_scales<R, P>(a, staging, tile);
    }
    if constexpr (!P::kSquare) {
      if (a.packed) quantize_rows<R, In, kAligned, P, Fast>(a, tile, t, table, elements);
    }
    i += step;
    if (i >= count) break;
    if (a.column_packed || P::kKeepsElements) __syncthreads();
    tile = tiles.tile(i);
    load_patch<In, kAligned, P>(a, patch_position<P>(tile), x);
  }
}

// Quantize tiles as quantize_tiles does, with divisions (fill_table). The call is not inlined, so that this rare case
// costs the kernel no registers.
template <class R, class In, bool kAligned, class P>
FP4KIT_DEVICE_CALL void quantize_tiles_by_quotients(PatchArguments a, u32 i, u32 step, TensorScale t,
                                                    const Factor* table, Staging<P>* staging,
                                                    TileElements<P>* elements) {
  const TileOrder<P> tiles(a);
  Run<In, P::kPatchColumns> x[P::kPatchRows];
  load_patch<In, kAligned, P>(a, patch_position<P>(tiles.tile(i)), x);
  quantize_tiles<R, In, kAligned, FastRecipe<R, In, false>, P>(a, tiles, i, step, x, t, table, *staging, *elements);
}

// Quantize the tiles of a.x that `grid` assigns to this thread block, one after the other (quantize_tiles). Store codes
// and scale codes, or only a.values if R::kFake (square blocks only). The first thread of the grid also stores the
// tensor scale and copies of its amax in those outputs that are not nullptr, if the recipe has a tensor scale. All
// threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_columns(const PatchArguments& a, Grid grid) {
  using P = PatchTraits<R, In>;
  __shared__ Staging<P> staging;
  __shared__ TileElements<P> elements;
  __shared__ Factor table[R::kHasTable ? kTableSize : 1];
  const TileOrder<P> tiles(a);
  const u32 first = static_cast<u32>(grid.block), step = static_cast<u32>(grid.blocks);
  Run<In, P::kPatchColumns> x[P::kPatchRows];
  load_patch<In, kAligned, P>(a, patch_position<P>(tiles.tile(first)), x);  // in flight while the table is made
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, 0, 0, 1);
  if (!R::kHasTable || fill_table<R, In>(table, t)) {
    quantize_tiles<R, In, kAligned, FastRecipe<R, In>, P>(a, tiles, first, step, x, t, table, staging, elements);
  } else {
    quantize_tiles_by_quotients<R, In, kAligned, P>(a, first, step, t, table, &staging, &elements);
  }
  if (grid.block == 0 && threadIdx.x == 0 && R::kTensorScaling != TensorScaling::none) {
    if (a.tensor_scale) *a.tensor_scale = t.decode;
    if (a.column_tensor_scale) *a.column_tensor_scale = t.decode;
    if (a.amax_out) *a.amax_out = amax_at(a.tensor_amax, 0);
    if (a.column_amax_out) *a.column_amax_out = amax_at(a.tensor_amax, 0);
  }
}

// The number of thread blocks that a multiprocessor must hold. Square patches of 32-bit elements take twice the
// registers. Hadamard transforms, quotients and finding the amax also take more registers. (Kernels find the amax only
// of arrays that are too small for many thread blocks.)
constexpr bool kIsLong = sizeof(Input::Bits) == 4;
constexpr int kBlocksPerMultiprocessor = (kIsLong && R::kBlockRows > 1) || R::kFinders ? 2
                                         : R::kHadamard || (kIsLong && R::kDivide)     ? 3
                                                                                       : 4;

// Quantize a.x along columns (codes to a.column_packed, block scales to a.column_scales), along rows (to a.packed and
// a.scales), or both: a direction whose codes are nullptr is left out. The tensor scale and a copy of its amax are
// stored for both directions, in those outputs that are not nullptr. If R::kFake, only a.values is stored (square
// blocks only).
//
// The kernel is launched to quantize along axis -2, for fp4kit.quantize_both, and for blocks of several rows
// (cuda/dispatch.py has all conditions). A thread block processes one tile at a time. If R::kFinders is 0, launch
// with any number of thread blocks. Otherwise launch with a multiple of R::kFinders thread blocks, which first find the
// tensor's amax and store it at a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_columns_kernel(PatchArguments a) {
  find_amax<R, Input, kAligned>(a);
  quantize_columns<R, Input, kAligned>(a, whole_grid());
}
