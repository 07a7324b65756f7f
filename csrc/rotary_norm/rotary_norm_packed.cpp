// Query and key of a packed projection: normalised and rotated out of its memory and, in the
// backward pass, into its one gradient. See rotary/rotary_packed.cpp.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/output_memory.h"
#include "rotary/rotary_checks.h"
#include "rotary_norm/rotary_norm_operator.h"

namespace posembed::rotary_norm {
namespace {

/// Whether each group of a token is a token of its own: where a group has several query heads, no
/// stride leads from head to head. General calls take a copy of the queries instead.
bool groups_are_tokens(const PackedCall& call) {
  return call.groups() > 1 && call.heads > call.key_heads && !is_general(call.call);
}

/// A part of the projection, [.., groups, heads of a group, head_dim], as norm_rotary takes it.
Tensor rows_of(const Tensor& part, const PackedCall& call) {
  return groups_are_tokens(call) ? part.flatten(-4, -3) : part.flatten(-3, -2);
}

/// The inverse of rows_of().
Tensor part_of(const Tensor& rows, const PackedCall& call) {
  return groups_are_tokens(call) ? rows.unflatten(-3, {-1, call.groups()})
                                 : rows.unflatten(-2, {call.groups(), -1});
}

/// From a part of the projection to heads in the call's layout, and back.
Tensor heads_of(const Tensor& part, const PackedCall& call) {
  return rotary::exchanged(part.flatten(-3, -2), call.call.options.layout());
}

Tensor by_group(const Tensor& heads, const PackedCall& call) {
  return rotary::by_group(heads, call, call.call.options.layout());
}

/// The positions of tokens that are groups.
void repeat_positions(NormRotaryCall& options, const PackedCall& call) {
  MaybeTensor positions = options.positions();
  const bool batch_last = options.layout() == Layout::sbhd;  // groups are then samples
  if (!positions.has_value() && !batch_last) {
    const int64_t seq = rotary::dimensions(options.layout()).seq;
    const c10::SymInt first = options.offset().number();
    positions =
        at::arange(first, first + call.qkv.sym_size(seq), call.qkv.options().dtype(at::kLong));
    options.offset(0);
  }
  if (!positions.has_value()) return;
  const bool shared = batch_last && (positions->dim() < 2 || positions->sym_size(-2) == 1);
  if (!shared) positions = positions->repeat_interleave(call.groups(), batch_last ? -2 : -1);
  options.positions(positions);
}

/// The call of norm_rotary for views of the projection.
Call of_views(const PackedCall& call) {
  const auto [query, key, value] = rotary::parts_of(call.qkv, call);
  Call views = call.call;
  views.query = rows_of(query, call);
  views.key = rows_of(key, call);
  if (views.options.layout() == Layout::bhsd) views.options.layout(Layout::bshd);
  if (groups_are_tokens(call)) repeat_positions(views.options, call);
  return views;
}

void check_packed(const PackedCall& call) {
  rotary::check_packed(call.qkv, {call, rotation_of(call.call)});
}

// --------------------------------------------------------------------------------- the kernels

void packed_in_place(const PackedCall& call) {
  dispatcher::check_holds_numbers(call.qkv, "qkv");
  check_packed(call);
  dispatcher::check_writable(call.qkv, "qkv");
  const Call views = of_views(call);
  norm_rotary_(views);
  const auto [query, key, value] = rotary::parts_of(call.qkv, call);
  if (!views.query.is_alias_of(call.qkv)) query.copy_(part_of(views.query, call));
  if (!views.key.is_alias_of(call.qkv)) key.copy_(part_of(views.key, call));
}

/// An operator's arguments without those of the call.
Saved saved_rows(const Two& gradients, const Tensor& query_rstd, const Tensor& key_rstd) {
  return {std::get<0>(gradients), std::get<1>(gradients), query_rstd, key_rstd};
}

Two rows_of(const Tensor& query, const Tensor& key, const PackedCall& call) {
  return {rows_of(by_group(query, call), call), rows_of(by_group(key, call), call)};
}

Three prepare_packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& query_rstd, const Tensor& key_rstd,
                              const PackedCall& call) {
  check_packed(call);
  const Call views = of_views(call);
  check_backward(saved_rows(rows_of(query, key, call), query_rstd, key_rstd), views);
  dispatcher::check_like(value, "value_gradient", key, "key_gradient");
  return {dispatcher::empty_symint(call.qkv.sym_sizes(), call.qkv.options()),
          empty_gradient(views.query_weight, views), empty_gradient(views.key_weight, views)};
}

void packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& query_rstd, const Tensor& key_rstd, const PackedCall& call,
                     const Three& results) {
  const auto& [packed, query_weight, key_weight] = results;
  const auto [query_out, key_out, value_out] = rotary::parts_of(packed, call);
  write_gradients(saved_rows(rows_of(query, key, call), query_rstd, key_rstd), of_views(call),
                  {rows_of(query_out, call), rows_of(key_out, call), query_weight, key_weight});
  value_out.copy_(by_group(value, call));
}

