// The functional interface of QK-norm: thin wrappers around the operators.
#include "posembed/rotary_norm.h"
#include "rotary/arguments.h"
#include "rotary_norm/operator.h"

namespace posembed {
namespace rotary_norm {
namespace {

Call call_of(const Tensor& query, const Tensor& key, const Tensor& query_weight,
             const Tensor& key_weight, Text spec, NormRotaryCall options) {
  options.positions(rotary::positions_of(options, query)).offset(options.offset().number());
  return {query, key, query_weight, key_weight, spec, std::move(options)};
}

}  // namespace
}  // namespace rotary_norm

std::tuple<torch::Tensor, torch::Tensor> functional::norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const RotarySpec& spec, const NormRotaryCall& call) {
  return rotary_norm::norm_rotary(
      rotary_norm::call_of(query, key, query_weight, key_weight, spec.to_json(), call));
}

std::tuple<torch::Tensor, torch::Tensor> functional::norm_rotary_(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const RotarySpec& spec, const NormRotaryCall& call) {
  rotary_norm::norm_rotary_(
      rotary_norm::call_of(query, key, query_weight, key_weight, spec.to_json(), call));
  return {query, key};
}

}  // namespace posembed
