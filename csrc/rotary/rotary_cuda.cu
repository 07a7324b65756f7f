// Rotary embedding on CUDA. A block rotates some or all heads of one token and computes its sines
// and cosines once, in shared memory, without a table. A thread owns both members of its pairs, so
// every element is read and written once and rotation in place is safe.
#include "core/block_reduce.h"
#include "rotary/rotary.h"
#include "rotary/rotary_cuda.h"

namespace posembed::rotary {
namespace {

/// The turns that a launch carries; by tables, none.
template <int capacity, Form form>
constexpr int carried = reads_tables<form> ? 1 : capacity;

template <typename T, int capacity, Form form>
using RotateLaunch = LaunchOf<T, carried<capacity, form>, form>;

/// The number of tables of a block: one shared by query and key; with xPos, one for each.
template <typename T, int capacity, Form form>
struct Tables {
  static constexpr bool decaying = form == Form::decaying;
  static constexpr int count = decaying ? 2 : 1;
  Compute<T> sine[count][capacity], cosine[count][capacity];
  Compute<T> outer[count][decaying ? capacity : 1];

  __device__ void fill(const RotateLaunch<T, capacity, form>& launch, const Token& token,
                       const PairAt<T>& at) {
    const int pair = at.pair;
    if constexpr (reads_tables<form>) {
      read_table<form>(launch, token, pair, &sine[0][pair], &cosine[0][pair]);
    } else {
      angle_of(launch, at, &sine[0][pair], &cosine[0][pair]);
    }
    if constexpr (decaying) decay(launch, pair, at.position);
  }

  template <int size, bool interleaved>
  __device__ void read(int r, const PackColumns<size, interleaved>& columns,
                       Angles<T, size, form>* angles) const {
    if constexpr (form == Form::pairs) {
      read_pairs(columns, angles);
    } else {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        const int pair = columns.pair(i);
        angles->sine[i] = sine[r][pair];
        angles->cosine[i] = cosine[r][pair];
        if constexpr (decaying) angles->outer[i] = outer[r][pair];
      }
    }
  }

 private:
  template <int size, bool interleaved>
  __device__ void read_pairs(const PackColumns<size, interleaved>& columns,
                             Angles<T, size, Form::pairs>* angles) const {
#pragma unroll
    for (int i = 0; i < (interleaved ? size : size / 2); ++i) {
      const int pair = columns.pair(interleaved ? i : 2 * i), next = interleaved ? pair : pair + 1;
      const float first = sine[0][pair];
      angles->sine[i] = core::pair_of(interleaved ? -first : first, sine[0][next]);
      angles->cosine[i] = core::pair_of(cosine[0][pair], cosine[0][next]);
    }
  }

