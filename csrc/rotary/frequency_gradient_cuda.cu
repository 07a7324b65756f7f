// The gradient of rotary frequencies on CUDA: a block sums a chunk of tokens, a thread one pair in
// some of the heads; a second kernel adds the chunks. There are no atomics, so every run gives the
// same bits.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/device_vector.h"
#include "core/fma.h"
#include "rotary/frequency_gradient.h"

namespace posembed::rotary {
namespace {

using core::Compute;

constexpr int threads_of_block = 256;

struct Launch {
  Arguments arguments;
  int64_t tokens, tokens_of_chunk;
  double* sums;
  int columns;  // threads side by side, one for each pair
  uint8_t axis_of_pair[max_pairs];
};

/// Whether a token is rotated at all. The forward pass has recorded integers below -1.
__device__ inline bool is_rotated(const Arguments& arguments, int64_t batch, int64_t seq) {
  bool rotated = true;
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    const core::Position position = position_of(arguments, batch, seq, axis);
    rotated = rotated && (arguments.positions.floating || position.whole >= 0);
  }
  return rotated;
}

/// The moment of pair `pair` of a token over heads `head`, `head + step`, and so on.
template <typename T, bool interleaved>
__device__ Compute<T> moment_of(const Arguments& arguments, int64_t batch, int64_t seq, int pair,
                                int head, int step) {
  const Rows &x = arguments.rows[0], &g = arguments.rows[1];
  const int64_t first = window_start(arguments, x) + (interleaved ? 2 * pair : pair);
  const int64_t second = first + (interleaved ? 1 : arguments.pairs);
  const T* x_row = static_cast<const T*>(x.in) + batch * x.in_stride[0] + seq * x.in_stride[1];
  const T* g_row = static_cast<const T*>(g.in) + batch * g.in_stride[0] + seq * g.in_stride[1];
  Compute<T> moment = 0;
  for (int64_t h = head; h < x.heads; h += step) {
    const T *in = x_row + h * x.in_stride[2], *gradient = g_row + h * g.in_stride[2];
    moment = core::fma(core::load(gradient[second]), core::load(in[first]),
                       core::fma(-core::load(gradient[first]), core::load(in[second]), moment));
  }
  return moment;
}

template <typename T, bool interleaved>
__global__ void sum_kernel(const __grid_constant__ Launch launch) {
  __shared__ double parts[max_pairs];  // of every thread
  const Arguments& arguments = launch.arguments;
  const int pair = threadIdx.x % launch.columns, row = threadIdx.x / launch.columns;
  const int rows = blockDim.x / launch.columns;
  const int64_t begin = blockIdx.x * launch.tokens_of_chunk;
  const int64_t end = min(launch.tokens, begin + launch.tokens_of_chunk);
  double sum = 0;
  for (int64_t token = begin; token < end && pair < arguments.pairs; ++token) {
    const int64_t batch = token / arguments.seq, seq = token % arguments.seq;
    if (!is_rotated(arguments, batch, seq)) continue;
    const int axis = arguments.axes == 1 ? 0 : launch.axis_of_pair[pair];
    const double position = core::to_double(position_of(arguments, batch, seq, axis));
    const auto moment = moment_of<T, interleaved>(arguments, batch, seq, pair, row, rows);
    sum = core::fma(position, static_cast<double>(moment), sum);
  }
  parts[threadIdx.x] = arguments.reverse ? -sum : sum;
  __syncthreads();
  if (row > 0 || pair >= arguments.pairs) return;
  double total = 0;
  for (int i = 0; i < rows; ++i) total += parts[i * launch.columns + pair];
  launch.sums[blockIdx.x * arguments.pairs + pair] = total;
}

template <typename Out>
__global__ void add_kernel(const double* sums, int64_t chunks, int64_t pairs, Out* out) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair < pairs) out[pair] = static_cast<Out>(total_of(sums, chunks, pairs, pair));
}

template <typename T, bool interleaved>
void launch_sum(const Arguments& arguments, double* sums, core::CudaStream stream) {
  Launch launch = {};
  launch.arguments = arguments;
  launch.tokens = arguments.batch * arguments.seq;
  launch.tokens_of_chunk = tokens_of_chunk(launch.tokens);
  launch.sums = sums;
  launch.columns = (static_cast<int>(arguments.pairs) + 31) / 32 * 32;
  if (arguments.axes > 1) {
    std::copy(arguments.axis_of_pair, arguments.axis_of_pair + arguments.pairs,
              launch.axis_of_pair);
  }
  if (launch.tokens == 0) return;
  const int threads = launch.columns * std::max(1, threads_of_block / launch.columns);
  core::launch(sum_kernel<T, interleaved>, chunks_of(launch.tokens), threads, stream, launch);
}

template <typename Out>
void launch_add(const Arguments& arguments, const double* sums, void* out,
                core::CudaStream stream) {
  const int64_t chunks = chunks_of(arguments.batch * arguments.seq);
  constexpr int threads = 64;
  core::launch(add_kernel<Out>, core::divide_up(arguments.pairs, threads), threads, stream, sums,
               chunks, arguments.pairs, static_cast<Out*>(out));
}

}  // namespace

const char* sum_moments_cuda(const Arguments& arguments, double* sums, void* out,
                             core::Scalar scalar, core::CudaStream stream) {
  if (arguments.pairs == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return arguments.interleaved ? launch_sum<T, true>(arguments, sums, stream)
                                 : launch_sum<T, false>(arguments, sums, stream);
  });
  const auto add = scalar == core::Scalar::float64 ? launch_add<double> : launch_add<float>;
  add(arguments, sums, out, stream);
  return core::launch_error();
}

}  // namespace posembed::rotary
