// Derivatives of the rotary operators. A rotation is linear in what it rotates, so its derivative
// is a rotation again: tangents are rotated forward, gradients by the transpose. Nothing rotated is
// kept.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "rotary/operator.h"

namespace posembed::rotary {
namespace {

/// Gradient of rotary and of rotary_pair: neither query nor key has to be kept.
class RotaryBackward : public dispatcher::OperatorNode<RotaryBackward> {
 public:
  static constexpr const char* label = "RotaryBackward";

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

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const MaybeTensor places = dispatcher::unpack(positions);
    const MaybeTensor learned = dispatcher::unpack(frequencies);
    const MaybeTensor documents = dispatcher::unpack(cu_seqlens);
    const Rotation back{places, learned, documents, spec, layout, offset, inverse, !transpose};
    if (gradients.size() == 2 && gradients[0].defined() && gradients[1].defined()) {
      auto [query, key] = call_rotary_pair(gradients[0], gradients[1], back);
      return {query, key};
    }
    for (Tensor& gradient : gradients) {
      if (gradient.defined()) gradient = call_rotary(gradient, back);
    }
    return std::move(gradients);
  }

  dispatcher::SavedVariable positions;
  dispatcher::SavedVariable frequencies;
  dispatcher::SavedVariable cu_seqlens;
  std::string spec;
  std::string layout;
  c10::SymInt offset;
  bool inverse = false;
  bool transpose = false;
};

template <typename... Tensors>
auto backward_node(const Rotation& by, const Tensors&... rotated) {
  auto node = dispatcher::node_for<RotaryBackward>(rotated...);
  if (node) {
    node->positions = dispatcher::save(by.positions);
    node->frequencies = dispatcher::save(by.frequencies);
    node->cu_seqlens = dispatcher::save(by.cu_seqlens);
    node->spec = by.spec;
    node->layout = by.layout;
    node->offset = by.offset;
    node->inverse = by.inverse;
    node->transpose = by.transpose;
  }
  return node;
}

Tensor rotary_autograd(const Tensor& query, const Rotation& by) {
  auto node = backward_node(by, query);
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_rotary(query, by);
  }
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(query); direction.defined()) {
    dispatcher::set_tangent(output, call_rotary(direction, by));
  }
  return output;
}

std::tuple<Tensor, Tensor> rotary_pair_autograd(const Tensor& query, const Tensor& key,
                                                const Rotation& by) {
  auto node = backward_node(by, query, key);
  std::tuple<Tensor, Tensor> outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_rotary_pair(query, key, by);
  }
  auto& [query_out, key_out] = outputs;
  for (const auto& [in, out] : {std::tie(query, query_out), std::tie(key, key_out)}) {
    if (node) torch::autograd::set_history(out, node);
    if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
      dispatcher::set_tangent(out, call_rotary(direction, by));
    }
  }
  return outputs;
}

void rotary_in_place_autograd(const Tensor& query, const Rotation& by) {
  dispatcher::check_inference_only(query, "query", "posembed::rotary");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_in_place(query, by);
  }
  torch::autograd::impl::bump_version(query);
}

void rotary_pair_in_place_autograd(const Tensor& query, const Tensor& key, const Rotation& by) {
  dispatcher::check_inference_only(query, "query", "posembed::rotary_pair");
  dispatcher::check_inference_only(key, "key", "posembed::rotary_pair");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_pair_in_place(query, key, by);
  }
  torch::autograd::impl::bump_version(query);
  torch::autograd::impl::bump_version(key);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("rotary", Rotary::kernel<rotary_autograd>);
  m.impl("rotary_pair", RotaryPair::kernel<rotary_pair_autograd>);
  m.impl("rotary_", RotaryInPlace::kernel<rotary_in_place_autograd>);
  m.impl("rotary_pair_", RotaryPairInPlace::kernel<rotary_pair_in_place_autograd>);
}

}  // namespace posembed::rotary
