// Tests CUDA sources that all families share, run on the CPU by tests/cpp/cuda_on_cpu.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define write_floats_cuda write_floats_cuda_on_cpu
#include "core/host_floats.cu"

namespace posembed::core {
namespace {

TEST(HostFloatsGpuSource, WritesAnyNumber) {
  std::vector<float> values(1300), out(1301, 42.0f);
  std::iota(values.begin(), values.end(), 0.0f);
  ASSERT_EQ(write_floats_cuda(values.data(), 1300, out.data(), nullptr), nullptr);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), out.begin()));
  EXPECT_EQ(out.back(), 42.0f);
}

}  // namespace
}  // namespace posembed::core
