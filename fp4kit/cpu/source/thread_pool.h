// The threads that share the tiles of a call. One call at a time owns them.
//   round    one use of the threads, from the start of for_each_index to its return
//   owner    the thread that called for_each_index
//   helpers  the other threads that take part; they sleep between rounds
//   index    the number of a piece of work, such as a tile
//   claim    take the next index, so that no other thread takes it
//
// A call that comes while the threads are owned does its work alone. Otherwise a program with n threads that make calls
// would run n times as many threads.
#pragma once

#include <cstdint>

#if defined(__wasm__)

namespace {

// Call work(context, index) for every index in [0, count), in order, in the calling thread. This is the version for
// WebAssembly, where this library uses no threads.
void for_each_index(int64_t count, int, void (*work)(void*, int64_t), void* context) {
  for (int64_t index = 0; index < count; ++index) work(context, index);
}

}  // namespace

#else

#include <fenv.h>
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

// The state of the threads and of the current round.
struct Pool {
  std::mutex owner,
      mutex;  // owner: locked by the call that owns the threads; mutex: guards the fields that are not atomic
  std::condition_variable wake, done;
  std::atomic<uint64_t> claimed{0};  // indices claimed by the owner (lower 32 bits) and by helpers (upper 32 bits)
  int64_t count = 0;                 // number of indices in this round
  void (*work)(void*, int64_t) = nullptr;  // the function of this round, called as work(context, index)
  void* context = nullptr;
  std::atomic<uint64_t> round{0};        // number of rounds that have begun
  std::atomic<int> running{0};           // helpers that have not finished the round
  std::atomic<int> owner_processor{0};   // the processor on which the owner began the round
  int wanted = 0, joined = 0, size = 0;  // helpers that the round wants, that have joined it, that exist
};

Pool* pool = new Pool;  // never destroyed, because threads may wait on it when the program ends

// Claim indices of the current round and work on them, one by one, until none is left. is_owner: true in the thread of
// the owner. The owner claims indices upward from the first one, and helpers claim them downward from the last one. So
// a tile tends to be handled by the same thread in successive rounds, and its elements are in the cache of that
// processor.
void work_off(Pool& p, bool is_owner) {
  for (;;) {
    const uint64_t claimed = p.claimed.fetch_add(is_owner ? 1 : uint64_t{1} << 32, std::memory_order_relaxed);
    const int64_t first = claimed & 0xFFFFFFFFu, last = claimed >> 32;
    if (first + last >= p.count) return;
    p.work(p.context, is_owner ? first : p.count - 1 - last);
  }
}

// Wait until is_met() returns true, but at most about 50 microseconds. Callers test the condition again, because this
// function does not tell which of the two happened. The thread does not sleep meanwhile. Waking a sleeping thread takes
// about as long, so this pays if the next round follows soon.
template <class Condition>
void spin_briefly(Condition is_met) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_met()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
}

// Return the number of the processor that runs this thread, or -1 if it is unknown, as on systems other than Linux.
int processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Run one helper thread, forever: sleep until a round wants more helpers than have joined it, join the round once, work
// until no index is left, and repeat. The helper that finishes last wakes the owner.
void helper_loop(Pool* p) {
  fesetenv(FE_DFL_ENV);  // a thread inherits the floating-point environment of its creator
  std::unique_lock<std::mutex> lock(p->mutex);
  for (uint64_t seen = 0;;) {
    p->wake.wait(lock, [&] { return p->round != seen && p->joined < p->wanted; });
    seen = p->round;
    ++p->joined;
    lock.unlock();
    work_off(*p, false);
    lock.lock();
    if (--p->running == 0) p->done.notify_one();
    lock.unlock();
    // Spin only on another processor than the owner's. On the same processor, the owner would have to wait for its
    // turn.
    const int place = processor();
    if (place < 0 || place != p->owner_processor) spin_briefly([&] { return p->round != seen; });
    lock.lock();
  }
}

// Start helper threads until at least `size` of them exist. If the system cannot start a thread, stop without an error.
// Afterwards, p.size is the number of helpers that exist, which may be more or fewer than `size`.
void ensure_helpers(Pool& p, int size) {
  try {
    for (; p.size < size; ++p.size) std::thread(helper_loop, &p).detach();
  } catch (...) {
  }
}

// Replace the pool by a new one without helpers. A forked child process runs this function right after the fork,
// because it has none of the threads of its parent.
void reset_after_fork() {
  pool = new Pool;
}
const int registered = pthread_atfork(nullptr, nullptr, reset_after_fork);

// Call work(context, index) once for every index in [0, count), in any order, on at most `threads` threads including
// the calling one. Return when all calls have returned. If another call owns the threads, or if `threads` or `count` is
// at most 1, the calling thread makes all calls, in order. `work` must not throw.
void for_each_index(int64_t count, int threads, void (*work)(void*, int64_t), void* context) {
  Pool& p = *pool;
  const int helpers = static_cast<int>(count < threads ? count : threads) - 1;
  if (helpers < 1 || !p.owner.try_lock()) {
    for (int64_t index = 0; index < count; ++index) work(context, index);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    ensure_helpers(p, helpers);
    p.count = count;
    p.work = work;
    p.context = context;
    p.claimed = 0;
    p.joined = 0;
    p.wanted = p.running = helpers < p.size ? helpers : p.size;
    p.owner_processor = processor();
    ++p.round;
  }
  // Do not wake helpers that only an earlier round with more threads needed.
  if (p.size <= helpers) {
    p.wake.notify_all();
  } else {
    for (int i = 0; i < helpers; ++i) p.wake.notify_one();
  }
  work_off(p, true);
  spin_briefly([&] { return p.running == 0; });
  {
    std::unique_lock<std::mutex> lock(p.mutex);
    p.running -= p.wanted - p.joined;  // do not wait for helpers that have not joined
    p.wanted = p.joined;
    p.done.wait(lock, [&] { return p.running == 0; });
  }
  p.owner.unlock();
}

}  // namespace

#endif  // __wasm__
