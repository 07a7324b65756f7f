// Rows of QK-norm and its weights in the compute type. Part of kernel_cpu.cpp.
#pragma once

#include <algorithm>

#include "core/block32.h"
#include "rotary/angles_cpu.h"
#include "rotary/rotate_rows_cpu.h"
#include "rotary_norm/kernel.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

namespace kernel = rotary::POSEMBED_ISA;

using core::Compute;
using kernel::Angles;
using kernel::Token;
using kernel::TokenOrder;
using kernel::Turns;
using rotary::HeadView;

constexpr int64_t max_columns = max_head_dim + core::block_size;

/// A row with room for whole blocks that start at any column.
template <typename C>
using Row = C[max_columns];

/// Reads `count` weights or biases. `missing`: their value if there are none.
template <typename C>
void load_parameters(const Arguments& arguments, const void* data, int64_t count, double offset,
                     C missing, C* out) {
  if (data == nullptr) return void(std::fill_n(out, count, missing));
  core::visit_scalar(arguments.parameter_scalar, [&](auto tag) {
    const auto* const values = static_cast<const typename decltype(tag)::type*>(data);
    const C added = static_cast<C>(offset);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<C>(core::load(values[i])) + added;
  });
}

/// The factors of columns: the weights plus their common offset, then a block of zeros.
template <typename T>
void load_weights(const Arguments& arguments, int64_t r, Row<Compute<T>>& row) {
  using C = Compute<T>;
  const int64_t dim = arguments.rotation.head_dim;
  load_parameters(arguments, arguments.weight[r], dim, arguments.weight_offset, C(1), &row[0]);
  std::fill_n(row + dim, core::block_size, C(0));
}

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
