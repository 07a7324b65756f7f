// Checks of a scaling's numbers.
#include <c10/util/Exception.h>

#include <cmath>

#include "rotary/scaling.h"

namespace posembed::rotary {
namespace {

void check_at_least(const char* scaling, const char* field, double value, double min) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= min, scaling, ".", field,
                    ": expected a finite number of at least ", min, ", got ", value);
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

/// A factor above a length that no model is trained for is a length: the arguments are swapped.
void check_length(const char* scaling, int64_t value, double factor) {
  check_length(scaling, value);
  TORCH_CHECK_VALUE(value >= 256 || factor <= static_cast<double>(value), scaling,
                    ".factor: expected at most original_max_positions, ", value, ", got ", factor,
                    "; the factor comes first");
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
  check_length("DynamicNtkScaling", scaling.original_max_positions, scaling.factor);
  check_dim("DynamicNtkScaling", spec);
}

void check(const RotarySpec& spec, const YarnScaling& scaling) {
  check_positive("YarnScaling", "factor", scaling.factor);
  check_length("YarnScaling", scaling.original_max_positions, scaling.factor);
  check_positive("YarnScaling", "beta_slow", scaling.beta_slow);
  check_at_least("YarnScaling", "beta_fast", scaling.beta_fast, scaling.beta_slow);
  check_positive("YarnScaling", "attention_factor", scaling.attention_factor);
  TORCH_CHECK_VALUE(spec.base > 1.0, "base: expected more than 1 for YarnScaling, got ", spec.base);
}

void check(const RotarySpec&, const Llama3Scaling& scaling) {
  check_positive("Llama3Scaling", "factor", scaling.factor);
  check_positive("Llama3Scaling", "low_freq_factor", scaling.low_freq_factor);
  check_length("Llama3Scaling", scaling.original_max_positions, scaling.factor);
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
  check_length("LongRopeScaling", scaling.original_max_positions, scaling.factor.value_or(1.0));
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

void check_scaling(const RotarySpec& spec) {
  std::visit([&](const auto& scaling) { check(spec, scaling); }, spec.scaling);
}

}  // namespace posembed::rotary
