#include "posembed/relative_logits.h"

#include "bindings.h"
#include "relative_bias/operator.h"
#include "score_call.h"

namespace posembed::binding {
namespace {

std::shared_ptr<RelativeLogitsImpl> make_relative_logits(
    const std::variant<int64_t, std::vector<int64_t>>& num_buckets, int64_t head_dim,
    std::optional<int64_t> num_heads, const std::string& buckets, int64_t max_distance,
    bool bidirectional, bool causal, const std::string& by, double scale) {
  if (by != "query" && by != "key") {
    throw py::value_error("by: expected 'query' or 'key', got '" + by + "'");
  }
  const auto* number = std::get_if<int64_t>(&num_buckets);
  const auto counts = number == nullptr ? std::get<std::vector<int64_t>>(num_buckets)
                                        : std::vector<int64_t>{*number};
  return std::make_shared<RelativeLogitsImpl>(
      RelativeLogitsOptions(counts, head_dim)
          .num_heads(num_heads.value_or(0))
          .buckets(dispatcher::enum_from<RelativeBuckets>(buckets))
          .max_distance(max_distance)
          .bidirectional(bidirectional)
          .causal(causal)
          .by_key(by == "key")
          .scale(scale));
}

torch::Tensor logits(RelativeLogitsImpl& self, const torch::Tensor& query,
                     std::optional<int64_t> other_length, const MaybeTensor& scores,
                     const QueryOffset& query_offset, const MaybeTensor& query_positions,
                     const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                     const MaybeTensor& attention_mask, bool apply_mask) {
  return self.forward(query, other_length,
                      call_of(std::nullopt, query_offset, query_positions, key_positions,
                              cu_seqlens, attention_mask, apply_mask, std::nullopt),
                      scores);
}

torch::Tensor add(RelativeLogitsImpl& self, const torch::Tensor& scores, const torch::Tensor& query,
                  const QueryOffset& query_offset, const MaybeTensor& query_positions,
                  const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                  const MaybeTensor& attention_mask, bool apply_mask) {
  return self.add_(scores, query,
                   call_of(std::nullopt, query_offset, query_positions, key_positions, cu_seqlens,
                           attention_mask, apply_mask, std::nullopt));
}

const Binding binding_of_relative_logits([](py::module_& module) {
  const auto offset = py::arg("query_offset") = py::none();
  const auto queries = py::arg("query_positions") = py::none();
  const auto keys = py::arg("key_positions") = py::none();
  const auto documents = py::arg("cu_seqlens") = py::none();
  const auto mask = py::arg("attention_mask") = py::none();
  const auto apply_mask = py::arg("apply_mask") = true;
  bind<RelativeLogitsImpl>(module, "RelativeLogits")
      .def(py::init(&make_relative_logits), py::arg("num_buckets"), py::arg("head_dim"),
           py::kw_only(), py::arg("num_heads") = py::none(), py::arg("buckets") = "clipped",
           py::arg("max_distance") = 128, py::arg("bidirectional") = true,
           py::arg("causal") = false, py::arg("by") = "query", py::arg("scale") = 1.0)
      .def("forward", &logits, py::arg("query"), py::arg("other_length") = py::none(),
           py::kw_only(), py::arg("scores") = py::none(), offset, queries, keys, documents, mask,
           apply_mask, without_gil())
      .def("add_", &add, py::arg("scores"), py::arg("query"), py::kw_only(), offset, queries, keys,
           documents, mask, apply_mask, without_gil());
});

}  // namespace
}  // namespace posembed::binding
