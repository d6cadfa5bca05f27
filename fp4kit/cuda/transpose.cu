// transpose: codes and block scales of a stack of matrices with square blocks -> those of the transposed matrices. No decoding.
//
// S states: kBits of a code; kBlock; kLayout of the scales; kRun: bytes of scales that can be written at a time.
// kAligned: lines of codes are whole chunks of 16 bytes, in and out.
#include "transpose_codes.cuh"
#include "transpose_scales.cuh"

constexpr int kThreads = 256, kResident = 3;  // thread blocks of a multiprocessor

struct Arguments {
  const u8 *codes, *scales;
  u8 *codes_out, *scales_out;
  i64 matrices, rows, columns;  // of codes
};

// The tile of codes at (row, column), with its scales.
template <class S, bool kAligned>
FP4KIT_DEVICE void transpose_tile(const CodeMatrix& codes, const ScaleMatrix& scales, i64 row, i64 column) {
  using T = CodeTile<S::kBits>;
  using U = ScaleTile<S::kLayout, S::kBlock, T::kRows, T::kColumns>;
  __shared__ Chunk tile[T::kChunks];
  __shared__ Chunk scale_chunks[(U::kScales + 15) / 16];
  u8* scale_tile = reinterpret_cast<u8*>(scale_chunks);
  const int thread = static_cast<int>(threadIdx.x);
  const u8 scale = load_scale<U>(scales, row, column, thread);
  read_tile<S::kBits, kAligned>(codes, row, column, tile);
  put_scale<U>(scale_tile, scale, thread);
  __syncthreads();
  write_tile<S::kBits, kAligned>(codes, column, row, tile);
  if constexpr (S::kRun > 1) {
    write_scale_runs<U, S::kRun>(scales, column, row / S::kBlock, scale_tile, thread, kThreads);
  } else {
    write_scale_bytes<U>(scales, column, row / S::kBlock, scale_tile, thread, kThreads);
  }
  __syncthreads();
}

// Tiles column by column: thread blocks that run at the same time write neighbouring lines.
template <class S, bool kAligned>
FP4KIT_DEVICE void transpose(const Arguments& a, Grid grid) {
  using T = CodeTile<S::kBits>;
  const i64 tall = (a.rows + T::kRows - 1) / T::kRows, wide = (a.columns + T::kColumns - 1) / T::kColumns;
  const i64 codes = a.rows * a.columns * S::kBits / 8, scales = scale_bytes<S::kLayout>(a.rows, a.columns / S::kBlock);
  const i64 scales_out = scale_bytes<S::kLayout>(a.columns, a.rows / S::kBlock), tiles = a.matrices * tall * wide;
  for (i64 t = grid.block; t < tiles; t += grid.blocks) {
    const i64 stripe = quotient(t, tall, tiles), matrix = quotient(stripe, wide, tiles);
    const CodeMatrix c{a.codes + matrix * codes, a.codes_out + matrix * codes, a.rows, a.columns};
    const ScaleMatrix s{a.scales + matrix * scales, a.scales_out + matrix * scales_out, a.rows, a.columns};
    transpose_tile<S, kAligned>(c, s, (t - stripe * tall) * T::kRows, (stripe - matrix * wide) * T::kColumns);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) transpose_kernel(Arguments a) {
  transpose<S, kAligned>(a, whole_grid());
}
