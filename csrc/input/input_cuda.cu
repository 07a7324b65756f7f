// A team of one warp or a block keeps the sum of a token's rows in registers, while the rows of its
// next token are copied to shared memory. Backward: each of a fixed number of blocks processes its
// share of the tokens and has its own partial sums of the norm's gradients, which a second kernel
// adds in order. No atomics.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/block_reduce.h"
#include "core/device_vector.h"
#include "core/philox.h"
#include "input/input.h"
#include "input/input_cuda.h"

namespace posembed::input {
namespace {

using core::divide_up;

// ---- forward ----
// What tokens share stays in registers: the norm's weight and bias, and the row of a position,
// whose sinusoid is computed once for all its tokens.

/// Resident blocks of max_threads threads per multiprocessor.
constexpr int forward_blocks = 2;

/// The maximum shared memory of a block for rows of the type table.
constexpr int64_t max_type_bytes = 16 * 1024;

/// A sinusoid's turns per position as kernel arguments, for teams of one warp.
template <bool exists>
struct Turns {
  static constexpr int max_pairs =
      max_kept * core::vector_width<core::BFloat16> * core::warp_size / 2;
  core::Turn64 values[max_pairs];
};

template <>
struct Turns<false> {};

/// The norm's weight or bias, which all tokens share: in registers, or loaded again for each token
/// through the data cache if registers would spill. They would with many columns, and with float16,
/// which the compiler converts before the loop over tokens.
template <typename T, int width, int kept>
struct NormRow {
  static constexpr bool in_registers = kept * width < 32 && !std::is_same_v<T, core::Float16>;
  const T* row;
  Vector<T, width> vector[in_registers ? kept : 1] = {};

  template <typename RowColumns>
  __device__ NormRow(const RowColumns& columns, const void* data)
      : row(static_cast<const T*>(data)) {
    if (row == nullptr) return;
    row += columns.first;
    if constexpr (in_registers) {
      columns.for_each([&](int i, int offset) {
        vector[i] = *reinterpret_cast<const Vector<T, width>*>(row + offset);
      });
    }
  }

  __device__ Columns<T, width> columns(int i, int offset) const {
    if constexpr (in_registers) {
      return load_columns<T, width>(vector[i].values, 0);
    } else {
      return load_columns<T, width>(row, offset);
    }
  }
};

/// Fills a row with the sinusoid of a position.
template <typename T, int width, int kept, bool one_warp>
__device__ void fill_row(const sinusoidal::Sinusoid& sinusoid, const core::Turn64* turns,
                         int64_t position,
                         const RowColumns<T, width, kept, one_warp, true>& columns,
                         KeptRow<T, width, kept>* row) {
  const sinusoidal::Layout& layout = sinusoid.layout;
  const core::Position placed = sinusoidal::placed(sinusoid, {position, 0, 1.0});
  const float factor = static_cast<float>(sinusoid.scale) * static_cast<float>(placed.scale);
  const auto pair = [&](int64_t number, float* first, float* second) {
    float sine, cosine;
    sinusoidal::sincos_at(placed, turns[number], 0, factor, &sine, &cosine);
    *first = layout.cos_first ? cosine : sine;
    *second = layout.cos_first ? sine : cosine;
  };
  columns.for_each([&](int i, int offset) {
    auto& values = row->vector[i].values;
    const int64_t column = columns.first + offset;
    const bool in_second_half = column >= layout.half;
#pragma unroll
    for (int k = 0; k < width; k += 2) {
      if (layout.interleaved) {
        pair((column + k) / 2, &values[k], &values[k + 1]);
        continue;
      }
#pragma unroll
      for (int other = k; other < k + 2; ++other) {
        float first, second;
        pair(column + other - (in_second_half ? layout.half : 0), &first, &second);
        values[other] = in_second_half ? second : first;
      }
    }
  });
}

/// `whole`: all vectors of the threads are inside the row. Others cost a sixth more instructions.
/// `types`: rows of the type table that shared memory holds; 0: none.
template <typename T, int width, int kept, bool one_warp, bool sinusoids, bool whole>
__global__ void __launch_bounds__(max_threads, forward_blocks)
    forward_kernel(const __grid_constant__ ForwardArguments f, const __grid_constant__ Teams teams,
                   int types, const __grid_constant__ Turns<sinusoids> turns) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const size_t slot_bytes = sizeof(Vector<T, width>) * forward_rows * kept * blockDim.x;
  const auto kept_types = RowCells<C, width, kept, one_warp>::of(0, 0, slot_bytes);
  const RowColumns<T, width, kept, one_warp, whole> columns(a);
  for (int number = Member<one_warp>::team(); number < types; number += Member<one_warp>::teams()) {
    const T* type = static_cast<const T*>(a.type.data) + number * a.type.stride + columns.first;
    columns.for_each([&](int i, int offset) {
      kept_types.set(number, i, load_columns<T, width>(type, offset).values);
    });
  }
  if (types > 0) __syncthreads();
  const int64_t first = Member<one_warp>::number() * teams.tokens;
  int left = static_cast<int>(min(teams.tokens, a.batch * a.seq - first));
  if (left <= 0) return;

