// Tests ALiBiOptions::from_config.
#include "posembed/alibi.h"

#include <c10/util/Exception.h>

#include "configuration/temporary_folder.h"

namespace posembed {
namespace {

using AlibiConfigurations = TemporaryFolder;

std::string refusal_of(const std::string& config) {
  return message_of<c10::ValueError>([&] { ALiBiOptions::from_config(config); });
}

TEST_F(AlibiConfigurations, PresetsHaveTheModelsNumbers) {
  write("config.json", R"({"model_type": "bloom", "n_head": 16})");
  EXPECT_EQ(ALiBiOptions::from_config(folder()).num_heads(), 16);
  const auto mpt = ALiBiOptions::from_config(
      R"({"model_type": "mpt", "n_heads": 8, "attn_config": {"alibi": true, "alibi_bias_max": 4}})");
  EXPECT_EQ(mpt.max_bias(), 4.0);
  const auto falcon = ALiBiOptions::from_config(
      R"({"model_type": "falcon", "alibi": true, "hidden_size": 64, "num_attention_heads": 4})");
  EXPECT_EQ(falcon.factor(), 4.0);
  const auto jais = ALiBiOptions::from_config(
      R"({"model_type": "jais", "n_head": 4, "position_embedding_type": "alibi",
          "alibi_scaling": {"type": "linear", "train_seq_len": 2048}})");
  EXPECT_EQ(jais.train_length(), 2048);
  const auto jina = ALiBiOptions::from_config(
      R"({"model_type": "bert", "num_attention_heads": 8, "position_embedding_type": "alibi"})");
  EXPECT_FALSE(jina.causal());
}

TEST_F(AlibiConfigurations, OtherModelsAreRefused) {
  EXPECT_NE(refusal_of(R"({"model_type": "llama"})").find("model_type: expected one of 'bloom'"),
            std::string::npos);
  EXPECT_NE(refusal_of(R"({"model_type": "falcon", "alibi": false})")
                .find("alibi: the model does not use ALiBi, got False"),
            std::string::npos);
  EXPECT_NE(refusal_of(R"({"model_type": "bloom", "n_head": 4, "alibi_new": 1})")
                .find("unknown keys ['alibi_new']"),
            std::string::npos);
}

}  // namespace
}  // namespace posembed
