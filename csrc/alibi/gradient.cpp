// Derivatives of the ALiBi operators. Bias is linear in slopes and so is its gradient: each is the
// other's derivative. Future keys, which a causal bias hides with a constant, have derivative 0.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "alibi/operator.h"
#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"

namespace posembed::alibi {
namespace {

using dispatcher::variable_list;

int64_t code(at::ScalarType type) { return static_cast<int64_t>(type); }
at::ScalarType type_of(int64_t code) { return static_cast<at::ScalarType>(code); }

/// Gradient of alibi_bias.
class AlibiBiasBackward : public dispatcher::OperatorNode<AlibiBiasBackward> {
 public:
  static constexpr const char* label = "AlibiBiasBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(offset);
    visit(causal);
    visit(two_sided);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    return {call_bias_backward(gradients[0], offset, causal, two_sided, type_of(dtype))};
  }

  c10::SymInt offset;
  bool causal = true;
  bool two_sided = false;
  int64_t dtype = 0;  // of slopes
};

/// Gradient of alibi_bias_backward.
class AlibiBiasBackwardBackward : public dispatcher::OperatorNode<AlibiBiasBackwardBackward> {
 public:
  static constexpr const char* label = "AlibiBiasBackwardBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(queries);
    visit(keys);
    visit(batch);
    visit(batched);
    visit(offset);
    visit(causal);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    const Tensor bias = call_bias(gradients[0], queries, keys, offset, causal,
                                  /*hide_future=*/false, type_of(dtype));
    if (!batched) return {bias};
    return {bias.unsqueeze(0).expand_symint({batch, -1, -1, -1})};
  }

  c10::SymInt queries;
  c10::SymInt keys;
  c10::SymInt batch;
  bool batched = false;
  c10::SymInt offset;
  bool causal = true;
  int64_t dtype = 0;  // of the gradient that was reduced
};

/// Gradient of alibi_add: that of the scores passes through.
class AlibiAddBackward : public dispatcher::OperatorNode<AlibiAddBackward> {
 public:
  static constexpr const char* label = "AlibiAddBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    visit(offset);
    visit(causal);
    visit(two_sided);
    visit(dtype);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    if (!needs(1)) return {gradient, Tensor()};
    return {gradient, call_bias_backward(gradient, offset, causal, two_sided, type_of(dtype))};
  }

  c10::SymInt offset;
  bool causal = true;
  bool two_sided = false;
  int64_t dtype = 0;  // of slopes
};

c10::SymInt offset_of(const MaybeOffset& query_offset, const c10::SymInt& queries,
                      const c10::SymInt& keys) {
  return query_offset.has_value() ? *query_offset : keys - queries;
}

Tensor bias_autograd(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys,
                     MaybeOffset query_offset, bool causal, bool hide_future, MaybeType dtype) {
  auto node = dispatcher::node_for<AlibiBiasBackward>(slopes);
  if (node) {
    node->offset = offset_of(query_offset, queries, keys);
    node->causal = causal;
    node->two_sided = slopes.dim() == 2;
    node->dtype = code(slopes.scalar_type());
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_bias(slopes, queries, keys, query_offset, causal, hide_future, dtype);
  }
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(slopes); direction.defined()) {
    dispatcher::set_tangent(output, call_bias(direction, queries, keys, query_offset, causal,
                                              /*hide_future=*/false, output.scalar_type()));
  }
  return output;
}

Tensor bias_backward_autograd(const Tensor& grad, MaybeOffset query_offset, bool causal,
                              bool two_sided, MaybeType dtype) {
  auto node = dispatcher::node_for<AlibiBiasBackwardBackward>(grad);
  if (node && grad.dim() >= 3) {
    node->queries = grad.sym_size(-2);
    node->keys = grad.sym_size(-1);
    node->batched = grad.dim() == 4;
    node->batch = node->batched ? grad.sym_size(0) : c10::SymInt(1);
    node->offset = offset_of(query_offset, node->queries, node->keys);
    node->causal = causal;
    node->dtype = code(grad.scalar_type());
  }
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_bias_backward(grad, query_offset, causal, two_sided, dtype);
  }
  if (node) torch::autograd::set_history(output, node);
  if (const Tensor direction = dispatcher::tangent(grad); direction.defined()) {
    dispatcher::set_tangent(output, call_bias_backward(direction, query_offset, causal, two_sided,
                                                       output.scalar_type()));
  }
  return output;
}

/// The tangent of scores + bias; undefined where neither has one.
Tensor add_tangent(const Tensor& scores, const Tensor& slopes, const MaybeOffset& query_offset,
                   bool causal) {
  const Tensor of_scores = dispatcher::tangent(scores), of_slopes = dispatcher::tangent(slopes);
  if (!of_slopes.defined()) return of_scores;
  if (of_scores.defined()) {
    return call_add(of_scores, of_slopes, query_offset, causal, /*hide_future=*/false);
  }
  const Tensor bias = call_bias(of_slopes, scores.sym_size(-2), scores.sym_size(-1), query_offset,
                                causal, /*hide_future=*/false, scores.scalar_type());
  return bias.expand_symint(scores.sym_sizes());
}

Tensor add_autograd(const Tensor& scores, const Tensor& slopes, MaybeOffset query_offset,
                    bool causal, bool hide_future) {
  auto node = dispatcher::node_for<AlibiAddBackward>(scores, slopes);
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = call_add(scores, slopes, query_offset, causal, hide_future);
  }
  if (node) {
    node->offset = offset_of(query_offset, scores.sym_size(-2), scores.sym_size(-1));
    node->causal = causal;
    node->two_sided = slopes.dim() == 2;
    node->dtype = code(slopes.scalar_type());
    torch::autograd::set_history(output, node);
  }
  dispatcher::set_tangent(output, add_tangent(scores, slopes, query_offset, causal));
  return output;
}

void add_in_place_autograd(const Tensor& scores, const Tensor& slopes, MaybeOffset query_offset,
                           bool causal, bool hide_future) {
  dispatcher::check_inference_only(scores, "scores", "posembed::alibi_add");
  dispatcher::check_inference_only(slopes, "slopes", "posembed::alibi_add");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_add_in_place(scores, slopes, query_offset, causal, hide_future);
  }
  torch::autograd::impl::bump_version(scores);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("alibi_bias", bias_autograd);
  m.impl("alibi_bias_backward", bias_backward_autograd);
  m.impl("alibi_add", add_autograd);
  m.impl("alibi_add_", add_in_place_autograd);
}

}  // namespace posembed::alibi
