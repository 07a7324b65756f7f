// Rows of QK-norm in device code, and all its norms and rotations. Included by CUDA kernels of
// rotary_norm and rotary_cache; everything is internal to each.
#pragma once

#include "rotary/rotary_cuda.h"
#include "rotary_norm/rotary_norm.h"

namespace posembed::rotary_norm {
namespace {

using core::Compute;
using rotary::HeadThreads;
using rotary::HeadView;
using rotary::Launch;
using rotary::Pack;
using rotary::Token;

template <typename T, int size>
__device__ Pack<Compute<T>, size> widen(const Pack<T, size>& narrow) {
  Pack<Compute<T>, size> wide;
  core::load_all(narrow.element, wide.element);
  return wide;
}

template <typename T, int size>
__device__ Pack<Compute<T>, size> load_wide(const T* in) {
  return widen(Pack<T, size>::read(in));
}

/// Weights or biases in the compute type; `W` is the type in memory.
template <typename T, typename W, int size>
__device__ Pack<Compute<T>, size> load_parameters(const void* data, int64_t column) {
  const W* const in = static_cast<const W*>(data) + column;
  if constexpr (std::is_same_v<W, T>) {
    return load_wide<T, size>(in);
  } else {
    Pack<Compute<T>, size> pack;
    core::load_values<size>(in, pack.element);
    return pack;
  }
}

template <typename T, int size>
__device__ Pack<T, size> narrow(const Pack<Compute<T>, size>& wide) {
  Pack<T, size> pack;
#pragma unroll
  for (int i = 0; i < size; ++i) core::store(wide.element[i], pack.element + i);
  return pack;
}

/// Adds the products of the elements of a and b to `sum`.
template <typename C, int size>
__device__ C dot(const Pack<C, size>& a, const Pack<C, size>& b, C sum) {
#pragma unroll
  for (int i = 0; i < size; ++i) sum = core::fma(a.element[i], b.element[i], sum);
  return sum;
}

template <typename C, int size>
__device__ void multiply(C factor, Pack<C, size>* pack) {
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] *= factor;
}

template <typename C, int size>
__device__ void multiply(const Pack<C, size>& factor, Pack<C, size>* pack) {
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] *= factor.element[i];
}

/// Calls function(column) for this thread's packs of a row outside the window.
template <int size, typename T, int capacity, typename Function>
__device__ void for_outside(const Launch<T, capacity>& launch, const HeadThreads& threads,
                            const Function& function) {
  const int before = launch.start[0] / size, window = 2 * launch.pairs / size;
  const int packs = launch.outside[0] / size;
  for (int i = threads.index; i < packs; i += threads.count) {
    function((i < before ? i : i + window) * size);
  }
}

/// The sum of `value` over the threads that share a head, in a fixed order. All threads of the
/// block must call it, and never twice in a row with the same `buffer`.
template <typename C>
__device__ C head_sum(const HeadThreads& threads, C value, bool buffer) {
  if (threads.within_warp) {
    for (int offset = threads.count / 2; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  }
  __shared__ C values[2][2 * rotary::max_pairs];
  values[buffer][threadIdx.x] = value;
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) - threads.index;
  C sum = 0;
  for (int i = 0; i < threads.count; ++i) sum += values[buffer][first + i];
  return sum;
}

/// head_sum() for blocks that have whole warps, and threads without a head.
template <typename T, int capacity, typename C>
__device__ C group_sum(const Launch<T, capacity>& launch, const HeadThreads& threads, C value,
                       bool buffer) {
  if (threads.within_warp) return head_sum(threads, value, buffer);
  __shared__ C values[2][rotary::max_pairs];
  values[buffer][threadIdx.x] = value;
  __syncthreads();
  C sum = 0;
  if (threads.group >= launch.heads_per_pass) return sum;
  for (int i = 0; i < threads.count; ++i) sum += values[buffer][threads.group * threads.count + i];
  return sum;
}

/// The tensor and index of a head.
struct Head {
  int r;           // 0: query, 1: key
  int64_t number;  // among the heads of query or key
  int64_t rstd_index;

  template <typename T, int capacity>
  __device__ Head(const Launch<T, capacity>& launch, const Token& token, int head)
      : r(head >= launch.query_heads),
        number(r == 0 ? head : head - launch.query_heads),
        rstd_index(token.number * launch.views[r].heads + number) {}
};

// ----------------------------------------------------------------------------------------- general
// QK-norm with every option, for kernels that choose between them while they run: LayerNorm, norms
// over all heads of a token, given tables and their roundings, any weights. Reads rows from the
// caches again instead of keeping more than one head in registers.

