// Versions and compilers of this build of libposembed.so, and the instruction set it uses here.
#pragma once

#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/version.h"

namespace posembed {

struct BuildInfo {
  /// posembed's version, "0.1.0".
  std::string version;
  /// The torch version that it was built for, "2.11.0"; it works with no other minor version.
  std::string torch_version;
  /// The CUDA toolkit that built the kernels, "13.0"; empty in a CPU-only build.
  std::string cuda_version;
  /// The architectures that the kernels were compiled for, as CMake writes them: {"80-real",
  /// "90-real", "100-real", "100-virtual"}.
  std::vector<std::string> cuda_architectures;
  /// The compiler and its version, "GNU 12.2.0".
  std::string compiler;
  /// The instruction sets that CPU kernels were compiled for, narrowest first.
  std::vector<std::string> instruction_sets;
  /// The instruction set in use: the widest that the processor has and POSEMBED_INSTRUCTION_SET
  /// allows; "none" if the processor has none of them, and kernels raise std::runtime_error.
  std::string instruction_set;
};

/// Example: `std::cout << posembed::build_info().instruction_set;` prints `avx2`.
POSEMBED_API BuildInfo build_info();

}  // namespace posembed
