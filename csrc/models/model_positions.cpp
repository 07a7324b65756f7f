// Reads positions.json, which posembed/models/description.py writes, and makes the modules that it
// describes.
#include "posembed/model_positions.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/brief.h"
#include "dispatcher/json.h"
#include "posembed/input.h"
#include "posembed/pretrained.h"
#include "pretrained/file.h"

namespace posembed {

// ---------------------------------------------------------------------------------------- contents
// What ModelPositions holds: a document, read and checked.

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

namespace {

// --------------------------------------------------------------------------------- model positions

using nlohmann::json;

constexpr const char* format = "posembed.positions";
constexpr int64_t newest_version = 1;
constexpr size_t most_layers = 1024;  // each has a copy of its specification
constexpr const char* document = "positions.json";

/// How to get such a file.
std::string advice(const std::string& model) {
  return ": python -m posembed describe " + model + " > " + document + " writes one";
}

const json none;  // not a static of the function, whose first use would take a lock

const json& member(const json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? none : *found;
}

/// A member that has to be a list.
const json& list_of(const json& object, const char* key) {
  const json& list = member(object, key);
  TORCH_CHECK_VALUE(list.is_array(), document, ": ", key, ": expected a list, got ",
                    core::brief(list.dump()));
  return list;
}

/// A string; empty for null.
std::string text_of(const json& object, const char* key) {
  const json& value = member(object, key);
  TORCH_CHECK_VALUE(value.is_null() || value.is_string(), document, ": ", key,
                    ": expected a string, got ", core::brief(value.dump()));
  return value.is_null() ? std::string() : value.get<std::string>();
}

/// The value that an index selects; std::nullopt for null.
template <typename Value>
std::optional<Value> selected(const std::vector<Value>& values, const json& object,
                              const char* key) {
  const json& index = member(object, key);
  if (index.is_null()) return std::nullopt;
  const bool is_known = index.is_number_unsigned() && index.get<uint64_t>() < values.size();
  TORCH_CHECK_VALUE(is_known, document, ": ", key, ": expected an index below ", values.size(),
                    ", got ", core::brief(index.dump()));
  return values[index.get<size_t>()];
}

std::string text_of_file(const std::string& path) {
  constexpr int64_t most_bytes = 100'000'000;
  const pretrained::File file(path);
  TORCH_CHECK_VALUE(file.size() <= most_bytes, path, ": expected at most ", most_bytes,
                    " bytes, got ", file.size());
  try {
    return file.head(file.size());
  } catch (const pretrained::BadFile& error) {  // it became shorter
    TORCH_CHECK_VALUE(false, path, ": ", error.what());
  }
}

std::vector<RotarySpec> rotations_of(const json& part) {
  std::vector<RotarySpec> specs;
  for (const json& each : list_of(part, "rotations")) {
    TORCH_CHECK_VALUE(each.is_object(), document, ": rotations: expected objects");
    specs.push_back(RotarySpec::from_json(member(each, "specification").dump()));
  }
  return specs;
}

std::vector<ScoreScale> scales_of(const json& part) {
  std::vector<ScoreScale> scales;
  for (const json& each : list_of(part, "score_scales")) {
    const json spec = {{"head_dim", 2}, {"score_scale", each}};
    const std::optional<ScoreScale> scale = RotarySpec::from_json(spec.dump()).score_scale;
    TORCH_CHECK_VALUE(scale.has_value(), document, ": score_scales: expected objects");
    scales.push_back(*scale);
  }
  return scales;
}

LayerPositions layer_of(const json& from, const std::vector<RotarySpec>& specs,
                        const std::vector<ScoreScale>& scales) {
  TORCH_CHECK_VALUE(from.is_object(), document, ": layers: expected objects");
  LayerPositions layer{text_of(from, "kind"), selected(specs, from, "rotary"),
                       selected(scales, from, "score_scale")};
  if (layer.rotary.has_value()) layer.rotary->score_scale = layer.score_scale;
  return layer;
}

std::vector<LayerPositions> layers_of(const json& part, const std::vector<RotarySpec>& specs,
                                      const std::vector<ScoreScale>& scales) {
  const json& listed = list_of(part, "layers");
  TORCH_CHECK_VALUE(listed.size() <= most_layers, document, ": layers: expected at most ",
                    most_layers, ", got ", listed.size());
  std::vector<LayerPositions> layers;
  for (const json& each : listed) layers.push_back(layer_of(each, specs, scales));
  return layers;
}

}  // namespace

std::shared_ptr<const ModelPositions::Contents> ModelPositions::Contents::of(const json& part) {
  auto contents = std::make_shared<Contents>();
  contents->model = text_of(part, "model");
  contents->refused = text_of(part, "refused");
  if (contents->refused.empty()) {
    const std::vector<RotarySpec> specs = rotations_of(part);
    const std::vector<ScoreScale> scales = scales_of(part);
    contents->every = layer_of(part, specs, scales);
    contents->has_layers = !member(part, "layers").is_null();
    if (contents->has_layers) contents->layers = layers_of(part, specs, scales);
  }
  for (const auto& each : member(part, "parts").items()) {
    TORCH_CHECK_VALUE(each.value().is_object(), document, ": parts: expected objects");
    contents->parts[each.key()] = of(each.value());
  }
  contents->alibi = member(part, "alibi");
  contents->mrope = member(part, "mrope");
  const json& input = member(part, "input");
  if (!input.is_null()) contents->input_layer = input.dump();
  return contents;
}

void ModelPositions::Contents::check_known() const { TORCH_CHECK_VALUE(refused.empty(), refused); }

ModelPositions::ModelPositions(std::shared_ptr<const Contents> contents)
    : contents_(std::move(contents)) {}

ModelPositions ModelPositions::read(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;  // of a path that is too long, which is no folder either
  const bool is_folder = fs::is_directory(path, error);
  const fs::path file = is_folder ? fs::path(path) / document : fs::path(path);
  TORCH_CHECK_VALUE(!is_folder || fs::is_regular_file(file, error), path,
                    ": expected a folder with positions.json", advice(path));
  TORCH_CHECK_VALUE(fs::status(file, error).type() != fs::file_type::not_found, path,
                    ": no such file", advice("MODEL"));
  const std::string text = text_of_file(file.string());
  try {
    return from_json(text);
  } catch (const c10::ValueError& failure) {
    const std::string reason = failure.what_without_backtrace(),
                      start = document + std::string(": ");
    const bool is_named = reason.compare(0, start.size(), start) == 0;
    TORCH_CHECK_VALUE(false, file.string(), ": ", is_named ? reason.substr(start.size()) : reason);
  }
}

ModelPositions ModelPositions::from_json(const std::string& text) {
  try {
    const json whole = dispatcher::parse_json(document, text);
    const bool is_document = whole.is_object() && member(whole, "format") == format;
    TORCH_CHECK_VALUE(is_document, "expected a document of ", format, ", got ", core::brief(text),
                      advice("MODEL"));
    const json& version = member(whole, "version");
    const bool is_newer = version.is_number_unsigned() && version > newest_version;
    TORCH_CHECK_VALUE(version.is_number_unsigned() && !is_newer, document, ": expected version ",
                      newest_version, " or less, got ", core::brief(version.dump()),
                      is_newer ? ": a newer posembed wrote it" : "");
    return ModelPositions(Contents::of(whole));
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, document, ": expected JSON: ", dispatcher::reason(error));
  }
}

