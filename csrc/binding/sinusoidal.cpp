#include "posembed/sinusoidal.h"

#include "bindings.h"

namespace posembed::binding {
namespace {

using Module = SinusoidalPositionalEmbeddingImpl;

std::shared_ptr<Module> make_sinusoidal(int64_t embedding_dim, double base,
                                        const std::string& preset, std::optional<bool> cos_first,
                                        std::optional<double> shift, double scale,
                                        std::optional<int64_t> padding_idx, bool learned_scale) {
  return std::make_shared<Module>(SinusoidalOptions(embedding_dim)
                                      .base(base)
                                      .preset(preset)
                                      .cos_first(cos_first)
                                      .shift(shift)
                                      .scale(scale)
                                      .padding_idx(padding_idx)
                                      .learned_scale(learned_scale));
}

torch::Tensor sinusoidal_forward(Module& self, const torch::Tensor& x,
                                 const std::optional<torch::Tensor>& positions,
                                 const Offset& offset) {
  return self.forward(x, PositionCall().positions(positions).offset(offset));
}

}  // namespace

const Binding binding_of_sinusoidal([](py::module_& module) {
  bind<Module>(module, "SinusoidalPositionalEmbedding")
      .def(py::init(&make_sinusoidal), py::arg("embedding_dim"), py::kw_only(),
           py::arg("base") = 10000.0, py::arg("preset") = "vaswani",
           py::arg("cos_first") = py::none(), py::arg("shift") = py::none(), py::arg("scale") = 1.0,
           py::arg("padding_idx") = py::none(), py::arg("learned_scale") = false)
      .def("forward", &sinusoidal_forward, py::arg("x"), py::arg("positions") = py::none(),
           py::kw_only(), py::arg("offset") = 0, without_gil())
      .def("encode", &Module::encode, py::arg("positions"), py::kw_only(),
           py::arg("dtype") = py::none(), without_gil())
      .def("shift_matrix", &Module::shift_matrix, py::arg("distance"), without_gil());
});

}  // namespace posembed::binding
