// Derivatives of the ALiBi operators. The bias is linear in the slopes, so the bias and its
// gradient are each other's derivative. In derivatives, hidden keys have bias 0, because their bias
// does not depend on the slopes.

#include "alibi/alibi_operator.h"
#include "dispatcher/autograd.h"

namespace posembed::alibi {
namespace {

using dispatcher::FunctionNode;
using dispatcher::Gradients;
using dispatcher::variable_list;

/// The call of a derivative, to which hidden keys contribute nothing.
Call unmasked(Call call) {
  call.apply_mask(false);
  return call;
}

Tensor scaled(const Tensor& tensor, double scale) {
  return scale == 1.0 ? tensor : at::mul(tensor, scale);
}

/// `tensor` [.., queries, keys] with 0 where keys are hidden: memory may hold NaN there.
Tensor of_visible_keys(const Tensor& tensor, const Call& call) {
  if (!call.apply_mask()) return tensor;
  const Tensor slopes = at::zeros({1}, tensor.options());
  const Tensor bias = alibi_bias(slopes, tensor.sym_size(-2), tensor.sym_size(-1), {}, call);
  return tensor.masked_fill(bias.lt(0), 0);
}

/// `dtype`: of slopes.
variable_list bias_gradient(const Gradients& gradients, const Call& call, bool two_sided,
                            bool of_samples, at::ScalarType dtype) {
  return {alibi_bias_backward(gradients[0], two_sided, of_samples, dtype, call)};
}

/// The bias by which alibi_bias_backward reduced a gradient of these sizes.
Tensor bias_backward_transpose(const Tensor& slopes, const dispatcher::Shape& shape, bool, bool,
                               const MaybeType&, const Call& call) {
  const auto& sizes = shape.sizes;
  const size_t rank = sizes.size();
  const Tensor bias =
      alibi_bias(slopes, sizes[rank - 2], sizes[rank - 1], shape.dtype, unmasked(call));
  return rank == 4 ? bias.expand_symint(sizes) : bias;
}

/// The gradient of the scores passes through.
variable_list add_gradient(const Gradients& gradients, const Call& call, double scale,
                           bool two_sided, bool of_samples, at::ScalarType dtype) {
  const Tensor& gradient = gradients[0];
  variable_list result(2);
  if (gradients.needs(0)) result[0] = scaled(gradient, scale);
  if (gradients.needs(1)) {
    result[1] = alibi_bias_backward(gradient, two_sided, of_samples, dtype, call);
  }
  return result;
}

/// Gradient of alibi_softmax.
class AlibiSoftmaxBackward : public dispatcher::OperatorNode<AlibiSoftmaxBackward> {
 public:
  static constexpr const char* label = "AlibiSoftmaxBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(weights);
    call.members(visit);
    visit(scale);
    visit(sides);
    visit(of_samples);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor(), Tensor()};
    const auto [of_scores, of_slopes] =
        alibi_softmax_backward(gradients[0], unpack_output(weights), scale, needs(1) ? sides : 0,
                               of_samples, static_cast<at::ScalarType>(dtype), call.unpack());
    return {of_scores, needs(1) ? of_slopes : Tensor()};
  }

  dispatcher::SavedOutput weights;
  dispatcher::SavedCall<Call> call;
  double scale = 1.0;
  int64_t sides = 1;
  bool of_samples = false;
  int64_t dtype = 0;  // of slopes
};

/// The gradient of the biased scores' gradient.
Tensor of_biased_scores(const Tensor& of_scores, const Tensor& of_slopes, double scale,
                        const Tensor& like, const Call& options) {
  if (!of_slopes.defined() || of_slopes.dim() == 0 || of_slopes.sym_size(-1) == 0) {
    return of_scores.defined() ? scaled(of_scores, scale) : Tensor();
  }
  const Call derived = unmasked(options);
  if (of_scores.defined()) return alibi_add(of_scores, of_slopes, scale, derived);
  return alibi_bias(of_slopes, like.sym_size(-2), like.sym_size(-1), like.scalar_type(), derived)
      .expand_symint(like.sym_sizes());
}

/// Of alibi_softmax_backward, which is linear in `grad` and quadratic in `weights`.
variable_list softmax_backward_gradient(const Gradients& gradients, const Tensor& grad,
                                        const Tensor& weights, const Call& call, double scale) {
  variable_list result(2);
  Tensor direction = of_biased_scores(gradients[0], gradients[1], scale, grad, call);
  if (!direction.defined()) return result;
  if (gradients.needs(0)) {
    result[0] =
        std::get<0>(alibi_softmax_backward(direction, weights, 1.0, 0, false, std::nullopt, call));
  }
  if (gradients.needs(1)) {
    const Tensor g = of_visible_keys(grad, call);
    direction = of_visible_keys(direction, call);
    const Tensor mean = (g * weights).sum(-1, true), change = (direction * weights).sum(-1, true);
    result[1] = direction * (g - mean) - g * change;
  }
  return result;
}

// -------------------------------------------------------------------------------------- alibi_bias

Tensor bias_autograd(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys, MaybeType dtype,
                     const Call& original) {
  const Call call = with_positions(original, queries, keys);
  auto node = dispatcher::node_for<FunctionNode<alibi_bias, bias_gradient>>(slopes);
  if (node) node->save(call, sides_of(slopes) == 2, has_samples(slopes), slopes.scalar_type());
  Tensor output =
      dispatcher::recorded(node, [&] { return alibi_bias(slopes, queries, keys, dtype, call); });
  if (const Tensor direction = dispatcher::tangent(slopes); direction.defined()) {
    dispatcher::set_tangent(
        output, alibi_bias(direction, queries, keys, output.scalar_type(), unmasked(call)));
  }
  return output;
}

