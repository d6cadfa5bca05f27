// Functions that move runs of elements, and words of codes, between memory and registers. They move 16 bytes at a time
// if the addresses allow it. A run is kCount neighboring elements of one row that one thread handles together. In and
// Out are types of elements (Float32, Float16 or Bfloat16). In::Bits is the type as which an element is stored. A word
// has 32 bits.
#pragma once

#include "codec.cuh"
#include "ptx_memory.cuh"

// 16 bytes of memory, as four words. Loads and stores of a Chunk are one instruction.
struct alignas(16) Chunk {
  u32 w[4];
};
// 8 bytes of memory, as two words.
struct alignas(8) HalfChunk {
  u32 w[2];
};

// A run of kCount elements in registers. The words hold the elements as they are stored in memory.
template <class In, int kCount>
struct Run {
  static constexpr int kPerWord = 4 / sizeof(typename In::Bits), kWords = kCount / kPerWord;
  u32 w[kWords];
};

// Return the kCount elements at address x as a run. If kAligned, x must be a multiple of 16 bytes, or of the run's size
// if the run is smaller. If kAligned is false, elements are loaded one by one, and x may have any alignment of their
// type.
template <class In, int kCount, bool kAligned = true>
FP4KIT_DEVICE Run<In, kCount> read_run(const typename In::Bits* x) {
  Run<In, kCount> run;
  if constexpr (kAligned && run.kWords == 2) {
    const HalfChunk chunk = *reinterpret_cast<const HalfChunk*>(x);
    run.w[0] = chunk.w[0];
    run.w[1] = chunk.w[1];
  } else if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < run.kWords / 4; ++i) {
      const Chunk chunk = reinterpret_cast<const Chunk*>(x)[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) run.w[4 * i + j] = chunk.w[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < run.kWords; ++i) {
      if constexpr (sizeof(typename In::Bits) == 4) {
        run.w[i] = bits_of(x[i]);
      } else {
        run.w[i] = x[2 * i] | static_cast<u32>(x[2 * i + 1]) << 16;
      }
    }
  }
  return run;
}

// Return element i of a run as float32.
template <class In, int kCount>
FP4KIT_DEVICE float element(const Run<In, kCount>& run, int i) {
  if constexpr (sizeof(typename In::Bits) == 4) return float_of(run.w[i]);
  if constexpr (In::kIsBfloat16) return float_of(i % 2 ? run.w[i / 2] & 0xFFFF0000u : run.w[i / 2] << 16);
  return In::widen(static_cast<u16>(run.w[i / 2] >> (16 * (i % 2))));
}

// Store all elements of a run in `values`, as float32. This is exact.
template <class In, int kCount>
FP4KIT_DEVICE void widen_run(const Run<In, kCount>& run, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = element(run, i);
}

// Return the element with these bits as float32, with the sign bit of a NaN if R::kNanSign.
template <class R, class In>
FP4KIT_DEVICE float widen_exactly(typename In::Bits bits) {
  const float x = In::widen(bits);
  if constexpr (R::kNanSign && In::kMantissaBits == 10) return float_of(bits_of(x) | (bits & 0x8000u) << 16);
  return x;
}

// Store all elements of a run in `values`, as widen_exactly does.
template <class R, class In, int kCount>
FP4KIT_DEVICE void widen_run_exactly(const Run<In, kCount>& run, float (&values)[kCount]) {
  widen_run(run, values);
  if constexpr (R::kNanSign && In::kMantissaBits == 10) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      values[i] = float_of(bits_of(values[i]) | (run.w[i / 2] << (i % 2 ? 0 : 16) & 0x80000000u));
  }
}

// Return a run of the given values, each rounded to nearest even in the type In.
template <class In, int kCount>
FP4KIT_DEVICE Run<In, kCount> narrow_run(const float (&values)[kCount]) {
  Run<In, kCount> run;
#pragma unroll
  for (int i = 0; i < run.kWords; ++i) {
    if constexpr (sizeof(typename In::Bits) == 4) {
      run.w[i] = bits_of(values[i]);
    } else {
      run.w[i] = In::narrow_pair(values[2 * i], values[2 * i + 1]);
    }
  }
  return run;
}

