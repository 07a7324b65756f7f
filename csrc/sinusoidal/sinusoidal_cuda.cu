// Sinusoids on CUDA: a thread keeps the turns of a few pairs in registers and iterates over rows.
// Turns are kernel arguments, so there is no table in memory. As many blocks as run at once divide
// the rows, so that a thread always has rows to read while it computes and writes.
#include <algorithm>

#include "core/device_vector.h"
#include "core/divisor.h"
#include "sinusoidal/sinusoidal.h"

namespace posembed::sinusoidal {
namespace {

using core::Compute;

constexpr int max_threads = 128;
constexpr int resident_blocks = 5;  // of max_threads, per multiprocessor
constexpr int64_t max_rest_blocks = 4096;
constexpr int64_t argument_bytes = 16384;
constexpr int rows_in_flight = 2;  // per thread: four 16-byte loads

/// The pairs of one launch.
template <typename T>
constexpr int64_t max_pairs = argument_bytes / sizeof(TurnOf<T>);

template <typename T>
struct TurnBlock {
  TurnOf<T> turns[max_pairs<T>];
};

/// A thread's columns of a row: those of `width` pairs, contiguous if interleaved, otherwise in two
/// parts.
template <typename T, int width>
struct PairColumns {
  core::Vector<T, width> first, second;
};

/// The columns of these two parts. Without packs (width 1) the second may lie outside the
/// encoding.
struct PairIndices {
  int64_t first, second;
  bool has_second;
};

template <int width>
__device__ PairIndices indices_of(const Layout& layout, int64_t pair) {
  const int64_t first = first_column(layout, pair);
  const int64_t second = layout.interleaved ? first + width : second_column(layout, pair);
  return {first, second, width > 1 || second < layout.filled};
}

template <typename T, int width>
__device__ PairColumns<T, width> read_columns(const T* row, const PairIndices& indices) {
  using Vector = core::Vector<T, width>;
  PairColumns<T, width> columns = {};
  if (row == nullptr) return columns;
  columns.first = *reinterpret_cast<const Vector*>(row + indices.first);
  if (indices.has_second) columns.second = *reinterpret_cast<const Vector*>(row + indices.second);
  return columns;
}

/// Adds values in the order of the columns, or writes them.
template <typename T, int width>
__device__ void apply(const Compute<T> (&values)[2][width], bool adds, const PairIndices& indices,
                      PairColumns<T, width> columns, T* row) {
#pragma unroll
  for (int i = 0; i < width; ++i) {
    T &first = columns.first.values[i], &second = columns.second.values[i];
    core::store(adds ? core::load(first) + values[0][i] : values[0][i], &first);
    core::store(adds ? core::load(second) + values[1][i] : values[1][i], &second);
  }
  core::write_vector<T, width>(columns.first, row + indices.first);
  if (indices.has_second) core::write_vector<T, width>(columns.second, row + indices.second);
}

/// Interleaves the values of `width` pairs.
template <typename C, int width>
__device__ void interleave(C (&values)[2][width]) {
  C mixed[2 * width];
#pragma unroll
  for (int i = 0; i < width; ++i) {
    mixed[2 * i] = values[0][i];
    mixed[2 * i + 1] = values[1][i];
  }
#pragma unroll
  for (int i = 0; i < 2 * width; ++i) values[i / width][i % width] = mixed[i];
}

/// The sequences that share an encoding in a block: one of gridDim.z parts of the batch, or one
/// sequence.
struct Sequences {
  bool shared;
  int64_t first, count;  // if shared

  __device__ explicit Sequences(const Arguments& a)
      : shared(a.position_stride[0] == 0),
        first(a.batch * blockIdx.z / gridDim.z),
        count(a.batch * (blockIdx.z + 1) / gridDim.z - first) {}
};

/// The rows that an encoding is applied to, from the next one on.
template <typename T>
struct Rows {
  const T* in = nullptr;  // nullptr: nothing to add to
  T* out = nullptr;
  int64_t batch = 0, seq = 0;
  int64_t left = 0;

