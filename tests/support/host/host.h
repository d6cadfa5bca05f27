// Provide CUDA on the CPU, for tests: the system's C++ compiler compiles the unchanged kernels, which run with their
// usual grids.
//
// A thread of a block is a fiber (fiber.h) that runs until it waits at a barrier or returns. Blocks run one after the
// other. A launch is therefore deterministic, and two launches with opposite orders of threads reveal a missing
// barrier.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

// Bytes that no kernel may use, between two variables in shared memory: an edge, which begins at the end of the first
// variable, and a gap, which ends at the beginning of the second. A launch fills both with a value and checks it
// afterwards, which detects writes. The value differs between launches that must give equal results, which detects
// reads.
struct __attribute__((packed, aligned(1))) HostEdge {
  unsigned char bytes[2048];
};
struct alignas(64) HostGap {
  static inline HostGap* last = nullptr;
  static inline unsigned char value = 0xEE;
  HostEdge* edge;
  HostGap* next;
  unsigned char bytes[2048 - 2 * sizeof(void*)];
  void enter(HostEdge& before) {
    if (edge) return;
    edge = &before;
    next = last;
    last = this;
    fill();
  }
  void fill() {
    std::memset(bytes, value, sizeof bytes);
    std::memset(edge->bytes, value, sizeof edge->bytes);
  }
  bool is_intact() const { return is_filled(bytes, sizeof bytes) && is_filled(edge->bytes, sizeof edge->bytes); }
  static bool is_filled(const unsigned char* bytes, size_t count) {
    return bytes[0] == value && !std::memcmp(bytes, bytes + 1, count - 1);
  }
};
#define HOST_JOIN_(a, b) a##b
#define HOST_JOIN(a, b) HOST_JOIN_(a, b)
#define HOST_GAP(number)                         \
  static HostEdge HOST_JOIN(host_edge_, number); \
  static HostGap HOST_JOIN(host_gap_, number);   \
  HOST_JOIN(host_gap_, number).enter(HOST_JOIN(host_edge_, number));
#define __shared__ HOST_GAP(__COUNTER__) static

// The gap after the last variable in shared memory that a function template declares.
template <int>
void host_last_gap() {
  HOST_GAP(0)
}

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] void host_stop(const char* message);  // ends the launch: library.h

[[noreturn]] inline void host_fail(const char* message) {
  char text[256];
  std::snprintf(text, sizeof text, "host.h: thread %u of block %u: %s", threadIdx.x, blockIdx.x, message);
  host_stop(text);
}

// ---- fibers and barriers

constexpr unsigned kHostThreads = 1024, kHostWarp = 32;
struct HostFiber {
  Fiber stack;
  bool running;
};
struct HostBarrier {
  unsigned arrived, generation;
};

inline HostFiber host_fibers[kHostThreads];
inline Fiber host_scheduler;
inline HostBarrier host_block, host_groups[16], host_warps[kHostThreads / kHostWarp];
inline unsigned host_lanes[kHostThreads];
inline bool host_progress;
inline void (*host_call)(const void*);
inline const void* host_arguments;

inline void host_yield() {
  fiber_switch(host_fibers[threadIdx.x].stack, host_scheduler);
}

inline void host_fiber() {
  for (;;) {
    host_call(host_arguments);
    host_fibers[threadIdx.x].running = false;
    host_progress = true;
    host_yield();
  }
}

inline void host_wait(HostBarrier& barrier, unsigned threads) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived < threads) {
    while (barrier.generation == generation) host_yield();
  } else {
    barrier.arrived = 0;
    ++barrier.generation;
    host_progress = true;
  }
}

inline void host_run_block(unsigned threads, bool descending) {
  for (unsigned t = 0; t < threads; ++t) {
    host_fibers[t].running = true;
    if (!host_fibers[t].stack.memory)
      fiber_begin(host_fibers[t].stack, host_fiber);  // otherwise it waits at the end of its function
  }
  for (bool any = true; any;) {
    any = host_progress = false;
    for (unsigned i = 0; i < threads; ++i) {
      threadIdx = {descending ? threads - 1 - i : i};
      HostFiber& fiber = host_fibers[threadIdx.x];
      if (fiber.running) fiber_switch(host_scheduler, fiber.stack);
      any |= fiber.running;
    }
    if (!host_progress) host_fail("waits at a barrier that not every thread reaches");
  }
}

