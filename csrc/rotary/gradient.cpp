// Derivatives of the rotary operators. A rotation is linear in its tensor: tangents are rotated
// forward, gradients by the transpose. Frequencies have an operator for tangents and one for
// gradients; both are linear in each argument and each other's derivative. Rotated tensors are
// saved only if frequencies need a gradient.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/tangent.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {
namespace {

using dispatcher::SavedVariable;
using dispatcher::variable_list;

/// A Rotation saved in the members of a node.
struct SavedRotation {
  SavedVariable positions, frequencies, cu_seqlens;
  std::string spec;
  std::string layout;
  c10::SymInt offset;
  bool inverse = false;
  bool transpose = false;

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(frequencies);
    visit(cu_seqlens);
    visit(spec);
    visit(layout);
    visit(offset);
    visit(inverse);
    visit(transpose);
  }

  void save(const Rotation& by) {
    positions = dispatcher::save(by.positions);
    frequencies = dispatcher::save(by.frequencies);
    cu_seqlens = dispatcher::save(by.cu_seqlens);
    spec = by.spec;
    layout = by.layout;
    offset = by.offset;
    inverse = by.inverse;
    transpose = by.transpose;
  }
};

/// The tensors of a SavedRotation, and the rotations that a backward pass needs.
class Unpacked {
 public:
  explicit Unpacked(const SavedRotation& saved)
      : saved_(saved),
        positions_(dispatcher::unpack(saved.positions)),
        frequencies_(dispatcher::unpack(saved.frequencies)),
        cu_seqlens_(dispatcher::unpack(saved.cu_seqlens)) {}

  Rotation forward() const { return with(frequencies_, saved_.transpose); }
  Rotation back() const { return with(frequencies_, !saved_.transpose); }
  Rotation forward(const MaybeTensor& frequencies) const {
    return with(frequencies, saved_.transpose);
  }
  Rotation back(const MaybeTensor& frequencies) const {
    return with(frequencies, !saved_.transpose);
  }

 private:
  Rotation with(const MaybeTensor& frequencies, bool transpose) const {
    return {positions_,    frequencies,   cu_seqlens_,    saved_.spec,
            saved_.layout, saved_.offset, saved_.inverse, transpose};
  }

  const SavedRotation& saved_;
  MaybeTensor positions_, frequencies_, cu_seqlens_;
};

/// The rotation of a tensor on its own as the key of a pair.
Rotation of_key(const Rotation& by) {
  Rotation result = by;
  result.spec = specification(by.spec).for_keys;
  return result;
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
    const Unpacked by(rotation);
    const size_t count = gradients.size();
    if (count == 2 && gradients[0].defined() && gradients[1].defined()) {
      std::tie(gradients[0], gradients[1]) =
          call_rotary_pair(gradients[0], gradients[1], by.back());
    } else {
      for (size_t i = 0; i < count; ++i) {
        if (!gradients[i].defined()) continue;
        gradients[i] = call_rotary(gradients[i], i == 0 ? by.back() : of_key(by.back()));
      }
    }
    gradients.emplace_back();
    if (!needs(count)) return std::move(gradients);
    const SavedVariable* const rotated[] = {&query, &key};
    for (size_t i = 0; i < count; ++i) {
      if (!gradients[i].defined()) continue;
      const Tensor part = call_rotary_frequencies_backward(
          gradients[i], *dispatcher::unpack(*rotated[i]), by.forward());
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
    const Unpacked by(rotation);
    variable_list result(2);
    if (needs(0)) result[0] = call_rotary_tangent(gradient, by.back());
    if (needs(1)) {
      result[1] =
          call_rotary_frequencies_backward(gradient, *dispatcher::unpack(rotated), by.forward());
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
    const MaybeTensor direction = gradients[0];
    const Unpacked by(rotation);
    variable_list result(2);
    if (needs(0)) {
      result[0] = call_rotary_tangent(*dispatcher::unpack(query), by.forward(direction));
    }
    if (needs(1)) {
      result[1] = call_rotary_tangent(*dispatcher::unpack(gradient), by.back(direction));
    }
    return result;
  }

  SavedRotation rotation;
  SavedVariable gradient, query;
};

/// The node of a rotation. Saves the rotated tensors only for the gradient of frequencies.
template <typename... Keys>
auto backward_node(const Rotation& by, const Tensor& query, const Keys&... key) {
  auto node = dispatcher::node_for<RotaryBackward>(query, key..., by.frequencies);
  if (node) {
    node->rotation.save(by);
    if (by.frequencies.has_value() && by.frequencies->requires_grad()) {
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

Rotation with_frequencies(const Rotation& by, const MaybeTensor& frequencies) {
  return {by.positions, frequencies, by.cu_seqlens, by.spec,
          by.layout,    by.offset,   by.inverse,    by.transpose};
}

/// Undefined if neither the rotated tensor nor the frequencies have a tangent.
Tensor rotated_tangent(const Tensor& in, const Tensor& out, const Rotation& by) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    const MaybeTensor frequencies = primal(by.frequencies);
    result = call_rotary(direction, with_frequencies(by, frequencies));
  }
  if (const MaybeTensor direction = tangent_of(by.frequencies); direction.has_value()) {
    result =
        dispatcher::accumulate(result, call_rotary_tangent(out, with_frequencies(by, direction)));
  }
  return result;
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
  const Rotation by_key = of_key(by);
  for (const auto& [in, out, rotation] :
       {std::tie(query, query_out, by), std::tie(key, key_out, by_key)}) {
    if (node) torch::autograd::set_history(out, node);
    dispatcher::set_tangent(out, rotated_tangent(in, out, rotation));
  }
  return outputs;
}

Tensor rotary_tangent_autograd(const Tensor& rotated, const Rotation& by) {
  auto node = dispatcher::node_for<RotaryTangentBackward>(rotated, by.frequencies);
  if (node) {
    node->rotation.save(by);
    node->rotated = dispatcher::save(rotated);
  }
  const Tensor direction = by.frequencies.value_or(Tensor());
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
  const MaybeTensor frequencies = primal(by.frequencies);  // only their dtype matters
  const Rotation plain = with_frequencies(by, frequencies);
  return dispatcher::bilinear(node, gradient, query, [&](const Tensor& of, const Tensor& in) {
    return call_rotary_frequencies_backward(of, in, plain);
  });
}

/// In-place operators record no history for any argument.
void check_inference_only(const Tensor& rotated, const char* argument, const Rotation& by,
                          const char* alternative) {
  dispatcher::check_inference_only(rotated, argument, alternative);
  if (by.frequencies.has_value()) {
    dispatcher::check_inference_only(*by.frequencies, "frequencies", alternative);
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
