// FourierFeatures and the functional interface: thin wrappers around the operators.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <cmath>
#include <ostream>
#include <vector>

#include "core/brief.h"
#include "fourier/fourier_operator.h"
#include "posembed/fourier.h"

namespace posembed {
namespace {

bool apart(const FourierOptions& options) {
  return !options.random().has_value() &&
         (!options.frequencies().has_value() || options.frequencies()->dim() == 1);
}

/// Whether frequencies follow from the options.
bool series(const FourierOptions& options) {
  return options.octaves().has_value() || options.bands().has_value();
}

std::string unit_of(const FourierOptions& options) {
  if (!options.unit().empty()) return options.unit();
  if (options.random().has_value()) return "turn";
  return series(options) ? "half_turn" : "radian";
}

std::string order_of(const FourierOptions& options, bool apart) {
  return !options.order().empty() ? options.order() : apart ? "waf" : "wf";
}

torch::Tensor drawn(const FourierOptions::Random& random) {
  TORCH_CHECK_VALUE(
      random.axes >= 1 && random.n >= 1 && std::isfinite(random.scale),
      "random: expected positive numbers of axes and frequencies and a finite scale, ", "got ",
      random.axes, ", ", random.n, ", ", random.scale);
  std::optional<at::Generator> generator;
  if (random.seed.has_value()) {
    generator = at::detail::createCPUGenerator(static_cast<uint64_t>(*random.seed));
  }
  return torch::randn({random.axes, random.n}, generator, torch::kDouble).mul(random.scale);
}

/// float64 [parts or axes, n], whose sums over parts are exact.
torch::Tensor frequencies_of(const FourierOptions& options) {
  if (const auto& given = options.frequencies()) {
    TORCH_CHECK_VALUE(given->dim() == 1 || given->dim() == 2,
                      "frequencies: expected [n] or [axes, n], got ", given->sizes());
    const torch::Tensor copy = given->detach().to(torch::kDouble, false, /*copy=*/true);
    return copy.dim() == 1 ? copy.unsqueeze(0) : copy;
  }
  if (options.random().has_value()) return drawn(*options.random());
  if (const auto& bands = options.bands()) {
    return fourier::fourier_bands(1.0, bands->second / 2, bands->first, std::nullopt);
  }
  constexpr int64_t most = 50;  // kernels accept no higher frequencies
  const int64_t count = *options.octaves();
  TORCH_CHECK_VALUE(count >= 1 && count <= most, "octaves: expected 1 to ", most, ", got ", count);
  std::vector<double> powers;
  for (int i = 0; i < count; ++i) powers.push_back(std::ldexp(1.0, i));
  return torch::tensor(powers, torch::kDouble).unsqueeze(0);
}

}  // namespace

FourierOptions::FourierOptions(torch::Tensor frequencies) : frequencies_(std::move(frequencies)) {}

FourierOptions FourierOptions::preset(const std::string& name) {
  FourierOptions options;
  if (name == "nerf") {
    return options.octaves(10).unit("radian").include_input("first").order("fwa");
  }
  if (name == "perceiver") return options.bands(Bands(64, 224.0)).include_input("first");
  if (name == "sam") return options.random(Random{2, 128}).centred(true);
  if (name == "gaussian") return options.random(Random{1, 256, 16.0});
  TORCH_CHECK_VALUE(name == "time2vec", "preset: expected 'nerf', 'perceiver', 'sam', 'gaussian' ",
                    "or 'time2vec', got '", core::brief(name), "'");
  options.random(Random{1, 63}).unit("radian").waves("sin");
  return options.learned(true).linear(true);
}

torch::Tensor functional::fourier_features(const torch::Tensor& coordinates,
                                           const torch::Tensor& frequencies,
                                           const FourierOptions& options,
                                           const std::optional<torch::Tensor>& phases,
                                           const std::optional<torch::Tensor>& x,
                                           std::optional<torch::Dtype> dtype) {
  const bool one = frequencies.dim() == 1;
  const std::string unit = unit_of(options), order = order_of(options, one);
  return fourier::fourier_features({coordinates, one ? frequencies.unsqueeze(0) : frequencies,
                                    phases, x, unit, options.waves(), order},
                                   dtype);
}

FourierFeaturesImpl::FourierFeaturesImpl(const FourierOptions& options) : options(options) {
  FourierFeaturesImpl::reset();
}

void FourierFeaturesImpl::reset() {
  const int64_t given = options.frequencies().has_value() + options.octaves().has_value() +
                        options.bands().has_value() + options.random().has_value();
  TORCH_CHECK_VALUE(given == 1,
                    "frequencies: expected one of frequencies, octaves, bands and random, got ",
                    given);
  const std::string& input = options.include_input();
  TORCH_CHECK_VALUE(input.empty() || input == "first" || input == "last",
                    "include_input: expected 'first' or 'last', got '", core::brief(input), "'");
  TORCH_CHECK_VALUE(
      (order_of(options, apart(options)).find('a') != std::string::npos) == apart(options),
      "order: expected the letters ", apart(options) ? "a, f and w" : "f and w", ", got '",
      core::brief(options.order()), "'");
  TORCH_CHECK_VALUE(!options.linear() || !apart(options),
                    "linear: expected frequencies [axes, n] or random");
  torch::Tensor values = frequencies_of(options), start = options.phases().value_or(values);
  const bool has_phases = options.phases().has_value() || options.learned();
  if (!options.phases().has_value()) start = torch::zeros({values.size(1)}, torch::kDouble);
  if (options.learned() && apart(options)) values = values.sum(0, /*keepdim=*/true);
  const auto hold = [&](const char* name, const torch::Tensor& numbers) {
    const torch::Tensor copy = numbers.detach().to(torch::kDouble, false, /*copy=*/true);
    return options.learned() ? register_parameter(name, copy.to(torch::kFloat))
                             : register_buffer(name, copy);
  };
  const bool derived = series(options) && !options.learned();
  frequencies = derived ? values : hold("frequencies", values);
  if (has_phases) phases = hold("phases", start);
  if (options.linear()) {
    linear_weight = register_parameter("linear_weight", torch::zeros({values.size(0), 1}));
    linear_bias = register_parameter("linear_bias", torch::zeros({1}));
  }
}

void FourierFeaturesImpl::pretty_print(std::ostream& stream) const {
  stream << "FourierFeatures(";
  if (const auto& given = options.frequencies()) stream << "frequencies=" << given->sizes();
  if (const auto& octaves = options.octaves()) stream << "octaves=" << *octaves;
  if (const auto& bands = options.bands()) {
    stream << "bands=(" << bands->first << ", " << bands->second << ")";
  }
  if (const auto& random = options.random()) {
    stream << "random=(" << random->axes << ", " << random->n << ", " << random->scale << ")";
  }
  stream << ", unit='" << unit_of(options) << "', waves='" << options.waves() << "', order='"
         << order_of(options, apart(options)) << "'" << (options.learned() ? ", learned=True" : "")
         << (options.linear() ? ", linear=True" : "")
         << (options.centred() ? ", centred=True" : "");
  const std::string& input = options.include_input();
  stream << (input.empty() ? "" : ", include_input='" + input + "'") << ")";
}

void FourierFeaturesImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void FourierFeaturesImpl::to(torch::Dtype dtype, bool non_blocking) {
  const torch::Tensor kept = frequencies.data(), start = phases.defined() ? phases.data() : kept;
  torch::nn::Module::to(dtype, non_blocking);
  if (options.learned()) return;
  frequencies.set_data(kept);
  if (phases.defined()) phases.set_data(start);
}

torch::Tensor FourierFeaturesImpl::forward(const torch::Tensor& coordinates,
                                           const std::optional<torch::Tensor>& x,
                                           std::optional<torch::Dtype> dtype) {
  const torch::Dtype usual =
      coordinates.is_floating_point() ? coordinates.scalar_type() : torch::kFloat;
  const torch::Dtype type = x.has_value() ? x->scalar_type() : dtype.value_or(usual);
  torch::Tensor places = coordinates;  // of 16 bits: the operator refuses them
  if (options.centred() && places.element_size() > 2) places = places.to(torch::kDouble) * 2 - 1;
  if (series(options) && !options.learned()) frequencies = frequencies.to(coordinates.device());
  const std::string unit = unit_of(options), order = order_of(options, apart(options));
  const std::string& input = options.include_input();
  const bool alone = !options.linear() && input.empty();
  const fourier::MaybeTensor start = phases.defined() ? fourier::MaybeTensor(phases) : std::nullopt;
  const torch::Tensor waves = fourier::fourier_features(
      {places, frequencies, start, alone ? x : std::nullopt, unit, options.waves(), order},
      alone && x.has_value() ? dtype : type);
  if (alone) return waves;
  std::vector<torch::Tensor> columns;
  if (options.linear()) {
    const torch::Tensor wide = places.to(torch::kDouble);
    columns.push_back(wide.matmul(linear_weight.to(torch::kDouble)).add(linear_bias).to(type));
  }
  if (input == "first") columns.push_back(places.to(type));
  columns.push_back(waves);
  if (input == "last") columns.push_back(places.to(type));
  const torch::Tensor all = torch::cat(columns, -1);
  return x.has_value() ? x->add(all) : all;
}

}  // namespace posembed
