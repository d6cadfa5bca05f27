// transpose: transpose the codes and block scales of a stack of quantized matrices with square blocks, without
// decoding. `a` holds the kernel's arguments: the arrays codes, scales, codes_out and scales_out, and the sizes of the
// matrices. A thread block transposes one tile of codes at a time. kSeparateScales is true if scales are transposed
// separately, not together with the tiles of codes.
//
// The struct S has these members: kBits (bits per code), kBlock, kLayout (of the scales), and kScaleWords. kScaleWords
// is true if rows of scales begin at multiples of four bytes in the input and the output.
//
// The constant kAligned, which is no member of S, is true if rows of codes are whole chunks of 16 bytes in the input
// and the output.
#include "transpose_codes.cuh"
#include "transpose_scales.cuh"

constexpr bool kLinear = S::kLayout == ScaleLayout::linear;
// True if scales are transposed separately, not together with the tiles of codes.
template <class S>
constexpr bool kSeparateScales = S::kLayout != ScaleLayout::swizzled_128x4 && S::kScaleWords;
constexpr int kBlocksPerMultiprocessor = kLinear ? 3 : 4;  // 5 would spill registers

// The arguments of transpose_kernel.
struct TransposeArguments {
  const u8 *codes, *scales;     // codes of matrices x rows x columns elements, and their block scales
  u8 *codes_out, *scales_out;   // those of matrices x columns x rows elements
  i64 matrices, rows, columns;  // of codes; rows and columns are counted in elements
};

// Return the address of the shared memory for a tile of codes of kBits bits. Every call in one kernel returns the same
// memory.
template <int kBits>
FP4KIT_DEVICE Chunk* tile_memory() {
  __shared__ Chunk tile[CodeTile<kBits>::kChunks];
  return tile;
}

// Transpose the tile of codes that begins at (row, column) of a matrix, and store it at (column, row) of the output.
// Unless kSeparateScales, do the same with the scales of the tile. Codes and scales outside of the matrix are left out.
// `codes` and `scales` hold the addresses of the input and the output. All threads of the thread block must call this
// function.
template <class S, bool kAligned>
FP4KIT_DEVICE void transpose_tile(const CodeMatrix& codes, const ScaleMatrix& scales, i64 row, i64 column) {
  using T = CodeTile<S::kBits>;
  using U = ScaleTile<S::kLayout, S::kBlock, T::kRows, T::kColumns>;
  static_assert(kSeparateScales<S> || U::kScales <= kThreads, "a thread loads one scale");
  Chunk* tile = tile_memory<S::kBits>();
  __shared__ Chunk scale_chunks[(U::kScales + 15) / 16];
  u8* scale_tile = reinterpret_cast<u8*>(scale_chunks);
  const int thread = static_cast<int>(threadIdx.x);
  const u8 scale = kSeparateScales<S> ? 0 : load_scale<U>(scales, row, column, thread);
  read_tile<S::kBits, kAligned>(codes, row, column, tile);
  if (!kSeparateScales<S>) put_scale<U>(scale_tile, scale, thread);
  __syncthreads();
  write_tile<S::kBits, kAligned>(codes, column, row, tile);
  if constexpr (!S::kScaleWords) {
    write_scale_bytes<U>(scales, column, row / S::kBlock, scale_tile, thread, kThreads);
  } else if constexpr (!kSeparateScales<S>) {
    write_scale_chunks<U>(scales, column, row / S::kBlock, scale_tile, thread, kThreads);
  }
  __syncthreads();
}

// Transpose this thread block's part of linear scales, from a.scales to a.scales_out. A square is the scales of 4 x 4
// blocks. Each thread processes one square, and the thread block kThreads squares, starting at square number item *
// kThreads. `squares` is the number of squares of all matrices; threads beyond the last square do nothing.
template <class S>
FP4KIT_DEVICE void transpose_squares(const TransposeArguments& a, i64 item, i64 squares) {
  const i64 unit = item * kThreads + threadIdx.x;
  if (unit >= squares) return;
  const i64 tall = a.rows / S::kBlock / 4, wide = a.columns / S::kBlock / 4, bytes = a.rows * (a.columns / S::kBlock);
  const i64 stripe = quotient(unit, tall, squares), matrix = quotient(stripe, wide, squares);
  const ScaleMatrix s{a.scales + matrix * bytes, a.scales_out + matrix * bytes, a.rows, a.columns};
  transpose_linear_scales<S::kBlock>(s, unit - stripe * tall, stripe - matrix * wide);
}

