/// What a model multiplies its attention scores by besides the usual 1 / sqrt(head width): a
/// number, or a function of the query's position.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "posembed/export.h"

namespace posembed {

/// Scores, or queries, are multiplied by factor * (1 + growth * log(1 + floor((position + offset) /
/// length))); with `logn` by factor * max(1, log(position + 1) / log(length)).
///
///     for (const auto& layer : posembed::ModelPositions::read("positions.json").layers()) {
///       if (layer.score_scale) query = query * layer.score_scale->at(positions).unsqueeze(-1);
///     }
///
/// Sources: yarn_apply_mscale in transformers' DeepSeek V3, get_llama_4_attn_scale in Ministral 3,
/// attention temperature in Llama 4, use_logn_attn in Qwen 1.
struct POSEMBED_API ScoreScale {
  double factor = 1.0;  ///< relative to 1 / sqrt(width of a whole query)
  double growth = 0.0;  ///< 0: the same at every position
  double length = 1.0;  ///< in positions
  int64_t offset = 0;   ///< added to positions
  bool logn = false;    ///< grow with the logarithm of the position beyond `length`
  std::string source;   ///< the keys of the configuration that say so

  /// Whether the scale is the same at every position.
  bool is_constant() const { return growth == 0.0 && !logn; }

  /// The scale of queries at integer positions of any shape: float64 of that shape.
  torch::Tensor at(const torch::Tensor& positions) const;

  std::string to_json() const;

  /// One line: "1.87385 (mscale_all_dim)".
  std::string describe() const;

  /// @throws c10::ValueError a factor, growth or length that cannot be
  void check() const;
};

}  // namespace posembed
