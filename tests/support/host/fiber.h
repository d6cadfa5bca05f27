// Run a function on a separate stack (a fiber), and switch between stacks. On x86-64 a switch is eight instructions
// that save and restore the registers that a call preserves. On other processors, or with FIBER_UCONTEXT, the functions
// of ucontext are used. They are slower, because a switch makes two system calls for signals, and makes the address
// sanitizer clear the shadow of a whole stack.
#pragma once

#include <cstdlib>

constexpr unsigned kFiberStack = 64 * 1024;

#if defined(__x86_64__) && !defined(FIBER_UCONTEXT)

#include <cstdint>

struct Fiber {
  std::uintptr_t* top = nullptr;
  unsigned char* memory = nullptr;
};

extern "C" void fiber_swap(std::uintptr_t** from, std::uintptr_t* to);
asm(R"(
.pushsection .text
.type fiber_swap, @function
fiber_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fiber_swap, . - fiber_swap
.popsection
)");

inline void fiber_switch(Fiber& from, Fiber& to) {
  fiber_swap(&from.top, to.top);
}

// The first switch to the fiber calls run(), which never returns.
inline void fiber_begin(Fiber& fiber, void (*run)()) {
  fiber.memory = static_cast<unsigned char*>(std::aligned_alloc(16, kFiberStack));
  // | six registers | run | no return address |, aligned to 16 at the end, like the stack after a call of run
  fiber.top = reinterpret_cast<std::uintptr_t*>(fiber.memory + kFiberStack) - 8;
  for (unsigned i = 0; i < 8; ++i) fiber.top[i] = 0;
  fiber.top[6] = reinterpret_cast<std::uintptr_t>(run);
}

#else

#include <ucontext.h>

struct Fiber {
  ucontext_t context;
  unsigned char* memory = nullptr;
};

inline void fiber_switch(Fiber& from, Fiber& to) {
  swapcontext(&from.context, &to.context);
}

inline void fiber_begin(Fiber& fiber, void (*run)()) {
  fiber.memory = static_cast<unsigned char*>(std::malloc(kFiberStack));
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.memory;
  fiber.context.uc_stack.ss_size = kFiberStack;
  makecontext(&fiber.context, run, 0);
}

#endif