const std::string& ModelPositions::model() const { return contents_->model; }

const std::vector<LayerPositions>& ModelPositions::layers() const {
  contents_->check_known();
  TORCH_CHECK_VALUE(contents_->has_layers, "layers: the model's configuration does not list them");
  return contents_->layers;
}

RotarySpec ModelPositions::rotary(const std::optional<std::string>& kind) const {
  contents_->check_known();
  if (!kind.has_value()) {
    TORCH_CHECK_VALUE(contents_->every.rotary.has_value(),
                      "kind: layers differ, or none rotates: see layers()");
    return *contents_->every.rotary;
  }
  std::optional<RotarySpec> found;
  for (const LayerPositions& layer : contents_->layers) {
    if (layer.kind != *kind || !layer.rotary.has_value()) continue;
    TORCH_CHECK_VALUE(!found.has_value() || *found == *layer.rotary, "kind: layers of kind '",
                      *kind, "' differ: see layers()");
    found = layer.rotary;
  }
  TORCH_CHECK_VALUE(found.has_value(), "kind: no layer of kind '", core::brief(*kind), "' rotates");
  return *found;
}

std::vector<std::string> ModelPositions::parts() const {
  std::vector<std::string> names;
  for (const auto& each : contents_->parts) names.push_back(each.first);
  return names;
}