/// Arguments of a launch in addition to those of the rotation, in the compute type; index 0 is
/// query, 1 is key.
template <typename C>
struct GeneralNorms {
  const void* weight[2];  // nullptr: ones
  const void* bias[2];    // nullptr: zeros
  C* rstd[2];             // nullptr: not needed
  C weight_offset, eps;
  int head_dim;
  bool wide_parameters;  // weights and biases are in the compute type
  bool centred, all_heads;
  RowRounding row_rounding;
};

/// Whether weights and biases have the compute type of 16-bit data.
POSEMBED_INLINE bool has_wide_parameters(const Arguments& arguments) {
  return arguments.parameter_scalar != arguments.rotation.scalar;
}

template <typename C>
GeneralNorms<C> make_general_norms(const Arguments& arguments) {
  GeneralNorms<C> norms = {};
  for (int r = 0; r < 2; ++r) {
    norms.weight[r] = arguments.weight[r];
    norms.bias[r] = arguments.bias[r];
    norms.rstd[r] = static_cast<C*>(arguments.rstd[r]);
  }
  norms.weight_offset = static_cast<C>(arguments.weight_offset);
  norms.eps = static_cast<C>(arguments.eps);
  norms.head_dim = static_cast<int>(arguments.rotation.head_dim);
  norms.wide_parameters = has_wide_parameters(arguments);
  norms.centred = arguments.centred;
  norms.all_heads = arguments.all_heads;
  norms.row_rounding = arguments.row_rounding;
  return norms;
}

/// Whether rows, weights and biases can be read in packs.
template <typename T>
bool can_use_vectors(const Arguments& arguments) {
  bool fits = rotary::can_use_vectors<T>(arguments.rotation);
  for (const void* data :
       {arguments.weight[0], arguments.weight[1], arguments.bias[0], arguments.bias[1]}) {
    fits = fits && reinterpret_cast<uintptr_t>(data) % rotary::vector_bytes == 0;
  }
  return fits;
}

/// Divides a launch's heads among threads, which own `size` pairs each, in whole warps. With few
/// tokens, several blocks share a token's heads, unless a block needs them all.
template <typename T, int capacity>
cudaLaunchConfig_t share_rows(Launch<T, capacity>* launch, int size, bool all_heads,
                              core::CudaStream stream) {
  const int per_head = std::max(1, launch->pairs / size);
  launch->threads_per_head = core::Divisor<int>::of(per_head);
  launch->heads_per_pass =
      std::clamp(rotary::threads_wanted / per_head, 1, std::max(1, launch->heads));
  const bool few = launch->tokens < 2 * static_cast<int64_t>(core::multiprocessors());
  launch->heads_of_block = few && !all_heads ? launch->heads_per_pass : launch->heads;
  const int64_t threads = int64_t{per_head} * launch->heads_per_pass;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(launch->tokens, INT32_MAX)),
           static_cast<unsigned>(core::divide_up(launch->heads, launch->heads_of_block)));
  config.blockDim =
      dim3(static_cast<unsigned>(core::divide_up(threads, core::warp_size) * core::warp_size));
  config.stream = stream;
  if (few) core::launch_early(&config);
  return config;
}

/// The sum of `value` over the block's threads, in a fixed order. All of them must call it.
template <typename C>
__device__ C block_sum(C value) {
  __shared__ C values[rotary::max_pairs / core::warp_size];
  for (int lanes = core::warp_size / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  __syncthreads();  // until the previous sums have been read
  if (threadIdx.x % core::warp_size == 0) values[threadIdx.x / core::warp_size] = value;
  __syncthreads();
  C sum = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / core::warp_size; ++warp) {
    sum += values[warp];
  }
  return sum;
}

/// Writes results to the rows that a launch has for them.
template <typename T, int size>
struct RowWriter {
  /// @param row  the window of the head's row
  /// @param column  from the row's first component
  /// @param start  the window's first component
  __device__ void write(const Pack<T, size>& pack, const rotary::Row<T>& row, int /*head*/,
                        int column, int start) const {
    pack.write(row.out + column - start);
  }
};

/// Mean and 1 / deviation of a row, or of a token's rows; the mean is 0 unless it is subtracted.
template <typename C>
struct Moments {
  C mean, rstd;
};

/// The norm of a launch.
template <typename T, int size>
class RowNorm {
 public:
  using C = Compute<T>;

  __device__ explicit RowNorm(const GeneralNorms<C>& norms) : norms_(norms) {}

