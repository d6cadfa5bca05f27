// fake_quantize for recipes that have their own fake-quantization rule (fake.cuh). It computes quantized values from
// elements in one pass, without codes. R is the recipe, In is the type of the elements of x, and kAligned is true if
// all rows of x and `values` begin at multiples of 16 bytes. `a` holds the kernel's arguments: the arrays and their
// sizes. A FakeScale holds the factors by which the rule scales elements before and after rounding. An amax is the
// largest magnitude of a block or a tensor. A run is the neighboring elements that a thread loads at once, usually 16
// bytes.
//
// Because runs have at least 16 bytes, a warp loads and stores whole lines. A thread loads several runs before it uses
// the first one. Neighboring threads share a block and find its amax together.
#include "amax.cuh"
#include "fake.cuh"
#include "quantize.cuh"

// The number of runs that a thread loads per step. Two are fastest, or four if a thread block first fills a table or
// divides once per row.
template <class R>
constexpr u32 kFakeUnroll = R::kHasBlocks && !R::kHasTable ? 2 : 4;

// The number of elements per run: 16 bytes, or more if 32 runs of 16 bytes would not cover a block.
template <class R, class In>
constexpr int kFakeRun = R::kHasBlocks && R::kBlock / 32 > 16 / static_cast<int>(sizeof(typename In::Bits))
                             ? R::kBlock / 32
                             : 16 / static_cast<int>(sizeof(typename In::Bits));

// Return the FakeScale of a block with the given amax. tensor_amax is the amax from which its tensor scale is computed.
// If R::kHasTable, the FakeScale is read from `table`, which holds one for every scale code (make_scale_table).
// Otherwise it is computed, and `table` is not read.
template <class R, class In>
FP4KIT_DEVICE FakeScale fake_scale(float amax, float tensor_amax, const FakeScale* table) {
  using Rule = typename R::FakeRule;
  if constexpr (Rule::kHasCodes) {
    const u32 code = Rule::template code<R>(amax, tensor_amax);
    return R::kHasTable ? table[code] : Rule::template scale_of<R>(code, tensor_amax);
  } else {
    return Rule::template scale<R, In>(amax, tensor_amax);
  }
}

// If R::kHasTable, fill `table` with the FakeScale of every scale code, for a tensor with the amax tensor_amax; thread
// i stores entry i. Otherwise do nothing. All threads of the thread block must call this function, and may read the
// table when it returns.
template <class R>
FP4KIT_DEVICE void make_scale_table(FakeScale* table, float tensor_amax) {
  using Rule = typename R::FakeRule;
  if constexpr (Rule::kHasCodes && R::kHasTable) {
    table[threadIdx.x] = Rule::template scale_of<R>(threadIdx.x, tensor_amax);
    __syncthreads();
  }
}

// Fake-quantize the `count` elements at x with the FakeScale s, one at a time, and store the results at y, rounded to
// In. This uses the slow rule, which is valid for all elements, infinities and NaN included.
template <class R, class In>
FP4KIT_DEVICE void write_values(const typename In::Bits* x, typename In::Bits* y, int count, FakeScale s) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) y[i] = In::narrow(R::FakeRule::template value<R, In>(In::widen(x[i]), s));
}

