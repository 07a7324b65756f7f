// The formulas of the scalings: frequencies and attention factors. The scalings' types cite the
// papers.
#include "rotary/scaling.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace posembed::rotary {
namespace {

Series series(const RotarySpec& spec, core::DoubleDouble base) {
  if (spec.sections.has_value() && spec.sections->restart && spec.rotary_dim > 0) {
    return restarted_frequencies(base, spec.sections->axis_of_pair);
  }
  return geometric_frequencies(base, spec.rotary_dim);
}

Series series(const RotarySpec& spec) { return series(spec, spec.base); }

Series divided(Series series, double factor) {
  for (core::DoubleDouble& frequency : series) frequency = frequency / factor;
  return series;
}

Scaled scaled(const RotarySpec& spec, const std::monostate&) { return {series(spec)}; }

Scaled scaled(const RotarySpec& spec, const LinearScaling& scaling) {
  return {divided(series(spec), scaling.factor)};
}

Scaled scaled(const RotarySpec& spec, const NtkScaling& scaling) {
  return {series(spec, ntk_base(spec.base, scaling.factor, spec.rotary_dim))};
}

Scaled scaled(const RotarySpec& spec, const DynamicNtkScaling&) { return {series(spec)}; }

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double attention_factor(const YarnScaling& scaling) {
  if (scaling.attention_factor.has_value()) return *scaling.attention_factor;
  const double mscale = scaling.mscale.value_or(0.0);
  const double all_dim = scaling.mscale_all_dim.value_or(0.0);
  if (mscale == 0.0 || all_dim == 0.0) return yarn_mscale(scaling.factor, 1.0);
  return yarn_mscale(scaling.factor, mscale) / yarn_mscale(scaling.factor, all_dim);
}

Scaled scaled(const RotarySpec& spec, const YarnScaling& scaling) {
  Scaled result{series(spec), attention_factor(scaling)};
  scale_yarn(result.frequencies, spec.base, scaling.factor, blend_of(scaling));
  return result;
}

Scaled scaled(const RotarySpec& spec, const Llama3Scaling& scaling) {
  Scaled result{series(spec)};
  scale_llama3(result.frequencies, scaling.factor, scaling.low_freq_factor,
               scaling.high_freq_factor, scaling.original_max_positions);
  return result;
}

Scaled scaled(const RotarySpec& spec, const ProportionalScaling& scaling) {
  Series result = divided(series(spec), scaling.factor);
  const double turning = scaling.proportion * static_cast<double>(spec.rotary_dim) / 2.0;
  std::fill(result.begin() + static_cast<int64_t>(turning), result.end(), core::DoubleDouble());
  return {result};
}

double attention_factor(const LongRopeScaling& scaling) {
  if (scaling.attention_factor.has_value()) return *scaling.attention_factor;
  const double factor = scaling.factor.value_or(1.0);
  if (factor <= 1.0) return 1.0;
  const double length = static_cast<double>(scaling.original_max_positions);
  return std::sqrt(1.0 + std::log(factor) / std::log(length));
}

Scaled scaled(const RotarySpec& spec, const LongRopeScaling& scaling) {
  Scaled result{series(spec), attention_factor(scaling)};
  for (size_t pair = 0; pair < result.frequencies.size(); ++pair) {
    result.frequencies[pair] = result.frequencies[pair] / scaling.short_factor[pair];
  }
  return result;
}

Scaled scaled(const RotarySpec& spec, const XPosScaling& scaling) {
  Scaled result{series(spec)};
  result.decay_center = scaling.center;
  const double pairs = static_cast<double>(spec.rotary_dim / 2);
  for (int64_t pair = 0; pair < spec.rotary_dim / 2; ++pair) {
    constexpr double gamma = 0.4;
    const double zeta = (static_cast<double>(pair) / pairs + gamma) / (1.0 + gamma);
    result.decay.push_back(std::log2(zeta) / scaling.scale_base);
  }
  return result;
}

}  // namespace

Scaled scaled(const RotarySpec& spec) {
  if (spec.custom_frequencies.has_value()) {
    return {Series(spec.custom_frequencies->begin(), spec.custom_frequencies->end()),
            spec.custom_attention_factor.value_or(1.0)};
  }
  return std::visit([&](const auto& scaling) { return scaled(spec, scaling); }, spec.scaling);
}

YarnBlend blend_of(const YarnScaling& scaling) {
  return {scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow, scaling.truncate};
}

}  // namespace posembed::rotary
