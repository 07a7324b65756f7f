// Derivatives of the ALiBi operators. Bias and its gradient are linear, and each is the derivative
// of the other, with bias 0 for hidden keys, where it does not depend on slopes.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "alibi/operator.h"
#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"

namespace posembed::alibi {
namespace {

using dispatcher::SavedOutput;
using dispatcher::SavedVariable;
using dispatcher::variable_list;

int64_t code(at::ScalarType type) { return static_cast<int64_t>(type); }
at::ScalarType type_of(int64_t code) { return static_cast<at::ScalarType>(code); }

/// The form of a derivative, to which hidden keys contribute nothing.
Form without_hiding(Form form) {
  form.hide = false;
  return form;
}

Tensor scaled(const Tensor& tensor, double scale) {
  return scale == 1.0 ? tensor : at::mul(tensor, scale);
}

/// The members that all nodes share.
struct Call {
  template <typename Visitor>
  void members(Visitor& visit) {
    visit(query_positions);
    visit(key_positions);
    visit(cu_seqlens);
    visit(attention_mask);
    visit(offset);
    visit(has_offset);
    visit(causal);
    visit(hide);
    visit(scale);
  }

  void keep(const Places& places, const Form& form) {
    query_positions = dispatcher::save(places.query_positions);
    key_positions = dispatcher::save(places.key_positions);
    cu_seqlens = dispatcher::save(places.cu_seqlens);
    attention_mask = dispatcher::save(places.attention_mask);
    has_offset = form.query_offset.has_value();
    if (has_offset) offset = *form.query_offset;
    causal = form.causal;
    hide = form.hide;
    scale = form.scale;
  }

  Places places() const {
    return {dispatcher::unpack(query_positions), dispatcher::unpack(key_positions),
            dispatcher::unpack(cu_seqlens), dispatcher::unpack(attention_mask)};
  }

  Form form() const {
    return {has_offset ? MaybeOffset(offset) : std::nullopt, causal, hide, scale};
  }

  SavedVariable query_positions;
  SavedVariable key_positions;
  SavedVariable cu_seqlens;
  SavedVariable attention_mask;
  c10::SymInt offset;
  bool has_offset = false;  // otherwise ends are aligned
  bool causal = true;
  bool hide = true;
  double scale = 1.0;
};

/// Gradient of alibi_bias.
class AlibiBiasBackward : public dispatcher::OperatorNode<AlibiBiasBackward> {
 public:
  static constexpr const char* label = "AlibiBiasBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(two_sided);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {
        call_bias_backward(gradients[0], call.places(), call.form(), two_sided, type_of(dtype))};
  }

  Call call;
  bool two_sided = false;
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
    const Tensor bias = call_bias(gradients[0], queries, keys, call.places(),
                                  without_hiding(call.form()), type_of(dtype));
    if (!batched) return {bias};
    return {bias.expand_symint({batch, -1, -1, -1})};
  }

  Call call;
  c10::SymInt queries;
  c10::SymInt keys;
  c10::SymInt batch;
  bool batched = false;
  int64_t dtype = 0;  // of the gradient that was reduced
};

/// Gradient of alibi_add: that of the scores passes through.
class AlibiAddBackward : public dispatcher::OperatorNode<AlibiAddBackward> {
 public:
  static constexpr const char* label = "AlibiAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(two_sided);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    const Tensor of_scores = needs(0) ? scaled(gradient, call.scale) : Tensor();
    if (!needs(1)) return {of_scores, Tensor()};
    return {of_scores,
            call_bias_backward(gradient, call.places(), call.form(), two_sided, type_of(dtype))};
  }

  Call call;
  bool two_sided = false;
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
    visit(sides);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor(), Tensor()};
    const auto [of_scores, of_slopes] =
        call_softmax_backward(gradients[0], unpack_output(weights), call.places(), call.form(),
                              needs(1) ? sides : 0, type_of(dtype));
    return {of_scores, needs(1) ? of_slopes : Tensor()};
  }

  SavedOutput weights;
  Call call;
  int64_t sides = 1;
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
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor g = grad.unpack(), w = weights.unpack();
    const Tensor direction = of_biased_scores(gradients[0], gradients[1], g);
    if (!direction.defined()) return {Tensor(), Tensor()};
    variable_list result(2);
    if (needs(0)) {
      Form form = call.form();
      form.scale = 1.0;
      result[0] =
          std::get<0>(call_softmax_backward(direction, w, call.places(), form, 0, std::nullopt));
    }
    if (needs(1)) {
      const Tensor mean = (g * w).sum(-1, true), change = (direction * w).sum(-1, true);
      result[1] = direction * (g - mean) - g * change;
    }
    return result;
  }

  SavedVariable grad;
  SavedVariable weights;
  Call call;

 private:
  /// The gradient of what both results are made from: the gradient of the biased scores.
  Tensor of_biased_scores(const Tensor& of_scores, const Tensor& of_slopes, const Tensor& like) {
    if (!of_slopes.defined() || of_slopes.dim() == 0 || of_slopes.sym_size(-1) == 0) {
      return of_scores.defined() ? scaled(of_scores, call.scale) : Tensor();
    }
    const Form form = without_hiding(call.form());
    if (of_scores.defined()) return call_add(of_scores, of_slopes, call.places(), form);
    return call_bias(of_slopes, like.sym_size(-2), like.sym_size(-1), call.places(), form,
                     like.scalar_type())
        .expand_symint(like.sym_sizes());
  }
};

