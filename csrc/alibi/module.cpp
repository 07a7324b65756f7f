// The ALiBi module and the functional interface: thin wrappers around the operators.
#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>

#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "alibi/operator.h"
#include "dispatcher/checks.h"
#include "posembed/alibi.h"

namespace posembed {

const char* name(Slopes slopes) { return slopes == Slopes::press ? "press" : "geometric"; }

namespace functional {
namespace {

alibi::Places places_of(const AlibiCall& call) {
  alibi::MaybeOffset offset;
  if (call.query_offset.has_value()) offset = c10::SymInt(*call.query_offset);
  return {call.query_positions, call.key_positions, call.cu_seqlens, call.attention_mask, offset,
          call.causal};
}

}  // namespace

torch::Tensor alibi_slopes(int64_t num_heads, Slopes kind, double max_bias,
                           std::optional<int64_t> total_heads, int64_t head_start,
                           std::optional<torch::Device> device) {
  return alibi::call_slopes(num_heads, name(kind), max_bias, total_heads, head_start,
                            at::ArrayRef<double>(), /*factor=*/1.0, device);
}

torch::Tensor alibi_positions(const torch::Tensor& attention_mask) {
  return alibi::call_positions(attention_mask);
}

torch::Tensor alibi_bias(const torch::Tensor& slopes, int64_t query_length, int64_t key_length,
                         const AlibiCall& call, std::optional<torch::Dtype> dtype) {
  return alibi::call_bias(slopes, query_length, key_length, places_of(call), call.hide, dtype);
}

torch::Tensor alibi_bias_out(const torch::Tensor& out, const torch::Tensor& slopes,
                             const AlibiCall& call) {
  TORCH_CHECK_VALUE(out.dim() >= 2,
                    "out: expected [heads, query_length, key_length], with a batch in front where "
                    "positions or mask have one, got ",
                    out.sizes());
  alibi::call_bias_out(out, slopes, out.size(-2), out.size(-1), places_of(call), call.hide);
  return out;
}

torch::Tensor alibi_add(const torch::Tensor& scores, const torch::Tensor& slopes,
                        const AlibiCall& call) {
  return alibi::call_add(scores, slopes, places_of(call), call.hide, call.scale);
}

torch::Tensor alibi_add_(const torch::Tensor& scores, const torch::Tensor& slopes,
                         const AlibiCall& call) {
  alibi::call_add_in_place(scores, slopes, places_of(call), call.hide, call.scale);
  return scores;
}

torch::Tensor alibi_softmax(const torch::Tensor& scores, const torch::Tensor& slopes,
                            const AlibiCall& call) {
  return alibi::call_softmax(scores, slopes, places_of(call), call.hide, call.scale);
}

torch::Tensor alibi_softmax_(const torch::Tensor& scores, const torch::Tensor& slopes,
                             const AlibiCall& call) {
  alibi::call_softmax_in_place(scores, slopes, places_of(call), call.hide, call.scale);
  return scores;
}

torch::Tensor alibi_lse_correction(const torch::Tensor& slopes, int64_t query_length,
                                   int64_t query_start, int64_t key_start, const std::string& form,
                                   bool causal) {
  return alibi::call_lse_correction(slopes, query_length, query_start, key_start, form, causal);
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
                    "'refact', 'mosaicbert' or 'jina', got '", name, "'");
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
  const auto* given = std::get_if<torch::Tensor>(&options.slopes());
  const auto* kind = std::get_if<Slopes>(&options.slopes());
  std::vector<double> values;
  if (given != nullptr) {
    const int64_t total = options.total_heads().value_or(options.num_heads());
    TORCH_CHECK_VALUE((given->dim() == 1 || (given->dim() == 2 && given->size(0) == 2)) &&
                          given->size(-1) == total,
                      "slopes: expected [", total, "] or [2, ", total, "], got ", given->sizes());
    const torch::Tensor plain = given->detach().to(torch::kCPU, torch::kDouble).contiguous();
    const double* data = plain.const_data_ptr<double>();
    values.assign(data, data + plain.numel());
  }
  return alibi::call_slopes(options.num_heads(),
                            posembed::name(kind == nullptr ? Slopes::press : *kind),
                            options.max_bias(), options.total_heads(), options.head_start(), values,
                            options.factor(), like_.device());
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

/// The module's own tensor, which callers must not change.
torch::Tensor ALiBiImpl::slopes_for(int64_t key_length) const {
  const torch::Tensor& all = options.learned() ? parameter_ : derived_;
  const auto train_length = options.train_length();
  if (!train_length.has_value() || key_length <= *train_length) return all;
  return all / (static_cast<double>(key_length) / static_cast<double>(*train_length));
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

namespace {

/// The call with the module's options and, if there is a mask, with positions that count only
/// visible keys.
functional::AlibiCall complete(functional::AlibiCall call, bool causal, int64_t queries,
                               int64_t keys) {
  call.causal = causal;
  if (!call.attention_mask.has_value() || call.query_positions.has_value() ||
      call.key_positions.has_value()) {
    return call;
  }
  const torch::Tensor& mask = *call.attention_mask;
  if (mask.dim() == 0 || mask.size(-1) != keys) return call;  // the operator raises the error
  call.key_positions = functional::alibi_positions(mask);
  const int64_t first = call.query_offset.value_or(keys - queries);
  if (first >= 0 && first + queries <= keys) {
    call.query_positions = call.key_positions->narrow(-1, first, queries);
    call.query_offset.reset();
  }
  return call;
}

void check_attention(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value, double dropout) {
  // query: [batch, num_heads, seq, head_dim], key: [batch, heads, keys, head_dim], value: [batch,
  // heads, keys, value_dim]
  dispatcher::check_rank(query, "query", 4, "[batch, num_heads, seq, head_dim]");
  dispatcher::check_rank(key, "key", 4, "[batch, heads, keys, head_dim]");
  dispatcher::check_rank(value, "value", 4, "[batch, heads, keys, value_dim]");
  dispatcher::check_same_dtype(key, "key", query, "query");
  dispatcher::check_same_dtype(value, "value", query, "query");
  dispatcher::check_size(key.size(0), query.size(0), "key", "batch");
  dispatcher::check_size(key.size(3), query.size(3), "key", "head_dim");
  dispatcher::check_size(value.size(0), query.size(0), "value", "batch");
  dispatcher::check_size(value.size(1), key.size(1), "value", "heads");
  dispatcher::check_size(value.size(2), key.size(2), "value", "keys");
  TORCH_CHECK_VALUE(key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                    "key: expected heads that divide those of query, ", query.size(1), ", got ",
                    key.size(1));
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, "dropout: expected 0 to 1, got ", dropout);
}

}  // namespace

torch::Tensor ALiBiImpl::forward(int64_t query_length, std::optional<int64_t> key_length,
                                 functional::AlibiCall call,
                                 std::optional<torch::Dtype> dtype) const {
  const int64_t keys = key_length.value_or(query_length);
  call = complete(std::move(call), options.causal(), query_length, keys);
  return functional::alibi_bias(slopes_for(keys), query_length, keys, call,
                                dtype.value_or(torch::typeMetaToScalarType(like_.dtype())));
}

torch::Tensor ALiBiImpl::forward_out(const torch::Tensor& out, functional::AlibiCall call) const {
  TORCH_CHECK_VALUE(out.dim() >= 2, "out: expected [num_heads, query_length, key_length], got ",
                    out.sizes());
  call = complete(std::move(call), options.causal(), out.size(-2), out.size(-1));
  return functional::alibi_bias_out(out, slopes_for(out.size(-1)), call);
}

torch::Tensor ALiBiImpl::add_(const torch::Tensor& scores, functional::AlibiCall call) const {
  alibi::check_matrix_shape(scores, "scores");
  call = complete(std::move(call), options.causal(), scores.size(-2), scores.size(-1));
  return functional::alibi_add_(scores, slopes_for(scores.size(-1)), call);
}

torch::Tensor ALiBiImpl::softmax(const torch::Tensor& scores, functional::AlibiCall call) const {
  alibi::check_matrix_shape(scores, "scores");
  call = complete(std::move(call), options.causal(), scores.size(-2), scores.size(-1));
  return functional::alibi_softmax(scores, slopes_for(scores.size(-1)), call);
}

torch::Tensor ALiBiImpl::softmax_(const torch::Tensor& scores, functional::AlibiCall call) const {
  alibi::check_matrix_shape(scores, "scores");
  call = complete(std::move(call), options.causal(), scores.size(-2), scores.size(-1));
  return functional::alibi_softmax_(scores, slopes_for(scores.size(-1)), call);
}

torch::Tensor ALiBiImpl::lse_correction(int64_t query_length, int64_t query_start,
                                        int64_t key_start, const std::string& form) const {
  return functional::alibi_lse_correction(options.learned() ? parameter_ : derived_, query_length,
                                          query_start, key_start, form, options.causal());
}

torch::Tensor ALiBiImpl::attention(const torch::Tensor& query, const torch::Tensor& key,
                                   const torch::Tensor& value, functional::AlibiCall call,
                                   std::optional<double> scale, double dropout) const {
  check_attention(query, key, value, dropout);
  // [batch, key heads, queries of a group, head_dim]: keys need not be copied for each query of a
  // group.
  const int64_t key_heads = key.size(1), queries = query.size(2), keys = key.size(2);
  const auto batch = query.size(0), heads = query.size(1), head_dim = query.size(3);
  const torch::Tensor grouped =
      query.reshape({batch, key_heads, heads / key_heads * queries, head_dim});
  torch::Tensor scores =
      at::matmul(grouped, key.transpose(-2, -1)).view({batch, heads, queries, keys});
  call.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  // Do not ask whether the scores require grad: inside a torch.func transform they do not say so.
  if (at::GradMode::is_enabled()) {
    scores = softmax(scores, std::move(call));
  } else {
    softmax_(scores, std::move(call));
  }
  if (dropout > 0) scores = at::dropout(scores, dropout, /*train=*/true);
  const torch::Tensor weights = scores.view({batch, key_heads, heads / key_heads * queries, keys});
  return at::matmul(weights, value).view({batch, heads, queries, value.size(-1)});
}

}  // namespace posembed
