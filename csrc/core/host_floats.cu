#include <algorithm>

#include "core/device_vector.h"
#include "core/host_floats.h"

namespace posembed::core {
namespace {

constexpr int64_t max_floats = 512;  // per launch: kernels can take at least 4 KiB of arguments
constexpr int block_size = 128;

struct FloatBlock {
  float values[max_floats];
};

__global__ void write_floats_kernel(FloatBlock block, int64_t count, float* out) {
  for (int64_t i = threadIdx.x; i < count; i += block_size) out[i] = block.values[i];
}

}  // namespace

const char* write_floats_cuda(const float* values, int64_t count, float* out, CudaStream stream) {
  for (int64_t done = 0; done < count; done += max_floats) {
    FloatBlock block;
    const int64_t size = std::min(max_floats, count - done);
    std::copy_n(values + done, size, block.values);
    const char* error =
        checked_launch(write_floats_kernel, 1, block_size, 0, stream, block, size, out + done);
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // namespace posembed::core
