// quantize: elements to codes and block scales, blocks in a row (1 x kBlock). fake_quantize: the values of those codes.
//
// A thread takes a run of elements, neighbouring threads the runs of one block; a few runs are loaded before the first is used.
// The factor of an E4M3 scale depends on its code alone, so each thread block makes a table of the factors first: two divisions
// for each code instead of two for each block of elements.
#include "quantize.cuh"
#include "quantize.cuh"

template <class R, class In>
struct Rows {
  static constexpr int kRun = R::kFake ? 8 : 16;   // values are stored 16 bytes a thread: whole lines a warp
  static constexpr int kLanes = R::kBlock / kRun;  // threads that share a block
  static constexpr int kUnroll = 64 / (kRun * sizeof(typename In::Bits));
  static constexpr bool kShort = ShortWay<R, In>::kExists && (kLanes & (kLanes - 1)) == 0 && kLanes <= 32;
  // A row's number is not needed.
  static constexpr bool kFlat = R::kLayout == ScaleLayout::linear && R::kTensorScaling != TensorScaling::row;
  static constexpr bool kOneScale = R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
};

template <class R, class In, bool kAligned>
FP4KIT_DEVICE auto read_run_of(const Arguments& a, u32 run) {
  constexpr int kRun = Rows<R, In>::kRun;
  return read_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(run) * kRun);
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE auto load_run_of(const Arguments& a, u32 run) {
  auto x = read_run_of<R, In, kAligned>(a, run);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x);
  return x;
}

// Where a run is: its row, and its block in the row; in all rows together where the row does not matter.
struct Place {
  u32 row, block;
  bool is_first;  // of its block
};

template <class R, class In>
FP4KIT_DEVICE Place place_of(u32 run, u32 row_runs) {
  constexpr u32 kLanes = Rows<R, In>::kLanes;
  const u32 row = Rows<R, In>::kFlat ? 0u : run / row_runs;
  return {row, (run - row * row_runs) / kLanes, run % kLanes == 0u};
}

// What is written once for a block, by the thread of its first run.
template <class R, class In>
FP4KIT_DEVICE void store_scales(const Arguments& a, Place place, u32 code, TensorScale t) {
  if (R::kFake || !place.is_first) return;
  if constexpr (R::kHasScales) {
    const u32 columns = static_cast<u32>(a.columns) / R::kBlock;
    a.scales[Rows<R, In>::kFlat ? place.block : scale_offset<R::kLayout>(place.row, place.block, columns)] = code;
  }
  if constexpr (R::kTensorScaling == TensorScaling::block) {
    a.tensor_scale[place.block] = t.decode;
  } else if constexpr (R::kTensorScaling != TensorScaling::none) {
    const bool owner = place.block == 0u && (R::kTensorScaling == TensorScaling::row || place.row == 0u);
    if (owner && a.tensor_scale) store_tensor_scale(a, place.row, t);
  }
}

// Quantize a run the short way, if it is inside; false if it has to go the long way, and nothing is written then. Neighbours exchange their amaxes, so
// every thread of a warp must come here.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE bool quantize_finite(const Arguments& a, u32 run, bool inside, const Run<In, Rows<R, In>::kRun>& x, Place place,
                                   TensorScale t, const Factor* table) {
  constexpr int kRun = Rows<R, In>::kRun;
  const u32 largest = largest_bits_of(x);
  u32 amax = largest;
#pragma unroll
  for (int lane = 1; lane < Rows<R, In>::kLanes; lane *= 2) amax = maximum(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lane));
  if constexpr (R::kStatic) {
    if (a.block_amax && inside) amax = bits_of(a.block_amax[run / Rows<R, In>::kLanes]);
  }
  Factor f;
  const u32 code = scale_block<R, In>(float_of(amax), t, table, f);
  if (amax >= kInfinityBits || !takes_short_way<R, In>(largest, f)) return false;
  if (!inside) return true;
  store_finite<R, In, kAligned>(a, static_cast<i64>(run) * kRun, x, f, code, t);
  store_scales<R, In>(a, place, code, t);
  return true;
}

