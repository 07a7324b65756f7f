// Derivatives of the sinusoidal operators. The gradient of x is the output's gradient. The
// derivative with respect to a position is again a sinusoid, a quarter turn ahead and times the
// frequency: sinusoidal_encode of the next order. A learned scale multiplies it.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "sinusoidal/operator.h"
#include "sinusoidal/specification.h"

namespace posembed::sinusoidal {
namespace {

using dispatcher::variable_list;

Tensor derivative(Encoding encoding, at::ScalarType dtype) {
  ++encoding.order;
  return sinusoidal_encode(encoding, dtype);
}

/// Encodings with scale 1.
Tensor unscaled(Encoding encoding, at::ScalarType dtype) {
  encoding.scale.reset();
  return sinusoidal_encode(encoding, dtype);
}

/// The same encodings without tangents; with tangents, each derivative would need the next one.
Encoding primal(Encoding encoding) {
  encoding.positions = dispatcher::primal(encoding.positions);
  if (encoding.scale.has_value()) encoding.scale = dispatcher::primal(*encoding.scale);
  return encoding;
}

/// Sum over columns of gradient * d encoding / d position, in float32 for 16-bit data.
Tensor position_gradient(const Tensor& gradient, const Encoding& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor result = at::sum(gradient.to(type).mul(derivative(encoded, type)), -1);
  // Positions [seq] or [1, seq] serve every row of a batch.
  return result.sum_to_size_symint(encoded.positions.sym_sizes())
      .to(encoded.positions.scalar_type());
}

/// Sum of gradient * encoding, in float32 for 16-bit data.
Tensor scale_gradient(const Tensor& gradient, const Encoding& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor rows = at::sum(gradient.to(type).mul(unscaled(encoded, type)), -1);
  return at::sum(rows).reshape_symint(encoded.scale->sym_sizes());
}

/// The tangent of encodings, from the tangents of positions and scale; undefined if neither has
/// one.
Tensor encoding_tangent(const Encoding& encoded, at::ScalarType dtype) {
  const at::ScalarType type = at::promote_types(dtype, at::kFloat);  // rounded once
  const Encoding plain = primal(encoded);
  Tensor result;
  if (const Tensor position_tangent = dispatcher::tangent(encoded.positions);
      position_tangent.defined()) {
    result = derivative(plain, type).mul(position_tangent.unsqueeze(-1).to(type));
  }
  const Tensor scale_tangent =
      encoded.scale.has_value() ? dispatcher::tangent(*encoded.scale) : Tensor();
  if (scale_tangent.defined()) {
    result = dispatcher::accumulate(result,
                                    unscaled(plain, type).mul(scale_tangent.reshape({}).to(type)));
  }
  return result.defined() ? result.to(dtype) : result;
}

/// The default positions: offset, offset + 1, …
Tensor counted(const Tensor& x, const c10::SymInt& offset) {
  const auto options = at::TensorOptions(x.device()).dtype(at::kLong);
  return at::arange(offset, offset + x.sym_size(-2), options);
}

/// The encodings that sinusoidal_add added to `x` [..., seq, embedding_dim].
Encoding encoding_of(const Addition& addition, const Tensor& x) {
  const bool counts = !addition.positions.has_value();
  return {counts ? counted(x, addition.offset.number()) : *addition.positions, addition.spec,
          addition.scale};
}

/// A block of the columns that sinusoidal_add encodes: all of them with one axis.
struct Block {
  Addition addition;  // of the block
  std::string text;   // its specification
  Tensor x;
  size_t axis = 0;
  int64_t column = 0;
  std::optional<int64_t> width;

  Encoding encoding() const {
    Encoding result = encoding_of(addition, x);
    result.spec = text;
    return result;
  }

