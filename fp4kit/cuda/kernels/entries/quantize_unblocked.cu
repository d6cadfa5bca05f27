// quantize_unblocked: quantize without block scales, with one float32 scale per tensor or per row (FP8, INT8, INT4 by
// tensor or channel). R is the recipe, and In is the type of the elements of x. kAligned is true if all rows of x (and
// of `values`, if they are stored) begin at multiples of 16 bytes. `a` holds the kernel's arguments: the arrays and
// their sizes. If R::kFake, the values to which codes decode are stored instead of codes and scales.
//
// Rows may have any length. A thread processes runs (16 bytes of neighboring elements of one row), and loads several
// runs before it uses the first one. Elements after the last whole run of a row are quantized one at a time.
#include "amax.cuh"
#include "quantize.cuh"
#include "row_step.cuh"

// Compile-time constants for a recipe R and an element type In: the number of elements per run, and of runs per thread
// and step.
template <class R, class In>
struct UnblockedTraits {
  // With 16 bytes of values per thread, a warp stores whole lines.
  static constexpr int kRun = 16 / (R::kFake ? sizeof(typename In::Bits) : 1);
  static constexpr int kUnroll = 64 / (kRun * sizeof(typename In::Bits));
};

// Quantize the part of the matrix a.x that `grid` assigns to this thread block, without block scales, and store its
// codes, or its values if R::kFake. In a group of tensors, this part is one piece of a tensor. The scale of the tensor,
// or of each row, is computed from a.tensor_amax. The thread with the first run of the tensor or row also stores it in
// a.tensor_scale, unless R::kFake or a.tensor_scale is nullptr.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_unblocked(const QuantizeArguments& a, Grid grid) {
  using Traits = UnblockedTraits<R, In>;
  constexpr int kRun = Traits::kRun;
  constexpr bool kRows = R::kTensorScaling == TensorScaling::row;
  const u32 row_runs = static_cast<u32>((a.columns + kRun - 1) / kRun), runs = static_cast<u32>(a.rows) * row_runs;
  const bool whole_stores = reinterpret_cast<u64>(a.packed) % 16 == 0;  // a matrix of a stack may begin anywhere
  const bool even = kAligned && whole_stores && (a.rows == 1 || a.columns % kRun == 0);
  const TensorScale whole_scale = kRows ? TensorScale{} : tensor_scale_of<R, In>(a.tensor_amax, 0, 0, 1);
  constexpr u32 kStep = kThreads * Traits::kUnroll;
  for (u32 start = grid.block * kStep; start < runs; start += grid.blocks * kStep) {
    Run<In, kRun> x[Traits::kUnroll];
    i64 firsts[Traits::kUnroll];
    u32 rows[Traits::kUnroll];
    int counts[Traits::kUnroll];
    float amaxes[Traits::kUnroll];
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x;
      rows[k] = a.rows == 1 ? 0u : run / row_runs;
      const i64 column = static_cast<i64>(run - rows[k] * row_runs) * kRun;
      firsts[k] = rows[k] * a.columns + column;
      amaxes[k] = kRows && run < runs ? amax_at(a.tensor_amax, rows[k]) : 0.0f;
      counts[k] = run < runs ? static_cast<int>(minimum<i64>(kRun, a.columns - column)) : 0;
      const typename In::Bits* from = static_cast<const typename In::Bits*>(a.x) + firsts[k];
      if (even && counts[k] == kRun)
        x[k] = read_run<In, kRun>(from);
      else if (R::kHadamard && counts[k])
        x[k] = read_run<In, kRun, false>(from);  // rows are whole runs
    }
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) {
      if (counts[k] == 0) break;
      const TensorScale t = kRows ? R::TensorRule::template scale<R, In>(amaxes[k]) : whole_scale;
      const Factor f = factor_of_code<R, In>(0u, t);
      if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x[k]);
      if (even && counts[k] == kRun) {
        quantize_run<R, In, kAligned>(a, firsts[k], x[k], f, t);
      } else {
        typename In::Bits transformed[R::kHadamard ? kRun : 1];
        const typename In::Bits* from = static_cast<const typename In::Bits*>(a.x) + firsts[k];
        if constexpr (R::kHadamard) from = narrow_to(x[k], transformed);
        quantize_elements<R, In>(a, firsts[k], counts[k], from, f, t);
      }
      const bool owner = !R::kFake && firsts[k] == rows[k] * a.columns && (kRows || rows[k] == 0u);
      if (owner && a.tensor_scale) store_tensor_scale(a, rows[k], t);
    }
  }
}

// Quantize the rows of a matrix that `grid` assigns to this thread block, one at a time, by recipes with one tensor
// scale per row and one code per byte. First find the amax of the row, and store it in the array at a.tensor_amax. Then
// the row is read again, from a cache.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_unblocked_rows(const QuantizeArguments& a, Grid grid) {
  for (i64 row = grid.block; row < a.rows; row += grid.blocks) {
    const i64 first = row * a.columns;
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x) + first;
    const u32 own = largest_bits<Untransformed, In, kRowInput<R>, kAligned>(x, a.columns, threadIdx.x, kThreads);
    const float amax = float_of(largest_of_block(own));
    QuantizeArguments one = a;
    one.x = x, one.rows = 1, one.tensor_amax = a.tensor_amax + row;
    if (R::kFake) one.values = static_cast<typename In::Bits*>(a.values) + first;
    if (!R::kFake) one.packed = a.packed + first;
    if (a.tensor_scale) one.tensor_scale = a.tensor_scale + row;
    if (threadIdx.x == 0) *const_cast<float*>(one.tensor_amax) = amax;
    __syncthreads();
    quantize_unblocked<R, In, kAligned>(one, {0, 1});
  }
}

// Quantize a.x, and store its codes in a.packed and its tensor scales in a.tensor_scale (unless that is nullptr); or
// store only its values in a.values if R::kFake. The kernel is launched for recipes without blocks. A thread processes
// several runs per step.
//
// If R::kRowStep is not `none`, each thread block finds the amaxes of its own rows, one row at a time.
//
// If R::kFinders is 0, launch with any number of thread blocks. Otherwise launch with a multiple of R::kFinders thread
// blocks, which first find the tensor's amax, or the amax of each row, and store it at a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads) quantize_unblocked_kernel(QuantizeArguments a) {
  if constexpr (R::kRowStep != RowStep::none) {
    quantize_unblocked_rows<R, Input, kAligned>(a, whole_grid());
  } else {
    find_amax<R, Input, kAligned>(a);
    quantize_unblocked<R, Input, kAligned>(a, whole_grid());
  }
}
