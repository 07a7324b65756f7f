#include "rotary/frequencies.h"

namespace posembed::rotary {

std::vector<core::DoubleDouble> geometric_frequencies(double base, int64_t rotary_dim) {
  const core::DoubleDouble log_base = core::log(base);
  std::vector<core::DoubleDouble> frequencies;
  frequencies.reserve(static_cast<size_t>(rotary_dim / 2));
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    const core::DoubleDouble exponent =
        core::DoubleDouble(static_cast<double>(-i)) / static_cast<double>(rotary_dim);
    frequencies.push_back(core::exp(exponent * log_base));
  }
  return frequencies;
}

}  // namespace posembed::rotary
