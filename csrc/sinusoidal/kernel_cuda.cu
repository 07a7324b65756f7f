// Sinusoids on CUDA: a thread keeps the turns of a few pairs in registers and iterates over rows.
// Turns are kernel arguments, so there is no table in memory.
#include <algorithm>

#include "core/device_store.h"
#include "sinusoidal/kernel.h"

namespace posembed::sinusoidal {
namespace {

using core::Compute;

constexpr int block_size = 128;
constexpr int64_t most_row_blocks = 4096;
constexpr int64_t busy_row_blocks = 1024;  // fewer leave parts of a large GPU idle
constexpr int64_t argument_bytes = 16384;

/// The pairs of one launch.
template <typename T>
constexpr int64_t most_pairs = argument_bytes / sizeof(TurnOf<T>);

template <typename T>
struct TurnBlock {
  TurnOf<T> turns[most_pairs<T>];
};

template <typename T, int width>
__device__ void apply(const Compute<T>* values, const T* in, T* out) {
  core::Vector<T, width> vector;
  if (in != nullptr) vector = *reinterpret_cast<const core::Vector<T, width>*>(in);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const Compute<T> value = in == nullptr ? values[i] : core::load(vector.values[i]) + values[i];
    core::store(value, vector.values + i);
  }
  core::write_vector<T, width>(vector, out);
}

/// Adds to `count` columns one by one, for columns that are not whole packs.
template <typename T>
__device__ void apply(const Compute<T>* values, int64_t count, const T* in, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const Compute<T> before = in == nullptr ? Compute<T>(0) : core::load(in[i]);
    core::store(in == nullptr ? values[i] : before + values[i], out + i);
  }
}

/// Writes the values of `width` pairs to one row: one run of columns if interleaved, otherwise two.
template <typename T, int width>
__device__ void apply_pairs(const Layout& layout, int64_t pair,
                            const Compute<T> (&values)[2][width], const T* in, T* out) {
  const auto at = [](auto* row, int64_t column) { return row == nullptr ? nullptr : row + column; };
  const int64_t second = second_column(layout, pair);
  if (layout.interleaved) {
    Compute<T> mixed[2 * width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      mixed[2 * i] = values[0][i];
      mixed[2 * i + 1] = values[1][i];
    }
    if constexpr (width > 1) {
      apply<T, width>(mixed, at(in, 2 * pair), out + 2 * pair);
      apply<T, width>(mixed + width, at(in, 2 * pair + width), out + 2 * pair + width);
    } else {
      apply(mixed, min(int64_t{2}, layout.filled - 2 * pair), at(in, 2 * pair), out + 2 * pair);
    }
  } else if constexpr (width > 1) {
    apply<T, width>(values[0], at(in, pair), out + pair);
    apply<T, width>(values[1], at(in, second), out + second);
  } else {
    apply(values[0], 1, at(in, pair), out + pair);
    if (second < layout.filled) apply(values[1], 1, at(in, second), out + second);
  }
}

/// A block processes `width` * block_size pairs, from pair `begin` of the model on, of every
/// gridDim.x-th encoding, for one of gridDim.z parts of the sequences that share it. `block` has
/// `count` pairs.
template <typename T, int width>
__global__ void encode_kernel(Arguments arguments, const __grid_constant__ TurnBlock<T> block,
                              int64_t begin, int64_t count) {
  using C = Compute<T>;
  const Sinusoid& sinusoid = arguments.sinusoid;
  const Layout& layout = sinusoid.layout;
  const int64_t place = (int64_t{blockIdx.y} * block_size + threadIdx.x) * width;
  if (place >= count) return;
  TurnOf<T> turns[width];
  C factors[width];
#pragma unroll
  for (int i = 0; i < width; ++i) {
    turns[i] = block.turns[place + i];
    factors[i] = static_cast<C>(amplitude(sinusoid, turns[i]));
  }
  const bool shared = arguments.position_stride[0] == 0;
  const int64_t rows = shared ? arguments.seq : arguments.batch * arguments.seq;
  const int64_t shared_begin = arguments.batch * blockIdx.z / gridDim.z;
  const int64_t shared_end = arguments.batch * (blockIdx.z + 1) / gridDim.z;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t batch = row / arguments.seq, seq = row - batch * arguments.seq;
    const int64_t index = batch * arguments.position_stride[0] + seq * arguments.position_stride[1];
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
    const int64_t last = shared ? shared_end : batch + 1;
    for (int64_t b = shared ? shared_begin : batch; b < last; ++b) {
      const T* in = static_cast<const T*>(arguments.in);
      if (in != nullptr) in += b * arguments.in_stride[0] + seq * arguments.in_stride[1];
      T* out = static_cast<T*>(arguments.out) + b * arguments.out_stride[0] +
               seq * arguments.out_stride[1];
      apply_pairs<T, width>(layout, begin + place, values, in, out);
    }
  }
}

/// Fills the columns after the last pair with x or zeros.
template <typename T>
__global__ void rest_kernel(Arguments arguments) {
  const Layout& layout = arguments.sinusoid.layout;
  const int64_t rows = arguments.batch * arguments.seq;
  const int64_t step = int64_t{gridDim.x} * block_size;
  for (int64_t row = int64_t{blockIdx.x} * block_size + threadIdx.x; row < rows; row += step) {
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

/// The number of blocks that share an encoding, more than one if few encodings serve many
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
    const dim3 grid(static_cast<unsigned>(std::min(encodings(arguments), most_row_blocks)),
                    static_cast<unsigned>(core::divide_up(count, width * block_size)),
                    parts_of_batch(arguments));
    core::launch_with(encode_kernel<T, width>, grid, block_size, 0, stream, arguments, block, begin,
                      count);
  }
}

template <typename T>
const char* launch(const Arguments& arguments, core::CudaStream stream) {
  constexpr int width = 4;
  if (arguments.batch * arguments.seq == 0) return nullptr;
  if (in_packs<T, width>(arguments)) {
    launch_pairs<T, width>(arguments, stream);
  } else {
    launch_pairs<T, 1>(arguments, stream);
  }
  if (arguments.sinusoid.layout.filled < arguments.sinusoid.layout.columns) {
    const int64_t rows = arguments.batch * arguments.seq;
    const int64_t blocks = std::min(core::divide_up(rows, block_size), most_row_blocks);
    core::launch(rest_kernel<T>, blocks, block_size, stream, arguments);
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