  const C scale = static_cast<C>(a.scale), inverse = C(1) / static_cast<C>(a.embedding_dim);
  RowReader<T, width, kept, one_warp, whole> reader(a, teams, first, forward_rows);
  reader.read_next(true);
  const NormRow<T, width, kept> weight(columns, a.norm_weight), bias(columns, a.norm_bias);
  KeptRow<T, width, kept> position;
  int buffer = 0;
  for (; left > 0; --left) {
    if constexpr (sinusoids) {
      const core::Turn64* pair_turns = core::through_data_cache(turns.values);
      static_assert(whole, "a vector may lie in both halves of another sinusoid");
      if (reader.new_position) {
        fill_row(a.sinusoid, pair_turns, reader.position, columns, &position);
      }
    }
    core::wait_for_copies();
    if (!sinusoids && reader.new_position && reader.position_valid) {
      position.each_value([](C& value) { value = C(-0.0); });  // which changes no sum
      reader.add_position(&position);
    }
    const bool valid = reader.is_valid();
    const int token = reader.token;
    KeptRow<T, width, kept> row;  // not written for an invalid token
    reader.get_token(scale, &row);
    if (types > 0) {
      columns.for_each(
          [&](int i, int) { kept_types.add_to(reader.type, i, row.vector[i].values); });
    } else if (a.type.data != nullptr) {
      reader.add_type(&row);
    }
    columns.for_each([&](int i, int) {
#pragma unroll
      for (int k = 0; k < width; ++k) row.vector[i].values[k] += position.vector[i].values[k];
    });
    if (left > 1) reader.read_next(false);
    if (a.norm != Norm::none) {
      const Moments<C> moments = normalise<T>(a, inverse, columns, &row, &buffer);
      if (valid && reader.records()) save_moments(f, token, moments);
    }
    if (a.norm_bias != nullptr) {
      columns.for_each([&](int i, int offset) {
        auto& values = row.vector[i].values;
        const auto w = weight.columns(i, offset), b = bias.columns(i, offset);
#pragma unroll
        for (int k = 0; k < width; ++k) values[k] = core::fma(values[k], w.values[k], b.values[k]);
      });
    } else if (a.norm_weight != nullptr) {
      columns.for_each([&](int i, int offset) {
        const auto w = weight.columns(i, offset);
#pragma unroll
        for (int k = 0; k < width; ++k) row.vector[i].values[k] *= w.values[k];
      });
    }
    reader.drop(token, &row);
    T* out = static_cast<T*>(f.out) + int64_t{token} * static_cast<int>(a.embedding_dim);
    if (valid) {
      write_row<T>(columns, row, out);
    } else {
      write_row<T>(columns, KeptRow<T, width, kept>{}, out);
    }
  }
}

// ---- backward ----

/// The number of sums that a team keeps; if all tokens have the first type, no other type has a
/// sum.
POSEMBED_INLINE int kept_sums(const BackwardArguments& b) {
  if (b.weight_gradient == nullptr && b.type_gradient == nullptr) return 0;
  if (b.type_gradient == nullptr) return 2;
  return 2 + (b.input.type.index.data == nullptr ? 1 : static_cast<int>(b.input.type.rows));
}

/// Turns the gradient of a normalised row into that of the row.
template <typename T, int width, int kept, bool one_warp>
__device__ void through_norm(const Arguments& a, Compute<T> rstd,
                             const RowColumns<T, width, kept, one_warp, false>& columns,
                             const KeptRow<T, width, kept>& normalised,
                             KeptRow<T, width, kept>* gradient, int* buffer) {
  using C = Compute<T>;
  const T* weight = static_cast<const T*>(a.norm_weight);
  C totals[2] = {};
  columns.for_each([&](int i, int offset) {
    auto& g = gradient->vector[i].values;
    if (weight != nullptr) {
      const auto w = load_columns<T, width>(weight + columns.first, offset);
#pragma unroll
      for (int k = 0; k < width; ++k) g[k] *= w.values[k];
    }
#pragma unroll
    for (int k = 0; k < width; ++k) {
      totals[0] += g[k];
      totals[1] += g[k] * normalised.vector[i].values[k];
    }
  });
  team_sum<one_warp>(totals, buffer);
  const C inverse = C(1) / static_cast<C>(a.embedding_dim), projection = totals[1] * inverse;
  const C mean = a.norm == Norm::layer ? totals[0] * inverse : C(0);
#pragma unroll
  for (int i = 0; i < kept; ++i) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      C& g = gradient->vector[i].values[k];
      g = rstd * (g - mean - normalised.vector[i].values[k] * projection);
    }
  }
}

