// Derivatives of the ALiBi operators. The bias is linear in the slopes, so the bias and its
// gradient are each other's derivative. In derivatives, hidden keys have bias 0, because their bias
// does not depend on the slopes.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "alibi/alibi_checks.h"
#include "alibi/alibi_operator.h"
#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"

namespace posembed::alibi {
namespace {

using dispatcher::SavedOutput;
using dispatcher::SavedVariable;
using dispatcher::variable_list;

int64_t code(at::ScalarType type) { return static_cast<int64_t>(type); }
at::ScalarType type_of(int64_t code) { return static_cast<at::ScalarType>(code); }

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

using SavedOptions = dispatcher::SavedCall<Call>;

/// Gradient of alibi_bias.
class AlibiBiasBackward : public dispatcher::OperatorNode<AlibiBiasBackward> {
 public:
  static constexpr const char* label = "AlibiBiasBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(two_sided);
    visit(of_samples);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {
        alibi_bias_backward(gradients[0], two_sided, of_samples, type_of(dtype), call.unpack())};
  }

  SavedOptions call;
  bool two_sided = false;
  bool of_samples = false;
  int64_t dtype = 0;  // of slopes
};

/// Gradient of alibi_bias_backward.
class AlibiBiasBackwardBackward : public dispatcher::OperatorNode<AlibiBiasBackwardBackward> {
 public:
  static constexpr const char* label = "AlibiBiasBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(queries);
    visit(keys);
    visit(batch);
    visit(batched);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    const Tensor bias =
        alibi_bias(gradients[0], queries, keys, type_of(dtype), unmasked(call.unpack()));
    if (!batched) return {bias};
    return {bias.expand_symint({batch, -1, -1, -1})};
  }

  SavedOptions call;
  c10::SymInt queries;
  c10::SymInt keys;
  c10::SymInt batch;
  bool batched = false;
  int64_t dtype = 0;  // of the gradient that was reduced
};

/// Gradient of alibi_add. The gradient of the scores passes through.
class AlibiAddBackward : public dispatcher::OperatorNode<AlibiAddBackward> {
 public:
  static constexpr const char* label = "AlibiAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(scale);
    visit(two_sided);
    visit(of_samples);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    const Tensor of_scores = needs(0) ? scaled(gradient, scale) : Tensor();
    if (!needs(1)) return {of_scores, Tensor()};
    return {of_scores,
            alibi_bias_backward(gradient, two_sided, of_samples, type_of(dtype), call.unpack())};
  }

  SavedOptions call;
  double scale = 1.0;
  bool two_sided = false;
  bool of_samples = false;
  int64_t dtype = 0;  // of slopes
};

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
                               of_samples, type_of(dtype), call.unpack());
    return {of_scores, needs(1) ? of_slopes : Tensor()};
  }

  SavedOutput weights;
  SavedOptions call;
  double scale = 1.0;
  int64_t sides = 1;
  bool of_samples = false;
  int64_t dtype = 0;  // of slopes
};

/// Gradient of alibi_softmax_backward, which is linear in `grad` and quadratic in `weights`.
class AlibiSoftmaxBackwardBackward : public dispatcher::OperatorNode<AlibiSoftmaxBackwardBackward> {
 public:
  static constexpr const char* label = "AlibiSoftmaxBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(grad);
    visit(weights);
    call.members(visit);
    visit(scale);
  }

  variable_list backward(variable_list&& gradients) {
    const Call options = call.unpack();
    Tensor g = grad.unpack();
    const Tensor w = weights.unpack();
    Tensor direction = of_biased_scores(gradients[0], gradients[1], g, options);
    if (!direction.defined()) return {Tensor(), Tensor()};
    variable_list result(2);
    if (needs(0)) {
      result[0] =
          std::get<0>(alibi_softmax_backward(direction, w, 1.0, 0, false, std::nullopt, options));
    }
    if (needs(1)) {
      g = of_visible_keys(g, options);
      direction = of_visible_keys(direction, options);
      const Tensor mean = (g * w).sum(-1, true), change = (direction * w).sum(-1, true);
      result[1] = direction * (g - mean) - g * change;
    }
    return result;
  }

  SavedVariable grad;
  SavedVariable weights;
  SavedOptions call;
  double scale = 1.0;

 private:
  /// The gradient of the biased scores' gradient, from which both results are computed.
  Tensor of_biased_scores(const Tensor& of_scores, const Tensor& of_slopes, const Tensor& like,
                          const Call& options) {
    if (!of_slopes.defined() || of_slopes.dim() == 0 || of_slopes.sym_size(-1) == 0) {
      return of_scores.defined() ? scaled(of_scores, scale) : Tensor();
    }
    const Call derived = unmasked(options);
    if (of_scores.defined()) return alibi_add(of_scores, of_slopes, scale, derived);
    return alibi_bias(of_slopes, like.sym_size(-2), like.sym_size(-1), like.scalar_type(), derived)
        .expand_symint(like.sym_sizes());
  }
};

