// swizzle: convert the block scales of a stack of matrices from layout kFrom to layout kTo, and set padding to zero. A
// layout is linear (row by row), or swizzled: in tiles of 128 x 4 or 8 x 4 scales, to which matrices are padded. A
// scale is one byte. `a` holds the kernel's arguments: the arrays, and the numbers of matrices, rows and columns
// without padding. A quad is four rows that lie together in a swizzled layout.
//
// 16 contiguous bytes of a swizzled layout are 4 columns of 4 rows. These rows are 32 apart in 128x4, and consecutive
// in 8x4. Four such chunks hold 16 columns of the four rows. A thread moves these 64 bytes. Reordering the bytes needs
// no instruction, because whole words change places in registers.
#include "scale_layout.cuh"
#include "runs.cuh"

// The arguments of swizzle_kernel.
struct SwizzleArguments {
  const u8* in;                 // block scales in the old layout
  u8* out;                      // block scales in the new layout
  i64 matrices, rows, columns;  // rows and columns of scales, without padding
};

constexpr bool kFromLinear = kFrom == ScaleLayout::linear;

// Copy a quad (four rows) of 16 columns of scales from one matrix to another: from the linear layout at `in` to the
// swizzled layout kTiled at `out` if kFromLinear, otherwise from kTiled at `in` to linear at `out`. `quad` is the
// number of the quad in the padded matrix, and `column` is the first of the 16 columns. Rows from `rows` on are
// padding: they are set to zero in kTiled, and left out in the linear layout. `column`, `columns` and both addresses
// must be multiples of 16.
template <ScaleLayout kTiled>
FP4KIT_DEVICE void move_quad(const u8* in, u8* out, i64 quad, i64 column, i64 rows, i64 columns) {
  constexpr int kStep = kTiled == ScaleLayout::swizzled_128x4 ? 32 : 1;  // distance of the four rows
  const i64 first = kStep == 1 ? 4 * quad : quad / 32 * 128 + quad % 32;
  Chunk read[4], written[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const i64 row = first + i * kStep;
    if (!kFromLinear) {
      read[i] = *reinterpret_cast<const Chunk*>(in + scale_offset<kTiled>(first, column + 4 * i, columns));
    } else if (row < rows) {
      read[i] = *reinterpret_cast<const Chunk*>(in + row * columns + column);
    } else {
      read[i] = Chunk{};
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) written[i].w[j] = read[j].w[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const i64 row = first + i * kStep;
    if (kFromLinear) {
      *reinterpret_cast<Chunk*>(out + scale_offset<kTiled>(first, column + 4 * i, columns)) = written[i];
    } else if (row < rows) {
      *reinterpret_cast<Chunk*>(out + row * columns + column) = written[i];
    }
  }
}

// Convert the scales that `grid` assigns to this thread block between the linear layout and the swizzled layout kTiled
// (in the direction that kFromLinear says), 64 bytes per thread and step: a quad of 16 columns. The number of columns
// and the addresses must be multiples of 16.
//
// Consecutive threads process kHigh quads below each other, then the next 16 columns, so that a warp loads and stores
// whole sectors. kHigh = 8 and kHigh = 2 were the fastest of 1 to 32 (H200, 2026-11-21).
template <ScaleLayout kTiled>
FP4KIT_DEVICE void swizzle_quads(const SwizzleArguments& a, Grid grid) {
  constexpr int kHigh = kTiled == ScaleLayout::swizzled_128x4 ? 8 : 2;
  const i64 quads = padded_rows<kTiled>(a.rows) / 4, chunks = a.columns / 16, across = chunks * kHigh;
  const i64 items = a.matrices * quads * chunks;
  const i64 linear = a.rows * a.columns, tiled = 4 * quads * a.columns;
  for (i64 item = first_item(grid); item < items; item += item_stride(grid)) {
    const i64 stripe = quotient(item, across, items), inside = item - stripe * across;
    const i64 matrix = quotient(stripe, quads / kHigh, items);
    const i64 quad = (stripe - matrix * (quads / kHigh)) * kHigh + inside % kHigh, column = inside / kHigh * 16;
    const u8* in = a.in + matrix * (kFromLinear ? linear : tiled);
    move_quad<kTiled>(in, a.out + matrix * (kFromLinear ? tiled : linear), quad, column, a.rows, a.columns);
  }
}

// Convert the scales that `grid` assigns to this thread block from layout kSource to layout kTarget, with any number of
// columns and any alignment. Padding of a swizzled kTarget is set to zero. In each step, a thread moves four bytes one
// by one.
template <ScaleLayout kSource, ScaleLayout kTarget>
FP4KIT_DEVICE void swizzle_bytes(const SwizzleArguments& a, Grid grid) {
  const i64 tall = padded_rows<kTarget>(a.rows), wide = (a.columns + 3) / 4, count = a.matrices * tall * wide;
  const i64 source = scale_bytes<kSource>(a.rows, a.columns), target = scale_bytes<kTarget>(a.rows, a.columns);
  for (i64 i = first_item(grid); i < count; i += item_stride(grid)) {
    const i64 stripe = quotient(i, wide, count), matrix = quotient(stripe, tall, count);
    const i64 row = stripe - matrix * tall, column = 4 * (i - stripe * wide);
    const u8* in = a.in + matrix * source;
    u8* out = a.out + matrix * target;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool inside = row < a.rows && column + k < a.columns;
      const u8 scale = inside ? in[scale_offset<kSource>(row, column + k, a.columns)] : 0;
      if (inside || kTarget != ScaleLayout::linear) out[scale_offset<kTarget>(row, column + k, a.columns)] = scale;
    }
  }
}

// Convert the scales a.in from layout kFrom to layout kTo, and store them in a.out with zero padding. The kernel is
// launched for fp4kit.swizzle, fp4kit.unswizzle and fp4kit.requantize. A thread moves 64 bytes per step if kQuads, and
// otherwise four. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) swizzle_kernel(SwizzleArguments a) {
  if constexpr (kQuads) {
    swizzle_quads<kFromLinear ? kTo : kFrom>(a, whole_grid());
  } else {
    swizzle_bytes<kFrom, kTo>(a, whole_grid());
  }
}
