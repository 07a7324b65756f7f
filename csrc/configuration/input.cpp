#include "configuration/input.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "configuration/keys.h"
#include "configuration/source.h"
#include "configuration/words.h"
#include "core/brief.h"

namespace posembed::configuration {
namespace {

/// Where a family has its input layer, and what its configuration's keys mean: read from the
/// models' own code in transformers 5.23. Files of models with a head put the prefix before the
/// names of tensors. Empty: the family has no such tensor.
struct InputFamily {
  Words names;
  const char* prefix;
  const char* token;  // if several names, the first that is present
  const char* position;
  const char* token_type;
  const char* norm;  // a module
  const char* projection;
  PositionRule rule;
  const char* dropout_key;
  double dropout;  // default if the configuration lacks the key; likewise below
  std::optional<int64_t> padding;
};

constexpr const char* bert_words = "embeddings.word_embeddings.weight";
constexpr const char* bert_positions = "embeddings.position_embeddings.weight";
constexpr const char* bert_types = "embeddings.token_type_embeddings.weight";
constexpr const char* bert_norm = "embeddings.LayerNorm";
constexpr const char* bert_dropout = "hidden_dropout_prob";
constexpr const char* shared_words = "encoder.embed_tokens.weight shared.weight";
constexpr PositionRule counted = PositionRule::consecutive;
constexpr PositionRule unpadded = PositionRule::roberta;

constexpr InputFamily families[] = {
    {"bert", "bert.", bert_words, bert_positions, bert_types, bert_norm, "", counted, bert_dropout,
     0.1, 0},
    {"roberta xlm-roberta camembert", "roberta.", bert_words, bert_positions, bert_types, bert_norm,
     "", unpadded, bert_dropout, 0.1, 1},
    {"distilbert", "distilbert.", bert_words, bert_positions, "", bert_norm, "", counted, "dropout",
     0.1, 0},
    {"electra", "electra.", bert_words, bert_positions, bert_types, bert_norm, "embeddings_project",
     counted, bert_dropout, 0.1, 0},
    {"albert", "albert.", bert_words, bert_positions, bert_types, bert_norm,
     "encoder.embedding_hidden_mapping_in", counted, bert_dropout, 0.0, 0},
    {"gpt2", "transformer.", "wte.weight", "wpe.weight", "", "", "", counted, "embd_pdrop", 0.1,
     std::nullopt},
    {"opt", "model.", "decoder.embed_tokens.weight", "decoder.embed_positions.weight", "", "",
     "decoder.project_in", PositionRule::opt, "", 0.0, 1},
    {"m2m_100 nllb-moe fsmt", "model.", shared_words, "", "", "", "", unpadded, "dropout", 0.1, 1},
};

std::string known_families() {
  std::string all;
  for (const InputFamily& family : families) {
    for (const std::string& name : family.names.list()) all += (all.empty() ? "" : ", ") + name;
  }
  return all;
}

/// Finds a family's tensors among those of a file.
class TensorNames {
 public:
  TensorNames(const pretrained::VectorFile& file, const InputFamily& family)
      : file_(file), prefix_(family.prefix) {
    for (std::string& name : file.names()) names_.insert(std::move(name));
  }

  /// The name in the file of the first of these tensors that is present; empty if none is.
  std::string find(const std::string& names) const {
    for (const std::string& name : Words(names.c_str()).list()) {
      if (names_.count(prefix_ + name) > 0) return prefix_ + name;
      if (names_.count(name) > 0) return name;
    }
    return {};
  }

  std::string need(const std::string& names) const {
    std::string found = find(names);
    TORCH_CHECK_VALUE(!found.empty(), file_.path(), ": expected a tensor ",
                      Words(names.c_str()).list().front());
    return found;
  }

  std::vector<int64_t> shape(const std::string& name) const {
    std::vector<int64_t> sizes = file_.shape(name);
    TORCH_CHECK_VALUE(sizes.size() == 2, file_.path(), ": ", name,
                      ": expected two dimensions, got ", torch::IntArrayRef(sizes));
    return sizes;
  }

