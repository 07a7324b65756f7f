#include "rotary/scaling.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace posembed {
namespace rotary {
namespace {

// ------------------------------------------------------------------------------------ frequencies

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

// ----------------------------------------------------------------------------------------- checks

void check_at_least(const char* scaling, const char* field, double value, double least) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= least, scaling, ".", field,
                    ": expected a finite number of at least ", least, ", got ", value);
}

void check_positive(const char* scaling, const char* field, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value > 0.0, scaling, ".", field,
                    ": expected a finite positive number, got ", value);
}

void check_positive(const char* scaling, const char* field, const std::optional<double>& value) {
  if (value.has_value()) check_positive(scaling, field, *value);
}

void check_length(const char* scaling, int64_t value) {
  TORCH_CHECK_VALUE(value > 1, scaling, ".original_max_positions: expected more than 1, got ",
                    value);
}

void check_dim(const char* scaling, const RotarySpec& spec) {
  TORCH_CHECK_VALUE(spec.rotary_dim > 2, scaling, ": expected rotary_dim over 2, got ",
                    spec.rotary_dim);
}

void check(const RotarySpec&, const std::monostate&) {}

void check(const RotarySpec&, const LinearScaling& scaling) {
  check_positive("LinearScaling", "factor", scaling.factor);
}

void check(const RotarySpec& spec, const NtkScaling& scaling) {
  check_positive("NtkScaling", "factor", scaling.factor);
  check_dim("NtkScaling", spec);
}

void check(const RotarySpec& spec, const DynamicNtkScaling& scaling) {
  check_at_least("DynamicNtkScaling", "factor", scaling.factor, 1.0);
  check_length("DynamicNtkScaling", scaling.original_max_positions);
  check_dim("DynamicNtkScaling", spec);
}

void check(const RotarySpec& spec, const YarnScaling& scaling) {
  check_positive("YarnScaling", "factor", scaling.factor);
  check_length("YarnScaling", scaling.original_max_positions);
  check_positive("YarnScaling", "beta_slow", scaling.beta_slow);
  check_at_least("YarnScaling", "beta_fast", scaling.beta_fast, scaling.beta_slow);
  check_positive("YarnScaling", "attention_factor", scaling.attention_factor);
  TORCH_CHECK_VALUE(spec.base > 1.0, "base: expected more than 1 for YarnScaling, got ", spec.base);
}

void check(const RotarySpec&, const Llama3Scaling& scaling) {
  check_positive("Llama3Scaling", "factor", scaling.factor);
  check_positive("Llama3Scaling", "low_freq_factor", scaling.low_freq_factor);
  check_length("Llama3Scaling", scaling.original_max_positions);
  TORCH_CHECK_VALUE(std::isfinite(scaling.high_freq_factor) &&
                        scaling.high_freq_factor >= scaling.low_freq_factor,
                    "Llama3Scaling.high_freq_factor: expected at least low_freq_factor, ",
                    scaling.low_freq_factor, ", got ", scaling.high_freq_factor);
}

void check(const RotarySpec&, const ProportionalScaling& scaling) {
  check_positive("ProportionalScaling", "factor", scaling.factor);
  TORCH_CHECK_VALUE(scaling.proportion >= 0.0 && scaling.proportion <= 1.0,
                    "ProportionalScaling.proportion: expected 0 to 1, got ", scaling.proportion);
}

void check_factors(const char* field, const std::vector<double>& factors, int64_t pairs) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(factors.size()) == pairs, "LongRopeScaling.", field,
                    ": expected rotary_dim / 2 = ", pairs, " numbers, got ", factors.size());
  for (const double factor : factors) check_positive("LongRopeScaling", field, factor);
}

void check(const RotarySpec& spec, const LongRopeScaling& scaling) {
  check_factors("short_factor", scaling.short_factor, spec.rotary_dim / 2);
  check_factors("long_factor", scaling.long_factor, spec.rotary_dim / 2);
  check_length("LongRopeScaling", scaling.original_max_positions);
  check_positive("LongRopeScaling", "factor", scaling.factor);
  check_positive("LongRopeScaling", "attention_factor", scaling.attention_factor);
  check_positive("LongRopeScaling", "long_attention_factor", scaling.long_attention_factor);
}