ModelPositions ModelPositions::part(const std::string& part) const {
  const auto found = contents_->parts.find(part);
  std::string known;
  for (const std::string& each : parts()) known += (known.empty() ? "'" : ", '") + each + "'";
  TORCH_CHECK_VALUE(found != contents_->parts.end(), "part: expected one of [", known, "], got '",
                    core::brief(part), "'");
  return ModelPositions(found->second);
}

const std::string& ModelPositions::input_layer() const { return contents_->input_layer; }

std::vector<std::optional<RotarySpec>> RotarySpec::for_layers(const std::string& positions) {
  const size_t first = positions.find_first_not_of(" \t\r\n");
  const bool is_text = first != std::string::npos && positions[first] == '{';
  const ModelPositions model =
      is_text ? ModelPositions::from_json(positions) : ModelPositions::read(positions);
  std::vector<std::optional<RotarySpec>> specs;
  for (const LayerPositions& layer : model.layers()) specs.push_back(layer.rotary);
  return specs;
}

namespace {

// ----------------------------------------------------------------------------------------- modules
// What positions.json says as options and modules: ALiBi, the rule of M-RoPE, and the input layer,
// whose tensors are in another file.

std::optional<int64_t> optional_of(const json& options, const char* key) {
  const json& value = options.at(key);
  return value.is_null() ? std::nullopt : std::optional<int64_t>(value.get<int64_t>());
}

/// The value that a word stands for.
template <typename Value>
Value chosen(const json& options, const char* key, const std::map<std::string, Value>& known) {
  const json& word = options.at(key);
  const auto found = word.is_string() ? known.find(word.get<std::string>()) : known.end();
  std::string words;
  for (const auto& each : known) words += (words.empty() ? "'" : ", '") + each.first + "'";
  TORCH_CHECK_VALUE(found != known.end(), "positions.json: input: ", key, ": expected one of [",
                    words, "], got ", core::brief(word.dump()));
  return found->second;
}

PositionRule rule_of(const json& options) {
  return chosen<PositionRule>(options, "position_rule",
                              {{"consecutive", PositionRule::consecutive},
                               {"opt", PositionRule::opt},
                               {"roberta", PositionRule::roberta}});
}

InputNorm norm_of(const json& options) {
  if (options.at("norm").is_null()) return InputNorm::none;
  return chosen<InputNorm>(options, "norm", {{"layer", InputNorm::layer}});
}

InputOptions options_of(const json& from) {
  InputOptions options(from.at("num_embeddings").get<int64_t>(),
                       from.at("embedding_dim").get<int64_t>());
  const std::map<std::string, Positions> kinds = {{"learned", Positions::learned},
                                                  {"sinusoidal", Positions::sinusoidal}};
  options.positions(chosen(from, "positions", kinds))
      .max_positions(optional_of(from, "max_positions"))
      .num_types(from.at("num_types").get<int64_t>())
      .norm(norm_of(from))
      .dropout(from.at("dropout").get<double>())
      .padding_idx(optional_of(from, "padding_idx"))
      .position_rule(rule_of(from))
      .token_dim(optional_of(from, "token_dim"))
      .output_dim(optional_of(from, "output_dim"))
      .scale(from.at("scale").get<double>());
  const json& eps = from.at("eps");  // null without a norm
  if (!eps.is_null()) options.eps(eps.get<double>());
  return options;
}

/// Throws unless a tensor of the file has the sizes of a parameter. Before memory is taken: rows of
/// one table and the width of another may fit no memory.
void check_shape(const pretrained::VectorFile& file, const std::string& name,
                 torch::IntArrayRef expected) {
  const std::vector<int64_t> sizes = file.shape(name);
  TORCH_CHECK_VALUE(expected == sizes, file.path(), ": ", name, ": expected ", expected, ", got ",
                    torch::IntArrayRef(sizes));
}

void check_table(const pretrained::VectorFile& file,
                 const std::map<std::string, std::string>& names, const InputOptions& options) {
  const int64_t width = options.token_dim().value_or(options.embedding_dim());
  const auto token = names.find("token.weight"), position = names.find("position.weight");
  TORCH_CHECK_VALUE(token != names.end(), "positions.json: input: expected token.weight");
  check_shape(file, token->second, {options.num_embeddings(), width});
  if (position == names.end()) return;
  const std::vector<int64_t> sizes = file.shape(position->second);
  TORCH_CHECK_VALUE(sizes.size() == 2, file.path(), ": ", position->second,
                    ": expected two dimensions, got ", torch::IntArrayRef(sizes));
  check_shape(file, position->second, {sizes[0], options.embedding_dim()});
  TORCH_CHECK_VALUE(options.max_positions().value_or(0) <= sizes[0], file.path(), ": ",
                    position->second, ": expected a row for each of ",
                    options.max_positions().value_or(0), " positions, got ", sizes[0]);
}

void copy_parameters(InputEmbeddingImpl& module, const std::map<std::string, std::string>& names,
                     const pretrained::VectorFile& file) {
  const torch::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  for (const auto& [parameter, name] : names) {
    TORCH_CHECK_VALUE(parameters.contains(parameter), "positions.json: input: no parameter ",
                      parameter);
    torch::Tensor& target = parameters[parameter];
    check_shape(file, name, target.sizes());
    target.copy_(file.tensor(name, target.scalar_type(), nullptr, /*copy=*/true));
  }
  TORCH_CHECK_VALUE(names.size() == parameters.size(), "positions.json: input: expected ",
                    parameters.size(), " tensors, got ", names.size());
}

}  // namespace

