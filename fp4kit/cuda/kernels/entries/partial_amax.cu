// partial_amax: compute the amax (the largest magnitude) of each block and of the tensor. Only the elements of a shard
// count, the part of the flattened matrix that one process holds. A block at the border of a shard may be only partly
// in it. R is the recipe, and In is the type of the elements. `a` holds the kernel's arguments, and s is the shard.
// Elements [s.first, s.last) may be loaded 16 bytes at a time, and s.shift is the address of a run modulo 16. A thread
// takes one block at a time, row by row.
#include "exact_path.cuh"
#include "grouped.cuh"
#include "partial.cuh"
#include "warp.cuh"

// The arguments of partial_amax_kernel, and of each member of grouped_partial_amax_kernel. Arrays are shared by several
// matrices; block_at and tensor_at are the indices at which this matrix begins.
struct PartialAmaxArguments {
  const void* values;  // elements [start, end) of the flattened matrix
  u32* block_amax;     // bits of float32, set to 0 before; those of this matrix begin at block_at
  u32* tensor_amax;    // bits of float32, set to 0 before; at tensor_at (null: not wanted)
  i64 start, end;
  i64 rows, columns;  // rows and columns of the matrix
  i64 block_at, tensor_at;
};

// The largest magnitudes that a thread has found: `block` in its current block, and `tensor` in all of its blocks. The
// recipe's rule for the tensor amax determines which elements count for `tensor`.
struct Largest {
  float block, tensor;
};

// Include one row of a block in `found`. The row begins at element p of the matrix.
//
// - found.block becomes the amax of the row or, if blocks have several rows, the larger of that amax and its old value.
//   NaN elements are skipped if R::kAmaxNan is `ignore`, and make the amax NaN if it is `propagate`. If it is `lanes`,
//   the amax is NaN only if all elements at odd positions are NaN.
// - found.tensor is raised to the largest finite magnitude of the row if R::kAmaxNan is `lanes`. Otherwise it does not
//   change, and the caller raises it.
//
// If kWhole, the row is loaded 16 bytes at a time, so it must be within [s.first, s.last). If kAligned, s.shift must
// then be 0. If kWhole is false, elements that the shard does not own count as 0.
template <class R, class In, bool kWhole, bool kAligned>
FP4KIT_DEVICE void read_row(Largest& found, const Shard<In>& s, i64 p) {
  BlockAmax<R::kAmaxNan> row;
#pragma unroll
  for (int start = 0; start < R::kBlock; start += kRun) {
    float x[kRun];
    if constexpr (kWhole) {
      widen_run(read_whole<kAligned>(s, p + start), x);
    } else {
      widen_run(read_owned(s, p + start), x);
    }
    row.add(x);
    if constexpr (R::kAmaxNan == AmaxNan::lanes) {  // the tensor's amax is that of finite elements
#pragma unroll
      for (int i = 0; i < kRun; ++i) found.tensor = fmaxf(found.tensor, is_finite(x[i]) ? magnitude_of(x[i]) : 0.0f);
    }
  }
  found.block = R::kBlockRows == 1 ? row.result() : larger_of_rows<R>(found.block, row.result());
}

// Include a block of `rows` rows in `found`, as read_row does for each of its rows. The block begins at element p of
// the matrix, which has `columns` columns. If the shard owns only some elements of the block, the other elements count
// as 0. If kAligned, s.shift must be 0.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void read_block(Largest& found, const Shard<In>& s, i64 p, i64 columns, i64 rows) {
  const i64 end = p + (rows - 1) * columns + R::kBlock;
  if (p >= s.first && end <= s.last && rows == R::kBlockRows) {
#pragma unroll 4
    for (int r = 0; r < R::kBlockRows; ++r) read_row<R, In, true, kAligned>(found, s, p + r * columns);
  } else {
    for (i64 r = 0; r < rows; ++r) read_row<R, In, false, kAligned>(found, s, p + r * columns);
  }
}

