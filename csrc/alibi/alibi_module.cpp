// The ALiBi module and the functional interface: thin wrappers around the operators.
#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "alibi/alibi_operator.h"
#include "core/brief.h"
#include "posembed/alibi.h"

namespace posembed {

const char* name(Slopes slopes) { return slopes == Slopes::paper ? "paper" : "geometric"; }

namespace {

void check_no_scale(const ALiBiCall& call) {
  TORCH_CHECK_VALUE(!call.scale().has_value(),
                    "scale: expected none for a bias, because it multiplies scores, got ",
                    *call.scale());
}

}  // namespace

namespace alibi {
namespace {

/// The slopes of a call: those of each sample [batch, 1 or 2, heads], if there are any.
Tensor slopes_of(const Tensor& slopes, const ALiBiCall& call) {
  if (!call.sample_slopes().has_value()) return slopes;
  const Tensor& own = *call.sample_slopes();
  const int64_t heads = slopes.size(-1);
  TORCH_CHECK_VALUE(
      (own.dim() == 2 || (own.dim() == 3 && own.size(1) == 2)) && own.size(-1) == heads,
      "sample_slopes: expected [batch, ", heads, "] or [batch, 2, ", heads, "], got ", own.sizes());
  return own.dim() == 2 ? own.unsqueeze(1) : own;
}

}  // namespace
}  // namespace alibi

namespace functional {

torch::Tensor alibi_slopes(int64_t num_heads, Slopes kind, double max_bias,
                           std::optional<int64_t> total_heads, int64_t head_start,
                           std::optional<torch::Device> device) {
  return alibi::alibi_slopes(num_heads, name(kind), max_bias, total_heads, head_start,
                             at::ArrayRef<double>(), /*factor=*/1.0, device);
}

torch::Tensor alibi_scaled_slopes(const torch::Tensor& slopes, int64_t key_length,
                                  int64_t train_length) {
  return alibi::alibi_scaled_slopes(slopes, key_length, train_length);
}

torch::Tensor alibi_positions(const torch::Tensor& attention_mask) {
  return alibi::alibi_positions(attention_mask);
}

torch::Tensor alibi_bias(const torch::Tensor& slopes, int64_t query_length, int64_t key_length,
                         const ALiBiCall& call, std::optional<torch::Dtype> dtype) {
  check_no_scale(call);
  return alibi::alibi_bias(alibi::slopes_of(slopes, call), query_length, key_length, dtype, call);
}

torch::Tensor alibi_bias_out(const torch::Tensor& out, const torch::Tensor& slopes,
                             const ALiBiCall& call) {
  check_no_scale(call);
  TORCH_CHECK_VALUE(out.dim() >= 2,
                    "out: expected [heads, query_length, key_length], with a batch in front where "
                    "positions or mask have one, got ",
                    out.sizes());
  alibi::alibi_bias_out(out, alibi::slopes_of(slopes, call), out.size(-2), out.size(-1), call);
  return out;
}

torch::Tensor alibi_add(const torch::Tensor& scores, const torch::Tensor& slopes,
                        const ALiBiCall& call) {
  return alibi::alibi_add(scores, alibi::slopes_of(slopes, call), call.scale().value_or(1.0), call);
}

torch::Tensor alibi_add_(const torch::Tensor& scores, const torch::Tensor& slopes,
                         const ALiBiCall& call) {
  alibi::alibi_add_(scores, alibi::slopes_of(slopes, call), call.scale().value_or(1.0), call);
  return scores;
}

torch::Tensor alibi_softmax(const torch::Tensor& scores, const torch::Tensor& slopes,
                            const ALiBiCall& call) {
  return alibi::alibi_softmax(scores, alibi::slopes_of(slopes, call), call.scale().value_or(1.0),
                              call);
}

torch::Tensor alibi_softmax_(const torch::Tensor& scores, const torch::Tensor& slopes,
                             const ALiBiCall& call) {
  alibi::alibi_softmax_(scores, alibi::slopes_of(slopes, call), call.scale().value_or(1.0), call);
  return scores;
}

torch::Tensor alibi_attention(const torch::Tensor& query, const torch::Tensor& key,
                              const torch::Tensor& value, const torch::Tensor& slopes,
                              const ALiBiCall& call, double dropout) {
  return alibi::alibi_attention(query, key, value, alibi::slopes_of(slopes, call), call.scale(),
                                dropout, call);
}

torch::Tensor alibi_lse_correction(const torch::Tensor& slopes, int64_t query_length,
                                   int64_t query_start, int64_t key_start, const std::string& form,
                                   bool causal) {
  return alibi::alibi_lse_correction(slopes, query_length, query_start, key_start, form, causal);
}

}  // namespace functional

ALiBiOptions::ALiBiOptions(int64_t num_heads) : num_heads_(num_heads) {}

ALiBiOptions ALiBiOptions::preset(const std::string& name, int64_t total_heads,
                                  std::optional<int64_t> head_dim) {
  const ALiBiOptions options(total_heads);
  for (const char* plain : {"bloom", "mpt", "baichuan", "jais", "btlm", "refact"}) {
    if (name == plain) return options;
  }
  if (name == "mosaicbert" || name == "jina") return ALiBiOptions(options).causal(false);
  TORCH_CHECK_VALUE(name == "falcon",
                    "name: expected 'bloom', 'mpt', 'falcon', 'baichuan', 'jais', 'btlm', ",
                    "'refact', 'mosaicbert' or 'jina', got '", core::brief(name), "'");
  TORCH_CHECK_VALUE(head_dim.has_value(), "head_dim: expected a number for 'falcon', got none");
  const torch::Tensor slopes = functional::alibi_slopes(total_heads).to(torch::kBFloat16);
  return ALiBiOptions(options)
      .slopes(slopes.to(torch::kFloat))
      .factor(std::sqrt(static_cast<double>(*head_dim)));
}

ALiBiImpl::ALiBiImpl(const ALiBiOptions& options) : options(options) { ALiBiImpl::reset(); }

void ALiBiImpl::reset() {
  TORCH_CHECK_VALUE(options.train_length().value_or(1) > 0,
                    "train_length: expected a positive number, got ", *options.train_length());
  derived_ = derived_slopes();
  if (!options.learned()) return;
  parameter_ = register_parameter("slopes", derived_.to(like_.dtype()));
}

torch::Tensor ALiBiImpl::derived_slopes() const {
  const auto* tensor = std::get_if<torch::Tensor>(&options.slopes());
  const auto* kind = std::get_if<Slopes>(&options.slopes());
  std::vector<double> values;
  if (tensor != nullptr) {
    const int64_t total = options.total_heads().value_or(options.num_heads());
    TORCH_CHECK_VALUE((tensor->dim() == 1 || (tensor->dim() == 2 && tensor->size(0) == 2)) &&
                          tensor->size(-1) == total,
                      "slopes: expected [", total, "] or [2, ", total, "], got ", tensor->sizes());
    TORCH_CHECK_VALUE(tensor->dim() == 1 || !options.causal(), "slopes: expected [", total,
                      "] with causal=True, which hides keys right of the query, got ",
                      tensor->sizes(), "; slopes of two samples are sample_slopes of a call");
    const torch::Tensor plain = tensor->detach().to(torch::kCPU, torch::kDouble).contiguous();
    const double* data = plain.const_data_ptr<double>();
    values.assign(data, data + plain.numel());
  }
  return alibi::alibi_slopes(options.num_heads(),
                             posembed::name(kind == nullptr ? Slopes::paper : *kind),
                             options.max_bias(), options.total_heads(), options.head_start(),
                             values, options.factor(), like_.device());
}

void ALiBiImpl::pretty_print(std::ostream& stream) const {
  stream << "ALiBi(" << options.num_heads() << ", slopes=";
  if (const auto* kind = std::get_if<Slopes>(&options.slopes())) {
    stream << "'" << posembed::name(*kind) << "', max_bias=" << options.max_bias();
  } else {
    stream << "given";
  }
  if (!options.causal()) stream << ", causal=False";
  if (const auto total = options.total_heads()) {
    stream << ", total_heads=" << *total << ", head_start=" << options.head_start();
  }
  if (options.factor() != 1.0) stream << ", factor=" << options.factor();
  if (const auto length = options.train_length()) stream << ", train_length=" << *length;
  if (options.learned()) stream << ", learned=True";
  stream << ")";
}

void ALiBiImpl::follow(const torch::TensorOptions& like) {
  like_ = like;
  derived_ = derived_slopes();
}

std::shared_ptr<torch::nn::Module> ALiBiImpl::clone(
    const std::optional<torch::Device>& device) const {
  const auto copy = std::dynamic_pointer_cast<ALiBiImpl>(Cloneable::clone(device));
  if (device.has_value()) copy->follow(like_.device(*device));
  return copy;
}

void ALiBiImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  follow(like_.device(device).dtype(dtype));
}

