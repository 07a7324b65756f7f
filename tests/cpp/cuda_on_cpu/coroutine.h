// A thread of a block on the CPU: a coroutine with its own stack, which runs until it yields to the
// host.
#pragma once

#include <ucontext.h>

#include <cstddef>

#include "race_detector.h"

namespace cuda_on_cpu {

class Coroutine {
 public:
  /// Called by the host, always with the same `body`, which never returns: the first call starts
  /// it, and later calls continue where it paused.
  void resume(void (*body)());
  /// Called by the coroutine: returns to the host.
  void pause();

 private:
  void make(void (*body)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = sizeof stack_;
    makecontext(&context_, body, 0);
  }

  alignas(64) char stack_[64 << 10];
  ucontext_t context_;
  bool begun_ = false;
#if defined(__SANITIZE_THREAD__)
  inline static ucontext_t host;
#else
  using Point = void* [5];  // of __builtin_setjmp()
  Point point_;
  inline static Point host;
#endif
};

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer can follow a switch of stacks by these functions.
POSEMBED_UNOBSERVED inline void Coroutine::resume(void (*body)()) {
  if (!begun_) make(body);
  begun_ = true;
  swapcontext(&host, &context_);
}
POSEMBED_UNOBSERVED inline void Coroutine::pause() { swapcontext(&context_, &host); }
#else
// Built-in jumps are faster: each function above makes a system call, and AddressSanitizer writes
// its record of a whole stack before a jump that it sees. noipa: all memory may change meanwhile.
#define POSEMBED_JUMPS gnu::noipa, gnu::no_sanitize("address")
[[noreturn, POSEMBED_JUMPS]] inline void jump(void** point) { __builtin_longjmp(point, 1); }
[[POSEMBED_JUMPS]] inline void Coroutine::resume(void (*body)()) {
  if (__builtin_setjmp(host) != 0) return;
  if (begun_) jump(point_);
  begun_ = true;
  make(body);
  setcontext(&context_);
}
[[POSEMBED_JUMPS]] inline void Coroutine::pause() {
  if (__builtin_setjmp(point_) == 0) jump(host);
}
#undef POSEMBED_JUMPS
#endif

/// The coroutines of a block's threads. Static, because mapping new stacks would take most of the
/// time.
inline Coroutine coroutines[concurrent_blocks][1024];

}  // namespace cuda_on_cpu