// Compute the amaxes of this thread's blocks over the elements of the shard s, and store them in a.block_amax as
// float32 bits. If the shard contains only a part of a block, the stored amax is raised instead, by an atomic maximum.
//
// Return the largest magnitude in these blocks for the tensor's amax, or 0 if the thread has no block. If R::kAmaxNan
// is `lanes`, only finite elements count. Otherwise the result is the largest of the block amaxes, or NaN if one of
// them is NaN.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float amax_of_blocks(const PartialAmaxArguments& a, const Shard<In>& s, Grid grid) {
  constexpr i64 kRows = R::kBlockRows;
  const i64 wide = a.columns / R::kBlock;
  const i64 first = kRows == 1 ? a.start / R::kBlock : a.start / a.columns / kRows * wide;
  const i64 last = kRows == 1 ? (a.end + R::kBlock - 1) / R::kBlock
                              : ((a.end + a.columns - 1) / a.columns + kRows - 1) / kRows * wide;
  Largest found = {};
  for (i64 i = first + first_item(grid); i < last; i += item_stride(grid)) {
    const i64 block_row = kRows == 1 ? 0 : quotient(i, wide, last), row = block_row * kRows;
    const i64 p = kRows == 1 ? i * R::kBlock : row * a.columns + (i - block_row * wide) * R::kBlock;
    const i64 rows = kRows == 1 ? 1 : minimum(kRows, a.rows - row);
    found.block = 0.0f;
    read_block<R, In, kAligned>(found, s, p, a.columns, rows);
    if constexpr (R::kAmaxNan != AmaxNan::lanes)
      found.tensor = float_of(maximum(bits_of(found.tensor), bits_of(found.block)));
    const bool owned = p >= a.start && p + (rows - 1) * a.columns + R::kBlock <= a.end;
    u32* out = a.block_amax + a.block_at + i;
    if (owned) {
      *out = bits_of(found.block);
    } else {
      atomicMax(out, bits_of(found.block));  // another shard may own the other elements
    }
  }
  return found.tensor;
}

// Compute the block amaxes and the tensor's amax over the elements of a shard that `grid` assigns to this thread block.
// Store the block amaxes in a.block_amax, and raise the tensor's amax in a.tensor_amax, unless that is null. If the
// shard is empty (a.start >= a.end), do nothing. All threads of a warp must call this function.
template <class R, class In>
FP4KIT_DEVICE void partial_amax(const PartialAmaxArguments& a, Grid grid) {
  if (a.start >= a.end) return;
  const Shard<In> s = shard_of<In>(a.values, a.start, a.end);
  const float amax = s.shift == 0u ? amax_of_blocks<R, In, true>(a, s, grid) : amax_of_blocks<R, In, false>(a, s, grid);
  if (!a.tensor_amax) return;
  const u32 largest = largest_of_warp(bits_of(amax));
  if (threadIdx.x % 32 == 0) atomicMax(a.tensor_amax + a.tensor_at, largest);
}

// Store in a.block_amax and a.tensor_amax the largest magnitudes among the elements of a shard, as float32 bits. The
// caller sets both to 0 before, because amaxes of the tensor and of blocks at the border of the shard are only raised.
// The kernel is launched first when processes quantize one matrix together. The processes then combine their amaxes. A
// thread takes one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) partial_amax_kernel(PartialAmaxArguments a) {
  partial_amax<R, Input>(a, whole_grid());
}

// For each shard of a group, store in block_amax and tensor_amax the largest magnitudes among its elements, as float32
// bits. The caller sets both to 0 before. The kernel is launched first when processes quantize several matrices
// together. A thread block takes one piece (part of a shard) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_partial_amax_kernel(Group<PartialAmaxArguments> group) {
  for_each_piece(group, [](const PartialAmaxArguments& a, Grid grid, bool) { partial_amax<R, Input>(a, grid); });
}
