// Every C++ module in what torch does with modules: copies, files, casts, Sequential, gradients
// without Python, and CUDA beside the CPU, values and gradients. Values themselves:
// tests/python/test_parity.py. Without a GPU its tests skip.
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "posembed/posembed.h"

namespace {

using torch::Tensor;
using Pointer = std::shared_ptr<torch::nn::Module>;

/// How a module is made and called, alone and in a Sequential.
struct Row {
  std::string name;
  std::function<Pointer()> make;
  std::function<Tensor(const Pointer&, torch::Device)> call;
  std::function<Tensor(const Pointer&)> call_in_sequential;
};

Tensor on(torch::Device device, const Tensor& input) { return input.to(device); }
int64_t on(torch::Device, int64_t length) { return length; }

template <typename Module, typename Options, typename Input>
Row row(const char* name, const Options& options, const Input& input) {
  using Impl = typename Module::ContainedType;
  return {name,
          [=] {
            torch::manual_seed(0);
            return Module(options).ptr();
          },
          [=](const Pointer& module, torch::Device device) {
            return std::dynamic_pointer_cast<Impl>(module)->forward(on(device, input));
          },
          [=](const Pointer& module) {
            torch::nn::Sequential model(std::dynamic_pointer_cast<Impl>(module));
            return model->forward(input);
          }};
}

std::vector<Row> rows() {
  using namespace posembed;  // NOLINT
  torch::manual_seed(1);
  const Tensor ids = torch::tensor({{1, 5, 1}, {0, 2, 5}}), x = torch::randn({2, 3, 16});
  const Tensor heads = torch::randn({2, 3, 4, 16}), points = torch::rand({4, 2});
  const auto ngrams = NgramSpec().multipliers({3, 5, 7}).moduli({11, 13, 17, 19}).boundary(2);
  const auto input = InputOptions(6, 16).positions(Positions::learned).max_positions(8);
  return {
      row<TokenEmbedding>("token", TokenOptions(6, 16).padding_idx(0).scale(3.0), ids),
      row<TokenEmbedding>("rows", TokenOptions(6, 16).gradient(TableGradient::rows), ids),
      row<TokenBag>("bag", TokenBagOptions(6, 16).padding_idx(2), ids),
      row<TokenBag>("means", TokenBagOptions(6, 16).mode(BagMode::mean), ids),
      row<TokenBag>("maxima", TokenBagOptions(6, 16).mode(BagMode::max), ids),
      row<NgramEmbedding>("n-grams", NgramOptions(ngrams, 8).gradient(TableGradient::rows), ids),
      row<LearnedPositionalEmbedding>("learned", LearnedOptions(10, 16).first_row(2), x),
      row<SinusoidalPositionalEmbedding>("sinusoidal", SinusoidalOptions(16).preset("ddpm"), x),
      row<FourierFeatures>("perceiver", FourierOptions::preset("perceiver"), points),
      row<FourierFeatures>("drawn", FourierOptions::preset("gaussian"), points.narrow(1, 0, 1)),
      row<RotaryEmbedding>("rotary", RotaryOptions(16).base(500000.0), heads),
      row<RotaryEmbedding>("learned rotary", RotaryOptions(16).learned_frequencies(true), heads),
      row<ALiBi>("shard of ALiBi", ALiBiOptions(12).total_heads(16).head_start(4), int64_t{5}),
      row<ALiBi>("learned ALiBi", ALiBiOptions(4).causal(false).learned(true), int64_t{5}),
      row<RelativePositionBias>("bias", RelativeBiasOptions(4), int64_t{5}),
      row<RelativeLogits>("logits", RelativeLogitsOptions(5, 16), heads),
      row<InputEmbedding>("input", InputOptions(input).num_types(2).norm(InputNorm::layer), ids),
  };
}

Tensor call(const Row& row, const Pointer& module) { return row.call(module, torch::kCPU); }

void expect_own_memory(const Pointer& copy, const Pointer& module, const std::string& name) {
  const auto ours = module->parameters(), others = copy->parameters();
  ASSERT_EQ(ours.size(), others.size()) << name;
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_NE(ours[i].data_ptr(), others[i].data_ptr()) << name;
    EXPECT_EQ(ours[i].requires_grad(), others[i].requires_grad()) << name;
  }
}

