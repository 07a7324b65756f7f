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
#include "core/part_sum.h"
#include "core/philox.h"
#include "input/input.h"
#include "input/input_cuda.h"

namespace posembed::input {
namespace {

// ----------------------------------------------------------------------------------- usual forward
// The fast path of the forward pass: positions that all sequences share, and no dropout. What
// tokens share stays in registers: the norm's weight and bias, and the row of a position, whose
// sinusoid is computed once for all its tokens. Results have the bits of forward_kernel(), which
// takes every call.

/// Resident blocks of max_threads threads per multiprocessor.
constexpr int usual_blocks = 2;

/// The maximum shared memory of a block for rows of the type table.
constexpr size_t max_type_bytes = 16 * 1024;

/// A sinusoid's turns per position as kernel arguments, for teams of one warp.
template <bool exists>
struct Turns {
  static constexpr int max_pairs =
      max_kept * core::vector_width<core::BFloat16> * core::warp_size / 2;
  core::Turn64 values[max_pairs];
};

template <>
struct Turns<false> {};

/// The number of rows of the type table that tokens can refer to.
POSEMBED_INLINE int64_t type_rows(const Arguments& a) {
  if (a.type.data == nullptr) return 0;
  return a.type.index.data == nullptr ? 1 : a.type.rows;
}

/// The bytes of these rows in the compute type, with `columns` each.
template <typename T>
size_t type_bytes(const Arguments& a, int64_t columns) {
  return static_cast<size_t>(type_rows(a) * columns) * sizeof(Compute<T>);
}

/// Whether all sequences have the same positions.
inline bool shares_positions(const Arguments& a) {
  return a.position.index.data == nullptr || a.position.index_stride[0] == 0;
}

/// Whether usual_forward_kernel() takes the call, if a team keeps `columns` columns.
template <typename T>
bool is_usual(const Arguments& a, int64_t columns) {
  constexpr int64_t max_int = std::numeric_limits<int32_t>::max();
  const auto in_order = [&a](const Table& table) {
    return table.index_stride[0] == a.seq && table.index_stride[1] == 1;
  };
  const bool same_type =
      a.type.data == nullptr || (a.type.index.data == nullptr && a.type.index_stride[1] == 0);
  return a.seed == nullptr && a.encoding == nullptr &&
         (a.position.data != nullptr || a.sinusoid.pairs > 0) && shares_positions(a) &&
         in_order(a.token) && (same_type || in_order(a.type)) &&
         type_bytes<T>(a, columns) <= max_type_bytes &&
         (a.norm_bias == nullptr || a.norm_weight != nullptr) && a.batch * a.seq <= max_int &&
         a.token.rows <= max_int && a.token.stride <= max_int;
}

/// Whether usual_forward_kernel() computes the call's sinusoid, if the call is usual.
inline bool fills_rows(const sinusoidal::Sinusoid& sinusoid) {
  const sinusoidal::Layout& layout = sinusoid.layout;
  return sinusoid.pairs > 0 && layout.filled == layout.columns && sinusoid.order == 0 &&
         sinusoid.learned_scale == nullptr;
}

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

/// RowReader for the usual call.
template <typename T, int width, int kept, bool one_warp, bool whole>
struct UsualReader {
  using RowSlots = Slots<T, width, one_warp>;

  const Arguments& a;
  const RowColumns<T, width, kept, one_warp, whole> columns;
  const RowSlots token_row, position_row;
  // The token that is being read.
  int token = 0;
  int64_t type = 0;
  bool valid = true, position_valid = true, new_position = true;
  // The one after it.
  int batch, seq;
  int64_t id;
  int64_t position = 0;  // whose row was read last

  __device__ UsualReader(const Arguments& input, const Teams& teams, int first)
      : a(input),
        columns(input),
        token_row(RowSlots::of(0, forward_rows, kept)),
        position_row(RowSlots::of(1, forward_rows, kept)) {
    const auto at = core::divide(int64_t{first}, teams.batch);
    batch = static_cast<int>(at.remainder);
    seq = static_cast<int>(at.quotient);
    id = core::read(a.token.index, next_token());
  }