// -------------------------------------------------------------------------------------- alibi_bias

Tensor bias_autograd(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys, MaybeType dtype,
                     const Call& original) {
  const Call call = with_positions(original, queries, keys);
  auto node = dispatcher::node_for<AlibiBiasBackward>(slopes);
  if (node) {
    node->call.save(call);
    node->two_sided = sides_of(slopes) == 2;
    node->of_samples = has_samples(slopes);
    node->dtype = code(slopes.scalar_type());
  }
  Tensor output =
      dispatcher::below_autograd([&] { return alibi_bias(slopes, queries, keys, dtype, call); });
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(slopes); direction.defined()) {
    dispatcher::set_tangent(
        output, alibi_bias(direction, queries, keys, output.scalar_type(), unmasked(call)));
  }
  return output;
}

Tensor bias_backward_autograd(const Tensor& grad, bool two_sided, bool by_sample, MaybeType dtype,
                              const Call& call) {
  auto node = dispatcher::node_for<AlibiBiasBackwardBackward>(grad);
  if (node && grad.dim() >= 3) {
    node->call.save(call);
    node->queries = grad.sym_size(-2);
    node->keys = grad.sym_size(-1);
    node->batched = grad.dim() == 4;
    node->batch = node->batched ? grad.sym_size(0) : c10::SymInt(1);
    node->dtype = code(grad.scalar_type());
  }
  return dispatcher::linear(node, grad, [&](const Tensor& reduced) {
    return alibi_bias_backward(reduced, two_sided, by_sample, dtype, call);
  });
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
  auto node = dispatcher::node_for<AlibiAddBackward>(scores, slopes);
  Tensor output =
      dispatcher::below_autograd([&] { return alibi_add(scores, slopes, scale, call); });
  if (node) {
    node->call.save(call);
    node->scale = scale;
    node->two_sided = sides_of(slopes) == 2;
    node->of_samples = has_samples(slopes);
    node->dtype = code(slopes.scalar_type());
    torch::autograd::set_history(output, node);
  }
  dispatcher::set_tangent(output, biased_tangent(scores, slopes, scale, call));
  return output;
}

Tensor softmax_autograd(const Tensor& scores, const Tensor& slopes, double scale,
                        const Call& original) {
  const Call call = with_positions_of(scores, original);
  auto node = dispatcher::node_for<AlibiSoftmaxBackward>(scores, slopes);
  Tensor output =
      dispatcher::below_autograd([&] { return alibi_softmax(scores, slopes, scale, call); });
  if (node) {
    torch::autograd::set_history(output, node);
    node->weights = dispatcher::save_output(output);
    node->call.save(call);
    node->scale = scale;
    node->sides = sides_of(slopes);
    node->of_samples = has_samples(slopes);
    node->dtype = code(slopes.scalar_type());
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
  auto node = dispatcher::node_for<AlibiSoftmaxBackwardBackward>(grad, weights);
  auto [of_scores, of_slopes] = dispatcher::below_autograd(
      [&] { return alibi_softmax_backward(grad, weights, scale, sides, by_sample, dtype, call); });
  if (node) {
    node->grad = dispatcher::save(grad);
    node->weights = dispatcher::save(weights);
    node->call.save(call);
    node->scale = scale;
    torch::autograd::set_history(variable_list{of_scores, of_slopes}, node);
  }
  set_softmax_backward_tangents(grad, weights, scale, call, of_scores, of_slopes);
  return {of_scores, of_slopes};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  alibi_bias.differentiate<bias_autograd>(m);
  alibi_bias_out.refuse_gradients(m);
  alibi_bias_backward.differentiate<bias_backward_autograd>(m);
  alibi_add.differentiate<add_autograd>(m);
  alibi_add_.refuse_gradients(m);
  alibi_softmax.differentiate<softmax_autograd>(m);
  alibi_softmax_.refuse_gradients(m);
  alibi_softmax_backward.differentiate<softmax_backward_autograd>(m);
}

}  // namespace posembed::alibi
