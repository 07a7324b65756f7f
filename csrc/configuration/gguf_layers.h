// Which layers of a GGUF file have a sliding window, and which rotate.
#pragma once

#include <vector>

#include "configuration/gguf_architectures.h"

namespace posembed::configuration::gguf {

/// A layer of the model.
struct Layer {
  bool slides;  // its attention has a sliding window
  bool rotates;
};

/// Whether some layers have a sliding window.
bool has_windows(Metadata& file);

/// The layers in order: `block_count` of them; or some, enough to see every kind, if the file does
/// not give their number.
std::vector<Layer> layers_of(Metadata& file);

}  // namespace posembed::configuration::gguf