  __device__ static bool records() { return Member<one_warp>::rank() == 0; }

  /// The index of the next token in [batch, seq].
  __device__ int next_token() const { return batch * static_cast<int>(a.seq) + seq; }

  /// Whether an index is inside its table; records it otherwise.
  __device__ bool check(const Table& table, int64_t index) const {
    if (static_cast<uint64_t>(index) < static_cast<uint64_t>(table.rows)) return true;
    if (records()) record_error(a.error, table.kind, index, token, table.rows);
    return false;
  }

  __device__ void read_row(const void* data, int64_t element, const RowSlots& to) const {
    const T* from = static_cast<const T*>(data) + element + columns.first;
    columns.for_each([&](int i, int offset) {
      core::copy_async(reinterpret_cast<const Vector<T, width>*>(from + offset), &to[i]);
    });
  }

  /// Starts to read the next token, which may be the last.
  __device__ void read_next(bool is_first) {
    token = next_token();
    valid = check(a.token, id);
    if (valid) {
      read_row(a.token.data, int64_t{static_cast<int>(id)} * static_cast<int>(a.token.stride),
               token_row);
    }
    if (a.type.index.data != nullptr) type = core::read(a.type.index, token);
    new_position = is_first || batch == 0;
    if (new_position) read_position();
    if (++batch == static_cast<int>(a.batch)) {
      batch = 0;
      ++seq;
    }
    if (seq < static_cast<int>(a.seq)) id = core::read(a.token.index, next_token());
  }

  __device__ void read_position() {
    position = row_index(a.position, 0, seq);
    position_valid = true;
    const T* row =
        table_row<T>(a, a.position, position, {0, seq, token}, records(), &position_valid);
    if (row != nullptr) read_row(row, 0, position_row);
  }
};

/// `whole`: all vectors of the threads are inside the row. Others cost a sixth more instructions.
template <typename T, int width, int kept, bool one_warp, bool sinusoids, bool whole>
__global__ void __launch_bounds__(max_threads, usual_blocks)
    usual_forward_kernel(const __grid_constant__ ForwardArguments f,
                         const __grid_constant__ Teams teams,
                         const __grid_constant__ Turns<sinusoids> turns) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const size_t slot_bytes = sizeof(Vector<T, width>) * forward_rows * kept * blockDim.x;
  const auto types = RowCells<C, width, kept, one_warp>::of(0, 0, slot_bytes);
  const RowColumns<T, width, kept, one_warp, whole> columns(a);
  const int rows = static_cast<int>(type_rows(a));
  for (int number = Member<one_warp>::team(); number < rows; number += Member<one_warp>::teams()) {
    const T* type = static_cast<const T*>(a.type.data) + number * a.type.stride + columns.first;
    columns.for_each([&](int i, int offset) {
      types.set(number, i, load_columns<T, width>(type, offset).values);
    });
  }
  if (rows > 0) __syncthreads();
  const int64_t first = Member<one_warp>::number() * teams.tokens;
  int left = static_cast<int>(min(teams.tokens, a.batch * a.seq - first));
  if (left <= 0) return;

