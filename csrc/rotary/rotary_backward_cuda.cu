// The gradient of rotary frequencies on CUDA: a block sums a chunk of tokens, and a thread sums
// packs of pairs over some of the tokens and heads. A second kernel adds the chunks. There are no
// atomics, so results are deterministic.
#include "core/block_reduce.h"
#include "rotary/rotary.h"
#include "rotary/rotary_cuda.h"

namespace posembed::rotary {
namespace {

struct SumLaunch {
  Arguments arguments;
  int64_t tokens, tokens_of_chunk;
  core::Divisor<int64_t> seq;
  double* sums;
  int64_t frequencies;  // of all windows, heads and axes: the size of a row of `sums`
  core::Divisor<int> threads_per_head;  // threads that share a head
  core::Divisor<int> head_groups;       // heads that a block takes at a time
  int token_groups;                     // tokens, likewise
  uint8_t axis_of_pair[max_pairs];
};

/// Whether a token is rotated at all. The forward pass has recorded integers below -1.
__device__ inline bool is_rotated(const Arguments& arguments, int64_t batch, int64_t seq) {
  bool rotated = true;
#pragma unroll 1
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    const core::Position position = position_of(arguments, batch, seq, axis);
    rotated = rotated && (arguments.positions.floating || position.whole >= 0);
  }
  return rotated;
}

/// Pairs of a head, which begins at `in`.
template <typename T, int size, bool interleaved>
__device__ Pairs<T, size, interleaved> read_pairs(const T* in,
                                                  const PackColumns<size, interleaved>& columns) {
  return {Pack<T, size>::read(in + columns.first), Pack<T, size>::read(in + columns.second)};
}

/// The moments of a thread's pairs over heads `head`, `head + step`, and so on.
template <typename T, int size, bool interleaved>
__device__ void add_moments(const Arguments& arguments, int64_t batch, int64_t seq, int head,
                            int step, const PackColumns<size, interleaved>& columns,
                            Compute<T> (&moments)[size]) {
  const HeadView &x = arguments.views[0], &g = arguments.views[1];
  const int64_t start = window_start(arguments, x);
  const T* x_row =
      static_cast<const T*>(x.in) + batch * x.in_stride[0] + seq * x.in_stride[1] + start;
  const T* g_row =
      static_cast<const T*>(g.in) + batch * g.in_stride[0] + seq * g.in_stride[1] + start;
#pragma unroll 2
  for (int h = head; h < static_cast<int>(x.heads); h += step) {
    // Counted: rotary::sum_kernel, 8 vectors an iteration
    auto in = read_pairs<T>(x_row + head_offset<size>(h, x.in_stride[2]), columns);
    auto gradient = read_pairs<T>(g_row + head_offset<size>(h, g.in_stride[2]), columns);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      moments[i] =
          core::fma(core::load(gradient.b(i)), core::load(in.a(i)),
                    core::fma(-core::load(gradient.a(i)), core::load(in.b(i)), moments[i]));
    }
  }
}

