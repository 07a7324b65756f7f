// The functional interface of QK-norm: thin wrappers around the operators.
#include "posembed/rotary_norm.h"
#include "rotary_norm/operator.h"

namespace posembed::functional {

std::tuple<torch::Tensor, torch::Tensor> norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const std::optional<torch::Tensor>& positions,
    std::string_view spec, const NormRotaryCall& call) {
  return rotary_norm::call_norm_rotary({query, key, query_weight, key_weight, positions,
                                        std::string(spec), name(call.layout), call.offset, call.eps,
                                        call.weight_offset});
}

std::tuple<torch::Tensor, torch::Tensor> norm_rotary_(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const std::optional<torch::Tensor>& positions,
    std::string_view spec, const NormRotaryCall& call) {
  rotary_norm::call_norm_rotary_in_place({query, key, query_weight, key_weight, positions,
                                          std::string(spec), name(call.layout), call.offset,
                                          call.eps, call.weight_offset});
  return {query, key};
}

}  // namespace posembed::functional
