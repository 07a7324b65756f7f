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
Rotation transposed(Rotation by) {
  by.transpose = !by.transpose;
  return by;
}

Rotation with_frequencies(Rotation by, MaybeTensor frequencies) {
  by.call.frequencies(std::move(frequencies));
  return by;
}

/// The text for rotating a tensor on its own as the key of a pair.
std::string text_of_key(const Rotation& by) { return specification(by.spec)->for_keys; }

Rotation with_text(Rotation by, Text spec) {
  by.spec = spec;
  return by;
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
    const Rotation by = rotation.unpack(), back = transposed(by);
    const size_t count = gradients.size();
    if (count == 2 && gradients[0].defined() && gradients[1].defined()) {
      std::tie(gradients[0], gradients[1]) = rotary_pair(gradients[0], gradients[1], back);
    } else {
      if (gradients[0].defined()) gradients[0] = rotary(gradients[0], back);
      if (count == 2 && gradients[1].defined()) {
        const std::string spec = text_of_key(by);
        gradients[1] = rotary(gradients[1], with_text(back, spec));
      }
    }
    gradients.emplace_back();
    if (!needs(count)) return std::move(gradients);
    const SavedVariable* const rotated[] = {&query, &key};
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const Tensor part =
          rotary_frequencies_backward(gradients[i], *dispatcher::unpack(*rotated[i]), by);
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
    const Rotation by = rotation.unpack();
    variable_list result(2);
    if (needs(0)) result[0] = rotary_tangent(gradient, transposed(by));
    if (needs(1)) {
      result[1] = rotary_frequencies_backward(gradient, *dispatcher::unpack(rotated), by);
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
    const Rotation along = with_frequencies(rotation.unpack(), gradients[0]);
    variable_list result(2);
    if (needs(0)) {
      result[0] = rotary_tangent(*dispatcher::unpack(query), along);
    }
    if (needs(1)) {
      result[1] = rotary_tangent(*dispatcher::unpack(gradient), transposed(along));
    }
    return result;
  }

  SavedRotation rotation;
  SavedVariable gradient, query;
};

/// The node of a rotation. Saves the rotated tensors only for the gradient of frequencies.
template <typename... Keys>
auto backward_node(const Rotation& by, const Tensor& query, const Keys&... key) {
  auto node = dispatcher::node_for<RotaryBackward>(query, key..., by.call.frequencies());
  if (node) {
    node->rotation.save(by);
    if (by.call.frequencies().has_value() && by.call.frequencies()->requires_grad()) {
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
Tensor rotated_tangent(const Tensor& in, const Tensor& out, const Rotation& by) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    result = rotary(direction, with_frequencies(by, primal(by.call.frequencies())));
  }
  if (MaybeTensor direction = tangent_of(by.call.frequencies()); direction.has_value()) {
    result = dispatcher::accumulate(
        result, rotary_tangent(out, with_frequencies(by, std::move(direction))));
  }
  return result;
}

bool has_tangent(const Tensor& in, const Rotation& by) {
  return dispatcher::tangent(in).defined() || tangent_of(by.call.frequencies()).has_value();
}

Tensor one_autograd(const Tensor& query, const Rotation& by) {
  auto node = backward_node(by, query);
  Tensor output = dispatcher::below_autograd([&] { return rotary(query, by); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, output, by));
  return output;
}

std::tuple<Tensor, Tensor> pair_autograd(const Tensor& query, const Tensor& key,
                                         const Rotation& by) {
  auto node = backward_node(by, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return rotary_pair(query, key, by); });
  auto& [query_out, key_out] = outputs;
  if (node) torch::autograd::set_history(query_out, node);
  if (node) torch::autograd::set_history(key_out, node);
  dispatcher::set_tangent(query_out, rotated_tangent(query, query_out, by));
  if (has_tangent(key, by)) {
    const std::string spec = text_of_key(by);
    dispatcher::set_tangent(key_out, rotated_tangent(key, key_out, with_text(by, spec)));
  }
  return outputs;
}

Tensor tangent_autograd(const Tensor& rotated, const Rotation& by) {
  auto node = dispatcher::node_for<RotaryTangentBackward>(rotated, by.call.frequencies());
  if (node) {
    node->rotation.save(by);
    node->rotated = dispatcher::save(rotated);
  }
  const Tensor direction = by.call.frequencies().value_or(Tensor());
  return dispatcher::bilinear(node, rotated, direction, [&](const Tensor& in, const Tensor& along) {
    const MaybeTensor given = along.defined() ? MaybeTensor(along) : std::nullopt;
    return rotary_tangent(in, with_frequencies(by, given));
  });
}

Tensor frequencies_backward_autograd(const Tensor& gradient, const Tensor& query,
                                     const Rotation& by) {
  auto node = dispatcher::node_for<RotaryFrequenciesBackwardBackward>(gradient, query);
  if (node) {
    node->rotation.save(by);
    node->gradient = dispatcher::save(gradient);
    node->query = dispatcher::save(query);
  }
  // Only the dtype of the frequencies matters.
  const Rotation plain = with_frequencies(by, primal(by.call.frequencies()));
  return dispatcher::bilinear(node, gradient, query, [&](const Tensor& of, const Tensor& in) {
    return rotary_frequencies_backward(of, in, plain);
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
