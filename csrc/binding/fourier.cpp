#include "posembed/fourier.h"

#include "bindings.h"

namespace posembed::binding {
namespace {

using MaybeText = std::optional<std::string>;

std::shared_ptr<FourierFeaturesImpl> make_fourier(
    const std::optional<torch::Tensor>& frequencies, const MaybeText& preset,
    std::optional<int64_t> octaves, std::optional<FourierOptions::Bands> bands,
    std::optional<std::tuple<int64_t, int64_t, double, std::optional<int64_t>>> random,
    const std::optional<torch::Tensor>& phases, std::optional<bool> learned,
    std::optional<bool> linear, const MaybeText& include_input, const MaybeText& unit,
    const MaybeText& waves, const MaybeText& order, std::optional<bool> centred) {
  FourierOptions options = preset.has_value() ? FourierOptions::preset(*preset) : FourierOptions();
  if (frequencies || octaves || bands || random) {
    options.frequencies(frequencies).octaves(octaves).bands(bands).random(std::nullopt);
  }
  if (random) {
    std::apply([&](auto... all) { options.random(FourierOptions::Random{all...}); }, *random);
  }
  if (phases) options.phases(phases);
  if (learned) options.learned(*learned);
  if (linear) options.linear(*linear);
  if (include_input) options.include_input(*include_input);
  if (unit) options.unit(*unit);
  if (waves) options.waves(*waves);
  if (order) options.order(*order);
  if (centred) options.centred(*centred);
  return std::make_shared<FourierFeaturesImpl>(options);
}

}  // namespace

const Binding binding_of_fourier([](py::module_& module) {
  const py::none none;
  bind<FourierFeaturesImpl>(module, "FourierFeatures")
      .def(py::init(&make_fourier), py::arg("frequencies") = none, py::kw_only(),
           py::arg("preset") = none, py::arg("octaves") = none, py::arg("bands") = none,
           py::arg("random") = none, py::arg("phases") = none, py::arg("learned") = none,
           py::arg("linear") = none, py::arg("include_input") = none, py::arg("unit") = none,
           py::arg("waves") = none, py::arg("order") = none, py::arg("centred") = none)
      .def("forward", &FourierFeaturesImpl::forward, py::arg("coordinates"), py::arg("x") = none,
           py::kw_only(), py::arg("dtype") = none, without_gil());
});

}  // namespace posembed::binding