void check(const RotarySpec&, const XPosScaling& scaling) {
  TORCH_CHECK_VALUE(std::isfinite(scaling.scale_base) && scaling.scale_base != 0.0,
                    "XPosScaling.scale_base: expected a finite number other than 0, got ",
                    scaling.scale_base);
  TORCH_CHECK_VALUE(std::isfinite(scaling.center),
                    "XPosScaling.center: expected a finite number, got ", scaling.center);
}

}  // namespace

Scaled scaled(const RotarySpec& spec) {
  if (spec.custom_frequencies.has_value()) {
    return {Series(spec.custom_frequencies->begin(), spec.custom_frequencies->end())};
  }
  return std::visit([&](const auto& scaling) { return scaled(spec, scaling); }, spec.scaling);
}

YarnBlend blend_of(const YarnScaling& scaling) {
  return {scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow, scaling.truncate};
}

void check_scaling(const RotarySpec& spec) {
  std::visit([&](const auto& scaling) { check(spec, scaling); }, spec.scaling);
}

}  // namespace rotary

// -------------------------------------------------------------------------- lengths of sequences

bool RotarySpec::is_dynamic() const {
  if (const auto* scaling = std::get_if<LongRopeScaling>(&this->scaling)) {
    return scaling->short_factor != scaling->long_factor ||
           scaling->long_attention_factor.has_value();
  }
  return std::holds_alternative<DynamicNtkScaling>(scaling);
}

RotarySpec RotarySpec::resolve(int64_t seq_len) const {
  TORCH_CHECK_VALUE(seq_len >= 0, "seq_len: expected 0 or more, got ", seq_len);
  check();
  RotarySpec result = *this;
  if (const auto* dynamic = std::get_if<DynamicNtkScaling>(&scaling)) {
    result.scaling = std::monostate();
    if (seq_len > dynamic->original_max_positions) {
      const double stretch =
          static_cast<double>(seq_len) / static_cast<double>(dynamic->original_max_positions);
      // Not a new base, which a double could not hold exactly.
      result.scaling = NtkScaling{dynamic->factor * stretch - (dynamic->factor - 1.0)};
    }
  }
  if (auto* longrope = std::get_if<LongRopeScaling>(&result.scaling)) {
    if (seq_len > longrope->original_max_positions) {
      longrope->short_factor = longrope->long_factor;
      if (longrope->long_attention_factor.has_value()) {
        longrope->attention_factor = longrope->long_attention_factor;
      }
    } else {
      longrope->long_factor = longrope->short_factor;
    }
    longrope->long_attention_factor = std::nullopt;
  }
  return result;
}

RotarySpec RotarySpec::for_keys() const {
  RotarySpec result = *this;
  if (auto* xpos = std::get_if<XPosScaling>(&result.scaling)) xpos->scale_base = -xpos->scale_base;
  return result;
}

double RotarySpec::attention_factor(std::optional<int64_t> seq_len) const {
  if (seq_len.has_value()) return resolve(*seq_len).attention_factor();
  check();
  return rotary::scaled(*this).attention_factor;
}

Sections Sections::of(const std::vector<int64_t>& sizes, bool interleaved, bool restart) {
  const auto axes = static_cast<int64_t>(sizes.size());
  Sections result{{}, restart};
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t size = sizes[static_cast<size_t>(axis)];
    TORCH_CHECK_VALUE(size >= 0, "sections: expected sizes of 0 or more, got ", size);
    result.axis_of_pair.insert(result.axis_of_pair.end(), static_cast<size_t>(size), axis);
  }
  if (!interleaved) return result;
  const auto pairs = static_cast<int64_t>(result.axis_of_pair.size());
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t axis = pair % axes;
    const bool taken = pair / axes < sizes[static_cast<size_t>(axis)];
    result.axis_of_pair[static_cast<size_t>(pair)] = taken ? axis : 0;
  }
  return result;
}

}  // namespace posembed
