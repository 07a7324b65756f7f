// As in the rotary kernel, a block processes some or all heads of one token. A thread owns two
// packs of a head: both members of its pairs, or components outside the window. The threads of a
// head reduce their squares with shuffles. In the backward pass each of a fixed number of blocks
// takes a share of the tokens and sums its part of the weights' gradients; there are no atomics.
#include "core/block_reduce.h"
#include "rotary/rotary_cuda.h"
#include "rotary_norm/rotary_norm.h"
#include "rotary_norm/rotary_norm_cuda.h"

namespace posembed::rotary_norm {
namespace {

/// Sines and cosines of a token times the weights of query or key, in shared memory.
template <typename C, int pairs>
struct alignas(16) Coefficients {
  C first_cosine[pairs], first_sine[pairs];    // times the weight of the first member
  C second_cosine[pairs], second_sine[pairs];  // and of the second

  __device__ void set(int pair, C sine, C cosine, C first_weight, C second_weight) {
    first_cosine[pair] = cosine * first_weight;
    first_sine[pair] = sine * first_weight;
    second_cosine[pair] = cosine * second_weight;
    second_sine[pair] = sine * second_weight;
  }

  /// Normalises and rotates pairs and multiplies them by the weights.
  template <int size, bool interleaved>
  __device__ void apply(const rotary::PackColumns<size, interleaved>& columns, C rstd,
                        rotary::Pairs<C, size, interleaved>* owned) const {
    constexpr int run = interleaved ? size / 2 : 4;  // neighbouring pairs
#pragma unroll
    for (int i = 0; i < size; i += run) {
      C c1[run], s1[run], c2[run], s2[run];
      core::load_values<run>(first_cosine + columns.pair(i), c1);
      core::load_values<run>(first_sine + columns.pair(i), s1);
      core::load_values<run>(second_cosine + columns.pair(i), c2);
      core::load_values<run>(second_sine + columns.pair(i), s2);
#pragma unroll
      for (int k = 0; k < run; ++k) {
        const C x = owned->a(i + k) * rstd, y = owned->b(i + k) * rstd;
        owned->a(i + k) = core::fma(x, c1[k], -(y * s2[k]));
        owned->b(i + k) = core::fma(y, c2[k], x * s1[k]);
      }
    }
  }
};

/// RMSNorm of each head and exact angles, for heads without components outside the window of
/// `pairs` pairs. Multiplies a token's sines and cosines by the weights first, which rounds
/// products differently.
template <typename T, int size, bool interleaved, int pairs>
__global__ void __launch_bounds__(rotary::threads_wanted, 3)
    whole_heads_kernel(const __grid_constant__ Launch<T, pairs> launch,
                       const __grid_constant__ Norms<Compute<T>> norms) {
  using C = Compute<T>;
  using Owned = rotary::Pairs<C, size, interleaved>;
  constexpr int in_flight = rotary::heads_in_flight;
  constexpr int threads_per_head = pairs / size;
  __shared__ Coefficients<C, pairs> coefficients[2];
  core::wait_for_previous_kernel();
  const int index = static_cast<int>(threadIdx.x) % threads_per_head;
  const int group = static_cast<int>(threadIdx.x) / threads_per_head;
  const rotary::PackColumns<size, interleaved> columns(index, pairs, interleaved);
  const int begin = static_cast<int>(blockIdx.y) * launch.heads_of_block;
  const int end = min(launch.heads, begin + launch.heads_of_block);
  const int step = launch.heads_per_pass, group_end = group < step ? end : 0;

  for (int64_t number = blockIdx.x; number < launch.tokens; number += gridDim.x) {
    const Token token = token_of(launch, number);
    int head = begin + group;
    const rotary::TokenHeads<T, size, pairs> heads(launch, token);
    const auto read_head = [&](int next) {
      Window<T, size> window = {};
      if (next < group_end) {
        const T* in = heads.row(next).in + columns.first;
        window.first = Pack<T, size>::read(in);
        window.second = Pack<T, size>::read(in + pairs);
      }
      return window;
    };
    // The loads of the first heads are issued before the position is known, and those of the next
    // heads before the threads wait for each other's squares.
    Window<T, size> ahead[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) ahead[i] = read_head(head + i * step);
    const bool rotated = fill_angles(launch, token, [&](const rotary::PairAt<T>& at) {
      C sine, cosine;
      angle_of(launch, at, &sine, &cosine);
      const int first = interleaved ? 2 * at.pair : at.pair;
      const int second = interleaved ? first + 1 : first + pairs;
      for (int r = 0; r < 2; ++r) {
        coefficients[r].set(at.pair, sine, cosine, weights<T, 1, true>(norms, r, first).element[0],
                            weights<T, 1, true>(norms, r, second).element[0]);
      }
    });
    for (int pass = begin; pass < end;) {
#pragma unroll
      for (int i = 0; i < in_flight; ++i, pass += step, head += step) {
        if (pass >= end) break;
        Owned owned = {widen(ahead[i].first), widen(ahead[i].second)};
        ahead[i] = read_head(head + in_flight * step);
        C squares = add(owned.second, true, C(0), add(owned.first, true, C(0), C(0)));
#pragma unroll
        for (int lanes = threads_per_head / 2; lanes > 0; lanes /= 2) {
          squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
        }
        if (head >= group_end) continue;
        const int r = head >= launch.query_heads;
        const C rstd = core::reciprocal_sqrt(squares * (C(1) / (2 * pairs)) + norms.eps);
        if (index == 0) keep_rstd(launch, norms, token, head, rstd);
        if (rotated) {
          coefficients[r].apply(columns, rstd, &owned);
        } else {
          apply<true, T>(norms, {C(0), rstd}, r, columns.first, &owned.first);
          apply<true, T>(norms, {C(0), rstd}, r, columns.second, &owned.second);
        }
        T* const out = heads.row(head).out + columns.first;
        narrow<T, size>(owned.first).write(out);
        narrow<T, size>(owned.second).write(out + pairs);
      }
    }
  }
}

// ---- backward ----

/// The distances from a group's head to its next one, in elements.
struct Steps {
  int64_t gradient, row, out, rstd;
};

/// Where a group's next head is: in the same token, in the next one, or in the next sample.
enum Next { next_head, next_token, next_sample };

/// Additional arguments of the backward launch.
template <typename C>
struct Backward {
  HeadView normed[2];
  Steps steps[2][3];
  C* partial;  // [parts, 2, head_dim]
  int64_t parts;
  int groups[2];  // groups of threads that process heads of query, and of key
  int passes;     // heads of a token that a group processes
};

/// The maximum number of threads of a backward block, at least two heads': three blocks of packs
/// fit a multiprocessor.
template <int size>
constexpr int backward_threads = size == 8   ? 160
                                 : size == 4 ? 192
                                             : 2 * int{rotary::max_pairs};

/// A thread owns the same columns of some heads, of query or of key, for all tokens of its block,
/// and keeps its part of the weight's gradient in registers. The next head is in flight while one
/// is processed.
template <typename T, int size, bool interleaved, int capacity>
__global__ void __launch_bounds__(backward_threads<size>, rotary::min_blocks<size, 3>)
    backward_kernel(const __grid_constant__ Launch<T, capacity> launch,
                    const __grid_constant__ Norms<Compute<T>> norms,
                    const __grid_constant__ Backward<Compute<T>> backward) {
  using C = Compute<T>;
  using Owned = rotary::Pairs<C, size, interleaved>;
  __shared__ C sines[capacity], cosines[capacity];
  // Weights [2, head_dim], then sums [groups, head_dim].
  alignas(16) __shared__ C shared[backward_threads<size> * 2 * size];
  const HeadThreads threads(launch.threads_per_head);
  const OwnedColumns<size, interleaved> columns(launch, threads.index);
  const int dim = norms.head_dim, r = threads.group >= backward.groups[0];
  for (int i = threadIdx.x; i < 2 * dim; i += blockDim.x) {  // read after begin_token()'s barrier
    shared[i] = weights<T, 1, /*usual=*/false>(norms, i / dim, i % dim).element[0];
  }
  const C* const weights = shared + r * dim;
  const C inverse = C(1) / static_cast<C>(dim);
  const int64_t begin = blockIdx.x * launch.tokens / backward.parts;
  const int64_t end = (blockIdx.x + 1) * launch.tokens / backward.parts;
  Token token = token_of(launch, begin);
  const HeadView& view = launch.views[r];
  const int first_head = threads.group - (r == 0 ? 0 : backward.groups[0]);
  const bool exists = columns.exist && threads.group < backward.groups[0] + backward.groups[1];
  const int heads = exists ? static_cast<int>(view.heads) : 0, step = backward.groups[r];

  // The addresses of the head that is in flight, and of the result of the one that is processed.
  const T* in = static_cast<const T*>(view.in) + offset_of(token, first_head, view.in_stride);
  const HeadView& normed = backward.normed[r];
  const T* x = static_cast<const T*>(normed.in) + offset_of(token, first_head, normed.in_stride);
  T* out = static_cast<T*>(view.out) + offset_of(token, first_head, view.out_stride);
  const C* rstds = norms.rstd[r] + begin * view.heads + first_head;
  Window<T, size> next_gradient = {}, next_row = {};
  C next_rstd = 0;
  const auto fetch = [&] {
    next_gradient.first = Pack<T, size>::read(in + columns.first);
    next_row.first = Pack<T, size>::read(x + columns.first);
    if (columns.has_second) {
      next_gradient.second = Pack<T, size>::read(in + columns.second);
      next_row.second = Pack<T, size>::read(x + columns.second);
    }
    next_rstd = *rstds;
  };
  int left = static_cast<int>(end - begin);
  if (left > 0 && first_head < heads) fetch();
  Owned sums = {};
  for (; left > 0; --left) {
    const bool rotated = begin_token(launch, token, sines, cosines) && columns.in_window;
    int after_last = next_token;
    ++token.number;
    if (++token.seq == launch.seq.value) {
      token.seq = 0;
      ++token.batch;
      after_last = next_sample;
    }
    // Counted: rotary_norm::backward_kernel, 6 vectors an iteration
    for (int pass = 0, head = first_head; pass < backward.passes; ++pass) {
      Owned gradient = {widen(next_gradient.first), widen(next_gradient.second)};
      const Owned row = {widen(next_row.first), widen(next_row.second)};
      const C rstd = next_rstd;
      const bool active = head < heads, last = pass + 1 == backward.passes;
      const Steps& steps = backward.steps[r][last ? after_last : next_head];
      head = last ? first_head : head + step;
      in += steps.gradient;
      x += steps.row;
      rstds += steps.rstd;
      if (head < heads && !(last && left == 1)) fetch();
      if (rotated) gradient.rotate(rotary::angles_of<C>(columns.window, sines, cosines));
      // Turns `g` into the gradient of the normalised row times rstd.
      const auto through_weight = [&](Pack<C, size>* g, const Pack<C, size>& n, int column,
                                      Pack<C, size>* sum) {
        C weight[size], projection = 0;
        core::load_values<size>(weights + column, weight);
#pragma unroll
        for (int i = 0; i < size; ++i) {
          C& scaled = g->element[i];
          scaled *= rstd;
          sum->element[i] = core::fma(scaled, n.element[i], sum->element[i]);
          scaled *= weight[i];
          projection = core::fma(scaled, n.element[i], projection);
        }
        return projection;
      };
      C projection = 0;
      if (active) {
        projection = through_weight(&gradient.first, row.first, columns.first, &sums.first);
        if (columns.has_second) {
          projection += through_weight(&gradient.second, row.second, columns.second, &sums.second);
        }
      }
      projection = sum_of_group(threads.count, threads.group, projection);
      const C factor = -(projection * inverse * rstd * rstd);
      const auto through_norm = [&](Pack<C, size>* g, const Pack<C, size>& n, int column) {
#pragma unroll
        for (int i = 0; i < size; ++i) {
          g->element[i] = core::fma(n.element[i], factor, g->element[i]);
        }
        narrow<T, size>(*g).write(out + column);
      };
      if (active) {
        through_norm(&gradient.first, row.first, columns.first);
        if (columns.has_second) through_norm(&gradient.second, row.second, columns.second);
      }
      out += steps.out;
    }
  }
  __syncthreads();  // the weights are no longer read
  if (exists) {
    C* const to = shared + threads.group * dim;
    core::store_values<size>(sums.first.element, to + columns.first);
    if (columns.has_second) core::store_values<size>(sums.second.element, to + columns.second);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
    const int tensor = i / dim, first = tensor == 0 ? 0 : backward.groups[0];
    C sum = 0;
    for (int group = first; group < first + backward.groups[tensor]; ++group) {
      sum += shared[group * dim + i % dim];
    }
    backward.partial[blockIdx.x * int64_t{2} * dim + i] = sum;
  }
}

/// Lanes process neighbouring columns of the weights' gradients; a block's warps share the parts.
template <typename T>
__global__ void __launch_bounds__(core::part_threads)
    add_parts_kernel(const __grid_constant__ BackwardArguments b) {
  using C = Compute<T>;
  const int64_t dim = b.forward.rotation.head_dim, columns = 2 * dim;
  const int64_t column = core::part_column();
  const C sum = core::sum_of_parts(static_cast<const C*>(b.partial), b.parts, columns, columns);
  if (!core::writes_parts() || column >= columns) return;
  void* const gradient = b.weight_gradient[column / dim];
  if (gradient == nullptr) return;
  if (has_wide_parameters(b.forward)) {
    static_cast<C*>(gradient)[column % dim] = sum;
  } else {
    core::store(sum, static_cast<T*>(gradient) + column % dim);
  }
}

// ---- launchers ----

struct BackwardPass {
  const BackwardArguments& arguments;

