// partial_place: copy codes and scale codes from the gathered messages of all processes, which have computed them, to
// the matrices. Only the codes that each sender owns are copied. A thread copies one run (kRun codes) or the scale of
// four blocks at a time. Scales are stored in the layout kLayout, and its padding is not written. The scale of a block
// of several rows is stored once per row. R is the recipe, and In is the type of the elements. `a` holds the arguments
// for one sender: its message, the matrix and the elements that it owns.
#include "block.cuh"
#include "grouped.cuh"
#include "partial.cuh"
#include "scale_layout.cuh"

// The arguments of each member of grouped_partial_place_kernel. Arrays are shared by several matrices.
struct PartialPlaceArguments {
  const u8* from;            // the received codes; run i of the matrix is run from_at + i of this array (null: none)
  u8* to;                    // the codes of the matrices; run i of the matrix becomes run to_at + i
  const u8* scale_codes;     // the received scale codes; that of block i of the matrix is at code_at + i
  u8* scales;                // output: rows x columns / kBlock scales, starting at index scale_at
  const float* tensor_amax;  // the tensor's amax, at index tensor_at (null without tensor scale)
  float* tensor_scale;       // output: the decode scale, at index tensor_at; 1 for recipes without tensor scale
  i64 start, end;            // elements of the matrix that the sender owns
  i64 first, last;           // blocks of the matrix that begin in these elements
  i64 rows, columns;         // rows and columns of the matrix
  i64 from_at, to_at, code_at, scale_at, tensor_at;
};

// Copy codes that one process has sent from its message (a.from) to the matrix of codes (a.to): those that `grid`
// assigns to this thread block. Only the codes of elements a.start ... a.end - 1 of the matrix, which the sender owns,
// are copied; no other bit changes. A run has kWords words of codes.
template <int kWords>
FP4KIT_DEVICE void place_codes(const PartialPlaceArguments& a, Grid grid) {
  const u32 last = static_cast<u32>((a.end + kRun - 1) / kRun), stride = static_cast<u32>(item_stride(grid));
  const Range whole = whole_runs(a.start, a.end);
  for (u32 i = static_cast<u32>(a.start / kRun + first_item(grid)); i < last; i += stride) {
    u32 words[kWords];
    const u64* from = reinterpret_cast<const u64*>(a.from + (a.from_at + i) * sizeof words);
#pragma unroll
    for (int j = 0; j < kWords; j += 2) {
      const u64 pair = from[j / 2];
      words[j] = static_cast<u32>(pair);
      words[j + 1] = static_cast<u32>(pair >> 32);
    }
    u8* out = a.to + (a.to_at + i) * sizeof words;
    const i64 p = static_cast<i64>(i) * kRun;
    if (whole.has(i)) {
      store_words(out, words);
    } else {
      store_owned(out, words, a.start - p, a.end - p);
    }
  }
}

// Store the scales of kCount blocks of a block row, from block i on. kCount is 1, or 4 if the scales of the blocks are
// contiguous and begin at a multiple of 4 bytes. wide is the number of blocks in a row.
template <class R, int kCount>
FP4KIT_DEVICE void place_scales_from(const PartialPlaceArguments& a, i64 i, i64 wide) {
  const i64 block_row = quotient(i, wide, a.last), row = block_row * R::kBlockRows, column = i - block_row * wide;
  const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - row));
  u8 codes[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) codes[k] = a.scale_codes[a.code_at + i + k];
  for (int r = 0; r < rows; ++r) {
    u8* out = a.scales + a.scale_at + scale_offset<kLayout>(row + r, column, wide);
    if constexpr (kCount == 4) {
      *reinterpret_cast<u32*>(out) = codes[0] | codes[1] << 8 | codes[2] << 16 | static_cast<u32>(codes[3]) << 24;
    } else {
      *out = codes[0];
    }
  }
}

// Store the scales of those blocks of a matrix that one process has sent and that `grid` assigns to this thread block,
// and the tensor scale. A thread takes four blocks at a time.
template <class R, class In>
FP4KIT_DEVICE void place_scales(const PartialPlaceArguments& a, Grid grid) {
  const i64 wide = a.columns / R::kBlock;
  if (first_item(grid) == 0)
    a.tensor_scale[a.tensor_at] = tensor_scale_of<R, In>(a.tensor_amax + a.tensor_at, 0, 0, wide).decode;
  const bool fours = wide % 4 == 0 && a.scale_at % 4 == 0;
  for (i64 i = a.first / 4 * 4 + 4 * first_item(grid); i < a.last; i += 4 * item_stride(grid)) {
    if (fours && i >= a.first && i + 4 <= a.last) {
      place_scales_from<R, 4>(a, i, wide);
    } else {
      for (i64 k = maximum(i, a.first); k < minimum(i + 4, a.last); ++k) place_scales_from<R, 1>(a, k, wide);
    }
  }
}

constexpr int kWords = kRun * R::Element::kStoredBits / 32;  // number of words of codes per run

// For each sender of the group, copy the codes and scales that it owns from its message to its matrix, and store the
// tensor scale. Other codes do not change. The kernel is launched after the processes have exchanged their messages. A
// thread block takes one piece at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_partial_place_kernel(Group<PartialPlaceArguments> group) {
  for_each_piece(group, [](const PartialPlaceArguments& a, Grid grid, bool) {
    if (a.from && a.start < a.end) place_codes<kWords>(a, grid);
    place_scales<R, Input>(a, grid);
  });
}
