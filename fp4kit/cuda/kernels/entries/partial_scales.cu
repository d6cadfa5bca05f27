// partial_scales: compute the tensor scale, block scales and block factors of a matrix from its amaxes, after all
// processes have combined their amaxes. A thread takes one block at a time. The scale of a block of several rows is
// stored once per row. Scales are stored in the layout kLayout, and its padding is not written. A factor is the number
// by which the elements of a block are scaled before they are rounded. `a` holds the kernel's arguments: the arrays and
// their sizes.
#include "block.cuh"
#include "grouped.cuh"
#include "scale_layout.cuh"

// The arguments of partial_scales_kernel, and of each member of grouped_partial_scales_kernel. Arrays are shared by
// several matrices; the fields whose names end in `_at` are the indices at which this matrix begins.
struct PartialScalesArguments {
  const float* block_amax;   // the block amaxes of this matrix, starting at index block_at
  const float* tensor_amax;  // the tensor's amax, at index tensor_at (null without tensor scale)
  float* factors;            // output: one factor per block, starting at index factor_at
  u8* scales;                // output: rows x columns / kBlock scales, starting at index scale_at (null: not wanted)
  float* tensor_scale;       // output: the decode scale, at index tensor_at (null: not wanted)
  i64 rows, columns;         // rows and columns of the matrix
  i64 block_at, factor_at, scale_at, tensor_at;
};

// Compute the tensor scale, and the block scales and factors of the blocks that `grid` assigns to this thread block.
// Store them in a.tensor_scale, a.scales and a.factors. If a.tensor_scale or a.scales is null, that output is left out.
// The first thread of the grid stores the tensor scale, which is 1 for recipes without one. R is the recipe, and In is
// the type of the elements.
template <class R, class In>
FP4KIT_DEVICE void partial_scales(const PartialScalesArguments& a, Grid grid) {
  const i64 wide = a.columns / R::kBlock, count = (a.rows + R::kBlockRows - 1) / R::kBlockRows * wide;
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax ? a.tensor_amax + a.tensor_at : nullptr, 0, 0, wide);
  if (a.tensor_scale && first_item(grid) == 0) a.tensor_scale[a.tensor_at] = t.decode;
  for (i64 i = first_item(grid); i < count; i += item_stride(grid)) {
    const float amax = amax_at(a.block_amax, a.block_at + i);
    const u32 code = R::BlockRule::template code<R, In>(amax, t);
    a.factors[a.factor_at + i] = R::BlockRule::template factor<R, In>(code, amax, t);
    if (!a.scales) continue;
    if constexpr (R::kBlockRows == 1 && kLayout == ScaleLayout::linear) {
      a.scales[a.scale_at + i] = static_cast<u8>(code);
    } else {
      const i64 block_row = quotient(i, wide, count), row = block_row * R::kBlockRows, column = i - block_row * wide;
      const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - row));
      for (int r = 0; r < rows; ++r)
        a.scales[a.scale_at + scale_offset<kLayout>(row + r, column, wide)] = static_cast<u8>(code);
    }
  }
}

// Compute a.tensor_scale, a.scales and a.factors of a matrix from its amaxes a.tensor_amax and a.block_amax. If
// a.tensor_scale or a.scales is null, that output is left out. The kernel is launched between partial_amax_kernel and
// partial_cast_kernel. A thread takes one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) partial_scales_kernel(PartialScalesArguments a) {
  partial_scales<R, Input>(a, whole_grid());
}

// For each matrix of a group, compute tensor_scale, scales and factors from its amaxes tensor_amax and block_amax. If
// tensor_scale or `scales` is null, that output is left out. The kernel is launched after the processes that quantize
// these matrices together have combined their amaxes. A thread block takes one piece (part of a matrix) at a time.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_partial_scales_kernel(Group<PartialScalesArguments> group) {
  for_each_piece(group, [](const PartialScalesArguments& a, Grid grid, bool) { partial_scales<R, Input>(a, grid); });
}
