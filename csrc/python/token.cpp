#include "posembed/token.h"

#include "bindings.h"

namespace posembed::python {
namespace {

std::shared_ptr<TokenEmbeddingImpl> make(int64_t num_embeddings, int64_t embedding_dim,
                                         std::optional<int64_t> padding_idx,
                                         std::optional<double> max_norm, double norm_type,
                                         bool scale_grad_by_freq, bool sparse,
                                         const py::object& scale, const std::string& gradient) {
  return std::make_shared<TokenEmbeddingImpl>(TokenOptions(num_embeddings, embedding_dim)
                                                  .padding_idx(padding_idx)
                                                  .max_norm(max_norm)
                                                  .norm_type(norm_type)
                                                  .scale_grad_by_freq(scale_grad_by_freq)
                                                  .sparse(sparse)
                                                  .scale(table_scale(scale, embedding_dim))
                                                  .gradient(table_gradient(gradient)));
}

}  // namespace

double table_scale(const py::object& scale, int64_t embedding_dim) {
  if (!py::isinstance<py::str>(scale)) return scale.cast<double>();
  const auto text = scale.cast<std::string>();
  if (text == "sqrt_dim") return std::sqrt(static_cast<double>(embedding_dim));
  throw py::value_error("scale: expected a number or 'sqrt_dim', got '" + text + "'");
}

TableGradient table_gradient(const std::string& text) {
  for (const TableGradient known : {TableGradient::dense, TableGradient::rows}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("gradient: expected 'dense' or 'rows', got '" + text + "'");
}

void bind_token(py::module_& module) {
  using released = py::call_guard<py::gil_scoped_release>;
  bind<TokenEmbeddingImpl>(module, "TokenEmbedding")
      .def(py::init(&make), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::arg("padding_idx") = py::none(), py::arg("max_norm") = py::none(),
           py::arg("norm_type") = 2.0, py::arg("scale_grad_by_freq") = false,
           py::arg("sparse") = false, py::kw_only(), py::arg("scale") = 1.0,
           py::arg("gradient") = "dense")
      .def("forward", &TokenEmbeddingImpl::forward, py::arg("ids"), released())
      .def("logits", &TokenEmbeddingImpl::logits, py::arg("hidden"), released());
}

}  // namespace posembed::python
