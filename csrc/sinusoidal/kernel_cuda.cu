// Sinusoids on CUDA: a thread keeps the turns of a few pairs in registers and iterates over rows.
// Turns are kernel arguments, so there is no table in memory.
#include <algorithm>

#include "core/device_store.h"
#include "sinusoidal/kernel.h"

namespace posembed::sinusoidal {
namespace {

using core::Compute;

constexpr int most_threads = 128;
constexpr int64_t most_row_blocks = 4096;
constexpr int64_t busy_row_blocks = 1024;  // fewer leave parts of a large GPU idle
constexpr int64_t argument_bytes = 16384;
constexpr int rows_in_flight = 2;  // per thread: four 16-byte loads

/// The pairs of one launch.
template <typename T>
constexpr int64_t most_pairs = argument_bytes / sizeof(TurnOf<T>);

template <typename T>
struct TurnBlock {
  TurnOf<T> turns[most_pairs<T>];
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

/// A block processes `width` pairs per thread, starting at pair `begin` of the model, of every
/// gridDim.x-th encoding, for one of gridDim.z parts of the sequences that share it. `block` has
/// `count` pairs.
template <typename T, int width>
__global__ void encode_kernel(Arguments arguments, const __grid_constant__ TurnBlock<T> block,
                              int64_t begin, int64_t count) {
  using C = Compute<T>;
  const Sinusoid& sinusoid = arguments.sinusoid;
  const Layout& layout = sinusoid.layout;
  const int64_t place = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width;
  if (place >= count) return;
  TurnOf<T> turns[width];
  C factors[width];
  const double scale = scale_of(sinusoid);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    turns[i] = core::through_data_cache(block.turns)[place + i];
    factors[i] = static_cast<C>(amplitude(scale, sinusoid.order, turns[i]));
  }
  const PairIndices indices = indices_of<width>(layout, begin + place);
  const bool shared = arguments.position_stride[0] == 0;
  const int64_t rows = shared ? arguments.seq : arguments.batch * arguments.seq;
  const int64_t shared_begin = arguments.batch * blockIdx.z / gridDim.z;
  const int64_t shared_end = arguments.batch * (blockIdx.z + 1) / gridDim.z;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t batch = row / arguments.seq, seq = row - batch * arguments.seq;
    const int64_t index = batch * arguments.position_stride[0] + seq * arguments.position_stride[1];
    const int64_t last = shared ? shared_end : batch + 1;
    const auto in = [&](int64_t b) {
      const T* data = static_cast<const T*>(arguments.in);
      return data == nullptr || b >= last
                 ? nullptr
                 : data + b * arguments.in_stride[0] + seq * arguments.in_stride[1];
    };
    // Loads of the first rows are issued before the encoding is computed.
    int64_t b = shared ? shared_begin : batch;
    PairColumns<T, width> columns[rows_in_flight];
    const auto read_rows = [&] {
#pragma unroll
      for (int i = 0; i < rows_in_flight; ++i)
        columns[i] = read_columns<T, width>(in(b + i), indices);
    };
    read_rows();
    const Position position =
        placed(sinusoid, position_of(arguments.positions, arguments.offset, seq, index));
    C values[2][width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const C factor = factors[i] * static_cast<C>(position.scale);
      C sine, cosine;
      sincos_at(position, turns[i], sinusoid.order, factor, &sine, &cosine);
      values[0][i] = layout.cos_first ? cosine : sine;
      values[1][i] = layout.cos_first ? sine : cosine;
    }
    if (layout.interleaved) interleave(values);
    while (b < last) {
#pragma unroll
      for (int i = 0; i < rows_in_flight; ++i) {
        if (b + i >= last) break;
        T* out = static_cast<T*>(arguments.out) + (b + i) * arguments.out_stride[0] +
                 seq * arguments.out_stride[1];
        apply<T, width>(values, arguments.in != nullptr, indices, columns[i], out);
      }
      b += rows_in_flight;
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

template <typename T, int width>
bool in_packs(const Arguments& arguments) {
  const auto fits = [](const void* data, const int64_t* stride) {
    return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * width) == 0 && stride[0] % width == 0 &&
           stride[1] % width == 0;
  };
  const Layout& layout = arguments.sinusoid.layout;
  return layout.filled % (2 * width) == 0 && fits(arguments.out, arguments.out_stride) &&
         (arguments.in == nullptr || fits(arguments.in, arguments.in_stride));
}

/// The number of blocks that share an encoding: more than one if few encodings serve many
/// sequences.
unsigned parts_of_batch(const Arguments& arguments) {
  if (arguments.position_stride[0] != 0) return 1;
  const int64_t parts = core::divide_up(busy_row_blocks, arguments.seq);
  return static_cast<unsigned>(std::min(arguments.batch, parts));
}

template <typename T, int width>
void launch_pairs(const Arguments& arguments, core::CudaStream stream) {
  const Sinusoid& sinusoid = arguments.sinusoid;
  TurnBlock<T> block;
  for (int64_t begin = 0; begin < sinusoid.pairs; begin += most_pairs<T>) {
    const int64_t count = std::min(most_pairs<T>, sinusoid.pairs - begin);
    std::copy_n(turns_of<T>(sinusoid) + begin, count, block.turns);
    const int64_t warps = core::divide_up(count, width * core::warp_size);
    const auto threads = std::min<int64_t>(warps * core::warp_size, most_threads);
    const dim3 grid(static_cast<unsigned>(std::min(encodings(arguments), most_row_blocks)),
                    static_cast<unsigned>(core::divide_up(count, width * threads)),
                    parts_of_batch(arguments));
    core::launch_with(encode_kernel<T, width>, grid, static_cast<unsigned>(threads), 0, stream,
                      arguments, block, begin, count);
  }
}

template <typename T>
const char* launch(const Arguments& arguments, core::CudaStream stream) {
  constexpr int width = core::vector_width<T>;
  if (arguments.batch * arguments.seq == 0) return nullptr;
  if (in_packs<T, width>(arguments)) {
    launch_pairs<T, width>(arguments, stream);
  } else {
    launch_pairs<T, 1>(arguments, stream);
  }
  if (arguments.sinusoid.layout.filled < arguments.sinusoid.layout.columns) {
    const int64_t rows = arguments.batch * arguments.seq;
    const int64_t blocks = std::min(core::divide_up(rows, most_threads), most_row_blocks);
    core::launch(rest_kernel<T>, blocks, most_threads, stream, arguments);
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
