// Tests InputEmbedding::from_huggingface: parameters and options from models' folders, and errors.
#include "posembed/input.h"

#include <c10/util/Exception.h>

#include "configuration/temporary_folder.h"

namespace posembed {
namespace {

using Tensors = std::map<std::string, torch::Tensor>;

class ModelFolders : public TemporaryFolder {
 protected:
  /// BERT's tensors, with a prefix and the given names of the norm's parameters.
  static Tensors bert(const std::string& prefix = "", const std::string& weight = "weight",
                      const std::string& bias = "bias") {
    const std::string start = prefix + "embeddings.";
    return {{start + "word_embeddings.weight", torch::randn({29, 8})},
            {start + "position_embeddings.weight", torch::randn({12, 8})},
            {start + "token_type_embeddings.weight", torch::randn({2, 8})},
            {start + "LayerNorm." + weight, torch::randn({8})},
            {start + "LayerNorm." + bias, torch::randn({8})}};
  }

  /// The layer's output, computed by hand from the folder's tensors.
  static torch::Tensor bert_output(const Tensors& tensors, const torch::Tensor& ids, double eps,
                                   const std::string& prefix = "",
                                   const std::string& weight = "weight",
                                   const std::string& bias = "bias") {
    const auto of = [&](const std::string& name) {
      return tensors.at(prefix + "embeddings." + name);
    };
    const torch::Tensor sum = of("word_embeddings.weight").index_select(0, ids.flatten()) +
                              of("position_embeddings.weight").narrow(0, 0, ids.numel()) +
                              of("token_type_embeddings.weight")[0];
    return torch::layer_norm(sum, {8}, of("LayerNorm." + weight), of("LayerNorm." + bias), eps)
        .unsqueeze(0);
  }

  void write_config(const std::string& text) const { write("config.json", text); }

  std::string refusal() const {
    return message_of<c10::ValueError>([&] { InputEmbedding::from_huggingface(folder()); });
  }
};

const torch::Tensor& some_ids() {
  static const torch::Tensor ids = torch::tensor({{3, 5, 1, 28}});
  return ids;
}

TEST_F(ModelFolders, BertIsReadWithItsOptions) {
  const Tensors tensors = bert();
  write_tensors("model.safetensors", tensors);
  write_config(R"({"model_type": "bert", "layer_norm_eps": 0.01, "hidden_dropout_prob": 0.25,
                   "pad_token_id": 3})");
  InputEmbedding embed = InputEmbedding::from_huggingface(folder());
  EXPECT_FALSE(embed->is_training());
  EXPECT_EQ(embed->options.dropout(), 0.25);
  EXPECT_EQ(embed->options.padding_idx(), 3);
  const torch::Tensor expected = bert_output(tensors, some_ids(), 0.01);
  EXPECT_TRUE(torch::allclose(embed->forward(some_ids()), expected, 1e-5, 1e-5));
}

TEST_F(ModelFolders, MissingKeysHaveTheValuesOfTheClass) {
  write_tensors("model.safetensors", bert());
  write_config(R"({"model_type": "bert"})");
  const InputOptions bert_options = InputEmbedding::from_huggingface(folder())->options;
  EXPECT_EQ(bert_options.eps(), 1e-12);
  EXPECT_EQ(bert_options.dropout(), 0.1);
  EXPECT_EQ(bert_options.padding_idx(), 0);
  write_config(R"({"model_type": "roberta"})");
  const InputOptions options = InputEmbedding::from_huggingface(folder())->options;
  EXPECT_EQ(options.padding_idx(), 1);
  EXPECT_EQ(options.max_positions(), 10);
  EXPECT_EQ(options.position_rule(), PositionRule::roberta);
}

TEST_F(ModelFolders, ModelsWithAHeadAndOldNamesAndSeveralFiles) {
  const Tensors tensors = bert("bert.", "gamma", "beta");
  Tensors parts[2];
  std::string map;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = parts[0].size() <= parts[1].size() ? 0 : 1;
    parts[part][name] = tensor;
    map +=
        (map.empty() ? "\"" : ",\"") + name + "\":\"part" + std::to_string(part) + ".safetensors\"";
  }
  write_tensors("part0.safetensors", parts[0]);
  write_tensors("part1.safetensors", parts[1]);
  write("model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":{" + map + "}}");
  write_config(R"({"model_type": "bert"})");
  InputEmbedding embed = InputEmbedding::from_huggingface(folder());
  const torch::Tensor expected = bert_output(tensors, some_ids(), 1e-12, "bert.", "gamma", "beta");
  EXPECT_TRUE(torch::allclose(embed->forward(some_ids()), expected, 1e-5, 1e-5));
}

