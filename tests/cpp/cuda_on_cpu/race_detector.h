// What ThreadSanitizer must be told of kernels that run on the CPU: that threads, or blocks, run at
// the same time, although they are coroutines of one thread, and which wait for each other. As in
// CUDA, barriers order memory; shuffles and ballots do not. Without the sanitizer, nothing.
// With POSEMBED_RACES_BETWEEN_BLOCKS, blocks are compared; otherwise, the threads of each block.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>

#include <vector>

/// For functions that begin in one coroutine and end in another: calls are not counted there.
#define POSEMBED_UNOBSERVED __attribute__((no_sanitize("thread")))

// No header of the sanitizer declares them.
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();

namespace cuda_on_cpu {

#if defined(POSEMBED_RACES_BETWEEN_BLOCKS)
inline constexpr bool between_blocks = true;
/// Prime, so that blocks whose numbers differ by a power of two are compared.
inline constexpr size_t concurrent_blocks = 17;
#else
inline constexpr bool between_blocks = false;
inline constexpr size_t concurrent_blocks = 1;
#endif

/// Nothing is compared while one exists, which must not be when others get to run.
struct Unobserved {
  Unobserved() { __tsan_ignore_thread_begin(); }
  ~Unobserved() { __tsan_ignore_thread_end(); }
};

/// The sanitizer's name of what runs: made once, because making one takes long.
inline void* runner(size_t thread, size_t block) {
  static std::vector<void*> runners;
  const size_t i = between_blocks ? block % concurrent_blocks : thread;
  while (runners.size() <= i) runners.push_back(__tsan_create_fiber(0));
  return runners[i];
}

inline void* current_runner() { return __tsan_get_current_fiber(); }
POSEMBED_UNOBSERVED inline void switch_to(void* runner) {
  constexpr unsigned orders_nothing = 1;
  __tsan_switch_to_fiber(runner, orders_nothing);
}

/// What is passed on when a kernel is launched, when it has finished, and at barriers. Two for
/// barriers in turn: who comes to the next one early has nothing to give to those that leave the
/// last one late.
inline char launched, finished, met[2];

/// Calls `pass` of the sanitizer as each that runs in a block of `threads`.
inline void pass_each(void (*pass)(void*), void* what, size_t threads, size_t block) {
  void* const host = current_runner();
  for (size_t i = 0; i < (between_blocks ? 1 : threads); ++i) {
    void* const each = runner(i, block);
    switch_to(each);
    pass(what);
    switch_to(host);
  }
}

/// Calls of the host, before and after a block.
inline void begin_block(size_t threads, size_t block) {
  __tsan_release(&launched);
  pass_each(__tsan_acquire, &launched, threads, block);
}
inline void end_block(size_t threads, size_t block) {
  pass_each(__tsan_release, &finished, threads, block);
  if (!between_blocks) __tsan_acquire(&finished);
}
inline void end_launch() { __tsan_acquire(&finished); }

/// Calls of a thread, which of its barriers it is.
inline void arrive(unsigned barrier) {
  if (!between_blocks) __tsan_release(&met[barrier % 2]);
}
inline void leave(unsigned barrier) {
  if (!between_blocks) __tsan_acquire(&met[barrier % 2]);
}

}  // namespace cuda_on_cpu

/// The first error is taken by an atomic swap after a volatile read, which is no race in CUDA.
extern "C" [[gnu::used]] POSEMBED_UNOBSERVED inline const char* __tsan_default_suppressions() {
  return "race:record_error\n";
}

#else
namespace cuda_on_cpu {

inline constexpr size_t concurrent_blocks = 1;

struct Unobserved {
  Unobserved() {}
};

inline void begin_block(size_t, size_t) {}
inline void end_block(size_t, size_t) {}
inline void end_launch() {}
inline void arrive(unsigned) {}
inline void leave(unsigned) {}
inline void* runner(size_t, size_t) { return nullptr; }
inline void* current_runner() { return nullptr; }
inline void switch_to(void*) {}

}  // namespace cuda_on_cpu

#define POSEMBED_UNOBSERVED
#endif