void ALiBiImpl::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  follow(like_.dtype(dtype));
}

void ALiBiImpl::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  follow(like_.device(device));
}

torch::Tensor ALiBiImpl::slopes() const {
  return options.learned() ? parameter_ : derived_.clone();
}

ALiBiCall ALiBiImpl::own_call(const ALiBiCall& call) const {
  TORCH_CHECK_VALUE(!call.causal().contradicts(options.causal()), "causal: expected the module's, ",
                    options.causal() ? "true" : "false");
  TORCH_CHECK_VALUE(!call.positions_from_mask().contradicts(true),
                    "positions_from_mask: expected true for a module");
  return ALiBiCall(call).causal(options.causal()).positions_from_mask(true);
}

/// The module's own tensor, which callers must not change.
torch::Tensor ALiBiImpl::slopes_for(int64_t key_length) const {
  const torch::Tensor& all = options.learned() ? parameter_ : derived_;
  const auto train_length = options.train_length();
  if (!train_length.has_value()) return all;
  return functional::alibi_scaled_slopes(all, key_length, *train_length);
}

/// The slopes for scores or biases [..., keys], whose shape the operators check.
torch::Tensor ALiBiImpl::slopes_for(const torch::Tensor& scores) const {
  return slopes_for(scores.dim() == 0 ? 0 : scores.size(-1));
}

