// ALiBi on CUDA: a block takes one row of scores, a thread 16 bytes of it at a time; the bias is
// made in registers from the distance. Every kernel is bound by memory.
#include <algorithm>

#include "alibi/bias.h"
#include "alibi/kernel.h"

namespace posembed::alibi {
namespace {

using core::Compute;

constexpr int block_size = 256;
constexpr int64_t most_blocks = int64_t{1} << 20;

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(std::min(rows, most_blocks)); }

/// `width` neighbours that move as one memory access.
template <typename T, int width>
struct alignas(sizeof(T) * width) Pack {
  T items[width];
};

template <typename T, int width>
__global__ void fill_kernel(FillArguments arguments) {
  using C = Compute<T>;
  const Distances distances = arguments.distances;
  const int64_t rows = arguments.slopes.heads * distances.queries;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t head = row / distances.queries;
    const int64_t query = distances.offset + row - head * distances.queries;
    const Line<C> line = line_of<C>(arguments.slopes, distances, head);
    T* out = static_cast<T*>(arguments.out) + row * distances.keys;
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      const auto distance = static_cast<int32_t>(key - query);
      Pack<T, width> pack;
#pragma unroll
      for (int i = 0; i < width; ++i) core::store(bias(line, distance + i), pack.items + i);
      *reinterpret_cast<Pack<T, width>*>(out + key) = pack;
    }
  }
}

template <typename T, int width>
__global__ void add_kernel(AddArguments arguments) {
  using C = Compute<T>;
  const Distances distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t plane = row / distances.queries, first = row - plane * distances.queries;
    const int64_t batch = plane / heads, head = plane - batch * heads;
    const auto place = [&](const int64_t* stride) {
      return batch * stride[0] + head * stride[1] + first * stride[2];
    };
    const Line<C> line = line_of<C>(arguments.slopes, distances, head);
    const T* in = static_cast<const T*>(arguments.in) + place(arguments.in_stride);
    T* out = static_cast<T*>(arguments.out) + place(arguments.out_stride);
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      const auto distance = static_cast<int32_t>(key - distances.offset - first);
      auto pack = *reinterpret_cast<const Pack<T, width>*>(in + key);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        core::store(core::load(pack.items[i]) + bias(line, distance + i), pack.items + i);
      }
      *reinterpret_cast<Pack<T, width>*>(out + key) = pack;
    }
  }
}

/// Sum over the block in a fixed order; every thread must call it, thread 0 has the result.
__device__ double block_sum(double value) {
  __shared__ double parts[block_size];
  __syncthreads();
  parts[threadIdx.x] = value;
  for (int half = block_size / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  return parts[0];
}

template <typename T>
__global__ void reduce_rows_kernel(ReduceArguments arguments) {
  const Distances distances = arguments.distances;
  const int64_t rows = arguments.heads * distances.queries;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t head = row / distances.queries, first = row - head * distances.queries;
    Line<double> part{0, 0};
    for (int64_t batch = 0; batch < arguments.batch; ++batch) {
      const T* grad = static_cast<const T*>(arguments.grad) + batch * arguments.stride[0] +
                      head * arguments.stride[1] + first * arguments.stride[2];
      for (int64_t key = threadIdx.x; key < distances.keys; key += block_size) {
        const int64_t distance = key - distances.offset - first;
        if (distance > 0 && distances.causal) break;
        const double product = static_cast<double>(core::load(grad[key])) * distance;
        (distance > 0 ? part.after : part.before) += distance > 0 ? -product : product;
      }
    }
    const double before = block_sum(part.before), after = block_sum(part.after);
    if (threadIdx.x == 0) {
      arguments.partial[row] = arguments.sides == 1 ? before + after : before;
      if (arguments.sides == 2) arguments.partial[rows + row] = after;
    }
  }
}

__global__ void reduce_heads_kernel(ReduceArguments arguments) {
  const int64_t queries = arguments.distances.queries;
  const int64_t head = blockIdx.x;
  const auto sum_of = [&](int64_t side) {
    const double* partial = arguments.partial + (side * arguments.heads + head) * queries;
    double part = 0;
    for (int64_t i = threadIdx.x; i < queries; i += block_size) part += partial[i];
    return block_sum(part);
  };
  const Line<double> sum{sum_of(0), arguments.sides == 2 ? sum_of(1) : 0.0};
  if (threadIdx.x == 0) store_slope_gradient(sum, arguments, head);
}

constexpr int64_t most_slopes = 512;

struct SlopeBlock {
  float values[most_slopes];
};

__global__ void write_slopes_kernel(SlopeBlock block, int64_t count, float* out) {
  for (int64_t i = threadIdx.x; i < count; i += block_size) out[i] = block.values[i];
}

/// Whether rows can be read and written 16 bytes at a time.
template <typename T>
bool in_packs(const void* data, int64_t keys, const int64_t* stride) {
  constexpr int64_t width = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && keys % width == 0 &&
         std::all_of(stride, stride + 3, [](int64_t s) { return s % width == 0; });
}

template <typename T>
const char* launch_fill(const FillArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const unsigned blocks = blocks_for(arguments.slopes.heads * distances.queries);
  const int64_t stride[3] = {0, 0, distances.keys};
  if (in_packs<T>(arguments.out, distances.keys, stride)) {
    fill_kernel<T, 16 / sizeof(T)><<<blocks, block_size, 0, stream>>>(arguments);
  } else {
    fill_kernel<T, 1><<<blocks, block_size, 0, stream>>>(arguments);
  }
  return launch_error();
}

template <typename T>
const char* launch_add(const AddArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * distances.queries);
  if (in_packs<T>(arguments.in, distances.keys, arguments.in_stride) &&
      in_packs<T>(arguments.out, distances.keys, arguments.out_stride)) {
    add_kernel<T, 16 / sizeof(T)><<<blocks, block_size, 0, stream>>>(arguments);
  } else {
    add_kernel<T, 1><<<blocks, block_size, 0, stream>>>(arguments);
  }
  return launch_error();
}

template <typename T>
const char* launch_reduce(const ReduceArguments& arguments, core::CudaStream stream) {
  const int64_t rows = arguments.heads * arguments.distances.queries;
  if (rows > 0) {
    reduce_rows_kernel<T><<<blocks_for(rows), block_size, 0, stream>>>(arguments);
  }
  reduce_heads_kernel<<<static_cast<unsigned>(arguments.heads), block_size, 0, stream>>>(arguments);
  return launch_error();
}

}  // namespace

const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_fill<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* add_cuda(const AddArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_add<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* reduce_cuda(const ReduceArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_reduce<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* write_slopes_cuda(const float* slopes, int64_t count, float* out,
                              core::CudaStream stream) {
  for (int64_t done = 0; done < count; done += most_slopes) {
    SlopeBlock block;
    const int64_t size = std::min(most_slopes, count - done);
    std::copy_n(slopes + done, size, block.values);
    write_slopes_kernel<<<1, block_size, 0, stream>>>(block, size, out + done);
  }
  return launch_error();
}

}  // namespace posembed::alibi
