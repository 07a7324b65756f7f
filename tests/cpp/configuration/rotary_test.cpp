// Tests RotarySpec::from_huggingface and for_layers: forms of files, layers, parts, and errors.
// Both languages read the cases of tests/shared/configurations.json.
#include "posembed/rotary.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "configuration/temporary_folder.h"

namespace posembed {
namespace {

using Configurations = TemporaryFolder;
using nlohmann::json;

const json llama = {{"model_type", "llama"},
                    {"hidden_size", 4096},
                    {"num_attention_heads", 32},
                    {"max_position_embeddings", 131072},
                    {"rope_theta", 500000.0}};
const json layered = {
    {"model_type", "cohere2"}, {"head_dim", 64},
    {"rope_theta", 10000.0},   {"num_hidden_layers", 2},
    {"sliding_window", 4096},  {"layer_types", {"sliding_attention", "full_attention"}}};

json with(json config, const json& more) {
  config.update(more);
  return config;
}

RotarySpec read(const json& config, const ConfigurationOptions& options = {}) {
  return RotarySpec::from_huggingface(config.dump(), options);
}

std::string refusal(const json& config, const ConfigurationOptions& options = {}) {
  return message_of<c10::ValueError>([&] { read(config, options); });
}

RotarySpec half_split(int64_t head_dim, double base) {
  RotarySpec spec(head_dim);
  spec.base = base;
  return spec;
}

/// The options of a row of the shared file.
ConfigurationOptions options_of(const json& row) {
  ConfigurationOptions options;
  if (row.contains("layer_type")) options.layer_type(row["layer_type"].get<std::string>());
  if (row.contains("part")) options.part(row["part"].get<std::string>());
  if (row.contains("interleaved")) options.interleaved(row["interleaved"].get<bool>());
  if (row.contains("base")) options.base(row["base"].get<double>());
  return options;
}

TEST_F(Configurations, BothLanguagesReadTheSame) {
  std::ifstream stream(POSEMBED_SHARED_TESTS "/configurations.json");
  const json rows = json::parse(stream);
  ASSERT_GT(rows.size(), 10u);
  for (const json& row : rows) {
    SCOPED_TRACE(row["name"].get<std::string>());
    if (row.contains("error")) {
      const std::string expected = row["error"].get<std::string>();
      EXPECT_NE(refusal(row["config"], options_of(row)).find(expected), std::string::npos)
          << refusal(row["config"], options_of(row));
    } else {
      const RotarySpec found = read(row["config"], options_of(row));
      EXPECT_TRUE(found == RotarySpec::from_json(row["specification"].dump())) << found.to_json();
    }
  }
}

TEST_F(Configurations, FilesFoldersAndTextAreTheSame) {
  const RotarySpec expected = half_split(128, 500000.0);
  const std::string path = write("config.json", llama.dump());
  EXPECT_EQ(read(llama), expected);
  EXPECT_EQ(RotarySpec::from_huggingface("\n " + llama.dump()), expected);
  EXPECT_EQ(RotarySpec::from_huggingface(path), expected);
  EXPECT_EQ(RotarySpec::from_huggingface(folder()), expected);
}

TEST_F(Configurations, ParamsOfMetaAreFoundInTheirFolder) {
  write("params.json", R"({"dim": 64, "n_heads": 4, "n_layers": 2, "rope_theta": 500000.0})");
  RotarySpec expected = half_split(16, 500000.0);
  expected.interleaved = true;
  EXPECT_EQ(RotarySpec::from_huggingface(folder()), expected);
  const auto layers = RotarySpec::for_layers(folder());
  EXPECT_EQ(layers, (std::vector<std::optional<RotarySpec>>(2, expected)));
}

TEST_F(Configurations, WhatIsNoConfigurationIsRefused) {
  EXPECT_THROW(RotarySpec::from_huggingface(folder() + "/none.json"),
               std::filesystem::filesystem_error);
  const auto message = [](const std::string& config) {
    return message_of<c10::ValueError>([&] { RotarySpec::from_huggingface(config); });
  };
  EXPECT_NE(message(folder()).find("expected a folder with config.json or params.json"),
            std::string::npos);
  EXPECT_NE(message(write("list.json", "[1]")).find("expected a file with a JSON object, got [1]"),
            std::string::npos);
  EXPECT_NE(message("{").find("config: expected JSON"), std::string::npos);
  const std::string deep = write("deep.json", std::string(100000, '['));
  EXPECT_NE(message(deep).find("config: expected JSON of at most 64 levels"), std::string::npos);
  EXPECT_NE(refusal(with(llama, {{"num_hidden_layers", int64_t{1} << 60}}))
                .find("num_hidden_layers: expected at most 1024"),
            std::string::npos);
}

TEST_F(Configurations, NumbersThatJsonLacksAreNoNumbers) {
  const std::string text = llama.dump();
  const std::string limits = R"("time_step_limit": [0.0, Infinity], "name": "NaN \" Infinity")";
  const std::string ignored = "{" + limits + "," + text.substr(1);
  const auto options = ConfigurationOptions().ignore({"time_step_limit", "name"});
  EXPECT_EQ(RotarySpec::from_huggingface(ignored, options), read(llama));
  const std::string infinite = R"({"model_type": "llama", "head_dim": 8, "rope_theta": -Infinity})";
  EXPECT_NE(message_of<c10::ValueError>([&] {
              RotarySpec::from_huggingface(infinite);
            }).find("rope_theta: expected a number, got '-Infinity'"),
            std::string::npos);
}

TEST_F(Configurations, LayersMayDiffer) {
  const RotarySpec local = [] {
    RotarySpec spec = half_split(64, 10000.0);
    spec.interleaved = true;
    return spec;
  }();
  EXPECT_EQ(read(layered), local);
  EXPECT_EQ(read(layered, ConfigurationOptions().layer_type("sliding_attention")), local);
  EXPECT_NE(refusal(layered, ConfigurationOptions().layer_type("full_attention"))
                .find("layer_type: layers of kind 'full_attention' do not rotate"),
            std::string::npos);
  const auto layers = RotarySpec::for_layers(layered.dump());
  EXPECT_EQ(layers, (std::vector<std::optional<RotarySpec>>{local, std::nullopt}));
  EXPECT_NE(message_of<c10::ValueError>([] {
              RotarySpec::for_layers(layered.dump(), ConfigurationOptions().layer_type("none"));
            }).find("layer_type: expected none: there is a specification for each layer"),
            std::string::npos);
}

TEST_F(Configurations, PartsAreChosenByName) {
  const json both = {{"model_type", "qwen2_vl"},
                     {"text_config", with(llama, {{"model_type", "qwen2_vl_text"}})},
                     {"vision_config",
                      {{"model_type", "qwen2_vl_vision"}, {"embed_dim", 1280}, {"num_heads", 16}}}};
  const RotarySpec tower = read(both, ConfigurationOptions().part("vision_config"));
  EXPECT_EQ(tower.head_dim, 80);
  EXPECT_TRUE(tower.sections->restart);
  EXPECT_EQ(read(both).base, 500000.0);
  EXPECT_NE(refusal(both, ConfigurationOptions().part("tower"))
                .find("part: expected one of ['text_config', 'vision_config'], got 'tower'"),
            std::string::npos);
  EXPECT_THROW(read(with(llama, {{"text_config", 5}})), c10::TypeError);
}

TEST_F(Configurations, UnknownTypesAreRefusedWhateverIsStated) {
  const json own = with(llama, {{"model_type", "mine"}});
  const auto stated = ConfigurationOptions().base(500000.0).interleaved(false);
  for (const auto& options : {ConfigurationOptions(), stated}) {
    EXPECT_NE(refusal(own, options)
                  .find("model_type 'mine' is not known: describe its rotation in "
                        "full with RotarySpec"),
              std::string::npos);
  }
  const json unknown = with(llama, {{"wavelength", 2}});
  EXPECT_NE(refusal(unknown).find("keys that are not understood: ['wavelength']"),
            std::string::npos);
  EXPECT_EQ(read(unknown, ConfigurationOptions().ignore({"wavelength"})), read(llama));
}

TEST_F(Configurations, FilesNeedNotSayWhatTheirClassAdds) {
  EXPECT_EQ(read(with(llama, {{"model_type", "gemma"}})).head_dim, 256);
  EXPECT_EQ(read({{"model_type", "llama"}}), half_split(128, 10000.0));
  const auto layers = RotarySpec::for_layers(R"({"model_type": "gemma3_text"})");
  ASSERT_EQ(layers.size(), 26u);
  EXPECT_EQ(layers[4], half_split(256, 10000.0));
  EXPECT_EQ(layers[5], half_split(256, 1000000.0));
}

TEST_F(Configurations, PartsOfLayersAreChosenByName) {
  const json config = {{"model_type", "deepseek_v32"}};
  RotarySpec indexer = half_split(128, 10000.0);
  indexer.rotary_dim = 64;
  EXPECT_EQ(read(config, ConfigurationOptions().part("indexer")), indexer);
  EXPECT_TRUE(read(config, ConfigurationOptions().part("attention")).interleaved);
  EXPECT_NE(refusal(llama, ConfigurationOptions().part("indexer"))
                .find("part: expected one of ['attention'], got 'indexer'"),
            std::string::npos);
}

}  // namespace
}  // namespace posembed
