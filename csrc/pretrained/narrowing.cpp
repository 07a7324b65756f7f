#include "pretrained/narrowing.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/real.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace posembed::pretrained {
namespace {

/// The largest finite number of a floating dtype; a bound for numbers of another dtype.
double largest(torch::Dtype dtype) {
  switch (dtype) {
    case torch::kDouble:
      return std::numeric_limits<double>::max();
    case torch::kFloat:
    case torch::kComplexFloat:
      return std::numeric_limits<float>::max();
    case torch::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    case torch::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case torch::kFloat8_e4m3fn:
      return std::numeric_limits<c10::Float8_e4m3fn>::max();
    case torch::kFloat8_e4m3fnuz:
      return std::numeric_limits<c10::Float8_e4m3fnuz>::max();
    case torch::kFloat8_e5m2:
      return std::numeric_limits<c10::Float8_e5m2>::max();
    case torch::kFloat8_e5m2fnuz:
      return std::numeric_limits<c10::Float8_e5m2fnuz>::max();
    case torch::kFloat8_e8m0fnu:
      return std::ldexp(1.0, 127);
    default:
      return std::ldexp(1.0, 8 * static_cast<int>(c10::elementSize(dtype)));
  }
}

/// Real numbers of a dtype that torch can compare.
torch::Tensor comparable(const torch::Tensor& numbers) {
  if (numbers.is_complex()) return at::real(numbers);
  const torch::Dtype dtype = numbers.scalar_type();
  if (c10::isFloat8Type(dtype)) return numbers.to(torch::kFloat);
  return c10::isBarebonesUnsignedType(dtype) ? numbers.to(torch::kDouble) : numbers;
}

/// Whether no number is larger than `limit`. One pass, and false if there is a NaN.
bool are_within(const torch::Tensor& numbers, double limit) {
  const auto [low, high] = at::aminmax(numbers);
  return -limit <= low.item<double>() && high.item<double>() <= limit;
}

}  // namespace

std::optional<Lost> convert(const torch::Tensor& from, torch::Tensor to) {
  to.copy_(from);
  const torch::Dtype dtype = to.scalar_type();
  const bool may_overflow =
      c10::isFloatingType(dtype) && largest(from.scalar_type()) > largest(dtype);
  if (!may_overflow || from.numel() == 0) return std::nullopt;
  const torch::Tensor numbers = comparable(from);
  if (are_within(numbers, largest(dtype))) return std::nullopt;
  const torch::Tensor lost =
      at::isfinite(numbers).logical_and_(at::isfinite(comparable(to)).logical_not_()).flatten();
  if (!lost.any().item<bool>()) return std::nullopt;
  const auto index = lost.nonzero()[0].item<int64_t>();
  return Lost{index, numbers.flatten()[index].to(torch::kDouble).item<double>()};
}

}  // namespace posembed::pretrained
