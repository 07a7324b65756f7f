// ALiBi on CUDA: a block takes one row of scores, a thread 16 bytes of it at a time; the bias is
// computed in registers from the distance. Every kernel is bound by memory.
#include <algorithm>

#include "alibi/bias.h"
#include "alibi/kernel.h"
#include "core/device_store.h"
#include "core/device_vector.h"
#include "core/exp.h"

namespace posembed::alibi {
namespace {

using core::Compute;
using core::Vector;

constexpr int block_size = 256;
constexpr int64_t most_blocks = int64_t{1} << 20;

unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(std::min(rows, most_blocks)); }

// ---------------------------------------------------------------------------------------- one row

/// The query of a row, which gives biases of keys. Plain: distances depend only on key - query.
template <bool plain>
class Query {
 public:
  __device__ Query(const Distances& distances, const Row& row)
      : distances_(distances),
        batch_(row.batch),
        position_(plain ? distances.offset + row.query
                        : query_position(distances, row.batch, row.query)),
        document_(plain ? Keys{0, distances.keys} : document_of(distances, row.query)) {}

  __device__ int32_t distance_to(int64_t key) const {
    if constexpr (plain) return seen(distances_, static_cast<int32_t>(key - position_));
    if (key < document_.begin || key >= document_.end) return hidden;
    if (is_masked(distances_, batch_, key)) return hidden;
    const int64_t distance = key_position(distances_, batch_, key) - position_;
    if (distance > INT32_MAX || distance < -INT32_MAX) {
      core::record_error(distances_.error, core::ErrorKind::distance, distance, key, 0);
      return hidden;
    }
    return seen(distances_, static_cast<int32_t>(distance));
  }

  /// Keys from here on are hidden and have weight 0.
  __device__ int64_t visible_end() const {
    if (!plain || !distances_.causal || !distances_.hide) return distances_.keys;
    const int64_t end = position_ + 1;
    return end < 0 ? 0 : (end < distances_.keys ? end : distances_.keys);
  }

 private:
  const Distances& distances_;
  int64_t batch_;
  int64_t position_;
  Keys document_;
};

struct Add {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};

struct Larger {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

/// Combines the threads' values in a fixed order. Every thread must call it; all get the result.
template <typename Join, typename V>
__device__ V over_block(V value, Join join) {
  __shared__ V values[block_size];
  __syncthreads();
  values[threadIdx.x] = value;
  for (unsigned half = block_size / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      values[threadIdx.x] = join(values[threadIdx.x], values[threadIdx.x + half]);
    }
  }
  __syncthreads();
  return values[0];
}

// ------------------------------------------------------------------------------------ fill and add

template <typename T, int width, bool plain>
__global__ void fill_kernel(FillArguments arguments) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = row_at(number, heads, distances.queries);
    const Query<plain> query(distances, row);
    const Line<C> line = line_of<C>(arguments.slopes, distances, row.head);
    T* out = elements<T>(arguments.out, row);
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      Vector<T, width> pack;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        core::store(bias(line, query.distance_to(key + i)), pack.values + i);
      }
      core::write_vector<T, width>(pack, out + key);
    }
  }
}

template <typename T, int width, bool plain>
__global__ void add_kernel(ScoreArguments arguments) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = row_at(number, heads, distances.queries);
    const Query<plain> query(distances, row);
    const Line<C> line = line_of<C>(arguments.slopes, distances, row.head);
    const T* in = elements<const T>(arguments.in, row);
    T* out = elements<T>(arguments.out, row);
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      auto pack = *reinterpret_cast<const Vector<T, width>*>(in + key);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const C score = core::load(pack.values[i]);
        core::store(biased(line, query.distance_to(key + i), score, scale), pack.values + i);
      }
      core::write_vector<T, width>(pack, out + key);
    }
  }
}

// ----------------------------------------------------------------------------------------- softmax

__device__ float exponential(float x) { return core::exp_of_negative(x); }
__device__ double exponential(double x) { return exp(x); }

/// Bytes of a row that stay in shared memory between passes; the rest is read again.
constexpr int64_t kept_bytes = 40 * 1024;

