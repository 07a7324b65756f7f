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

/// The factors of columns: the weights plus their common offset, then a block of zeros.
template <typename T>
void load_weights(const Arguments& arguments, int64_t r, Row<Compute<T>>& row) {
  using C = Compute<T>;
  const int64_t dim = arguments.rotation.head_dim;
  const T* weight = static_cast<const T*>(arguments.weight[r]);
  const C offset = static_cast<C>(arguments.weight_offset);
  for (int64_t i = 0; i < dim; ++i) row[i] = core::load(weight[i]) + offset;
  std::fill_n(row + dim, core::block_size, C(0));
}

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
