// Shared by typed tests of kernels: a type's name in kernels, and random numbers of that type.
#pragma once

#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "core/scalar.h"

namespace posembed {

template <typename T>
constexpr core::Scalar scalar_of() {
  if constexpr (std::is_same_v<T, double>) return core::Scalar::float64;
  if constexpr (std::is_same_v<T, core::BFloat16>) return core::Scalar::bfloat16;
  if constexpr (std::is_same_v<T, core::Float16>) return core::Scalar::float16;
  return core::Scalar::float32;
}

template <typename T>
std::vector<T> random_values(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) core::store(static_cast<core::Compute<T>>(normal(generator)), &value);
  return values;
}

template <typename T>
double at(const std::vector<T>& values, int64_t index) {
  return static_cast<double>(core::load(values[static_cast<size_t>(index)]));
}

}  // namespace posembed
