#include "posembed/build_info.h"

#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <string>

#include "core/cuda_launch.h"

namespace posembed {
namespace {

TEST(BuildInfo, NamesTheTorchItWasBuiltFor) { EXPECT_EQ(build_info().torch_version, TORCH_VERSION); }

TEST(BuildInfo, HasOneVersion) {
  const std::string parts = std::to_string(POSEMBED_VERSION_MAJOR) + "." + std::to_string(POSEMBED_VERSION_MINOR) +
                            "." + std::to_string(POSEMBED_VERSION_PATCH);
  EXPECT_EQ(build_info().version, parts);
  EXPECT_EQ(build_info().version, POSEMBED_VERSION);
}

TEST(BuildInfo, UsesAnInstructionSetThatWasBuilt) {
  const BuildInfo info = build_info();
  EXPECT_EQ(std::count(info.instruction_sets.begin(), info.instruction_sets.end(), info.instruction_set), 1);
}

TEST(BuildInfo, NamesArchitecturesOnlyWithCuda) {
  EXPECT_EQ(build_info().cuda_version.empty(), !core::built_with_cuda);
  EXPECT_EQ(build_info().cuda_architectures.empty(), !core::built_with_cuda);
}

}  // namespace
}  // namespace posembed
