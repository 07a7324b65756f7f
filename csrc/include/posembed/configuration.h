/// Options for reading model configurations: see RotarySpec::from_huggingface.
#pragma once

#include <torch/arg.h>

#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"

namespace posembed {

/// Facts that a configuration may lack, and the choice of layers. Python has the same options.
///
///     const auto options = posembed::ConfigurationOptions().layer_type("sliding_attention");
///     const auto spec = posembed::RotarySpec::from_huggingface("gemma/config.json", options);
struct POSEMBED_API ConfigurationOptions {
  /// The kind of layers to read, if layers differ: "full_attention", "sliding_attention", and so
  /// on.
  TORCH_ARG(std::optional<std::string>, layer_type) = std::nullopt;
  /// A nested configuration, such as "vision_config" or "talker_config.text_config"; default: that
  /// of the text model, or the top level. Also a part of a layer that rotates in its own way, alone
  /// or after a dot: "indexer", "linear_attention".
  TORCH_ARG(std::optional<std::string>, part) = std::nullopt;
  /// The pairing, to check it; where rope_interleave is null, to state it.
  TORCH_ARG(std::optional<bool>, interleaved) = std::nullopt;
  /// The base of params.json without rope_theta; or the layers of one base, where layer_rope_theta
  /// has several.
  TORCH_ARG(std::optional<double>, base) = std::nullopt;
  /// Unknown keys to ignore, because they do not affect rotary positions.
  TORCH_ARG(std::vector<std::string>, ignore);
};

}  // namespace posembed
