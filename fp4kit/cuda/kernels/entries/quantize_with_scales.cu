// quantize_with_scales: encode elements with block scales and tensor scales that the caller gives. So a.scales (in R's
// layout) and a.tensor_scale are inputs of this kernel. A thread processes a run of 16 neighboring elements of a row at
// a time. R is the recipe, In is the type of the elements of x, and kAligned is true if all rows of x begin at
// multiples of 16 bytes. `a` holds the kernel's arguments: the arrays and their sizes. t is a tensor scale: its encode
// and decode factors. A block's factor is what its elements are multiplied or divided by. The fast path encodes finite
// elements in few instructions; the exact path is valid for all elements.
//
// If the recipe multiplies elements by the tensor's encode scale, a.tensor_amax holds the amaxes from which the recipe
// would compute the tensor scales. Otherwise a.tensor_amax is nullptr.
//
// A thread computes the block's factor from the given scale code by the recipe's rule. The whole block is read only if
// its factor or its codes depend on its amax (kReadsBlock).
#include "four_over_six.cuh"
#include "implied_amax.cuh"

constexpr int kRun = 16;

// True if a block must be read to find its amax. That is so if its factor depends on the amax, or if R uses 4over6
// (each block gets the better of two scales) and flushes blocks of zeros.
template <class R>
constexpr bool kReadsBlock = R::BlockRule::kReadsAmax || (R::kFourOverSix && (R::kFlush || R::kIsCute));

// Return the run of 16 elements of a.x that begins at element `first`. If R::kHadamard, the returned run is
// transformed; a.x itself does not change. If kAligned, the run must begin at a multiple of 16 bytes.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE Run<In, kRun> load_given(const QuantizeArguments& a, i64 first) {
  Run<In, kRun> run = read_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(run);
  return run;
}

// Return the tensor scale of block `block` of row `row`, from the scales that the caller gives. A row has `blocks`
// blocks.
//
// - If the recipe has no tensor scale, all fields of the result are 1.
// - If a.tensor_amax is null, `decode` is the given scale, and the other fields are 1.
// - Otherwise `decode` is the given scale, `amax` is the element of a.tensor_amax, and `encode` is the recipe's encode
//   scale for that amax. If the amax is unknown (kUnknownAmax), `encode` is 1 / decode.
template <class R, class In>
FP4KIT_DEVICE TensorScale given_tensor_scale(const QuantizeArguments& a, i64 row, i64 block, i64 blocks) {
  if constexpr (R::kTensorScaling == TensorScaling::none) {
    return {1.0f, 1.0f, 1.0f};
  } else {
    i64 i = 0;
    if constexpr (R::kTensorScaling == TensorScaling::row) i = row;
    if constexpr (R::kTensorScaling == TensorScaling::block) i = row * blocks + block;
    if (!a.tensor_amax) return {1.0f, a.tensor_scale[i], 1.0f};
    return encoding_scale<R, In>(a.tensor_scale[i], a.tensor_amax[i]);
  }
}

// Return the amax of the block that contains row `row` and has number `block` among the blocks side by side. All
// elements of the block that are in the matrix are loaded from a.x. If kReadsBlock is false, return 1 without reading
// the block, because nothing then depends on the amax.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float given_block_amax(const QuantizeArguments& a, i64 row, i64 block) {
  if constexpr (!kReadsBlock<R>) return 1.0f;
  const i64 top = row / R::kBlockRows * R::kBlockRows;
  const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - top));
  return exact_amax<R, kRun>(rows, [&](int i, int j, float (&x)[kRun]) {
    widen_run(load_given<R, In, kAligned>(a, (top + i) * a.columns + block * R::kBlock + j), x);
  });
}

// Encode a whole run, and store its codes in a.packed. The run begins at element `first` of a.x. `amax` and `code` are
// the amax and the scale code of its block. If the factor is negative or -0, the run takes the exact path, because fast
// paths are valid only for factors that rules compute from amaxes.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void encode_given(const QuantizeArguments& a, i64 first, Run<In, kRun>& run, float amax, u32 code,
                                TensorScale t) {
  if constexpr (R::kFourOverSix) {
    store_chosen<R, In, kAligned>(a, first, encode_chosen<R>(run, amax, code, t), code, t);
  } else {
    const Factor f = factor_of<R, In>(code, amax, t);
    if (sign_of(f.value) == 0u) return quantize_run<R, In, kAligned>(a, first, run, f, t);
    float values[kRun];
    widen_run_exactly<R>(run, values);
    store_exact<R, In, kAligned>(a, first, values, f, code, t);
  }
}

// Encode elements `first` ... `first` + `count` - 1 (at most kRun) for a recipe without blocks, and store their codes
// in a.packed. t is their tensor scale. The function is used for an incomplete run at the end of a row, and for runs
// whose codes are not aligned. If R::kHadamard, kRun elements are read whatever `count` is, so they must exist in a.x.
template <class R, class In>
FP4KIT_DEVICE void encode_elements(const QuantizeArguments& a, i64 first, int count, TensorScale t) {
  const typename In::Bits* from = static_cast<const typename In::Bits*>(a.x) + first;
  typename In::Bits transformed[R::kHadamard ? kRun : 1];
  if constexpr (R::kHadamard) from = narrow_to(load_given<R, In, false>(a, first), transformed);  // rows are whole runs
  quantize_elements<R, In>(a, first, count, from, factor_of_code<R, In>(0u, t), t);
}

// Encode the part of the matrix a.x that `grid` assigns to this thread block with the given scales, and store the codes
// in a.packed. a.scales and a.tensor_scale do not change.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_with_scales(const QuantizeArguments& a, Grid grid) {
  const i64 row_runs = (a.columns + kRun - 1) / kRun, runs = a.rows * row_runs, blocks = a.columns / R::kBlock;
  const bool even = reinterpret_cast<u64>(a.packed) % 16 == 0 && (a.rows == 1 || a.columns % kRun == 0);
  for (i64 i = first_item(grid); i < runs; i += item_stride(grid)) {
    const i64 row = quotient(i, row_runs, runs), column = (i - row * row_runs) * kRun, first = row * a.columns + column;
    const i64 block = column / R::kBlock;
    const TensorScale t = given_tensor_scale<R, In>(a, row, block, blocks);
    const int count = static_cast<int>(minimum<i64>(kRun, a.columns - column));
    if constexpr (!R::kHasBlocks) {
      if (!(even && count == kRun)) {
        encode_elements<R, In>(a, first, count, t);
        continue;
      }
    }
    u32 code = 0u;
    if constexpr (R::kHasScales) code = a.scales[scale_offset<R::kLayout, i64>(row, block, blocks)];
    const float amax = given_block_amax<R, In, kAligned>(a, row, block);
    Run<In, kRun> run = load_given<R, In, kAligned>(a, first);
    encode_given<R, In, kAligned>(a, first, run, amax, code, t);
  }
}

// Encode a.x with the given scales a.scales and a.tensor_scale, and store the codes in a.packed. Nothing else is
// stored. The kernel is launched for fp4kit.quantize with scales that the caller passes. A thread processes 16
// neighboring elements at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) quantize_with_scales_kernel(QuantizeArguments a) {
  quantize_with_scales<R, Input, kAligned>(a, whole_grid());
}
