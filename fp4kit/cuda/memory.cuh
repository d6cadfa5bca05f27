// Runs of elements and of codes between memory and registers, 16 bytes at a time where pointers allow.
#pragma once

#include "convert.cuh"

struct alignas(16) Chunk { u32 w[4]; };

// An aligned run as it lies in memory.
template <class In, int kCount>
struct Run {
  static constexpr int kPerChunk = 16 / sizeof(typename In::Bits), kChunks = kCount / kPerChunk;
  Chunk chunks[kChunks];
};

template <class In, int kCount>
FP4KIT_DEVICE Run<In, kCount> read_run(const typename In::Bits* x) {
  Run<In, kCount> run;
#pragma unroll
  for (int i = 0; i < run.kChunks; ++i) run.chunks[i] = reinterpret_cast<const Chunk*>(x)[i];
  return run;
}

template <class In, int kCount>
FP4KIT_DEVICE void widen_run(const Run<In, kCount>& run, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(typename In::Bits) == 4) {
      values[i] = float_of(run.chunks[i / 4].w[i % 4]);
    } else {
      values[i] = In::widen(static_cast<u16>(run.chunks[i / 8].w[i % 8 / 2] >> (16 * (i % 2))));
    }
  }
}

// The largest magnitude of a run as float32 bits, above infinity's if any is NaN; types of 16 bits are compared two at a time.
template <class In, int kCount>
FP4KIT_DEVICE u32 largest_bits_of(const Run<In, kCount>& run) {
  u32 largest = 0u;
#pragma unroll
  for (int i = 0; i < run.kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(typename In::Bits) == 4) {
        largest = maximum(largest, run.chunks[i].w[j] & 0x7FFFFFFFu);
      } else {
        largest = max_u16x2(largest, run.chunks[i].w[j] & 0x7FFF7FFFu);
      }
    }
  }
  if constexpr (sizeof(typename In::Bits) == 4) return largest;
  return bits_of(In::widen(static_cast<u16>(maximum(largest & 0xFFFFu, largest >> 16))));
}

// kCount elements at x -> float32. kAligned: x is a multiple of 16 bytes, and so is the run.
template <class In, int kCount, bool kAligned>
FP4KIT_DEVICE void load_run(const typename In::Bits* x, float (&values)[kCount]) {
  if constexpr (kAligned) {
    widen_run(read_run<In, kCount>(x), values);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = In::widen(x[i]);
  }
}

// kCount values -> elements at y, rounded.
template <class Out, int kCount, bool kAligned>
FP4KIT_DEVICE void store_run(typename Out::Bits* y, const float (&values)[kCount]) {
  if constexpr (kAligned) {
    constexpr int kPerChunk = 16 / sizeof(typename Out::Bits);
#pragma unroll
    for (int c = 0; c < kCount / kPerChunk; ++c) {
      Chunk chunk;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (sizeof(typename Out::Bits) == 4) {
          chunk.w[j] = bits_of(values[4 * c + j]);
        } else {
          chunk.w[j] = Out::narrow_pair(values[8 * c + 2 * j], values[8 * c + 2 * j + 1]);
        }
      }
      reinterpret_cast<Chunk*>(y)[c] = chunk;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = Out::narrow(values[i]);
  }
}

// kCount codes -> bytes at out: two 4-bit codes a byte, the even one low; wider codes one a byte. out is aligned to 4 bytes,
// and to 8 where a run has 8 bytes or more, because runs start at multiples of 16 elements.
template <int kBits, int kCount>
FP4KIT_DEVICE void store_codes(u8* out, const u32 (&codes)[kCount]) {
  constexpr int kPerWord = kBits == 4 ? 8 : 4, kShift = kBits == 4 ? 4 : 8, kWords = kCount / kPerWord;
  u32 words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = 0u;
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) words[w] |= codes[w * kPerWord + i] << (kShift * i);
  }
#pragma unroll
  for (int w = 0; w < kWords; w += 2)
    *reinterpret_cast<u64*>(out + 4 * w) = words[w] | static_cast<u64>(words[w + 1]) << 32;
}

// The inverse: kCount codes at in.
template <int kBits, int kCount>
FP4KIT_DEVICE void load_codes(const u8* in, u32 (&codes)[kCount]) {
  constexpr int kPerWord = kBits == 4 ? 8 : 4, kShift = kBits == 4 ? 4 : 8, kWords = kCount / kPerWord;
#pragma unroll
  for (int w = 0; w < kWords; w += 2) {
    const u64 pair = *reinterpret_cast<const u64*>(in + 4 * w);
#pragma unroll
    for (int i = 0; i < 2 * kPerWord; ++i)
      codes[w * kPerWord + i] = static_cast<u32>(pair >> (kShift * i)) & ((1u << kShift) - 1u);
  }
}
