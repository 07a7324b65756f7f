// Derivatives of the rotary operators. A rotation is linear in what it rotates, so its derivative
// is a rotation again: tangents are rotated forward, gradients by the transpose. Nothing rotated is
// kept.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed::rotary {
namespace {

/// Gradient of rotary and of rotary_pair: neither query nor key has to be kept.
class RotaryBackward : public dispatcher::OperatorNode<RotaryBackward> {
 public:
  static constexpr const char* label = "RotaryBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(spec);
    visit(layout);
    visit(offset);
    visit(inverse);
    visit(transpose);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const MaybeTensor places = dispatcher::unpack(positions);
    if (gradients.size() == 2 && gradients[0].defined() && gradients[1].defined()) {
      auto [query, key] = call_rotary_pair(gradients[0], gradients[1], places, spec, layout, offset,
                                           inverse, !transpose);
      return {query, key};
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const Text numbers = i == 0 ? Text(spec) : Text(specification(spec).for_keys);
      gradients[i] =
          call_rotary(gradients[i], places, numbers, layout, offset, inverse, !transpose);
    }
    return std::move(gradients);
  }

  dispatcher::SavedVariable positions;
  std::string spec;
  std::string layout;
  c10::SymInt offset;
  bool inverse = false;
  bool transpose = false;
};

template <typename... Tensors>
auto backward_node(const MaybeTensor& positions, Text spec, Text layout, const c10::SymInt& offset,
                   bool inverse, bool transpose, const Tensors&... rotated) {
  auto node = dispatcher::node_for<RotaryBackward>(rotated...);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->spec = spec;
    node->layout = layout;
    node->offset = offset;
    node->inverse = inverse;
    node->transpose = transpose;
  }
  return node;
}

Tensor rotary_autograd(const Tensor& query, const MaybeTensor& positions, Text spec, Text layout,
                       c10::SymInt offset, bool inverse, bool transpose) {
  auto node = backward_node(positions, spec, layout, offset, inverse, transpose, query);
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_rotary(query, positions, spec, layout, offset, inverse, transpose);
  }
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(query); direction.defined()) {
    dispatcher::set_tangent(
        output, call_rotary(direction, positions, spec, layout, offset, inverse, transpose));
  }
  return output;
}

std::tuple<Tensor, Tensor> rotary_pair_autograd(const Tensor& query, const Tensor& key,
                                                const MaybeTensor& positions, Text spec,
                                                Text layout, c10::SymInt offset, bool inverse,
                                                bool transpose) {
  auto node = backward_node(positions, spec, layout, offset, inverse, transpose, query, key);
  std::tuple<Tensor, Tensor> outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    outputs = call_rotary_pair(query, key, positions, spec, layout, offset, inverse, transpose);
  }
  auto& [query_out, key_out] = outputs;
  Text for_keys = specification(spec).for_keys;
  for (const auto& [in, out, numbers] :
       {std::tie(query, query_out, spec), std::tie(key, key_out, for_keys)}) {
    if (node) torch::autograd::set_history(out, node);
    if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
      dispatcher::set_tangent(
          out, call_rotary(direction, positions, numbers, layout, offset, inverse, transpose));
    }
  }
  return outputs;
}

void rotary_in_place_autograd(const Tensor& query, const MaybeTensor& positions, Text spec,
                              Text layout, c10::SymInt offset, bool inverse) {
  dispatcher::check_inference_only(query, "query", "posembed::rotary");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_in_place(query, positions, spec, layout, offset, inverse);
  }
  torch::autograd::impl::bump_version(query);
}

void rotary_pair_in_place_autograd(const Tensor& query, const Tensor& key,
                                   const MaybeTensor& positions, Text spec, Text layout,
                                   c10::SymInt offset, bool inverse) {
  dispatcher::check_inference_only(query, "query", "posembed::rotary_pair");
  dispatcher::check_inference_only(key, "key", "posembed::rotary_pair");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_pair_in_place(query, key, positions, spec, layout, offset, inverse);
  }
  torch::autograd::impl::bump_version(query);
  torch::autograd::impl::bump_version(key);
}

void rotary_out_autograd(const Tensor& out, const Tensor& query, const MaybeTensor& positions,
                         Text spec, Text layout, c10::SymInt offset, bool inverse) {
  dispatcher::check_inference_only(out, "out", "posembed::rotary");
  dispatcher::check_inference_only(query, "query", "posembed::rotary");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_out(out, query, positions, spec, layout, offset, inverse);
  }
  torch::autograd::impl::bump_version(out);
}

void rotary_pair_out_autograd(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                              const Tensor& key, const MaybeTensor& positions, Text spec,
                              Text layout, c10::SymInt offset, bool inverse) {
  dispatcher::check_inference_only(query_out, "query_out", "posembed::rotary_pair");
  dispatcher::check_inference_only(key_out, "key_out", "posembed::rotary_pair");
  dispatcher::check_inference_only(query, "query", "posembed::rotary_pair");
  dispatcher::check_inference_only(key, "key", "posembed::rotary_pair");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_rotary_pair_out(query_out, key_out, query, key, positions, spec, layout, offset, inverse);
  }
  torch::autograd::impl::bump_version(query_out);
  torch::autograd::impl::bump_version(key_out);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("rotary", rotary_autograd);
  m.impl("rotary_pair", rotary_pair_autograd);
  m.impl("rotary_", rotary_in_place_autograd);
  m.impl("rotary_pair_", rotary_pair_in_place_autograd);
  m.impl("rotary_out", rotary_out_autograd);
  m.impl("rotary_pair_out", rotary_pair_out_autograd);
}

}  // namespace posembed::rotary
