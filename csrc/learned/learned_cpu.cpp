// One pass over x: reads a position's row once and adds it to the whole batch while it is in the
// cache.
#include "core/block32.h"
#include "core/stream.h"
#include "learned/learned.h"

namespace posembed::learned::POSEMBED_ISA {
namespace {

int64_t row_of(const AddArguments& a, int64_t batch, int64_t seq) {
  if (a.positions.data == nullptr) return a.offset + seq + a.first_row;
  return read(a.positions, batch * a.position_stride[0] + seq * a.position_stride[1]) + a.first_row;
}

template <bool streaming, typename T>
POSEMBED_INLINE void add_row(const T* x, const T* row, const T* soon, int64_t dim, T* out) {
  if (streaming) core::expect_stream(out + dim, dim * int64_t{sizeof(T)});
  constexpr int64_t line = 64 / sizeof(T);
  core::for_blocks(dim, [&](int64_t i, auto count) POSEMBED_INLINE_LAMBDA {
    if (streaming) {
      for (int64_t k = 0; k < core::block_size; k += line) __builtin_prefetch(soon + i + k, 0, 2);
    }
    core::store_block<streaming>(core::load_block(x + i, count) + core::load_block(row + i, count),
                                 out + i, count);
  });
}

template <typename T, bool streaming>
void add_range(const AddArguments& a, int64_t begin, int64_t end) {
  const auto x_at = [&a](int64_t token) {
    return static_cast<const T*>(a.x) + token % a.batch * a.x_stride[0] +
           token / a.batch * a.x_stride[1];
  };
  for (int64_t token = begin; token < end; ++token) {
    const int64_t seq = token / a.batch, batch = token % a.batch;
    const T* row = static_cast<const T*>(a.weight) + row_of(a, batch, seq) * a.weight_stride;
    // Rows are far apart: the hardware prefetcher finds the next one late.
    const T* soon = streaming ? x_at(token + 2 < end ? token + 2 : token) : nullptr;
    add_row<streaming>(x_at(token), row, soon, a.embedding_dim,
                       static_cast<T*>(a.out) + (batch * a.seq + seq) * a.embedding_dim);
  }
  if (streaming) core::stream_fence();
}

// Columns are summed this many blocks at a time, in registers.
constexpr int64_t blocks_together = core::wide ? 4 : 1;

/// Sums `count` blocks of columns over the batch.
template <int64_t count, typename T, typename Size>
POSEMBED_INLINE void sum_columns(const SumArguments& a, const T* column, Size size, T* out) {
  core::Block32<T> total[count] = {};
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const T* in = column + batch * a.seq * a.embedding_dim;
    for (int64_t r = 0; r < count; ++r) {
      total[r] = total[r] + core::load_block(in + r * core::block_size, size);
    }
  }
  for (int64_t r = 0; r < count; ++r) core::store_block(total[r], out + r * core::block_size, size);
}

template <typename T>
void sum_range(const SumArguments& a, int64_t begin, int64_t end) {
  const T* in = static_cast<const T*>(a.gradient);
  T* out = static_cast<T*>(a.out);
  constexpr int64_t block = blocks_together * core::block_size;
  int64_t at = begin * a.embedding_dim;
  const int64_t last = end * a.embedding_dim;
  for (; at + block <= last; at += block) {
    sum_columns<blocks_together>(a, in + at, core::WholeBlock{}, out + at);
  }
  core::for_blocks(last - at, [&](int64_t i, auto count) {
    sum_columns<1>(a, in + at + i, count, out + at + i);
  });
}

}  // namespace

void add(const AddArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool streamed = core::streams_rows<T>(arguments.out, arguments.batch * arguments.seq,
                                                arguments.embedding_dim);
    const auto range = streamed ? add_range<T, true> : add_range<T, false>;
    range(arguments, begin, end);
  });
}

void sum_batch(const SumArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    sum_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::learned::POSEMBED_ISA