/// The maximum number of threads of a backward block, and the number of resident blocks per
/// multiprocessor.
constexpr int backward_threads(bool one_warp) { return one_warp ? max_threads / 2 : max_threads; }
constexpr int backward_blocks(int kept, bool one_warp) {
  return one_warp ? std::max(3, 7 - kept) : 2;
}

/// Each block processes one part of the tokens.
template <typename T, int width, int kept, bool one_warp>
__global__ void __launch_bounds__(backward_threads(one_warp), backward_blocks(kept, one_warp))
    backward_kernel(const __grid_constant__ BackwardArguments b,
                    const __grid_constant__ Teams teams) {
  using C = Compute<T>;
  using Cells = RowCells<C, width, kept, one_warp>;  // sums: weight, bias, then each type
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim;
  const int sums_kept = kept_sums(b), in_block = Member<one_warp>::teams();
  const size_t slot_bytes = sizeof(Vector<T, width>) * backward_rows * kept * blockDim.x;
  const Cells sums = Cells::of(Member<one_warp>::team(), sums_kept, slot_bytes);

  const int64_t first = Member<one_warp>::number() * teams.tokens;
  const int count = static_cast<int>(max(int64_t{0}, min(teams.tokens, a.batch * a.seq - first)));
  const bool normed = a.norm != Norm::none;
  RowReader<T, width, kept, one_warp, false> reader(a, teams, count > 0 ? first : 0, backward_rows,
                                                    normed);
  const auto incoming = Slots<T, width, one_warp>::of(2, backward_rows, kept);
  C next_mean = 0, next_rstd = 1;
  const auto read_next = [&](bool is_first) {
    reader.read_next(is_first);
    reader.read_row(b.gradient, reader.token * dim, incoming);
    if (normed && b.mean != nullptr) next_mean = static_cast<const C*>(b.mean)[reader.token];
    if (normed) next_rstd = static_cast<const C*>(b.rstd)[reader.token];
  };
  if (count > 0) read_next(true);
  for (int number = 0; number < sums_kept; ++number) {
    const C zeros[width] = {};
    reader.columns.for_each([&](int i, int) { sums.set(number, i, zeros); });
  }

  const C scale = static_cast<C>(a.scale);
  int buffer = 0;
  for (int number = 0; number < count; ++number) {
    core::wait_for_copies();
    const bool valid = reader.is_valid();
    const int token = reader.token, type = static_cast<int>(reader.type);
    const C mean = next_mean, rstd = next_rstd;
    KeptRow<T, width, kept> gradient, row;
    if (valid) {
      reader.columns.for_each(
          [&](int i, int) { gradient.vector[i] = load_columns<T, width>(incoming[i].values, 0); });
      reader.drop(token, &gradient);
      if (normed) {
        reader.get_token(scale, &row);
        if (a.type.data != nullptr) reader.add_type(&row);
        reader.add_position(&row);
      }
    }
    if (number + 1 < count) read_next(false);
    if (valid && normed) {
      row.each_value([&](C& value) { value = (value - mean) * rstd; });
      if (b.weight_gradient != nullptr) {
        reader.columns.for_each([&](int i, int) {
          C product[width];
#pragma unroll
          for (int k = 0; k < width; ++k) {
            product[k] = gradient.vector[i].values[k] * row.vector[i].values[k];
          }
          sums.add(0, i, product);
          sums.add(1, i, gradient.vector[i].values);
        });
      }
      through_norm<T>(a, rstd, reader.columns, row, &gradient, &buffer);
    }
    if (valid && b.type_gradient != nullptr) {
      reader.columns.for_each(
          [&](int i, int) { sums.add(2 + type, i, gradient.vector[i].values); });
    }
    if (b.sum_gradient != nullptr) {
      write_row<T>(reader.columns, gradient, static_cast<T*>(b.sum_gradient) + token * dim);
    }
  }
  if (b.partial == nullptr) return;

  __syncthreads();
  C* result = static_cast<C*>(b.partial) + blockIdx.x * sums_of(b) * partial_columns(dim);
  for (int number = Member<one_warp>::team(); number < sums_of(b); number += in_block) {
    C* to = result + number * partial_columns(dim) + reader.columns.first;
    reader.columns.for_each([&](int i, int offset) {
      C total[width] = {};
      for (int team = 0; team < in_block && number < sums_kept; ++team) {
        Cells::of(team, sums_kept, slot_bytes).add_to(number, i, total);
      }
      core::store_values<width>(total, to + offset);
    });
  }
}

