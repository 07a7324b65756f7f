// Query and key of a packed projection: rotated straight out of its memory and, in the backward
// pass, straight into its one gradient, which torch would join from three.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "dispatcher/checks.h"
#include "dispatcher/linear.h"
#include "dispatcher/output_memory.h"
#include "rotary/rotary_checks.h"
#include "rotary/rotary_operator.h"
#include "rotary/rotary_specification.h"

namespace posembed::rotary {
namespace {

/// The rotation of heads by token.
Rotation by_token(Rotation rotation) {
  if (rotation.call.layout() == Layout::bhsd) rotation.call.layout(Layout::bshd);
  return rotation;
}

}  // namespace

// ---------------------------------------------------------------------- heads in a projection

Three parts_of(const Tensor& qkv, const PackedHeads& packing) {
  const int64_t groups = packing.groups(), keys = packing.key_heads / groups;
  const int64_t queries = packing.heads / groups;
  const Tensor heads = qkv.unflatten(-1, {groups, queries + 2 * keys, -1});
  return {heads.narrow(-2, 0, queries), heads.narrow(-2, queries, keys),
          heads.narrow(-2, queries + keys, keys)};
}

Tensor exchanged(const Tensor& heads, Layout layout) {
  return layout == Layout::bhsd ? heads.transpose(1, 2) : heads;
}

Tensor by_group(const Tensor& heads, const PackedHeads& packing, Layout layout) {
  return exchanged(heads, layout).unflatten(-2, {packing.groups(), -1});
}

void check_packed(const Tensor& qkv, const PackedRotation& call) {
  const Rotation rotation = by_token(call.rotation);
  const Dimensions where = dimensions(rotation.call.layout());
  const char* const shapes[] = {"[tokens, width]", "[batch, seq, width]", "[seq, batch, width]"};
  dispatcher::check_rank(qkv, "qkv", where.rank - 1, shapes[where.batch + 1]);
  TORCH_CHECK_VALUE(call.heads > 0, "heads: expected a positive number, got ", call.heads);
  TORCH_CHECK_VALUE(call.key_heads > 0 && call.heads % call.key_heads == 0,
                    "key_heads: expected a divisor of heads ", call.heads, ", got ",
                    call.key_heads);
  const int64_t head_dim = specification(rotation.spec)->spec.head_dim;
  dispatcher::check_size(qkv.sym_size(-1), (call.heads + 2 * call.key_heads) * head_dim, "qkv",
                         "(heads + 2 * key_heads) * head_dim");
  const auto of_size = [&](int64_t heads) {  // wherever they stand
    return qkv.narrow(-1, 0, heads * head_dim).unflatten(-1, {heads, head_dim});
  };
  const Tensor key = of_size(call.key_heads);
  check(of_size(call.heads), &key, rotation, {"qkv", "qkv"});
}

namespace {

/// A part in the call's layout. A view, but for queries of which a group has several.
Tensor laid_out(const Tensor& part, const PackedRotation& call) {
  return exchanged(part.flatten(-3, -2), call.rotation.call.layout());
}

/// The inverse of laid_out().
Tensor by_group(const Tensor& heads, const PackedRotation& call) {
  return by_group(heads, call, call.rotation.call.layout());
}

// --------------------------------------------------------------------------------- the kernel

/// Rotates query and key in groups, in one launch. Where a group has several query heads, no stride
/// leads from head to head: groups then stand for the batch, and samples are rotated one by one.
void rotate_parts(const Two& in, const Two& out, const PackedRotation& call) {
  const SpecificationPointer spec = specification(call.rotation.spec);
  Rotation rotation = by_token(call.rotation);
  const Dimensions where = dimensions(rotation.call.layout());
  const MaybeTensor positions = rotation.call.positions();
  const bool at_once = call.heads == call.key_heads || call.groups() == 1;
  const int64_t samples = at_once || where.batch < 0 ? 1 : std::get<0>(in).size(where.batch);
  if (!at_once) rotation.call.layout(Layout::bshd);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const auto heads = [&](const Tensor& part) {
      if (at_once) return part.flatten(-3, -2);
      return (where.batch < 0 ? part : part.select(where.batch, sample)).transpose(0, 1);
    };
    if (!at_once && positions.has_value() && positions->dim() > 1) {
      rotation.call.positions(where.batch < 0           ? positions->unsqueeze(1)
                              : positions->size(-2) > 1 ? positions->narrow(-2, sample, 1)
                                                        : *positions);
    }
    const Tensor from[] = {heads(std::get<0>(in)), heads(std::get<1>(in))};
    const Tensor to[] = {heads(std::get<0>(out)), heads(std::get<1>(out))};
    rotate({{&from[0], &from[1]}, {&to[0], &to[1]}, 2}, rotation, *spec);
  }
}

Two prepare_packed_pair(const Tensor& qkv, const PackedRotation& call) {
  check_packed(qkv, call);
  const int64_t head_dim = specification(call.rotation.spec)->spec.head_dim;
  const auto empty = [&](int64_t heads) {
    c10::SymDimVector sizes(qkv.sym_sizes().begin(), qkv.sym_sizes().end() - 1);
    sizes.insert(sizes.end(), {heads, head_dim});
    return exchanged(dispatcher::empty_symint(sizes, qkv.options()), call.rotation.call.layout());
  };
  return {empty(call.heads), empty(call.key_heads)};
}

void rotate_packed_pair(const Tensor& qkv, const PackedRotation& call, const Two& results) {
  const auto [query, key, value] = parts_of(dispatcher::with_contiguous_last_dim(qkv), call);
  const auto& [query_out, key_out] = results;
  rotate_parts({query, key}, {by_group(query_out, call), by_group(key_out, call)}, call);
}

void check_packed_in_place(const Tensor& qkv, const PackedRotation& call) {
  check_packed(qkv, call);
  dispatcher::check_writable(qkv, "qkv");
}

void rotate_packed_in_place(const Tensor& qkv, const PackedRotation& call) {
  const auto [query, key, value] = parts_of(qkv, call);
  rotate_parts({query, key}, {query, key}, call);
}

Tensor prepare_packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                               const PackedRotation& call) {
  const Dimensions where = dimensions(call.rotation.call.layout());
  check(query, &key, call.rotation);
  dispatcher::check_size(query.sym_size(where.heads), call.heads, "query", "heads");
  dispatcher::check_size(key.sym_size(where.heads), call.key_heads, "key", "heads");
  dispatcher::check_like(value, "value", key, "key");
  c10::SymDimVector sizes(query.sym_sizes().begin(), query.sym_sizes().end());
  sizes.back() = (call.heads + 2 * call.key_heads) * sizes.back();
  sizes.erase(sizes.begin() + where.heads);
  Tensor packed = dispatcher::empty_symint(sizes, query.options());
  check_packed(packed, call);
  return packed;
}

void packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                     const PackedRotation& call, const Tensor& packed) {
  const auto [query_out, key_out, value_out] = parts_of(packed, call);
  const auto readable = [&](const Tensor& gradient) {
    return by_group(dispatcher::with_contiguous_last_dim(gradient), call);
  };
  rotate_parts({readable(query), readable(key)}, {query_out, key_out}, call);
  value_out.copy_(by_group(value, call));
}

// -------------------------------------------------------------------------------- derivatives

using dispatcher::FunctionNode;
using dispatcher::Gradients;
using dispatcher::variable_list;

PackedRotation transposed(PackedRotation call) {
  call.rotation.transpose = !call.rotation.transpose;
  return call;
}

/// rotary_packed_backward with zeros for gradients that are undefined; undefined if all are.
Tensor joined(variable_list gradients, const PackedRotation& call) {
  const auto given = std::find_if(gradients.begin(), gradients.end(),
                                  [](const Tensor& gradient) { return gradient.defined(); });
  if (given == gradients.end()) return {};
  const Tensor like = *given;
  c10::SymDimVector sizes(like.sym_sizes().begin(), like.sym_sizes().end());
  for (size_t i = 0; i < 3; ++i) {
    const auto heads = static_cast<size_t>(dimensions(call.rotation.call.layout()).heads);
    sizes[heads] = i == 0 ? call.heads : call.key_heads;
    if (!gradients[i].defined()) gradients[i] = at::zeros_symint(sizes, like.options());
  }
  return rotary_packed_backward(gradients[0], gradients[1], gradients[2], call);
}

