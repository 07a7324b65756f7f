// One pass over the training text, then the loss on held-out text.
#pragma once

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.h"
#include "settings.h"
#include "text.h"

namespace language_model {

/// Mean loss in nats per byte.
inline torch::Tensor next_byte_loss(Decoder& model, const torch::Tensor& inputs,
                                    const torch::Tensor& targets) {
  // cross_entropy_loss expects classes in the second dimension; moving them there leaves the
  // targets a view.
  return torch::cross_entropy_loss(model->forward(inputs).transpose(1, 2), targets);
}

/// A linear warm-up, then cosine decay to a tenth.
inline double learning_rate(int64_t step, const Settings& settings) {
  const double warm_up = std::min(1.0, (step + 1) / 50.0);
  return settings.learning_rate * warm_up * (0.55 + 0.45 * std::cos(M_PI * step / settings.steps));
}

/// Trains on `ids` and returns the loss before each step. The text is cut into `batch` equal
/// streams; step after step, a window moves along all of them.
inline std::vector<double> train(Decoder& model, const torch::Tensor& ids,
                                 const Settings& settings) {
  auto [inputs, targets] = windows(ids, settings.length);
  inputs = inputs.unflatten(0, {settings.batch, settings.steps});
  targets = targets.unflatten(0, {settings.batch, settings.steps});
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions().betas({0.9, 0.95}).weight_decay(0.1));

  std::vector<double> losses;
  for (int64_t step = 0; step < settings.steps; ++step) {
    optimizer.param_groups()[0].options().set_lr(learning_rate(step, settings));
    optimizer.zero_grad();
    const auto loss = next_byte_loss(model, inputs.select(1, step), targets.select(1, step));
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// Mean loss in nats per byte when the model reads `ids` in windows of `length`.
inline double evaluate(Decoder& model, const torch::Tensor& ids, int64_t length) {
  torch::NoGradGuard no_grad;
  const auto [inputs, targets] = windows(ids, length);
  const int64_t batch = std::max<int64_t>(1, 8192 / length);
  double total = 0.0;
  for (int64_t begin = 0; begin < inputs.size(0); begin += batch) {
    const auto some = inputs.slice(0, begin, begin + batch);
    const auto loss = next_byte_loss(model, some, targets.slice(0, begin, begin + batch));
    total += loss.item<double>() * some.size(0);
  }
  return total / inputs.size(0);
}

}  // namespace language_model
