// ALiBi on CUDA: a block processes one row of scores, and a thread 16 bytes of it at a time. The
// bias is computed in registers from the distance. Every kernel is memory-bound.
#include <algorithm>

#include "alibi/bias.h"
#include "alibi/kernel.h"
#include "core/block_reduce.h"
#include "core/device_store.h"
#include "core/divisor.h"
#include "core/exp.h"

namespace posembed::alibi {
namespace {

using core::Compute;
using core::Vector;

constexpr int block_size = 256;
constexpr int64_t most_blocks = int64_t{1} << 20;

unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(std::min(rows, most_blocks)); }

// ---------------------------------------------------------------------------------------- one row

/// The query of a row. `plain`: distances to keys depend only on key - query.
template <bool plain>
class Query {
 public:
  __device__ Query(const Distances& distances, const Row& row)
      : distances_(distances),
        batch_(row.batch),
        position_(plain ? distances.offset + row.query
                        : query_position(distances, row.batch, row.query)),
        document_(plain ? KeyRange{0, distances.keys} : document_of(distances, row.query)) {}

  __device__ int32_t distance_to(int64_t key) const {
    if constexpr (plain) return causal_distance(distances_, static_cast<int32_t>(key - position_));
    if (key < document_.begin || key >= document_.end) return hidden;
    if (is_masked(distances_, batch_, key)) return hidden;
    const int64_t distance = key_position(distances_, batch_, key) - position_;
    if (distance > INT32_MAX || distance < -INT32_MAX) {
      core::record_error(distances_.error, core::ErrorKind::distance, distance, key, 0);
      return hidden;
    }
    return causal_distance(distances_, static_cast<int32_t>(distance));
  }

  __device__ int32_t plain_distance(int64_t key) const {
    return static_cast<int32_t>(key - position_);
  }

  __device__ bool is_causal() const { return distances_.causal; }

  /// Keys from here on are hidden and have weight 0.
  __device__ int64_t visible_end() const {
    if (!plain || !distances_.causal || !distances_.apply_mask) return distances_.keys;
    const int64_t end = position_ + 1;
    return end < 0 ? 0 : (end < distances_.keys ? end : distances_.keys);
  }

 private:
  const Distances& distances_;
  int64_t batch_;
  int64_t position_;
  KeyRange document_;
};

/// Converts row numbers to indices without division instructions.
struct RowNumbers {
  core::Divisor<int64_t> heads, queries;

  static RowNumbers of(int64_t heads, int64_t queries) {
    return {core::Divisor<int64_t>::of(std::max<int64_t>(1, heads)),
            core::Divisor<int64_t>::of(std::max<int64_t>(1, queries))};
  }

  __device__ Row row(int64_t number) const {
    const auto plane = core::divide(number, queries);
    const auto place = core::divide(plane.quotient, heads);
    return {place.quotient, place.remainder, plane.remainder};
  }
};

/// The distances of `width` neighbouring keys on one side of the query, which need no checks:
/// first, first + 1, and so on.
template <typename C>
struct OneSide {
  bool holds = false;
  C slope = 0, first = 0;
};

template <int width, typename C, bool plain>
__device__ OneSide<C> one_side(const Query<plain>& query, const BiasLine<C>& line, int64_t key) {
  if constexpr (!plain || width == 1) return {};
  const int32_t first = query.plain_distance(key), last = first + width - 1;
  constexpr int32_t exact = 1 << 24;  // smaller whole numbers are floats
  const bool before = last <= 0 && first > -exact, after = first > 0 && last < exact;
  if (!before && (!after || query.is_causal())) return {};
  return {true, before ? line.before : line.after, static_cast<C>(first)};
}

/// Adds biases to the scores of `width` keys.
template <int width, typename C, bool plain>
__device__ void add_biases(const Query<plain>& query, const BiasLine<C>& line, int64_t key, C scale,
                           C (&scores)[width]) {
  const auto side = one_side<width>(query, line, key);
  if (side.holds) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      scores[i] = core::fma(side.slope, side.first + static_cast<C>(i), scores[i] * scale);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < width; ++i) {
    scores[i] = biased(line, query.distance_to(key + i), scores[i], scale);
  }
}

template <int width, typename C, bool plain>
__device__ void fill_biases(const Query<plain>& query, const BiasLine<C>& line, int64_t key,
                            C (&biases)[width]) {
  const auto side = one_side<width>(query, line, key);
  if (side.holds) {
#pragma unroll
    for (int i = 0; i < width; ++i) biases[i] = side.slope * (side.first + static_cast<C>(i));
    return;
  }
#pragma unroll
  for (int i = 0; i < width; ++i) biases[i] = bias(line, query.distance_to(key + i));
}