TEST(Modules, ClonesAreApart) {
  for (const Row& row : rows()) {
    const Pointer module = row.make();
    for (Tensor& parameter : module->parameters()) parameter.requires_grad_(row.name != "token");
    const Tensor expected = call(row, module);
    const Pointer copy = module->clone();
    expect_own_memory(copy, module, row.name);
    EXPECT_TRUE(torch::equal(call(row, copy), expected)) << row.name;
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : copy->parameters()) parameter.add_(1);
    EXPECT_TRUE(torch::equal(call(row, module), expected)) << row.name;
    EXPECT_TRUE(module->parameters().empty() || !torch::equal(call(row, copy), expected));
  }
}

TEST(Modules, FilesKeepTheirState) {
  for (const Row& row : rows()) {
    const Pointer module = row.make(), other = row.make();
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : module->parameters()) parameter.add_(1);
    for (Tensor& buffer : module->buffers()) {
      if (buffer.is_floating_point()) buffer.add_(1);
    }
    torch::serialize::OutputArchive saved;
    module->save(saved);
    std::stringstream file;
    saved.save_to(file);
    torch::serialize::InputArchive read;
    read.load_from(file);
    other->load(read);
    EXPECT_TRUE(torch::equal(call(row, other), call(row, module))) << row.name;
  }
}

/// What is derived from options is not cast. ALiBi's bias takes the module's dtype.
TEST(Modules, CastsLeaveModulesWithoutParametersAsTheyAre) {
  for (const Row& row : rows()) {
    const Pointer module = row.make(), copy = module->clone();
    if (!module->parameters().empty()) continue;
    copy->to(torch::kHalf);
    copy->to(torch::kCPU, torch::kBFloat16);
    const Tensor expected = call(row, module), found = call(row, copy);
    EXPECT_TRUE(torch::equal(found, expected.to(found.scalar_type()))) << row.name;
    EXPECT_TRUE(found.scalar_type() == torch::kFloat || row.name == "shard of ALiBi") << row.name;
  }
}

TEST(Modules, StandInASequential) {
  for (const Row& row : rows()) {
    const Pointer module = row.make();
    EXPECT_TRUE(torch::equal(row.call_in_sequential(module), call(row, module))) << row.name;
  }
}

TEST(Modules, GradientsFlowWithoutPython) {
  for (const Row& row : rows()) {
    const Pointer module = row.make();
    const Tensor result = call(row, module);
    EXPECT_EQ(result.requires_grad(), !module->parameters().empty()) << row.name;
    if (!result.requires_grad()) continue;
    result.pow(3).sum().backward();
    for (const auto& parameter : module->named_parameters()) {
      ASSERT_TRUE(parameter.value().grad().defined()) << row.name << " " << parameter.key();
      EXPECT_TRUE(parameter.value().grad().to_dense().any().item<bool>()) << row.name;
    }
  }
}

class ModulesCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device on this machine";
    if (posembed::build_info().cuda_version.empty()) GTEST_SKIP() << "posembed is built for CPU";
    torch::manual_seed(0);
  }
};

void expect_close(const Tensor& cuda, const Tensor& cpu, const std::string& name) {
  const Tensor found = cuda.to_dense().cpu(), expected = cpu.to_dense();
  EXPECT_TRUE(torch::allclose(found, expected, 1e-5, 1e-5)) << name;
}

TEST_F(ModulesCuda, EveryModule) {
  for (const Row& row : rows()) {
    const Pointer cpu = row.make(), cuda = row.make();
    cuda->to(torch::kCUDA);
    const Tensor expected = call(row, cpu), found = row.call(cuda, torch::kCUDA);
    ASSERT_TRUE(found.is_cuda()) << row.name;
    expect_close(found.detach(), expected.detach(), row.name);
    if (!found.requires_grad()) continue;
    for (const Tensor& result : {expected, found}) result.pow(2).sum().backward();
    for (size_t i = 0; i < cpu->parameters().size(); ++i) {
      expect_close(cuda->parameters()[i].grad(), cpu->parameters()[i].grad(), row.name);
    }
  }
}

TEST_F(ModulesCuda, BadIdIsRaisedLaterAndTheContextLives) {
  posembed::TokenEmbedding token(posembed::TokenOptions(6, 16));
  token->to(torch::kCUDA);
  const Tensor rows = token->forward(torch::tensor({1, 99, 2}).to(torch::kCUDA));
  EXPECT_THROW(posembed::check_errors(), c10::IndexError);
  EXPECT_EQ(rows[1].abs().sum().item<float>(), 0.0f);
  posembed::check_errors();
  EXPECT_EQ(torch::ones({4}, torch::kCUDA).sum().item<float>(), 4.0f);
}

TEST(Errors, NoneOnTheCpu) { EXPECT_NO_THROW(posembed::check_errors()); }

}  // namespace
