#include "posembed/quantized.h"

#include "bindings.h"

namespace posembed::binding {
namespace {

std::shared_ptr<QuantizedTableImpl> make_quantized(const torch::Tensor& codes,
                                                   const torch::Tensor& scales,
                                                   const std::optional<torch::Tensor>& biases,
                                                   int64_t block_rows,
                                                   std::optional<int64_t> block_columns,
                                                   std::optional<torch::Dtype> dtype) {
  return std::make_shared<QuantizedTableImpl>(
      QuantizedRows{codes, scales, biases, block_rows, block_columns.value_or(0)},
      dtype.value_or(torch::get_default_dtype_as_scalartype()));
}

py::tuple rowwise_codes(const torch::Tensor& packed, int64_t bits) {
  const QuantizedRows rows = QuantizedRows::from_rowwise(packed, bits);
  return py::make_tuple(rows.codes, rows.scales, rows.biases);
}

}  // namespace

const Binding binding_of_quantized([](py::module_& module) {
  bind<QuantizedTableImpl>(module, "QuantizedTable")
      .def(py::init(&make_quantized), py::arg("codes"), py::arg("scales"),
           py::arg("biases") = py::none(), py::kw_only(), py::arg("block_rows") = 1,
           py::arg("block_columns") = py::none(), py::arg("dtype") = py::none())
      .def("forward", &QuantizedTableImpl::forward, py::arg("ids"), py::arg("scale") = 1.0,
           without_gil())
      .def("dequantize", &QuantizedTableImpl::dequantize, without_gil());
  module.def("rowwise_codes", &rowwise_codes, py::arg("packed"), py::arg("bits"));
});

}  // namespace posembed::binding
