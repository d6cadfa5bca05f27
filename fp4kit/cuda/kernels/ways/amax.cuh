// What the kernels of the amax of tensors share: which elements count, the largest of a run, and of a thread block.
#pragma once

#include "block.cuh"
#include "hadamard.cuh"

template <AmaxInput kInput>
FP4KIT_DEVICE u32 counted_bits(float x) {
  const u32 bits = bits_of(x) & 0x7FFFFFFFu;
  if constexpr (kInput == AmaxInput::no_nan) return bits > kInfinityBits ? 0u : bits;
  if constexpr (kInput == AmaxInput::finite) return bits >= kInfinityBits ? 0u : bits;
  return bits;
}

// Largest of a run's elements, transformed first where Transform says so.
template <class Transform, class In, AmaxInput kInput, int kCount>
FP4KIT_DEVICE u32 largest_of_run(Run<In, kCount> run) {
  u32 largest;
  if constexpr (Transform::kHadamard) {
    largest = hadamard_run<Transform::kSignMask>(run);
  } else {
    largest = largest_bits_of(run);
  }
  if (largest < kInfinityBits) return largest;
  largest = 0u;
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest = maximum(largest, counted_bits<kInput>(element(run, i)));
  return largest;
}

template <int kThreads>
FP4KIT_DEVICE u32 largest_of_block(u32 mine) {
  __shared__ u32 parts[kThreads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] = maximum(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  const u32 result = parts[0];
  __syncthreads();
  return result;
}

constexpr int kAmaxRun = 16;

// Largest of the elements [0, count) that thread `lane` of `lanes` takes.
template <class Transform, class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE u32 largest_bits(const typename In::Bits* x, i64 count, i64 lane, i64 lanes) {
  constexpr int kRun = kAmaxRun;
  u32 largest = 0u;
  const i64 runs = kAligned || Transform::kHadamard ? count / kRun : 0;
  for (i64 i = lane; i < runs; i += lanes)
    largest = maximum(largest, largest_of_run<Transform, In, kInput>(read_run<In, kRun, kAligned>(x + i * kRun)));
  for (i64 i = runs * kRun + lane; i < count; i += lanes) largest = maximum(largest, counted_bits<kInput>(In::widen(x[i])));
  return largest;
}

struct Untransformed {
  static constexpr bool kHadamard = false;
  static constexpr u32 kSignMask = 0u;
};

// The same of all elements for a thread block by itself: 256 bytes a thread are on their way at a time, since nothing else hides
// how long they take.
template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE u32 largest_of_all(const typename In::Bits* x, i64 count) {
  constexpr int kRun = kAmaxRun, kAtOnce = 256 / (kRun * sizeof(typename In::Bits));
  u32 largest = 0u;
  const i64 runs = kAligned ? count / kRun : 0;
  for (i64 first = threadIdx.x; first < runs; first += kAtOnce * kThreads) {
    Run<In, kRun> some[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) some[k] = read_run<In, kRun, kAligned>(x + minimum(first + k * kThreads, runs - 1) * kRun);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) largest = maximum(largest, largest_of_run<Untransformed, In, kInput>(some[k]));
  }
  const i64 rest = runs * kRun;
  return maximum(largest, largest_bits<Untransformed, In, kInput, false>(x + rest, count - rest, threadIdx.x, kThreads));
}

// Where R::kFindsAmax, before anything else: the amax of the whole array, which every thread block finds for itself and then has in
// a.tensor_amax; the first one also writes it to where that pointed. One launch instead of three, for arrays that are small.
template <class R, class In, bool kAligned, class Arguments>
FP4KIT_DEVICE void find_amax(Arguments& a) {
  if constexpr (R::kFindsAmax) {
    constexpr AmaxInput kInput = R::kAmaxNan == AmaxNan::propagate ? AmaxInput::all
                                 : R::kAmaxNan == AmaxNan::ignore  ? AmaxInput::no_nan
                                                                   : AmaxInput::finite;
    __shared__ float found;
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x);
    const u32 mine = largest_of_all<In, kInput, kAligned>(x, a.rows * a.columns);
    const u32 largest = largest_of_block<kThreads>(mine);
    if (threadIdx.x == 0) {
      found = float_of(largest);
      if (blockIdx.x == 0) *const_cast<float*>(a.tensor_amax) = found;
    }
    __syncthreads();
    a.tensor_amax = &found;
  }
}
