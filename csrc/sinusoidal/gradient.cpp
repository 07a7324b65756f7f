// Derivatives of the sinusoidal operators. x passes its gradient through; a position's derivative
// is again a sinusoid, a quarter turn on and a frequency larger: sinusoidal_encode of the next
// order.
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "sinusoidal/operator.h"

namespace posembed::sinusoidal {
namespace {

using dispatcher::variable_list;

/// Sum over columns of gradient * d encoding / d position.
Tensor position_gradient(const Tensor& gradient, const Tensor& positions, Text spec,
                         int64_t order) {
  const Tensor slope = call_encode(positions, spec, order + 1, gradient.scalar_type());
  Tensor result = at::sum(gradient.mul(slope), -1);
  // positions [seq] or [1, seq] serve every row of a batch.
  return result.sum_to_size_symint(positions.sym_sizes()).to(positions.scalar_type());
}

/// Tangent of encodings along a tangent of the positions. Without their own tangent: encoding them
/// would ask for the next derivative, and so on for ever.
Tensor position_tangent(const Tensor& direction, const Tensor& positions, Text spec, int64_t order,
                        at::ScalarType dtype) {
  const Tensor plain = positions._fw_primal(/*level=*/0);
  return call_encode(plain, spec, order + 1, dtype).mul(direction.unsqueeze(-1).to(dtype));
}

/// Gradient of sinusoidal_add.
class SinusoidalAddBackward : public dispatcher::OperatorNode<SinusoidalAddBackward> {
 public:
  static constexpr const char* label = "SinusoidalAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(spec);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined() || !needs(1)) return {gradient, Tensor()};
    return {gradient, position_gradient(gradient, *dispatcher::unpack(positions), spec, 0)};
  }

  dispatcher::SavedVariable positions;  // only where they need a gradient
  std::string spec;
};

/// Gradient of sinusoidal_encode.
class SinusoidalEncodeBackward : public dispatcher::OperatorNode<SinusoidalEncodeBackward> {
 public:
  static constexpr const char* label = "SinusoidalEncodeBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(spec);
    visit(order);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {position_gradient(gradients[0], *dispatcher::unpack(positions), spec, order)};
  }

  dispatcher::SavedVariable positions;
  std::string spec;
  int64_t order = 0;
};

Tensor sum_of_tangents(const Tensor& first, const Tensor& second) {
  if (!first.defined()) return second;
  return second.defined() ? first.add(second) : first;
}

Tensor add_autograd(const Tensor& x, const MaybeTensor& positions, Text spec, c10::SymInt offset) {
  const Tensor places = positions.value_or(Tensor());
  auto node = dispatcher::node_for<SinusoidalAddBackward>(x, places);
  if (node) {
    if (places.defined() && places.requires_grad()) node->positions = dispatcher::save(places);
    node->spec = spec;
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_add(x, positions, spec, offset);
  }
  if (node) torch::autograd::set_history(output, node);
  Tensor along = dispatcher::tangent(places);
  if (along.defined()) {
    along = position_tangent(along, places, spec, 0, x.scalar_type()).expand_symint(x.sym_sizes());
  }
  dispatcher::set_tangent(output, sum_of_tangents(dispatcher::tangent(x), along));
  return output;
}

Tensor encode_autograd(const Tensor& positions, Text spec, int64_t order, MaybeType dtype) {
  auto node = dispatcher::node_for<SinusoidalEncodeBackward>(positions);
  if (node) {
    node->positions = dispatcher::save(positions);
    node->spec = spec;
    node->order = order;
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_encode(positions, spec, order, dtype);
  }
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor along = dispatcher::tangent(positions); along.defined()) {
    dispatcher::set_tangent(output,
                            position_tangent(along, positions, spec, order, output.scalar_type()));
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("sinusoidal_add", add_autograd);
  m.impl("sinusoidal_encode", encode_autograd);
}

}  // namespace posembed::sinusoidal