// Run kernel(arguments) with `grid` blocks of `threads` threads. If `descending`, the last block and the last
// thread go first.
template <class Arguments>
void host_launch(void (*kernel)(Arguments), const Arguments& arguments, unsigned grid, unsigned threads,
                 bool descending = false) {
  struct Call {
    void (*kernel)(Arguments);
    const Arguments& arguments;
  } call{kernel, arguments};
  if (threads > kHostThreads || threads % kHostWarp) host_fail("blocks need whole warps, 1024 threads at most");
  host_call = [](const void* p) { static_cast<const Call*>(p)->kernel(static_cast<const Call*>(p)->arguments); };
  host_arguments = &call;
  gridDim = {grid, 1, 1};
  blockDim = {threads, 1, 1};
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx = {descending ? grid - 1 - b : b};
    host_run_block(threads, descending);
  }
}

// ---- what kernels call

inline unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
inline long long __double_as_longlong(double x) {
  return __builtin_bit_cast(long long, x);
}
inline double __longlong_as_double(long long bits) {
  return __builtin_bit_cast(double, bits);
}
inline float __uint_as_float(unsigned bits) {
  return __builtin_bit_cast(float, bits);
}

// As in CUDA, if one argument is NaN, the result is the other one. The C library returns NaN for a signaling NaN.
// -0 is less than +0.
inline float host_least(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float host_most(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
#define fminf host_least
#define fmaxf host_most

inline void __syncthreads() {
  host_wait(host_block, blockDim.x);
}
inline int __syncthreads_or(int value) {
  static int any = 0;
  any |= value != 0;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return result;
}
inline void sync_group(unsigned number, unsigned threads) {
  host_wait(host_groups[number], threads);
}
inline int __clz(unsigned x) {
  return x ? __builtin_clz(x) : 32;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline unsigned host_from_lane(unsigned value, unsigned lane) {
  HostBarrier& warp = host_warps[threadIdx.x / kHostWarp];
  host_lanes[threadIdx.x] = value;
  host_wait(warp, kHostWarp);
  const unsigned result = host_lanes[threadIdx.x / kHostWarp * kHostWarp + lane];
  host_wait(warp, kHostWarp);
  return result;
}
inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned lane_mask) {
  return host_from_lane(value, threadIdx.x % kHostWarp ^ lane_mask);
}
inline unsigned __shfl_sync(unsigned, unsigned value, unsigned lane) {
  return host_from_lane(value, lane % kHostWarp);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  HostBarrier& warp = host_warps[threadIdx.x / kHostWarp];
  host_lanes[threadIdx.x] = predicate;
  host_wait(warp, kHostWarp);
  unsigned result = 0, first = threadIdx.x / kHostWarp * kHostWarp;
  for (unsigned lane = 0; lane < kHostWarp; ++lane) result |= host_lanes[first + lane] << lane;
  host_wait(warp, kHostWarp);
  return result;
}
inline void __syncwarp() {
  host_wait(host_warps[threadIdx.x / kHostWarp], kHostWarp);
}
inline int __any_sync(unsigned mask, int value) {
  return __ballot_sync(mask, value != 0) != 0;
}
// Atomics need no synchronization, because only one thread of a block runs until it waits.
template <class T, class F>
inline T host_atomic(T* at, F changed) {
  const T old = *at;
  *at = changed(old);
  return old;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  return host_atomic(at, [=](unsigned old) { return old < value ? value : old; });
}
inline unsigned atomicMin(unsigned* at, unsigned value) {
  return host_atomic(at, [=](unsigned old) { return old < value ? old : value; });
}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  return host_atomic(at, [=](unsigned old) { return old + value; });
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return host_atomic(at, [=](unsigned long long old) { return old + value; });
}
inline unsigned atomicAnd(unsigned* at, unsigned value) {
  return host_atomic(at, [=](unsigned old) { return old & value; });
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
  return host_atomic(at, [=](unsigned old) { return old | value; });
}

// Reciprocals of sm_90, measured: int8 delta per significand (reference/arith.py), set before a launch.
extern "C" {
inline const signed char* host_reciprocal_table = nullptr;
}

inline float rcp_approx_ftz(float x) {
  if (std::fabs(x) < 0x1p-126f) x = std::copysign(0.0f, x);
  const float exact = 1.0f / x;
  if (!std::isfinite(exact) || !std::isfinite(x)) return exact;
  const unsigned bits = __float_as_uint(x), significand = bits & 0x7FFFFFu;
  const float one = __uint_as_float(significand | 0x3F800000u);
  const float near = __uint_as_float(__float_as_uint(1.0f / one) + host_reciprocal_table[significand]);
  const double scaled = std::ldexp(static_cast<double>(near), 127 - static_cast<int>(bits >> 23 & 0xFFu));
  return std::copysign(scaled < 0x1p-126 ? 0.0f : static_cast<float>(scaled), x);
}