/// Adds the parts of sum blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(core::part_threads) add_parts_kernel(BackwardArguments b) {
  using C = Compute<T>;
  T* out = sum_target<T>(b, blockIdx.y);
  if (out == nullptr) return;
  const int64_t dim = b.input.embedding_dim, columns = partial_columns(dim);
  const C* from = static_cast<const C*>(b.partial) + blockIdx.y * columns;
  const C total = core::sum_of_parts(from, b.parts, sums_of(b) * columns, dim);
  if (core::writes_parts() && core::part_column() < dim) store(total, out + core::part_column());
}

// ---- dropout alone ----

template <typename T, int width>
__global__ void __launch_bounds__(max_threads)
    drop_kernel(DropoutArguments d, core::Dropout dropout) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (first >= d.count) return;
  auto columns = load_columns<T, width>(static_cast<const T*>(d.x), first);
  drop_columns<T, width>(dropout, d.seed, static_cast<uint64_t>(d.first + first), &columns);
  store_columns<T, width>(columns, static_cast<T*>(d.out), first);
}

// ---- launchers ----

/// The largest number of columns in which the rows of a table can be read.
template <typename T>
int64_t width_of(const Table& table, int64_t dim) {
  return core::width_of<T>(table.data, dim, table.data == nullptr ? 0 : table.stride);
}

/// The largest number of columns in which all rows can be read.
template <typename T>
int64_t width_of(const Arguments& a) {
  const int64_t dim = a.embedding_dim;
  return std::min({width_of<T>(a.token, dim), width_of<T>(a.type, dim),
                   width_of<T>(a.position, dim), core::width_of<T>(a.norm_weight, dim, dim),
                   core::width_of<T>(a.norm_bias, dim, dim)});
}