  /// Adds the elements to `sum`, or the squares of their distances from `mean`.
  __device__ C add(const Pack<C, size>& pack, bool squares, C mean, C sum) const {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const C x = pack.element[i] - mean;
      sum = squares ? core::fma(x, x, sum) : sum + x;
    }
    return sum;
  }

  /// Normalises elements and applies the parameters of their columns. `column`: among a norm's.
  __device__ void apply(const Moments<C>& moments, int r, int64_t column,
                        Pack<C, size>* pack) const {
    const RowRounding rounding = norms_.row_rounding;
#pragma unroll
    for (int i = 0; i < size; ++i) {
      pack->element[i] = (pack->element[i] - moments.mean) * moments.rstd;
    }
    if (rounding == RowRounding::before_weight) round(pack);
    if (norms_.weight[r] != nullptr) {
      const auto weight = parameters(norms_.weight[r], column);
#pragma unroll
      for (int i = 0; i < size; ++i) {
        pack->element[i] *= weight.element[i] + norms_.weight_offset;
      }
    }
    if (norms_.bias[r] != nullptr) {
      const auto bias = parameters(norms_.bias[r], column);
#pragma unroll
      for (int i = 0; i < size; ++i) pack->element[i] += bias.element[i];
    }
    if (rounding != RowRounding::once) round(pack);
  }

 private:
  __device__ Pack<C, size> parameters(const void* data, int64_t column) const {
    return norms_.wide_parameters ? load_parameters<T, C, size>(data, column)
                                  : load_parameters<T, T, size>(data, column);
  }

  __device__ static void round(Pack<C, size>* pack) {
#pragma unroll
    for (int i = 0; i < size; ++i) pack->element[i] = rotary::rounded<T>(pack->element[i]);
  }

  const GeneralNorms<C>& norms_;
};

/// Rotates the pairs that a thread owns by angle(i, pair), where i counts them.
template <typename T, int size, bool interleaved, typename Angle>
__device__ void rotate_in_steps(const rotary::PackColumns<size, interleaved>& columns,
                                RowProducts products, const Angle& angle,
                                rotary::Pairs<Compute<T>, size, interleaved>* owned) {
  using C = Compute<T>;
  const bool rounds = products == RowProducts::to_data_type;
  const auto product = [rounds](C a, C b) { return rounds ? rotary::rounded<T>(a * b) : a * b; };
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const C x = owned->a(i), y = owned->b(i);
    const auto [cosine, sine] = angle(i, columns.pair(i));
    if (products == RowProducts::without_tables) {
      owned->a(i) = core::fma(x, cosine[0], -(y * sine[0]));
      owned->b(i) = core::fma(y, cosine[1], x * sine[1]);
    } else {
      owned->a(i) = product(x, cosine[0]) - product(y, sine[0]);
      owned->b(i) = product(y, cosine[1]) + product(x, sine[1]);
    }
  }
}

/// Fills the angles of a token; returns whether it is rotated.
template <typename T, int capacity>
__device__ bool begin_any_token(const rotary::TableLaunch<T, capacity>& launch, const Token& token,
                                Compute<T>* sines, Compute<T>* cosines) {
  if (launch.cosines == nullptr) return begin_token(launch, token, sines, cosines);
  __syncthreads();  // until the previous token's angles have been read
  for (int pair = threadIdx.x; pair < launch.pairs; pair += blockDim.x) {
    read_table(launch, token, pair, sines + pair, cosines + pair);
  }
  __syncthreads();
  return true;
}

