// Derivatives of the rotary operators. A rotation is linear in its tensor: tangents are rotated
// forward, gradients by the transpose. Frequencies have an operator for tangents and one for
// gradients; both are linear in each argument and each other's derivative. Rotated tensors are
// saved only if frequencies need a gradient.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
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
      std::tie(gradients[0], gradients[1]) = call_rotary_pair(gradients[0], gradients[1], back);
    } else {
      if (gradients[0].defined()) gradients[0] = call_rotary(gradients[0], back);
      if (count == 2 && gradients[1].defined()) {
        const std::string spec = text_of_key(by);
        gradients[1] = call_rotary(gradients[1], with_text(back, spec));
      }
    }
    gradients.emplace_back();
    if (!needs(count)) return std::move(gradients);
    const SavedVariable* const rotated[] = {&query, &key};
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const Tensor part =
          call_rotary_frequencies_backward(gradients[i], *dispatcher::unpack(*rotated[i]), by);
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
    if (needs(0)) result[0] = call_rotary_tangent(gradient, transposed(by));
    if (needs(1)) {
      result[1] = call_rotary_frequencies_backward(gradient, *dispatcher::unpack(rotated), by);
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
      result[0] = call_rotary_tangent(*dispatcher::unpack(query), along);
    }
    if (needs(1)) {
      result[1] = call_rotary_tangent(*dispatcher::unpack(gradient), transposed(along));
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
    result = call_rotary(direction, with_frequencies(by, primal(by.call.frequencies())));
  }
  if (MaybeTensor direction = tangent_of(by.call.frequencies()); direction.has_value()) {
    result = dispatcher::accumulate(
        result, call_rotary_tangent(out, with_frequencies(by, std::move(direction))));
  }
  return result;
}

bool has_tangent(const Tensor& in, const Rotation& by) {
  return dispatcher::tangent(in).defined() || tangent_of(by.call.frequencies()).has_value();
}

Tensor rotary_autograd(const Tensor& query, const Rotation& by) {
  auto node = backward_node(by, query);
  Tensor output = dispatcher::below_autograd([&] { return call_rotary(query, by); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, output, by));
  return output;
}

std::tuple<Tensor, Tensor> rotary_pair_autograd(const Tensor& query, const Tensor& key,
                                                const Rotation& by) {
  auto node = backward_node(by, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return call_rotary_pair(query, key, by); });
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

Tensor rotary_tangent_autograd(const Tensor& rotated, const Rotation& by) {
  auto node = dispatcher::node_for<RotaryTangentBackward>(rotated, by.call.frequencies());
  if (node) {
    node->rotation.save(by);
    node->rotated = dispatcher::save(rotated);
  }
  const Tensor direction = by.call.frequencies().value_or(Tensor());
  return dispatcher::bilinear(node, rotated, direction, [&](const Tensor& in, const Tensor& along) {
    const MaybeTensor given = along.defined() ? MaybeTensor(along) : std::nullopt;
    return call_rotary_tangent(in, with_frequencies(by, given));
  });
}

Tensor rotary_frequencies_backward_autograd(const Tensor& gradient, const Tensor& query,
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
    return call_rotary_frequencies_backward(of, in, plain);
  });
}

/// In-place operators record no history for any argument.
void check_inference_only(const Tensor& rotated, const char* argument, const Rotation& by,
                          const char* alternative) {
  dispatcher::check_inference_only(rotated, argument, alternative);
  if (by.call.frequencies().has_value()) {
    dispatcher::check_inference_only(*by.call.frequencies(), "frequencies", alternative);
  }
}

void rotary_in_place_autograd(const Tensor& query, const Rotation& by) {
  check_inference_only(query, "query", by, "posembed::rotary");
  dispatcher::below_autograd([&] { call_rotary_in_place(query, by); });
  torch::autograd::impl::bump_version(query);
}

void rotary_pair_in_place_autograd(const Tensor& query, const Tensor& key, const Rotation& by) {
  check_inference_only(query, "query", by, "posembed::rotary_pair");
  check_inference_only(key, "key", by, "posembed::rotary_pair");
  dispatcher::below_autograd([&] { call_rotary_pair_in_place(query, key, by); });
  torch::autograd::impl::bump_version(query);
  torch::autograd::impl::bump_version(key);
}

void rotary_out_autograd(const Tensor& out, const Tensor& query, const Rotation& by) {
  check_inference_only(out, "out", by, "posembed::rotary");
  check_inference_only(query, "query", by, "posembed::rotary");
  dispatcher::below_autograd([&] { call_rotary_out(out, query, by); });
  torch::autograd::impl::bump_version(out);
}

void rotary_pair_out_autograd(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                              const Tensor& key, const Rotation& by) {
  check_inference_only(query_out, "query_out", by, "posembed::rotary_pair");
  check_inference_only(key_out, "key_out", by, "posembed::rotary_pair");
  check_inference_only(query, "query", by, "posembed::rotary_pair");
  check_inference_only(key, "key", by, "posembed::rotary_pair");
  dispatcher::below_autograd([&] { call_rotary_pair_out(query_out, key_out, query, key, by); });
  torch::autograd::impl::bump_version(query_out);
  torch::autograd::impl::bump_version(key_out);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("rotary", Rotary::kernel<rotary_autograd>);
  m.impl("rotary_pair", RotaryPair::kernel<rotary_pair_autograd>);
  m.impl("rotary_", RotaryInPlace::kernel<rotary_in_place_autograd>);
  m.impl("rotary_pair_", RotaryPairInPlace::kernel<rotary_pair_in_place_autograd>);
  m.impl("rotary_out", RotaryOut::kernel<rotary_out_autograd>);
  m.impl("rotary_pair_out", RotaryPairOut::kernel<rotary_pair_out_autograd>);
  m.impl("rotary_tangent", Rotary::kernel<rotary_tangent_autograd>);
  m.impl("rotary_frequencies_backward",
         RotaryFrequenciesBackward::kernel<rotary_frequencies_backward_autograd>);
}

}  // namespace posembed::rotary
