// The input layer of a model's folder: its options and where its parameters are.
#pragma once

#include <map>
#include <string>

#include "configuration/fields.h"
#include "posembed/input.h"
#include "posembed/pretrained.h"

namespace posembed::configuration {

/// A model's input layer in a file of tensors.
struct InputLayer {
  InputOptions options;
  std::map<std::string, std::string> tensors;  // by the parameter's name in InputEmbedding
};

/// Finds the layer by the model's configuration; sizes are those of the tensors. Throws
/// c10::ValueError for an unknown family or missing tensors.
InputLayer input_layer(const Fields& config, const pretrained::VectorFile& file);

/// The path of a model's safetensors in its folder: one file, or the index of several. Throws
/// c10::ValueError if there is neither.
std::string tensors_of(const std::string& folder);

/// The options as Python's arguments of InputEmbedding.
json as_arguments(const InputOptions& options);

}  // namespace posembed::configuration
