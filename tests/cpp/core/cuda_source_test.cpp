// Tests CUDA sources that all families share, run on the CPU by tests/cpp/cuda_on_cpu.
#include <cuda_runtime.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define write_floats_cuda write_floats_cuda_on_cpu
#define allocate_pinned allocate_pinned_on_cpu
#define pin pin_on_cpu
#define unpin unpin_on_cpu
#define DeviceScope DeviceScopeOnCpu
#define wait_for_device wait_for_device_on_cpu
#define missing_driver missing_driver_on_cpu
#include "core/device_vector.h"

// Two devices.
static int current_device = 0;
static cudaError_t get_device(int* device) { return *device = current_device, cudaSuccess; }
static cudaError_t set_device(int device) {
  if (device > 1) return cudaErrorInvalidDevice;
  return current_device = device, cudaSuccess;
}
#define cudaGetDevice get_device
#define cudaSetDevice set_device
#include "core/device.cu"

namespace posembed::core {
namespace {

TEST(HostFloatsGpuSource, WritesAnyNumber) {
  std::vector<float> values(1300), out(1301, 42.0f);
  std::iota(values.begin(), values.end(), 0.0f);
  ASSERT_EQ(write_floats_cuda(values.data(), 1300, out.data(), nullptr), nullptr);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), out.begin()));
  EXPECT_EQ(out.back(), 42.0f);
}

// Views may be freed in any order, and kernels that were launched before still read the memory.
TEST(PinnedMemoryGpuSource, StaysPinnedForTheLastViewAndQueuedKernels) {
  int number = 0;
  bool was_pinned = false;
  EXPECT_TRUE(pin(&number, sizeof number).owned);
  EXPECT_TRUE(pin(&number, sizeof number).owned);
  unpin(&number);
  EXPECT_EQ(pinned_memory.count(&number), 1);
  queued_work = [&] { was_pinned = pinned_memory.count(&number) == 1; };
  unpin(&number);
  EXPECT_TRUE(was_pinned);
  EXPECT_EQ(pinned_memory.count(&number), 0);
}

TEST(PinnedMemoryGpuSource, LeavesWhatOthersPinned) {
  int number = 0;
  cudaHostRegister(&number, sizeof number, 0);
  const Pinned pinned = pin(&number, sizeof number);
  EXPECT_EQ(pinned.on_device, &number);
  EXPECT_FALSE(pinned.owned);
  cudaHostUnregister(&number);
}

TEST(DeviceScopeGpuSource, RestoresTheCurrentDevice) {
  for (const int before : {0, 1}) {
    current_device = before;
    for (const int device : {0, 1}) {
      const DeviceScope scope(device);
      EXPECT_EQ(scope.error(), nullptr);
      EXPECT_EQ(current_device, device);
    }
    EXPECT_NE(DeviceScope(2).error(), nullptr);
    EXPECT_EQ(current_device, before);
  }
}

// A newer driver runs all code, and so does an older one of the same major version.
TEST(DriverGpuSource, IsNamedWhereItIsMissing) {
  for (const int version : {12080, 0}) {
    pretended_driver = version;
    EXPECT_STREQ(missing_driver(), "R580 or newer");
  }
  for (const int version : {13000, 13020, 14010}) {
    pretended_driver = version;
    EXPECT_EQ(missing_driver(), nullptr);
  }
}

void write_last_byte(size_t bytes, unsigned char* out) { *out = dynamic_shared_memory()[bytes - 1] = 7; }

// Two threads may launch one kernel: what one allows must not shrink what the other was allowed.
TEST(SharedMemoryGpuSource, LimitOfAKernelNeverFalls) {
  const size_t large = 80 << 10, small = 50 << 10;
  unsigned char written = 0;
  EXPECT_NE(checked_launch(write_last_byte, 1, 32, large, nullptr, large, &written), nullptr);
  ASSERT_TRUE(allow_shared_memory(write_last_byte, large));
  ASSERT_TRUE(allow_shared_memory(write_last_byte, small));
  EXPECT_EQ(checked_launch(write_last_byte, 1, 32, large, nullptr, large, &written), nullptr);
  EXPECT_EQ(written, 7);
  EXPECT_FALSE(allow_shared_memory(write_last_byte, 200 << 10));
  EXPECT_EQ(launch_error(), nullptr);
}

}  // namespace
}  // namespace posembed::core
