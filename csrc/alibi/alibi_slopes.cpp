#include <cmath>

#include "alibi/alibi.h"

namespace posembed::alibi {
namespace {

/// Slope number `index` of the series of a model with `heads` heads.
double series(double max_bias, int64_t heads, int64_t index) {
  const double share = static_cast<double>(index + 1) / static_cast<double>(heads);
  return std::exp2(-max_bias * share);
}

int64_t power_of_two_up_to(int64_t heads) {
  int64_t power = 1;
  while (power <= heads / 2) power *= 2;
  return power;
}

}  // namespace

float slope(SlopeKind kind, double max_bias, int64_t heads, int64_t head) {
  const int64_t whole = kind == SlopeKind::paper ? power_of_two_up_to(heads) : heads;
  const double exact = head < whole ? series(max_bias, whole, head)
                                    : series(max_bias, 2 * whole, 2 * (head - whole));
  return static_cast<float>(exact);
}

}  // namespace posembed::alibi
