#include "configuration/rotary.h"

#include <c10/util/Exception.h>

#include "configuration/catalogue.h"
#include "configuration/completeness.h"
#include "configuration/gguf.h"
#include "configuration/huggingface.h"
#include "configuration/keys.h"
#include "configuration/params.h"
#include "configuration/parts.h"
#include "configuration/rope_parameters.h"
#include "configuration/rotary_presets.h"
#include "configuration/score_scale.h"
#include "configuration/source.h"

namespace posembed::configuration {
namespace {

void check_no_part(const ConfigurationOptions& options, const char* why) {
  if (options.part().has_value()) check_effect("part", *options.part(), why);
}

void check_params_options(const ConfigurationOptions& options) {
  check_no_part(options, "params.json has no parts");
  if (options.interleaved().has_value()) {
    const bool pairing = *options.interleaved();
    check_effect("interleaved", pairing, "pairs of params.json are interleaved");
  }
}

/// The configuration to read, and the keys that its class knows.
Completed part_to_read(const Fields& fields, const ConfigurationOptions& options,
                       const std::optional<Completed>& completed) {
  const bool is_whole = !options.part().has_value() || layer_part(options.part()) == options.part();
  if (is_whole) huggingface::check_supported(fields);
  const Fields own = typed(fields, options.part());
  // A class silently takes one of two contradictory numbers, so check the file for them first.
  for (const Fields& layer : every_list_place(own)) legacy(layer);
  if (completed.has_value()) check_kept(own, completed->fields);
  Completed part = completed.has_value()
                       ? *completed
                       : Completed{catalogue::completed(own), catalogue::known(own)};
  catalogue::check_kinds(part.fields);
  return part;
}

RotarySpec read_one(const Fields& fields, const ConfigurationOptions& options,
                    const Completed& part) {
  if (presets::is_diffusers(fields)) return presets::read_diffusers(fields, options);
  if (gguf::is_metadata(fields)) {
    check_no_part(options, "GGUF metadata has no parts");
    return gguf::read(fields, options);
  }
  if (params::is_params(fields)) {
    check_params_options(options);
    return params::read(fields, options);
  }
  return huggingface::read(part.fields, options, part.known);
}

std::vector<std::optional<RotarySpec>> read_each(const Fields& fields,
                                                 const ConfigurationOptions& options,
                                                 const Completed& part) {
  TORCH_CHECK_VALUE(!presets::is_diffusers(fields),
                    "config: a model of diffusers rotates alike in all layers: use "
                    "from_huggingface");
  if (gguf::is_metadata(fields)) {
    check_no_part(options, "GGUF metadata has no parts");
    return gguf::read_layers(fields, options);
  }
  if (params::is_params(fields)) {
    check_params_options(options);
    return params::read_layers(fields, options);
  }
  return huggingface::read_layers(part.fields, options, part.known);
}

/// The configuration that one of the readers takes.
Completed configuration_of(const Fields& fields, const ConfigurationOptions& options,
                           const std::optional<Completed>& completed) {
  const bool whole =
      gguf::is_metadata(fields) || params::is_params(fields) || presets::is_diffusers(fields);
  if (whole) return {fields, {}};
  return part_to_read(fields, options, completed);
}

/// The kind of a layer, if the configuration lists kinds.
std::optional<std::string> kind_of(const Fields& fields, size_t layer) {
  for (const char* key : {"layer_types", "layers_block_type"}) {
    const json& kinds = get(fields, key);
    if (kinds.is_array() && layer < kinds.size()) return text_of(kinds[layer]);
  }
  return std::nullopt;
}

}  // namespace

RotarySpec read_rotary(const Fields& fields, const ConfigurationOptions& options,
                       const std::optional<Completed>& completed) {
  const Completed part = configuration_of(fields, options, completed);
  RotarySpec spec = read_one(fields, options, part);
  spec.score_scale = score_scale_of(part.fields, spec, options.layer_type());
  return spec;
}

std::vector<std::optional<RotarySpec>> read_rotary_layers(
    const Fields& fields, const ConfigurationOptions& options,
    const std::optional<Completed>& completed) {
  const Completed part = configuration_of(fields, options, completed);
  std::vector<std::optional<RotarySpec>> specs = read_each(fields, options, part);
  for (size_t layer = 0; layer < specs.size(); ++layer) {
    if (!specs[layer].has_value()) continue;
    specs[layer]->score_scale =
        score_scale_of(part.fields, *specs[layer], kind_of(part.fields, layer));
  }
  return specs;
}

std::vector<std::optional<ScoreScale>> read_score_scales(
    const Fields& fields, const ConfigurationOptions& options,
    const std::optional<Completed>& completed) {
  const Completed part = configuration_of(fields, options, completed);
  std::vector<std::optional<ScoreScale>> scales;
  for (const auto& spec : read_rotary_layers(fields, options, completed)) {
    const std::optional<std::string> kind = kind_of(part.fields, scales.size());
    scales.push_back(spec.has_value() ? spec->score_scale
                                      : score_scale_without_rotation(part.fields, kind));
  }
  return scales;
}

}  // namespace posembed::configuration

namespace posembed {

RotarySpec RotarySpec::from_huggingface(const std::string& config,
                                        const ConfigurationOptions& options) {
  return configuration::read_rotary(configuration::load(config), options);
}

std::vector<std::optional<ScoreScale>> ScoreScale::for_layers(const std::string& config,
                                                              const ConfigurationOptions& options) {
  return configuration::read_score_scales(configuration::load(config), options);
}

std::vector<std::optional<RotarySpec>> RotarySpec::for_layers(const std::string& config,
                                                              const ConfigurationOptions& options) {
  TORCH_CHECK_VALUE(!options.layer_type().has_value(),
                    "layer_type: expected none: there is a specification for each layer, got '",
                    *options.layer_type(), "'");
  return configuration::read_rotary_layers(configuration::load(config), options);
}

}  // namespace posembed
