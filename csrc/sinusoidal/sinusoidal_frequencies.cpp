#include "sinusoidal/sinusoidal.h"

namespace posembed::sinusoidal {

Layout layout_of(Preset preset, int64_t embedding_dim, bool cos_first) {
  const bool even_only = preset == Preset::tensor2tensor;
  Layout layout;
  layout.columns = embedding_dim;
  layout.filled = even_only ? embedding_dim / 2 * 2 : embedding_dim;
  layout.half = (layout.filled + 1) / 2;
  layout.interleaved = preset == Preset::vaswani;
  layout.cos_first = cos_first;
  return layout;
}

int64_t pairs_of(const Layout& layout) { return layout.half; }

double divisor_of(Preset preset, int64_t embedding_dim, double shift) {
  const int64_t whole = embedding_dim / 2;
  const double half = preset == Preset::tensor2tensor ? static_cast<double>(whole)
                                                      : static_cast<double>(embedding_dim) / 2;
  return half - shift;
}

std::vector<core::DoubleDouble> frequencies(double base, double divisor, int64_t pairs) {
  std::vector<core::DoubleDouble> result;
  result.reserve(static_cast<size_t>(pairs));
  if (pairs > 0) result.emplace_back(1.0);
  const core::DoubleDouble rate = -core::log(base) / core::DoubleDouble(divisor);
  for (int64_t i = 1; i < pairs; ++i) {
    result.push_back(core::exp(core::DoubleDouble(static_cast<double>(i)) * rate));
  }
  return result;
}

}  // namespace posembed::sinusoidal