TEST_F(ModelFolders, OptProjectsItsTokens) {
  const Tensors tensors = {{"model.decoder.embed_tokens.weight", torch::randn({29, 4})},
                           {"model.decoder.embed_positions.weight", torch::randn({14, 8})},
                           {"model.decoder.project_in.weight", torch::randn({8, 4})}};
  write_tensors("model.safetensors", tensors);
  write_config(R"({"model_type": "opt", "dropout": 0.1, "pad_token_id": 1})");
  InputEmbedding embed = InputEmbedding::from_huggingface(folder());
  EXPECT_EQ(embed->options.token_dim(), 4);
  EXPECT_EQ(embed->options.max_positions(), 12);
  EXPECT_EQ(embed->options.dropout(), 0.0);
  const torch::Tensor rows =
      tensors.at("model.decoder.embed_tokens.weight").index_select(0, some_ids().flatten());
  const torch::Tensor expected =
      torch::mm(rows, tensors.at("model.decoder.project_in.weight").t()) +
      tensors.at("model.decoder.embed_positions.weight").narrow(0, 2, 4);
  EXPECT_TRUE(torch::allclose(embed->forward(some_ids())[0], expected, 1e-5, 1e-5));
}

TEST_F(ModelFolders, FairseqScalesSharedTablesAndHasSinusoids) {
  write_tensors("model.safetensors", {{"model.shared.weight", torch::randn({29, 16})}});
  write_config(R"({"model_type": "m2m_100", "dropout": 0.0})");
  InputEmbedding embed = InputEmbedding::from_huggingface(folder());
  EXPECT_EQ(embed->options.scale(), 4.0);
  EXPECT_EQ(embed->options.positions(), Positions::sinusoidal);
  write_config(R"({"model_type": "m2m_100", "scale_embedding": false})");
  EXPECT_EQ(InputEmbedding::from_huggingface(folder())->options.scale(), 1.0);
}

TEST_F(ModelFolders, OtherFoldersAreRefused) {
  write_config(R"({"model_type": "bert"})");
  EXPECT_NE(refusal().find("expected a folder with model.safetensors or "), std::string::npos);
  Tensors tensors = bert();
  tensors.erase("embeddings.token_type_embeddings.weight");
  write_tensors("model.safetensors", tensors);
  EXPECT_NE(refusal().find("expected a tensor embeddings.token_type_embeddings.weight"),
            std::string::npos);
  tensors = bert();
  tensors["embeddings.LayerNorm.weight"] = torch::ones({7});
  write_tensors("model.safetensors", tensors);
  EXPECT_NE(refusal().find("embeddings.LayerNorm.weight: expected [8], got [7]"),
            std::string::npos);
  write_config(R"({"model_type": "bert", "position_embedding_type": "relative_key"})");
  EXPECT_NE(refusal().find("position_embedding_type: expected 'absolute', got 'relative_key'"),
            std::string::npos);
  write_config(R"({"model_type": "t5"})");
  EXPECT_NE(refusal().find("opt, m2m_100, nllb-moe, fsmt, got 't5'"), std::string::npos);
}

}  // namespace
}  // namespace posembed
