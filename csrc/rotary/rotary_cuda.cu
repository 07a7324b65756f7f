// Rotary embedding on CUDA. A block rotates some or all heads of one token and computes its sines
// and cosines once, in shared memory, without a table. A thread owns both members of its pairs, so
// every element is read and written once and rotation in place is safe.
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

}  // namespace posembed::rotary