  const C scale = static_cast<C>(a.scale), inverse = C(1) / static_cast<C>(a.embedding_dim);
  UsualReader<T, width, kept, one_warp, whole> reader(a, teams, static_cast<int>(first));
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
      columns.for_each([&](int i, int) {
        position.vector[i] = load_columns<T, width>(reader.position_row[i].values, 0);
      });
    }
    const bool has_type = a.type.index.data == nullptr || reader.check(a.type, reader.type);
    const bool valid = reader.valid && reader.position_valid && has_type;
    const int token = reader.token, type = has_type ? static_cast<int>(reader.type) : 0;
    KeptRow<T, width, kept> row;  // not written for an invalid token
    columns.for_each([&](int i, int) {
      auto& sum = row.vector[i];
      sum = token_columns<T, width>(reader.token_row[i].values, scale, 0);
      if (a.type.data != nullptr) types.add_to(type, i, sum.values);
#pragma unroll
      for (int k = 0; k < width; ++k) sum.values[k] += position.vector[i].values[k];
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
    T* out = static_cast<T*>(f.out) + int64_t{token} * static_cast<int>(a.embedding_dim);
    if (valid) {
      write_row<T>(columns, row, out);
    } else {
      write_row<T>(columns, KeptRow<T, width, kept>{}, out);
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

using core::divide_up;

template <typename C>
__device__ C block_sum(C value) {
  return core::over_block(value, core::Add());
}

/// Multiplies the columns by dropout's factors; the first column is element `first` of the mask.
template <typename T, int width>
__device__ void drop_columns(const core::Dropout& dropout, uint64_t first,
                             Columns<T, width>* columns) {
  using C = Compute<T>;
  if constexpr (width % 4 == 0) {
#pragma unroll
    for (int k = 0; k < width; k += 4) {
      const core::Random4 random = core::philox(dropout.seed, (first + k) / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns->values[k + i] *=
            random.words[i] < dropout.threshold ? C(0) : static_cast<C>(dropout.scale);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < width; ++k)
      columns->values[k] *= core::dropout_factor<C>(dropout, first + k);
  }
}

__device__ core::Dropout dropout_of(double probability, const int64_t* seed) {
  return core::make_dropout(probability, seed == nullptr ? 0 : static_cast<uint64_t>(*seed));
}

/// The index of a token's column in dropout's mask.
__device__ uint64_t mask_index(const Arguments& a, int64_t token, int64_t column) {
  return static_cast<uint64_t>(a.first_element + token * a.embedding_dim + column);
}

// ---- forward ----

/// Applies the norm's weight and bias, and dropout, to normalised columns.
template <typename T, int width>
__device__ void finish_columns(const Arguments& a, const core::Dropout& dropout, int64_t token,
                               int64_t column, Columns<T, width>* columns) {
  const T *weight = static_cast<const T*>(a.norm_weight),
          *bias = static_cast<const T*>(a.norm_bias);
  if (weight != nullptr && bias != nullptr) {
    const auto w = load_columns<T, width>(weight, column), b = load_columns<T, width>(bias, column);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      columns->values[k] = core::fma(columns->values[k], w.values[k], b.values[k]);
    }
  } else if (weight != nullptr) {
    const auto w = load_columns<T, width>(weight, column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns->values[k] *= w.values[k];
  } else {
    add_columns<T, width>(bias, column, columns);
  }
  if (a.seed != nullptr) {
    drop_columns<T, width>(dropout, mask_index(a, token, column), columns);
  }
}

/// Resident blocks of the forward kernel per multiprocessor.
constexpr int forward_blocks(int kept) { return kept <= 3 ? 4 : 3; }

template <typename T, int width, int kept, bool one_warp>
__global__ void __launch_bounds__(max_threads, forward_blocks(kept))
    forward_kernel(ForwardArguments f, const __grid_constant__ Teams teams) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t first = Member<one_warp>::number() * teams.tokens;
  const int count = static_cast<int>(min(teams.tokens, a.batch * a.seq - first));
  if (count <= 0) return;

  const C scale = static_cast<C>(a.scale), inverse = C(1) / static_cast<C>(a.embedding_dim);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  RowReader<T, width, kept, one_warp> reader(a, teams, first, forward_rows);
  reader.read_next(true);
  int buffer = 0;
  for (int number = 0; number < count; ++number) {
    core::wait_for_copies();
    const int64_t token = reader.token;
    const bool valid = reader.valid();
    KeptRow<T, width, kept> row;
    if (valid) reader.sum(scale, &row);
    if (number + 1 < count) reader.read_next(false);
    T* out = static_cast<T*>(f.out) + token * a.embedding_dim;
    if (!valid) {
      write_row<T>(reader.columns, row, out);
      continue;
    }
    if (a.norm != Norm::none) {
      const Moments<C> moments = normalise<T>(a, inverse, reader.columns, &row, &buffer);
      if (reader.records()) save_moments(f, token, moments);
    }
    reader.columns.for_each([&](int i, int offset) {
      finish_columns<T, width>(a, dropout, token, reader.columns.first + offset, &row.vector[i]);
    });
    write_row<T>(reader.columns, row, out);
  }
}

/// For rows that a block's registers cannot hold: a block sums a token's rows again whenever it
/// needs the sum.
template <typename T, int width>
__global__ void __launch_bounds__(max_threads) wide_forward_kernel(ForwardArguments f) {
  using C = Compute<T>;
  const Arguments& a = f.input;
  const int64_t token = blockIdx.x, dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  T* out = static_cast<T*>(f.out) + token * dim;
  const TokenRowPointers<T> rows =
      rows_of<T>(a, {token / a.seq, token % a.seq, token}, threadIdx.x == 0);
  if (!rows.valid) {
    for (int64_t i = begin; i < dim; i += step) store_columns<T, width>({}, out, i);
    return;
  }
  C mean = 0, rstd = 1;
  if (a.norm == Norm::layer) {
    C total = 0;
    for (int64_t i = begin; i < dim; i += step) {
      const auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
      for (int k = 0; k < width; ++k) total += columns.values[k];
    }
    mean = block_sum(total) / static_cast<C>(dim);
  }
  if (a.norm != Norm::none) {
    C squares = 0;
    for (int64_t i = begin; i < dim; i += step) {
      const auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
      for (int k = 0; k < width; ++k)
        squares += (columns.values[k] - mean) * (columns.values[k] - mean);
    }
    rstd = C(1) / sqrt(block_sum(squares) / static_cast<C>(dim) + static_cast<C>(a.eps));
    if (threadIdx.x == 0) save_moments(f, token, Moments<C>{mean, rstd});
  }
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  for (int64_t i = begin; i < dim; i += step) {
    auto columns = sum_columns<T, width>(a, rows, i);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    finish_columns<T, width>(a, dropout, token, i, &columns);
    store_columns<T, width>(columns, out, i);
  }
}

// ---- backward ----

/// One token's row in the backward pass.
template <typename T, int width>
struct BackwardRow {
  const BackwardArguments& b;
  const TokenRowPointers<T>& rows;
  const core::Dropout& dropout;
  int64_t token;
  Compute<T> mean, rstd;

  __device__ Columns<T, width> normalised(int64_t column) const {
    auto columns = sum_columns<T, width>(b.input, rows, column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] = (columns.values[k] - mean) * rstd;
    return columns;
  }

  /// The gradient of the norm's output.
  __device__ Columns<T, width> gradient(int64_t column) const {
    const int64_t first = token * b.input.embedding_dim;
    auto columns = load_columns<T, width>(static_cast<const T*>(b.gradient) + first, column);
    if (b.input.seed != nullptr)
      drop_columns<T, width>(dropout, mask_index(b.input, token, column), &columns);
    return columns;
  }

  /// The gradient of the normalised row.
  __device__ Columns<T, width> weighted(Columns<T, width> columns, int64_t column) const {
    if (b.input.norm_weight == nullptr) return columns;
    const auto weight = load_columns<T, width>(static_cast<const T*>(b.input.norm_weight), column);
#pragma unroll
    for (int k = 0; k < width; ++k) columns.values[k] *= weight.values[k];
    return columns;
  }
};

/// A part's sums: rows for the norm's weight and bias, then for each type. A thread always has the
/// same columns, so no barrier is needed.
template <typename C>
struct Sums {
  C* data = nullptr;  // nullptr: not needed
  int64_t columns = 0;

  __device__ C* row(int64_t number) const { return data + number * columns; }
};

template <typename T, int width>
__device__ void add_to_sum(const Columns<T, width>& values, Compute<T>* sum) {
  Columns<T, width> total;
  core::load_values<width>(sum, total.values);
#pragma unroll
  for (int k = 0; k < width; ++k) total.values[k] += values.values[k];
  core::store_values<width>(total.values, sum);
}

/// Writes the gradient of a token's sum and adds it to the sum of its type.
template <typename T, int width>
__device__ void write_gradient(const BackwardArguments& b, const Sums<Compute<T>>& sums,
                               const TokenRowPointers<T>& rows, int64_t token, int64_t column,
                               const Columns<T, width>& values) {
  if (b.type_gradient != nullptr && rows.valid) {
    add_to_sum<T, width>(values, sums.row(2 + rows.type_index) + column);
  }
  if (b.sum_gradient == nullptr) return;
  store_columns<T, width>(values, static_cast<T*>(b.sum_gradient) + token * b.input.embedding_dim,
                          column);
}

template <typename T, int width>
__device__ void backward_token(const BackwardArguments& b, const TokenIndices& at,
                               const Sums<Compute<T>>& sums) {
  using C = Compute<T>;
  const Arguments& a = b.input;
  const int64_t dim = a.embedding_dim;
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  const int64_t token = at.token;
  const TokenRowPointers<T> rows = rows_of<T>(a, at, threadIdx.x == 0);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  const bool normed = rows.valid && a.norm != Norm::none;
  const C mean = normed && b.mean != nullptr ? static_cast<const C*>(b.mean)[token] : C(0);
  const C rstd = normed ? static_cast<const C*>(b.rstd)[token] : C(1);
  const BackwardRow<T, width> row{b, rows, dropout, token, mean, rstd};
  if (!normed) {
    for (int64_t i = begin; i < dim; i += step) {
      write_gradient<T, width>(b, sums, rows, token, i,
                               rows.valid ? row.gradient(i) : Columns<T, width>{});
    }
    return;
  }

  C sum = 0, projection = 0;
  for (int64_t i = begin; i < dim; i += step) {
    const auto normalised = row.normalised(i);
    const auto gradient = row.gradient(i);
    const auto weighted = row.weighted(gradient, i);
    Columns<T, width> product;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sum += weighted.values[k];
      projection += weighted.values[k] * normalised.values[k];
      product.values[k] = gradient.values[k] * normalised.values[k];
    }
    if (b.weight_gradient == nullptr) continue;
    add_to_sum<T, width>(product, sums.row(0) + i);
    add_to_sum<T, width>(gradient, sums.row(1) + i);
  }
  const C mean_gradient = a.norm == Norm::layer ? block_sum(sum) / static_cast<C>(dim) : C(0);
  projection = block_sum(projection) / static_cast<C>(dim);
  for (int64_t i = begin; i < dim; i += step) {
    const auto normalised = row.normalised(i);
    auto columns = row.weighted(row.gradient(i), i);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      columns.values[k] =
          rstd * (columns.values[k] - mean_gradient - normalised.values[k] * projection);
    }
    write_gradient<T, width>(b, sums, rows, token, i, columns);
  }
}

/// Resident blocks of wide_backward_kernel() per multiprocessor.
constexpr int wide_blocks = 4;

/// For rows that a block's registers cannot hold: each block processes one part of the tokens and
/// has that part's sums.
template <typename T, int width>
__global__ void __launch_bounds__(max_threads, wide_blocks)
    wide_backward_kernel(BackwardArguments b, core::Divisor<int64_t> seq) {
  using C = Compute<T>;
  const int64_t dim = b.input.embedding_dim, tokens = b.input.batch * b.input.seq,
                part = blockIdx.x, columns = partial_columns(dim);
  const int64_t begin = int64_t{threadIdx.x} * width, step = int64_t{blockDim.x} * width;
  const int64_t count = b.partial == nullptr ? 0 : sums_of(b);
  const Sums<C> sums{static_cast<C*>(b.partial) + part * count * columns, columns};
  for (int64_t number = 0; number < count; ++number) {
    for (int64_t i = begin; i < dim; i += step) {
      for (int k = 0; k < width; ++k) sums.row(number)[i + k] = 0;
    }
  }
  for (int64_t token = part * tokens / b.parts; token < (part + 1) * tokens / b.parts; ++token) {
    const auto at = core::divide(token, seq);
    backward_token<T, width>(b, {at.quotient, at.remainder, token}, sums);
  }
}

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
                             const RowColumns<T, width, kept, one_warp>& columns,
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
    backward_kernel(BackwardArguments b, const __grid_constant__ Teams teams) {
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
  RowReader<T, width, kept, one_warp> reader(a, teams, count > 0 ? first : 0, backward_rows,
                                             normed);
  const auto incoming = Slots<T, width, one_warp>::of(2, backward_rows, kept);
  C next_mean = 0, next_rstd = 1;
  const auto read_next = [&](bool is_first) {
    reader.read_next(is_first);
    reader.read_row(static_cast<const T*>(b.gradient) + reader.token * dim, incoming);
    if (normed && b.mean != nullptr) next_mean = static_cast<const C*>(b.mean)[reader.token];
    if (normed) next_rstd = static_cast<const C*>(b.rstd)[reader.token];
  };
  if (count > 0) read_next(true);
  for (int number = 0; number < sums_kept; ++number) {
    const C zeros[width] = {};
    reader.columns.for_each([&](int i, int) { sums.set(number, i, zeros); });
  }

  const C scale = static_cast<C>(a.scale);
  const core::Dropout dropout = dropout_of(a.dropout, a.seed);
  int buffer = 0;
  for (int number = 0; number < count; ++number) {
    core::wait_for_copies();
    const int64_t token = reader.token;
    const int type = reader.type;
    const bool valid = reader.valid();
    const C mean = next_mean, rstd = next_rstd;
    KeptRow<T, width, kept> gradient, row;
    if (valid) {
      reader.columns.for_each([&](int i, int offset) {
        gradient.vector[i] = load_columns<T, width>(incoming[i].values, 0);
        if (a.seed == nullptr) return;
        drop_columns<T, width>(dropout, mask_index(a, token, reader.columns.first + offset),
                               &gradient.vector[i]);
      });
      if (normed) reader.sum(scale, &row);
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
__global__ void __launch_bounds__(max_threads) drop_kernel(DropoutArguments d) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (first >= d.count) return;
  auto columns = load_columns<T, width>(static_cast<const T*>(d.x), first);
  drop_columns<T, width>(dropout_of(d.probability, d.seed), static_cast<uint64_t>(d.first + first),
                         &columns);
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

/// Divides the tokens among teams.
Teams teams_for(const Arguments& a, int64_t teams) {
  return {divide_up(a.batch * a.seq, teams),
          core::Divisor<int64_t>::of(std::max<int64_t>(1, a.batch)),
          shares_positions(a) && (a.encoding == nullptr || a.encoding_stride[0] == 0)};
}

/// Whether rows have `kept` vectors for each thread of their teams, all inside the row.
template <int width>
bool is_whole(const Arguments& a, const RowShape& shape) {
  return a.embedding_dim == width * shape.kept * shape.threads();
}

/// Launches a forward kernel in as many blocks as run at once. False if it needs more shared memory
/// than a block has.
template <typename T, int width, bool one_warp, typename Kernel, typename... More>
bool run_forward(const Kernel& kernel, int resident_blocks, size_t type_bytes,
                 const RowShape& shape, int kept, const ForwardArguments& f, cudaStream_t stream,
                 const More&... more) {
  const Arguments& a = f.input;
  const int64_t in_block = one_warp ? max_threads / warp_size : 1;
  const int64_t threads = in_block * shape.threads();
  const int64_t resident = core::multiprocessors() * resident_blocks * max_threads / threads;
  const int64_t blocks = std::min(divide_up(a.batch * a.seq, in_block), resident);
  const size_t slots = forward_rows * kept * static_cast<size_t>(threads);
  const size_t bytes = slots * sizeof(Vector<T, width>) + type_bytes;
  if (!core::allow_shared_memory(kernel, bytes)) return false;
  core::launch_with(kernel, core::grid_of(blocks), static_cast<unsigned>(threads), bytes, stream, f,
                    teams_for(a, blocks * in_block), more...);
  return true;
}

/// False if usual_forward_kernel() does not take the call.
template <typename T, int width, int kept, bool one_warp>
bool launch_usual(const RowShape& shape, const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const int64_t columns = int64_t{kept} * width * shape.threads();
  if (!is_usual<T>(a, columns)) return false;
  const auto run = [&](const auto& kernel, const auto& turns) {
    return run_forward<T, width, one_warp>(kernel, usual_blocks, type_bytes<T>(a, columns), shape,
                                           kept, f, stream, turns);
  };
  if constexpr (wide_vectors<T, width>) {
    if (is_whole<width>(a, shape) && kept == shape.kept) {
      if constexpr (one_warp) {
        if (a.sinusoid.pairs > 0) {
          Turns<true> turns;
          std::copy_n(a.sinusoid.turns, a.sinusoid.pairs, turns.values);
          return run(usual_forward_kernel<T, width, kept, one_warp, true, true>, turns);
        }
      }
      return run(usual_forward_kernel<T, width, kept, one_warp, false, true>, Turns<false>{});
    }
  }
  // Rows that a warp holds, with at least 8 bytes of 16-bit columns in a vector.
  if constexpr (one_warp && (wide_vectors<T, width> || (sizeof(T) == 2 && width == 4))) {
    if (a.sinusoid.pairs > 0) return false;
    return run(usual_forward_kernel<T, width, kept, one_warp, false, false>, Turns<false>{});
  }
  return false;
}

template <typename T, int width>
void launch_forward(const ForwardArguments& f, cudaStream_t stream) {
  const Arguments& a = f.input;
  const RowShape shape(a.embedding_dim, width, max_kept);
  if (!shape.fits()) {
    constexpr int wide = wide_vectors<T, width> ? width : 1;
    return core::launch(wide_forward_kernel<T, wide>, a.batch * a.seq, max_threads, stream, f);
  }
  shape.visit<T, width>([&](auto kept, auto one_warp) {
    // Rows of several warps have at least three vectors per thread.
    if constexpr (one_warp || kept > 2) {
      if (launch_usual<T, width, kept, one_warp>(shape, f, stream)) return;
      run_forward<T, width, one_warp>(forward_kernel<T, width, kept, one_warp>,
                                      forward_blocks(kept), 0, shape, kept, f, stream);
    }
  });
}

/// Shared memory of the current device, in bytes; zeros if unknown.
struct SharedMemory {
  int64_t of_block = 0, of_multiprocessor = 0;
  int64_t reserved = 0;  // in each block

  SharedMemory() {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return;
    const auto read = [device](cudaDeviceAttr attribute) {
      int value = 0;
      cudaDeviceGetAttribute(&value, attribute, device);
      return int64_t{value};
    };
    of_block = read(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    of_multiprocessor = read(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    reserved = read(cudaDevAttrReservedSharedMemoryPerBlock);
  }
};

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
  const SharedMemory shared;
  const int64_t sum_bytes = kept_sums(b) * int64_t{sizeof(Compute<T>)},
                thread_bytes = kept * width * (backward_rows * int64_t{sizeof(T)} + sum_bytes),
                by_registers = backward_threads(one_warp) * backward_blocks(kept, one_warp);
  const auto with = [&](int64_t threads) {
    const int64_t bytes = threads * thread_bytes, used = bytes + static_bytes;
    const int64_t by_memory = shared.of_multiprocessor / (used + shared.reserved);
    const bool fits = used <= shared.of_block;
    return BackwardBlock{threads, bytes, fits ? std::min(by_registers / threads, by_memory) : 0};
  };
  BackwardBlock best = with(row_threads);
  if (!one_warp) return best;
  for (int64_t threads = 2 * row_threads; threads <= backward_threads(true); threads *= 2) {
    const BackwardBlock larger = with(threads);
    if (10 * larger.resident_threads() >= 9 * best.resident_threads()) best = larger;
  }
  return best;
}

/// Calls teams(kept, one_warp, block) for rows that a block's registers and shared memory hold,
/// otherwise wide().
template <typename T, int width, typename Function, typename Wide>
void visit_backward(const BackwardArguments& b, const Function& teams, const Wide& wide) {
  const RowShape shape(b.input.embedding_dim, width, 2);
  bool fits = false;
  if (shape.fits()) {
    shape.visit<T, width>([&](auto kept, auto one_warp) {
      const BackwardBlock block = block_for<T, width>(b, shape.threads(), kept, one_warp);
      fits = block.resident > 0;
      if (fits) teams(kept, one_warp, block);
    });
  }
  if (!fits) wide();
}

template <typename T, int width>
int64_t parts_for(const BackwardArguments& b) {
  const Arguments& a = b.input;
  const int64_t tokens = a.batch * a.seq;
  int64_t parts = 1;
  visit_backward<T, width>(
      b,
      [&](auto, auto one_warp, const BackwardBlock& block) {
        const int64_t in_block = one_warp ? block.threads / warp_size : 1;
        parts = std::min(core::multiprocessors() * block.resident, divide_up(tokens, in_block));
      },
      [&] { parts = std::min<int64_t>(core::multiprocessors() * wide_blocks, tokens); });
  return std::max<int64_t>(1, parts);
}

template <typename T, int width>
void launch_parts_backward(const BackwardArguments& b, cudaStream_t stream) {
  const auto parts = static_cast<unsigned>(b.parts);
  visit_backward<T, width>(
      b,
      [&](auto kept, auto one_warp, const BackwardBlock& block) {
        const auto kernel = backward_kernel<T, width, kept, one_warp>;
        const auto bytes = static_cast<size_t>(block.bytes);
        core::allow_shared_memory(kernel, bytes);
        const int64_t in_block = one_warp ? block.threads / warp_size : 1;
        core::launch_with(kernel, parts, static_cast<unsigned>(block.threads), bytes, stream, b,
                          teams_for(b.input, b.parts * in_block));
      },
      [&] {
        constexpr int wide = wide_vectors<T, width> ? width : 1;
        core::launch_with(wide_backward_kernel<T, wide>, parts, max_threads, 0, stream, b,
                          core::Divisor<int64_t>::of(std::max<int64_t>(1, b.input.seq)));
      });
}

template <typename T, int width>
void launch_backward(const BackwardArguments& b, cudaStream_t stream) {
  launch_parts_backward<T, width>(b, stream);
  if (b.partial == nullptr) return;
  const dim3 grid(static_cast<unsigned>(divide_up(b.input.embedding_dim, warp_size)),
                  static_cast<unsigned>(sums_of(b)));
  core::launch_with(add_parts_kernel<T>, grid, core::part_threads, 0, stream, b);
}

template <typename T, int width>
void launch_drop(const DropoutArguments& d, cudaStream_t stream) {
  const int64_t blocks = divide_up(d.count, int64_t{max_threads} * width);
  core::launch(drop_kernel<T, width>, blocks, max_threads, stream, d);
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

bool empty(const Arguments& a) { return a.batch == 0 || a.seq == 0 || a.embedding_dim == 0; }

}  // namespace

bool computes_sinusoid_cuda(const Arguments& a) {
  return core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int width = core::vector_width<T>;
    const RowShape shape(a.embedding_dim, width, max_kept);
    return wide_vectors<T, width> && shape.warps == 1 && shape.kept > 1 &&
           is_whole<width>(a, shape) && width_of<T>(a) == width &&
           is_usual<T>(a, a.embedding_dim) && fills_rows(a.sinusoid);
  });
}

const char* forward_cuda(const ForwardArguments& arguments, core::CudaStream stream) {
  const Arguments& a = arguments.input;
  if (empty(a)) return nullptr;
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
    // Four neighbours share a call of philox, so a vector must start at the first of them.
    if (arguments.first % 4 == 0 &&
        core::vectorizable<T>(arguments.x, arguments.count, arguments.count) &&
        core::vectorizable<T>(arguments.out, arguments.count, arguments.count)) {
      launch_drop<T, core::vector_width<T>>(arguments, stream);
    } else {
      launch_drop<T, 1>(arguments, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::input