  __device__ void decay(const RotateLaunch<T, capacity, form>& launch, int pair,
                        const core::Position& position) {
    const Compute<T> s = sine[0][pair], c = cosine[0][pair];
    const double distance = core::to_double(position) - launch.decay_center;
#pragma unroll
    for (int r = 0; r < count; ++r) {
      const double sign = r == 0 ? launch.decay_sign : -launch.decay_sign;
      const Amplitude amplitude =
          amplitude_at<Compute<T>>(core::through_data_cache(launch.decay)[pair], sign * distance);
      sine[r][pair] = static_cast<Compute<T>>(s * amplitude.inner);
      cosine[r][pair] = static_cast<Compute<T>>(c * amplitude.inner);
      outer[r][pair] = static_cast<Compute<T>>(amplitude.outer);
    }
  }
};

struct NoTurns {
  template <typename... Ignored>
  __device__ explicit NoTurns(const Ignored&...) {}
};

/// What a thread keeps from token to token.
template <typename T, int size, Form form>
using OwnTurns = std::conditional_t<form == Form::by_head, HeadTurns<T, size>, NoTurns>;

/// Calls rotate(rounding) with the rounding as a constant.
template <typename Rotate>
__device__ void visit_rounding(ProductRounding rounding, const Rotate& rotate) {
  switch (rounding) {
    case ProductRounding::none:
      return rotate(std::integral_constant<ProductRounding, ProductRounding::none>());
    case ProductRounding::to_data_type:
      return rotate(std::integral_constant<ProductRounding, ProductRounding::to_data_type>());
    case ProductRounding::fused:
      return rotate(std::integral_constant<ProductRounding, ProductRounding::fused>());
  }
}

/// Rotates the pairs that a thread owns by angle(i), as tables are used.
template <typename Owned, typename Angle>
__device__ void rotate_by_tables(ProductRounding rounding, const Angle& angle, Owned* owned) {
  visit_rounding(rounding, [&](auto constant) {
    owned->template rotate_in_steps<decltype(constant)::value>(angle);
  });
}

template <typename T, int size, bool interleaved, int capacity, Form form>
__device__ void rotate_owned(const RotateLaunch<T, capacity, form>& launch,
                             const Angles<T, size, form>& angles,
                             Pairs<T, size, interleaved>* owned) {
  if constexpr (form == Form::pairs) {
    owned->rotate_pairs(angles);
  } else if constexpr (reads_tables<form>) {
    rotate_by_tables(
        launch.product_rounding, [&](int i) { return angles.of(i); }, owned);
  } else {
    owned->rotate(angles);
  }
}

/// Rotates heads [begin, end) of a token by tables that have a value for each component of a pair.
/// The block's threads share the pairs one by one, with few registers: such tables are rare.
template <Form form, typename T, int size, int capacity>
__device__ void rotate_apart(const TableLaunch<T, capacity>& launch, const Token& token,
                             const TokenHeads<T, size, capacity>& heads, int begin, int end) {
  const int pairs = launch.pairs, count = (end - begin) * pairs;
#pragma unroll 1
  for (int item = threadIdx.x; item < count; item += blockDim.x) {
    const int pair = item % pairs;
    const Row<T> row = heads.row(begin + item / pairs);
    const int first = launch.interleaved ? 2 * pair : pair;
    const int second = first + (launch.interleaved ? 1 : pairs);
    const auto angle = table_angle<form>(launch, token, /*head=*/0, pair);
    T x = row.in[first], y = row.in[second];
    const auto rounding =
        form == Form::pairs ? ProductRounding::to_data_type : launch.product_rounding;
    visit_rounding(rounding, [&](auto constant) {
      rotate_in_steps<decltype(constant)::value>(x, y, angle, &x, &y);
    });
    row.out[first] = x;
    row.out[second] = y;
  }
}

template <typename T, int size, bool interleaved, int capacity, Form form>
__global__ void __launch_bounds__(max_threads<size>, min_blocks<size, 3>)
    rotate_kernel(const __grid_constant__ RotateLaunch<T, capacity, form> launch) {
  using Owned = Pairs<T, size, interleaved>;
  constexpr int in_flight = form == Form::own || form == Form::by_head ? 1 : heads_in_flight;
  __shared__ Tables<T, capacity, form> tables;
  constexpr bool may_be_apart = reads_tables<form> && form != Form::head_table;
  if constexpr (may_be_apart) {
    if (threadIdx.x == 0) apart_token() = -1;  // visible to the block after fill_angles()
  }
  core::wait_for_previous_kernel();
  const HeadThreads threads(launch.threads_per_head);
  const PackColumns<size, interleaved> columns(threads.index, launch.pairs, launch.interleaved);

  const bool owns_heads = launch.pairs > 0 && threads.group < launch.heads_per_pass;
  const int begin = static_cast<int>(blockIdx.y) * launch.heads_of_block;
  const int end = min(launch.heads, begin + launch.heads_of_block);
  const int own = own_head(launch, min(begin + threads.group, launch.heads - 1));
  const OwnTurns<T, size, form> turns(launch, own, columns);

  for (int64_t number = blockIdx.x; number < launch.tokens; number += gridDim.x) {
    const Token token = token_of(launch, number);
    const TokenHeads<T, size, carried<capacity, form>> heads(launch, token);
    Owned owned[in_flight];
    const auto read_head = [&](int slot, int head) {
      if (head >= end) return;
      const Row<T> row = heads.row(head);
      owned[slot].first = Pack<T, size>::read(row.in + columns.first);
      owned[slot].second = Pack<T, size>::read(row.in + columns.second);
    };
    // Issue the loads of the first rows before the position is known, and those of the next rows
    // when a row is done.
    int head = owns_heads ? begin + threads.group : end;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) read_head(i, head + i * launch.heads_per_pass);

    Angles<T, size, form> angles;
    bool rotated;
    if constexpr (form == Form::own) {
      rotated = own_angles(launch, token, columns, &angles);
    } else if constexpr (form == Form::by_head) {
      rotated = head_angles(launch, token, own, turns, columns, &angles);
    } else if constexpr (form == Form::head_table) {
      rotated = visit_axes(launch, token, [](int, const core::Position&) {});
    } else {
      rotated =
          fill_angles(launch, token, [&](const PairAt<T>& at) { tables.fill(launch, token, at); });
      tables.read(0, columns, &angles);
    }
    if constexpr (may_be_apart) {
      if (__builtin_expect(rotated && apart_token() == number, 0)) {
        rotate_apart<form>(launch, token, heads, begin, end);
        head = end;
      }
    }

    while (head < end) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i, head += launch.heads_per_pass) {
        if (head >= end) break;
        if constexpr (form == Form::decaying) {
          tables.read(head >= launch.query_heads, columns, &angles);
        }
        if constexpr (form == Form::head_table) {
          const auto angle = [&](int k) {
            return table_angle(launch, token, own_head(launch, head), columns.pair(k));
          };
          if (rotated) rotate_by_tables(launch.product_rounding, angle, &owned[i]);
        } else {
          if (rotated)
            rotate_owned<T, size, interleaved, capacity, form>(launch, angles, &owned[i]);
        }
        const Row<T> row = heads.row(head);
        if (rotated || (row.in != row.out && !launch.tangent)) {
          owned[i].first.write(row.out + columns.first);
          owned[i].second.write(row.out + columns.second);
        }
        read_head(i, head + in_flight * launch.heads_per_pass);
      }
    }
    if (launch.tangent) continue;
    constexpr int copies = form == Form::exact || form == Form::pairs ? 4 : 2;  // without spills
    copy_outside<copies>(launch, heads, 0, begin, min(end, launch.query_heads));
    copy_outside<copies>(launch, heads, 1, max(begin, launch.query_heads), end);
  }
}

