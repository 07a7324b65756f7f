// Layers with rotations of their own: bases, widths, and layers without rotation.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "configuration/fields.h"

namespace posembed::configuration {

/// Keys with one value for each layer, and the key of a layer's own value.
inline constexpr std::pair<const char*, const char*> by_layer[] = {
    {"no_rope_layers", "no_rope_layers"},
    {"use_rope_layers", "use_rope_layers"},
    {"layer_rope_theta", "layer_rope_theta"},
    {"partial_rotary_factors", "partial_rotary_factor"},
    {"rope_theta", "rope_theta"},
    {"mlp_layer_types", "mlp_layer_types"},
};
/// Names of the number of layers.
inline constexpr const char* layer_counts[] = {"num_hidden_layers", "n_layer", "n_layers",
                                               "num_layers",        "depth",   "encoder_layers"};

using Kind = std::optional<std::string>;

/// A layer, or all layers of a kind where the configuration does not list them.
struct Layer {
  Kind kind;
  Fields fields;  // the configuration as this layer sees it
};

/// Refuses a kind of layer that the configuration does not have.
void check_type(std::vector<std::string> kinds, const std::string& layer_type);

/// The number of layers, where the configuration says it.
std::optional<size_t> count_of_layers(const Fields& fields);

/// The layers in their order; c10::ValueError where the configuration does not list them.
std::vector<Layer> every_layer(const Fields& fields);

/// The layers, or one of each kind where only the kinds are known.
std::vector<Layer> kinds_of_layers(const Fields& fields);

/// The configuration as one layer sees it.
Fields seen_by(const Fields& fields, size_t place);

/// The configuration as each layer sees it for which a list has a value of its own.
std::vector<Fields> every_list_place(const Fields& fields);

}  // namespace posembed::configuration
