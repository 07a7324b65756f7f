// One pass over x: a position's row is read once and added to the whole batch while it is in cache.
#include "learned/kernel.h"

namespace posembed::learned::POSEMBED_ISA {
namespace {

using core::Compute;
using core::load;
using core::store;

int64_t row_of(const AddArguments& a, int64_t batch, int64_t place) {
  if (a.positions.data == nullptr) return a.offset + place + a.first_row;
  return read(a.positions, batch * a.position_stride[0] + place * a.position_stride[1]) +
         a.first_row;
}

template <typename T>
void add_rows(const T* POSEMBED_RESTRICT x, const T* POSEMBED_RESTRICT row, int64_t dim,
              T* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < dim; ++i) store(load(x[i]) + load(row[i]), out + i);
}

template <typename T>
void add_range(const AddArguments& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t place = token / a.batch, batch = token % a.batch;
    const T* x = static_cast<const T*>(a.x) + batch * a.x_stride[0] + place * a.x_stride[1];
    const T* row = static_cast<const T*>(a.weight) + row_of(a, batch, place) * a.weight_stride;
    add_rows(x, row, a.embedding_dim,
             static_cast<T*>(a.out) + (batch * a.seq + place) * a.embedding_dim);
  }
}

// Columns are summed in blocks that stay in registers.
constexpr int64_t block = 32;

template <typename T>
void sum_columns(const SumArguments& a, const T* column, int64_t width, T* out) {
  const int64_t batch_stride = a.seq * a.embedding_dim;
  Compute<T> total[block] = {};
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    for (int64_t i = 0; i < width; ++i) total[i] += load(column[batch * batch_stride + i]);
  }
  for (int64_t i = 0; i < width; ++i) store(total[i], out + i);
}

template <typename T>
void sum_range(const SumArguments& a, int64_t begin, int64_t end) {
  const int64_t last = end * a.embedding_dim;
  for (int64_t at = begin * a.embedding_dim; at < last; at += block) {
    const T* column = static_cast<const T*>(a.gradient) + at;
    sum_columns(a, column, last - at < block ? last - at : block, static_cast<T*>(a.out) + at);
  }
}

}  // namespace

void add(const AddArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    add_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

void sum_batch(const SumArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    sum_range<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::learned::POSEMBED_ISA
