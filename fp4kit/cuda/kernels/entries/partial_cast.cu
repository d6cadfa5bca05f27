// partial_cast: compute the scales of a shard (the part of the flattened matrix that one process holds) from its
// amaxes, encode its elements, and store their codes in the matrix of codes without changing any other bit. A thread
// takes one run (kRun neighboring elements) of the matrix at a time. R is the recipe, and In is the type of the
// elements. `a` holds the kernel's arguments, and s is the shard.
#include "block.cuh"
#include "fast_path.cuh"
#include "grouped.cuh"
#include "partial.cuh"

// The arguments of partial_cast_kernel, and of each member of grouped_partial_cast_kernel. Arrays are shared by several
// matrices; the fields whose names end in `_at` are the indices at which this matrix begins.
struct PartialCastArguments {
  const void* values;        // elements [start, end) of the flattened matrix
  u8* packed;                // codes; run i of the matrix is run run_at + i of this array
  u8* scale_codes;           // output: one per block that begins in the shard, starting at code_at (null: not wanted)
  const float* block_amax;   // the amaxes of the blocks that the shard touches; block 0 of the matrix is at block_at
  const float* tensor_amax;  // the tensor's amax, at index tensor_at (null without tensor scale)
  i64 start, end;
  i64 columns;  // columns of the matrix
  i64 run_at, code_at, block_at, tensor_at;
};

// Return the Factor of a block, by which its elements are scaled. Its first member is `value`, the factor that the
// block rule computed. Its second member is encode_scale if R::kThenEncode, otherwise 1 / value if elements are
// divided (R::kDivide), otherwise `value`.
template <class R>
FP4KIT_DEVICE Factor factor_by(float value, float encode_scale) {
  if constexpr (R::kThenEncode) return {value, encode_scale};
  return {value, R::kDivide ? 1.0f / value : value};
}

// Encode a run with the Factor of its block, and pack its codes into `words`, the first code in the lowest bits. The
// fast path is used if it is valid for the run (takes_fast_path), and otherwise the exact path. Both give the codes of
// the reference.
template <class R, class In>
FP4KIT_DEVICE void encode_run(const Run<In, kRun>& run, Factor factor, u32 (&words)[kCodeWords<R, kRun>]) {
  if constexpr (FastPath<R, In>::kExists) {
    if (takes_fast_path<R, In>(largest_bits_of(run), factor)) {
      encode_finite<R, In>(run, factor, words);
      return;
    }
  }
  const u32 bytes[kRun] = {};
  float x[kRun];
  widen_run_exactly<R>(run, x);
  exact_codes<R, In>(x, bytes, factor, words);
}

// A cursor over the runs of a matrix, which advances by a fixed number of runs per step and knows the block of each
// run. Blocks are numbered row by row.
template <class R>
struct RunCursor {
  static constexpr u32 kRuns = R::kBlock / kRun;
  u32 runs, row, column;  // runs: runs per row; row, column: the current run
  // The numbers of rows and of runs by which one step advances.
  u32 rows_on, columns_on;

  // Return the cursor that begins at run number `run` of the matrix and advances by `stride` runs per step. `runs` is
  // the number of runs per row.
  FP4KIT_DEVICE RunCursor from(u32 run, u32 runs, u32 stride) {
    if constexpr (R::kBlockRows == 1) return {runs, 0u, run, 0u, stride};
    return {runs, run / runs, run % runs, stride / runs, stride % runs};
  }
  // Return the number of the block that contains the current run. Blocks are numbered row by row.
  FP4KIT_DEVICE_MEMBER u32 block() const { return row / R::kBlockRows * (runs / kRuns) + column / kRuns; }
  // Return whether the current run is the first run of its block.
  FP4KIT_DEVICE_MEMBER bool begins_block() const { return column % kRuns == 0u && row % R::kBlockRows == 0u; }
  // Move the cursor on by one step: to the run that is `stride` runs after the current one.
  FP4KIT_DEVICE_MEMBER void advance() {
    row += rows_on;
    column += columns_on;
    if (R::kBlockRows == 1 || column < runs) return;
    column -= runs;
    ++row;
  }
};

// Encode this thread's runs of the shard s, and store their codes in a.packed. If the shard contains only a part of a
// run, only the codes of that part are stored. The thread that has the first element of a block stores the scale code
// in a.scale_codes. If kAligned, the runs of the shard begin at multiples of 16 bytes.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void cast_runs(const PartialCastArguments& a, const Shard<In>& s, Grid grid) {
  const u32 last = static_cast<u32>((a.end + kRun - 1) / kRun), stride = static_cast<u32>(item_stride(grid));
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax + a.tensor_at, 0, 0, 1);
  const Range safe = whole_runs(s.first, s.last), whole = whole_runs(a.start, a.end);
  u32 i = static_cast<u32>(a.start / kRun + first_item(grid));
  RunCursor<R> cursor = RunCursor<R>::from(i, static_cast<u32>(a.columns / kRun), stride);
  for (; i < last; i += stride, cursor.advance()) {
    const i64 p = static_cast<i64>(i) * kRun;
    const Run<In, kRun> run = safe.has(i) ? read_whole<kAligned>(s, p) : read_owned(s, p);
    const float amax = amax_at(a.block_amax, a.block_at + cursor.block());
    const u32 code = R::BlockRule::template code<R, In>(amax, t);
    if (a.scale_codes && cursor.begins_block() && p >= a.start)
      a.scale_codes[a.code_at + cursor.block()] = static_cast<u8>(code);
    u32 words[kRun * R::Element::kStoredBits / 32];
    encode_run<R, In>(run, factor_by<R>(R::BlockRule::template factor<R, In>(code, amax, t), t.encode), words);
    u8* out = a.packed + (a.run_at + i) * sizeof words;
    if (whole.has(i)) {
      store_words(out, words);
    } else {
      store_owned(out, words, a.start - p, a.end - p);
    }
  }
}

// Encode the elements of a shard that `grid` assigns to this thread block, and store their codes in a.packed. If runs
// begin at multiples of 16 bytes, elements are loaded 16 bytes at a time without shifting. If the shard is empty
// (a.start >= a.end), do nothing.
template <class R, class In>
FP4KIT_DEVICE void partial_cast(const PartialCastArguments& a, Grid grid) {
  if (a.start >= a.end) return;
  const Shard<In> s = shard_of<In>(a.values, a.start, a.end);
  if (s.shift == 0u) {
    cast_runs<R, In, true>(a, s, grid);
  } else {
    cast_runs<R, In, false>(a, s, grid);
  }
}

// Encode the shard a.values with scales computed from a.block_amax and a.tensor_amax, and store its codes in a.packed.
// The codes of other elements do not change, even if they share a byte with codes of the shard. The kernel is launched
// last when processes quantize one matrix together. A thread takes one run at a time. Launch with any number of thread
// blocks.
extern "C" __global__ void __launch_bounds__(kThreads) partial_cast_kernel(PartialCastArguments a) {
  partial_cast<R, Input>(a, whole_grid());
}

// For each shard of a group, encode its elements with scales computed from block_amax and tensor_amax, and store the
// codes in `packed` and the scale codes in scale_codes. The codes of other elements do not change. The kernel is
// launched after the processes that quantize these matrices together have combined their amaxes. A thread block takes
// one piece (part of a shard) at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) grouped_partial_cast_kernel(Group<PartialCastArguments> group) {
  for_each_piece(group, [](const PartialCastArguments& a, Grid grid, bool) { partial_cast<R, Input>(a, grid); });
}
