// dequantize: codes and scales to values. A thread takes as many codes as make 16 bytes of values, so that a warp stores whole lines, and
// loads the codes of a few such runs first. A run never crosses a block; rows without blocks end anywhere, one element at a time.
#include "block.cuh"
#include "layout.cuh"
#include "pack.cuh"

constexpr int kThreads = 256;

struct Arguments {
  const u8* packed;
  const u8* scales;          // in R's layout (null without)
  void* values;              // rows x columns of the output type
  const float* tensor_amax;  // by R::kTensorScaling (null without)
  i64 rows, columns;
};

template <class R, class Out>
struct Runs {
  static constexpr int kRun = 16 / sizeof(typename Out::Bits), kUnroll = 32 / kRun;
  static constexpr int kPerByte = 8 / R::Element::kStoredBits, kBytes = kRun / kPerByte;
  static constexpr bool kOneScale = R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
  static constexpr bool kFlat = R::kLayout == ScaleLayout::linear && kOneScale;
  static constexpr bool kTable = R::kHasScales && R::Scale::kMantissaBits > 0 && kOneScale;
};

// Where a run is: its row and its first column; in one long row where the row does not matter.
struct Place {
  u32 row;
  i64 column;
};

// Decode what the codes of a run are worth, times their scale, and store it.
template <class R, class Out>
FP4KIT_DEVICE void decode_run(u64 codes, float scale, typename Out::Bits* y) {
  constexpr int kRun = Runs<R, Out>::kRun;
  constexpr bool kE2m1 = R::Element::kBits == 4 && !R::Element::kIsInteger;
  if constexpr (kE2m1 && Out::kIsBfloat16 && R::kHasScales && R::Scale::kMantissaBits == 0 && FP4KIT_FAST_BF16X2) {
    u32 pairs[4];
    decode_pairs_e2m1<8>(static_cast<u32>(codes), pairs);
    const u32 half = bits_of(scale) >> 16;  // exact: a power of two, NaN or infinity
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = R::DecodeRule::apply_pair(pairs[i], half | half << 16);
    store_words(y, pairs);
  } else {
    float values[kRun];
    decode_values<typename R::Element>(codes, values);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = R::DecodeRule::apply(values[i], scale);
    store_run<Out, kRun, true>(y, values);
  }
}

// One element at a time, for the end of a row.
template <class R, class Out>
FP4KIT_DEVICE void decode_end(const Arguments& a, i64 first, int count, float scale) {
  for (int i = 0; i < count; ++i) {
    const u32 byte = a.packed[(first + i) / Runs<R, Out>::kPerByte];
    const u32 code = Runs<R, Out>::kPerByte == 1 ? byte : byte >> (4 * ((first + i) % 2)) & 15u;
    static_cast<typename Out::Bits*>(a.values)[first + i] = Out::narrow(R::DecodeRule::apply(decode<typename R::Element>(code), scale));
  }
}

// The bytes of a run, in the low end.
template <int kBytes>
FP4KIT_DEVICE u64 load_bytes(const u8* in) {
  if constexpr (kBytes == 8) return *reinterpret_cast<const u64*>(in);
  if constexpr (kBytes == 4) return *reinterpret_cast<const u32*>(in);
  return *reinterpret_cast<const u16*>(in);
}

// Original: type of the array that was quantized, which some tensor rules round to. Out: type of the values.
template <class R, class Original, class Out>
FP4KIT_DEVICE void dequantize(const Arguments& a, Grid grid) {
  using Way = Runs<R, Out>;
  constexpr int kRun = Way::kRun;
  __shared__ float table[Way::kTable ? 256 : 1];
  const i64 columns = Way::kFlat ? a.rows * a.columns : a.columns;
  const u32 row_runs = static_cast<u32>((columns + kRun - 1) / kRun), runs = Way::kFlat ? row_runs : static_cast<u32>(a.rows) * row_runs;
  const u32 blocks = R::kHasBlocks ? static_cast<u32>(columns / R::kBlock) : 1u;
  const bool whole_stores = reinterpret_cast<u64>(a.values) % 16 == 0 && reinterpret_cast<u64>(a.packed) % Way::kBytes == 0;
  const bool even = whole_stores && (R::kHasBlocks || columns % kRun == 0 || Way::kFlat || a.rows == 1);
  const TensorScale whole_scale = Way::kOneScale ? tensor_scale_of<R, Original>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  if constexpr (Way::kTable) {
    if (threadIdx.x < 256) table[threadIdx.x] = R::DecodeRule::template scale<R>(threadIdx.x, whole_scale);
    __syncthreads();
  }
  constexpr u32 kStep = kThreads * Way::kUnroll;
  for (u32 start = grid.block * kStep; start < runs; start += grid.blocks * kStep) {
    u64 codes[Way::kUnroll];
    float scales[Way::kUnroll];
    Place places[Way::kUnroll];
    u32 scale_codes[Way::kUnroll];
#pragma unroll
    for (int k = 0; k < Way::kUnroll; ++k) {
      const u32 run = minimum(start + k * kThreads + threadIdx.x, runs - 1);
      const u32 row = Way::kFlat ? 0u : run / row_runs;
      places[k] = {row, static_cast<i64>(run - row * row_runs) * kRun};
      const u32 block = R::kHasBlocks ? (run - row * row_runs) / (R::kBlock / kRun) : 0u;
      const i64 first = row * columns + places[k].column;
      codes[k] = even && places[k].column + kRun <= columns ? load_bytes<Way::kBytes>(a.packed + first / Way::kPerByte) : 0u;
      scale_codes[k] = R::kHasScales ? a.scales[scale_offset<R::kLayout>(row, block, blocks)] : 0u;
      if constexpr (!Way::kTable) {
        const TensorScale t = Way::kOneScale ? whole_scale : tensor_scale_of<R, Original>(a.tensor_amax, row, block, blocks);
        scales[k] = R::DecodeRule::template scale<R>(scale_codes[k], t);
      }
    }
#pragma unroll
    for (int k = 0; k < Way::kUnroll; ++k) {
      if (start + k * kThreads + threadIdx.x >= runs) break;
      const float scale = Way::kTable ? table[scale_codes[k]] : scales[k];
      const i64 first = places[k].row * columns + places[k].column;
      if (even && places[k].column + kRun <= columns) {
        decode_run<R, Out>(codes[k], scale, static_cast<typename Out::Bits*>(a.values) + first);
      } else {
        decode_end<R, Out>(a, first, static_cast<int>(minimum<i64>(kRun, columns - places[k].column)), scale);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) dequantize_kernel(Arguments a) {
  dequantize<R, Input, Output>(a, whole_grid());
}
