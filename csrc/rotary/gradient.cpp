// Derivatives of the rotary operators. A rotation is linear in its tensor: tangents are rotated
// forward, gradients by the transpose. Frequencies have an operator for tangents and one for
// gradients; both are linear in each argument and each other's derivative. Rotated tensors are
// saved only if frequencies need a gradient.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {
namespace {

using dispatcher::SavedVariable;
using dispatcher::variable_list;

using SavedRotation = dispatcher::SavedCall<Rotation>;

/// The transpose of a rotation: a rotation by minus the angle, times the same factor.
Rotation transposed(Rotation rotation) {
  rotation.transpose = !rotation.transpose;
  return rotation;
}

Rotation with_frequencies(Rotation rotation, MaybeTensor frequencies) {
  rotation.call.frequencies(std::move(frequencies));
  return rotation;
}

/// The text for rotating a tensor on its own as the key of a pair.
std::string text_of_key(const Rotation& rotation) { return specification(rotation.spec)->for_keys; }

Rotation with_text(Rotation rotation, Text spec) {
  rotation.spec = spec;
  return rotation;
}

/// Gradient of rotary and of rotary_pair.
class RotaryBackward : public dispatcher::OperatorNode<RotaryBackward> {
 public:
  static constexpr const char* label = "RotaryBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    rotation.members(visit);
    visit(query);
    visit(key);
  }

  /// Takes a gradient for each rotated tensor; returns one more, that of frequencies.
  variable_list backward(variable_list&& gradients) {
    const Rotation forward = rotation.unpack(), back = transposed(forward);
    const size_t count = gradients.size();
    if (count == 2 && gradients[0].defined() && gradients[1].defined()) {
      std::tie(gradients[0], gradients[1]) = rotary_pair(gradients[0], gradients[1], back);
    } else {
      if (gradients[0].defined()) gradients[0] = rotary(gradients[0], back);
      if (count == 2 && gradients[1].defined()) {
        const std::string spec = text_of_key(forward);
        gradients[1] = rotary(gradients[1], with_text(back, spec));
      }
    }
    gradients.emplace_back();
    if (!needs(count)) return std::move(gradients);
    const SavedVariable* const rotated[] = {&query, &key};
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const Tensor part =
          rotary_frequencies_backward(gradients[i], *dispatcher::unpack(*rotated[i]), forward);
      gradients[count] = dispatcher::accumulate(gradients[count], part);
    }
    return std::move(gradients);
  }

  SavedRotation rotation;
  SavedVariable query, key;  // saved if frequencies need a gradient
};

/// Gradient of rotary_tangent.
class RotaryTangentBackward : public dispatcher::OperatorNode<RotaryTangentBackward> {
 public:
  static constexpr const char* label = "RotaryTangentBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    rotation.members(visit);
    visit(rotated);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    const Rotation forward = rotation.unpack();
    variable_list result(2);
    if (needs(0)) result[0] = rotary_tangent(gradient, transposed(forward));
    if (needs(1)) {
      result[1] = rotary_frequencies_backward(gradient, *dispatcher::unpack(rotated), forward);
    }
    return result;
  }

  SavedRotation rotation;
  SavedVariable rotated;
};

/// Gradient of rotary_frequencies_backward.
class RotaryFrequenciesBackwardBackward
    : public dispatcher::OperatorNode<RotaryFrequenciesBackwardBackward> {
 public:
  static constexpr const char* label = "RotaryFrequenciesBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    rotation.members(visit);
    visit(gradient);
    visit(query);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor(), Tensor()};
    const Rotation tangent_call = with_frequencies(rotation.unpack(), gradients[0]);
    variable_list result(2);
    if (needs(0)) {
      result[0] = rotary_tangent(*dispatcher::unpack(query), tangent_call);
    }
    if (needs(1)) {
      result[1] = rotary_tangent(*dispatcher::unpack(gradient), transposed(tangent_call));
    }
    return result;
  }

  SavedRotation rotation;
  SavedVariable gradient, query;
};

