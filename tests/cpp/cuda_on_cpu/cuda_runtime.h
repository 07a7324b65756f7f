// Enough of the CUDA runtime to run a kernel's source on the CPU: blocks one after another, a
// block's threads as coroutines that switch at barriers. Tests a kernel's results and that all
// threads reach its barriers, not its behaviour on hardware.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(POSEMBED_RACES_BETWEEN_BLOCKS)
#include "shared_variables.h"
#endif
#include "coroutine.h"
#include "launches.h"
#include "race_detector.h"
#include "shared_memory.h"

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
  unsigned x, y, z;
  // Implicit, like CUDA's own.
  constexpr dim3(unsigned width = 1, unsigned height = 1, unsigned depth = 1)  // NOLINT
      : x(width), y(height), z(depth) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
inline constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidConfiguration = 9;
inline constexpr cudaError_t cudaErrorHostMemoryAlreadyRegistered = 712;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrReservedSharedMemoryPerBlock
};

inline constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0;
struct cudaLaunchAttribute {
  int id = 0;
  struct {
    int programmaticStreamSerializationAllowed = 0;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

/// The number of multiprocessors of the emulated device.
inline int pretended_multiprocessors = 4;

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  constexpr int reserved = 1 << 10, max_bytes = cuda_on_cpu::max_shared_memory;
  const int values[] = {pretended_multiprocessors, 8, max_bytes + reserved, max_bytes, reserved};
  return *value = values[attribute], cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  return memset(data, value, bytes), cudaSuccess;
}

inline constexpr unsigned cudaHostAllocPortable = 0, cudaHostAllocMapped = 0;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return *memory = ::operator new(bytes), cudaSuccess;
}
/// Memory that is pinned, by its address.
inline std::set<void*> pinned_memory;
inline constexpr unsigned cudaHostRegisterPortable = 0, cudaHostRegisterMapped = 0;
inline cudaError_t cudaHostRegister(void* memory, size_t, unsigned) {
  const bool is_new = pinned_memory.insert(memory).second;
  return is_new ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
/// What kernels do until the next wait.
inline std::function<void()> queued_work;
inline cudaError_t cudaDeviceSynchronize() {
  if (queued_work) std::exchange(queued_work, nullptr)();
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* memory) {
  return pinned_memory.erase(memory) > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}
inline cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned) {
  return *on_device = memory, cudaSuccess;
}

inline cudaError_t last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int maxDynamicSharedSizeBytes;
  int ptxVersion;
};
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  *attributes = {0, cuda_on_cpu::dynamic_limit(reinterpret_cast<void*>(kernel)), 80};
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
  if (bytes > cuda_on_cpu::max_shared_memory) return cudaErrorInvalidConfiguration;
  cuda_on_cpu::dynamic_limit(reinterpret_cast<void*>(kernel), bytes);
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }

inline unsigned atomicCAS_system(unsigned* address, unsigned compare, unsigned value) {
  __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return compare;
}
inline unsigned atomicExch_system(unsigned* address, unsigned value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELEASE);
}
inline void __threadfence_system() {}
inline void __threadfence() {}
/// Orders memory too, as tickets do with the fences around them.
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

namespace cuda_on_cpu {

/// The state of a thread.
enum class State { runs, waits_for_warp, waits_for_block, has_returned };

/// The threads of the running block, block `number` of the launch.
class Block {
 public:
  Block(unsigned threads, size_t number, const std::function<void()>& body)
      : body_(&body), number_(number), threads_(threads) {}

  /// Runs every thread from barrier to barrier until all have returned.
  void run() {
    do {
      for (unsigned i = 0; i < threads_.size(); ++i) {
        if (threads_[i].state != State::runs) continue;
        running_ = i;
        threadIdx.x = i;
        switch_to(runner(i, number_));
        coroutines_[i].resume(&Block::run_thread);
      }
    } while (release());
  }

  /// A barrier of the block or of the warp, or, if memory is not ordered, a shuffle's.
  void wait(State state, bool orders_memory = true) {
    const unsigned whose = state == State::waits_for_block ? warp_size : running_ / warp_size;
    const unsigned barrier = set_state(state, orders_memory);
    if (orders_memory) arrive(barrier, whose);
    let_others_run();
    if (orders_memory) leave(barrier, whose);
  }

  /// The value that thread `thread` of the warp passes. Called by whole warps.
  template <typename T>
  T exchange(T value, unsigned thread) {
    static_assert(sizeof(T) <= sizeof(Thread::exchanged));
    give(&value, sizeof(T));
    wait(State::waits_for_warp, false);
    take(thread, &value, sizeof(T));
    wait(State::waits_for_warp, false);
    return value;
  }

  /// A set bit for each thread of the warp whose `value` is true. Called by whole warps.
  unsigned ballot(bool value) {
    give(&value, sizeof value);
    wait(State::waits_for_warp, false);
    unsigned bits = 0;
    const unsigned first = running_ / warp_size * warp_size;
    for (unsigned lane = 0; lane < warp_size; ++lane) {
      take(first + lane, &value, sizeof value);
      bits |= unsigned{value} << lane;
    }
    wait(State::waits_for_warp, false);
    return bits;
  }

  inline static Block* current = nullptr;

 private:
  static constexpr unsigned warp_size = 32;

  struct Thread {
    State state = State::runs;
    unsigned barriers = 0, warp_barriers = 0;
    char exchanged[8];  // passed to the warp
  };

  /// Runs a thread of one block after another.
  POSEMBED_UNOBSERVED static void run_thread() {
    for (;;) {
      (*current->body_)();
      current->set_state(State::has_returned);
      current->let_others_run();
    }
  }