/// Gradient of rotary_packed_pair, or of rotary_packed, which adds the value.
variable_list packed_gradient(const Gradients& gradients, const PackedRotation& call) {
  variable_list parts(3);
  for (size_t i = 0; i < gradients.size(); ++i) parts[i] = gradients[i];
  return {joined(std::move(parts), transposed(call))};
}

using PackedNode = FunctionNode<rotary_packed, packed_gradient>;

variable_list joined_gradient(const Gradients& gradients, const PackedRotation& call) {
  const auto [query, key, value] = rotary_packed(gradients[0], transposed(call));
  return {query, key, value};
}

/// Tangents and frequencies that learn take the way of separate tensors.
Two packed_pair_autograd(const Tensor& qkv, const PackedRotation& call) {
  const MaybeTensor& frequencies = call.rotation.call.frequencies();
  if (dispatcher::tangent(qkv).defined() || torch::autograd::compute_requires_grad(frequencies) ||
      (frequencies.has_value() && dispatcher::tangent(*frequencies).defined())) {
    check_packed(qkv, call);
    const auto [query, key, value] = parts_of(qkv, call);
    return rotary_pair(laid_out(query, call), laid_out(key, call), call.rotation);
  }
  auto node = dispatcher::node_for<PackedNode>(qkv);
  Two results = dispatcher::below_autograd([&] { return rotary_packed_pair(qkv, call); });
  if (node) {
    node->save(call);
    torch::autograd::set_history(std::get<0>(results), node);
    torch::autograd::set_history(std::get<1>(results), node);
  }
  return results;
}

/// The value is a view as torch makes it; where query and key have a node of their own, it is that
/// node's third result, so that its gradient arrives with theirs.
Three packed(const Tensor& qkv, const PackedRotation& call) {
  const auto [query, key] = rotary_packed_pair(qkv, call);
  const auto node = query.grad_fn();
  const bool takes_value = dynamic_cast<PackedNode*>(node.get()) != nullptr;
  std::optional<at::AutoDispatchBelowAutograd> only_tracked_as_view;
  if (takes_value) only_tracked_as_view.emplace();
  const Tensor value = laid_out(std::get<2>(parts_of(qkv, call)), call);
  if (takes_value) torch::autograd::set_history(value, node);
  return {query, key, value};
}

Tensor packed_backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                const PackedRotation& call) {
  using Node = FunctionNode<rotary_packed_backward, joined_gradient>;
  auto node = dispatcher::node_for<Node>(query, key, value);
  Tensor packed =
      dispatcher::below_autograd([&] { return rotary_packed_backward(query, key, value, call); });
  if (node) node->save(call);
  if (node) torch::autograd::set_history(packed, node);
  using dispatcher::tangent;
  dispatcher::set_tangent(packed, joined({tangent(query), tangent(key), tangent(value)}, call));
  return packed;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  rotary_packed.compose_batched<packed>(m);
  rotary_packed_pair.implement<prepare_packed_pair, rotate_packed_pair>(m);
  rotary_packed_pair.differentiate<packed_pair_autograd>(m);
  rotary_packed_.implement<check_packed_in_place, rotate_packed_in_place>(m);
  rotary_packed_.refuse_gradients(m);
  rotary_packed_backward.implement<prepare_packed_backward, packed_backward>(m);
  rotary_packed_backward.differentiate<packed_backward_autograd>(m);
}

}  // namespace posembed::rotary
