#include "posembed/rotary_norm.h"

#include <string_view>

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {
namespace {

using functional::NormRotaryCall;
using MaybeTensor = std::optional<torch::Tensor>;

std::tuple<torch::Tensor, torch::Tensor> norm_rotary(
    const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& query_weight,
    const torch::Tensor& key_weight, const MaybeTensor& positions, std::string_view spec,
    std::string_view layout, int64_t offset, double eps, double weight_offset) {
  const NormRotaryCall call{rotary_layout(layout), offset, eps, weight_offset};
  const ReleasedForLongWork release(query);
  return functional::norm_rotary(query, key, query_weight, key_weight, positions, spec, call);
}

void norm_rotary_in_place(const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& query_weight, const torch::Tensor& key_weight,
                          const MaybeTensor& positions, std::string_view spec,
                          std::string_view layout, int64_t offset, double eps,
                          double weight_offset) {
  const NormRotaryCall call{rotary_layout(layout), offset, eps, weight_offset};
  const ReleasedForLongWork release(query);
  functional::norm_rotary_(query, key, query_weight, key_weight, positions, spec, call);
}

constexpr const char* rotary_norm_arguments[] = {
    "query", "key",    "query_weight", "key_weight", "positions",
    "spec",  "layout", "offset",       "eps",        "weight_offset"};

PyMethodDef rotary_norm_functions[] = {
    fast_method<norm_rotary, rotary_norm_arguments>(
        "norm_rotary",
        "norm_rotary(query, key, query_weight, key_weight, positions, spec, layout, offset, eps, "
        "weight_offset, /) -> tuple[Tensor, Tensor]"),
    fast_method<norm_rotary_in_place, rotary_norm_arguments>(
        "norm_rotary_",
        "norm_rotary_(query, key, query_weight, key_weight, positions, spec, layout, offset, eps, "
        "weight_offset, /) -> None"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_rotary_norm(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), rotary_norm_functions) != 0)
    throw py::error_already_set();
}

}  // namespace posembed::python
