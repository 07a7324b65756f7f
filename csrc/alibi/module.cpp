// ALiBi and the functions for C++: options kept, the operators called.
#include <ATen/ops/scaled_dot_product_attention.h>

#include <ostream>
#include <vector>

#include "alibi/operator.h"
#include "posembed/alibi.h"

namespace posembed {

const char* name(Slopes slopes) { return slopes == Slopes::press ? "press" : "geometric"; }

namespace functional {
namespace {

alibi::MaybeOffset offset_of(const AlibiCall& call) {
  if (!call.query_offset.has_value()) return std::nullopt;
  return c10::SymInt(*call.query_offset);
}

}  // namespace

torch::Tensor alibi_slopes(int64_t num_heads, Slopes kind, double max_bias,
                           std::optional<int64_t> total_heads, int64_t head_start,
                           std::optional<torch::Device> device) {
  return alibi::call_slopes(num_heads, name(kind), max_bias, total_heads, head_start,
                            at::ArrayRef<double>(), device);
}

torch::Tensor alibi_bias(const torch::Tensor& slopes, int64_t query_length, int64_t key_length,
                         const AlibiCall& call, std::optional<torch::Dtype> dtype) {
  return alibi::call_bias(slopes, query_length, key_length, offset_of(call), call.causal,
                          call.hide_future, dtype);
}

torch::Tensor alibi_add(const torch::Tensor& scores, const torch::Tensor& slopes,
                        const AlibiCall& call) {
  return alibi::call_add(scores, slopes, offset_of(call), call.causal, call.hide_future);
}

void alibi_add_(const torch::Tensor& scores, const torch::Tensor& slopes, const AlibiCall& call) {
  alibi::call_add_in_place(scores, slopes, offset_of(call), call.causal, call.hide_future);
}

}  // namespace functional

ALiBiOptions::ALiBiOptions(int64_t num_heads) : num_heads_(num_heads) {}

ALiBiImpl::ALiBiImpl(const ALiBiOptions& options) : options(options) { ALiBiImpl::reset(); }

void ALiBiImpl::reset() {
  const torch::Tensor initial = derived_slopes();
  if (!options.learned()) return;
  parameter_ = register_parameter("slopes", initial.to(like_.dtype()));
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
  return alibi::call_slopes(
      options.num_heads(), posembed::name(kind == nullptr ? Slopes::press : *kind),
      options.max_bias(), options.total_heads(), options.head_start(), values, like_.device());
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
  if (options.learned()) stream << ", learned=True";
  stream << ")";
}

void ALiBiImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  like_ = like_.device(device).dtype(dtype);
}

void ALiBiImpl::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  like_ = like_.dtype(dtype);
}

void ALiBiImpl::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  like_ = like_.device(device);
}

torch::Tensor ALiBiImpl::slopes() const {
  return options.learned() ? parameter_ : derived_slopes();
}

torch::Tensor ALiBiImpl::forward(int64_t query_length, std::optional<int64_t> key_length,
                                 std::optional<int64_t> query_offset,
                                 std::optional<torch::Dtype> dtype) {
  return functional::alibi_bias(slopes(), query_length, key_length.value_or(query_length),
                                {query_offset, options.causal(), true},
                                dtype.value_or(torch::typeMetaToScalarType(like_.dtype())));
}

void ALiBiImpl::add_(const torch::Tensor& scores, std::optional<int64_t> query_offset) {
  functional::alibi_add_(scores, slopes(), {query_offset, options.causal(), true});
}

torch::Tensor ALiBiImpl::attention(const torch::Tensor& query, const torch::Tensor& key,
                                   const torch::Tensor& value, std::optional<int64_t> query_offset,
                                   std::optional<double> scale) {
  const torch::Tensor bias =
      forward(query.size(-2), key.size(-2), query_offset, query.scalar_type());
  return at::scaled_dot_product_attention(query, key, value, bias, /*dropout_p=*/0.0,
                                          /*is_causal=*/false, scale,
                                          /*enable_gqa=*/query.size(-3) != key.size(-3));
}

}  // namespace posembed