template <typename T, int width, bool plain>
__global__ void softmax_kernel(ScoreArguments arguments, int64_t kept_keys) {
  using C = Compute<T>;
  C* const kept = reinterpret_cast<C*>(core::dynamic_shared_memory());
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = row_at(number, heads, distances.queries);
    const Query<plain> query(distances, row);
    const Line<C> line = line_of<C>(arguments.slopes, distances, row.head);
    const T* in = elements<const T>(arguments.in, row);
    T* out = elements<T>(arguments.out, row);
    const int64_t end = query.visible_end();
    // A thread visits the same keys in every pass, so passes need no barrier between them.
    const auto each_pack = [&](auto visit) {
      for (int64_t key = int64_t{threadIdx.x} * width; key < end; key += block_size * width) {
        visit(key);
      }
    };
    const auto read = [&](int64_t key, C* scores) {
      const auto pack = *reinterpret_cast<const Vector<T, width>*>(in + key);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        scores[i] = biased(line, query.distance_to(key + i), C(core::load(pack.values[i])), scale);
      }
    };
    C most = -static_cast<C>(INFINITY);
    each_pack([&](int64_t key) {
      C scores[width];
      read(key, scores);
      if (key < kept_keys) core::store_values<width>(scores, kept + key);
#pragma unroll
      for (int i = 0; i < width; ++i) most = scores[i] > most ? scores[i] : most;
    });
    most = over_block(most, Larger());
    if (most == -static_cast<C>(INFINITY)) most = 0;
    const auto exponentials = [&](int64_t key, C* values) {
      if (key < kept_keys) {
        core::load_values<width>(kept + key, values);
      } else {
        read(key, values);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = exponential(values[i] - most);
    };
    C part = 0;
    each_pack([&](int64_t key) {
      C values[width];
      exponentials(key, values);
#pragma unroll
      for (int i = 0; i < width; ++i) part += values[i];
    });
    const C sum = over_block(part, Add());
    const C factor = sum == 0 ? C(0) : 1 / sum;  // all keys hidden: zeros
    each_pack([&](int64_t key) {
      C values[width];
      exponentials(key, values);
      Vector<T, width> pack;
#pragma unroll
      for (int i = 0; i < width; ++i) core::store(values[i] * factor, pack.values + i);
      core::write_vector<T, width>(pack, out + key);
    });
    const int64_t written = (end + width - 1) / width * width;
    for (int64_t key = written + threadIdx.x; key < distances.keys; key += block_size) {
      core::store(C(0), out + key);
    }
  }
}

// -------------------------------------------------------------------------------------- gradients

/// Sums of a thread: distance * grad for keys up to the query, -distance * grad for those after it.
struct SlopeSums {
  double before = 0;
  double after = 0;

  __device__ void add(int32_t distance, double grad) {
    if (distance == hidden) return;
    (distance > 0 ? after : before) += distance > 0 ? -grad * distance : grad * distance;
  }
};

/// Stores the sums of row `number` out of `rows`; every thread must call it.
__device__ void store_sums(const SlopeSums& sums, const SlopeGradient& gradient, int64_t number,
                           int64_t rows) {
  const double before = over_block(sums.before, Add()), after = over_block(sums.after, Add());
  if (threadIdx.x != 0) return;
  gradient.partial[number] = gradient.sides == 1 ? before + after : before;
  if (gradient.sides == 2) gradient.partial[rows + number] = after;
}

template <typename T, bool plain>
__global__ void softmax_backward_kernel(SoftmaxBackwardArguments arguments) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = row_at(number, gradient.heads, distances.queries);
    const Query<plain> query(distances, row);
    const T* grad = elements<const T>(arguments.grad, row);
    const T* weights = elements<const T>(arguments.weights, row);
    T* out = elements<T>(arguments.out, row);
    const int64_t end = query.visible_end();
    double dot = 0;
    for (int64_t key = threadIdx.x; key < end; key += block_size) {
      dot += static_cast<double>(core::load(grad[key])) * core::load(weights[key]);
    }
    const C mean = static_cast<C>(over_block(dot, Add()));
    SlopeSums sums;
    for (int64_t key = threadIdx.x; key < distances.keys; key += block_size) {
      const C change = key < end ? core::load(weights[key]) * (core::load(grad[key]) - mean) : C(0);
      core::store(change * scale, out + key);
      if (gradient.sides > 0 && key < end) sums.add(query.distance_to(key), change);
    }
    if (gradient.sides > 0) store_sums(sums, gradient, number, rows);
  }
}

template <typename T, bool plain>
__global__ void reduce_rows_kernel(ReduceArguments arguments) {
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = row_at(number, gradient.heads, distances.queries);
    const Query<plain> query(distances, row);
    const T* grad = elements<const T>(arguments.grad, row);
    SlopeSums sums;
    for (int64_t key = threadIdx.x; key < query.visible_end(); key += block_size) {
      sums.add(query.distance_to(key), core::load(grad[key]));
    }
    store_sums(sums, gradient, number, rows);
  }
}

__global__ void reduce_heads_kernel(SlopeGradient gradient, int64_t batch, int64_t queries) {
  const int64_t head = blockIdx.x;
  const auto sum_of = [&](int64_t side) {
    double part = 0;
    for (int64_t i = threadIdx.x; i < batch * queries; i += block_size) {
      const int64_t plane = (side * batch + i / queries) * gradient.heads + head;
      part += gradient.partial[plane * queries + i % queries];
    }
    return over_block(part, Add());
  };
  const double before = sum_of(0), after = gradient.sides == 2 ? sum_of(1) : 0.0;
  if (threadIdx.x == 0) store_slope_gradient(before, after, gradient, head);
}

