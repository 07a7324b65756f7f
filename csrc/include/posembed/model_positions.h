/// What a program needs to know about a model's positions, from one file. posembed's Python package
/// knows other people's configurations, and writes the file once:
///
///     python -m posembed describe MODEL > MODEL/positions.json
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "posembed/alibi.h"
#include "posembed/export.h"
#include "posembed/positions.h"
#include "posembed/rotary_specification.h"
#include "posembed/score_scale.h"

namespace posembed {

/// A layer of a model.
struct LayerPositions {
  std::string kind;                       ///< "full_attention" and so on; empty: of no named kind
  std::optional<RotarySpec> rotary;       ///< std::nullopt: it does not rotate
  std::optional<ScoreScale> score_scale;  ///< std::nullopt: 1
};

/// A model's positions: rotations of its layers and parts, scales of scores, ALiBi, the rule of
/// M-RoPE, and where its input layer's tensors are. Copies share their contents.
///
///     const auto model = posembed::ModelPositions::read("llama/positions.json");
///     for (const auto& layer : model.layers()) { … }
///     const posembed::RotarySpec tower = model.part("vision_config").rotary();
///
/// docs/reference/positions.schema.json describes the file. Errors are c10::ValueError.
class POSEMBED_API ModelPositions {
 public:
  /// @param path  of positions.json, or of its folder
  /// @throws c10::ValueError there is no such document, with the command that writes it; or a newer
  ///     posembed wrote it
  /// @throws std::filesystem::filesystem_error the file exists and cannot be read
  static ModelPositions read(const std::string& path);
  /// The same from JSON text.
  static ModelPositions from_json(const std::string& text);

  /// The model type, or the architecture of a GGUF file.
  const std::string& model() const;
  /// The layers in order. Throws the reason if they are not known.
  const std::vector<LayerPositions>& layers() const;
  /// The rotation of all layers that rotate, or of those of a kind.
  /// @throws c10::ValueError layers differ, none of them rotates, or the reason why it is not known
  RotarySpec rotary(const std::optional<std::string>& kind = std::nullopt) const;
  /// The names of nested configurations, as "vision_config", and of parts of layers, as "indexer".
  std::vector<std::string> parts() const;
  /// A part, with layers of its own.
  ModelPositions part(const std::string& name) const;
  /// Options for the whole model. Throws if it has no ALiBi.
  ALiBiOptions alibi() const;
  /// How images are numbered among text. Throws if the model type has no rule.
  MropeRule mrope() const;
  /// InputEmbedding's options and tensors as JSON; empty if the model has no such layer.
  const std::string& input_layer() const;

 private:
  struct Contents;
  explicit ModelPositions(std::shared_ptr<const Contents> contents);

  std::shared_ptr<const Contents> contents_;
};

}  // namespace posembed