  const rotary::Arguments& rotation() const { return arguments.forward.rotation; }

  template <typename T, int size, bool interleaved, int capacity>
  const char* launch(core::CudaStream stream) const {
    using C = Compute<T>;
    auto launch = rotary::make_launch<T, capacity>(rotation());
    const int dim = static_cast<int>(rotation().head_dim);
    const int per_head = threads_of_head(launch, size);
    launch.threads_per_head = core::Divisor<int>::of(per_head);
    Backward<C> backward = {};
    std::copy(arguments.normed, arguments.normed + 2, backward.normed);
    backward.partial = static_cast<C*>(arguments.partial);
    backward.parts = arguments.parts;
    // The fewest passes, divided evenly: 40 heads are 20 and 20, not 32 and 8.
    int groups = 0;
    do {
      ++backward.passes;
      for (int r = 0; r < 2; ++r) {
        backward.groups[r] =
            static_cast<int>(core::divide_up(launch.views[r].heads, backward.passes));
      }
      groups = backward.groups[0] + backward.groups[1];
    } while (groups * per_head > backward_threads<size>);
    for (int r = 0; r < 2; ++r) {
      const int64_t heads = launch.views[r].heads,
                    rstd_stride[] = {launch.seq.value * heads, heads, 1};
      const auto distance = [&](const int64_t* stride, int next) {
        const int64_t head = backward.groups[r] * stride[2], back = (backward.passes - 1) * head;
        if (next == next_head) return head;
        return stride[1] - back +
               (next == next_token ? 0 : stride[0] - launch.seq.value * stride[1]);
      };
      for (int next = 0; next < 3; ++next) {
        backward.steps[r][next] = {
            distance(launch.views[r].in_stride, next), distance(backward.normed[r].in_stride, next),
            distance(launch.views[r].out_stride, next), distance(rstd_stride, next)};
      }
    }
    const int64_t warps = std::max<int64_t>(1, core::divide_up(groups * per_head, core::warp_size));
    core::launch(backward_kernel<T, size, interleaved, capacity>, arguments.parts,
                 static_cast<int>(warps) * core::warp_size, stream, launch,
                 make_norms<C>(arguments.forward), backward);
    core::launch(add_parts_kernel<T>, core::divide_up(2 * dim, core::warp_size), core::part_threads,
                 stream, arguments);
    return core::launch_error();
  }
};

/// Writes results to the rows that a launch has for them.
template <typename T, int size>
struct RowWriter {
  __device__ void write(const Pack<T, size>& pack, T* out, int /*head*/, int /*column*/) const {
    pack.write(out);
  }
};

template <typename T, int size, bool interleaved, int capacity, bool usual>
__global__ void __launch_bounds__(rotary::max_threads<size>, rotary::min_blocks<size, 2 + usual>)
    norm_kernel(const __grid_constant__ rotary::TableLaunch<T, capacity> launch,
                const __grid_constant__ Norms<Compute<T>> norms) {
  norm_tokens<T, size, interleaved, usual>(launch, norms,
                                           [](const Token&) { return RowWriter<T, size>{}; });
}

struct Forward {
  const Arguments& arguments;