// -------------------------------------------------------------------------------------- alibi_bias

Tensor bias_autograd(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys,
                     const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                     const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                     MaybeOffset query_offset, bool causal, bool hide, MaybeType dtype) {
  const Places places{query_positions, key_positions, cu_seqlens, attention_mask};
  const Form form{query_offset, causal, hide};
  auto node = dispatcher::node_for<AlibiBiasBackward>(slopes);
  if (node) {
    node->call.keep(places, form);
    node->two_sided = slopes.dim() == 2;
    node->dtype = code(slopes.scalar_type());
  }
  Tensor output = dispatcher::below_autograd(
      [&] { return call_bias(slopes, queries, keys, places, form, dtype); });
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(slopes); direction.defined()) {
    dispatcher::set_tangent(output, call_bias(direction, queries, keys, places,
                                              without_hiding(form), output.scalar_type()));
  }
  return output;
}

void bias_out_autograd(const Tensor& out, const Tensor& slopes, c10::SymInt queries,
                       c10::SymInt keys, const MaybeTensor& query_positions,
                       const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                       const MaybeTensor& attention_mask, MaybeOffset query_offset, bool causal,
                       bool hide) {
  dispatcher::check_inference_only(out, "out", "posembed::alibi_bias");
  dispatcher::check_inference_only(slopes, "slopes", "posembed::alibi_bias");
  dispatcher::below_autograd([&] {
    call_bias_out(out, slopes, queries, keys,
                  {query_positions, key_positions, cu_seqlens, attention_mask},
                  {query_offset, causal, hide});
  });
  torch::autograd::impl::bump_version(out);
}

Tensor bias_backward_autograd(const Tensor& grad, const MaybeTensor& query_positions,
                              const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                              const MaybeTensor& attention_mask, MaybeOffset query_offset,
                              bool causal, bool two_sided, MaybeType dtype) {
  const Places places{query_positions, key_positions, cu_seqlens, attention_mask};
  const Form form{query_offset, causal};
  auto node = dispatcher::node_for<AlibiBiasBackwardBackward>(grad);
  if (node && grad.dim() >= 3) {
    node->call.keep(places, form);
    node->queries = grad.sym_size(-2);
    node->keys = grad.sym_size(-1);
    node->batched = grad.dim() == 4;
    node->batch = node->batched ? grad.sym_size(0) : c10::SymInt(1);
    node->dtype = code(grad.scalar_type());
  }
  return dispatcher::linear(node, grad, [&](const Tensor& reduced) {
    return call_bias_backward(reduced, places, form, two_sided, dtype);
  });
}

// --------------------------------------------------------------------------- alibi_add and softmax

/// The tangent of scores * scale + bias; undefined if neither has one.
Tensor biased_tangent(const Tensor& scores, const Tensor& slopes, const Places& places,
                      const Form& form) {
  const Tensor of_scores = dispatcher::tangent(scores), of_slopes = dispatcher::tangent(slopes);
  if (!of_slopes.defined()) {
    return of_scores.defined() ? scaled(of_scores, form.scale) : Tensor();
  }
  const Form shown = without_hiding(form);
  if (of_scores.defined()) return call_add(of_scores, of_slopes, places, shown);
  const Tensor bias = call_bias(of_slopes, scores.sym_size(-2), scores.sym_size(-1), places, shown,
                                scores.scalar_type());
  return bias.expand_symint(scores.sym_sizes());
}

Tensor add_autograd(const Tensor& scores, const Tensor& slopes, const MaybeTensor& query_positions,
                    const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                    const MaybeTensor& attention_mask, MaybeOffset query_offset, bool causal,
                    bool hide, double scale) {
  const Places places{query_positions, key_positions, cu_seqlens, attention_mask};
  const Form form{query_offset, causal, hide, scale};
  auto node = dispatcher::node_for<AlibiAddBackward>(scores, slopes);
  Tensor output =
      dispatcher::below_autograd([&] { return call_add(scores, slopes, places, form); });
  if (node) {
    node->call.keep(places, form);
    node->two_sided = slopes.dim() == 2;
    node->dtype = code(slopes.scalar_type());
    torch::autograd::set_history(output, node);
  }
  dispatcher::set_tangent(output, biased_tangent(scores, slopes, places, form));
  return output;
}

