// A thread widens a vector of columns of one row, or a single column where rows are not aligned.
#include "core/device_item.h"
#include "core/device_store.h"
#include "core/divisor.h"
#include "token/token.h"

namespace posembed::token {
namespace {

using core::Compute;
using core::divide_up;
using core::threads;
using core::Vector;

constexpr int codes_together = 8;

template <typename T, Code code, int width>
__global__ void __launch_bounds__(threads)
    gather_codes_kernel(QuantizedArguments a, core::Divisor<int64_t> vectors) {
  const int64_t item = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (item >= a.count * vectors.value) return;
  const auto place = core::divide(item, vectors);
  const int64_t index = place.quotient, column = place.remainder * width;
  const int64_t id = read(a.ids, index);
  const bool valid = static_cast<uint64_t>(id) < static_cast<uint64_t>(a.rows);
  if (!valid && column == 0) record_error(a.error, core::ErrorKind::token_id, id, index, a.rows);

  constexpr bool packed = code == Code::uint4;
  using Codes = Vector<uint8_t, packed ? (width + 1) / 2 : width>;
  Codes codes = {};
  BlockScale block = {};
  if (valid) {
    codes = *reinterpret_cast<const Codes*>(a.codes + id * a.row_bytes +
                                            (packed ? column / 2 : column));
    block = block_scale(a, id / a.block_rows * blocks_of(a) + column / a.block_columns);
  }
  using C = Compute<T>;
  const auto factor = static_cast<C>(a.factor);
  const int64_t first = packed ? column % 2 : 0;  // in `codes`
  Vector<T, width> result = {};
#pragma unroll
  for (int k = 0; k < width; ++k) {
    if (!valid) continue;
    const float number = number_of<code>(code_at<code>(codes.values, first + k));
    core::store(a.biases == nullptr ? dequantized<C, false>(number, block, factor)
                                    : dequantized<C, true>(number, block, factor),
                &result.values[k]);
  }
  core::write_vector<T, width>(result, static_cast<T*>(a.out) + index * a.embedding_dim + column);
}

template <typename T, Code code, int width>
void launch_gather(const QuantizedArguments& a, cudaStream_t stream) {
  const int64_t vectors = a.embedding_dim / width;
  core::launch(gather_codes_kernel<T, code, width>, divide_up(a.count * vectors, threads), threads,
               stream, a, core::Divisor<int64_t>::of(vectors));
}

template <typename T, Code code>
void launch_gather(const QuantizedArguments& a, cudaStream_t stream) {
  constexpr int64_t bytes = code == Code::uint4 ? codes_together / 2 : codes_together;
  const bool whole = a.embedding_dim % codes_together == 0 &&
                     (a.block_columns % codes_together == 0 || a.block_columns >= a.embedding_dim);
  if (whole && a.row_bytes % bytes == 0 && reinterpret_cast<uintptr_t>(a.codes) % bytes == 0) {
    launch_gather<T, code, codes_together>(a, stream);
  } else {
    launch_gather<T, code, 1>(a, stream);
  }
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