/// With `by_head`, blockIdx.y is the head, and blockIdx.z the axis of a sum over axes.
template <typename T, int size, bool interleaved, bool by_head>
__global__ void __launch_bounds__(max_threads<size>, min_blocks<size, 3>)
    sum_kernel(const __grid_constant__ SumLaunch launch) {
  auto* parts = reinterpret_cast<double*>(core::dynamic_shared_memory());  // [groups, pairs]
  const Arguments& arguments = launch.arguments;
  const int pairs = static_cast<int>(arguments.pairs), threads = static_cast<int>(blockDim.x);
  const auto at = core::divide(static_cast<int>(threadIdx.x), launch.threads_per_head);
  const PackColumns<size, interleaved> columns(at.remainder, pairs, arguments.interleaved);
  const auto group = core::divide(at.quotient, launch.head_groups);
  const int64_t begin = blockIdx.x * launch.tokens_of_chunk;
  const int64_t end = min(launch.tokens, begin + launch.tokens_of_chunk);
  const bool own_axis = by_head && arguments.frequencies.axis_stride != 0;  // the block's
  const int first_axis = own_axis ? static_cast<int>(blockIdx.z) : 0;
  const int end_axis = own_axis ? first_axis + 1 : static_cast<int>(arguments.axes);
  double sum[size] = {};
  for (int64_t token = begin + group.quotient; token < end; token += launch.token_groups) {
    const auto indices = core::divide(token, launch.seq);
    const int64_t batch = indices.quotient, seq = indices.remainder;
    if (!is_rotated(arguments, batch, seq)) continue;
    Compute<T> moments[size] = {};
    const int head = by_head ? static_cast<int>(blockIdx.y) : group.remainder;
    const int step =
        by_head ? static_cast<int>(arguments.views[0].heads) : launch.head_groups.value;
    add_moments<T>(arguments, batch, seq, head, step, columns, moments);
#pragma unroll 1
    for (int axis = first_axis; axis < end_axis; ++axis) {
      const double position = core::to_double(position_of(arguments, batch, seq, axis));
#pragma unroll
      for (int i = 0; i < size; ++i) {
        if (end_axis - first_axis == 1 ||
            core::through_data_cache(launch.axis_of_pair)[columns.pair(i)] == axis) {
          sum[i] = core::fma(position, static_cast<double>(moments[i]), sum[i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
    parts[at.quotient * pairs + columns.pair(i)] = arguments.reverse ? -sum[i] : sum[i];
  }
  __syncthreads();
  const int groups = launch.head_groups.value * launch.token_groups;
  for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += threads) {
    double total = 0;
    for (int i = 0; i < groups; ++i) total += parts[i * pairs + pair];
    const int64_t row = blockIdx.x * launch.frequencies;
    const int64_t first = by_head ? blockIdx.y * arguments.frequencies.head_stride +
                                        blockIdx.z * arguments.frequencies.axis_stride
                                  : 0;
    launch.sums[row + first + pair] = total;
  }
}

template <typename Out>
__global__ void __launch_bounds__(core::part_threads)
    add_kernel(const double* sums, int64_t chunks, int64_t pairs, Out* out) {
  const double total = core::sum_of_parts(sums, chunks, pairs, pairs);
  const int64_t pair = core::part_column();
  if (core::writes_parts() && pair < pairs) out[pair] = static_cast<Out>(total);
}

/// Heads of a token that a thread sums: the more, the less the token's own work costs.
constexpr int heads_of_sum = 4;

template <typename T, int size, bool interleaved, bool by_head>
void launch_sum(const Arguments& arguments, double* sums, int64_t frequencies,
                core::CudaStream stream) {
  const int pairs = static_cast<int>(arguments.pairs), per_head = pairs / size;
  const int groups = std::max(1, threads_wanted / per_head);
  const int64_t heads = by_head ? 1 : arguments.views[0].heads;
  const int head_groups = static_cast<int>(std::clamp<int64_t>(heads / heads_of_sum, 1, groups));
  SumLaunch launch = {};
  launch.arguments = arguments;
  launch.tokens = arguments.batch * arguments.seq;
  if (launch.tokens == 0) return;
  launch.tokens_of_chunk = tokens_of_chunk(launch.tokens);
  launch.seq = core::Divisor<int64_t>::of(arguments.seq);
  launch.sums = sums;
  launch.frequencies = frequencies;
  launch.threads_per_head = core::Divisor<int>::of(per_head);
  launch.head_groups = core::Divisor<int>::of(head_groups);
  launch.token_groups = groups / head_groups;
  if (arguments.axis_of_pair != nullptr) {
    std::copy(arguments.axis_of_pair, arguments.axis_of_pair + pairs, launch.axis_of_pair);
  }
  const int used = head_groups * launch.token_groups;
  dim3 grid(core::grid_of(chunks_of(launch.tokens)));
  if (by_head) {
    grid.y = static_cast<unsigned>(arguments.views[0].heads);
    grid.z = static_cast<unsigned>(mixed_axes(arguments));
  }
  core::launch_with(sum_kernel<T, size, interleaved, by_head>, grid,
                    static_cast<unsigned>(used * per_head),
                    static_cast<size_t>(used * pairs) * sizeof(double), stream, launch);
}

template <typename T, bool by_head>
auto choose_sum(const Arguments& arguments) {
  constexpr int size = core::vector_width<T>;
  if constexpr (size > 1) {
    if (can_use_vectors<T>(arguments)) {
      return arguments.interleaved ? launch_sum<T, size, true, by_head>
                                   : launch_sum<T, size, false, by_head>;
    }
  }
  return launch_sum<T, 1, false, by_head>;
}

template <typename Out>
void launch_add(const Arguments& arguments, const double* sums, void* out,
                core::CudaStream stream) {
  const int64_t chunks = chunks_of(arguments.batch * arguments.seq);
  const int64_t frequencies = frequency_count(arguments);
  core::launch(add_kernel<Out>, core::divide_up(frequencies, core::warp_size), core::part_threads,
               stream, sums, chunks, frequencies, static_cast<Out*>(out));
}

}  // namespace

const char* sum_moments_cuda(const Arguments& arguments, double* sums, void* out,
                             core::Scalar scalar, core::CudaStream stream) {
  if (arguments.pairs == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_window_sum(arguments, [&](const Arguments& part, int64_t first) {
      const auto sum = is_by_head(part) ? choose_sum<T, true>(part) : choose_sum<T, false>(part);
      sum(part, sums + first, frequency_count(arguments), stream);
    });
  });
  const auto add = scalar == core::Scalar::float64 ? launch_add<double> : launch_add<float>;
  add(arguments, sums, out, stream);
  return core::launch_error();
}

}  // namespace posembed::rotary
