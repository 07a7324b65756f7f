// Tests ModelPositions: documents of `python -m posembed describe`, and others.
// tests/install/test_docs.py runs a program on what Python writes.
#include "posembed/model_positions.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "models/temporary_folder.h"

namespace posembed {
namespace {

using nlohmann::json;

using Documents = TemporaryFolder;

/// Three layers of two kinds; one of them does not rotate.
json layered() {
  return json::parse(R"({
    "format": "posembed.positions", "version": 1, "model": "gemma",
    "rotations": [
      {"specification": {"head_dim": 64, "base": 10000.0}, "frequencies": [], "attention_factor": 1},
      {"specification": {"head_dim": 128, "base": 1000000.0, "interleaved": true}}],
    "score_scales": [{"factor": 1.5, "growth": 0.0, "length": 1.0, "offset": 0, "logn": false,
                      "source": "query_pre_attn_scalar"}],
    "layers": [{"kind": "sliding_attention", "rotary": 0, "score_scale": null},
               {"kind": "full_attention", "rotary": 1, "score_scale": 0},
               {"kind": "full_attention", "rotary": null, "score_scale": 0}],
    "rotary": null, "score_scale": null,
    "parts": {"vision_config": {
                "rotations": [{"specification": {"head_dim": 80}}], "score_scales": [],
                "layers": null, "rotary": 0, "score_scale": null},
              "audio_config": {"refused": "model_type 'whisper' does not rotate"}},
    "alibi": null, "mrope": null, "input": null})");
}

std::string refusal(const json& document) {
  return message_of<c10::ValueError>([&] { ModelPositions::from_json(document.dump()); });
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(Documents, LayersHaveTheirRotationsAndScales) {
  const std::string path = write("positions.json", layered().dump());
  for (const ModelPositions& model :
       {ModelPositions::read(path), ModelPositions::read(folder()), ModelPositions::from_json(layered().dump())}) {
    EXPECT_EQ(model.model(), "gemma");
    ASSERT_EQ(model.layers().size(), 3u);
    EXPECT_EQ(model.layers()[0].kind, "sliding_attention");
    EXPECT_EQ(model.layers()[0].rotary, RotarySpec(64));
    EXPECT_FALSE(model.layers()[0].score_scale.has_value());
    EXPECT_EQ(model.layers()[1].rotary->base, 1000000.0);
    EXPECT_TRUE(model.layers()[1].rotary->interleaved);
    EXPECT_EQ(model.layers()[1].rotary->score_scale->factor, 1.5);
    EXPECT_FALSE(model.layers()[2].rotary.has_value());
    EXPECT_EQ(model.layers()[2].score_scale->source, "query_pre_attn_scalar");
  }
  const auto specs = RotarySpec::for_layers(path);
  EXPECT_EQ(specs.size(), 3u);
  EXPECT_EQ(specs[1]->head_dim, 128);
  EXPECT_FALSE(specs[2].has_value());
}

TEST_F(Documents, RotationsOfAKindAndOfParts) {
  const ModelPositions model = ModelPositions::from_json(layered().dump());
  EXPECT_EQ(model.rotary("full_attention").head_dim, 128);
  EXPECT_EQ(model.part("vision_config").rotary(), RotarySpec(80));
  EXPECT_EQ(model.parts(), (std::vector<std::string>{"audio_config", "vision_config"}));
  const auto message = [](const auto& call) { return message_of<c10::ValueError>(call); };
  EXPECT_TRUE(has(message([&] { model.rotary(); }), "kind: layers differ"));
  EXPECT_TRUE(has(message([&] { model.rotary("none"); }), "kind: no layer of kind 'none'"));
  EXPECT_TRUE(has(message([&] { model.part("tower"); }),
                  "part: expected one of ['audio_config', 'vision_config'], got 'tower'"));
  EXPECT_TRUE(has(message([&] { model.part("audio_config").layers(); }), "'whisper' does not"));
  EXPECT_TRUE(has(message([&] { model.part("vision_config").layers(); }), "layers: "));
  EXPECT_TRUE(has(message([&] { model.alibi(); }), "alibi: 'gemma' does not use ALiBi"));
  EXPECT_TRUE(has(message([&] { model.mrope(); }), "mrope: 'gemma' has no rule"));
}

TEST_F(Documents, AlibiAndRulesOfPositions) {
  json document = layered();
  document["alibi"] = {{"preset", "mpt"}, {"num_heads", 8}, {"options", {{"max_bias", 4.0}}}};
  document["mrope"] = {{"image_token", 7}, {"spatial_merge", 4}};
  ModelPositions model = ModelPositions::from_json(document.dump());
  EXPECT_EQ(model.alibi().max_bias(), 4.0);
  EXPECT_EQ(model.alibi().num_heads(), 8);
  EXPECT_EQ(model.mrope().image_token, 7);
  EXPECT_EQ(model.mrope().spatial_merge, 4);
  document["alibi"] = {{"preset", "falcon"}, {"num_heads", 8}, {"options", {{"head_dim", 64}}}};
  EXPECT_EQ(ModelPositions::from_json(document.dump()).alibi().factor(), 8.0);
  document["alibi"] = {{"preset", "jais"}, {"num_heads", 8}, {"options", {{"train_length", 2048}}}};
  EXPECT_EQ(ModelPositions::from_json(document.dump()).alibi().train_length(), 2048);
  document["alibi"].erase("options");
  model = ModelPositions::from_json(document.dump());
  EXPECT_TRUE(has(message_of<c10::ValueError>([&] { model.alibi(); }), "positions.json: alibi"));
}

TEST_F(Documents, WithoutTheFileTheErrorNamesTheCommand) {
  write("config.json", R"({"model_type": "llama"})");
  const std::string command = "python -m posembed describe " + folder();
  const auto message = [](const std::string& path) {
    return message_of<c10::ValueError>([&] { ModelPositions::read(path); });
  };
  EXPECT_TRUE(has(message(folder()), command)) << message(folder());
  EXPECT_TRUE(has(message(folder() + "/config.json"), "python -m posembed describe MODEL"));
  const std::string missing = folder() + "/none.json";
  EXPECT_TRUE(has(message(missing), missing)) << message(missing);
  EXPECT_TRUE(has(message(missing), "python -m posembed describe MODEL")) << message(missing);
}

TEST_F(Documents, ErrorsOfAFileNameIt) {
  json document = layered();
  document["layers"][0]["rotary"] = 2;
  const std::string path = write("{gemma}.json", document.dump());
  const auto message = [](const auto& call) { return message_of<c10::ValueError>(call); };
  EXPECT_TRUE(has(message([&] { ModelPositions::read(path); }), path + ": rotary: expected"));
  EXPECT_TRUE(has(message([&] { RotarySpec::for_layers(path); }), path + ": rotary: expected"));
  EXPECT_EQ(RotarySpec::for_layers("\n " + layered().dump()).size(), 3u);
}

TEST_F(Documents, NewerVersionsAreRefused) {
  json document = layered();
  document["version"] = 2;
  EXPECT_TRUE(has(refusal(document), "expected version 1 or less, got 2: a newer posembed"));
  document["version"] = "1";
  EXPECT_TRUE(has(refusal(document), "expected version 1"));
  EXPECT_FALSE(has(refusal(document), "newer"));
  document["version"] = 1;
  document["new member"] = "is passed over";
  EXPECT_EQ(refusal(document), "");
}

TEST_F(Documents, WhatIsNoDocumentIsRefused) {
  json document = layered();
  document["layers"][0]["rotary"] = 2;
  EXPECT_TRUE(has(refusal(document), "rotary: expected an index below 2, got 2"));
  document["layers"][0]["rotary"] = -1;
  EXPECT_TRUE(has(refusal(document), "rotary: expected an index below 2, got -1"));
  document = layered();
  document["layers"] = json::array();
  for (int i = 0; i < 1025; ++i) document["layers"].push_back({{"rotary", 0}});
  EXPECT_TRUE(has(refusal(document), "layers: expected at most 1024, got 1025"));
  document = layered();
  document["rotations"][0]["specification"]["head_dim"] = -2;
  EXPECT_TRUE(has(refusal(document), "head_dim: expected a positive number"));
  document = layered();
  document["score_scales"][0]["factor"] = 0.0;
  EXPECT_TRUE(has(refusal(document), "score_scale: expected a positive factor"));
  for (const char* text : {"", "[]", "{", "{\"format\": 1}", "null"}) {
    EXPECT_NE(message_of<c10::ValueError>([&] { ModelPositions::from_json(text); }), "") << text;
  }
}

}  // namespace
}  // namespace posembed
