// GGUF metadata: keys that begin with the architecture, for which gguf_architectures.json has what
// llama.cpp's program adds to them, and where each entry is taken from.
//
// Numbers of YaRN that a file states count, also where that program passes over them. Tensors that
// belong to the rotation are passed as keys: "rope_freqs.weight", "rope_factors_short.weight",
// "rope_factors_long.weight".
#pragma once

#include <optional>
#include <vector>

#include "configuration/fields.h"
#include "posembed/configuration.h"
#include "posembed/rotary_specification.h"

namespace posembed::configuration::gguf {

/// Whether this is the metadata of a GGUF file.
bool is_metadata(const Fields& fields);

/// The specification of a file's metadata.
RotarySpec read(const Fields& fields, const ConfigurationOptions& options);

/// The specification of each layer; std::nullopt if it does not rotate.
std::vector<std::optional<RotarySpec>> read_layers(const Fields& fields,
                                                   const ConfigurationOptions& options);

}  // namespace posembed::configuration::gguf
