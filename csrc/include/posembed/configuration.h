/// How configurations of models are read: see RotarySpec::from_huggingface.
#pragma once

#include <torch/arg.h>

#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"

namespace posembed {

/// Facts that a configuration may lack, and the layers that are asked for. Python has the same.
///
///     const auto options = posembed::ConfigurationOptions().layer_type("sliding_attention");
///     const auto spec = posembed::RotarySpec::from_huggingface("gemma/config.json", options);
struct POSEMBED_API ConfigurationOptions {
  /// If layers differ: "full_attention", "sliding_attention", and so on.
  TORCH_ARG(std::optional<std::string>, layer_type) = std::nullopt;
  /// A nested configuration, such as "vision_config" or "talker_config.text_config"; default: that
  /// of the text model, or the top level.
  TORCH_ARG(std::optional<std::string>, part) = std::nullopt;
  /// The pairing, for unknown model types: configurations do not contain it.
  TORCH_ARG(std::optional<bool>, interleaved) = std::nullopt;
  /// For configurations without rope_theta.
  TORCH_ARG(std::optional<double>, base) = std::nullopt;
  /// Keys that do not concern rotary positions, although they are not known here.
  TORCH_ARG(std::vector<std::string>, ignore);
};

}  // namespace posembed
