// Functions that find the largest magnitude of the elements of a run, a thread block or a cluster, for the amax of a
// tensor. kInput (AmaxInput) says which elements count: all, all but NaN, or only finite ones. Magnitudes are compared
// as float32 bits, which order like the magnitudes, with NaN above infinity. A run is a number of neighboring elements
// that one thread handles together. A cluster is a few thread blocks that can share memory. R is the recipe, and In is
// the type of the elements. a.x are the elements, a matrix with a.rows rows and a.columns columns.
#pragma once

#include "block.cuh"
#include "hadamard.cuh"
#include "warp.cuh"

// Return the float32 bits of |x| if x counts in the amax, and otherwise 0. NaN does not count for AmaxInput::no_nan,
// and neither NaN nor infinity for AmaxInput::finite. For AmaxInput::all, every x counts.
template <AmaxInput kInput>
FP4KIT_DEVICE u32 counted_bits(float x) {
  const u32 bits = bits_of(x) & 0x7FFFFFFFu;
  if constexpr (kInput == AmaxInput::no_nan) return bits > kInfinityBits ? 0u : bits;
  if constexpr (kInput == AmaxInput::finite) return bits >= kInfinityBits ? 0u : bits;
  return bits;
}

// Return the float32 bits of the largest magnitude among the elements of a run that count according to kInput
// (AmaxInput), or 0 if none counts. If Transform::kHadamard, the Hadamard transform of the run is searched instead; the
// caller's run does not change.
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

// Return the largest value of `own` among the threads of a thread block. All threads must call this function, and all
// get the same result. The number of threads must be a multiple of 32, at most 1024.
FP4KIT_DEVICE u32 largest_of_block(u32 own) {
  __shared__ u32 parts[32];
  const u32 lane = threadIdx.x % 32u;
  own = largest_of_warp(own);
  __syncthreads();  // wait until all threads have read the parts of an earlier call
  if (lane == 0u) parts[threadIdx.x / 32u] = own;
  __syncthreads();
  return largest_of_warp(parts[minimum(lane, blockDim.x / 32u - 1u)]);
}

constexpr int kAmaxRun = 16;  // number of elements of a run

// Return the float32 bits of the largest magnitude in this thread's share of the `count` elements at x, among those
// that count according to kInput. Return 0 if none counts. `lanes` threads share the elements, and `lane` is the index
// of this thread. If Transform::kHadamard, runs of kAmaxRun elements are transformed first, and `count` must be a
// multiple of kAmaxRun. If kAligned, the address x must be a multiple of 16 bytes.
template <class Transform, class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE u32 largest_bits(const typename In::Bits* x, i64 count, i64 lane, i64 lanes) {
  constexpr int kRun = kAmaxRun;
  u32 largest = 0u;
  const i64 runs = kAligned || Transform::kHadamard ? count / kRun : 0;
  for (i64 i = runs - 1 - lane; i >= 0; i -= lanes)  // backwards: the next kernel finds the first elements in the cache
    largest = maximum(largest, largest_of_run<Transform, In, kInput>(read_run<In, kRun, kAligned>(x + i * kRun)));
  for (i64 i = runs * kRun + lane; i < count; i += lanes)
    largest = maximum(largest, counted_bits<kInput>(In::widen(x[i])));
  return largest;
}

// The argument Transform for arrays that are not transformed.
struct Untransformed {
  static constexpr bool kHadamard = false;
  static constexpr u32 kSignMask = 0u;
};

// If R::kFinders is not 0, a kernel itself finds the tensor's amax, or the amax of each row, before it quantizes. The
// threads of a cluster of kFinders thread blocks share the array, and every cluster finds all amaxes.
//
// FP4KIT_FINDERS tells the compiler the size of the cluster, and the number of thread blocks of the grid is a multiple
// of it. Before compute capability 9.0 there are no clusters, and each thread block finds the amaxes alone.
#if defined(FP4KIT_FINDERS) && __CUDA_ARCH__ >= 900
#define FP4KIT_CLUSTER __cluster_dims__(FP4KIT_FINDERS, 1, 1)
constexpr int kFinders = FP4KIT_FINDERS;
#else
#define FP4KIT_CLUSTER
constexpr int kFinders = 1;
#endif

// Return the float32 bits of the largest magnitude in this thread's share of the `count` elements at x, among those
// that count according to kInput (AmaxInput). Return 0 if none counts. kLanes threads share the elements, and `lane` is
// the index of this thread. If kAligned, the address x must be a multiple of 16 bytes. Unlike largest_bits, each thread
// keeps loads of 256 bytes in flight, because nothing else hides their latency here.
template <class In, AmaxInput kInput, bool kAligned, int kLanes>
FP4KIT_DEVICE u32 largest_of_lane(const typename In::Bits* x, i64 count, int lane) {
  constexpr int kRun = kAmaxRun, kRunsAtOnce = 256 / (kRun * sizeof(typename In::Bits));
  u32 largest = 0u;
  const i64 runs = kAligned ? count / kRun : 0;
  for (i64 first = lane; first < runs; first += kRunsAtOnce * kLanes) {
    Run<In, kRun> runs_read[kRunsAtOnce];
#pragma unroll
    for (int k = 0; k < kRunsAtOnce; ++k)
      runs_read[k] = read_run<In, kRun, kAligned>(x + minimum(first + k * kLanes, runs - 1) * kRun);
#pragma unroll
    for (int k = 0; k < kRunsAtOnce; ++k)
      largest = maximum(largest, largest_of_run<Untransformed, In, kInput>(runs_read[k]));
  }
  const i64 remainder = runs * kRun;
  return maximum(largest,
                 largest_bits<Untransformed, In, kInput, false>(x + remainder, count - remainder, lane, kLanes));
}

