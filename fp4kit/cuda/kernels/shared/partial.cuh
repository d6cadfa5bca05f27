// Code that the partial kernels share. A partial kernel quantizes a shard: elements [start, end) of a flattened matrix,
// which one process holds (Shard s). Runs (kRun neighboring elements) of a shard are loaded at any alignment, and only
// the codes of elements in the shard are stored. In is the type of the elements. Elements are numbered from the
// beginning of the matrix, not of the shard.
//
// The rows of the matrix consist of whole runs. Each thread processes whole runs, so that the codes of a run are 8 or
// 16 whole bytes. If a shard begins or ends inside a run, it owns only some elements of that run.
#pragma once

#include "runs.cuh"

constexpr int kRun = 16;

// The elements of a shard: elements [start, end) of the matrix, which begin at the address `values`.
template <class In>
struct Shard {
  using Bits = typename In::Bits;
  static constexpr i64 kPerChunk = 16 / sizeof(Bits);

  const Bits* values;
  i64 start, end;
  u32 shift;        // address of a run modulo 16, in bytes; equal for all runs of the matrix
  i64 first, last;  // runs within [first, last) may be loaded 16 bytes at a time, neighboring elements included
};

// Return the Shard that consists of elements [start, end) of a flattened matrix. `values` is the address of element
// `start`, at any alignment of its type. Nothing is loaded.
template <class In>
FP4KIT_DEVICE Shard<In> shard_of(const void* values, i64 start, i64 end) {
  using Bits = typename In::Bits;
  const u32 shift = static_cast<u32>(reinterpret_cast<u64>(values) - static_cast<u64>(start) * sizeof(Bits)) & 15u;
  const i64 margin = shift ? Shard<In>::kPerChunk : 0;
  return {static_cast<const Bits*>(values), start, end, shift, start + margin, end - margin};
}

// Store in `run` the run that lies inside w. The words in w were loaded from an address at most 15 bytes before the
// run. The run begins at word kWords of w or, if elements have 16 bits and bit 1 of `shift` is set, at the upper half
// of this word.
template <int kWords, class In, int kCount>
FP4KIT_DEVICE void move_down(const u32 (&w)[kCount], u32 shift, Run<In, kRun>& run) {
#pragma unroll
  for (int i = 0; i < run.kWords; ++i)
    run.w[i] =
        run.kPerWord == 1 ? w[i + kWords] : prmt(w[i + kWords], w[i + kWords + 1], shift & 2u ? 0x5432u : 0x3210u);
}

// Return the run that begins at element p of the matrix. The run must be within [s.first, s.last). kAligned must be
// true exactly if s.shift is 0; the run is then loaded in place. Otherwise the load begins s.shift bytes before the run
// and takes 16 bytes more than the run, and the words are moved into place.
template <bool kAligned, class In>
FP4KIT_DEVICE Run<In, kRun> read_whole(const Shard<In>& s, i64 p) {
  const typename In::Bits* x = s.values + (p - s.start);
  if constexpr (kAligned) {
    return read_run<In, kRun>(x);
  } else {
    Run<In, kRun> run;
    u32 w[run.kWords + 4];
    const Chunk* chunks = reinterpret_cast<const Chunk*>(reinterpret_cast<const char*>(x) - s.shift);
#pragma unroll
    for (int c = 0; c <= run.kWords / 4; ++c) {
      const Chunk chunk = chunks[c];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[4 * c + i] = chunk.w[i];
    }
    switch (s.shift / 4u) {  // the same case for all threads
      case 0u:
        move_down<0>(w, s.shift, run);
        break;
      case 1u:
        move_down<1>(w, s.shift, run);
        break;
      case 2u:
        move_down<2>(w, s.shift, run);
        break;
      default:
        move_down<3>(w, s.shift, run);
    }
    return run;
  }
}

// Return the run that begins at element p of the matrix. Elements that the shard does not own are 0. Elements are
// loaded one at a time.
template <class In>
FP4KIT_DEVICE Run<In, kRun> read_owned(const Shard<In>& s, i64 p) {
  Run<In, kRun> run = {};
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (p + i < s.start || p + i >= s.end) continue;
    const typename In::Bits x = s.values[p + i - s.start];
    if constexpr (run.kPerWord == 1) {
      run.w[i] = bits_of(x);
    } else {
      run.w[i / 2] |= static_cast<u32>(x) << (16 * (i % 2));
    }
  }
  return run;
}

// The integers from `first` to `first + count - 1`. has(i) returns true if i is one of them.
struct Range {
  u32 first, count;
  FP4KIT_DEVICE_MEMBER bool has(u32 i) const { return i - first < count; }
};

// Return the indices of the runs whose elements all are in [first, last), or an empty Range if there are none. Run i is
// elements kRun * i ... kRun * i + kRun - 1 of the matrix. `first` must not be negative. A matrix has fewer than 2^31
// runs.
FP4KIT_DEVICE Range whole_runs(i64 first, i64 last) {
  const i64 begin = (first + kRun - 1) / kRun, end = maximum<i64>(last, 0) / kRun;
  return {static_cast<u32>(begin), static_cast<u32>(maximum<i64>(end - begin, 0))};
}

// Return a mask whose lowest n bits are 1 and whose other bits are 0, for 0 <= n <= 32.
FP4KIT_DEVICE u32 low_bits(int n) {
  return n == 32 ? 0xFFFFFFFFu : (1u << n) - 1u;
}

// Store codes `from` ... `to` - 1 of a run, and change no other bit at `out`, the address of the run's codes. `words`
// holds the codes of the whole run, the first one in the lowest bits. `from` and `to` are clamped to the run, and
// nothing is stored if no code is left. Words are changed only by atomic operations on the bits of these codes. So the
// process that owns the other codes of a word may store them at the same time.
template <int kWords>
FP4KIT_DEVICE void store_owned(u8* out, const u32 (&words)[kWords], i64 from, i64 to) {
  constexpr int kPerWord = kRun / kWords, kBits = 32 / kPerWord;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int begin = static_cast<int>(minimum<i64>(maximum<i64>(from - i * kPerWord, 0), kPerWord));
    const int end = static_cast<int>(minimum<i64>(maximum<i64>(to - i * kPerWord, begin), kPerWord));
    const u32 owned = low_bits(kBits * end) & ~low_bits(kBits * begin);
    if (owned == 0u) continue;
    u32* word = reinterpret_cast<u32*>(out) + i;
    atomicAnd(word, ~owned);
    atomicOr(word, words[i] & owned);
  }
}
