// The shared memory whose size is given at launch. Under AddressSanitizer, memory after it is out
// of bounds.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

// Turns off leak detection, which needs privileges that containers lack, and allows the coroutines'
// stacks.
extern "C" [[gnu::used]] inline const char* __asan_default_options() {
  return "detect_leaks=0:detect_stack_use_after_return=0";
}
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace cuda_on_cpu {

/// The maximum per block on a GPU of compute capability 8.6.
inline constexpr int max_shared_memory = 99 << 10;
alignas(16) inline unsigned char shared_memory[max_shared_memory];

/// The most shared memory that launches of a kernel may have, after it was set to `bytes` if given.
inline int dynamic_limit(const void* kernel, int bytes = -1) {
  static std::mutex lock;
  static std::map<const void*, int> limits;
  const std::lock_guard<std::mutex> alone(lock);
  int& limit = limits.emplace(kernel, 48 << 10).first->second;
  return bytes < 0 ? limit : limit = bytes;
}

/// Prepares the memory for a block. Sets every bit, which reads as NaN.
inline void give_shared_memory(size_t bytes) {
  ASAN_POISON_MEMORY_REGION(shared_memory, sizeof shared_memory);
  ASAN_UNPOISON_MEMORY_REGION(shared_memory, bytes);
  memset(shared_memory, 0xff, bytes);
}

}  // namespace cuda_on_cpu

inline unsigned char* dynamic_shared_memory() { return cuda_on_cpu::shared_memory; }
