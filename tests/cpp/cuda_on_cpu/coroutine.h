// A thread of a block on the CPU: a coroutine with its own stack, which runs until it yields to the
// host.
#pragma once

#include <setjmp.h>
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
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  inline static ucontext_t host;
#else
  jmp_buf point_;
  inline static jmp_buf host;
#endif
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// The sanitizers can follow a switch of stacks by these functions.
POSEMBED_UNOBSERVED inline void Coroutine::resume(void (*body)()) {
  if (!begun_) make(body);
  begun_ = true;
  swapcontext(&host, &context_);
}
POSEMBED_UNOBSERVED inline void Coroutine::pause() { swapcontext(&context_, &host); }
#else
// Jumps are faster: each function above makes a system call.
[[gnu::noinline]] inline void Coroutine::resume(void (*body)()) {
  if (_setjmp(host) != 0) return;
  if (begun_) _longjmp(point_, 1);
  begun_ = true;
  make(body);
  setcontext(&context_);
}
[[gnu::noinline]] inline void Coroutine::pause() {
  if (_setjmp(point_) == 0) _longjmp(host, 1);
}
#endif

/// The coroutines of a block's threads. Static, because mapping new stacks would take most of the
/// time.
inline Coroutine coroutines[concurrent_blocks][1024];

}  // namespace cuda_on_cpu