 private:
  const pretrained::VectorFile& file_;
  std::string prefix_;
  std::set<std::string> names_;
};

/// Old files of BERT name a norm's parameters gamma and beta.
void add_norm(InputLayer& layer, const TensorNames& names, const std::string& module) {
  layer.options.norm(InputNorm::layer);
  layer.tensors["norm.weight"] = names.need(module + ".weight " + module + ".gamma");
  layer.tensors["norm.bias"] = names.need(module + ".bias " + module + ".beta");
}

void add_positions(InputLayer& layer, const TensorNames& names, const std::string& tensor,
                   int64_t first_row) {
  const std::string found = names.need(tensor);
  layer.tensors["position.weight"] = found;
  layer.options.max_positions(names.shape(found)[0] - first_row);
}

void add_types(InputLayer& layer, const TensorNames& names, const std::string& tensor) {
  const std::string found = names.need(tensor);
  layer.tensors["token_type.weight"] = found;
  layer.options.num_types(names.shape(found)[0]);
}

/// A projection before the sum (OPT) or after it; models with a single width have none.
void add_projection(InputLayer& layer, const TensorNames& names, const InputFamily& family) {
  const std::string module = family.projection, weight = names.find(module + ".weight");
  if (weight.empty()) return;
  layer.tensors["projection.weight"] = weight;
  if (family.rule == PositionRule::opt) {
    layer.options.token_dim(names.shape(weight)[1]);
    return;
  }
  layer.options.output_dim(names.shape(weight)[0]);
  layer.tensors["projection.bias"] = names.need(module + ".bias");
}

int64_t first_position_row(const InputFamily& family, const InputOptions& options) {
  if (family.rule == PositionRule::opt) return 2;
  return family.rule == PositionRule::roberta ? options.padding_idx().value_or(0) + 1 : 0;
}

/// A number of the configuration, or the default of the family's class.
double number_or(const Fields& config, const char* key, double otherwise) {
  return config.contains(key) ? real(key, get(config, key)) : otherwise;
}

std::optional<int64_t> padding_of(const Fields& config, const InputFamily& family) {
  const char* key = "pad_token_id";
  if (!family.padding.has_value() || !config.contains(key)) return family.padding;
  const json& given = get(config, key);
  return given.is_null() ? std::nullopt : std::optional<int64_t>(whole(key, given));
}

void check_absolute(const Fields& config) {
  const json kind = config.value("position_embedding_type", json("absolute"));
  TORCH_CHECK_VALUE(kind == "absolute", "position_embedding_type: expected 'absolute', got ",
                    repr(kind));
}

/// Sets the options that the configuration's keys determine.
void set_options(InputOptions& options, const Fields& config, const InputFamily& family) {
  options.padding_idx(padding_of(config, family)).position_rule(family.rule);
  const std::string dropout = family.dropout_key;
  if (!dropout.empty()) options.dropout(number_or(config, family.dropout_key, family.dropout));
  if (*family.norm != '\0') options.eps(number_or(config, "layer_norm_eps", 1e-12));
  if (*family.position != '\0') return check_absolute(config);
  options.positions(Positions::sinusoidal);
  const bool scaled = flag("scale_embedding", config.value("scale_embedding", json(true)));
  if (scaled) options.sqrt_dim();
}

const char* name_of(PositionRule rule) {
  if (rule == PositionRule::opt) return "opt";
  return rule == PositionRule::roberta ? "roberta" : "consecutive";
}

template <typename T>
json or_null(const std::optional<T>& value) {
  return value.has_value() ? json(*value) : json();
}

void check_shape(const pretrained::VectorFile& file, const std::string& name,
                 torch::IntArrayRef expected) {
  const std::vector<int64_t> sizes = file.shape(name);
  TORCH_CHECK_VALUE(expected == sizes, file.path(), ": ", name, ": expected ", expected, ", got ",
                    torch::IntArrayRef(sizes));
}

/// Throws unless the tensors agree on their widths. Each of them fits the file, but memory for the
/// rows of one and the width of another may not.
void check_widths(const InputLayer& layer, const pretrained::VectorFile& file) {
  const InputOptions& options = layer.options;
  const int64_t width = options.embedding_dim(), token_width = options.token_dim().value_or(width);
  for (const auto& [parameter, name] : layer.tensors) {
    std::vector<int64_t> expected = file.shape(name);
    if (expected.empty() || parameter == "projection.bias") continue;  // checked when copied
    if (parameter == "projection.weight" && options.token_dim().has_value()) expected[0] = width;
    const bool is_before = parameter == "token.weight" || parameter == "projection.weight";
    expected.back() = is_before ? token_width : width;
    check_shape(file, name, expected);
  }
}

/// Copies a file's tensors to the parameters to which they belong.
void copy_parameters(InputEmbeddingImpl& module, const InputLayer& layer,
                     const pretrained::VectorFile& file) {
  const torch::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  for (const auto& [parameter, name] : layer.tensors) {
    torch::Tensor& target = parameters[parameter];
    check_shape(file, name, target.sizes());
    target.copy_(file.tensor(name, target.scalar_type(), nullptr, /*copy=*/true));
  }
}

}  // namespace

InputLayer input_layer(const Fields& config, const pretrained::VectorFile& file) {
  const InputFamily* family = row_of(families, text_of(get(config, "model_type")));
  TORCH_CHECK_VALUE(family != nullptr, "model_type: expected one of ", known_families(), ", got ",
                    repr(get(config, "model_type")));
  const TensorNames names(file, *family);
  const std::string token = names.need(family->token);
  const std::vector<int64_t> table = names.shape(token);
  InputLayer layer{{table[0], table[1]}, {{"token.weight", token}}};
  set_options(layer.options, config, *family);
  if (*family->position != '\0') {
    add_positions(layer, names, family->position, first_position_row(*family, layer.options));
    layer.options.embedding_dim(names.shape(layer.tensors["position.weight"])[1]);
  }
  if (*family->token_type != '\0') add_types(layer, names, family->token_type);
  if (*family->norm != '\0') add_norm(layer, names, family->norm);
  if (*family->projection != '\0') add_projection(layer, names, *family);
  check_widths(layer, file);
  return layer;
}

std::string tensors_of(const std::string& folder) {
  const std::filesystem::path path(folder);
  std::error_code error;  // of a path that is too long, which is no folder either
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (std::filesystem::is_regular_file(path / name, error)) return path / name;
  }
  TORCH_CHECK_VALUE(false, core::brief(folder),
                    ": expected a folder with model.safetensors or model.safetensors.index.json");
}

