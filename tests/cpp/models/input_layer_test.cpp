// Tests InputEmbedding::from_positions: parameters and options from a model's folder, and errors.
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "models/temporary_folder.h"
#include "posembed/input.h"
#include "posembed/model_positions.h"

namespace posembed {
namespace {

using nlohmann::json;
using Tensors = std::map<std::string, torch::Tensor>;

/// The document of a small BERT.
json bert() {
  return json::parse(R"({
    "format": "posembed.positions", "version": 1, "model": "bert", "refused": "does not rotate",
    "input": {
      "options": {"num_embeddings": 29, "embedding_dim": 8, "positions": "learned",
                  "max_positions": 12, "num_types": 2, "scale": 1.0, "norm": "layer", "eps": 0.01,
                  "dropout": 0.25, "padding_idx": 3, "position_rule": "consecutive",
                  "token_dim": null, "output_dim": null},
      "tensors": {"token.weight": "words", "position.weight": "positions",
                  "token_type.weight": "types", "norm.weight": "gamma", "norm.bias": "beta"}}})");
}

class ModelFolders : public TemporaryFolder {
 protected:
  static Tensors tensors() {
    return {{"words", torch::randn({29, 8})},
            {"positions", torch::randn({12, 8})},
            {"types", torch::randn({2, 8})},
            {"gamma", torch::randn({8})},
            {"beta", torch::randn({8})}};
  }

  InputEmbedding read(const json& document, const Tensors& values) const {
    const std::string path = write_tensors("model.safetensors", values);
    return InputEmbedding::from_positions(ModelPositions::from_json(document.dump()), path);
  }

  std::string refusal(const json& document, const Tensors& values) const {
    return message_of<c10::ValueError>([&] { read(document, values); });
  }
};

const torch::Tensor& some_ids() {
  static const torch::Tensor ids = torch::tensor({{3, 5, 1, 28}});
  return ids;
}

TEST_F(ModelFolders, BertIsReadWithItsOptions) {
  const Tensors values = tensors();
  InputEmbedding embed = read(bert(), values);
  EXPECT_FALSE(embed->is_training());
  EXPECT_EQ(embed->options.dropout(), 0.25);
  EXPECT_EQ(embed->options.padding_idx(), 3);
  const torch::Tensor sum = values.at("words").index_select(0, some_ids().flatten()) +
                            values.at("positions").narrow(0, 0, 4) + values.at("types")[0];
  const torch::Tensor expected = torch::layer_norm(sum, {8}, values.at("gamma"), values.at("beta"), 0.01);
  EXPECT_TRUE(torch::allclose(embed->forward(some_ids())[0], expected, 1e-5, 1e-5));
}

TEST_F(ModelFolders, OptProjectsItsTokens) {
  json document = bert();
  document["input"]["options"].update(json::parse(R"({
    "norm": null, "eps": null, "num_types": 0, "position_rule": "opt", "padding_idx": 1, "token_dim": 4,
    "max_positions": 12, "dropout": 0.0})"));
  document["input"]["tensors"] = {
      {"token.weight", "words"}, {"position.weight", "positions"}, {"projection.weight", "in"}};
  const Tensors values = {
      {"words", torch::randn({29, 4})}, {"positions", torch::randn({14, 8})}, {"in", torch::randn({8, 4})}};
  InputEmbedding embed = read(document, values);
  const torch::Tensor rows = values.at("words").index_select(0, some_ids().flatten());
  const torch::Tensor expected = torch::mm(rows, values.at("in").t()) + values.at("positions").narrow(0, 2, 4);
  EXPECT_TRUE(torch::allclose(embed->forward(some_ids())[0], expected, 1e-5, 1e-5));
}

TEST_F(ModelFolders, SinusoidsAndScales) {
  json document = bert();
  document["input"]["options"].update(json::parse(R"({
    "norm": null, "eps": null, "num_types": 0, "position_rule": "roberta", "positions": "sinusoidal",
    "max_positions": null, "scale": 4.0, "embedding_dim": 16, "padding_idx": 1})"));
  document["input"]["tensors"] = {{"token.weight", "words"}};
  const InputEmbedding embed = read(document, {{"words", torch::randn({29, 16})}});
  EXPECT_EQ(embed->options.scale(), 4.0);
  EXPECT_EQ(embed->options.positions(), Positions::sinusoidal);
}

TEST_F(ModelFolders, WhatDoesNotFitIsRefused) {
  Tensors values = tensors();
  values["gamma"] = torch::ones({7});
  EXPECT_NE(refusal(bert(), values).find("gamma: expected [8], got [7]"), std::string::npos);
  values = tensors();
  values["words"] = torch::ones({28, 8});
  EXPECT_NE(refusal(bert(), values).find("words: expected [29, 8], got [28, 8]"), std::string::npos);
  json document = bert();
  document["input"]["tensors"]["positions"] = "types";
  EXPECT_NE(refusal(document, tensors()).find("no parameter positions"), std::string::npos);
  document = bert();
  document["input"]["tensors"].erase("norm.bias");
  EXPECT_NE(refusal(document, tensors()).find("expected 5 tensors, got 4"), std::string::npos);
  for (const char* key : {"position_rule", "positions", "norm"}) {
    json other = bert();
    other["input"]["options"][key] = "mine";
    const std::string message = refusal(other, tensors());
    EXPECT_NE(message.find(std::string(key) + ": expected one of ['"), std::string::npos);
    EXPECT_NE(message.find("got \"mine\""), std::string::npos) << message;
  }
  document["input"]["options"].erase("eps");
  EXPECT_NE(refusal(document, tensors()).find("positions.json: input: "), std::string::npos);
  document["input"] = nullptr;
  EXPECT_NE(refusal(document, tensors()).find("'bert' has no input layer that is known"), std::string::npos);
}

TEST_F(ModelFolders, RowsOfOneTableAndTheWidthOfAnotherTakeNoMemory) {
  json document = bert();
  document["input"]["options"].update({{"num_embeddings", int64_t{1} << 40}, {"embedding_dim", int64_t{1} << 20}});
  EXPECT_NE(refusal(document, tensors()).find("words: expected [1099511627776, 1048576]"), std::string::npos);
}

}  // namespace
}  // namespace posembed
