// C++ calls of the operators that rotate by given tables, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "posembed/rotary_tables.h"
#include "rotary/operator.h"

namespace posembed::rotary_tables {

using at::Tensor;

/// The arguments of all schemas after query and key.
struct TableRotation {
  RotaryTables tables;
  bool transpose = false;

  template <typename Self>
  static auto fields(Self& self) {
    auto& tables = self.tables;
    return std::tie(tables.cos(), tables.sin(), tables.layout(), tables.interleaved(),
                    tables.half_width(), tables.start(), tables.numerics(), self.transpose);
  }
};

/// Operators that take a TableRotation after the tensors.
template <typename Result, typename... Tensors>
using Spread = dispatcher::Spread<TableRotation, Result(Tensors...)>;

using Rotate = Spread<Tensor, const Tensor&>;
using RotatePair = Spread<std::tuple<Tensor, Tensor>, const Tensor&, const Tensor&>;
using RotateInPlace = Spread<void, const Tensor&>;
using RotatePairInPlace = Spread<void, const Tensor&, const Tensor&>;
using RotateOut = Spread<void, const Tensor&, const Tensor&>;
using RotatePairOut = Spread<void, const Tensor&, const Tensor&, const Tensor&, const Tensor&>;

inline Tensor call_rotary_tables(const Tensor& query, const TableRotation& by) {
  static const auto handle = dispatcher::find<Rotate::Signature>("posembed::rotary_tables");
  return Rotate::call(handle, query, by);
}

inline std::tuple<Tensor, Tensor> call_rotary_tables_pair(const Tensor& query, const Tensor& key,
                                                          const TableRotation& by) {
  static const auto handle =
      dispatcher::find<RotatePair::Signature>("posembed::rotary_tables_pair");
  return RotatePair::call(handle, query, key, by);
}

inline void call_rotary_tables_in_place(const Tensor& query, const TableRotation& by) {
  static const auto handle = dispatcher::find<RotateInPlace::Signature>("posembed::rotary_tables_");
  RotateInPlace::call(handle, query, by);
}

inline void call_rotary_tables_pair_in_place(const Tensor& query, const Tensor& key,
                                             const TableRotation& by) {
  static const auto handle =
      dispatcher::find<RotatePairInPlace::Signature>("posembed::rotary_tables_pair_");
  RotatePairInPlace::call(handle, query, key, by);
}

inline void call_rotary_tables_out(const Tensor& out, const Tensor& query,
                                   const TableRotation& by) {
  static const auto handle = dispatcher::find<RotateOut::Signature>("posembed::rotary_tables_out");
  RotateOut::call(handle, out, query, by);
}

inline void call_rotary_tables_pair_out(const Tensor& query_out, const Tensor& key_out,
                                        const Tensor& query, const Tensor& key,
                                        const TableRotation& by) {
  static const auto handle =
      dispatcher::find<RotatePairOut::Signature>("posembed::rotary_tables_pair_out");
  RotatePairOut::call(handle, query_out, key_out, query, key, by);
}

/// The dtype of the result for an input of dtype `type`.
at::ScalarType result_type(at::ScalarType type, const RotaryTables& tables);

/// The number of pairs that tables rotate.
c10::SymInt pairs_of(const RotaryTables& tables);

}  // namespace posembed::rotary_tables
