// quantize without block scales: one float32 scale for the tensor or for a row, any length (FP8, INT8, INT4 by tensor or channel).
// A thread takes kRun neighbouring elements of one row; where the row ends early, one element at a time.
#include "quantize.cuh"

constexpr int kRun = 16;

template <class R, class In>
FP4KIT_DEVICE void write_element(const Arguments& a, i64 index, u32 code, TensorScale t) {
  if constexpr (R::kFake) {
    const float scale = R::DecodeRule::template scale<R>(0u, t);
    const float value = R::DecodeRule::apply(decode<typename R::Element>(code), scale);
    static_cast<typename In::Bits*>(a.values)[index] = In::narrow(value);
  } else {
    a.packed[index] = static_cast<u8>(code);
  }
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_plain(const Arguments& a, Grid grid) {
  const i64 runs = (a.columns + kRun - 1) / kRun, count = a.rows * runs;
  for (i64 i = first_item(grid); i < count; i += item_stride(grid)) {
    const i64 row = quotient(i, runs, count), column = (i - row * runs) * kRun, first = row * a.columns + column;
    const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, row, 0, 1);
    const float factor = block_none::factor<R, In>(0u, t);
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x) + first;
    if (kAligned && column + kRun <= a.columns && (a.rows == 1 || a.columns % kRun == 0)) {
      float run[kRun];
      u32 codes[kRun];
      load_run<In, kRun, true>(x, run);
      encode_run<R, In>(a, first, run, factor, codes);
      write_run<R, In, kRun, true>(a, first, codes, 0u, t);
    } else {
      constexpr int kPerByte = R::Element::kBits == 4 ? 2 : 1;
      const int left = static_cast<int>(minimum<i64>(kRun, a.columns - column));
      u32 low = 0u;
      for (int j = 0; j < left; ++j) {
        const float scaled = scaled_element<R, In>(In::widen(x[j]), factor);
        const u32 code = R::kStochastic ? encode_stochastic<typename R::Element>(scaled, random_byte(a, first + j))
                                        : encode_element<R>(scaled);
        if (R::kFake || kPerByte == 1) {
          write_element<R, In>(a, first + j, code, t);
        } else if (j % 2 == 0) {
          low = code;
        } else {
          a.packed[(first + j) / 2] = static_cast<u8>(low | code << 4);
        }
      }
    }
    if (a.tensor_scale && column == 0 && (R::kTensorScaling == TensorScaling::row || row == 0)) a.tensor_scale[row] = t.decode;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) quantize_plain_kernel(Arguments a) {
  quantize_plain<R, Input, kAligned>(a, whole_grid());
}