/// Whether vectors have 16 bytes. Others have one kernel for rows of all sizes, because they are
/// rare.
template <typename T, int width>
constexpr bool wide_vectors = width > 1 && sizeof(T) * width == 16;

/// The division of a row among a team's threads.
struct RowShape {
  int64_t warps, kept;  // kept: vectors of a thread

  /// Rows that need more than a warp give a thread at least `kept_by_block` vectors.
  RowShape(int64_t dim, int width, int64_t kept_by_block) {
    const int64_t vectors = divide_up(dim, width);
    const bool one_warp = vectors <= max_kept * warp_size;
    warps =
        one_warp ? 1 : std::min<int64_t>(max_warps, divide_up(vectors, kept_by_block * warp_size));
    kept = divide_up(vectors, warps * warp_size);
  }

  bool fits() const { return kept <= max_kept; }
  int threads() const { return static_cast<int>(warps) * warp_size; }

  /// Calls function(kept, one_warp) with constants. With vectors of less than 8 bytes, teams are
  /// blocks even if they have one warp.
  template <typename T, int width, typename Function>
  void visit(const Function& function) const {
    const auto with = [&](auto constant) {
      if constexpr (sizeof(T) * width >= 8) {
        if (warps == 1) return function(constant, std::true_type());
      }
      function(constant, std::false_type());
    };
    if constexpr (wide_vectors<T, width>) {
      if (kept <= 2) return with(std::integral_constant<int, 2>());
      if (kept == 3) return with(std::integral_constant<int, 3>());
    }
    with(std::integral_constant<int, max_kept>());
  }
};

/// Whether all sequences have the same positions.
bool shares_positions(const Arguments& a) {
  return (a.position.index.data == nullptr || a.position.index_stride[0] == 0) &&
         (a.encoding == nullptr || a.encoding_stride[0] == 0);
}

/// Divides the tokens among teams.
Teams teams_for(const Arguments& a, int64_t teams) {
  return {divide_up(a.batch * a.seq, teams),
          core::Divisor<int64_t>::of(std::max<int64_t>(1, a.batch)), shares_positions(a),
          core::make_dropout(a.dropout, 0)};
}

/// Whether rows have `kept` vectors for each thread of their teams, all inside the row.
template <int width>
bool is_whole(const Arguments& a, const RowShape& shape) {
  return a.embedding_dim == width * shape.kept * shape.threads();
}

/// Launches a forward kernel in as many blocks as run at once.
template <typename T, int width, int kept, bool one_warp, bool sinusoids, bool whole>
void run_forward(const RowShape& shape, const ForwardArguments& f, const Turns<sinusoids>& turns,
                 cudaStream_t stream) {
  const Arguments& a = f.input;
  const int64_t in_block = one_warp ? max_threads / warp_size : 1;
  const int64_t threads = in_block * shape.threads();
  const int64_t resident = core::multiprocessors() * forward_blocks * max_threads / threads;
  const int64_t blocks = std::min(divide_up(a.batch * a.seq, in_block), resident);
  const int64_t slots = forward_rows * kept * threads * int64_t{sizeof(Vector<T, width>)};
  const int64_t row_bytes = int64_t{kept} * width * shape.threads() * int64_t{sizeof(Compute<T>)};
  int64_t types = a.type.data == nullptr ? 0 : a.type.index.data == nullptr ? 1 : a.type.rows;
  if (types > max_type_bytes / row_bytes) types = 0;
  const auto bytes = static_cast<size_t>(slots + types * row_bytes);
  const auto kernel = forward_kernel<T, width, kept, one_warp, sinusoids, whole>;
  core::allow_shared_memory(kernel, bytes);
  core::launch_with(kernel, core::grid_of(blocks), static_cast<unsigned>(threads), bytes, stream, f,
                    teams_for(a, blocks * in_block), static_cast<int>(types), turns);
}

