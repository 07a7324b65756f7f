// What positions.json says as options and modules: ALiBi, the rule of M-RoPE, and the input layer,
// whose tensors are in another file.
#include <c10/util/Exception.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/brief.h"
#include "dispatcher/json.h"
#include "models/contents.h"
#include "posembed/input.h"
#include "posembed/model_positions.h"
#include "posembed/pretrained.h"

namespace posembed {
namespace {

using nlohmann::json;

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