// Fake-quantize a run with the FakeScale s, and store the results in a.values, rounded to In. The run begins at element
// `first` of a.x. `largest` is the float32 bits of its largest magnitude. If the fast rule is valid for `largest` and s
// (is_fast), it is used. Otherwise the run is loaded from a.x again, and the slow rule is used, which is valid for all
// elements (write_values).
template <class R, class In, bool kAligned, int kRun>
FP4KIT_DEVICE void write_run_values(const QuantizeArguments& a, i64 first, const Run<In, kRun>& run, u32 largest,
                                    FakeScale s) {
  using Rule = typename R::FakeRule;
  typename In::Bits* y = static_cast<typename In::Bits*>(a.values) + first;
  if (Rule::template is_fast<R>(largest, s)) {
    float values[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = Rule::template fast_value<R, In>(element(run, i), s);
    store_run<In, kRun, kAligned>(y, values);
  } else {
    write_values<R, In>(static_cast<const typename In::Bits*>(a.x) + first, y, kRun, s);
  }
}

// Return the amax of a block as float32 bits. The R::kBlock / kRun neighboring threads that hold the runs of the block
// all get the result. `run` is the run of this thread, and `largest` is the float32 bits of its largest magnitude,
// which are above kInfinityBits if an element is NaN. All threads of the warp must call this function.
//
// R::kAmaxNan says what a NaN element does: with `propagate`, the result is NaN (above kInfinityBits). With `ignore`,
// NaN elements are skipped, and the result is 0 if all elements are NaN. This kernel is never launched for recipes with
// the third value, `lanes`.
template <class R, class In, int kRun>
FP4KIT_DEVICE u32 amax_bits_of_block(const Run<In, kRun>& run, u32 largest) {
  u32 amax = largest;
  if (R::kAmaxNan != AmaxNan::propagate && largest > kInfinityBits) {
    float x[kRun];
    widen_run(run, x);
    amax = bits_of(amax_of<R::kAmaxNan>(x));
  }
#pragma unroll
  for (int distance = 1; distance < R::kBlock / kRun; distance *= 2)
    amax = maximum(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
  return amax;
}

// Fake-quantize the part of the matrix a.x that `grid` assigns to this thread block, for recipes with blocks in a row,
// and store the results in a.values. The amax of a block is read from a.block_amax if R::kStatic and that array is
// given, and otherwise computed. R::kBlock is 16 times a power of two and at most 512. All threads of the thread block
// must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void fake_blocks(const QuantizeArguments& a, Grid grid) {
  constexpr int kRun = kFakeRun<R, In>;
  constexpr u32 kSharers = R::kBlock / kRun, kStep = kThreads * kFakeUnroll<R>;
  __shared__ FakeScale table[R::kHasTable ? kThreads : 1];
  const u32 row_runs = static_cast<u32>(a.columns / kRun), runs = static_cast<u32>(a.rows) * row_runs;
  const float whole_amax = R::kTensorScaling == TensorScaling::tensor ? amax_at(a.tensor_amax, 0) : 1.0f;
  make_scale_table<R>(table, whole_amax);
  for (i64 from = grid.block * kStep; from < runs; from += grid.blocks * kStep) {
    const u32 start = static_cast<u32>(from);
    Run<In, kRun> x[kFakeUnroll<R>];
#pragma unroll
    for (u32 k = 0; k < kFakeUnroll<R>; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x;
      const typename In::Bits* source = static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(run) * kRun;
      x[k] = run < runs ? read_run<In, kRun, kAligned>(source) : Run<In, kRun>{};
    }
#pragma unroll
    for (u32 k = 0; k < kFakeUnroll<R>; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x, block = run / kSharers;
      const u32 largest = largest_bits_of(x[k]), found = amax_bits_of_block<R>(x[k], largest);
      if (run >= runs) continue;
      const float amax = R::kStatic && a.block_amax ? amax_at(a.block_amax, block) : float_of(found);
      float tensor_amax = whole_amax;
      if constexpr (R::kTensorScaling == TensorScaling::row) tensor_amax = amax_at(a.tensor_amax, run / row_runs);
      if constexpr (R::kTensorScaling == TensorScaling::block)
        tensor_amax = a.tensor_amax ? amax_at(a.tensor_amax, block) : amax;
      const FakeScale s = fake_scale<R, In>(amax, tensor_amax, table);
      write_run_values<R, In, kAligned>(a, static_cast<i64>(run) * kRun, x[k], largest, s);
    }
  }
}

// Fake-quantize the part of the matrix a.x that `grid` assigns to this thread block, for recipes with one scale for the
// tensor or one scale per row, and store the results in a.values. Scales are computed from a.tensor_amax. Rows may have
// any length, so the last run of a row may be shorter than the others.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void fake_unblocked(const QuantizeArguments& a, Grid grid) {
  constexpr int kRun = kFakeRun<R, In>;
  constexpr u32 kStep = kThreads * kFakeUnroll<R>;
  constexpr bool kByRow = R::kTensorScaling == TensorScaling::row;
  const u32 row_runs = static_cast<u32>((a.columns + kRun - 1) / kRun), runs = static_cast<u32>(a.rows) * row_runs;
  FakeScale s = kByRow ? FakeScale{} : fake_scale<R, In>(1.0f, amax_at(a.tensor_amax, 0), nullptr);
  for (i64 from = grid.block * kStep; from < runs; from += grid.blocks * kStep) {
    const u32 start = static_cast<u32>(from);
    Run<In, kRun> x[kFakeUnroll<R>];
    u32 rows[kFakeUnroll<R>], columns[kFakeUnroll<R>];  // the rows of the runs, and their columns, counted in runs
#pragma unroll
    for (u32 k = 0; k < kFakeUnroll<R>; ++k) {
      const u32 run = minimum(start + k * kThreads + threadIdx.x, runs - 1);
      rows[k] = kByRow ? run / row_runs : 0u;
      columns[k] = run - rows[k] * row_runs;
      const i64 column = static_cast<i64>(columns[k]) * kRun;
      const typename In::Bits* source = static_cast<const typename In::Bits*>(a.x) + rows[k] * a.columns + column;
      x[k] = column + kRun <= a.columns ? read_run<In, kRun, kAligned>(source) : Run<In, kRun>{};
    }
#pragma unroll
    for (u32 k = 0; k < kFakeUnroll<R>; ++k) {
      if (start + k * kThreads + threadIdx.x >= runs) break;
      if (kByRow && (k == 0 || rows[k] != rows[k - 1]))
        s = fake_scale<R, In>(1.0f, amax_at(a.tensor_amax, rows[k]), nullptr);
      const i64 column = static_cast<i64>(columns[k]) * kRun, first = rows[k] * a.columns + column;
      if (column + kRun <= a.columns) {
        write_run_values<R, In, kAligned>(a, first, x[k], largest_bits_of(x[k]), s);
      } else {
        typename In::Bits* y = static_cast<typename In::Bits*>(a.values) + first;
        write_values<R, In>(static_cast<const typename In::Bits*>(a.x) + first, y, static_cast<int>(a.columns - column),
                            s);
      }
    }
  }
}

// Fake-quantize the part of the matrix a.x that `grid` assigns to this thread block, and store the results in a.values.
// In a group of tensors, this part is one piece of a tensor. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void fake_quantize(const QuantizeArguments& a, Grid grid) {
  if constexpr (R::kHasBlocks) {
    fake_blocks<R, In, kAligned>(a, grid);
  } else {
    fake_unblocked<R, In, kAligned>(a, grid);
  }
}

// Fake-quantize a.x, and store the values in a.values. The kernel is launched for fp4kit.fake_quantize with recipes
// that have a fake_rule. A thread takes several runs per step.
//
// If R::kFinders is 0, a.tensor_amax is an input; launch with any number of thread blocks. Otherwise launch with a
// multiple of R::kFinders thread blocks, which first find the tensor's amax, or the amax of each row, and store it at
// a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads) fake_quantize_kernel(QuantizeArguments a) {
  find_amax<R, Input, kAligned>(a);
  fake_quantize<R, Input, kAligned>(a, whole_grid());
}
