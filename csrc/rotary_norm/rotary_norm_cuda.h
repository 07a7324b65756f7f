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

template <typename T, int size>
__device__ Pack<T, size> narrow(const Pack<Compute<T>, size>& wide) {
  Pack<T, size> pack;
#pragma unroll
  for (int i = 0; i < size; ++i) core::store(wide.element[i], pack.element + i);
  return pack;
}

/// The columns of a row that a thread owns: two packs in the window, or two outside it.
template <int size, bool interleaved>
struct OwnedColumns {
  rotary::PackColumns<size, interleaved> window;
  int first, second;
  bool in_window, exist, has_second;  // has_second: always in packs

  template <typename T, int capacity>
  __device__ OwnedColumns(const Launch<T, capacity>& launch, int index)
      : window(index, launch.pairs, launch.interleaved),
        first(launch.start[0] + window.first),
        second(launch.start[0] + window.second),
        in_window(index < launch.pairs / size),
        exist(true),
        has_second(true) {
    if (in_window) return;
    const int packs = launch.outside[0] / size, half = (packs + 1) / 2;
    const int before = launch.start[0] / size, skipped = 2 * launch.pairs / size;
    const int pack = index - launch.pairs / size, other = pack + half;
    first = (pack < before ? pack : pack + skipped) * size;
    second = (other < before ? other : other + skipped) * size;
    exist = pack < half;
    has_second = size > 1 || other < packs;
  }
};

/// The threads of a head: a power of two up to a warp, so that shuffles add up their sums, or whole
/// warps.
template <typename T, int capacity>
int threads_of_head(const Launch<T, capacity>& launch, int size) {
  const int64_t owners = launch.pairs / size + core::divide_up(launch.outside[0] / size, 2);
  int threads = 1;
  while (threads < owners) threads += std::min<int>(threads, core::warp_size);
  return threads;
}

/// The sum of `value` over `count` such threads, in a fixed order; `group` numbers them in a block.
/// All threads of the block must call it.
template <typename C>
__device__ C sum_of_group(int count, int group, C value) {
#pragma unroll
  for (int lanes = core::warp_size / 2; lanes > 0; lanes /= 2) {
    if (lanes < count) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  if (count <= core::warp_size) return value;
  __shared__ C sums[2 * rotary::max_pairs / core::warp_size];
  const int warp = static_cast<int>(threadIdx.x) / core::warp_size;
  __syncthreads();  // the previous sums have been read
  if (threadIdx.x % core::warp_size == 0) sums[warp] = value;
  __syncthreads();
  const int warps = count / core::warp_size;
  value = 0;
#pragma unroll 1
  for (int i = 0; i < warps; ++i) value += sums[group * warps + i];
  return value;
}

/// Arguments of a launch in addition to those of the rotation, in the compute type; index 0 is
/// query, 1 is key.
template <typename C>
struct Norms {
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
Norms<C> make_norms(const Arguments& arguments) {
  Norms<C> norms = {};
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

/// Whether a call is RMSNorm of each head with given weights in the type of the data, and a
/// rotation by exact angles: kernels have an instance for such calls.
inline bool is_usual(const Arguments& arguments) {
  return !is_general(arguments) && !has_wide_parameters(arguments) &&
         arguments.weight[0] != nullptr && arguments.weight[1] != nullptr;
}

/// Weights or biases of neighbouring columns.
template <typename T, int size>
__device__ Pack<Compute<T>, size> parameters(bool wide, const void* data, int64_t column) {
  if (std::is_same_v<T, Compute<T>> || !wide) {
    return load_wide<T, size>(static_cast<const T*>(data) + column);
  }
  Pack<Compute<T>, size> pack;
  core::load_values<size>(static_cast<const Compute<T>*>(data) + column, pack.element);
  return pack;
}

/// The factors of neighbouring columns.
template <typename T, int size, bool usual>
__device__ Pack<Compute<T>, size> weights(const Norms<Compute<T>>& norms, int r, int64_t column) {
  Pack<Compute<T>, size> pack;
  const bool given = usual || norms.weight[r] != nullptr;
  if (given) pack = parameters<T, size>(!usual && norms.wide_parameters, norms.weight[r], column);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    pack.element[i] = given ? pack.element[i] + norms.weight_offset : Compute<T>(1);
  }
  return pack;
}

/// Whether rows, weights and biases can be read in packs, and a head is whole pairs of packs.
template <typename T>
bool can_use_vectors(const Arguments& arguments) {
  const rotary::Arguments& rotation = arguments.rotation;
  const int64_t outside = rotation.head_dim - 2 * rotation.pairs;
  bool fits = rotary::can_use_vectors<T>(rotation) && outside % (2 * core::vector_width<T>) == 0;
  for (const void* data :
       {arguments.weight[0], arguments.weight[1], arguments.bias[0], arguments.bias[1]}) {
    fits = fits && reinterpret_cast<uintptr_t>(data) % rotary::vector_bytes == 0;
  }
  return fits;
}

/// Keeps a head's 1 / deviation for the backward pass, if it is needed.
template <typename T, int capacity>
__device__ void keep_rstd(const Launch<T, capacity>& launch, const Norms<Compute<T>>& norms,
                          const Token& token, int head, Compute<T> rstd) {
  const int r = head >= launch.query_heads;
  if (norms.rstd[r] == nullptr) return;
  norms.rstd[r][token.number * launch.views[r].heads + own_head(launch, head)] = rstd;
}

/// Mean and 1 / deviation of a row, or of a token's rows; the mean is 0 unless it is subtracted.
template <typename C>
struct Moments {
  C mean, rstd;

  /// From mean_of(squares, mean), the mean of the elements, or of their squared distances.
  template <bool usual, typename Mean>
  __device__ static Moments of(const Norms<C>& norms, const Mean& mean_of) {
    const C mean = !usual && norms.centred ? mean_of(false, C(0)) : C(0);
    return {mean, core::reciprocal_sqrt(mean_of(true, mean) + norms.eps)};
  }
};

/// Adds the elements to `sum`, or the squares of their distances from `mean`.
template <typename C, int size>
__device__ C add(const Pack<C, size>& pack, bool squares, C mean, C sum) {
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const C x = pack.element[i] - mean;
    sum = squares ? core::fma(x, x, sum) : sum + x;
  }
  return sum;
}

template <typename T, int size>
__device__ void round(Pack<Compute<T>, size>* pack) {
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] = rotary::rounded<T>(pack->element[i]);
}