// amax of the block that run `run` is a part of.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float block_amax_of(const Arguments& a, u32 run) {
  BlockAmax<R::kAmaxNan> amax;
#pragma unroll 1
  for (u32 lane = 0; lane < Rows<R, In>::kLanes; ++lane) {
    float x[Rows<R, In>::kRun];
    widen_run(load_run_of<R, In, kAligned>(a, run / Rows<R, In>::kLanes * Rows<R, In>::kLanes + lane), x);
    amax.add(x);
  }
  return amax.result();
}

// Quantize a run of any elements.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_any(const Arguments& a, u32 run, Place place, TensorScale t, const Factor* table) {
  constexpr int kRun = Rows<R, In>::kRun;
  const float amax = a.block_amax ? a.block_amax[run / Rows<R, In>::kLanes] : block_amax_of<R, In, kAligned>(a, run);
  Factor f;
  const u32 code = scale_block<R, In>(amax, t, table, f);
  float x[kRun];
  widen_run(load_run_of<R, In, kAligned>(a, run), x);
  u32 codes[kRun];
  encode_run<R, In>(a, static_cast<i64>(run) * kRun, x, f.by, codes);
  write_run<R, In, kRun, kAligned>(a, static_cast<i64>(run) * kRun, codes, code, t);
  store_scales<R, In>(a, place, code, t);
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize(const Arguments& a, Grid grid) {
  using Way = Rows<R, In>;
  constexpr int kRun = Way::kRun;
  __shared__ Factor table[R::kHasTable ? kTableSize : 1];
  const u32 row_runs = static_cast<u32>(a.columns) / kRun, runs = static_cast<u32>(a.rows) * row_runs;
  const u32 blocks = row_runs / Way::kLanes;
  const TensorScale whole_scale = Way::kOneScale ? tensor_scale_of<R, In>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  if constexpr (R::kHasTable) {
    if (threadIdx.x < kTableSize) table[threadIdx.x] = factor_of<R, In>(threadIdx.x, whole_scale);
    __syncthreads();
  }
  constexpr u32 kStep = kThreads * Way::kUnroll;
  for (u32 start = grid.block * kStep; start < runs; start += grid.blocks * kStep) {
    Run<In, kRun> x[Way::kUnroll];
#pragma unroll
    for (int k = 0; k < Way::kUnroll; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x;
      x[k] = Way::kShort && run < runs ? read_run_of<R, In, kAligned>(a, run) : Run<In, kRun>{};
    }
    u32 left = 0u;  // bit k: run k goes the long way
#pragma unroll
    for (int k = 0; k < Way::kUnroll; ++k) {
      const u32 run = start + k * kThreads + threadIdx.x;
      if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x[k]);  // after all loads
      const Place place = place_of<R, In>(minimum(run, runs - 1), row_runs);
      const TensorScale t = Way::kOneScale ? whole_scale : tensor_scale_of<R, In>(a.tensor_amax, place.row, place.block, blocks);
      if (!Way::kShort || !quantize_finite<R, In, kAligned>(a, run, run < runs, x[k], place, t, table)) left |= (run < runs) << k;
    }
#pragma unroll 1
    for (int k = 0; left >> k; ++k) {
      if (!(left >> k & 1u)) continue;
      const u32 run = start + k * kThreads + threadIdx.x;
      const Place place = place_of<R, In>(run, row_runs);
      const TensorScale t = Way::kOneScale ? whole_scale : tensor_scale_of<R, In>(a.tensor_amax, place.row, place.block, blocks);
      quantize_any<R, In, kAligned>(a, run, place, t, table);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) quantize_kernel(Arguments a) {
  quantize<R, Input, kAligned>(a, whole_grid());
}
