// A lane widens 16 neighbouring codes of a row at a time, or single codes where rows are not
// aligned, and has two such vectors in flight.
#include "core/device_vector.h"
#include "core/divisor.h"
#include "token/token.h"

namespace posembed::token {
namespace {

using core::Compute;
using core::Vector;
using core::warp_size;

constexpr int codes_together = 16;
constexpr int vectors = 2;  // of a lane

/// What a launch divides by: pieces are what warps take of a row.
struct Divisors {
  core::Divisor<int64_t> pieces, block_rows, block_columns;
};

/// The numbers of neighbouring codes, of which `first` is the first in `codes`.
template <Code code, int width>
__device__ void widen(const uint8_t* codes, int64_t first, float (&numbers)[width]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr bool by_pairs = code == Code::float8 && width > 1;
#else
  constexpr bool by_pairs = false;
#endif
  if constexpr (by_pairs) {
#pragma unroll
    for (int i = 0; i < width; i += 2) {
      uint16_t pair;
      memcpy(&pair, codes + i, sizeof pair);
      asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %2;"
          "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
          : "=f"(numbers[i]), "=f"(numbers[i + 1])
          : "h"(pair));
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) numbers[i] = number_of<code>(code_at<code>(codes, first + i));
  }
}

template <typename T, Code code, int width>
__global__ void __launch_bounds__(core::threads)
    gather_codes_kernel(const __grid_constant__ QuantizedArguments a, Divisors by) {
  const int64_t item = int64_t{blockIdx.x} * core::warps + threadIdx.x / warp_size;
  const auto place = core::divide(item, by.pieces);
  const int64_t index = place.quotient, lane = threadIdx.x % warp_size;
  if (index >= a.count) return;
  const int64_t first = (place.remainder * vectors * warp_size + lane) * width;
  const int64_t id = read(a.ids, index);
  const bool valid = static_cast<uint64_t>(id) < static_cast<uint64_t>(a.rows);
  if (!valid && first == 0) record_error(a.error, core::ErrorKind::token_id, id, index, a.rows);

  constexpr int per_byte = code == Code::uint4 ? 2 : 1;
  using Codes = Vector<uint8_t, width == 1 ? 1 : width / per_byte>;
  Codes codes[vectors];
  BlockScale blocks[vectors];
  const int64_t block = valid ? core::divide(id, by.block_rows).quotient * blocks_of(a) : 0;
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t column = first + v * warp_size * width;
    if (!valid || column >= a.embedding_dim) continue;
    codes[v] = *reinterpret_cast<const Codes*>(a.codes + id * a.row_bytes + column / per_byte);
    blocks[v] = block_scale(a, block + core::divide(column, by.block_columns).quotient);
  }
  using C = Compute<T>;
  const auto factor = static_cast<C>(a.factor);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t column = first + v * warp_size * width;
    if (column >= a.embedding_dim) continue;
    Vector<T, width> result = {};
    if (valid) {
      float numbers[width];
      widen<code>(codes[v].values, column % per_byte, numbers);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        core::store(dequantized<C, true>(numbers[i], blocks[v], factor), &result.values[i]);
      }
    }
    T* out = static_cast<T*>(a.out) + index * a.embedding_dim + column;
    core::write_vector<T, width>(result, out);
  }
}

template <typename T, Code code, int width>
void launch_gather(const QuantizedArguments& a, cudaStream_t stream) {
  const int64_t pieces = core::divide_up(a.embedding_dim, vectors * warp_size * width);
  const auto divisor = [](int64_t value) { return core::Divisor<int64_t>::of(value); };
  core::launch(gather_codes_kernel<T, code, width>, core::blocks_for(a.count * pieces),
               core::threads, stream, a,
               Divisors{divisor(pieces), divisor(a.block_rows), divisor(a.block_columns)});
}

template <typename T, Code code>
void launch_gather(const QuantizedArguments& a, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int64_t bytes = code == Code::uint4 ? codes_together / 2 : codes_together;
    const bool whole =
        a.embedding_dim % codes_together == 0 &&
        (a.block_columns % codes_together == 0 || a.block_columns >= a.embedding_dim);
    if (whole && a.row_bytes % bytes == 0 && reinterpret_cast<uintptr_t>(a.codes) % bytes == 0) {
      return launch_gather<T, code, codes_together>(a, stream);
    }
  }
  launch_gather<T, code, 1>(a, stream);
}

}  // namespace

const char* gather_codes_cuda(const QuantizedArguments& a, core::CudaStream stream) {
  if (a.count == 0 || a.embedding_dim == 0) return nullptr;
  core::visit_scalar(a.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.code == Code::float8) {
      launch_gather<T, Code::float8>(a, stream);
    } else if (a.code == Code::int8) {
      launch_gather<T, Code::int8>(a, stream);
    } else {
      launch_gather<T, Code::uint4>(a, stream);
    }
  });
  return core::launch_error();
}

}  // namespace posembed::token