// Report to the cluster that this thread has reached this point, and return without waiting for the other threads.
// Each call must be followed by a call of wait_for_cluster. All threads of the cluster must call this function. What a
// thread writes before this call is visible to the others after their wait. Without clusters, do nothing.
FP4KIT_DEVICE void arrive_in_cluster() {
#if defined(FP4KIT_FINDERS) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Wait until all threads of the cluster have called arrive_in_cluster. Without clusters, wait until all threads of the
// thread block have called this function.
FP4KIT_DEVICE void wait_for_cluster() {
#if defined(FP4KIT_FINDERS) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Return the largest value of `own_largest` in a cluster. All threads of the cluster get the same result. Without
// clusters, return this thread's `own_largest`. All threads of the cluster must have called arrive_in_cluster, and must
// then call this function. Each passes the result of largest_of_block for its thread block.
FP4KIT_DEVICE u32 largest_of_cluster(u32 own_largest) {
#if defined(FP4KIT_FINDERS) && __CUDA_ARCH__ >= 900
  __shared__ u32 parts[kFinders];
  const u32 own_address = static_cast<u32>(__cvta_generic_to_shared(parts + blockIdx.x % kFinders));
  wait_for_cluster();  // wait until all have begun, so that their shared memory exists
  if (threadIdx.x == 0) {
#pragma unroll
    for (u32 peer = 0; peer < kFinders; ++peer) {
      u32 theirs;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own_address), "r"(peer));
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(theirs), "r"(own_largest) : "memory");
    }
  }
  arrive_in_cluster();
  wait_for_cluster();
#pragma unroll
  for (int i = 0; i < kFinders; ++i) own_largest = maximum(own_largest, parts[i]);
#endif
  return own_largest;
}

// Says which elements count in the amax of a row.
template <class R>
constexpr AmaxInput kRowInput = R::kAmaxNan == AmaxNan::propagate ? AmaxInput::all : AmaxInput::no_nan;

// Return the amax of a row of runs, which the threads of a thread block share. `own` is the largest magnitude among the
// runs of this thread, as float32 bits. If a magnitude of the row is infinite or NaN, the row is read again by
// run_at(i), which returns run number i, and only the elements that kRowInput names count. All threads of the thread
// block must call this function, and all get the result.
template <class R, class In, class RunAt>
FP4KIT_DEVICE float amax_of_row(u32 own, u32 runs, RunAt run_at) {
  own = largest_of_block(own);
  if (own < kInfinityBits) return float_of(own);
  own = 0u;
  for (u32 i = threadIdx.x; i < runs; i += blockDim.x)
    own = maximum(own, largest_of_run<Untransformed, In, kRowInput<R>>(run_at(i)));
  return float_of(largest_of_block(own));
}

// Store the amax of row i of a.x in a.tensor_amax[i], for all rows. If NaN propagates in the recipe R, the amax of a
// row with NaN is NaN; otherwise NaN elements do not count, and the amax of a row of only NaN is 0. All threads of the
// cluster must call this function, and may read all amaxes when it returns. A warp takes one row at a time. Every
// cluster finds and stores all amaxes, so no cluster waits for another.
template <class R, class In, bool kAligned, class Arguments>
FP4KIT_DEVICE void find_row_amaxes(const Arguments& a) {
  constexpr int kWarp = 32, kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (i64 row = blockIdx.x % kFinders * kWarps + threadIdx.x / kWarp; row < a.rows; row += kFinders * kWarps) {
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns;
    const u32 largest = largest_of_warp(largest_of_lane<In, kRowInput<R>, kAligned, kWarp>(x, a.columns, lane));
    if (lane == 0) const_cast<float*>(a.tensor_amax)[row] = float_of(largest);
  }
  arrive_in_cluster();
  wait_for_cluster();
}

// Find the amaxes from which the tensor scales of a.x are computed, or do nothing if R::kFinders is 0. A kernel calls
// this function before it quantizes a.x. For small arrays, this saves one or two kernel launches. All threads of the
// launch must call this function.
//
// If each row has a tensor scale, find_row_amaxes stores the amaxes at the address a.tensor_amax. Otherwise the first
// thread block stores the amax of the whole array there, and a.tensor_amax is set to the address of a copy in shared
// memory, which all threads may read. R::kAmaxNan says which elements count: all (a NaN gives NaN), all but NaN, or,
// for AmaxNan::lanes, only finite ones.
template <class R, class In, bool kAligned, class Arguments>
FP4KIT_DEVICE void find_amax(Arguments& a) {
  if constexpr (R::kFinders > 0 && R::kTensorScaling == TensorScaling::row) {
    find_row_amaxes<R, In, kAligned>(a);
  } else if constexpr (R::kFinders > 0) {
    constexpr AmaxInput kInput = R::kAmaxNan == AmaxNan::propagate ? AmaxInput::all
                                 : R::kAmaxNan == AmaxNan::ignore  ? AmaxInput::no_nan
                                                                   : AmaxInput::finite;
    __shared__ float found;
    arrive_in_cluster();
    const int lane = blockIdx.x % kFinders * kThreads + threadIdx.x;
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x);
    const u32 own = largest_of_lane<In, kInput, kAligned, kFinders * kThreads>(x, a.rows * a.columns, lane);
    const u32 largest = largest_of_cluster(largest_of_block(own));
    if (threadIdx.x == 0) {
      found = float_of(largest);
      if (blockIdx.x == 0) *const_cast<float*>(a.tensor_amax) = found;
    }
    __syncthreads();
    a.tensor_amax = &found;
  }
}
