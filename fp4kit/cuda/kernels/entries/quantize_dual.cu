// quantize_dual: compute codes and scales of dual-level MXFP4 or, if R::kFake, the values to which the codes decode.
// Elements are divided by the scale of their outer block (R::kTensorColumns columns), and the float32 quotients are
// quantized. R is the recipe, In is the type of the elements of x, and kAligned is true if all rows of x and of
// `values` begin at multiples of 16 bytes. `a` holds the kernel's arguments. kLanes neighboring threads hold the runs
// of a block.
#include "quantize.cuh"

// Quantize the part of the matrix a.x that `grid` assigns to this thread block. In a group of tensors, this part is one
// piece of a tensor. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_dual(const QuantizeArguments& a, Grid grid) {
  constexpr int kRun = 16, kLanes = R::kBlock / kRun;
  const u32 columns = static_cast<u32>(a.columns), row_runs = columns / kRun,
            outers = (columns + R::kTensorColumns - 1) / R::kTensorColumns;
  const u32 runs = static_cast<u32>(a.rows) * row_runs;
  const IntegerDivisor divisor = integer_divisor_of(row_runs);
  for (i64 from = grid.block * kThreads; from < runs; from += grid.blocks * kThreads) {
    // Threads beyond the last run repeat the last block.
    const u32 place = static_cast<u32>(from) + threadIdx.x, run = minimum(place, runs - kLanes + place % kLanes);
    const u32 row = divide(run, divisor), column = (run - row * row_runs) * kRun;
    const i64 first = static_cast<i64>(run) * kRun, outer = static_cast<i64>(row) * outers + column / R::kTensorColumns;
    Run<In, kRun> x = read_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first);
    const TensorScale t = R::TensorRule::template scale<R, In>(amax_at(a.tensor_amax, outer));
    if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x);
    float quotients[kRun];
    u32 amax = 0u, bytes[kRun] = {}, words[kCodeWords<R, kRun>];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      quotients[i] = element(x, i) / t.decode;
      amax = maximum(amax, bits_of(magnitude_of(quotients[i])));
    }
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) amax = maximum(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lane));
    Factor f;
    const u32 code = scale_block<R, Float32>(float_of(amax), t, nullptr, f);
    exact_codes<R, Float32>(quotients, bytes, f, words);
    store_packed<R, In, kRun, kAligned>(a, first, words, code, t);
    if (R::kFake || run % kLanes != 0u) continue;
    a.scales[run / kLanes] = static_cast<u8>(code);
    if (column % R::kTensorColumns == 0u) store_tensor_scale(a, outer, t);
  }
}

// Quantize a.x, and store its codes in a.packed and its scales in a.scales and a.tensor_scale, or only its values in
// a.values if R::kFake. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) quantize_dual_kernel(QuantizeArguments a) {
  quantize_dual<R, Input, kAligned>(a, whole_grid());
}
