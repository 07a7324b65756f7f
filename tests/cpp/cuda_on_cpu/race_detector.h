// Tells ThreadSanitizer that a kernel's threads or blocks run at the same time, although they are
// coroutines of one thread, and which of them wait for each other. As in CUDA, barriers order
// memory; shuffles and ballots do not. Does nothing without the sanitizer. With
// POSEMBED_RACES_BETWEEN_BLOCKS, compares blocks; otherwise the threads of each block.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>

#include <vector>

/// For functions that begin in one coroutine and end in another, where the sanitizer must not count
/// calls.
#define POSEMBED_UNOBSERVED __attribute__((no_sanitize("thread")))

// The sanitizer has no header that declares these functions.
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();

namespace cuda_on_cpu {

#if defined(POSEMBED_RACES_BETWEEN_BLOCKS)
inline constexpr bool between_blocks = true;
/// A prime, so that blocks whose numbers differ by a power of two are compared.
inline constexpr size_t concurrent_blocks = 17;
#else
inline constexpr bool between_blocks = false;
inline constexpr size_t concurrent_blocks = 1;
#endif

/// Suspends the comparison for its lifetime, which must not span a switch of coroutines.
struct Unobserved {
  Unobserved() { __tsan_ignore_thread_begin(); }
  ~Unobserved() { __tsan_ignore_thread_end(); }
};

/// The sanitizer's handle of a thread or block, created once, because creation is slow.
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

/// Synchronisation points: the launch of a kernel, its end, and barriers of a block and its warps.
/// Barriers alternate between two, so that threads that reach the next barrier early do not
/// synchronise with those that leave the last one late.
inline char launched, finished, met[33][2];

/// Calls the sanitizer's `pass` on behalf of each thread of a block of `threads`.
inline void pass_each(void (*pass)(void*), void* what, size_t threads, size_t block) {
  void* const host = current_runner();
  for (size_t i = 0; i < (between_blocks ? 1 : threads); ++i) {
    void* const each = runner(i, block);
    switch_to(each);
    pass(what);
    switch_to(host);
  }
}

/// The host calls these functions before and after a block.
inline void begin_block(size_t threads, size_t block) {
  __tsan_release(&launched);
  pass_each(__tsan_acquire, &launched, threads, block);
}
inline void end_block(size_t threads, size_t block) {
  pass_each(__tsan_release, &finished, threads, block);
  if (!between_blocks) __tsan_acquire(&finished);
}
inline void end_launch() { __tsan_acquire(&finished); }

/// A thread calls these functions at a barrier with the barrier's number, and with that of the
/// warp that waits, or 32 for the block.
inline void arrive(unsigned barrier, unsigned whose) {
  if (!between_blocks) __tsan_release(&met[whose][barrier % 2]);
}
inline void leave(unsigned barrier, unsigned whose) {
  if (!between_blocks) __tsan_acquire(&met[whose][barrier % 2]);
}

}  // namespace cuda_on_cpu

/// The first error is recorded by an atomic swap after a volatile read, which is not a race in
/// CUDA.
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
inline void arrive(unsigned, unsigned) {}
inline void leave(unsigned, unsigned) {}
inline void* runner(size_t, size_t) { return nullptr; }
inline void* current_runner() { return nullptr; }
inline void switch_to(void*) {}

}  // namespace cuda_on_cpu

#define POSEMBED_UNOBSERVED
#endif
