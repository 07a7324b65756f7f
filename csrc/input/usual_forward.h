// The fast path of the forward pass: positions that all sequences share, and no dropout. What
// tokens share stays in registers: the norm's weight and bias, and the row of a position, whose
// sinusoid is computed once for all its tokens. Results have the bits of
// forward_kernel(), which takes every call. Part of kernel_cuda.cu.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "input/row_reader.h"

namespace posembed::input {
namespace {

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

}  // namespace
}  // namespace posembed::input