json as_arguments(const InputOptions& options) {
  const bool learned = options.positions() == Positions::learned;
  return {{"num_embeddings", options.num_embeddings()},
          {"embedding_dim", options.embedding_dim()},
          {"positions", learned ? "learned" : "sinusoidal"},
          {"max_positions", or_null(options.max_positions())},
          {"num_types", options.num_types()},
          {"scale", options.scale()},
          {"norm", options.norm() == InputNorm::layer ? json("layer") : json()},
          {"eps", options.eps()},
          {"dropout", options.dropout()},
          {"padding_idx", or_null(options.padding_idx())},
          {"position_rule", name_of(options.position_rule())},
          {"token_dim", or_null(options.token_dim())},
          {"output_dim", or_null(options.output_dim())}};
}

}  // namespace posembed::configuration

namespace posembed {

InputEmbedding InputEmbedding::from_huggingface(const std::string& folder) {
  const configuration::Fields config = configuration::load(folder);
  const pretrained::VectorFile file = pretrained::open(configuration::tensors_of(folder));
  const configuration::InputLayer layer = configuration::input_layer(config, file);
  InputEmbedding embed(layer.options);
  embed->to(file.dtype(layer.tensors.at("token.weight")));
  configuration::copy_parameters(*embed, layer, file);
  embed->eval();
  return embed;
}

}  // namespace posembed
