#include "posembed/sinusoidal.h"

#include "bindings.h"

namespace posembed::binding {
namespace {

using Module = SinusoidalPositionalEmbeddingImpl;
using Wholes = std::optional<std::vector<int64_t>>;

std::shared_ptr<Module> make_sinusoidal(
    int64_t embedding_dim, double base, const std::string& preset, std::optional<bool> cos_first,
    std::optional<double> shift, double scale, std::optional<int64_t> padding_idx,
    bool learned_scale, const Wholes& axes, const Wholes& widths, std::optional<double> start,
    std::optional<double> length, const std::optional<std::vector<double>>& interpolation_scale,
    std::optional<int64_t> max_size, const std::string& layout) {
  return std::make_shared<Module>(SinusoidalOptions(embedding_dim)
                                      .base(base)
                                      .preset(preset)
                                      .cos_first(cos_first)
                                      .shift(shift)
                                      .scale(scale)
                                      .padding_idx(padding_idx)
                                      .learned_scale(learned_scale)
                                      .axes(axes)
                                      .widths(widths)
                                      .start(start)
                                      .length(length)
                                      .interpolation_scale(interpolation_scale)
                                      .max_size(max_size)
                                      .layout(additive_layout(layout)));
}

torch::Tensor sinusoidal_forward(Module& self, const torch::Tensor& x,
                                 const std::optional<torch::Tensor>& positions,
                                 const Offset& offset, const Wholes& grid,
                                 const std::optional<torch::Tensor>& mask,
                                 const std::optional<torch::Tensor>& cu_seqlens) {
  PositionCall call =
      PositionCall().positions(positions).offset(offset).mask(mask).cu_seqlens(cu_seqlens);
  if (grid.has_value()) call.grid(*grid);
  return self.forward(x, call);
}

torch::Tensor sinusoidal_grid(Module& self, const std::vector<int64_t>& grid,
                              const std::optional<torch::Tensor>& mask,
                              std::optional<torch::Dtype> dtype,
                              std::optional<torch::Device> device) {
  return self.encode_grid(grid, mask, dtype.value_or(torch::kFloat), device.value_or(torch::kCPU));
}

}  // namespace

const Binding binding_of_sinusoidal([](py::module_& module) {
  bind<Module>(module, "SinusoidalPositionalEmbedding")
      .def(py::init(&make_sinusoidal), py::arg("embedding_dim"), py::kw_only(),
           py::arg("base") = 10000.0, py::arg("preset") = "vaswani",
           py::arg("cos_first") = py::none(), py::arg("shift") = py::none(), py::arg("scale") = 1.0,
           py::arg("padding_idx") = py::none(), py::arg("learned_scale") = false,
           py::arg("axes") = py::none(), py::arg("widths") = py::none(),
           py::arg("start") = py::none(), py::arg("length") = py::none(),
           py::arg("interpolation_scale") = py::none(), py::arg("max_size") = py::none(),
           py::arg("layout") = "bsd")
      .def("forward", &sinusoidal_forward, py::arg("x"), py::arg("positions") = py::none(),
           py::kw_only(), py::arg("offset") = 0, py::arg("grid") = py::none(),
           py::arg("mask") = py::none(), py::arg("cu_seqlens") = py::none(), without_gil())
      .def("encode_grid", &sinusoidal_grid, py::arg("grid"), py::arg("mask") = py::none(),
           py::kw_only(), py::arg("dtype") = py::none(), py::arg("device") = py::none(),
           without_gil())
      .def("encode", &Module::encode, py::arg("positions"), py::kw_only(),
           py::arg("dtype") = py::none(), without_gil())
      .def("shift_matrix", &Module::shift_matrix, py::arg("distance"), without_gil());
});

}  // namespace posembed::binding