// -------------------------------------------------------------------------------- derivatives

dispatcher::variable_list packed_gradient(const dispatcher::Gradients& gradients,
                                          const PackedCall& forward, const Tensor& query_rstd,
                                          const Tensor& key_rstd) {
  const auto or_zeros = [&](size_t i, const Tensor& part) {
    return gradients[i].defined() ? gradients[i] : at::zeros_like(heads_of(part, forward));
  };
  const auto [query, key, value] = rotary::parts_of(forward.qkv, forward);
  auto [packed, query_weight, key_weight] = norm_rotary_packed_backward(
      or_zeros(0, query), or_zeros(1, key), or_zeros(2, value), query_rstd, key_rstd, forward);
  if (!forward.call.query_weight.has_value()) query_weight = Tensor();
  if (!forward.call.key_weight.has_value()) key_weight = Tensor();
  return {packed, query_weight, key_weight};
}

/// General calls and tangents take the way of separate tensors.
Three packed(const PackedCall& call) {
  check_packed(call);
  const auto value = [&] { return heads_of(std::get<2>(rotary::parts_of(call.qkv, call)), call); };
  const Call views = of_views(call);
  using Node = dispatcher::FunctionNode<norm_rotary_packed, packed_gradient>;
  auto node = dispatcher::node_for<Node>(call.qkv, call.call.query_weight, call.call.key_weight);
  if (!node || is_general(views) || has_tangent(views)) {
    const auto [query, key] = norm_rotary(views);
    return {heads_of(part_of(query, call), call), heads_of(part_of(key, call), call), value()};
  }
  const auto [query, key, query_rstd, key_rstd] = dispatcher::below_autograd([&] {
    const auto [query, key, query_rstd, key_rstd] = norm_rotary_forward(views);
    return Four{heads_of(part_of(query, call), call), heads_of(part_of(key, call), call),
                query_rstd, key_rstd};
  });
  node->save(call, query_rstd, key_rstd);
  torch::autograd::set_history(query, node);
  torch::autograd::set_history(key, node);
  const at::AutoDispatchBelowAutograd only_tracked_as_view;
  const Tensor third = value();
  torch::autograd::set_history(third, node);
  return {query, key, third};
}

/// Second derivatives and tangents take the way of separate tensors, too.
Three packed_backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& query_rstd, const Tensor& key_rstd,
                               const PackedCall& call) {
  const auto is_tangent = [](const Tensor& tensor) {
    return dispatcher::tangent(tensor).defined();
  };
  const Call views = of_views(call);
  if (!torch::autograd::compute_requires_grad(query, key, value, call.qkv, views.query_weight,
                                              views.key_weight) &&
      !has_tangent(views) && !is_tangent(query) && !is_tangent(key) && !is_tangent(value)) {
    return dispatcher::below_autograd(
        [&] { return norm_rotary_packed_backward(query, key, value, query_rstd, key_rstd, call); });
  }
  const auto [query_rows, key_rows] = rows_of(query, key, call);
  const auto [of_query, of_key, query_weight, key_weight] =
      norm_rotary_backward(query_rows, key_rows, query_rstd, key_rstd, views);
  const Tensor packed =
      at::cat({part_of(of_query, call), part_of(of_key, call), by_group(value, call)}, -2);
  return {packed.flatten(-3), query_weight, key_weight};
}

Three packed_autocast(const PackedCall& call) {
  PackedCall changed = call;
  changed.call.query = changed.call.key = call.qkv;
  changed.call = with_weights_like_data(changed.call);
  return norm_rotary_packed(changed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  norm_rotary_packed.compose_batched<packed>(m);
  norm_rotary_packed.autocast<packed_autocast>(m);
  norm_rotary_packed_.compose_batched<packed_in_place>(m);
  norm_rotary_packed_backward.implement<prepare_packed_backward, packed_backward>(m);
  norm_rotary_packed_backward.differentiate<packed_backward_autograd>(m);
}

}  // namespace posembed::rotary_norm
