// Device code of every family: 16-byte vectors, launches of kernels, asynchronous copies.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/cuda_launch.h"
#include "core/scalar.h"

namespace posembed::core {

inline constexpr int warp_size = 32;

/// `width` neighbouring elements, loaded and stored in one instruction.
template <typename T, int width>
struct alignas(sizeof(T) * width) Vector {
  T values[width];
};

/// The number of elements in 16 bytes; 1 in float64, which serves checks of gradients and would
/// double its kernels.
template <typename T>
inline constexpr int vector_width = sizeof(T) == 8 ? 1 : 16 / static_cast<int>(sizeof(T));

/// Converts neighbouring elements to the compute type. A pair of bfloat16 takes two instructions;
/// one by one, they take three or four.
template <typename T, int width>
__device__ void load_all(const T (&values)[width], Compute<T> (&wide)[width]) {
  if constexpr (std::is_same_v<T, BFloat16> && width % 2 == 0) {
#pragma unroll
    for (int i = 0; i < width; i += 2) {
      uint32_t pair;
      memcpy(&pair, values + i, sizeof pair);
      wide[i] = float_from_bits(pair << 16);
      wide[i + 1] = float_from_bits(pair & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) wide[i] = load(values[i]);
  }
}

/// The address of an array among a kernel's arguments, for loads through the data cache. The
/// constant cache serialises lanes that read different elements.
template <typename T>
__device__ const T* through_data_cache(const T* argument) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(argument));  // the compiler no longer knows that it is an argument
#endif
  return argument;
}

/// The unit in which a thread loads and stores its `width` values in shared memory: up to 16 bytes.
/// Scalar accesses by neighbouring threads would cause bank conflicts.
template <typename C, int width>
using Part = Vector<C, std::min(width, vector_width<C>)>;

template <int width, typename C>
__device__ void load_values(const C* kept, C* values) {
  constexpr int size = sizeof(Part<C, width>) / sizeof(C);
#pragma unroll
  for (int i = 0; i < width; i += size) {
    const auto part = *reinterpret_cast<const Part<C, width>*>(kept + i);
#pragma unroll
    for (int k = 0; k < size; ++k) values[i + k] = part.values[k];
  }
}

template <int width, typename C>
__device__ void store_values(const C* values, C* kept) {
  constexpr int size = sizeof(Part<C, width>) / sizeof(C);
#pragma unroll
  for (int i = 0; i < width; i += size) {
    Part<C, width> part;
#pragma unroll
    for (int k = 0; k < size; ++k) part.values[k] = values[i + k];
    *reinterpret_cast<Part<C, width>*>(kept + i) = part;
  }
}

/// The largest number of neighbouring elements, up to 16 bytes, in which rows of `dim` elements
/// that begin `stride` elements apart can be read and written: a power of two.
template <typename T>
int64_t width_of(const void* data, int64_t dim, int64_t stride) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / sizeof(T));
  const int64_t all = vector_width<T> | address | dim | stride;
  return all & -all;
}

/// Whether they can be read and written in 16-byte vectors.
template <typename T>
bool vectorizable(const void* data, int64_t dim, int64_t stride) {
  return width_of<T>(data, dim, stride) == vector_width<T>;
}

/// Calls function(width) with the largest constant width up to `max_width`: elements of 16 bytes,
/// of 8 and 4 if they are not below `min_bytes`, or a single element.
template <typename T, int min_bytes = 4, int width = vector_width<T>, typename Function>
void visit_width(int64_t max_width, const Function& function) {
  if constexpr (width == 1 || width * static_cast<int>(sizeof(T)) < min_bytes) {
    function(std::integral_constant<int, 1>());
  } else if (max_width >= width) {
    function(std::integral_constant<int, width>());
  } else {
    visit_width<T, min_bytes, width / 2>(max_width, function);
  }
}

/// 1 / sqrt(x), to about one unit in the last place.
__device__ inline float reciprocal_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  const float guess = rsqrtf(x);
  const float refined = fmaf(guess, fmaf(-0.5f * x * guess, guess, 0.5f), guess);
  return x > 0 && x < INFINITY ? refined : guess;