/// The node of a rotation. Saves the rotated tensors only for the gradient of frequencies.
template <typename... Keys>
auto backward_node(const Rotation& rotation, const Tensor& query, const Keys&... key) {
  auto node = dispatcher::node_for<RotaryBackward>(query, key..., rotation.call.frequencies());
  if (node) {
    node->rotation.save(rotation);
    if (rotation.call.frequencies().has_value() && rotation.call.frequencies()->requires_grad()) {
      node->query = dispatcher::save(query);
      ((node->key = dispatcher::save(key)), ...);
    }
  }
  return node;
}

MaybeTensor primal(const MaybeTensor& tensor) {
  return tensor.has_value() ? MaybeTensor(dispatcher::primal(*tensor)) : std::nullopt;
}

MaybeTensor tangent_of(const MaybeTensor& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  Tensor direction = dispatcher::tangent(*tensor);
  return direction.defined() ? MaybeTensor(std::move(direction)) : std::nullopt;
}

/// Undefined if neither the rotated tensor nor the frequencies have a tangent.
Tensor rotated_tangent(const Tensor& in, const Tensor& out, const Rotation& rotation) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    result = rotary(direction, with_frequencies(rotation, primal(rotation.call.frequencies())));
  }
  if (MaybeTensor direction = tangent_of(rotation.call.frequencies()); direction.has_value()) {
    result = dispatcher::accumulate(
        result, rotary_tangent(out, with_frequencies(rotation, std::move(direction))));
  }
  return result;
}

bool has_tangent(const Tensor& in, const Rotation& rotation) {
  return dispatcher::tangent(in).defined() || tangent_of(rotation.call.frequencies()).has_value();
}

Tensor one_autograd(const Tensor& query, const Rotation& rotation) {
  auto node = backward_node(rotation, query);
  Tensor output = dispatcher::below_autograd([&] { return rotary(query, rotation); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, output, rotation));
  return output;
}

std::tuple<Tensor, Tensor> pair_autograd(const Tensor& query, const Tensor& key,
                                         const Rotation& rotation) {
  auto node = backward_node(rotation, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return rotary_pair(query, key, rotation); });
  auto& [query_out, key_out] = outputs;
  if (node) torch::autograd::set_history(query_out, node);
  if (node) torch::autograd::set_history(key_out, node);
  dispatcher::set_tangent(query_out, rotated_tangent(query, query_out, rotation));
  if (has_tangent(key, rotation)) {
    const std::string spec = text_of_key(rotation);
    dispatcher::set_tangent(key_out, rotated_tangent(key, key_out, with_text(rotation, spec)));
  }
  return outputs;
}

Tensor tangent_autograd(const Tensor& rotated, const Rotation& rotation) {
  auto node = dispatcher::node_for<RotaryTangentBackward>(rotated, rotation.call.frequencies());
  if (node) {
    node->rotation.save(rotation);
    node->rotated = dispatcher::save(rotated);
  }
  const Tensor direction = rotation.call.frequencies().value_or(Tensor());
  return dispatcher::bilinear(
      node, rotated, direction, [&](const Tensor& in, const Tensor& tangent) {
        const MaybeTensor frequencies = tangent.defined() ? MaybeTensor(tangent) : std::nullopt;
        return rotary_tangent(in, with_frequencies(rotation, frequencies));
      });
}

Tensor frequencies_backward_autograd(const Tensor& gradient, const Tensor& query,
                                     const Rotation& rotation) {
  auto node = dispatcher::node_for<RotaryFrequenciesBackwardBackward>(gradient, query);
  if (node) {
    node->rotation.save(rotation);
    node->gradient = dispatcher::save(gradient);
    node->query = dispatcher::save(query);
  }
  // Only the dtype of the frequencies matters.
  const Rotation plain = with_frequencies(rotation, primal(rotation.call.frequencies()));
  return dispatcher::bilinear(node, gradient, query,
                              [&](const Tensor& gradients, const Tensor& rows) {
                                return rotary_frequencies_backward(gradients, rows, plain);
                              });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  rotary.differentiate<one_autograd>(m);
  rotary_pair.differentiate<pair_autograd>(m);
  rotary_.refuse_gradients(m);
  rotary_pair_.refuse_gradients(m);
  rotary_out.refuse_gradients(m);
  rotary_pair_out.refuse_gradients(m);
  rotary_tangent.differentiate<tangent_autograd>(m);
  rotary_frequencies_backward.differentiate<frequencies_backward_autograd>(m);
}

}  // namespace posembed::rotary
