// Test problems for every form of the input kernels: the CPU kernels and the CUDA source.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "input/input.h"
#include "values.h"

namespace posembed::input {

using core::Scalar;
using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;

/// The relative tolerance for one rounding to T and a few dozen in its compute type.
template <typename T>
constexpr double tolerance() {
  if constexpr (std::is_same_v<T, double>) return 1e-13;
  if constexpr (std::is_same_v<T, core::BFloat16>) return 5e-3;
  if constexpr (std::is_same_v<T, core::Float16>) return 7e-4;
  return 3e-6;
}

/// A batch with every table, and the expected results in double.
template <typename T>
struct Case {
  using C = core::Compute<T>;

  Case(int64_t dim, Norm norm, double probability) : dim(dim), norm(norm), probability(probability) {
    token = random_values<T>(11 * dim, 1);
    type = random_values<T>(2 * dim, 2);
    position = random_values<T>(9 * dim, 3);
    weight = random_values<T>(dim, 4);
    bias = random_values<T>(dim, 5);
    gradient = random_values<T>(tokens * dim, 6);
    for (int64_t i = 0; i < tokens; ++i) {
      ids.push_back(static_cast<int32_t>(i * 7 % 11));
      types.push_back(i % 2);
    }
  }

  Arguments arguments() const {
    Arguments a;
    a.scalar = scalar_of<T>();
    a.batch = batch;
    a.seq = seq;
    a.embedding_dim = dim;
    a.token.data = token.data();
    a.token.rows = 11;
    a.token.stride = dim;
    a.token.index = {ids.data(), core::Index::int32};
    a.token.index_stride[0] = seq;
    a.token.index_stride[1] = 1;
    a.type = a.token;
    a.type.data = type.data();
    a.type.rows = 2;
    a.type.index = {types.data(), core::Index::int64};
    a.position.data = position.data();
    a.position.rows = 9;
    a.position.stride = dim;
    a.position.offset = 1;
    a.position.first_row = 2;
    a.scale = scale;
    a.norm = norm;
    a.eps = 1e-5;
    if (norm != Norm::none) a.norm_weight = weight.data();
    if (norm == Norm::layer) a.norm_bias = bias.data();
    a.dropout = probability;
    a.seed = probability > 0 ? &seed : nullptr;
    a.first_element = first_token * dim;
    return a;
  }

  double factor(int64_t row, int64_t i) const {
    if (probability == 0) return 1;
    return core::dropout_factor<double>(core::make_dropout(probability, static_cast<uint64_t>(seed)),
                                        static_cast<uint64_t>((first_token + row) * dim + i));
  }

  /// The normalised row and its rstd; without a norm, the sum and 1.
  std::pair<std::vector<double>, double> normalised(int64_t row) const {
    std::vector<double> x(static_cast<size_t>(dim));
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < dim; ++i) {
      double& value = x[static_cast<size_t>(i)];
      value = at(token, ids[static_cast<size_t>(row)] * dim + i) * scale +
              at(type, types[static_cast<size_t>(row)] * dim + i) + at(position, (row % seq + 3) * dim + i);
      mean += value / static_cast<double>(dim);
    }
    if (norm == Norm::none) return {x, 1};
    if (norm == Norm::rms) mean = 0;
    for (double& value : x) {
      value -= mean;
      squares += value * value / static_cast<double>(dim);
    }
    const double rstd = 1 / std::sqrt(squares + 1e-5);
    for (double& value : x) value *= rstd;
    return {x, rstd};
  }

  double weight_at(int64_t i) const { return norm == Norm::none ? 1 : at(weight, i); }

  int64_t batch = 2, seq = 5, tokens = 10, dim;
  Norm norm;
  double probability, scale = 1.5;
  int64_t seed = -1234567890123, first_token = 6;
  std::vector<T> token, type, position, weight, bias, gradient;
  std::vector<int32_t> ids;
  std::vector<int64_t> types;
};

template <typename T>
std::vector<Case<T>> cases() {
  std::vector<Case<T>> all;
  for (const int64_t dim : {1, 15, 64, 83}) {
    for (const Norm norm : {Norm::none, Norm::layer, Norm::rms}) {
      if (dim == 1 && norm == Norm::layer) continue;  // one value has no variance
      for (const double probability : {0.0, 0.4}) all.emplace_back(dim, norm, probability);
    }
  }
  return all;
}

}  // namespace posembed::input
