// Launch the kernels of a shared library in the process that loaded it, on its memory. See README.md.
//
// A launch ends with a message at an access outside of mapped memory, at a misaligned access (which a GPU rejects), and
// at a trap of the undefined-behavior sanitizer.
#pragma once

#include <unistd.h>

#include <csetjmp>
#include <csignal>

#include "host.h"

using Launch = void (*)(const unsigned char* arguments, size_t bytes, unsigned grid, unsigned threads, bool descending);

template <class Arguments, void (*kKernel)(Arguments)>
void launch(const unsigned char* bytes, size_t size, unsigned grid, unsigned threads, bool descending) {
  if (size != sizeof(Arguments)) host_fail("the launcher's arguments and the kernel's have different sizes");
  Arguments arguments;
  std::memcpy(&arguments, bytes, size);
  host_launch(kKernel, arguments, grid, threads, descending);
}

inline const Launch* host_library;
inline sigjmp_buf host_escape;
inline char host_message[256];

[[noreturn]] inline void host_stop(const char* message) {
  std::snprintf(host_message, sizeof host_message, "%s", message);
  siglongjmp(host_escape, 1);
}

inline void host_signalled(int signal, siginfo_t* info, void*) {
  if (signal == SIGALRM) host_fail("runs for more than a minute");
  if (signal == SIGILL) host_fail("misaligned address, or undefined behaviour");  // a trap of -fsanitize=undefined
  char text[128];
  std::snprintf(text, sizeof text, "address %p is outside of every array (signal %d)", info->si_addr, signal);
  host_fail(text);
}

// Catch signals of a kernel during its lifetime, on a separate stack, because the stacks of fibers are small.
struct HostSignals {
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGALRM};
  struct sigaction before[5];
  stack_t stack_before;
  HostSignals() {
    static char memory[1 << 16];
    stack_t stack{};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, &stack_before);
    struct sigaction action{};
    action.sa_sigaction = host_signalled;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; ++i) sigaction(kNumbers[i], &action, &before[i]);
    alarm(60);  // seconds; launches take milliseconds
  }
  ~HostSignals() {
    alarm(0);
    for (int i = 0; i < 5; ++i) sigaction(kNumbers[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

// After a launch that ended early, drop the fibers that still wait.
inline void host_reset() {
  for (HostFiber& fiber : host_fibers) fiber = {};
  for (HostBarrier& group : host_groups) group = {};
  for (HostBarrier& warp : host_warps) warp = {};
  host_block = {};
}

// Launch a kernel, with a value in the gaps of shared memory. Return null, or the reason why the kernel was stopped.
extern "C" __attribute__((used, visibility("default"))) const char* host_launch_here(unsigned kernel,
                                                                                     const unsigned char* arguments,
                                                                                     size_t bytes, unsigned grid,
                                                                                     unsigned threads, bool descending,
                                                                                     unsigned char gap_value) {
  HostSignals signals;
  HostGap::value = gap_value;
  for (HostGap* gap = HostGap::last; gap; gap = gap->next) gap->fill();
  if (sigsetjmp(host_escape, 1)) {
    host_reset();
    return host_message;
  }
  host_library[kernel](arguments, bytes, grid, threads, descending);
  for (HostGap* gap = HostGap::last; gap; gap = gap->next)
    if (!gap->is_intact()) return "it wrote outside of a variable in shared memory";
  return nullptr;
}

// Called once after loading. argv[0] is the table of reciprocals.
__attribute__((visibility("default"))) int main(int argc, char** argv);

inline int host_main(int, char** argv, const Launch* launches) {
  host_reciprocal_table = reinterpret_cast<const signed char*>(argv[0]);
  host_library = launches;
  return 0;
}