// --------------------------------------------------------------------------- alibi_add and softmax

/// The call with positions for these scores, whose shape has not been checked.
Call with_positions_of(const Tensor& scores, const Call& call) {
  if (scores.dim() < 2) return call;
  const MaybeTensor& offsets = call.query_offsets();
  const bool fits = !offsets.has_value() || (offsets->dim() == 1 && scores.dim() == 4 &&
                                             offsets->sym_size(0) == scores.sym_size(0));
  if (!fits) return call;
  return with_positions(call, scores.sym_size(-2), scores.sym_size(-1));
}

/// The tangent of scores * scale + bias; undefined if neither has one.
Tensor biased_tangent(const Tensor& scores, const Tensor& slopes, double scale, const Call& call) {
  const Tensor of_scores = dispatcher::tangent(scores), of_slopes = dispatcher::tangent(slopes);
  if (!of_slopes.defined()) {
    return of_scores.defined() ? at::mul(of_scores, scale) : Tensor();
  }
  if (of_scores.defined()) return alibi_add(of_scores, of_slopes, scale, unmasked(call));
  const Tensor bias = alibi_bias(of_slopes, scores.sym_size(-2), scores.sym_size(-1),
                                 scores.scalar_type(), unmasked(call));
  return bias.expand_symint(scores.sym_sizes());
}

Tensor add_autograd(const Tensor& scores, const Tensor& slopes, double scale,
                    const Call& original) {
  const Call call = with_positions_of(scores, original);
  auto node = dispatcher::node_for<FunctionNode<alibi_add, add_gradient>>(scores, slopes);
  if (node) {
    node->save(call, scale, sides_of(slopes) == 2, has_samples(slopes), slopes.scalar_type());
  }
  Tensor output =
      dispatcher::recorded(node, [&] { return alibi_add(scores, slopes, scale, call); });
  dispatcher::set_tangent(output, biased_tangent(scores, slopes, scale, call));
  return output;
}

Tensor softmax_autograd(const Tensor& scores, const Tensor& slopes, double scale,
                        const Call& original) {
  const Call call = with_positions_of(scores, original);
  auto node = dispatcher::node_for<AlibiSoftmaxBackward>(scores, slopes);
  Tensor output =
      dispatcher::recorded(node, [&] { return alibi_softmax(scores, slopes, scale, call); });
  if (node) {
    node->weights = dispatcher::save_output(output);
    node->call.save(call);
    node->scale = scale;
    node->sides = sides_of(slopes);
    node->of_samples = has_samples(slopes);
    node->dtype = static_cast<int64_t>(slopes.scalar_type());
  }
  const Tensor direction = biased_tangent(scores, slopes, scale, call);
  if (direction.defined()) {
    dispatcher::set_tangent(output, std::get<0>(alibi_softmax_backward(direction, output, 1.0, 0,
                                                                       false, std::nullopt, call)));
  }
  return output;
}

/// The tangents of both results of alibi_softmax_backward.
void set_softmax_backward_tangents(const Tensor& grad, const Tensor& weights, double scale,
                                   const Call& call, const Tensor& of_scores,
                                   const Tensor& of_slopes) {
  const Tensor dg = dispatcher::tangent(grad), dw = dispatcher::tangent(weights);
  if (!dg.defined() && !dw.defined()) return;
  const Tensor g = of_visible_keys(dispatcher::primal(grad), call), w = dispatcher::primal(weights);
  Tensor direction, change;
  if (dg.defined()) {
    direction = w * of_visible_keys(dg, call);
    change = direction.sum(-1, true);
  }
  if (dw.defined()) {
    const Tensor more = dw * (g - (g * w).sum(-1, true)), shift = (g * dw).sum(-1, true);
    direction = direction.defined() ? direction + more : more;
    change = change.defined() ? change + shift : shift;
  }
  direction = direction - w * change;
  dispatcher::set_tangent(of_scores, scaled(direction, scale));
  if (of_slopes.sym_size(-1) != 0) {
    dispatcher::set_tangent(
        of_slopes, alibi_bias_backward(direction, sides_of(of_slopes) == 2, has_samples(of_slopes),
                                       of_slopes.scalar_type(), call));
  }
}

std::tuple<Tensor, Tensor> softmax_backward_autograd(const Tensor& grad, const Tensor& weights,
                                                     double scale, int64_t sides, bool by_sample,
                                                     MaybeType dtype, const Call& call) {
  using Node = FunctionNode<alibi_softmax_backward, softmax_backward_gradient>;
  auto node = dispatcher::node_for<Node>(grad, weights);
  if (node) node->save(grad, weights, call, scale);
  auto [of_scores, of_slopes] = dispatcher::recorded(node, [&] {
    return alibi_softmax_backward(grad, weights, scale, sides, by_sample, dtype, call);
  });
  set_softmax_backward_tangents(grad, weights, scale, call, of_scores, of_slopes);
  return {of_scores, of_slopes};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  alibi_bias.differentiate<bias_autograd>(m);
  alibi_bias_out.refuse_gradients(m);
  dispatcher::differentiate_linear<alibi_bias_backward, bias_backward_transpose>(m);
  alibi_add.differentiate<add_autograd>(m);
  alibi_add_.refuse_gradients(m);
  alibi_softmax.differentiate<softmax_autograd>(m);
  alibi_softmax_.refuse_gradients(m);
  alibi_softmax_backward.differentiate<softmax_backward_autograd>(m);
}

}  // namespace posembed::alibi
