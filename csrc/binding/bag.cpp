#include "posembed/bag.h"

#include "bindings.h"
#include "token/operator.h"

namespace posembed::binding {
namespace {

BagMode bag_mode(const std::string& text) {
  for (const BagMode known : {BagMode::sum, BagMode::mean, BagMode::max}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("mode: expected 'sum', 'mean' or 'max', got '" + text + "'");
}

std::shared_ptr<TokenBagImpl> make_bag(int64_t num_embeddings, int64_t embedding_dim,
                                       const std::string& mode, std::optional<int64_t> padding_idx,
                                       bool include_last_offset, const std::string& gradient) {
  return std::make_shared<TokenBagImpl>(
      TokenBagOptions(num_embeddings, embedding_dim)
          .mode(bag_mode(mode))
          .padding_idx(padding_idx)
          .include_last_offset(include_last_offset)
          .gradient(dispatcher::enum_from<TableGradient>(gradient)));
}

}  // namespace

const Binding binding_of_bag([](py::module_& module) {
  bind<TokenBagImpl>(module, "TokenBag")
      .def(py::init(&make_bag), py::arg("num_embeddings"), py::arg("embedding_dim"),
           py::arg("mode") = "sum", py::arg("padding_idx") = py::none(), py::kw_only(),
           py::arg("include_last_offset") = false, py::arg("gradient") = "dense")
      .def("quantize", &TokenBagImpl::quantize, py::arg("format") = "float8", py::arg("block") = 0,
           without_gil())
      .def("memory", &TokenBagImpl::memory)
      .def("forward", &TokenBagImpl::forward, py::arg("ids"), py::arg("offsets") = py::none(),
           py::arg("weights") = py::none(), without_gil());
});

}  // namespace posembed::binding