/// Normalises and rotates tokens; make_writer(token) returns what receives a token's results.
template <typename T, int size, bool interleaved, int capacity, typename MakeWriter>
__device__ void norm_tokens(const rotary::TableLaunch<T, capacity>& launch,
                            const GeneralNorms<Compute<T>>& norms, const MakeWriter& make_writer) {
  using C = Compute<T>;
  using Owned = rotary::Pairs<C, size, interleaved>;
  __shared__ C sines[capacity], cosines[capacity];
  if (threadIdx.x == 0) rotary::apart_token() = -1;  // visible after begin_any_token()
  core::wait_for_previous_kernel();
  const HeadThreads threads(launch.threads_per_head);
  const rotary::PackColumns<size, interleaved> columns(threads.index, launch.pairs,
                                                       launch.interleaved);
  const RowNorm<T, size> norm(norms);
  const int begin = static_cast<int>(blockIdx.y) * launch.heads_of_block;
  const int end = min(launch.heads, begin + launch.heads_of_block);
  const bool has_window = launch.pairs > 0;
  bool buffer = false;

  for (int64_t number = blockIdx.x; number < launch.tokens; number += gridDim.x) {
    const Token token = token_of(launch, number);
    const rotary::TokenHeads<T, size, capacity> heads(launch, token);
    const bool rotated = begin_any_token(launch, token, sines, cosines) && has_window;
    const auto angles =
        has_window ? rotary::angles_of<C>(columns, sines, cosines) : rotary::Angles<C, size>{};
    const bool apart = rotary::apart_token() == number;
    const auto rotate = [&](Owned* owned) {
      const auto products = products_of(norms.row_rounding, launch.product_rounding);
      if (apart) {
        rotate_in_steps<T>(
            columns, products,
            [&](int, int pair) { return table_angle(launch, token, /*head=*/0, pair); }, owned);
      } else if (products == RowProducts::without_tables) {
        owned->rotate(angles);
      } else {
        rotate_in_steps<T>(
            columns, products, [&](int i, int) { return angles.of(i); }, owned);
      }
    };
    const auto writer = make_writer(token);
    const auto is_active = [&](int head, int last) {
      return threads.group < launch.heads_per_pass && head < last;
    };
    const auto read_window = [&](int head) {
      Owned owned = {};
      if (has_window) {
        const T* in = heads.row(head).in;
        owned = {load_wide<T, size>(in + columns.first), load_wide<T, size>(in + columns.second)};
      }
      return owned;
    };
    // This thread's share of the sum over a head's row.
    const auto add_row = [&](int head, const Owned& owned, bool squares, C mean, C sum) {
      if (has_window) {
        sum = norm.add(owned.second, squares, mean, norm.add(owned.first, squares, mean, sum));
      }
      const T* in = heads.row(head).in - launch.start[0];
      for_outside<size>(launch, threads, [&](int column) {
        sum = norm.add(load_wide<T, size>(in + column), squares, mean, sum);
      });
      return sum;
    };
    Moments<C> moments[2] = {};
    for (int r = 0; norms.all_heads && r < 2; ++r) {
      const int first = r == 0 ? 0 : launch.query_heads;
      const int last = r == 0 ? launch.query_heads : launch.heads;
      const C count = static_cast<C>(static_cast<int64_t>(last - first) * norms.head_dim);
      const auto mean_over_heads = [&](bool squares, C mean) {
        C sum = 0;
        for (int head = first + threads.group; is_active(head, last);
             head += launch.heads_per_pass) {
          sum = add_row(head, read_window(head), squares, mean, sum);
        }
        return block_sum(sum) / count;
      };
      if (first == last) continue;
      if (norms.centred) moments[r].mean = mean_over_heads(false, C(0));
      const C variance = mean_over_heads(true, moments[r].mean);
      moments[r].rstd = core::reciprocal_sqrt(variance + norms.eps);
    }
    for (int pass = begin; pass < end; pass += launch.heads_per_pass) {
      const bool active = is_active(pass + threads.group, end);
      const int head = active ? pass + threads.group : begin;
      const int r = head >= launch.query_heads, start = launch.start[r];
      Owned owned = read_window(head);
      Moments<C> of_head = moments[r];
      if (!norms.all_heads) {
        const auto mean_over_row = [&](bool squares, C mean) {
          const C sum = active ? add_row(head, owned, squares, mean, C(0)) : C(0);
          buffer = !buffer;
          return group_sum(launch, threads, sum, buffer) / static_cast<C>(norms.head_dim);
        };
        if (norms.centred) of_head.mean = mean_over_row(false, C(0));
        const C variance = mean_over_row(true, of_head.mean);
        of_head.rstd = core::reciprocal_sqrt(variance + norms.eps);
      }
      if (!active) continue;
      const Head at(launch, token, head);
      if (norms.rstd[r] != nullptr && threads.index == 0) {
        norms.rstd[r][at.rstd_index] = of_head.rstd;
      }
      const int64_t parameters = norms.all_heads ? at.number * norms.head_dim : 0;
      const rotary::Row<T> row = heads.row(head);
      const auto write = [&](const Pack<C, size>& pack, int column) {
        writer.write(narrow<T, size>(pack), row, head, column, start);
      };
      // Rows may be written in place: read all that a thread owns before it writes.
      if (has_window) {
        norm.apply(of_head, r, parameters + start + columns.first, &owned.first);
        norm.apply(of_head, r, parameters + start + columns.second, &owned.second);
        if (rotated) rotate(&owned);
        write(owned.first, start + columns.first);
        write(owned.second, start + columns.second);
      }
      for_outside<size>(launch, threads, [&](int column) {
        auto pack = load_wide<T, size>(row.in + column - start);
        norm.apply(of_head, r, parameters + column, &pack);
        write(pack, column);
      });
    }
  }
}

/// Launches a kernel of norm_tokens(): packs for heads of up to 256 rotated components, whose
/// arguments are short, and one element at a time for others.
template <typename T, typename Pass>
const char* launch_general(const Pass& pass, bool fits_vectors, core::CudaStream stream) {
  constexpr int size = core::vector_width<T>, packed = 128, all = rotary::max_pairs;
  if constexpr (size > 1) {
    if (fits_vectors && pass.rotation().pairs <= packed) {
      return rotary::with_pairing<size>(pass.rotation(), [&](auto interleaved) {
        return pass.template launch<T, size, interleaved(), packed>(stream);
      });
    }
  }
  return pass.template launch<T, 1, false, all>(stream);
}

}  // namespace
}  // namespace posembed::rotary_norm
