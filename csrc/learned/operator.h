// C++ calls of the learned-position operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"

namespace posembed::learned {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// The rows of a sequence's positions, in the order of the schemas.
struct Rows {
  MaybeTensor positions;  // int [seq], [1, seq] or [batch, seq]; none: offset, offset + 1, …
  Offset offset = 0;      // a number
  int64_t first_row = 0;  // the row of position 0

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.positions, self.offset, self.first_row);
  }
};

using Add = dispatcher::Spread<Rows, Tensor(const Tensor&, const Tensor&)>;

inline Tensor call_learned_add(const Tensor& x, const Tensor& weight, const Rows& rows) {
  static const auto handle = dispatcher::find<Add::Signature>("posembed::learned_add");
  return Add::call(handle, x, weight, rows);
}

inline Tensor call_learned_encode(const Tensor& weight, const Tensor& positions,
                                  int64_t first_row = 0) {
  using Signature = Tensor(const Tensor&, const Tensor&, int64_t);
  static const auto handle = dispatcher::find<Signature>("posembed::learned_encode");
  return handle.call(weight, positions, first_row);
}

/// The table's gradient; `count`: its number of rows.
using Backward = dispatcher::Spread<Rows, Tensor(const Tensor&, c10::SymInt)>;

inline Tensor call_learned_backward(const Tensor& gradient, const c10::SymInt& count,
                                    const Rows& rows) {
  static const auto handle = dispatcher::find<Backward::Signature>("posembed::learned_backward");
  return Backward::call(handle, gradient, count, rows);
}

inline Tensor call_learned_extend(const Tensor& weight, int64_t max_positions, int64_t first_row,
                                  std::string_view method) {
  using Signature = Tensor(const Tensor&, int64_t, int64_t, std::string_view);
  static const auto handle = dispatcher::find<Signature>("posembed::learned_extend");
  return handle.call(weight, max_positions, first_row, method);
}

inline Tensor call_learned_positions(const Tensor& mask, const c10::SymInt& past,
                                     const c10::SymInt& skip) {
  using Signature = Tensor(const Tensor&, c10::SymInt, c10::SymInt);
  static const auto handle = dispatcher::find<Signature>("posembed::learned_positions");
  return handle.call(mask, past, skip);
}

/// weight: floating [first_row + max_positions, embedding_dim].
void check_table(const Tensor& weight, const char* argument, int64_t first_row);

/// positions: int [seq], [1, seq] or [batch, seq], or none. Rejects an offset given with them.
void check_positions(const MaybeTensor& positions, const c10::SymInt& batch, const c10::SymInt& seq,
                     const c10::SymInt& offset);

/// Checks that positions offset, offset + 1, … of a sequence have rows.
void check_length(int64_t offset, int64_t seq, int64_t rows, int64_t first_row);

/// Checks that given positions, on the CPU, have rows.
void check_position_values(const Tensor& positions, int64_t rows, int64_t first_row);

}  // namespace posembed::learned
