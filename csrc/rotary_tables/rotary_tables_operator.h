// The operators that rotate by given tables, as C++ code calls them and as their kernels are
// registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/rotary_tables.h"
#include "rotary/rotary_operator.h"

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

// --------------------------------------------------------------------------------------- arguments
// Turns given tables into the rotary kernels' arguments, for all operators that rotate by them.

/// The checks of tables for rows of `query` that need no values.
void check_tables(const RotaryTables& tables, const at::Tensor& query,
                  const rotary::Dimensions& where);

/// Tables in a form that a kernel can read: without lazy negation or conjugation, and with equal
/// strides. Complex tables become their real and imaginary parts.
RotaryTables readable(const RotaryTables& tables);

/// Points the kernel's arguments to tables that are readable() and must outlive it.
void set_tables(const RotaryTables& tables, rotary::Arguments* call);

}  // namespace posembed::rotary_tables