/// Normalises elements and applies the parameters of their columns. `column`: among a norm's.
template <bool usual, typename T, int size>
__device__ void apply(const Norms<Compute<T>>& norms, const Moments<Compute<T>>& moments, int r,
                      int64_t column, Pack<Compute<T>, size>* pack) {
  const auto weight = weights<T, size, usual>(norms, r, column);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    pack->element[i] = (pack->element[i] - moments.mean) * moments.rstd;
  }
  if (!usual && norms.row_rounding == RowRounding::before_weight) round<T>(pack);
#pragma unroll
  for (int i = 0; i < size; ++i) pack->element[i] *= weight.element[i];
  if (!usual && norms.bias[r] != nullptr) {
    const auto bias = parameters<T, size>(norms.wide_parameters, norms.bias[r], column);
#pragma unroll
    for (int i = 0; i < size; ++i) pack->element[i] += bias.element[i];
  }
  if (!usual && norms.row_rounding != RowRounding::once) round<T>(pack);
}

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
template <bool usual, typename T, int capacity>
__device__ bool begin_any_token(const rotary::TableLaunch<T, capacity>& launch, const Token& token,
                                Compute<T>* sines, Compute<T>* cosines) {
  if (usual || launch.cosines == nullptr) return begin_token(launch, token, sines, cosines);
  __syncthreads();  // until the previous token's angles have been read
  for (int pair = threadIdx.x; pair < launch.pairs; pair += blockDim.x) {
    read_table(launch, token, pair, sines + pair, cosines + pair);
  }
  __syncthreads();
  return true;
}

/// A thread's share of a head, in memory order.
template <typename T, int size>
struct Window {
  Pack<T, size> first, second;
};

