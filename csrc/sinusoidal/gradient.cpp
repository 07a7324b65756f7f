// Derivatives of the sinusoidal operators. The gradient of x is the output's gradient. The
// derivative by a position is a sinusoid again, a quarter turn ahead and times the frequency:
// sinusoidal_encode of the next order. A learned scale multiplies it.
#include <ATen/ops/arange.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "sinusoidal/operator.h"

namespace posembed::sinusoidal {
namespace {

using dispatcher::variable_list;

/// The inputs of encodings.
struct Encoded {
  Tensor positions;
  MaybeTensor scale;
  Text spec;
  int64_t order;

  Tensor derivative(at::ScalarType dtype) const {
    return call_encode(positions, scale, spec, order + 1, dtype);
  }
  /// Encodings with scale 1.
  Tensor unscaled(at::ScalarType dtype) const {
    return call_encode(positions, std::nullopt, spec, order, dtype);
  }
  /// The same without tangents; with tangents, each derivative would need the next one.
  Encoded primal() const {
    return {dispatcher::primal(positions),
            scale.has_value() ? MaybeTensor(dispatcher::primal(*scale)) : scale, spec, order};
  }
};

/// Sum over columns of gradient * d encoding / d position, in float32 for 16-bit data.
Tensor position_gradient(const Tensor& gradient, const Encoded& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor result = at::sum(gradient.to(type).mul(encoded.derivative(type)), -1);
  // Positions [seq] or [1, seq] serve every row of a batch.
  return result.sum_to_size_symint(encoded.positions.sym_sizes())
      .to(encoded.positions.scalar_type());
}

/// Sum of gradient * encoding, in float32 for 16-bit data.
Tensor scale_gradient(const Tensor& gradient, const Encoded& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor rows = at::sum(gradient.to(type).mul(encoded.unscaled(type)), -1);
  return at::sum(rows).reshape_symint(encoded.scale->sym_sizes()).to(encoded.scale->scalar_type());
}

/// The tangent of encodings, from the tangents of positions and scale; undefined if neither has
/// one.
Tensor encoding_tangent(const Encoded& encoded, at::ScalarType dtype) {
  const at::ScalarType type = at::promote_types(dtype, at::kFloat);  // rounded once
  const Encoded plain = encoded.primal();
  Tensor result;
  if (const Tensor along = dispatcher::tangent(encoded.positions); along.defined()) {
    result = plain.derivative(type).mul(along.unsqueeze(-1).to(type));
  }
  const Tensor along = encoded.scale.has_value() ? dispatcher::tangent(*encoded.scale) : Tensor();
  if (along.defined()) {
    result = dispatcher::accumulate(result, plain.unscaled(type).mul(along.reshape({}).to(type)));
  }
  return result.defined() ? result.to(dtype) : result;
}

/// The default positions: offset, offset + 1, …
Tensor counted(const Tensor& x, const c10::SymInt& offset) {
  const auto options = at::TensorOptions(x.device()).dtype(at::kLong);
  return at::arange(offset, offset + x.sym_size(-2), options);
}

/// Members that both nodes share.
struct Saved {
  template <typename Visitor>
  void members(Visitor& visit) {
    visit(positions);
    visit(scale);
    visit(spec);
    visit(order);
    visit(offset);
  }

  void save(const Encoded& encoded) {
    positions = dispatcher::save(encoded.positions);
    scale = dispatcher::save(encoded.scale);
    spec = encoded.spec;
    order = encoded.order;
  }

  /// The saved inputs; default positions cover the seq of `gradient` [..., seq, embedding_dim].
  Encoded encoded(const Tensor& gradient) const {
    const MaybeTensor given = dispatcher::unpack(positions);
    return {given.has_value() ? *given : counted(gradient, offset), dispatcher::unpack(scale), spec,
            order};
  }

  dispatcher::SavedVariable positions, scale;
  std::string spec;
  int64_t order = 0;
  c10::SymInt offset = 0;
};

/// Gradient of sinusoidal_add.
class SinusoidalAddBackward : public dispatcher::OperatorNode<SinusoidalAddBackward> {
 public:
  static constexpr const char* label = "SinusoidalAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    saved.members(visit);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    variable_list result{gradient, Tensor(), Tensor()};
    if (!gradient.defined() || !(needs(1) || needs(2))) return result;
    const Encoded encoded = saved.encoded(gradient);  // once: checkpointing forbids a second unpack
    if (needs(1)) result[1] = position_gradient(gradient, encoded);
    if (needs(2)) result[2] = scale_gradient(gradient, encoded);
    return result;
  }

  Saved saved;  // empty if only x needs a gradient
};

/// Gradient of sinusoidal_encode.
class SinusoidalEncodeBackward : public dispatcher::OperatorNode<SinusoidalEncodeBackward> {
 public:
  static constexpr const char* label = "SinusoidalEncodeBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    saved.members(visit);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    variable_list result(2);
    if (!gradient.defined()) return result;
    const Encoded encoded = saved.encoded(gradient);
    if (needs(0)) result[0] = position_gradient(gradient, encoded);
    if (needs(1)) result[1] = scale_gradient(gradient, encoded);
    return result;
  }

  Saved saved;
};

bool requires_grad(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

Tensor add_autograd(const Tensor& x, const MaybeTensor& positions, const MaybeTensor& scale,
                    Text spec, c10::SymInt offset) {
  const Tensor places = positions.value_or(Tensor()), factor = scale.value_or(Tensor());
  const Encoded encoded{places, scale, spec, 0};
  auto node = dispatcher::node_for<SinusoidalAddBackward>(x, places, factor);
  if (node && (requires_grad(positions) || requires_grad(scale))) node->saved.save(encoded);
  if (node) node->saved.offset = offset;
  Tensor output =
      dispatcher::below_autograd([&] { return call_add(x, positions, scale, spec, offset); });
  if (node) torch::autograd::set_history(output, node);
  if (dispatcher::tangent(places).defined() || dispatcher::tangent(factor).defined()) {
    const Encoded at_rows{places.defined() ? places : counted(x, offset), scale, spec, 0};
    const Tensor along = encoding_tangent(at_rows, x.scalar_type()).expand_symint(x.sym_sizes());
    dispatcher::set_tangent(output, dispatcher::accumulate(dispatcher::tangent(x), along));
  } else {
    dispatcher::set_tangent(output, dispatcher::copied_tangent(x));
  }
  return output;
}

Tensor encode_autograd(const Tensor& positions, const MaybeTensor& scale, Text spec, int64_t order,
                       MaybeType dtype) {
  const Encoded encoded{positions, scale, spec, order};
  auto node = dispatcher::node_for<SinusoidalEncodeBackward>(positions, scale.value_or(Tensor()));
  if (node) node->saved.save(encoded);
  Tensor output =
      dispatcher::below_autograd([&] { return call_encode(positions, scale, spec, order, dtype); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, encoding_tangent(encoded, output.scalar_type()));
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("sinusoidal_add", add_autograd);
  m.impl("sinusoidal_encode", encode_autograd);
}

}  // namespace posembed::sinusoidal
