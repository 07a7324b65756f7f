// Layers with different rotations: their bases and widths, and layers without rotation.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "configuration/fields.h"
#include "configuration/words.h"

namespace posembed::configuration {

/// Kinds of layers without attention, in any model.
inline constexpr Words without_attention = "conv linear_attention mamba mlp moe recurrent";

/// Keys with one value for each layer, and the key for the value of a single layer.
inline constexpr std::pair<const char*, const char*> by_layer[] = {
    {"no_rope_layers", "no_rope_layers"},
    {"use_rope_layers", "use_rope_layers"},
    {"layer_rope_theta", "layer_rope_theta"},
    {"partial_rotary_factors", "partial_rotary_factor"},
    {"rope_theta", "rope_theta"},
    {"mlp_layer_types", "mlp_layer_types"},
};
/// Keys for the number of layers.
inline constexpr const char* layer_counts[] = {"num_hidden_layers", "n_layer", "n_layers",
                                               "num_layers",        "depth",   "encoder_layers"};

using Kind = std::optional<std::string>;

/// A layer, or all layers of a kind if the configuration does not list layers.
struct Layer {
  Kind kind;
  Fields fields;  // the configuration as this layer sees it
};

/// Rejects a kind of layer that the configuration does not have.
void check_type(std::vector<std::string> kinds, const std::string& layer_type);

/// The number of layers, if the configuration has it.
std::optional<size_t> count_of_layers(const Fields& fields);

/// Whether a key lists a value for each layer.
bool has_lists(const Fields& fields);

/// The layers in order. Throws c10::ValueError if the configuration does not list them.
std::vector<Layer> every_layer(const Fields& fields);

/// The layers, or one of each kind if only the kinds are known.
std::vector<Layer> kinds_of_layers(const Fields& fields);

/// The configuration as one layer sees it.
Fields seen_by(const Fields& fields, size_t place);

/// The configuration as seen by each layer that has its own value in a list.
std::vector<Fields> every_list_place(const Fields& fields);

}  // namespace posembed::configuration