  Tensor columns(const Tensor& rows) const {
    return width.has_value() ? rows.narrow(-1, column, *width) : rows;
  }
};

/// x: [..., seq, embedding_dim]
std::vector<Block> blocks_of(const Addition& addition, const Tensor& x, const Specification& spec) {
  if (spec.parts.empty()) return {{addition, std::string(addition.spec), x, 0, 0, std::nullopt}};
  std::vector<Block> blocks;
  for (const Part& part : spec.parts) {
    Addition of_block = addition;
    of_block.positions = addition.positions->select(0, part.axis);
    blocks.push_back({of_block, part.text(), x, static_cast<size_t>(part.axis), part.column,
                      part.spec().embedding_dim});
  }
  return blocks;
}

/// The tangent of what sinusoidal_add adds to x.
Tensor addition_tangent(const Addition& addition, const Tensor& x) {
  const SpecificationPointer spec = specification(addition.spec);
  std::vector<Tensor> tangents;
  for (const Block& block : blocks_of(addition, x, *spec)) {
    const Tensor columns = block.columns(x);
    tangents.push_back(
        encoding_tangent(block.encoding(), x.scalar_type()).expand_symint(columns.sym_sizes()));
  }
  return tangents.size() == 1 ? tangents[0] : at::cat(tangents, -1);
}

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
    const Addition addition = saved.unpack();  // once: checkpointing forbids a second unpack
    const SpecificationPointer spec = specification(addition.spec);
    std::vector<Tensor> of_axis(std::max<size_t>(1, spec->parts.size()));
    for (const Block& block : blocks_of(addition, gradient, *spec)) {
      const Tensor columns = block.columns(gradient);
      if (needs(1)) of_axis[block.axis] = position_gradient(columns, block.encoding());
      if (needs(2)) {
        result[2] = dispatcher::accumulate(result[2], scale_gradient(columns, block.encoding()));
      }
    }
    if (needs(1)) result[1] = spec->parts.empty() ? of_axis[0] : at::stack(of_axis);
    if (needs(2)) result[2] = result[2].to(addition.scale->scalar_type());
    return result;
  }

  dispatcher::SavedCall<Addition> saved;  // empty if only x needs a gradient
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
    const Encoding encoded = saved.unpack();
    if (needs(0)) result[0] = position_gradient(gradient, encoded);
    if (needs(1)) {
      result[1] = scale_gradient(gradient, encoded).to(encoded.scale->scalar_type());
    }
    return result;
  }

  dispatcher::SavedCall<Encoding> saved;
};

bool requires_grad(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

Tensor add_autograd(const Tensor& x, const Addition& addition) {
  const Tensor positions = addition.positions.value_or(Tensor()),
               factor = addition.scale.value_or(Tensor());
  auto node = dispatcher::node_for<SinusoidalAddBackward>(x, positions, factor);
  if (node && (requires_grad(addition.positions) || requires_grad(addition.scale))) {
    node->saved.save(addition);
  }
  Tensor output = dispatcher::below_autograd([&] { return sinusoidal_add(x, addition); });
  if (node) torch::autograd::set_history(output, node);
  if (dispatcher::tangent(positions).defined() || dispatcher::tangent(factor).defined()) {
    dispatcher::set_tangent(
        output, dispatcher::accumulate(dispatcher::tangent(x), addition_tangent(addition, x)));
  } else {
    dispatcher::set_tangent(output, dispatcher::copied_tangent(x));
  }
  return output;
}

Tensor encode_autograd(const Encoding& encoding, MaybeType dtype) {
  auto node = dispatcher::node_for<SinusoidalEncodeBackward>(encoding.positions,
                                                             encoding.scale.value_or(Tensor()));
  if (node) node->saved.save(encoding);
  Tensor output = dispatcher::below_autograd([&] { return sinusoidal_encode(encoding, dtype); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, encoding_tangent(encoding, output.scalar_type()));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  sinusoidal_add.differentiate<add_autograd>(m);
  sinusoidal_encode.differentiate<encode_autograd>(m);
}

}  // namespace posembed::sinusoidal