// Transpose large tile number `item` of scales in the layout swizzled_8x4, from a.scales to a.scales_out. There are
// `items` large tiles in all matrices; a matrix has `tall` of them below each other and `wide` beside each other. All
// threads of the thread block must call this function.
//
// For 16384 x 16384 codes of 4 bits (H200, 2026-11-21), the kernel takes 78.2 us, and 79.4 us if scales are transposed
// with the tiles of codes. For 128x4 scales, the times are 79.1 us and 78.4 us, so those are transposed with the codes.
template <class S>
FP4KIT_DEVICE void transpose_large_tile(const TransposeArguments& a, i64 item, i64 tall, i64 wide, i64 items) {
  using U = LargeScaleTile<S::kLayout, S::kBlock>;
  const i64 stripe = quotient(item, tall, items), matrix = quotient(stripe, wide, items);
  const u8* in = a.scales + matrix * scale_bytes<S::kLayout>(a.rows, a.columns / S::kBlock);
  u8* out = a.scales_out + matrix * scale_bytes<S::kLayout>(a.columns, a.rows / S::kBlock);
  const ScaleMatrix s{in, out, a.rows, a.columns};
  const i64 row = (item - stripe * tall) * U::kTall * S::kBlock, column = (stripe - matrix * wide) * U::kColumns;
  transpose_scale_tile<U>(s, row, column, static_cast<int>(threadIdx.x));
}

// Transpose the tiles of codes, and the scales, that `grid` assigns to this thread block, and store them in a.codes_out
// and a.scales_out. In a group of matrices, they are one piece of a matrix. Tiles are taken down the columns, so that
// thread blocks that run at the same time store neighboring lines. All threads of the thread block must call this
// function.
//
// The order of memory accesses limits the speed. Copying tiles to their transposed positions, without transposing the
// codes in them, already reaches only 0.87 to 0.91 of the speed of a plain copy (H200, 2026-11-21).
template <class S, bool kAligned>
FP4KIT_DEVICE void transpose(const TransposeArguments& a, Grid grid) {
  using T = CodeTile<S::kBits>;
  const i64 tall = (a.rows + T::kRows - 1) / T::kRows, wide = (a.columns + T::kColumns - 1) / T::kColumns;
  const i64 codes = a.rows * a.columns * S::kBits / 8, scales = scale_bytes<S::kLayout>(a.rows, a.columns / S::kBlock);
  const i64 scales_out = scale_bytes<S::kLayout>(a.columns, a.rows / S::kBlock), tiles = a.matrices * tall * wide;
  i64 t = grid.block;
  for (; t < tiles; t += grid.blocks) {
    const i64 stripe = quotient(t, tall, tiles), matrix = quotient(stripe, wide, tiles);
    const CodeMatrix c{a.codes + matrix * codes, a.codes_out + matrix * codes, a.rows, a.columns};
    const ScaleMatrix s{a.scales + matrix * scales, a.scales_out + matrix * scales_out, a.rows, a.columns};
    transpose_tile<S, kAligned>(c, s, (t - stripe * tall) * T::kRows, (stripe - matrix * wide) * T::kColumns);
  }
  if constexpr (kSeparateScales<S> && S::kLayout == ScaleLayout::swizzled_8x4) {
    using U = LargeScaleTile<S::kLayout, S::kBlock>;
    constexpr i64 kRows = U::kTall * S::kBlock, kColumns = U::kColumns;
    const i64 high = (a.rows + kRows - 1) / kRows, across = (a.columns + kColumns - 1) / kColumns,
              items = a.matrices * high * across;
    for (; t < tiles + items; t += grid.blocks) transpose_large_tile<S>(a, t - tiles, high, across, items);
  } else if constexpr (kSeparateScales<S>) {
    const i64 squares = a.matrices * (a.rows / S::kBlock / 4) * (a.columns / S::kBlock / 4);
    for (; t < tiles + (squares + kThreads - 1) / kThreads; t += grid.blocks)
      transpose_squares<S>(a, t - tiles, squares);
  }
}

// Transpose a.codes and a.scales of each matrix of the stack, and store the results in a.codes_out and a.scales_out.
// The kernel is launched for fp4kit.transpose. A thread block processes one tile at a time. Launch with any number of
// thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    transpose_kernel(TransposeArguments a) {
  transpose<S, kAligned>(a, whole_grid());
}
