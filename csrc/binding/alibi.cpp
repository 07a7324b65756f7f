#include "bindings.h"
#include "score_call.h"

namespace posembed::binding {
namespace {

using NameOrTensor = std::variant<std::string, torch::Tensor>;

ALiBiOptions::SlopesOption slopes(const NameOrTensor& value) {
  if (const auto* tensor = std::get_if<torch::Tensor>(&value)) return *tensor;
  const auto& text = std::get<std::string>(value);
  for (const Slopes known : {Slopes::paper, Slopes::geometric}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("slopes: expected 'paper', 'geometric' or a tensor, got '" + text + "'");
}

std::shared_ptr<ALiBiImpl> make_alibi(int64_t num_heads, const NameOrTensor& value, double max_bias,
                                      bool causal, std::optional<int64_t> total_heads,
                                      int64_t head_start, double factor,
                                      std::optional<int64_t> train_length, bool learned) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions(num_heads)
                                         .slopes(slopes(value))
                                         .max_bias(max_bias)
                                         .causal(causal)
                                         .total_heads(total_heads)
                                         .head_start(head_start)
                                         .factor(factor)
                                         .train_length(train_length)
                                         .learned(learned));
}

std::shared_ptr<ALiBiImpl> from_preset(const std::string& name, int64_t num_heads,
                                       std::optional<int64_t> head_dim) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions::preset(name, num_heads, head_dim));
}

torch::Tensor forward(ALiBiImpl& self, int64_t query_length, std::optional<int64_t> key_length,
                      std::optional<torch::Dtype> dtype, const QueryOffset& query_offset,
                      const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                      const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                      bool apply_mask, const MaybeTensor& sample_slopes) {
  return self.forward(query_length, key_length,
                      call_of(std::nullopt, query_offset, query_positions, key_positions,
                              cu_seqlens, attention_mask, apply_mask, sample_slopes),
                      dtype);
}

/// Wraps a method on scores to take Python's arguments.
template <auto method>
torch::Tensor on_scores(const ALiBiImpl& self, const torch::Tensor& scores,
                        std::optional<double> scale, const QueryOffset& query_offset,
                        const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                        const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                        bool apply_mask, const MaybeTensor& sample_slopes) {
  return (self.*method)(scores, call_of(scale, query_offset, query_positions, key_positions,
                                        cu_seqlens, attention_mask, apply_mask, sample_slopes));
}

torch::Tensor attention(const ALiBiImpl& self, const torch::Tensor& query, const torch::Tensor& key,
                        const torch::Tensor& value, double dropout, std::optional<double> scale,
                        const QueryOffset& query_offset, const MaybeTensor& query_positions,
                        const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                        const MaybeTensor& attention_mask, bool apply_mask,
                        const MaybeTensor& sample_slopes) {
  return self.attention(query, key, value,
                        call_of(scale, query_offset, query_positions, key_positions, cu_seqlens,
                                attention_mask, apply_mask, sample_slopes),
                        dropout);
}

}  // namespace

const Binding binding_of_alibi([](py::module_& module) {
  const auto scale = py::arg("scale") = py::none();
  const auto offset = py::arg("query_offset") = py::none();
  const auto queries = py::arg("query_positions") = py::none();
  const auto keys = py::arg("key_positions") = py::none();
  const auto documents = py::arg("cu_seqlens") = py::none();
  const auto mask = py::arg("attention_mask") = py::none();
  const auto apply_mask = py::arg("apply_mask") = true;
  const auto own_slopes = py::arg("sample_slopes") = py::none();
  const auto def_on_scores = [&](auto& bound, const char* name, auto method) {
    bound.def(name, method, py::arg("scores"), py::kw_only(), scale, offset, queries, keys,
              documents, mask, apply_mask, own_slopes, without_gil());
  };
  auto bound = bind<ALiBiImpl>(module, "ALiBi");
  bound
      .def(py::init(&make_alibi), py::arg("num_heads"), py::kw_only(), py::arg("slopes") = "paper",
           py::arg("max_bias") = 8.0, py::arg("causal") = true, py::arg("total_heads") = py::none(),
           py::arg("head_start") = 0, py::arg("factor") = 1.0, py::arg("train_length") = py::none(),
           py::arg("learned") = false)
      .def("alibi_slopes", &ALiBiImpl::alibi_slopes, py::arg("batch_size") = py::none(),
           py::arg("key_length") = py::none(), without_gil())
      .def("forward", &forward, py::arg("query_length"), py::arg("key_length") = py::none(),
           py::kw_only(), py::arg("dtype") = py::none(), offset, queries, keys, documents, mask,
           apply_mask, own_slopes, without_gil())
      .def("lse_correction", &ALiBiImpl::lse_correction, py::arg("query_length"), py::kw_only(),
           py::arg("query_start"), py::arg("key_start"), py::arg("form") = "distance",
           without_gil())
      .def("attention", &attention, py::arg("query"), py::arg("key"), py::arg("value"),
           py::kw_only(), py::arg("dropout") = 0.0, scale, offset, queries, keys, documents, mask,
           apply_mask, own_slopes, without_gil());
  def_maker(module, "ALiBi", "from_preset", &from_preset, py::arg("name"), py::arg("num_heads"),
            py::kw_only(), py::arg("head_dim") = py::none());
  def_on_scores(bound, "add_", &on_scores<&ALiBiImpl::add_>);
  def_on_scores(bound, "softmax", &on_scores<&ALiBiImpl::softmax>);
  def_on_scores(bound, "softmax_", &on_scores<&ALiBiImpl::softmax_>);
});

}  // namespace posembed::binding
