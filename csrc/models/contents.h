// What ModelPositions holds: a document, read and checked.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "posembed/model_positions.h"

namespace posembed {

/// A model, or a part of it.
struct ModelPositions::Contents {
  std::string model;
  std::string refused;  ///< why nothing is known of the rotation; empty: it is known
  bool has_layers = false;
  std::vector<LayerPositions> layers;
  LayerPositions every;  ///< what all rotating layers share
  std::map<std::string, std::shared_ptr<const Contents>> parts;
  nlohmann::json alibi, mrope;
  std::string input_layer;

  /// Reads a JSON object. Throws c10::ValueError for values of another type or range.
  static std::shared_ptr<const Contents> of(const nlohmann::json& part);

  /// Throws the reason if nothing is known of the rotation.
  void check_known() const;
};

}  // namespace posembed