ALiBiOptions ModelPositions::alibi() const {
  const json& found = contents_->alibi;
  TORCH_CHECK_VALUE(!found.is_null(), "alibi: '", core::brief(model()), "' does not use ALiBi");
  try {
    const json& options = found.at("options");
    std::optional<int64_t> head_dim;
    if (options.contains("head_dim")) head_dim = options["head_dim"].get<int64_t>();
    ALiBiOptions alibi = ALiBiOptions::preset(found.at("preset").get<std::string>(),
                                              found.at("num_heads").get<int64_t>(), head_dim);
    if (options.contains("max_bias")) alibi.max_bias(options["max_bias"].get<double>());
    if (options.contains("factor")) alibi.factor(options["factor"].get<double>());
    if (options.contains("train_length")) {
      alibi.train_length(options["train_length"].get<int64_t>());
    }
    return alibi;
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "positions.json: alibi: ", dispatcher::reason(error));
  }
}

MropeRule ModelPositions::mrope() const {
  TORCH_CHECK_VALUE(!contents_->mrope.is_null(), "mrope: '", core::brief(model()),
                    "' has no rule of positions");
  return MropeRule::from_json(contents_->mrope.dump());
}

InputEmbedding InputEmbedding::from_positions(const ModelPositions& positions,
                                              const std::string& tensors) {
  TORCH_CHECK_VALUE(!positions.input_layer().empty(), "positions: '", positions.model(),
                    "' has no input layer that is known: describe the model's folder, with its ",
                    "safetensors");
  try {
    const json layer = dispatcher::parse_json("positions.json", positions.input_layer());
    const auto names = layer.at("tensors").get<std::map<std::string, std::string>>();
    const InputOptions options = options_of(layer.at("options"));
    const pretrained::VectorFile file = pretrained::open(tensors);
    check_table(file, names, options);
    InputEmbedding embed(options);
    embed->to(file.dtype(names.at("token.weight")));
    copy_parameters(*embed, names, file);
    embed->eval();
    return embed;
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "positions.json: input: ", dispatcher::reason(error));
  }
}

}  // namespace posembed
