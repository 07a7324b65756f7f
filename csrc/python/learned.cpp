#include "posembed/learned.h"

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {
namespace {

std::shared_ptr<LearnedPositionalEmbeddingImpl> make_learned(int64_t max_positions,
                                                             int64_t embedding_dim,
                                                             int64_t first_row) {
  return std::make_shared<LearnedPositionalEmbeddingImpl>(
      LearnedOptions(max_positions, embedding_dim).first_row(first_row));
}

torch::Tensor learned_add(const torch::Tensor& x, const torch::Tensor& weight,
                          const std::optional<torch::Tensor>& positions, int64_t offset,
                          int64_t first_row) {
  const ReleasedForLongWork release(x);
  return functional::learned_add(x, weight, positions, offset, first_row);
}

constexpr const char* learned_arguments[] = {"x", "weight", "positions", "offset", "first_row"};

PyMethodDef learned_functions[] = {
    fast_method<learned_add, learned_arguments>(
        "learned_add", "learned_add(x, weight, positions, offset, first_row, /) -> Tensor"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_learned(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), learned_functions) != 0) throw py::error_already_set();
  bind<LearnedPositionalEmbeddingImpl>(module, "LearnedPositionalEmbedding")
      .def(py::init(&make_learned), py::arg("max_positions"), py::arg("embedding_dim"),
           py::kw_only(), py::arg("first_row") = 0)
      .def("forward", &LearnedPositionalEmbeddingImpl::forward, py::arg("x"),
           py::arg("positions") = py::none(), py::kw_only(), py::arg("offset") = 0, without_gil())
      .def("encode", &LearnedPositionalEmbeddingImpl::encode, py::arg("positions"), without_gil())
      .def("extend", &LearnedPositionalEmbeddingImpl::extend, py::arg("max_positions"),
           py::arg("method") = "linear", without_gil());
}

}  // namespace posembed::python
