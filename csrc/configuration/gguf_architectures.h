// What llama.cpp does for each architecture, from gguf_architectures.json: pairing, layers that
// rotate, windows, and what its program adds to the keys of a file.
#pragma once

#include <string>

#include "configuration/keys.h"
#include "posembed/configuration.h"

namespace posembed::configuration::gguf {

inline constexpr const char* full = "full_attention";
inline constexpr const char* sliding = "sliding_attention";

/// The whole table: "source" and "architectures", by name.
const json& table();

/// A file's keys: the model's, those about rotation, and the tensors that belong to the rotation.
struct Metadata {
  std::string architecture;
  const json& rules;  // the architecture's entry in the table
  Keys model, rope, tensors;
};

/// The keys that begin with the architecture, without it.
Fields keys_of_architecture(const Fields& fields, const std::string& architecture);

/// The architecture's entry. Throws c10::ValueError if there is none.
const json& rules_of(const std::string& architecture);

/// Splits the keys of a file. Throws c10::ValueError for an architecture that is not known, does
/// not rotate, or rotates in a way that has no specification.
Metadata metadata_of(Fields fields, const ConfigurationOptions& options);

}  // namespace posembed::configuration::gguf
