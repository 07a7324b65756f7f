// Derivatives of rotations by given tables. They are linear in the rotated tensor, whose gradient
// is rotated by the transpose, and in the tables, whose gradient is composed of torch's operators.
// Rotated tensors are saved only if tables need a gradient.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "rotary/arguments.h"
#include "rotary_tables/operator.h"

namespace posembed::rotary_tables {
namespace {

using dispatcher::SavedVariable;
using dispatcher::variable_list;
using MaybeTensor = std::optional<Tensor>;

TableRotation transposed(TableRotation rotation) {
  rotation.transpose = !rotation.transpose;
  return rotation;
}

// ------------------------------------------------------------------------------ gradient of tables

/// The two components of each pair, as [batch, seq, heads, pairs].
struct Pairs {
  Tensor first, second;
};

Pairs pairs_in(const Tensor& tensor, const RotaryTables& tables, at::ScalarType type) {
  const rotary::Dimensions where = rotary::dimensions(tables.layout());
  Tensor rows = tensor.to(type);
  if (where.batch < 0) {
    rows = rows.unsqueeze(0);
  } else {
    rows = rows.permute({where.batch, where.seq, where.heads, 3});
  }
  const c10::SymInt pairs = pairs_of(tables), start = tables.start();
  const auto part = [&](const c10::SymInt& begin, const c10::SymInt& end, int64_t step) {
    return rows.slice_symint(-1, start + begin, start + end, step);
  };
  if (tables.interleaved()) return {part(0, 2 * pairs, 2), part(1, 2 * pairs, 2)};
  return {part(0, pairs, 1), part(pairs, 2 * pairs, 1)};
}

/// Sums a gradient [batch, seq, heads, pairs] over what shares the rows of the tables.
Tensor over_rows(const RotaryTables& tables, const Tensor& gradient) {
  const Tensor& table = tables.cos();
  Tensor sum = gradient;
  if (!has_heads(tables)) {
    sum = sum.sum(2);
  } else if (table.sym_size(2) == 1) {
    sum = sum.sum(2, /*keepdim=*/true);
  }
  if (table.dim() == 2) return sum.sum(0);
  return table.sym_size(0) == 1 ? sum.sum(0, /*keepdim=*/true) : sum;
}

/// The gradient of a table from the terms of both components of each pair, [batch, seq, heads,
/// pairs]: their sum if the components share a value.
Tensor gradient_of_table(const RotaryTables& tables, const Tensor& first, const Tensor& second) {
  if (tables.half_width() || tables.cos().is_complex()) return over_rows(tables, first + second);
  const Tensor parts[] = {over_rows(tables, first), over_rows(tables, second)};
  if (!tables.interleaved()) return at::cat(parts, -1);
  return at::stack(parts, -1).reshape_symint(tables.cos().sym_sizes());
}

/// Gradients of cosines and sines.
struct TableGradients {
  Tensor cosine, sine;
};

TableGradients table_gradients(const Tensor& gradient, const Tensor& input,
                               const TableRotation& rotation) {
  const RotaryTables& tables = rotation.tables;
  const at::ScalarType type =
      at::promote_types(at::kFloat, at::promote_types(gradient.scalar_type(), input.scalar_type()));
  const Pairs g = pairs_in(gradient, tables, type), x = pairs_in(input, tables, type);
  const Tensor cosine = gradient_of_table(tables, g.first * x.first, g.second * x.second);
  const Tensor along = g.first * x.second, against = g.second * x.first;
  return {cosine, rotation.transpose ? gradient_of_table(tables, -against, along)
                                     : gradient_of_table(tables, -along, against)};
}

/// The same in the tables' dtype; complex tables have one gradient.
std::pair<Tensor, Tensor> gradients_of_tables(const TableGradients& sums, const Tensor& cos) {
  if (cos.is_complex()) {
    return {at::complex(sums.cosine, sums.sine).to(cos.scalar_type()), Tensor()};
  }
  return {sums.cosine.to(cos.scalar_type()), sums.sine.to(cos.scalar_type())};
}

// -------------------------------------------------------------------------------------------- node

/// Gradient of rotary_tables and of rotary_tables_pair.
class RotaryTablesBackward : public dispatcher::OperatorNode<RotaryTablesBackward> {
 public:
  static constexpr const char* label = "RotaryTablesBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(query);
    visit(key);
  }