  POSEMBED_UNOBSERVED void let_others_run() {
    Coroutine& self = coroutines_[running_];
    switch_to(host_);
    self.pause();
  }

  /// Sets the state of the running thread. Returns how many barriers it reached before.
  unsigned set_state(State state, bool orders_memory = false) {
    const Unobserved scheduling;
    Thread& thread = threads_[running_];
    thread.state = state;
    if (!orders_memory) return 0;
    return state == State::waits_for_block ? thread.barriers++ : thread.warp_barriers++;
  }

  void give(const void* value, size_t bytes) {
    const Unobserved scheduling;
    memcpy(threads_[running_].exchanged, value, bytes);
  }

  void take(unsigned thread, void* value, size_t bytes) {
    const Unobserved scheduling;
    if (threads_.at(thread).state == State::has_returned) {
      std::fputs("A thread of the warp has returned.\n", stderr);
      std::abort();
    }
    memcpy(value, threads_[thread].exchanged, bytes);
  }

  /// Releases threads whose barrier all others have reached; returns false if all threads have
  /// returned.
  bool release() {
    const bool any = release(0, threads_.size(), State::waits_for_block);
    bool more = any;
    for (size_t first = 0; first < threads_.size() && !any; first += warp_size) {
      more |= release(first, std::min(first + warp_size, threads_.size()), State::waits_for_warp);
    }
    if (!more && !all(0, threads_.size(), State::has_returned)) {
      std::fputs("Threads wait for others that never come.\n", stderr);
      std::abort();
    }
    return more;
  }

  bool release(size_t begin, size_t end, State waiting) {
    if (!all(begin, end, waiting) || all(begin, end, State::has_returned)) return false;
    for (size_t i = begin; i < end; ++i) {
      if (threads_[i].state == waiting) threads_[i].state = State::runs;
    }
    return true;
  }

  /// Whether threads [begin, end), except those that have returned, are in that state.
  bool all(size_t begin, size_t end, State state) const {
    return std::all_of(threads_.begin() + begin, threads_.begin() + end, [&](const Thread& thread) {
      return thread.state == state || thread.state == State::has_returned;
    });
  }

  const std::function<void()>* body_;
  size_t number_;
  void* host_ = current_runner();
  Coroutine* coroutines_ = coroutines[number_ % concurrent_blocks];
  std::vector<Thread> threads_;
  unsigned running_ = 0;
};

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::Block::current->wait(cuda_on_cpu::State::waits_for_block); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return cuda_on_cpu::Block::current->exchange(value, threadIdx.x ^ static_cast<unsigned>(lanes));
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_on_cpu::Block::current->exchange(value, threadIdx.x / 32 * 32 + static_cast<unsigned>(lane));
}

inline unsigned __ballot_sync(unsigned, bool value) { return cuda_on_cpu::Block::current->ballot(value); }
/// The lanes with the same value.
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    lanes |= unsigned{__shfl_sync(~0u, value, lane) == value} << lane;
  }
  return lanes;
}

inline void __syncwarp() { cuda_on_cpu::Block::current->wait(cuda_on_cpu::State::waits_for_warp); }

inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

namespace cuda_on_cpu {

/// An order of blocks that differs from launch to launch, so that a kernel that depends on it
/// fails: steps of a length that is coprime to the number of blocks.
struct BlockOrder {
  uint64_t count, first, step;

  BlockOrder(uint64_t blocks, uint64_t launch)
      : count(blocks), first(launch * 7919 % blocks), step(launch * 104729 % blocks) {
    while (std::gcd(step, count) != 1) ++step;
  }

  uint64_t at(uint64_t i) const { return (first + i * step) % count; }
};

}  // namespace cuda_on_cpu

/// Rejects the launches that a device would reject.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // A lock, because several threads may launch at the same time and all launches use the same
  // memory.
  static std::mutex device;
  const std::lock_guard<std::mutex> alone(device);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  const bool fits = gridDim.x > 0 && gridDim.x <= INT_MAX && gridDim.y > 0 && gridDim.y <= 65535 && gridDim.z > 0 &&
                    gridDim.z <= 65535 && blockDim.x > 0 && blockDim.x <= 1024 &&
                    config->dynamicSmemBytes <= size_t(cuda_on_cpu::dynamic_limit(reinterpret_cast<void*>(kernel)));
  if (!fits) return last_error = cudaErrorInvalidConfiguration;
  const std::function<void()> body = [&] { kernel(arguments...); };
  size_t number = 0;
  const auto run_block = [&] {
    cuda_on_cpu::give_shared_memory(config->dynamicSmemBytes);
    cuda_on_cpu::Block threads(blockDim.x, number, body);
    cuda_on_cpu::Block::current = &threads;
    cuda_on_cpu::begin_block(blockDim.x, number);
    threads.run();
    cuda_on_cpu::end_block(blockDim.x, number++);
  };
  const cuda_on_cpu::Unobserved scheduling;
  ++cuda_on_cpu::launches;
  cuda_on_cpu::kernels.insert(reinterpret_cast<const void*>(kernel));
  const cuda_on_cpu::BlockOrder order(uint64_t{gridDim.x} * gridDim.y * gridDim.z,
                                      static_cast<uint64_t>(cuda_on_cpu::launches));
  for (uint64_t i = 0; i < order.count; ++i) {
    const uint64_t block = order.at(i), row = block / gridDim.x;
    blockIdx.x = static_cast<unsigned>(block % gridDim.x);
    blockIdx.y = static_cast<unsigned>(row % gridDim.y);
    blockIdx.z = static_cast<unsigned>(row / gridDim.y);
    run_block();
  }
  cuda_on_cpu::end_launch();
  return cudaSuccess;
}
