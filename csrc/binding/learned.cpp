#include "posembed/learned.h"

#include "bindings.h"

namespace posembed::binding {
namespace {

std::shared_ptr<LearnedPositionalEmbeddingImpl> make_learned(int64_t max_positions,
                                                             int64_t embedding_dim,
                                                             int64_t first_row) {
  return std::make_shared<LearnedPositionalEmbeddingImpl>(
      LearnedOptions(max_positions, embedding_dim).first_row(first_row));
}

torch::Tensor learned_forward(LearnedPositionalEmbeddingImpl& self, const torch::Tensor& x,
                              const std::optional<torch::Tensor>& positions, const Offset& offset) {
  return self.forward(x, PositionCall().positions(positions).offset(offset));
}

}  // namespace

const Binding binding_of_learned([](py::module_& module) {
  bind<LearnedPositionalEmbeddingImpl>(module, "LearnedPositionalEmbedding")
      .def(py::init(&make_learned), py::arg("max_positions"), py::arg("embedding_dim"),
           py::kw_only(), py::arg("first_row") = 0)
      .def("forward", &learned_forward, py::arg("x"), py::arg("positions") = py::none(),
           py::kw_only(), py::arg("offset") = 0, without_gil())
      .def("encode", &LearnedPositionalEmbeddingImpl::encode, py::arg("positions"), without_gil())
      .def("extend", &LearnedPositionalEmbeddingImpl::extend, py::arg("max_positions"),
           py::arg("method") = "linear", without_gil());
});

}  // namespace posembed::binding
