#include "bindings.h"
#include "relative_bias/operator.h"

namespace posembed::binding {
namespace {

std::shared_ptr<RelativePositionBiasImpl> make_relative_bias(int64_t num_heads, int64_t num_buckets,
                                                             int64_t max_distance,
                                                             bool bidirectional,
                                                             const std::string& buckets) {
  return std::make_shared<RelativePositionBiasImpl>(
      RelativeBiasOptions(num_heads)
          .num_buckets(num_buckets)
          .max_distance(max_distance)
          .bidirectional(bidirectional)
          .buckets(dispatcher::enum_from<RelativeBuckets>(buckets)));
}

const Binding binding_of_relative_bias([](py::module_& module) {
  bind<RelativePositionBiasImpl>(module, "RelativePositionBias")
      .def(py::init(&make_relative_bias), py::arg("num_heads"), py::kw_only(),
           py::arg("num_buckets") = 32, py::arg("max_distance") = 128,
           py::arg("bidirectional") = true, py::arg("buckets") = "t5")
      .def("forward", &RelativePositionBiasImpl::forward, py::arg("query_length"),
           py::arg("key_length") = py::none(), py::kw_only(), py::arg("query_offset") = py::none(),
           without_gil());
});

}  // namespace
}  // namespace posembed::binding