// Store kWords words at address `out`, which must be a multiple of 16 bytes, or of the words' total size if that is
// smaller. kWords must be 1, 2 or a multiple of 4.
template <int kWords>
FP4KIT_DEVICE void store_words(void* out, const u32 (&words)[kWords]) {
  if constexpr (kWords == 1) {
    *static_cast<u32*>(out) = words[0];
  } else if constexpr (kWords == 2) {
    *static_cast<u64*>(out) = words[0] | static_cast<u64>(words[1]) << 32;
  } else {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      Chunk& chunk = static_cast<Chunk*>(out)[i];  // a reference, because sanitizers check its alignment
      chunk = {{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}};
    }
  }
}

// Return the float32 bits of the largest magnitude among the elements of a run. If an element is NaN, the result is the
// bits of a NaN, which are above those of infinity. 16-bit elements are compared two at a time.
template <class In, int kCount>
FP4KIT_DEVICE u32 largest_bits_of(const Run<In, kCount>& run) {
  if constexpr (sizeof(typename In::Bits) == 4) {
    u32 largest = 0u;
#pragma unroll
    for (int i = 0; i < run.kWords; ++i) largest = maximum(largest, run.w[i] & 0x7FFFFFFFu);
    return largest;
  } else {
    u32 largest = In::max_magnitude(run.w[0], run.w[1]);
#pragma unroll
    for (int i = 2; i < run.kWords; ++i) largest = In::max_magnitude(largest, run.w[i]);
    largest = In::max_magnitude(largest, prmt(largest, largest, 0x1032u));  // both halves now hold the largest
    if constexpr (In::kIsBfloat16) return largest & 0x7FFF0000u;
    return bits_of(In::widen(static_cast<u16>(largest & 0x7FFFu)));
  }
}

// Return a run whose element i is the larger magnitude of the elements i of a and b, or NaN if one of them is NaN. The
// sign bits of the result have no meaning.
template <class In, int kCount>
FP4KIT_DEVICE Run<In, kCount> larger_magnitudes(const Run<In, kCount>& a, const Run<In, kCount>& b) {
  Run<In, kCount> larger;
#pragma unroll
  for (int i = 0; i < larger.kWords; ++i) {
    if constexpr (sizeof(typename In::Bits) == 4)
      larger.w[i] = maximum(a.w[i] & 0x7FFFFFFFu, b.w[i] & 0x7FFFFFFFu);
    else
      larger.w[i] = In::max_magnitude(a.w[i], b.w[i]);
  }
  return larger;
}

// Return the float32 bits of the smallest magnitude, zeros included, among the elements of a run of 16-bit elements. No
// element may be NaN.
template <class In, int kCount>
FP4KIT_DEVICE u32 smallest_bits_of(const Run<In, kCount>& run) {
  u32 smallest = In::min_magnitude(run.w[0], run.w[1]);
#pragma unroll
  for (int i = 2; i < run.kWords; ++i) smallest = In::min_magnitude(smallest, run.w[i]);
  smallest = In::min_magnitude(smallest, smallest >> 16) & 0x7FFFu;
  return bits_of(In::widen(static_cast<u16>(smallest)));
}

// Load the kCount elements at address x, and store them in `values` as float32. If kAligned, x must be aligned as
// read_run requires.
template <class In, int kCount, bool kAligned>
FP4KIT_DEVICE void load_run(const typename In::Bits* x, float (&values)[kCount]) {
  widen_run(read_run<In, kCount, kAligned>(x), values);
}

// Store kCount values at address y, each rounded to nearest even in the type Out. If kAligned, y must be aligned as
// store_words requires.
template <class Out, int kCount, bool kAligned>
FP4KIT_DEVICE void store_run(typename Out::Bits* y, const float (&values)[kCount]) {
  if constexpr (kAligned) {
    store_words(y, narrow_run<Out>(values).w);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = Out::narrow(values[i]);
  }
}