template <int width, typename T>
__device__ void load_keys(const T* in, Compute<T> (&values)[width]) {
  const auto pack = *reinterpret_cast<const Vector<T, width>*>(in);
  core::load_all(pack.values, values);
}

template <int width, typename T>
__device__ void store_keys(const Compute<T> (&values)[width], T* out) {
  Vector<T, width> pack;
#pragma unroll
  for (int i = 0; i < width; ++i) core::store(values[i], pack.values + i);
  core::write_vector<T, width>(pack, out);
}

// ------------------------------------------------------------------------------------ fill and add

template <typename T, int width, bool plain>
__global__ void fill_kernel(FillArguments arguments, RowNumbers numbers) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.head);
    T* out = row_data<T>(arguments.out, row);
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      C biases[width];
      fill_biases(query, line, key, biases);
      store_keys<width>(biases, out + key);
    }
  }
}

template <typename T, int width, bool plain>
__global__ void add_kernel(ScoreArguments arguments, RowNumbers numbers) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.head);
    const T* in = row_data<const T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    for (int64_t key = int64_t{threadIdx.x} * width; key < distances.keys;
         key += block_size * width) {
      C scores[width];
      load_keys<width>(in + key, scores);
      add_biases(query, line, key, scale, scores);
      store_keys<width>(scores, out + key);
    }
  }
}

// ----------------------------------------------------------------------------------------- softmax

__device__ float exponential(float x) { return core::exp_of_negative(x); }
__device__ double exponential(double x) { return exp(x); }

/// Bytes of a row that stay in shared memory between passes; the rest is reloaded.
constexpr int64_t kept_bytes = 40 * 1024;

template <typename T, int width, bool plain>
__global__ void softmax_kernel(ScoreArguments arguments, RowNumbers numbers, int64_t kept_keys) {
  using C = Compute<T>;
  C* const kept = reinterpret_cast<C*>(core::dynamic_shared_memory());
  const Distances& distances = arguments.distances;
  const int64_t heads = arguments.slopes.heads;
  const int64_t rows = arguments.batch * heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const BiasLine<C> line = bias_line<C>(arguments.slopes, distances, row.head);
    const T* in = row_data<const T>(arguments.in, row);
    T* out = row_data<T>(arguments.out, row);
    const int64_t end = query.visible_end();
    // A thread visits the same keys in every pass, so passes need no barrier between them.
    const auto each_pack = [&](auto visit) {
      for (int64_t key = int64_t{threadIdx.x} * width; key < end; key += block_size * width) {
        visit(key);
      }
    };
    const auto read = [&](int64_t key, C(&scores)[width]) {
      load_keys<width>(in + key, scores);
      add_biases(query, line, key, scale, scores);
    };
    C most = -static_cast<C>(INFINITY);
    each_pack([&](int64_t key) {
      C scores[width];
      read(key, scores);
      if (key < kept_keys) core::store_values<width>(scores, kept + key);
#pragma unroll
      for (int i = 0; i < width; ++i) most = scores[i] > most ? scores[i] : most;
    });
    most = core::over_block(most, core::Larger());
    if (most == -static_cast<C>(INFINITY)) most = 0;
    C part = 0;
    each_pack([&](int64_t key) {
      C values[width];
      if (key < kept_keys) {
        core::load_values<width>(kept + key, values);
      } else {
        read(key, values);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) part += values[i] = exponential(values[i] - most);
      if (key < kept_keys) core::store_values<width>(values, kept + key);
    });
    const C sum = core::over_block(part, core::Add());
    const C factor = sum == 0 ? C(0) : 1 / sum;  // all keys hidden: zeros
    each_pack([&](int64_t key) {
      C values[width];
      if (key < kept_keys) {
        core::load_values<width>(kept + key, values);
      } else {
        read(key, values);
#pragma unroll
        for (int i = 0; i < width; ++i) values[i] = exponential(values[i] - most);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] *= factor;
      store_keys<width>(values, out + key);
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
  const double before = core::over_block(sums.before, core::Add()),
               after = core::over_block(sums.after, core::Add());
  if (threadIdx.x != 0) return;
  gradient.partial[number] = gradient.sides == 1 ? before + after : before;
  if (gradient.sides == 2) gradient.partial[rows + number] = after;
}

template <typename T, int width, bool plain>
__global__ void softmax_backward_kernel(SoftmaxBackwardArguments arguments, RowNumbers numbers) {
  using C = Compute<T>;
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  const C scale = static_cast<C>(arguments.scale);
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const T* grad = row_data<const T>(arguments.grad, row);
    const T* weights = row_data<const T>(arguments.weights, row);
    T* out = row_data<T>(arguments.out, row);
    const int64_t end = query.visible_end();
    const auto each_pack = [&](int64_t keys, auto visit) {
      for (int64_t key = int64_t{threadIdx.x} * width; key < keys; key += block_size * width) {
        visit(key);
      }
    };
    /// The number of keys in a pack that the query sees.
    const auto seen_of = [&](int64_t key) {
      return static_cast<int>(max(int64_t{0}, min(int64_t{width}, end - key)));
    };
    C dot = 0;
    each_pack(end, [&](int64_t key) {
      const int seen = seen_of(key);
      C g[width], w[width];
      load_keys<width>(grad + key, g);
      load_keys<width>(weights + key, w);
#pragma unroll
      for (int i = 0; i < width; ++i) dot = i < seen ? core::fma(g[i], w[i], dot) : dot;
    });
    const C mean = core::over_block(dot, core::Add());
    SlopeSums sums;
    each_pack(distances.keys, [&](int64_t key) {
      const int seen = seen_of(key);
      C g[width] = {}, w[width] = {};
      if (seen > 0) {
        load_keys<width>(grad + key, g);
        load_keys<width>(weights + key, w);
      }
      // Hidden keys have gradient 0, even if memory holds NaN.
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] = i < seen ? w[i] * (g[i] - mean) : C(0);
      if (gradient.sides > 0) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          if (i < seen) sums.add(query.distance_to(key + i), g[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] *= scale;
      store_keys<width>(g, out + key);
    });
    if (gradient.sides > 0) store_sums(sums, gradient, number, rows);
  }
}

template <typename T, bool plain>
__global__ void reduce_rows_kernel(ReduceArguments arguments, RowNumbers numbers) {
  const Distances& distances = arguments.distances;
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t rows = arguments.batch * gradient.heads * distances.queries;
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const Row row = numbers.row(number);
    const Query<plain> query(distances, row);
    const T* grad = row_data<const T>(arguments.grad, row);
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
    return core::over_block(part, core::Add());
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
                                arguments,
                                RowNumbers::of(arguments.slopes.heads, distances.queries));
  });
}