  /// Those of encoding `number`; none if it is beyond the last encoding.
  __device__ Rows(const Arguments& a, const Sequences& sequences, int64_t number,
                  const core::Divisor<int64_t>& length) {
    const auto indices = core::divide(number, length);
    if (indices.quotient >= (sequences.shared ? 1 : a.batch)) return;
    batch = sequences.shared ? sequences.first : indices.quotient;
    seq = indices.remainder;
    left = sequences.shared ? sequences.count : 1;
    out = static_cast<T*>(a.out) + batch * a.out_stride[0] + seq * a.out_stride[1];
    if (a.in == nullptr) return;
    in = static_cast<const T*>(a.in) + batch * a.in_stride[0] + seq * a.in_stride[1];
  }

  __device__ void advance(const Arguments& a, int64_t count) {
    left -= count;
    out += count * a.out_stride[0];
    if (in != nullptr) in += count * a.in_stride[0];
  }
};

/// A block processes `width` pairs per thread, starting at pair `begin` of the model, of every
/// gridDim.x-th encoding, for one of gridDim.z parts of the sequences that share it. `block` has
/// `count` pairs. The next rows are always in flight, those of the next encoding too. `general`:
/// derivatives, and positions with a scale.
template <typename T, int width, bool general>
__global__ void __launch_bounds__(max_threads, resident_blocks)
    encode_kernel(Arguments arguments, const __grid_constant__ TurnBlock<T> block,
                  core::Divisor<int64_t> length, int64_t begin, int64_t count) {
  using C = Compute<T>;
  const Sinusoid& sinusoid = arguments.sinusoid;
  const Layout& layout = sinusoid.layout;
  const int64_t first = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  if (first >= count) return;
  const int64_t order = general ? sinusoid.order : 0;
  TurnOf<T> turns[width];
  C factors[general ? width : 1];
  const double scale = scale_of(sinusoid);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    turns[i] = core::through_data_cache(block.turns)[first + i];
    factors[general ? i : 0] = static_cast<C>(amplitude(scale, order, turns[i]));
  }
  const PairIndices indices = indices_of<width>(layout, begin + first);
  const Sequences sequences(arguments);
  int64_t number = blockIdx.x;
  Rows<T> rows(arguments, sequences, number, length);
  PairColumns<T, width> columns[rows_in_flight];
  const auto read_rows = [&] {
#pragma unroll
    for (int i = 0; i < rows_in_flight; ++i) {
      const bool needed = rows.in != nullptr && i < rows.left;
      columns[i] =
          read_columns<T, width>(needed ? rows.in + i * arguments.in_stride[0] : nullptr, indices);
    }
  };
  read_rows();
  while (rows.left > 0) {
    const int64_t index =
        rows.batch * arguments.position_stride[0] + rows.seq * arguments.position_stride[1];
    const Position position = placed(
        sinusoid, position_of(arguments.positions, arguments.offset, rows.seq, index), general);
    C values[2][width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const C factor = factors[general ? i : 0] * static_cast<C>(position.scale);
      C sine, cosine;
      sincos_at(position, turns[i], order, factor, &sine, &cosine);
      values[0][i] = layout.cos_first ? cosine : sine;
      values[1][i] = layout.cos_first ? sine : cosine;
    }
    if (layout.interleaved) interleave(values);
    for (bool more = true; more;) {
#pragma unroll
      for (int i = 0; i < rows_in_flight; ++i) {
        if (i >= rows.left) break;
        apply<T, width>(values, arguments.in != nullptr, indices, columns[i],
                        rows.out + i * arguments.out_stride[0]);
      }
      rows.advance(arguments, rows_in_flight);
      more = rows.left > 0;
      if (!more) rows = Rows<T>(arguments, sequences, number += gridDim.x, length);
      read_rows();
    }
  }
}

/// Fills the columns after the last pair with x or zeros.
template <typename T>
__global__ void rest_kernel(Arguments arguments) {
  const Layout& layout = arguments.sinusoid.layout;
  const int64_t rows = arguments.batch * arguments.seq;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < rows; row += step) {
    const int64_t batch = row / arguments.seq, seq = row - batch * arguments.seq;
    const T* in = static_cast<const T*>(arguments.in) + batch * arguments.in_stride[0] +
                  seq * arguments.in_stride[1];
    T* out = static_cast<T*>(arguments.out) + batch * arguments.out_stride[0] +
             seq * arguments.out_stride[1];
    for (int64_t c = layout.filled; c < layout.columns; ++c) {
      if (arguments.in == nullptr) {
        core::store(Compute<T>(0), out + c);
      } else {
        out[c] = in[c];
      }
    }
  }
}

