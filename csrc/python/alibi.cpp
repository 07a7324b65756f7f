#include "posembed/alibi.h"

#include "bindings.h"

namespace posembed::python {
namespace {

using NameOrTensor = std::variant<std::string, torch::Tensor>;

ALiBiOptions::SlopesOption slopes(const NameOrTensor& given) {
  if (const auto* tensor = std::get_if<torch::Tensor>(&given)) return *tensor;
  const auto& text = std::get<std::string>(given);
  for (const Slopes known : {Slopes::press, Slopes::geometric}) {
    if (text == posembed::name(known)) return known;
  }
  throw py::value_error("slopes: expected 'press', 'geometric' or a tensor, got '" + text + "'");
}

std::shared_ptr<ALiBiImpl> make(int64_t num_heads, const NameOrTensor& given, double max_bias,
                                bool causal, std::optional<int64_t> total_heads, int64_t head_start,
                                bool learned) {
  return std::make_shared<ALiBiImpl>(ALiBiOptions(num_heads)
                                         .slopes(slopes(given))
                                         .max_bias(max_bias)
                                         .causal(causal)
                                         .total_heads(total_heads)
                                         .head_start(head_start)
                                         .learned(learned));
}

}  // namespace

void bind_alibi(py::module_& module) {
  using release = py::call_guard<py::gil_scoped_release>;
  bind<ALiBiImpl>(module, "ALiBi")
      .def(py::init(&make), py::arg("num_heads"), py::kw_only(), py::arg("slopes") = "press",
           py::arg("max_bias") = 8.0, py::arg("causal") = true, py::arg("total_heads") = py::none(),
           py::arg("head_start") = 0, py::arg("learned") = false)
      .def("forward", &ALiBiImpl::forward, py::arg("query_length"),
           py::arg("key_length") = py::none(), py::kw_only(), py::arg("query_offset") = py::none(),
           py::arg("dtype") = py::none(), release())
      .def("add_", &ALiBiImpl::add_, py::arg("scores"), py::kw_only(),
           py::arg("query_offset") = py::none(), release())
      .def("attention", &ALiBiImpl::attention, py::arg("query"), py::arg("key"), py::arg("value"),
           py::kw_only(), py::arg("query_offset") = py::none(), py::arg("scale") = py::none(),
           release());
}

}  // namespace posembed::python
