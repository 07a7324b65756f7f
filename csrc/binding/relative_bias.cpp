#include "bindings.h"
#include "relative_bias/operator.h"
#include "score_call.h"

namespace posembed::binding {
namespace {

using Window = std::vector<int64_t>;
using MaybeWindow = std::optional<Window>;

std::shared_ptr<RelativePositionBiasImpl> make_relative_bias(
    int64_t num_heads, int64_t num_buckets, int64_t max_distance, bool bidirectional,
    const std::string& buckets, const MaybeWindow& window, bool class_token, int64_t mlp_dim,
    const std::string& mlp_rule, const MaybeWindow& pretrained_window,
    const std::string& resampling, bool align_corners, bool antialias) {
  return std::make_shared<RelativePositionBiasImpl>(
      RelativeBiasOptions(num_heads)
          .num_buckets(num_buckets)
          .max_distance(max_distance)
          .bidirectional(bidirectional)
          .buckets(dispatcher::enum_from<RelativeBuckets>(buckets))
          .window(window.value_or(Window()))
          .class_token(class_token)
          .mlp_dim(mlp_dim)
          .mlp_rule(dispatcher::enum_from<RelativeMlp>(mlp_rule))
          .pretrained_window(pretrained_window.value_or(Window()))
          .resampling(
              Resampling().method(resampling).align_corners(align_corners).antialias(antialias)));
}

torch::Tensor bias_of_positions(RelativePositionBiasImpl& self, int64_t query_length,
                                std::optional<int64_t> key_length, const QueryOffset& query_offset,
                                const MaybeTensor& query_positions,
                                const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                                const MaybeTensor& attention_mask, bool apply_mask) {
  return self.of_positions(query_length, key_length,
                           call_of(std::nullopt, query_offset, query_positions, key_positions,
                                   cu_seqlens, attention_mask, apply_mask, std::nullopt));
}

torch::Tensor bias_of_window(RelativePositionBiasImpl& self, const MaybeWindow& window) {
  return self.of_window(window.value_or(Window()));
}

torch::Tensor table_of_window(RelativePositionBiasImpl& self, const MaybeWindow& window) {
  return self.table(window.value_or(Window()));
}

const Binding binding_of_relative_bias([](py::module_& module) {
  bind<RelativePositionBiasImpl>(module, "RelativePositionBias")
      .def(py::init(&make_relative_bias), py::arg("num_heads"), py::kw_only(),
           py::arg("num_buckets") = 32, py::arg("max_distance") = 128,
           py::arg("bidirectional") = true, py::arg("buckets") = "t5",
           py::arg("window") = py::none(), py::arg("class_token") = false, py::arg("mlp_dim") = 0,
           py::arg("mlp_rule") = "swin", py::arg("pretrained_window") = py::none(),
           py::arg("resampling") = "bilinear", py::arg("align_corners") = false,
           py::arg("antialias") = false)
      .def("of_window", &bias_of_window, py::arg("window") = py::none(), without_gil())
      .def("table", &table_of_window, py::arg("window") = py::none(), without_gil())
      .def("extend", &RelativePositionBiasImpl::extend, py::arg("window"), without_gil())
      .def("forward", &bias_of_positions, py::arg("query_length"),
           py::arg("key_length") = py::none(), py::kw_only(), py::arg("query_offset") = py::none(),
           py::arg("query_positions") = py::none(), py::arg("key_positions") = py::none(),
           py::arg("cu_seqlens") = py::none(), py::arg("attention_mask") = py::none(),
           py::arg("apply_mask") = true, without_gil());
});

}  // namespace
}  // namespace posembed::binding
