// Threads that share the units of a call. One call at a time has them; another that comes meanwhile does its work
// alone, so that programs with threads of their own do not end up with the product of both.
#pragma once

#include <cstdint>
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

struct Pool {
  std::mutex owner, mutex;  // owner: held by the call that has the threads
  std::condition_variable wake, done;
  std::atomic<uint64_t> taken_units{0};  // by the owner, and by others in the upper half
  int64_t units = 0;
  void (*work)(void*, int64_t) = nullptr;
  void* context = nullptr;
  std::atomic<uint64_t> round{0};
  std::atomic<int> running{0};          // threads that still take part
  std::atomic<int> place{0};            // the processor that the owner began a round on
  int wanted = 0, taken = 0, size = 0;  // threads that a round wants, that took part, that exist
};

Pool* pool = new Pool;  // never destroyed: threads may wait on it when the program ends

// The owner takes units from the first on, others from the last: so that those of two rounds, or calls, lie in the
// cache of one processor.
void take_units(Pool& p, bool is_owner) {
  for (;;) {
    const uint64_t taken = p.taken_units.fetch_add(is_owner ? 1 : uint64_t{1} << 32, std::memory_order_relaxed);
    const int64_t first = taken & 0xFFFFFFFFu, last = taken >> 32;
    if (first + last >= p.units) return;
    p.work(p.context, is_owner ? first : p.units - 1 - last);
  }
}

// Waits, 50 microseconds at most: a call of two rounds, or the next call of a loop, need not wake threads up, which
// takes as long.
template <class Condition>
void wait_briefly(Condition is_met) {
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

// The processor that this thread is on; -1 where the system does not tell.
int processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

void serve(Pool* p) {
  fesetenv(FE_DFL_ENV);  // a thread begins with the environment of the one that made it
  std::unique_lock<std::mutex> lock(p->mutex);
  for (uint64_t seen = 0;;) {
    p->wake.wait(lock, [&] { return p->round != seen && p->taken < p->wanted; });
    seen = p->round;
    ++p->taken;
    lock.unlock();
    take_units(*p, false);
    lock.lock();
    if (--p->running == 0) p->done.notify_one();
    lock.unlock();
    const int place = processor();
    if (place < 0 || place != p->place)
      wait_briefly([&] { return p->round != seen; });  // not where the owner waits for a turn
    lock.lock();
  }
}

// Threads up to a number; fewer where the system gives no more.
void grow(Pool& p, int size) {
  try {
    for (; p.size < size; ++p.size) std::thread(serve, &p).detach();
  } catch (...) {
  }
}

// A forked child has none of the threads: it begins with a new pool.
void forget() {
  pool = new Pool;
}
const int registered = pthread_atfork(nullptr, nullptr, forget);

// Calls work(context, unit) for every unit in [0, units), in any order, on `threads` threads at most, this one
// included.
void for_units(int64_t units, int threads, void (*work)(void*, int64_t), void* context) {
  Pool& p = *pool;
  const int helpers = static_cast<int>(units < threads ? units : threads) - 1;
  if (helpers < 1 || !p.owner.try_lock()) {
    for (int64_t unit = 0; unit < units; ++unit) work(context, unit);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    grow(p, helpers);
    p.units = units;
    p.work = work;
    p.context = context;
    p.taken_units = 0;
    p.taken = 0;
    p.wanted = p.running = helpers < p.size ? helpers : p.size;
    p.place = processor();
    ++p.round;
  }
  p.wake.notify_all();
  take_units(p, true);
  wait_briefly([&] { return p.running == 0; });
  {
    std::unique_lock<std::mutex> lock(p.mutex);
    p.running -= p.wanted - p.taken;  // those that have not come are not waited for
    p.wanted = p.taken;
    p.done.wait(lock, [&] { return p.running == 0; });
  }
  p.owner.unlock();
}

}  // namespace
