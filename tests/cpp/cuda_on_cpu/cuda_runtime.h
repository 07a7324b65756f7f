// Enough of the CUDA runtime to run a kernel's source on the CPU: blocks one after the other, the
// threads of a block as coroutines that switch at __syncthreads. It shows what a kernel computes,
// not how the hardware runs it.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__ alignas

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned width) : x(width) {}
};
struct uint4 {
  unsigned x, y, z, w;
};

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
inline constexpr cudaError_t cudaSuccess = 0;
inline constexpr int cudaDevAttrMultiProcessorCount = 0;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

/// Multiprocessors that the pretended device has.
inline int pretended_multiprocessors = 4;

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  return *value = pretended_multiprocessors, cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  return memset(data, value, bytes), cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

inline unsigned atomicCAS_system(unsigned* address, unsigned compare, unsigned value) {
  const unsigned old = *address;
  if (old == compare) *address = value;
  return old;
}
inline unsigned atomicExch_system(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address = value;
  return old;
}
inline void __threadfence_system() {}

namespace cuda_on_cpu {

/// The threads of the running block.
class Block {
 public:
  Block(unsigned threads, const std::function<void()>& body) : body_(&body), threads_(threads) {
    for (unsigned i = 0; i < threads; ++i) start(i);
  }

  /// Runs every thread from barrier to barrier until all have returned.
  void run() {
    for (bool alive = true; alive;) {
      alive = false;
      for (unsigned i = 0; i < threads_.size(); ++i) {
        if (threads_[i].finished) continue;
        running_ = i;
        threadIdx.x = i;
        swapcontext(&scheduler_, &threads_[i].context);
        alive = alive || !threads_[i].finished;
      }
    }
  }

  void wait() { swapcontext(&threads_[running_].context, &scheduler_); }

  inline static Block* current = nullptr;

 private:
  struct Thread {
    ucontext_t context;
    bool finished = false;
  };

  void start(unsigned i) {
    constexpr size_t stack_bytes = size_t{64} << 10;
    static std::vector<std::unique_ptr<char[]>>
        stacks;  // kept: mapping them anew would take longest
    if (i == stacks.size()) stacks.emplace_back(new char[stack_bytes]);
    Thread& thread = threads_[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i].get();
    thread.context.uc_stack.ss_size = stack_bytes;
    thread.context.uc_link = &scheduler_;
    makecontext(&thread.context, &Block::enter, 0);
  }

  static void enter() {
    Block& block = *current;
    (*block.body_)();
    block.threads_[block.running_].finished = true;
  }

  const std::function<void()>* body_;
  std::vector<Thread> threads_;
  ucontext_t scheduler_;
  unsigned running_ = 0;
};

}  // namespace cuda_on_cpu

/// 48 KiB: what a launch may ask for without further ado.
inline unsigned char* dynamic_shared_memory() {
  alignas(16) static unsigned char memory[48 << 10];
  return memory;
}

inline void __syncthreads() { cuda_on_cpu::Block::current->wait(); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::function<void()> body = [&] { kernel(arguments...); };
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned block = 0; block < gridDim.x; ++block) {
    blockIdx.x = block;
    cuda_on_cpu::Block threads(blockDim.x, body);
    cuda_on_cpu::Block::current = &threads;
    threads.run();
  }
  return cudaSuccess;
}
