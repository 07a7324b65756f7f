// Fails where an input takes more memory or time than its bytes justify: a count of a few digits
// must not decide over either. Allocations are added up, freed or not, so that the measure is the
// same in every run.
#pragma once

#include <sanitizer/allocator_interface.h>

#include <cstddef>
#include <cstdio>
#include <ctime>

#include "mutator.h"

namespace posembed::fuzz {

/// Measures from its construction to its destruction.
class Budget {
 public:
  explicit Budget(size_t input_bytes) : input_bytes_(input_bytes), began_(seconds()) {
    static const int installed = __sanitizer_install_malloc_and_free_hooks(&count, &ignore);
    require(installed != 0);
    allocated_ = 0;
  }

  ~Budget() {
    const auto size = static_cast<double>(input_bytes_);
    check("bytes", static_cast<double>(allocated_), free_bytes + size * bytes_per_byte);
    check("seconds", seconds() - began_, free_seconds + size * seconds_per_byte);
  }

 private:
  // Each of up to 1024 layers sees a copy of its configuration.
  static constexpr double free_bytes = 1 << 20, bytes_per_byte = 1024 * 256;
  static constexpr double free_seconds = 0.5, seconds_per_byte = 0.001;

  static void count(const volatile void*, size_t size) { allocated_ += size; }
  static void ignore(const volatile void*) {}

  /// Of this thread, however busy the machine is.
  static double seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  void check(const char* what, double used, double most) const {
    if (used <= most) return;
    std::fprintf(stderr, "%g %s for an input of %zu bytes, at most %g are justified\n", used, what, input_bytes_, most);
    require(false);
  }

  static inline size_t allocated_ = 0;
  size_t input_bytes_;
  double began_;
};

}  // namespace posembed::fuzz
