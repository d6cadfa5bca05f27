// quantize: elements to codes and block scales, blocks in a row (1 x kBlock). fake_quantize: the values of those codes.
//
// A thread takes a run of kRun elements (a block, or a part of a longer one), keeps it in registers, and writes codes and scale.
// The factor of an E4M3 scale depends on its code alone, so each thread block makes a table of 256 factors first: two divisions
// for each code instead of two for each block of elements.
#include "pack.cuh"
#include "quantize.cuh"

// The scale code of a block and the factor for its elements.
template <class R, class In>
FP4KIT_DEVICE u32 scale_block(float amax, TensorScale t, const float* table, float& factor) {
  const u32 code = R::BlockRule::template code<R, In>(amax, t);
  factor = R::kHasTable ? table[code] : R::BlockRule::template factor<R, In>(code, t);
  if constexpr (R::kZeroFactor) factor = magnitude_of(amax) < kFltMin ? 0.0f : factor;  // FlashInfer
  return code;
}

// Quantize a block of finite elements whose amax is known, unless its factor is not finite. No NaN can appear then, and every rule
// for NaN in an amax has given the same: recipes that round to nearest and keep signs take this shorter way.
template <class R, class In, int kRun>
FP4KIT_DEVICE bool quantize_finite(const Arguments& a, i64 first, const float (&x)[kRun], float amax, TensorScale t,
                                   const float* table, u32& code) {
  float factor;
  code = scale_block<R, In>(amax, t, table, factor);
  if (!is_finite(factor)) return false;
  float scaled[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) scaled[i] = scaled_element<R, In>(x[i], factor);
  encode_and_store<typename R::Element>(a.packed + first / (R::Element::kBits == 4 ? 2 : 1), scaled);
  return true;
}

// Quantize the block that begins at element `first`, of any elements; x holds its first run.
template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE u32 quantize_any(const Arguments& a, i64 first, i64 block, float (&x)[kRun], TensorScale t, const float* table) {
  const float amax = a.block_amax ? a.block_amax[block] : block_amax_of<R, In, kRun, kAligned>(a, first, x);
  float factor;
  const u32 code = scale_block<R, In>(amax, t, table, factor);
  for (int start = 0; start < R::kBlock; start += kRun) {
    if (start) load_elements<R, In, kRun, kAligned>(a, first + start, x);
    u32 codes[kRun];
    encode_run<R, In>(a, first + start, x, factor, codes);
    write_run<R, In, kRun, kAligned>(a, first + start, codes, code, t);
  }
  return code;
}

template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE u32 quantize_block(const Arguments& a, i64 first, i64 block, TensorScale t, const float* table) {
  float x[kRun];
  if constexpr (R::kFastPath && kAligned && R::kBlock == kRun) {
    const auto run = read_run<In, kRun>(static_cast<const typename In::Bits*>(a.x) + first);
    const u32 largest = largest_bits_of(run);
    widen_run(run, x);
    u32 code;
    if (!a.block_amax && largest < kInfinityBits && quantize_finite<R, In>(a, first, x, float_of(largest), t, table, code))
      return code;
  } else {
    load_elements<R, In, kRun, kAligned>(a, first, x);
  }
  return quantize_any<R, In, kRun, kAligned>(a, first, block, x, t, table);
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize(const Arguments& a, Grid grid) {
  constexpr int kRun = R::kBlock < 32 ? R::kBlock : 32;
  __shared__ float table[R::kHasTable ? 256 : 1];
  const i64 blocks = a.columns / R::kBlock, count = a.rows * blocks;
  constexpr bool kOneScale = R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
  const TensorScale whole_scale = kOneScale ? tensor_scale_of<R, In>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  if constexpr (R::kHasTable) {
    for (int code = threadIdx.x; code < 256; code += blockDim.x)
      table[code] = R::BlockRule::template factor<R, In>(code, whole_scale);
    __syncthreads();
  }
  for (i64 i = first_item(grid); i < count; i += item_stride(grid)) {
    const bool flat = R::kLayout == ScaleLayout::linear && R::kTensorScaling != TensorScaling::row;
    const i64 row = flat ? 0 : quotient(i, blocks, count), block = flat ? i : i - row * blocks;
    const TensorScale t = kOneScale ? whole_scale : tensor_scale_of<R, In>(a.tensor_amax, row, block, blocks);
    const i64 first = i * R::kBlock;
    const u32 code = quantize_block<R, In, kRun, kAligned>(a, first, i, t, table);
    if constexpr (R::kHasScales && !R::kFake) a.scales[flat ? i : scale_offset<R::kLayout>(row, block, blocks)] = code;
    const bool owner = R::kTensorScaling == TensorScaling::block || (R::kTensorScaling == TensorScaling::row ? block == 0 : i == 0);
    if (R::kTensorScaling != TensorScaling::none && a.tensor_scale && owner)
      a.tensor_scale[R::kTensorScaling == TensorScaling::row ? row : i] = t.decode;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) quantize_kernel(Arguments a) {
  quantize<R, Input, kAligned>(a, whole_grid());
}
