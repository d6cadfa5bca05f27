// dequantize: codes and scales to values. A thread takes a run of 16 codes, which never crosses a block; recipes without blocks
// end their rows anywhere, one element at a time.
#include "block.cuh"
#include "layout.cuh"
#include "pack.cuh"

constexpr int kThreads = 256, kRun = 16;

struct Arguments {
  const u8* packed;
  const u8* scales;          // in R's layout (null without)
  void* values;              // rows x columns of the output type
  const float* tensor_amax;  // by R::kTensorScaling (null without)
  i64 rows, columns;
};

// Original: type of the array that was quantized, which some tensor rules round to. Out: type of the values.
template <class R, class Original, class Out>
FP4KIT_DEVICE void dequantize(const Arguments& a, Grid grid) {
  constexpr int kPerByte = R::Element::kBits == 4 ? 2 : 1;
  const i64 runs = (a.columns + kRun - 1) / kRun, count = a.rows * runs;
  const i64 blocks = R::kHasBlocks ? a.columns / R::kBlock : 1;
  constexpr bool kOneScale = R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
  const TensorScale whole_scale = kOneScale ? tensor_scale_of<R, Original>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  for (i64 i = first_item(grid); i < count; i += item_stride(grid)) {
    const i64 row = quotient(i, runs, count), column = (i - row * runs) * kRun, first = row * a.columns + column;
    const i64 block = R::kHasBlocks ? column / R::kBlock : 0;
    const TensorScale t = kOneScale ? whole_scale : tensor_scale_of<R, Original>(a.tensor_amax, row, block, blocks);
    const u32 code = R::kHasScales ? a.scales[scale_offset<R::kLayout>(row, block, blocks)] : 0u;
    const float scale = R::DecodeRule::template scale<R>(code, t);
    typename Out::Bits* y = static_cast<typename Out::Bits*>(a.values) + first;
    const bool whole = column + kRun <= a.columns && (R::kHasBlocks || a.rows == 1 || a.columns % kRun == 0);
    if (whole) {
      float values[kRun];
      load_and_decode<typename R::Element>(a.packed + first / kPerByte, values);
#pragma unroll
      for (int j = 0; j < kRun; ++j) values[j] = R::DecodeRule::apply(values[j], scale);
      store_run<Out, kRun, true>(y, values);
    } else {
      const int left = static_cast<int>(minimum<i64>(kRun, a.columns - column));
      for (int j = 0; j < left; ++j) {
        const u32 byte = a.packed[(first + j) / kPerByte];
        const u32 element = kPerByte == 1 ? byte : byte >> (4 * ((first + j) % 2)) & 15u;
        y[j] = Out::narrow(R::DecodeRule::apply(decode<typename R::Element>(element), scale));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) dequantize_kernel(Arguments a) { dequantize<R, Input, Output>(a, whole_grid()); }