template <typename T, int width>
void launch_forward(const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const RowShape shape(a.embedding_dim, width, max_kept);
  shape.visit<T, width>([&](auto kept, auto one_warp) {
    if constexpr (wide_vectors<T, width> && one_warp) {
      if (a.sinusoid.pairs > 0 && a.encoding == nullptr) {
        Turns<true> turns;
        std::copy_n(a.sinusoid.turns, a.sinusoid.pairs, turns.values);
        return run_forward<T, width, kept, true, true, true>(shape, f, turns, stream);
      }
    }
    // Rows of several warps have at least three vectors per thread.
    if constexpr (one_warp || kept > 2) {
      if constexpr (wide_vectors<T, width>) {
        if (is_whole<width>(a, shape) && kept == shape.kept) {
          return run_forward<T, width, kept, one_warp, false, true>(shape, f, {}, stream);
        }
      }
      run_forward<T, width, kept, one_warp, false, false>(shape, f, {}, stream);
    }
  });
}

/// An attribute of the current device; 0 if unknown.
int64_t attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

/// A block of backward_kernel().
struct BackwardBlock {
  int64_t threads, bytes;  // bytes: of dynamic_shared_memory()
  int64_t resident;        // per multiprocessor; 0: a block does not fit

  int64_t resident_threads() const { return resident * threads; }
};

/// The block for a call: nearly the most warps that the device can hold, in the largest blocks,
/// because each block has sums that add_parts_kernel() reads.
template <typename T, int width>
BackwardBlock block_for(const BackwardArguments& b, int64_t row_threads, int kept, bool one_warp) {
  constexpr int64_t static_bytes = 1024;  // more than team_sum() declares
  const int64_t sum_bytes = kept_sums(b) * int64_t{sizeof(Compute<T>)},
                thread_bytes = kept * width * (backward_rows * int64_t{sizeof(T)} + sum_bytes),
                by_registers = backward_threads(one_warp) * backward_blocks(kept, one_warp);
  const int64_t of_block = attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                reserved = attribute_of_device(cudaDevAttrReservedSharedMemoryPerBlock),
                all = attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const auto with = [&](int64_t threads) {
    const int64_t bytes = threads * thread_bytes, used = bytes + static_bytes;
    const int64_t resident = std::min(by_registers / threads, all / (used + reserved));
    return BackwardBlock{threads, bytes, used <= of_block ? resident : 0};
  };
  BackwardBlock best = with(row_threads);
  if (!one_warp) return best;
  for (int64_t threads = 2 * row_threads; threads <= backward_threads(true); threads *= 2) {
    const BackwardBlock larger = with(threads);
    if (10 * larger.resident_threads() >= 9 * best.resident_threads()) best = larger;
  }
  return best;
}

/// Calls function(kept, one_warp, block, teams in it) for rows that a block's registers and shared
/// memory hold.
template <typename T, int width, typename Function>
void visit_backward(const BackwardArguments& b, const Function& function) {
  const RowShape shape(b.input.embedding_dim, width, 2);
  if (!shape.fits()) return;
  shape.visit<T, width>([&](auto kept, auto one_warp) {
    const BackwardBlock block = block_for<T, width>(b, shape.threads(), kept, one_warp);
    if (block.resident > 0) {
      function(kept, one_warp, block, one_warp ? block.threads / warp_size : 1);
    }
  });
}

template <typename T, int width>
int64_t parts_for(const BackwardArguments& b) {
  int64_t parts = 0;
  visit_backward<T, width>(b, [&](auto, auto, const BackwardBlock& block, int64_t teams) {
    const int64_t blocks = core::multiprocessors() * block.resident,
                  most = divide_up(b.input.batch * b.input.seq, teams);
    parts = std::max<int64_t>(1, std::min(blocks, most));
  });
  return parts;
}