template <typename T, int size, bool interleaved, int capacity, Form form>
const char* launch_kernel(const Arguments& arguments, core::CudaStream stream) {
  auto launch = make_launch<T, carried<capacity, form>, form>(arguments);
  if (launch.heads == 0) return nullptr;
  cudaLaunchConfig_t config;
  if constexpr (form == Form::by_head) {
    config = spread_own_heads(&launch, size, stream);
  } else {
    config = form == Form::own ? spread_heads(&launch, size, stream)
                               : share_heads(&launch, size, stream);
  }
  cudaLaunchKernelEx(&config, rotate_kernel<T, size, interleaved, capacity, form>, launch);
  return core::launch_error();
}

/// Whether threads compute the angles of their own pairs: all heads of all tokens run at once, as
/// in decoding.
template <int size>
bool owns_angles(const Arguments& arguments) {
  if (size == 1 || arguments.pairs == 0 || arguments.pairs > 64) return false;
  if (arguments.positions.floating || arguments.frequencies.data != nullptr) return false;
  int64_t heads = 0;
  for (int64_t r = 0; r < arguments.count; ++r) heads += arguments.views[r].heads;
  const int64_t threads = arguments.batch * arguments.seq * heads * (arguments.pairs / size);
  return threads <= int64_t{96} * core::multiprocessors();
}

template <typename T, int size, bool interleaved>
const char* launch_capacity(const Arguments& arguments, core::CudaStream stream) {
  if constexpr (size == 1) {  // tables of each head are rare
    if (arguments.table_head_stride != 0) {
      return launch_kernel<T, size, interleaved, max_pairs, Form::head_table>(arguments, stream);
    }
  }
  if (arguments.cosines != nullptr) {
    if constexpr (std::is_same_v<T, core::BFloat16> && size > 1) {
      if (arguments.product_rounding == ProductRounding::to_data_type &&
          arguments.table_scalar == core::Scalar::bfloat16) {
        return launch_kernel<T, size, interleaved, max_pairs, Form::pairs>(arguments, stream);
      }
    }
    return launch_kernel<T, size, interleaved, max_pairs, Form::table>(arguments, stream);
  }
  if (arguments.decay != nullptr) {
    return launch_kernel<T, size, interleaved, max_pairs, Form::decaying>(arguments, stream);
  }
  if (is_by_head(arguments) && arguments.pairs > 0) {
    return launch_kernel<T, size, interleaved, max_pairs, Form::by_head>(arguments, stream);
  }
  if constexpr (size > 1) {
    if (owns_angles<size>(arguments)) {
      return launch_kernel<T, size, interleaved, 64, Form::own>(arguments, stream);
    }
  }
  if constexpr (size > 1) {
    // Most models have at most 64 pairs, and a launch with fewer argument bytes is quicker.
    if (arguments.pairs <= 64) {
      return launch_kernel<T, size, interleaved, 64, Form::exact>(arguments, stream);
    }
  }
  return launch_kernel<T, size, interleaved, max_pairs, Form::exact>(arguments, stream);
}

template <typename T, int size>
const char* launch_pairing(const Arguments& arguments, core::CudaStream stream) {
  return with_pairing<size>(arguments, [&](auto interleaved) {
    return launch_capacity<T, size, interleaved()>(arguments, stream);
  });
}

// ---- the gradient of frequencies ----
// A block sums a chunk of tokens, and a thread sums packs of pairs over some of the tokens and
// heads. A second kernel adds the chunks. There are no atomics, so results are deterministic.

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

const char* rotate_cuda(const Arguments& arguments, core::CudaStream stream) {
  // Empty tables have a null address, and the address decides the form of a launch.
  if (arguments.batch * arguments.seq == 0) return nullptr;
  if (arguments.windows != nullptr) {
    const char* error = nullptr;
    for_each_window(arguments, [&](const Arguments& part) {
      if (error == nullptr) error = rotate_cuda(part, stream);
    });
    return error;
  }
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return can_use_vectors<T>(arguments) && arguments.table_head_stride == 0
               ? launch_pairing<T, core::vector_width<T>>(arguments, stream)
               : launch_pairing<T, 1>(arguments, stream);
  });
}

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