/// Normalises and rotates tokens; make_writer(token) returns what receives a token's results.
/// Options are branches that all threads take alike; see is_usual().
template <typename T, int size, bool interleaved, bool usual, int capacity, typename MakeWriter>
__device__ void norm_tokens(const rotary::TableLaunch<T, capacity>& launch,
                            const Norms<Compute<T>>& norms, const MakeWriter& make_writer) {
  constexpr int in_flight = usual ? rotary::heads_in_flight : 1;
  const bool all_heads = !usual && norms.all_heads;
  using C = Compute<T>;
  using Owned = rotary::Pairs<C, size, interleaved>;
  __shared__ C sines[capacity], cosines[capacity];
  if (threadIdx.x == 0) rotary::apart_token() = -1;  // visible after begin_any_token()
  core::wait_for_previous_kernel();
  const HeadThreads threads(launch.threads_per_head);
  const OwnedColumns<size, interleaved> columns(launch, threads.index);
  const int begin = static_cast<int>(blockIdx.y) * launch.heads_of_block;
  const int end = min(launch.heads, begin + launch.heads_of_block), step = launch.heads_per_pass;
  const bool owns = columns.exist && threads.group < step;
  const C inverse_dim = C(1) / static_cast<C>(norms.head_dim);

  for (int64_t number = blockIdx.x; number < launch.tokens; number += gridDim.x) {
    const Token token = token_of(launch, number);
    const rotary::TokenHeads<T, size, capacity> heads(launch, token);
    const auto read_head = [&](int head, int last) {
      Window<T, size> window = {};
      if (!owns || head >= last) return window;
      const T* in = heads.row(head).in - launch.start[0];
      window.first = Pack<T, size>::read(in + columns.first);
      if (columns.has_second) window.second = Pack<T, size>::read(in + columns.second);
      return window;
    };
    // This thread's share of the sum over a head's row.
    const auto add_row = [&](const Owned& owned, bool squares, C mean, C sum) {
      sum = add(owned.first, squares, mean, sum);
      return columns.has_second ? add(owned.second, squares, mean, sum) : sum;
    };
    // The loads of the first heads are issued before the position is known, and those of the next
    // heads before the threads wait for each other's sums.
    Window<T, size> ahead[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) ahead[i] = read_head(begin + threads.group + i * step, end);
    const bool rotated = begin_any_token<usual>(launch, token, sines, cosines) && columns.in_window;
    const auto angles = columns.in_window ? rotary::angles_of<C>(columns.window, sines, cosines)
                                          : rotary::Angles<C, size>{};
    const bool apart = !usual && rotary::apart_token() == number;
    const auto writer = make_writer(token);
    Moments<C> moments[2] = {};
    for (int r = 0; all_heads && r < 2; ++r) {
      const int from = r == 0 ? 0 : launch.query_heads;
      const int last = r == 0 ? launch.query_heads : launch.heads;
      const C count = static_cast<C>(static_cast<int64_t>(last - from) * norms.head_dim);
      if (from == last) continue;
      moments[r] = Moments<C>::template of<usual>(norms, [&](bool squares, C mean) {
        C sum = 0;
        for (int head = from + threads.group; owns && head < last; head += step) {
          const auto window = read_head(head, last);
          sum = add_row({widen(window.first), widen(window.second)}, squares, mean, sum);
        }
        return sum_of_group(static_cast<int>(blockDim.x), 0, sum) / count;
      });
    }
    const auto process = [&](int head, Window<T, size>* next) {
      const int r = head >= launch.query_heads;
      const bool active = owns && head < end;
      Owned owned = {widen(next->first), widen(next->second)};
      *next = read_head(head + in_flight * step, end);
      Moments<C> of_head = r == 0 ? moments[0] : moments[1];
      if (!all_heads) {
        of_head = Moments<C>::template of<usual>(norms, [&](bool squares, C mean) {
          const C sum = active ? add_row(owned, squares, mean, C(0)) : C(0);
          return sum_of_group(threads.count, threads.group, sum) * inverse_dim;
        });
      }
      if (!active) return;
      if (threads.index == 0) keep_rstd(launch, norms, token, head, of_head.rstd);
      const int64_t column = all_heads ? int64_t{own_head(launch, head)} * norms.head_dim : 0;
      apply<usual, T>(norms, of_head, r, column + columns.first, &owned.first);
      if (columns.has_second)
        apply<usual, T>(norms, of_head, r, column + columns.second, &owned.second);
      const auto products = usual ? RowProducts::without_tables
                                  : products_of(norms.row_rounding, launch.product_rounding);
      if (rotated && !apart && products == RowProducts::without_tables) {
        owned.rotate(angles);
      } else if (rotated) {
        rotate_in_steps<T>(
            columns.window, products,
            [&](int i, int pair) {
              return apart ? table_angle(launch, token, /*head=*/0, pair) : angles.of(i);
            },
            &owned);
      }
      T* const out = heads.row(head).out - launch.start[0];
      writer.write(narrow<T, size>(owned.first), out + columns.first, head, columns.first);
      if (columns.has_second) {
        writer.write(narrow<T, size>(owned.second), out + columns.second, head, columns.second);
      }
    };
    // Counted: rotary_norm::norm_kernel<*, true>, 12 vectors an iteration
    for (int pass = begin; pass < end;) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i, pass += step) {
        if (pass < end) process(pass + threads.group, &ahead[i]);
      }
    }
  }
}

/// Divides a launch's heads among blocks of whole warps; a block takes all heads of a token that
/// are normalised together.
template <typename T, int capacity>
cudaLaunchConfig_t share_rows(Launch<T, capacity>* launch, int size, bool all_heads,
                              core::CudaStream stream) {
  auto config = share_heads(launch, size, stream, threads_of_head(*launch, size));
  if (all_heads) {
    launch->heads_of_block = launch->heads;
    config.gridDim.y = 1;
  }
  return config;
}

/// Launches a pass with packs for heads of up to 256 rotated components, whose arguments are short,
/// and one element at a time for others.
template <typename T, typename Pass>
const char* launch_pass(const Pass& pass, bool fits_vectors, core::CudaStream stream) {
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