/// The largest number of pairs whose two parts can be read and written together.
template <typename T>
int64_t width_of(const Arguments& arguments) {
  const Layout& layout = arguments.sinusoid.layout;
  if (layout.filled % 2 != 0) return 1;
  const auto width = [&](const void* data, const int64_t* stride) {
    return core::width_of<T>(data, layout.filled / 2, stride[0] | stride[1]);
  };
  const int64_t out = width(arguments.out, arguments.out_stride);
  return arguments.in == nullptr ? out : std::min(out, width(arguments.in, arguments.in_stride));
}

/// The grid of a launch for `pairs` pairs: as many blocks as the device can run at once. Blocks
/// share an encoding if few encodings serve many sequences.
dim3 grid_for(const Arguments& arguments, int64_t pairs_of_block, int64_t pairs, int64_t threads) {
  const int64_t columns = core::divide_up(pairs, pairs_of_block);
  const int64_t resident = core::multiprocessors() * resident_blocks * max_threads / threads;
  const int64_t rows = std::min(encodings(arguments), std::max<int64_t>(1, resident / columns));
  const int64_t parts = arguments.position_stride[0] == 0 ? resident / (rows * columns) : 1;
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(columns),
              static_cast<unsigned>(std::clamp<int64_t>(parts, 1, arguments.batch)));
}

template <typename T, int width, bool general>
void launch_pairs(const Arguments& arguments, core::CudaStream stream) {
  const Sinusoid& sinusoid = arguments.sinusoid;
  const auto length = core::Divisor<int64_t>::of(arguments.seq);
  TurnBlock<T> block;
  for (int64_t begin = 0; begin < sinusoid.pairs; begin += max_pairs<T>) {
    const int64_t count = std::min(max_pairs<T>, sinusoid.pairs - begin);
    std::copy_n(turns_of<T>(sinusoid) + begin, count, block.turns);
    const int64_t warps = core::divide_up(count, width * core::warp_size);
    const auto threads = std::min<int64_t>(warps * core::warp_size, max_threads);
    core::launch_with(
        encode_kernel<T, width, general>, grid_for(arguments, width * threads, count, threads),
        static_cast<unsigned>(threads), 0, stream, arguments, block, length, begin, count);
  }
}

template <typename T>
const char* launch(const Arguments& arguments, core::CudaStream stream) {
  constexpr int whole = sizeof(core::Vector<T, core::vector_width<T>>);
  if (arguments.batch * arguments.seq == 0) return nullptr;
  if (arguments.sinusoid.order == 0 && arguments.sinusoid.position_scale == 1) {
    core::visit_width<T>(width_of<T>(arguments),
                         [&](auto width) { launch_pairs<T, width, false>(arguments, stream); });
  } else {  // rare: no vectors of less than 16 bytes
    core::visit_width<T, whole>(width_of<T>(arguments), [&](auto width) {
      launch_pairs<T, width, true>(arguments, stream);
    });
  }
  if (arguments.sinusoid.layout.filled < arguments.sinusoid.layout.columns) {
    const int64_t rows = arguments.batch * arguments.seq;
    const int64_t blocks = std::min(core::divide_up(rows, max_threads), max_rest_blocks);
    core::launch(rest_kernel<T>, blocks, max_threads, stream, arguments);
  }
  return core::launch_error();
}

}  // namespace

const char* encode_cuda(const Arguments& arguments, core::CudaStream stream) {
  return core::visit_scalar(arguments.scalar, [&](auto tag) {
    return launch<typename decltype(tag)::type>(arguments, stream);
  });
}

}  // namespace posembed::sinusoidal
