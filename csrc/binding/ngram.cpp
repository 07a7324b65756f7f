#include "posembed/ngram.h"

#include "bindings.h"
#include "ngram/operator.h"
#include "token/operator.h"

namespace posembed::binding {
namespace {

/// The numbers of Python's NgramSpec.
NgramSpec spec_of(const py::object& spec) {
  const auto numbers = [&spec](const char* name) {
    std::vector<int64_t> result;
    for (const py::handle row : spec.attr(name)) {
      for (const py::handle number : row) result.push_back(number.cast<int64_t>());
    }
    return result;
  };
  const auto maybe = [&spec](const char* name) {
    return spec.attr(name).cast<std::optional<int64_t>>();
  };
  return NgramSpec()
      .multipliers(spec.attr("multipliers").cast<std::vector<int64_t>>())
      .moduli(numbers("moduli"))
      .offsets(numbers("offsets"))
      .sizes(spec.attr("sizes").cast<std::vector<int64_t>>())
      .boundary(maybe("boundary"))
      .padding(maybe("padding"))
      .rule(dispatcher::enum_from<NgramRule>(spec.attr("rule").cast<std::string>()))
      .num_embeddings(maybe("num_embeddings"));
}

std::shared_ptr<NgramEmbeddingImpl> make_ngram(const py::object& spec, int64_t embedding_dim,
                                               bool summed, const std::string& gradient) {
  return std::make_shared<NgramEmbeddingImpl>(
      NgramOptions(spec_of(spec), embedding_dim)
          .summed(summed)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

std::shared_ptr<PerLayerEmbeddingImpl> make_per_layer(int64_t num_embeddings, int64_t num_layers,
                                                      int64_t layer_dim, const py::object& scale) {
  return std::make_shared<PerLayerEmbeddingImpl>(num_embeddings, num_layers, layer_dim,
                                                 table_scale(scale, layer_dim));
}

using MaybeTensor = std::optional<torch::Tensor>;

NgramCall ngram_call(const MaybeTensor& history, const MaybeTensor& cu_seqlens,
                     const MaybeTensor& mask, const MaybeTensor& lengths) {
  return NgramCall().history(history).cu_seqlens(cu_seqlens).mask(mask).lengths(lengths);
}

torch::Tensor ngram_forward(NgramEmbeddingImpl& self, const torch::Tensor& ids,
                            const MaybeTensor& history, const MaybeTensor& cu_seqlens,
                            const MaybeTensor& mask, const MaybeTensor& lengths) {
  return self.forward(ids, ngram_call(history, cu_seqlens, mask, lengths));
}

torch::Tensor ngram_history(const NgramEmbeddingImpl& self, const torch::Tensor& ids,
                            const MaybeTensor& history, const MaybeTensor& mask,
                            const MaybeTensor& lengths) {
  return self.next_history(ids, ngram_call(history, std::nullopt, mask, lengths));
}

}  // namespace

const Binding binding_of_ngram([](py::module_& module) {
  bind<NgramEmbeddingImpl>(module, "NgramEmbedding")
      .def(py::init(&make_ngram), py::arg("spec"), py::arg("embedding_dim"), py::kw_only(),
           py::arg("summed") = false, py::arg("gradient") = "dense")
      .def("quantize", &NgramEmbeddingImpl::quantize, py::arg("format") = "float8",
           py::arg("block") = 0, without_gil())
      .def("memory", &NgramEmbeddingImpl::memory)
      .def("forward", &ngram_forward, py::arg("ids"), py::arg("history") = py::none(),
           py::arg("cu_seqlens") = py::none(), py::kw_only(),
           py::arg("attention_mask") = py::none(), py::arg("lengths") = py::none(), without_gil())
      .def("next_history", &ngram_history, py::arg("ids"), py::arg("history") = py::none(),
           py::kw_only(), py::arg("attention_mask") = py::none(), py::arg("lengths") = py::none(),
           without_gil());
  bind<PerLayerEmbeddingImpl>(module, "PerLayerEmbedding")
      .def(py::init(&make_per_layer), py::arg("num_embeddings"), py::arg("num_layers"),
           py::arg("layer_dim"), py::kw_only(), py::arg("scale") = 1.0)
      .def("quantize", &PerLayerEmbeddingImpl::quantize, py::arg("format") = "float8",
           py::arg("block") = 0, without_gil())
      .def("memory", &PerLayerEmbeddingImpl::memory)
      .def("forward", &PerLayerEmbeddingImpl::forward, py::arg("ids"), without_gil())
      .def("layer", &PerLayerEmbeddingImpl::layer, py::arg("ids"), py::arg("index"), without_gil());
});

}  // namespace posembed::binding
