// The Fourier operators, as C++ code calls them and as their kernels are registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "dispatcher/operator.h"

namespace posembed::fourier {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeType = std::optional<at::ScalarType>;

/// Arguments of fourier_features, in the order of its schema. Refers to the texts.
struct Encoding {
  Tensor coordinates;                  // int32, int64, float32 or float64 [..., axes]
  Tensor frequencies;                  // floating [axes, n]; with "a" in order [parts, n]
  MaybeTensor phases = std::nullopt;   // floating [n], in radians
  MaybeTensor x = std::nullopt;        // [..., columns]: added to the result
  std::string_view unit = "radian";    // of frequencies
  std::string_view waves = "sin_cos";  // of each frequency
  std::string_view order = "wf";       // of columns, the slowest first: wave, frequency, axis
  int64_t derivative = 0;              // by the angle

  POSEMBED_FIELDS(self.coordinates, self.frequencies, self.phases, self.x, self.unit, self.waves,
                  self.order, self.derivative)

  bool apart() const { return order.size() == 3; }  // each axis is multiplied by all frequencies
  int64_t num_waves() const { return waves.size() > 3 ? 2 : 1; }
  double turns_of_unit() const { return unit == "turn" ? 1.0 : unit == "half_turn" ? 0.5 : 0.0; }
  double radians_of_unit() const {
    return unit == "radian" ? 1.0 : 6.283185307179586 * turns_of_unit();
  }
};

/// The last argument is the dtype of the result.
inline const dispatcher::Operator<Tensor(), Encoding, MaybeType> fourier_features{
    "fourier_features"};

/// float64 [2, count], whose sums over rows are linear from the first number to the second.
inline const dispatcher::Operator<Tensor(double, double, int64_t, std::optional<at::Device>)>
    fourier_bands{"fourier_bands"};

}  // namespace posembed::fourier