#else
  return 1.0f / sqrtf(x);
#endif
}

__device__ inline double reciprocal_sqrt(double x) { return 1.0 / sqrt(x); }

/// The number of multiprocessors of the current device; 1 if unknown.
inline int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) != cudaSuccess) return count;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::max(1, count);
}

inline int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

/// `blocks` as the width of a grid. A count that does not fit becomes UINT32_MAX, so that the
/// launch fails.
inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, UINT32_MAX));
}

/// Tells, by its attributes, for which architecture the kernels of a file were compiled.
template <typename = void>
__global__ void architecture_probe() {}

/// Whether the kernels of a file wait for the previous one on the current device: code compiled for
/// compute capability 9.0 or later does, older code that a newer device translates does not.
/// A template, as launch_early(), so that only files that use it have the probe.
template <typename = void>
bool waits_for_previous_kernel(int device) {
  static std::atomic<int8_t> known[256];  // 0: not known, 1: no, 2: yes
  if (device < 0 || device >= 256) return false;
  if (const int8_t answer = known[device].load(std::memory_order_relaxed)) return answer == 2;
  cudaFuncAttributes attributes{};
  const bool found = cudaFuncGetAttributes(&attributes, architecture_probe<>) == cudaSuccess;
  if (!found) cudaGetLastError();  // clears the error, or the next launch would report it
  const bool waits = found && attributes.ptxVersion >= 90;
  known[device].store(waits ? 2 : 1, std::memory_order_relaxed);
  return waits;
}

/// Lets a short kernel start while the previous kernel ends (programmatic dependent launch). The
/// kernel must call wait_for_previous_kernel() before it touches memory.
template <typename Config>
void launch_early(Config* config) {
  static cudaLaunchAttribute attribute = [] {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    return early;
  }();
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || !waits_for_previous_kernel<>(device)) return;
  config->attrs = &attribute;
  config->numAttrs = 1;
}

/// Waits until the previous kernel has ended and its writes are visible; then lets the next kernel
/// start, which may touch memory that the previous one wrote before it waits itself. See
/// launch_early().
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Runs `kernel` in `blocks` blocks of `threads` threads with `shared_bytes` of
/// dynamic_shared_memory().
template <typename... Parameters, typename... Arguments>
void launch_with(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, size_t shared_bytes,
                 cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// The same without shared memory. A launch of more blocks than a grid can have fails.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  launch_with(kernel, grid_of(blocks), static_cast<unsigned>(threads), 0, stream, arguments...);
}

/// Allows a kernel this much dynamic_shared_memory(); false if a block of the current device has
/// less. The limit of a kernel never falls: threads may launch it with different amounts at once.
template <typename... Parameters>
bool allow_shared_memory(void (*kernel)(Parameters...), size_t bytes) {
  constexpr size_t always = 40 * 1024;  // with what kernels declare, less than every GPU's 48 KiB
  if (bytes <= always) return true;
  cudaFuncAttributes attributes{};
  int device = 0, max_bytes = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&max_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
          cudaSuccess &&
      cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) {
    if (static_cast<size_t>(attributes.maxDynamicSharedSizeBytes) >= bytes) return true;
    max_bytes -= static_cast<int>(attributes.sharedSizeBytes);
    if (static_cast<size_t>(max_bytes) >= bytes &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes) ==
            cudaSuccess) {
      return true;
    }
  }
  cudaGetLastError();  // clears the error, or the next launch would report it
  return false;
}

/// The text of an error; nullptr for success.
inline const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// The text of the last launch's error; nullptr for success.
inline const char* launch_error() { return text_of(cudaGetLastError()); }

/// Runs `kernel`, if there are blocks, with `shared_bytes` of dynamic_shared_memory(). Returns
/// nullptr, or the text of the launch's error.
template <typename... Parameters, typename... Arguments>
const char* checked_launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                           size_t shared_bytes, CudaStream stream, const Arguments&... arguments) {
  if (blocks == 0) return nullptr;
  launch_with(kernel, blocks, threads, shared_bytes, stream, arguments...);
  return launch_error();
}

