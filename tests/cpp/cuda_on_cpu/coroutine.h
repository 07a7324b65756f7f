// What a thread of a block is on the CPU: a coroutine with a stack of its own, which runs until it
// lets the host go on.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

#include "race_detector.h"

namespace cuda_on_cpu {

class Coroutine {
 public:
  /// Called by the host, with the same `body` each time, which never returns: it runs on from where
  /// it paused, at first from its beginning.
  void resume(void (*body)());
  /// Called by the coroutine: the host goes on.
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
// The sanitizers follow these functions to other stacks.
POSEMBED_UNOBSERVED inline void Coroutine::resume(void (*body)()) {
  if (!begun_) make(body);
  begun_ = true;
  swapcontext(&host, &context_);
}
POSEMBED_UNOBSERVED inline void Coroutine::pause() { swapcontext(&context_, &host); }
#else
// Jumps make no system calls, of which each function above makes one.
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

/// Of the threads of a block. Static: mapping their stacks anew would take longest.
inline Coroutine coroutines[concurrent_blocks][1024];

}  // namespace cuda_on_cpu
