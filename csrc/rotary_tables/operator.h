// The operators that rotate by given tables, as C++ code calls them and as their kernels are
// registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/rotary_tables.h"
#include "rotary/operator.h"

namespace posembed::rotary_tables {

using at::Tensor;

/// The arguments of all schemas after query and key.
struct TableRotation {
  RotaryTables tables;
  bool transpose = false;

  POSEMBED_FIELDS(self.tables.cos(), self.tables.sin(), self.tables.layout(),
                  self.tables.interleaved(), self.tables.half_width(), self.tables.start(),
                  self.tables.numerics(), self.transpose)
};

/// Operators that take a TableRotation after the tensors.
template <typename Result, typename... Tensors>
using Operator = dispatcher::Operator<Result(Tensors...), TableRotation>;

using Two = std::tuple<Tensor, Tensor>;

inline const Operator<Tensor, const Tensor&> rotary_tables{"rotary_tables"};
inline const Operator<Two, const Tensor&, const Tensor&> rotary_tables_pair{"rotary_tables_pair"};

/// In place.
inline const Operator<void, const Tensor&> rotary_tables_{"rotary_tables_"};
inline const Operator<void, const Tensor&, const Tensor&> rotary_tables_pair_{
    "rotary_tables_pair_"};

/// Into given memory, which comes first.
inline const Operator<void, const Tensor&, const Tensor&> rotary_tables_out{"rotary_tables_out"};
inline const Operator<void, const Tensor&, const Tensor&, const Tensor&, const Tensor&>
    rotary_tables_pair_out{"rotary_tables_pair_out"};

/// The dtype of the result for an input of dtype `type`.
at::ScalarType result_type(at::ScalarType type, const RotaryTables& tables);

/// The number of pairs that tables rotate.
c10::SymInt pairs_of(const RotaryTables& tables);

/// Whether tables are [batch or 1, seq, heads or 1, width].
bool has_heads(const RotaryTables& tables);

}  // namespace posembed::rotary_tables