#if defined(__NVCC__)
/// The shared memory whose size is given at launch. Tests that run kernels on the CPU replace it.
__device__ inline unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}
#else
using ::dynamic_shared_memory;
#endif

// ------------------------------------------------------------------------------------------ stores
// Stores of vectors as one instruction. The compiler sometimes splits such a store into four or
// eight, which wastes memory bandwidth.

#if defined(__NVCC__)
__device__ inline void write_word(const uint4& word, uint4* out) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(out)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ inline void write_word(const uint2& word, uint2* out) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(out)), "r"(word.x),
               "r"(word.y)
               : "memory");
}

__device__ inline void write_word(uint32_t word, uint32_t* out) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(out)), "r"(word)
               : "memory");
}
#else
template <typename Word>
void write_word(const Word& word, Word* out) {
  *out = word;
}
#endif

/// Writes to global memory.
template <typename T, int width>
__device__ void write_vector(const Vector<T, width>& vector, T* out) {
  if constexpr (width == 1) {
    *out = vector.values[0];
  } else {
    using Part = std::conditional_t<sizeof(vector) % sizeof(uint2) == 0, uint2, uint32_t>;
    using Word = std::conditional_t<sizeof(vector) % sizeof(uint4) == 0, uint4, Part>;
    constexpr int count = static_cast<int>(sizeof(vector) / sizeof(Word));
    Word words[count];
    memcpy(words, vector.values, sizeof(vector));
#pragma unroll
    for (int i = 0; i < count; ++i) write_word(words[i], reinterpret_cast<Word*>(out) + i);
  }
}

// ----------------------------------------------------------------------------- asynchronous copies
// From global to shared memory (cp.async). Data in flight takes no registers. GPUs before compute
// capability 8.0 copy synchronously.

/// Starts to copy an element or a vector. The thread must call wait_for_copies() before it reads
/// the copy.
template <typename V>
__device__ void copy_async(const V* from, V* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int size = sizeof(V);
  if constexpr (size == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else if constexpr (size == 8 || size == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "n"(size)
                 : "memory");
  } else {
    *to = *from;
  }
#else
  *to = *from;
#endif
}

/// Waits for the copies of the calling thread.
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------------- words

/// A vector of `width` elements, initially zeros. It is declared as 32-bit registers, because a
/// conditional load of 16-bit elements would be assembled from single elements.
template <typename T, int width>
struct DeviceWords {
  static constexpr bool whole = sizeof(T) * width % sizeof(uint32_t) == 0;
  using Word = std::conditional_t<whole, uint32_t, T>;
  Vector<Word, sizeof(T) * width / sizeof(Word)> words = {};

  __device__ void read(const T* from) { words = *reinterpret_cast<const decltype(words)*>(from); }
  __device__ void load(Compute<T> (&wide)[width]) const {
    T values[width];
    memcpy(values, &words, sizeof words);
    load_all(values, wide);
  }
};

// ----------------------------------------------------------------------------------- rows of warps
// Divides rows into items for warps: an item is a row or a piece of a long row.

inline constexpr int threads = 256;
inline constexpr int warps = threads / warp_size;

struct Item {
  int64_t row;
  int64_t column;  // first column of this lane
};

/// The calling lane's item. Rows have `pieces` pieces of `vectors` vectors per lane.
template <int width>
__device__ Item item_of_lane(int64_t pieces, int vectors) {
  const int64_t item = int64_t{blockIdx.x} * (blockDim.x / warp_size) + threadIdx.x / warp_size;
  const int64_t row = pieces == 1 ? item : item / pieces;  // short rows avoid a 64-bit division
  const int64_t piece = item - row * pieces;
  return {row, (piece * vectors * warp_size + threadIdx.x % warp_size) * width};
}

/// The number of blocks of `threads` threads for `items` items.
inline int64_t blocks_for(int64_t items) { return divide_up(items, warps); }

}  // namespace posembed::core