torch::Tensor ALiBiImpl::alibi_slopes(std::optional<int64_t> batch_size,
                                      std::optional<int64_t> key_length) const {
  TORCH_CHECK_VALUE(derived_.dim() == 1,
                    "alibi_slopes: FlashAttention-2 takes one slope for each head, got ",
                    derived_.sizes());
  TORCH_CHECK_VALUE(!options.train_length().has_value() || key_length.has_value(),
                    "key_length: expected a number with train_length, got none");
  TORCH_CHECK_VALUE(batch_size.value_or(0) >= 0, "batch_size: expected 0 or more, got ",
                    *batch_size);
  const torch::Tensor plain = slopes_for(key_length.value_or(0)).detach().to(torch::kFloat);
  return batch_size.has_value() ? plain.repeat({*batch_size, 1}) : plain.clone();
}

torch::Tensor ALiBiImpl::forward(int64_t query_length, std::optional<int64_t> key_length,
                                 const ALiBiCall& call, std::optional<torch::Dtype> dtype) {
  const int64_t keys = key_length.value_or(query_length);
  return functional::alibi_bias(slopes_for(keys), query_length, keys, own_call(call),
                                dtype.value_or(torch::typeMetaToScalarType(like_.dtype())));
}

torch::Tensor ALiBiImpl::forward_out(const torch::Tensor& out, const ALiBiCall& call) const {
  return functional::alibi_bias_out(out, slopes_for(out), own_call(call));
}

torch::Tensor ALiBiImpl::add_(const torch::Tensor& scores, const ALiBiCall& call) const {
  return functional::alibi_add_(scores, slopes_for(scores), own_call(call));
}

torch::Tensor ALiBiImpl::softmax(const torch::Tensor& scores, const ALiBiCall& call) const {
  return functional::alibi_softmax(scores, slopes_for(scores), own_call(call));
}

torch::Tensor ALiBiImpl::softmax_(const torch::Tensor& scores, const ALiBiCall& call) const {
  return functional::alibi_softmax_(scores, slopes_for(scores), own_call(call));
}

torch::Tensor ALiBiImpl::lse_correction(int64_t query_length, int64_t query_start,
                                        int64_t key_start, const std::string& form) const {
  return functional::alibi_lse_correction(options.learned() ? parameter_ : derived_, query_length,
                                          query_start, key_start, form, options.causal());
}

torch::Tensor ALiBiImpl::attention(const torch::Tensor& query, const torch::Tensor& key,
                                   const torch::Tensor& value, const ALiBiCall& call,
                                   double dropout) const {
  const int64_t keys = key.dim() == 4 ? key.size(2) : 0;  // the operator rejects other keys
  return functional::alibi_attention(query, key, value, slopes_for(keys), own_call(call), dropout);
}

}  // namespace posembed
