/// Optimizers of tables, one step on the rows that have a gradient. Row-wise Adagrad: Gupta et al.,
/// "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism",
/// arXiv:2010.08899. Adam: Kingma and Ba, arXiv:1412.6980, lazily as torch's SparseAdam.
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "posembed/export.h"

namespace posembed {

/// The rule of a step. `g` is a row's gradient.
enum class StepRule {
  sgd,              ///< first = first_decay * first + g; weight -= lr * first (or lr * g)
  rowwise_adagrad,  ///< second += mean(g^2); weight -= lr * g / (sqrt(second) + eps)
  rowwise_adam,     ///< Adam with one second moment for each row, of mean(g^2)
  adam,             ///< torch's SparseAdam
};

/// "sgd", "rowwise_adagrad", "rowwise_adam" or "adam".
POSEMBED_API const char* name(StepRule rule);

/// How a bfloat16 weight is rounded.
enum class StepRounding {
  nearest,     ///< to nearest even: steps below half of the last place are lost
  stochastic,  ///< up or down, so that the mean is right
  remainder,   ///< to nearest; `remainder` keeps the rest of a float32 number
};

/// "nearest", "stochastic" or "remainder".
POSEMBED_API const char* name(StepRounding rounding);

/// Options and state of functional::step_rows_(). State is float32 (float64 for float64).
struct POSEMBED_API RowStep {
  RowStep() = default;
  RowStep(StepRule rule, double lr) : rule_(rule), lr_(lr) {}

  TORCH_ARG(StepRule, rule) = StepRule::sgd;
  /// Learning rate.
  TORCH_ARG(double, lr) = 0.01;
  /// Counts from 1: corrects the bias of moments, and is part of stochastic rounding.
  TORCH_ARG(int64_t, step) = 1;
  /// int32/int64 [count], ascending, each once: the row of each gradient; none: all rows.
  TORCH_ARG(std::optional<torch::Tensor>, ids) = std::nullopt;
  /// [rows, dim]: the first moment of Adam, or the momentum of SGD.
  TORCH_ARG(std::optional<torch::Tensor>, first) = std::nullopt;
  /// [rows] of row-wise rules, [rows, dim] of Adam.
  TORCH_ARG(std::optional<torch::Tensor>, second) = std::nullopt;
  /// [count, 3]: what skipped steps owe, paid first: weight = owed[0] * weight - owed[1] * first,
  /// first = owed[2] * first.
  TORCH_ARG(std::optional<torch::Tensor>, owed) = std::nullopt;
  /// int16 [rows, dim], for StepRounding::remainder; zeros at the start.
  TORCH_ARG(std::optional<torch::Tensor>, remainder) = std::nullopt;
  /// SGD's momentum, Adam's first beta.
  TORCH_ARG(double, first_decay) = 0.0;
  /// Adam's second beta.
  TORCH_ARG(double, second_decay) = 0.0;
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled: weight *= 1 - lr * weight_decay.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Multiplies the gradient; -1 maximises.
  TORCH_ARG(double, gradient_scale) = 1.0;
  TORCH_ARG(StepRounding, rounding) = StepRounding::nearest;
  /// Of stochastic rounding.
  TORCH_ARG(int64_t, seed) = 0;
  /// The row of a vocabulary that the table begins with, so that shards round as the whole.
  TORCH_ARG(int64_t, first_row) = 0;
};

namespace functional {

/// One step of an optimizer, in place, on the rows of a table that have a gradient.
///
///     auto state = torch::zeros({1000});
///     posembed::RowStep step(posembed::StepRule::rowwise_adagrad, /*lr=*/0.1);
///     posembed::functional::step_rows_(weight, gradient, step.ids(ids).second(state));
///
/// @param weight  float32, float64 or bfloat16 [rows, dim], or a leaf that requires gradients
/// @param gradient  [count, dim] in the weight's dtype, or in float32 for bfloat16
/// @return weight
/// @throws c10::ValueError shapes, options and ids that do not ascend; c10::TypeError dtypes;
///     c10::IndexError ids outside the table
POSEMBED_API torch::Tensor step_rows_(const torch::Tensor& weight, const torch::Tensor& gradient,
                                      const RowStep& step);

}  // namespace functional
}  // namespace posembed