Tensor softmax_autograd(const Tensor& scores, const Tensor& slopes,
                        const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                        const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                        MaybeOffset query_offset, bool causal, bool hide, double scale) {
  const Places places{query_positions, key_positions, cu_seqlens, attention_mask};
  const Form form{query_offset, causal, hide, scale};
  auto node = dispatcher::node_for<AlibiSoftmaxBackward>(scores, slopes);
  Tensor output =
      dispatcher::below_autograd([&] { return call_softmax(scores, slopes, places, form); });
  if (node) {
    torch::autograd::set_history(output, node);
    node->weights = dispatcher::save_output(output);
    node->call.keep(places, form);
    node->sides = slopes.dim() == 2 ? 2 : 1;
    node->dtype = code(slopes.scalar_type());
  }
  const Tensor direction = biased_tangent(scores, slopes, places, form);
  if (direction.defined()) {
    Form plain = form;
    plain.scale = 1.0;
    dispatcher::set_tangent(output, std::get<0>(call_softmax_backward(direction, output, places,
                                                                      plain, 0, std::nullopt)));
  }
  return output;
}

/// The tangents of both results of alibi_softmax_backward.
void set_softmax_backward_tangents(const Tensor& grad, const Tensor& weights, const Places& places,
                                   const Form& form, const Tensor& of_scores,
                                   const Tensor& of_slopes) {
  const Tensor dg = dispatcher::tangent(grad), dw = dispatcher::tangent(weights);
  if (!dg.defined() && !dw.defined()) return;
  const Tensor g = dispatcher::primal(grad), w = dispatcher::primal(weights);
  Tensor direction, change;
  if (dg.defined()) {
    direction = w * dg;
    change = direction.sum(-1, true);
  }
  if (dw.defined()) {
    const Tensor more = dw * (g - (g * w).sum(-1, true)), shift = (g * dw).sum(-1, true);
    direction = direction.defined() ? direction + more : more;
    change = change.defined() ? change + shift : shift;
  }
  direction = direction - w * change;
  dispatcher::set_tangent(of_scores, scaled(direction, form.scale));
  if (of_slopes.sym_size(-1) != 0) {
    dispatcher::set_tangent(
        of_slopes,
        call_bias_backward(direction, places, form, of_slopes.dim() == 2, of_slopes.scalar_type()));
  }
}

std::tuple<Tensor, Tensor> softmax_backward_autograd(
    const Tensor& grad, const Tensor& weights, const MaybeTensor& query_positions,
    const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
    const MaybeTensor& attention_mask, MaybeOffset query_offset, bool causal, bool hide,
    double scale, int64_t sides, MaybeType dtype) {
  const Places places{query_positions, key_positions, cu_seqlens, attention_mask};
  const Form form{query_offset, causal, hide, scale};
  auto node = dispatcher::node_for<AlibiSoftmaxBackwardBackward>(grad, weights);
  auto [of_scores, of_slopes] = dispatcher::below_autograd(
      [&] { return call_softmax_backward(grad, weights, places, form, sides, dtype); });
  if (node) {
    node->grad = dispatcher::save(grad);
    node->weights = dispatcher::save(weights);
    node->call.keep(places, form);
    torch::autograd::set_history(variable_list{of_scores, of_slopes}, node);
  }
  set_softmax_backward_tangents(grad, weights, places, form, of_scores, of_slopes);
  return {of_scores, of_slopes};
}

using Change = void (*)(const Tensor&, const Tensor&, const Places&, const Form&);

void change_autograd(const Tensor& scores, const Tensor& slopes, const Places& places,
                     const Form& form, Change change, const char* alternative) {
  dispatcher::check_inference_only(scores, "scores", alternative);
  dispatcher::check_inference_only(slopes, "slopes", alternative);
  dispatcher::below_autograd([&] { change(scores, slopes, places, form); });
  torch::autograd::impl::bump_version(scores);
}

void add_in_place_autograd(const Tensor& scores, const Tensor& slopes,
                           const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                           const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                           MaybeOffset query_offset, bool causal, bool hide, double scale) {
  change_autograd(scores, slopes, {query_positions, key_positions, cu_seqlens, attention_mask},
                  {query_offset, causal, hide, scale}, call_add_in_place, "posembed::alibi_add");
}

void softmax_in_place_autograd(const Tensor& scores, const Tensor& slopes,
                               const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                               const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                               MaybeOffset query_offset, bool causal, bool hide, double scale) {
  change_autograd(scores, slopes, {query_positions, key_positions, cu_seqlens, attention_mask},
                  {query_offset, causal, hide, scale}, call_softmax_in_place,
                  "posembed::alibi_softmax");
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("alibi_bias", bias_autograd);
  m.impl("alibi_bias_out", bias_out_autograd);
  m.impl("alibi_bias_backward", bias_backward_autograd);
  m.impl("alibi_add", add_autograd);
  m.impl("alibi_add_", add_in_place_autograd);
  m.impl("alibi_softmax", softmax_autograd);
  m.impl("alibi_softmax_", softmax_in_place_autograd);
  m.impl("alibi_softmax_backward", softmax_backward_autograd);
}

}  // namespace posembed::alibi
