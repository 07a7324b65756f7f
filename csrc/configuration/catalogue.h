// What is known of model types, as data. catalogue.json is what scripts/catalogue.py finds by
// running the classes of transformers: pairing, defaults, names. models.json, kept by hand, is what
// no run shows; each entry names its source.
#pragma once

#include <set>
#include <string>

#include "configuration/fields.h"

namespace posembed::configuration::catalogue {

/// What is known of a model type, in the words of models.json; an empty object for an unknown one.
const json& of(const std::string& model_type);

/// The same for the model type of a configuration.
const json& of(const Fields& fields);

/// The key that `posembed convert` writes into a configuration: "interleaved" or "half_split". It
/// says how this checkpoint is rotated and overrides the model type.
inline constexpr const char* converted = "posembed_rotary_pairs";

/// All model types, for tests and documentation.
const json& types();

/// The library that the catalogue was read off, and its version.
json source();

/// A part's configuration with the values that its class adds. Throws c10::ValueError if the file
/// has a key from which the class alone derives what is missing.
Fields completed(Fields fields);

/// Throws c10::ValueError for one rotation where the class has one for each kind of layer.
void check_kinds(const Fields& fields);

/// The keys about positions that the class knows, and that do not change the rotation.
std::set<std::string> known(const Fields& fields);

/// A configuration with its nested ones, as its class makes them where the file has none.
Fields with_parts(Fields fields);

}  // namespace posembed::configuration::catalogue