  /// Takes a gradient for each rotated tensor; returns two more, those of cos and sin.
  variable_list backward(variable_list&& gradients) {
    const TableRotation rotation = call.unpack();
    const size_t count = gradients.size();
    variable_list result(count + 2);
    if (needs(count) || needs(count + 1)) {
      const SavedVariable* const rotated[] = {&query, &key};
      TableGradients sums;
      for (size_t i = 0; i < count; ++i) {
        if (!gradients[i].defined()) continue;
        const TableGradients own =
            table_gradients(gradients[i], *dispatcher::unpack(*rotated[i]), rotation);
        sums = {dispatcher::accumulate(sums.cosine, own.cosine),
                dispatcher::accumulate(sums.sine, own.sine)};
      }
      if (sums.cosine.defined()) {
        std::tie(result[count], result[count + 1]) =
            gradients_of_tables(sums, rotation.tables.cos());
      }
    }
    rotate_back(gradients, transposed(rotation), &result);
    return result;
  }

  dispatcher::SavedCall<TableRotation> call;
  SavedVariable query, key;  // saved if tables need a gradient

 private:
  void rotate_back(const variable_list& gradients, const TableRotation& back,
                   variable_list* result) const {
    auto& out = *result;
    if (gradients.size() == 2 && gradients[0].defined() && gradients[1].defined()) {
      std::tie(out[0], out[1]) = rotary_tables_pair(gradients[0], gradients[1], back);
      return;
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) out[i] = rotary_tables(gradients[i], back);
    }
  }
};

template <typename... Keys>
auto backward_node(const TableRotation& rotation, const Tensor& query, const Keys&... key) {
  const RotaryTables& tables = rotation.tables;
  auto node = dispatcher::node_for<RotaryTablesBackward>(query, key..., tables.cos(), tables.sin());
  if (node) {
    node->call.save(rotation);
    if (torch::autograd::compute_requires_grad(tables.cos(), tables.sin())) {
      node->query = dispatcher::save(query);
      ((node->key = dispatcher::save(key)), ...);
    }
  }
  return node;
}

// ---------------------------------------------------------------------------------------- tangents

RotaryTables primal(RotaryTables tables) {
  tables.cos(dispatcher::primal(tables.cos()));
  if (tables.sin().has_value()) tables.sin(dispatcher::primal(*tables.sin()));
  return tables;
}

Tensor tangent_or_zeros(const Tensor& table) {
  const Tensor direction = dispatcher::tangent(table);
  return direction.defined() ? direction : at::zeros_like(dispatcher::primal(table));
}

/// The tables' tangents as tables; std::nullopt if they have none.
std::optional<RotaryTables> tangent_of(RotaryTables tables) {
  const bool any = dispatcher::tangent(tables.cos()).defined() ||
                   (tables.sin().has_value() && dispatcher::tangent(*tables.sin()).defined());
  if (!any) return std::nullopt;
  tables.cos(tangent_or_zeros(tables.cos()));
  if (tables.sin().has_value()) tables.sin(tangent_or_zeros(*tables.sin()));
  return tables;
}

/// `input` with zeros where nothing is rotated.
Tensor window_of(const Tensor& input, const RotaryTables& tables) {
  const c10::SymInt rotated = 2 * pairs_of(tables), start = tables.start();
  const Tensor window = input.slice_symint(-1, start, start + rotated);
  return at::constant_pad_nd_symint(window, {start, input.sym_size(-1) - start - rotated});
}

/// Undefined if neither the rotated tensor nor the tables have a tangent.
Tensor rotated_tangent(const Tensor& in, const TableRotation& rotation) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    result = rotary_tables(direction, {primal(rotation.tables), rotation.transpose});
  }
  if (const auto direction = tangent_of(rotation.tables); direction.has_value()) {
    const Tensor window = window_of(dispatcher::primal(in), rotation.tables);
    result =
        dispatcher::accumulate(result, rotary_tables(window, {*direction, rotation.transpose}));
  }
  return result;
}

// ----------------------------------------------------------------------------------------- kernels

Tensor one_autograd(const Tensor& query, const TableRotation& rotation) {
  auto node = backward_node(rotation, query);
  Tensor output = dispatcher::below_autograd([&] { return rotary_tables(query, rotation); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, rotation));
  return output;
}

std::tuple<Tensor, Tensor> pair_autograd(const Tensor& query, const Tensor& key,
                                         const TableRotation& rotation) {
  auto node = backward_node(rotation, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return rotary_tables_pair(query, key, rotation); });
  auto& [query_out, key_out] = outputs;
  if (node) torch::autograd::set_history(query_out, node);
  if (node) torch::autograd::set_history(key_out, node);
  dispatcher::set_tangent(query_out, rotated_tangent(query, rotation));
  dispatcher::set_tangent(key_out, rotated_tangent(key, rotation));
  return outputs;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  rotary_tables.differentiate<one_autograd>(m);
  rotary_tables_pair.differentiate<pair_autograd>(m);
  rotary_tables_.refuse_gradients(m);
  rotary_tables_pair_.refuse_gradients(m);
  rotary_tables_out.refuse_gradients(m);
  rotary_tables_pair_out.refuse_gradients(m);
}

}  // namespace posembed::rotary_tables
