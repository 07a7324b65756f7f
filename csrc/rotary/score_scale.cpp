#include "posembed/score_scale.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cmath>
#include <sstream>

#include "dispatcher/tensors.h"

namespace posembed {

torch::Tensor ScoreScale::at(const torch::Tensor& positions) const {
  TORCH_CHECK_TYPE(at::isIntegralType(positions.scalar_type(), /*includeBool=*/false),
                   "positions: expected integers, got ",
                   dispatcher::dtype_name(positions.scalar_type()));
  const torch::Tensor position = positions.to(torch::kDouble).clamp_min(0.0);  // -1 is padding
  if (logn) return ((position + 1.0).log() / std::log(length)).clamp_min(1.0) * factor;
  return (((position + offset) / length).floor().log1p() * growth + 1.0) * factor;
}

std::string ScoreScale::describe() const {
  std::ostringstream line;
  if (is_constant() || factor != 1.0) line << factor;
  if (!is_constant() && factor != 1.0) line << " times ";
  if (logn) {
    line << "max(1, log(position + 1) / log(" << length << "))";
  } else if (growth != 0.0) {
    const std::string shift = offset == 0 ? "" : " + " + std::to_string(offset);
    const std::string place = shift.empty() ? "position" : "(position" + shift + ")";
    line << "1 + " << growth << " log(1 + floor(" << place << " / " << length << "))";
  }
  if (!source.empty()) line << " (" << source << ")";
  return line.str();
}

void ScoreScale::check() const {
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0.0,
                    "score_scale: expected a positive factor, got ", factor);
  TORCH_CHECK_VALUE(std::isfinite(growth), "score_scale: expected a finite growth, got ", growth);
  TORCH_CHECK_VALUE(std::isfinite(length) && (logn ? length > 1.0 : length > 0.0),
                    "score_scale: expected a positive length, with logn above 1, got ", length);
  TORCH_CHECK_VALUE(offset >= 0, "score_scale: expected an offset of 0 or more, got ", offset);
  TORCH_CHECK_VALUE(!logn || growth == 0.0, "score_scale: expected no growth beside logn, got ",
                    growth);
}

namespace rotary {
namespace {

torch::Tensor score_scale(const torch::Tensor& positions, double factor, double growth,
                          double length, int64_t offset, bool logn) {
  return ScoreScale{factor, growth, length, offset, logn, ""}.at(positions);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) { m.impl("score_scale", score_scale); }

}  // namespace rotary
}  // namespace posembed
