// What the quantize kernels share: their arguments, and loading, encoding and writing a run of elements.
#pragma once

#include "block.cuh"
#include "layout.cuh"
#include "memory.cuh"

constexpr int kThreads = 256;

struct Arguments {
  const void* x;             // rows x columns elements, contiguous
  u8* packed;                // codes (null for fake_quantize)
  u8* scales;                // block scales in R's layout (null without)
  void* values;              // fake_quantize: elements of x's type (null otherwise)
  const float* tensor_amax;  // one, one a row, or one a block, by R::kTensorScaling (null without)
  float* tensor_scale;       // the decode scales, same count (null for fake_quantize)
  const float* block_amax;   // calibrated amaxes of all blocks (null: from x)
  const u8* random;          // random bytes of all elements (null: from the seed)
  u64 seed;
  i64 rows, columns;
};

// Random byte of element i of the run that begins at element `first` of the array.
template <class R, int kRun>
FP4KIT_DEVICE void random_bytes(const Arguments& a, i64 first, u32 (&bytes)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; i += 16) {
    if (a.random) {
#pragma unroll
      for (int j = 0; j < 16; ++j) bytes[i + j] = a.random[first + i + j];
    } else {
      const Words words = stream_words(a.seed, static_cast<u64>(first + i) / 16);
#pragma unroll
      for (int j = 0; j < 16; ++j) bytes[i + j] = words.w[j / 4] >> (8 * (j % 4)) & 0xFFu;
    }
  }
}

// Random byte of one element.
FP4KIT_DEVICE u32 random_byte(const Arguments& a, i64 index) {
  if (a.random) return a.random[index];
  const Words words = stream_words(a.seed, static_cast<u64>(index) / 16);
  return words.w[index % 16 / 4] >> (8 * (index % 4)) & 0xFFu;
}

template <class R, class In, int kRun>
FP4KIT_DEVICE void encode_run(const Arguments& a, i64 first, const float (&x)[kRun], float factor, u32 (&codes)[kRun]) {
  if constexpr (R::kStochastic) {
    u32 bytes[kRun];
    random_bytes<R>(a, first, bytes);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      codes[i] = encode_stochastic<typename R::Element>(scaled_element<R, In>(x[i], factor), bytes[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) codes[i] = encode_element<R>(scaled_element<R, In>(x[i], factor));
  }
}

template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE void write_run(const Arguments& a, i64 first, const u32 (&codes)[kRun], u32 scale_code, TensorScale t) {
  if constexpr (R::kFake) {
    const float scale = R::DecodeRule::template scale<R>(scale_code, t);
    float values[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = R::DecodeRule::apply(decode<typename R::Element>(codes[i]), scale);
    store_run<In, kRun, kAligned>(static_cast<typename In::Bits*>(a.values) + first, values);
  } else {
    constexpr int kPerByte = R::Element::kBits == 4 ? 2 : 1;
    store_codes<R::Element::kBits>(a.packed + first / kPerByte, codes);
  }
}

template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE void load_elements(const Arguments& a, i64 first, float (&x)[kRun]) {
  load_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first, x);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask, In>(x);
}

// amax of a block of R::kBlock elements of which x holds the first kRun; the rest is read here.
template <class R, class In, int kRun, bool kAligned>
FP4KIT_DEVICE float block_amax_of(const Arguments& a, i64 first, const float (&x)[kRun]) {
  float amax = amax_of<R::kAmaxNan>(x);
  for (int start = kRun; start < R::kBlock; start += kRun) {
    float more[kRun];
    load_elements<R, In, kRun, kAligned>(a, first + start, more);
    amax = larger<R::kAmaxNan>(amax, amax_of<R::kAmaxNan>(more));
  }
  return amax;
}
