// The functional interface of QK-norm: thin wrappers around the operators.
#include "dispatcher/checks.h"
#include "posembed/rotary_norm.h"
#include "rotary/rotary_operator.h"
#include "rotary_norm/rotary_norm_operator.h"

namespace posembed {

namespace rotary_norm {
namespace {

Call call_of(const Tensor& query, const Tensor& key, const MaybeTensor& query_weight,
             const MaybeTensor& key_weight, Text spec, NormRotaryCall options) {
  const bool documents = options.cu_seqlens().has_value();
  options.positions(rotary::positions_of(options, query, options.cu_seqlens()))
      .offset(documents ? c10::SymInt(0) : options.offset().number());
  return {query, key, query_weight, key_weight, spec, std::move(options)};
}

/// The same for a projection, which has its heads by token.
PackedCall packed_call(const Tensor& qkv, const Packing& packing, const MaybeTensor& query_weight,
                       const MaybeTensor& key_weight, Text spec, NormRotaryCall options) {
  const Layout layout = options.layout();
  if (layout == Layout::bhsd) options.layout(Layout::bshd);
  Call call = call_of(qkv, {}, query_weight, key_weight, spec, std::move(options));
  call.options.layout(layout);
  return {rotary::heads_of(packing), qkv, std::move(call)};
}

/// No heads of a key, for a query alone.
Tensor no_key(const Tensor& query, const NormRotaryCall& call) {
  const rotary::Dimensions where = rotary::dimensions(call.layout());
  dispatcher::check_rank(query, "query", where.rank, where.shape);
  return query.slice(where.heads, 0, 0);
}

}  // namespace
}  // namespace rotary_norm

std::tuple<torch::Tensor, torch::Tensor> functional::norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call) {
  return rotary_norm::norm_rotary(
      rotary_norm::call_of(query, key, query_weight, key_weight, spec.to_json(), call));
}

std::tuple<torch::Tensor, torch::Tensor> functional::norm_rotary_(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call) {
  rotary_norm::norm_rotary_(
      rotary_norm::call_of(query, key, query_weight, key_weight, spec.to_json(), call));
  return {query, key};
}

torch::Tensor functional::norm_rotary(const torch::Tensor& query,
                                      const std::optional<torch::Tensor>& query_weight,
                                      const RotarySpec& spec, const NormRotaryCall& call) {
  const torch::Tensor key = rotary_norm::no_key(query, call);
  return std::get<0>(norm_rotary(query, key, query_weight, std::nullopt, spec, call));
}

torch::Tensor functional::norm_rotary_(const torch::Tensor& query,
                                       const std::optional<torch::Tensor>& query_weight,
                                       const RotarySpec& spec, const NormRotaryCall& call) {
  const torch::Tensor key = rotary_norm::no_key(query, call);
  return std::get<0>(norm_rotary_(query, key, query_weight, std::nullopt, spec, call));
}

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> functional::norm_rotary_packed(
    const torch::Tensor& qkv, const Packing& packing,
    const std::optional<torch::Tensor>& query_weight,
    const std::optional<torch::Tensor>& key_weight, const RotarySpec& spec,
    const NormRotaryCall& call) {
  return rotary_norm::norm_rotary_packed(
      rotary_norm::packed_call(qkv, packing, query_weight, key_weight, spec.to_json(), call));
}

torch::Tensor functional::norm_rotary_packed_(const torch::Tensor& qkv, const Packing& packing,
                                              const std::optional<torch::Tensor>& query_weight,
                                              const std::optional<torch::Tensor>& key_weight,
                                              const RotarySpec& spec, const NormRotaryCall& call) {
  rotary_norm::norm_rotary_packed_(
      rotary_norm::packed_call(qkv, packing, query_weight, key_weight, spec.to_json(), call));
  return qkv;
}

}  // namespace posembed
