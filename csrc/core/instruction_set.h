// Chooses the instruction set of the CPU kernels for this process.
#pragma once

#include <cstdint>
#include <vector>

namespace posembed::core {

enum class InstructionSet : int8_t { none, baseline, avx2, avx512 };

/// The sets that were built, narrowest first.
std::vector<InstructionSet> built_instruction_sets();

/// The widest set that was built, that the processor has, and that the environment variable
/// POSEMBED_INSTRUCTION_SET (baseline, avx2 or avx512) allows; none if the processor has none of
/// those built. Chosen once per process, while the library is loaded.
InstructionSet instruction_set();

/// Throws std::runtime_error, for kernels of which no copy runs on this processor.
[[noreturn]] void refuse_processor();

/// Whether the processor is Intel's. Intel's and AMD's prefetchers favour different orders of
/// memory accesses, and software prefetch helps the former but hurts the latter.
extern const bool is_intel;

/// "none", "baseline", "avx2" or "avx512".
const char* name(InstructionSet set);

// ----------------------------------------------------------------------------------------- kernels
// A CPU kernel is one source file, compiled once per instruction set in a namespace of that name.
// The copies are declared here, and the widest one that the processor supports is called.

template <typename Signature>
class CpuKernel;

/// The copies of one kernel; called like the function itself.
template <typename... Arguments>
class CpuKernel<void(Arguments...)> {
 public:
  using Function = void (*)(Arguments...);

  CpuKernel(Function baseline, Function avx2, Function avx512)
      : function_(choose(baseline, avx2, avx512)) {}

  void operator()(Arguments... arguments) const { function_(arguments...); }

 private:
  static Function choose(Function baseline, Function avx2, Function avx512) {
    switch (instruction_set()) {
      case InstructionSet::avx512:
        return avx512;
      case InstructionSet::avx2:
        return avx2;
      case InstructionSet::baseline:
        return baseline;
      default:
        return refuse;
    }
  }

  /// Called instead of the kernel: while the library is loaded, nobody could catch an error.
  static void refuse(Arguments...) { refuse_processor(); }

  Function function_;
};

template <typename Signature>
using FunctionOf = Signature;

}  // namespace posembed::core

// POSEMBED_CPU_KERNEL(rotate, void(const Arguments&, int64_t, int64_t)) declares the copies
// baseline::rotate, avx2::rotate, avx512::rotate and, for callers, rotate_cpu. Copies that were not
// built are null; instruction_set() never names them. kernels.cpp alone defines rotate_cpu: by code
// that runs on every processor, and beside the copies, which other libraries would see as null.
#if defined(POSEMBED_ISA)
#define POSEMBED_CPU_KERNEL(kernel, ...)            \
  namespace POSEMBED_ISA {                          \
  ::posembed::core::FunctionOf<__VA_ARGS__> kernel; \
  }                                                 \
  static_assert(true)
#else
#define POSEMBED_DECLARE_KERNEL(instruction_set, kernel, ...)             \
  namespace instruction_set {                                             \
  __attribute__((weak)) ::posembed::core::FunctionOf<__VA_ARGS__> kernel; \
  }
#if defined(POSEMBED_DEFINE_CPU_KERNELS)
#define POSEMBED_DEFINE_KERNEL(kernel, ...)                     \
  const ::posembed::core::CpuKernel<__VA_ARGS__> kernel##_cpu { \
    baseline::kernel, avx2::kernel, avx512::kernel              \
  }
#else
#define POSEMBED_DEFINE_KERNEL(kernel, ...) static_assert(true)
#endif
#define POSEMBED_CPU_KERNEL(kernel, ...)                              \
  POSEMBED_DECLARE_KERNEL(baseline, kernel, __VA_ARGS__)              \
  POSEMBED_DECLARE_KERNEL(avx2, kernel, __VA_ARGS__)                  \
  POSEMBED_DECLARE_KERNEL(avx512, kernel, __VA_ARGS__)                \
  extern const ::posembed::core::CpuKernel<__VA_ARGS__> kernel##_cpu; \
  POSEMBED_DEFINE_KERNEL(kernel, __VA_ARGS__)
#endif