template <typename T, int width>
void launch_backward(const BackwardArguments& b, cudaStream_t stream) {
  visit_backward<T, width>(b, [&](auto kept, auto one_warp, const BackwardBlock& block,
                                  int64_t teams) {
    const auto kernel = backward_kernel<T, width, kept, one_warp>;
    const auto bytes = static_cast<size_t>(block.bytes);
    core::allow_shared_memory(kernel, bytes);
    core::launch_with(kernel, static_cast<unsigned>(b.parts), static_cast<unsigned>(block.threads),
                      bytes, stream, b, teams_for(b.input, b.parts * teams));
  });
  if (b.partial == nullptr) return;
  const dim3 grid(static_cast<unsigned>(divide_up(b.input.embedding_dim, warp_size)),
                  static_cast<unsigned>(sums_of(b)));
  core::launch_with(add_parts_kernel<T>, grid, core::part_threads, 0, stream, b);
}

/// Calls function(Tag<T>, width) with constants.
template <typename Function>
void visit_vectors(const BackwardArguments& arguments, const Function& function) {
  const Arguments& a = arguments.input;
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = a.embedding_dim;
    core::visit_width<T>(std::min({width_of<T>(a), core::width_of<T>(arguments.gradient, dim, dim),
                                   core::width_of<T>(arguments.sum_gradient, dim, dim)}),
                         [&](auto width) { function(tag, width); });
  });
}

/// Whether kernels count tokens, and a token table's rows and their elements, in 32 bits.
bool counts_in_int(const Arguments& a) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  return a.batch * a.seq <= most && a.token.rows <= most && a.token.stride <= most;
}

}  // namespace

bool takes_cuda(const Arguments& a) {
  if (!counts_in_int(a)) return false;
  return core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    bool fits = false;
    core::visit_width<T>(width_of<T>(a), [&](auto width) {
      fits = RowShape(a.embedding_dim, width, max_kept).fits();
    });
    return fits;
  });
}

bool computes_sinusoid_cuda(const Arguments& a) {
  const sinusoidal::Layout& layout = a.sinusoid.layout;
  const bool fills_rows = layout.filled == layout.columns && a.sinusoid.order == 0 &&
                          a.sinusoid.learned_scale == nullptr;
  return core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int width = core::vector_width<T>;
    const RowShape shape(a.embedding_dim, width, max_kept);
    return wide_vectors<T, width> && shape.warps == 1 && shape.kept > 1 &&
           is_whole<width>(a, shape) && width_of<T>(a) == width && shares_positions(a) &&
           a.sinusoid.pairs > 0 && fills_rows;
  });
}

const char* forward_cuda(const ForwardArguments& arguments, core::CudaStream stream) {
  const Arguments& a = arguments.input;
  if (a.batch == 0 || a.seq == 0 || a.embedding_dim == 0) return nullptr;
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = a.embedding_dim;
    core::visit_width<T>(std::min(width_of<T>(a), core::width_of<T>(arguments.out, dim, dim)),
                         [&](auto width) { launch_forward<T, width>(arguments, stream); });
  });
  return core::launch_error();
}

int64_t parts_cuda(const BackwardArguments& arguments) {
  int64_t parts = 1;
  if (arguments.input.embedding_dim == 0) return parts;
  if (!counts_in_int(arguments.input)) return 0;
  visit_vectors(arguments, [&](auto tag, auto width) {
    parts = parts_for<typename decltype(tag)::type, width>(arguments);
  });
  return parts;
}

const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream) {
  if (arguments.input.embedding_dim == 0) return nullptr;
  visit_vectors(arguments, [&](auto tag, auto width) {
    launch_backward<typename decltype(tag)::type, width>(arguments, stream);
  });
  return core::launch_error();
}

const char* drop_cuda(const DropoutArguments& arguments, core::CudaStream stream) {
  if (arguments.count == 0) return nullptr;
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      core::launch(drop_kernel<T, width>, divide_up(arguments.count, int64_t{max_threads} * width),
                   max_threads, stream, arguments, core::make_dropout(arguments.probability, 0));
    };
    // Four neighbours share a call of philox, so a vector must start at the first of them.
    if (arguments.first % 4 == 0 &&
        core::vectorizable<T>(arguments.x, arguments.count, arguments.count) &&
        core::vectorizable<T>(arguments.out, arguments.count, arguments.count)) {
      launch(std::integral_constant<int, core::vector_width<T>>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
  return core::launch_error();
}

}  // namespace posembed::input