  const rotary::Arguments& rotation() const { return arguments.rotation; }

  template <typename T, int size, bool interleaved, int capacity>
  const char* launch(core::CudaStream stream) const {
    auto launch = rotary::make_launch<T, capacity, rotary::Form::table>(rotation());
    if (launch.tokens == 0 || launch.heads == 0) return nullptr;
    const auto config = share_rows(&launch, size, arguments.all_heads, stream);
    const auto kernel = is_usual(arguments)
                            ? norm_kernel<T, size, interleaved, capacity, (size > 1)>
                            : norm_kernel<T, size, interleaved, capacity, false>;
    cudaLaunchKernelEx(&config, kernel, launch, make_norms<Compute<T>>(arguments));
    return core::launch_error();
  }

  template <typename T, int size, bool interleaved, int pairs>
  const char* launch_whole(core::CudaStream stream) const {
    auto launch = rotary::make_launch<T, pairs>(rotation());
    if (launch.tokens == 0 || launch.heads == 0) return nullptr;
    const cudaLaunchConfig_t config = share_heads(&launch, size, stream);
    cudaLaunchKernelEx(&config, whole_heads_kernel<T, size, interleaved, pairs>, launch,
                       make_norms<Compute<T>>(arguments));
    return core::launch_error();
  }
};

/// Heads of 64, 128 or 256 components that are all rotated have their own kernel.
template <typename T>
const char* launch_forward(const Arguments& arguments, core::CudaStream stream) {
  constexpr int size = core::vector_width<T>;
  const Forward pass{arguments};
  const rotary::Arguments& rotation = arguments.rotation;
  const bool fits = can_use_vectors<T>(arguments);
  if constexpr (size > 1) {
    const bool whole = fits && is_usual(arguments) && 2 * rotation.pairs == rotation.head_dim;
    const auto launch = [&](auto pairs) {
      return rotary::with_pairing<size>(rotation, [&](auto interleaved) {
        return pass.template launch_whole<T, size, interleaved(), pairs()>(stream);
      });
    };
    if (whole && rotation.pairs == 32) return launch(std::integral_constant<int, 32>());
    if (whole && rotation.pairs == 64) return launch(std::integral_constant<int, 64>());
    if (whole && rotation.pairs == 128) return launch(std::integral_constant<int, 128>());
  }
  return launch_pass<T>(pass, fits, stream);
}

template <typename T>
const char* launch_backward(const BackwardArguments& arguments, core::CudaStream stream) {
  rotary::Arguments normed = arguments.forward.rotation;  // its views are query and key
  std::copy(arguments.normed, arguments.normed + 2, normed.views);
  constexpr int64_t size = core::vector_width<T>;
  const bool fits = can_use_vectors<T>(arguments.forward) && rotary::can_use_vectors<T>(normed) &&
                    normed.head_dim <= size * backward_threads<size>;
  return launch_pass<T>(BackwardPass{arguments}, fits, stream);
}

}  // namespace

const char* norm_and_rotate_cuda(const Arguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    return launch_forward<typename decltype(tag)::type>(arguments, stream);
  });
}

const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    return launch_backward<typename decltype(tag)::type>(arguments, stream);
  });
}

}  // namespace posembed::rotary_norm