template <typename T>
bool in_vectors(const ScoreArguments& arguments) {
  return in_vectors<T>(arguments.in, arguments.distances.keys) &&
         in_vectors<T>(arguments.out, arguments.distances.keys);
}

RowNumbers numbers_of(const ScoreArguments& arguments) {
  return RowNumbers::of(arguments.slopes.heads, arguments.distances.queries);
}

unsigned blocks_for(const ScoreArguments& arguments) {
  return blocks_for(arguments.batch * arguments.slopes.heads * arguments.distances.queries);
}

template <typename T>
const char* launch_add(const ScoreArguments& arguments, core::CudaStream stream) {
  const unsigned blocks = blocks_for(arguments);
  return with_form<T>(in_vectors<T>(arguments), arguments.distances, [&](auto width, auto plain) {
    return core::checked_launch(add_kernel<T, width(), plain()>, blocks, block_size, 0, stream,
                                arguments, numbers_of(arguments));
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
                                stream, arguments, numbers_of(arguments), kept);
  });
}

template <typename T>
const char* launch_softmax_backward(const SoftmaxBackwardArguments& arguments,
                                    core::CudaStream stream) {
  const SlopeGradient& gradient = arguments.slopes;
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * gradient.heads * queries);
  const int64_t keys = arguments.distances.keys;
  const bool vectors = in_vectors<T>(arguments.grad, keys) &&
                       in_vectors<T>(arguments.weights, keys) && in_vectors<T>(arguments.out, keys);
  const RowNumbers numbers = RowNumbers::of(gradient.heads, queries);
  const char* error = with_form<T>(vectors, arguments.distances, [&](auto width, auto plain) {
    return core::checked_launch(softmax_backward_kernel<T, width(), plain()>, blocks, block_size, 0,
                                stream, arguments, numbers);
  });
  if (error != nullptr || gradient.sides == 0) return error;
  return launch_reduce_heads(gradient, arguments.batch, queries, stream);
}

template <typename T>
const char* launch_reduce(const ReduceArguments& arguments, core::CudaStream stream) {
  const int64_t queries = arguments.distances.queries;
  const unsigned blocks = blocks_for(arguments.batch * arguments.slopes.heads * queries);
  const auto kernel =
      arguments.distances.plain() ? reduce_rows_kernel<T, true> : reduce_rows_kernel<T, false>;
  const char* error = core::checked_launch(kernel, blocks, block_size, 0, stream, arguments,
                                           RowNumbers::of(arguments.slopes.heads, queries));
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
