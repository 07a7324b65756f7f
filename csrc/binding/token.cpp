#include "posembed/token.h"

#include <variant>

#include "bindings.h"
#include "path.h"
#include "token/operator.h"

namespace posembed::binding {
namespace {

std::shared_ptr<TokenEmbeddingImpl> make_token(int64_t num_embeddings, int64_t embedding_dim,
                                               std::optional<int64_t> padding_idx,
                                               std::optional<double> max_norm, double norm_type,
                                               bool scale_grad_by_freq, bool sparse,
                                               const py::object& scale,
                                               const std::optional<std::string>& gradient) {
  TokenOptions options(num_embeddings, embedding_dim);
  options.padding_idx(padding_idx).max_norm(max_norm).norm_type(norm_type);
  options.scale_grad_by_freq(scale_grad_by_freq).sparse(sparse);
  options.scale(table_scale(scale, embedding_dim));
  if (gradient.has_value()) options.gradient(dispatcher::enum_from<TableGradient>(*gradient));
  return std::make_shared<TokenEmbeddingImpl>(options);
}

std::shared_ptr<TokenEmbeddingImpl> from_file(
    const py::object& file, const std::string& tensor,
    const std::optional<std::vector<std::string>>& vocabulary, const std::string& missing,
    std::optional<torch::Dtype> dtype, bool freeze, const std::string& on_bad_row) {
  const auto open = pretrained::OpenOptions().on_bad_row(on_bad_row_of(on_bad_row));
  const pretrained::ReadOptions read = read_options(tensor, dtype, missing, py::none());
  const std::string path = path_of(file);
  const py::gil_scoped_release released;
  return TokenEmbedding::from_file(path, vocabulary, read, freeze, {0, 0}, open).ptr();
}

void resize(TokenEmbeddingImpl& self, int64_t num_embeddings,
            const std::variant<std::string, torch::Tensor>& initialization,
            int64_t pad_to_multiple_of, double covariance_scale,
            std::optional<at::Generator> generator) {
  auto how = ResizeOptions().covariance_scale(covariance_scale).generator(std::move(generator));
  how.pad_to_multiple_of(pad_to_multiple_of);
  if (const auto* rows = std::get_if<torch::Tensor>(&initialization)) {
    how.rows(*rows);
  } else {
    how.initialization(
        dispatcher::enum_from<Initialization>(std::get<std::string>(initialization)));
  }
  self.resize(num_embeddings, how);
}

}  // namespace

double table_scale(const py::object& scale, int64_t embedding_dim) {
  if (!py::isinstance<py::str>(scale)) return scale.cast<double>();
  const auto text = scale.cast<std::string>();
  if (text == "sqrt_dim") return std::sqrt(static_cast<double>(embedding_dim));
  throw py::value_error("scale: expected a number or 'sqrt_dim', got '" + text + "'");
}

const Binding binding_of_token([](py::module_& module) {
  bind<TokenEmbeddingImpl>(module, "TokenEmbedding")
      .def(py::init(&make_token), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::arg("padding_idx") = py::none(), py::arg("max_norm") = py::none(),
           py::arg("norm_type") = 2.0, py::arg("scale_grad_by_freq") = false,
           py::arg("sparse") = false, py::kw_only(), py::arg("scale") = 1.0,
           py::arg("gradient") = py::none())
      .def("resize", &resize, py::arg("num_embeddings"), py::arg("initialization") = "mean",
           py::kw_only(), py::arg("pad_to_multiple_of") = 1, py::arg("covariance_scale") = 1e-9,
           py::arg("generator") = py::none(), without_gil())
      .def(
          "select", [](TokenEmbeddingImpl& self, const torch::Tensor& rows) { self.select(rows); },
          py::arg("rows"), without_gil())
      .def(
          "train_rows",
          [](TokenEmbeddingImpl& self, const std::optional<torch::Tensor>& rows) {
            self.train_rows(rows);
          },
          py::arg("rows") = py::none(), without_gil())
      .def(
          "freeze_rows",
          [](TokenEmbeddingImpl& self, const torch::Tensor& rows) { self.freeze_rows(rows); },
          py::arg("rows"), without_gil())
      .def("with_embeddings", &TokenEmbeddingImpl::with_embeddings, py::arg("ids"),
           py::arg("features"), py::arg("mask"), without_gil())
      .def("quantize", &TokenEmbeddingImpl::quantize, py::arg("format") = "float8",
           py::arg("block") = 0, without_gil())
      .def("memory", &TokenEmbeddingImpl::memory)
      .def("forward", &TokenEmbeddingImpl::forward, py::arg("ids"), without_gil())
      .def("logits", &TokenEmbeddingImpl::logits, py::arg("hidden"), without_gil());
  def_maker(module, "TokenEmbedding", "from_file", &from_file, py::arg("path"), py::kw_only(),
            py::arg("tensor") = "", py::arg("vocabulary") = py::none(), py::arg("missing") = "mean",
            py::arg("dtype") = py::none(), py::arg("freeze") = true,
            py::arg("on_bad_row") = "raise");
});

}  // namespace posembed::binding
