#include "posembed/input.h"

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {
namespace {

using MaybeTensor = std::optional<torch::Tensor>;

Positions positions_of(const std::optional<std::string>& text) {
  if (!text.has_value()) return Positions::none;
  if (*text == "learned") return Positions::learned;
  if (*text == "sinusoidal") return Positions::sinusoidal;
  throw py::value_error("positions: expected 'learned', 'sinusoidal' or None, got '" + *text + "'");
}

InputNorm norm_of(std::string_view text) {
  if (text == "none") return InputNorm::none;
  if (text == "layer") return InputNorm::layer;
  if (text == "rms") return InputNorm::rms;
  TORCH_CHECK_VALUE(false, "norm: expected 'none', 'layer' or 'rms', got '", text, "'");
}

PositionRule rule_of(const std::string& text) {
  if (text == "consecutive") return PositionRule::consecutive;
  if (text == "roberta") return PositionRule::roberta;
  if (text == "opt") return PositionRule::opt;
  throw py::value_error("position_rule: expected 'consecutive', 'roberta' or 'opt', got '" + text +
                        "'");
}

std::shared_ptr<InputEmbeddingImpl> make_input(
    int64_t num_embeddings, int64_t embedding_dim, const std::optional<std::string>& positions,
    std::optional<int64_t> max_positions, int64_t num_types, const py::object& scale,
    const std::optional<std::string>& norm, double eps, double dropout,
    std::optional<int64_t> padding_idx, const std::string& position_rule,
    std::optional<int64_t> token_dim, std::optional<int64_t> output_dim,
    const std::string& gradient) {
  return std::make_shared<InputEmbeddingImpl>(InputOptions(num_embeddings, embedding_dim)
                                                  .positions(positions_of(positions))
                                                  .max_positions(max_positions)
                                                  .num_types(num_types)
                                                  .scale(table_scale(scale, embedding_dim))
                                                  .norm(norm_of(norm.value_or("none")))
                                                  .eps(eps)
                                                  .dropout(dropout)
                                                  .padding_idx(padding_idx)
                                                  .position_rule(rule_of(position_rule))
                                                  .token_dim(token_dim)
                                                  .output_dim(output_dim)
                                                  .gradient(table_gradient(gradient)));
}

torch::Tensor input_forward(InputEmbeddingImpl& self, const MaybeTensor& ids,
                            const MaybeTensor& positions, const MaybeTensor& types,
                            const MaybeTensor& inputs_embeds, const Offset& offset,
                            const MaybeTensor& attention_mask, const MaybeTensor& seed,
                            int64_t first_token) {
  return self.forward(ids.value_or(torch::Tensor()), positions, types, offset, attention_mask, seed,
                      first_token, inputs_embeds);
}

torch::Tensor input_embedding(const torch::Tensor& ids, const torch::Tensor& token,
                              const MaybeTensor& position, const MaybeTensor& positions,
                              const MaybeTensor& token_type, const MaybeTensor& types,
                              const MaybeTensor& norm_weight, const MaybeTensor& norm_bias,
                              int64_t offset, int64_t first_row, std::string_view sinusoid,
                              std::string_view norm, double eps, double scale, double dropout,
                              int64_t padding_idx, int64_t position_padding_idx,
                              std::string_view gradient, const MaybeTensor& seed,
                              int64_t first_token) {
  const functional::InputCall call{position,
                                   positions,
                                   token_type,
                                   types,
                                   norm_weight,
                                   norm_bias,
                                   offset,
                                   first_row,
                                   std::string(sinusoid),
                                   norm_of(norm),
                                   eps,
                                   scale,
                                   dropout,
                                   padding_idx,
                                   position_padding_idx,
                                   table_gradient(gradient),
                                   seed,
                                   first_token};
  const ReleasedForLongWork release(ids, usual_row);
  return functional::input_embedding(ids, token, call);
}

constexpr const char* input_arguments[] = {"ids",
                                           "token",
                                           "position",
                                           "positions",
                                           "token_type",
                                           "types",
                                           "norm_weight",
                                           "norm_bias",
                                           "offset",
                                           "first_row",
                                           "sinusoid",
                                           "norm",
                                           "eps",
                                           "scale",
                                           "dropout",
                                           "padding_idx",
                                           "position_padding_idx",
                                           "gradient",
                                           "seed",
                                           "first_token"};

PyMethodDef input_functions[] = {
    fast_method<input_embedding, input_arguments>(
        "input_embedding",
        "input_embedding(ids, token, position, positions, token_type, types, norm_weight, "
        "norm_bias, offset, first_row, sinusoid, norm, eps, scale, dropout, padding_idx, "
        "position_padding_idx, gradient, seed, first_token, /) -> Tensor"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_input(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), input_functions) != 0) throw py::error_already_set();
  bind<InputEmbeddingImpl>(module, "InputEmbedding")
      .def(py::init(&make_input), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::kw_only(), py::arg("positions") = "learned", py::arg("max_positions") = py::none(),
           py::arg("num_types") = 0, py::arg("scale") = 1.0, py::arg("norm") = py::none(),
           py::arg("eps") = 1e-5, py::arg("dropout") = 0.0, py::arg("padding_idx") = py::none(),
           py::arg("position_rule") = "consecutive", py::arg("token_dim") = py::none(),
           py::arg("output_dim") = py::none(), py::arg("gradient") = "dense")
      .def("forward", &input_forward, py::arg("ids") = py::none(),
           py::arg("positions") = py::none(), py::arg("types") = py::none(), py::kw_only(),
           py::arg("inputs_embeds") = py::none(), py::arg("offset") = 0,
           py::arg("attention_mask") = py::none(), py::arg("seed") = py::none(),
           py::arg("first_token") = 0, without_gil());
}

}  // namespace posembed::python