const char* launch_reduce_heads(const SlopeGradient& gradient, int64_t batch, int64_t queries,
                                core::CudaStream stream) {
  const auto heads = static_cast<unsigned>(gradient.heads);
  return core::checked_launch(reduce_heads_kernel, heads, block_size, 0, stream, gradient, batch,
                              queries);
}

// --------------------------------------------------------------------------------------- launches

/// Whether all rows can be read and written 16 bytes at a time.
template <typename T>
bool in_vectors(const Matrices& matrices, int64_t keys) {
  return std::all_of(matrices.stride, matrices.stride + 3, [&](int64_t stride) {
    return core::vectorizable<T>(matrices.data, keys, stride);
  });
}

/// Returns launch(width, plain), both passed as types so that kernels can use them as constants.
template <typename T, typename Launch>
const char* with_form(bool vectors, const Distances& distances, Launch launch) {
  using Whole = std::integral_constant<int, core::vector_width<T>>;
  using Single = std::integral_constant<int, 1>;
  if (!distances.plain()) return launch(Single(), std::false_type());
  return vectors ? launch(Whole(), std::true_type()) : launch(Single(), std::true_type());
}

template <typename T>
const char* launch_fill(const FillArguments& arguments, core::CudaStream stream) {
  const Distances& distances = arguments.distances;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * distances.queries);
  const bool vectors = in_vectors<T>(arguments.out, distances.keys);
  return with_form<T>(vectors, distances, [&](auto width, auto plain) {
    return core::checked_launch(fill_kernel<T, width(), plain()>, blocks, block_size, 0, stream,
                                arguments);
  });
}

template <typename T>
bool in_vectors(const ScoreArguments& arguments) {
  return in_vectors<T>(arguments.in, arguments.distances.keys) &&
         in_vectors<T>(arguments.out, arguments.distances.keys);
}

unsigned blocks_for(const ScoreArguments& arguments) {
  return blocks_for(arguments.batch * arguments.slopes.heads * arguments.distances.queries);
}

template <typename T>
const char* launch_add(const ScoreArguments& arguments, core::CudaStream stream) {
  const unsigned blocks = blocks_for(arguments);
  return with_form<T>(in_vectors<T>(arguments), arguments.distances, [&](auto width, auto plain) {
    return core::checked_launch(add_kernel<T, width(), plain()>, blocks, block_size, 0, stream,
                                arguments);
  });
}

template <typename T>
const char* launch_softmax(const ScoreArguments& arguments, core::CudaStream stream) {
  using C = Compute<T>;
  const unsigned blocks = blocks_for(arguments);
  const int64_t kept = std::min<int64_t>(arguments.distances.keys, kept_bytes / sizeof(C));
  const size_t bytes = static_cast<size_t>(kept) * sizeof(C);
  return with_form<T>(in_vectors<T>(arguments), arguments.distances, [&](auto width, auto plain) {
    return core::checked_launch(softmax_kernel<T, width(), plain()>, blocks, block_size, bytes,
                                stream, arguments, kept);
  });
}

template <typename T>
const char* launch_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                    core::CudaStream stream) {
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * gradient.heads * queries);
  const auto kernel = arguments.distances.plain() ? softmax_backward_kernel<T, true>
                                                  : softmax_backward_kernel<T, false>;
  const char* error = core::checked_launch(kernel, blocks, block_size, 0, stream, arguments);
  if (error != nullptr || gradient.sides == 0) return error;
  return launch_reduce_heads(gradient, arguments.batch, queries, stream);
}

template <typename T>
const char* launch_reduce(const ReduceArguments& arguments, core::CudaStream stream) {
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * queries);
  const auto kernel =
      arguments.distances.plain() ? reduce_rows_kernel<T, true> : reduce_rows_kernel<T, false>;
  const char* error = core::checked_launch(kernel, blocks, block_size, 0, stream, arguments);
  if (error != nullptr) return error;
  return launch_reduce_heads(arguments.slopes, arguments.batch, queries, stream);
}

}  // namespace

const char* fill_cuda(const FillArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_fill<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* add_cuda(const ScoreArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_add<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* softmax_cuda(const ScoreArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_softmax<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* softmax_backward_cuda(const SoftmaxBackwardArguments& arguments,
                                  core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_softmax_backward<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* reduce_cuda(const ReduceArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch_reduce<typename decltype(tag)::type>(arguments, stream);
  });
}

}  // namespace posembed::alibi
