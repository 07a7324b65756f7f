// Operators through which Python reads configurations: JSON text in, JSON text out.
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>

#include "configuration/alibi.h"
#include "configuration/catalogue.h"
#include "configuration/gguf_architectures.h"
#include "configuration/input.h"
#include "configuration/parts.h"
#include "configuration/rotary.h"
#include "configuration/source.h"
#include "dispatcher/schema.h"

namespace posembed::configuration {
namespace {

using Text = std::string_view;
using OptionalText = std::optional<std::string_view>;
using Texts = c10::List<std::string>;

std::optional<std::string> as_string(OptionalText text) {
  return text.has_value() ? std::optional<std::string>(*text) : std::nullopt;
}

Texts as_texts(const std::vector<std::string>& words) {
  Texts texts;
  for (const std::string& word : words) texts.push_back(word);
  return texts;
}

/// The JSON text of what each layer has; empty for a layer that has nothing.
template <typename Value>
Texts as_texts(const std::vector<std::optional<Value>>& layers) {
  Texts texts;
  for (const auto& value : layers) texts.push_back(value.has_value() ? value->to_json() : "");
  return texts;
}

std::optional<Completed> completed_by_class(OptionalText fields, const Texts& known) {
  if (!fields.has_value()) return std::nullopt;
  return Completed{parse(std::string(*fields)), {known.begin(), known.end()}};
}

ConfigurationOptions options_of(OptionalText part, std::optional<bool> interleaved,
                                std::optional<double> base, const Texts& ignore) {
  ConfigurationOptions options;
  options.part(as_string(part)).interleaved(interleaved).base(base);
  return options.ignore({ignore.begin(), ignore.end()});
}

std::string rotary_from_configuration(Text config, const Texts& ignore, const Texts& known,
                                      OptionalText part, std::optional<bool> interleaved,
                                      std::optional<double> base, OptionalText completed,
                                      OptionalText layer_type) {
  ConfigurationOptions options = options_of(part, interleaved, base, ignore);
  options.layer_type(as_string(layer_type));
  const Fields fields = parse(std::string(config));
  return read_rotary(fields, options, completed_by_class(completed, known)).to_json();
}

/// An empty text stands for a layer that does not rotate.
Texts rotary_layers_from_configuration(Text config, const Texts& ignore, const Texts& known,
                                       OptionalText part, std::optional<bool> interleaved,
                                       std::optional<double> base, OptionalText completed) {
  const ConfigurationOptions options = options_of(part, interleaved, base, ignore);
  const Fields fields = parse(std::string(config));
  return as_texts(read_rotary_layers(fields, options, completed_by_class(completed, known)));
}

/// An empty text stands for a scale of 1.
Texts score_scales_from_configuration(Text config, const Texts& ignore, const Texts& known,
                                      OptionalText part, std::optional<bool> interleaved,
                                      std::optional<double> base, OptionalText completed) {
  const ConfigurationOptions options = options_of(part, interleaved, base, ignore);
  const Fields fields = parse(std::string(config));
  return as_texts(read_score_scales(fields, options, completed_by_class(completed, known)));
}

std::string alibi_from_configuration(Text config) {
  return alibi_preset(parse(std::string(config))).dump();
}

/// Arguments of InputEmbedding, the file of tensors, and its tensors by the parameters' names.
std::string input_layer_of_folder(Text folder) {
  const std::string path(folder), file = tensors_of(path);
  const InputLayer layer = input_layer(load(path), pretrained::open(file));
  return json(
             {{"options", as_arguments(layer.options)}, {"file", file}, {"tensors", layer.tensors}})
      .dump();
}

Texts configuration_path(Text config, OptionalText part) {
  return as_texts(path_of(parse(std::string(config)), as_string(part)));
}

/// Throws unless the configuration can be read, with counts that no code takes too long for.
void check_configuration(Text config) { parse(std::string(config)); }

std::string configuration_part(Text config, OptionalText part) {
  return typed(parse(std::string(config)), as_string(part)).dump();
}

std::string configuration_tables() {
  return json({{"types", catalogue::types()},
               {"source", catalogue::source()},
               {"gguf", gguf::table()}})
      .dump();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using dispatcher::define;
  const std::string stated =
      "str config, "
      "str[] ignore, "
      "str[] known, "
      "str? part=None, "
      "bool? interleaved=None, "
      "float? base=None, "
      "str? completed=None";
  define(m, "rotary_from_configuration(" + stated + ", str? layer_type=None) -> str");
  define(m, "rotary_layers_from_configuration(" + stated + ") -> str[]");
  define(m, "score_scales_from_configuration(" + stated + ") -> str[]");
  define(m, "alibi_from_configuration(str config) -> str");
  define(m, "input_layer_of_folder(str folder) -> str");
  define(m, "check_configuration(str config) -> ()");
  define(m, "configuration_path(str config, str? part=None) -> str[]");
  define(m, "configuration_part(str config, str? part=None) -> str");
  define(m, "configuration_tables() -> str");
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("rotary_from_configuration", rotary_from_configuration);
  m.impl("rotary_layers_from_configuration", rotary_layers_from_configuration);
  m.impl("score_scales_from_configuration", score_scales_from_configuration);
  m.impl("alibi_from_configuration", alibi_from_configuration);
  m.impl("input_layer_of_folder", input_layer_of_folder);
  m.impl("check_configuration", check_configuration);
  m.impl("configuration_path", configuration_path);
  m.impl("configuration_part", configuration_part);
  m.impl("configuration_tables", configuration_tables);
}

}  // namespace posembed::configuration
