#include <memory>

#include "bindings.h"
#include "input/input_operator.h"
#include "posembed/input.h"

namespace posembed::binding {
namespace {

Positions positions_of(const std::optional<std::string>& text) {
  if (!text.has_value()) return Positions::none;
  if (*text == "learned") return Positions::learned;
  if (*text == "sinusoidal") return Positions::sinusoidal;
  throw py::value_error("positions: expected 'learned', 'sinusoidal' or None, got '" + *text + "'");
}

std::shared_ptr<InputEmbeddingImpl> make_input(
    int64_t num_embeddings, int64_t embedding_dim, const std::optional<std::string>& positions,
    std::optional<int64_t> max_positions, int64_t num_types, const py::object& scale,
    const std::optional<std::string>& norm, std::optional<double> eps, double dropout,
    std::optional<int64_t> padding_idx, const std::string& position_rule,
    std::optional<int64_t> token_dim, std::optional<int64_t> output_dim,
    const std::string& gradient) {
  return std::make_shared<InputEmbeddingImpl>(
      InputOptions(num_embeddings, embedding_dim)
          .positions(positions_of(positions))
          .max_positions(max_positions)
          .num_types(num_types)
          .scale(table_scale(scale, embedding_dim))
          .norm(dispatcher::enum_from<InputNorm>(norm.value_or("none")))
          .eps(eps.has_value() ? Given<double>(*eps) : Given<double>::default_to(1e-5))
          .dropout(dropout)
          .padding_idx(padding_idx)
          .position_rule(static_cast<PositionRule>(dispatcher::index_of(
              position_rule, "position_rule", {"consecutive", "roberta", "opt"})))
          .token_dim(token_dim)
          .output_dim(output_dim)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

torch::Tensor input_forward(InputEmbeddingImpl& self, const MaybeTensor& ids,
                            const MaybeTensor& positions, const MaybeTensor& types,
                            const MaybeTensor& inputs_embeds, const Offset& offset,
                            const MaybeTensor& attention_mask, const MaybeTensor& seed,
                            int64_t first_token, const MaybeTensor& cu_seqlens) {
  return self.forward(ids.value_or(torch::Tensor()), InputCall()
                                                         .positions(positions)
                                                         .types(types)
                                                         .offset(offset)
                                                         .attention_mask(attention_mask)
                                                         .seed(seed)
                                                         .first_token(first_token)
                                                         .cu_seqlens(cu_seqlens)
                                                         .inputs_embeds(inputs_embeds));
}

}  // namespace

const Binding binding_of_input([](py::module_& module) {
  bind<InputEmbeddingImpl>(module, "InputEmbedding")
      .def(py::init(&make_input), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::kw_only(), py::arg("positions") = "learned", py::arg("max_positions") = py::none(),
           py::arg("num_types") = 0, py::arg("scale") = 1.0, py::arg("norm") = py::none(),
           py::arg("eps") = py::none(), py::arg("dropout") = 0.0,
           py::arg("padding_idx") = py::none(), py::arg("position_rule") = "consecutive",
           py::arg("token_dim") = py::none(), py::arg("output_dim") = py::none(),
           py::arg("gradient") = "dense")
      .def("forward", &input_forward, py::arg("ids") = py::none(), py::kw_only(),
           py::arg("positions") = py::none(), py::arg("types") = py::none(),
           py::arg("inputs_embeds") = py::none(), py::arg("offset") = 0,
           py::arg("attention_mask") = py::none(), py::arg("seed") = py::none(),
           py::arg("first_token") = 0, py::arg("cu_seqlens") = py::none(), without_gil())
      .def(
          "with_embeddings",
          [](InputEmbeddingImpl& self, const torch::Tensor& ids, const torch::Tensor& features,
             const torch::Tensor& mask) { return self.with_embeddings(ids, features, mask); },
          py::arg("ids"), py::arg("features"), py::arg("mask"), without_gil());
});

}  // namespace posembed::binding
