// Tests that memory of freed large results is kept and reused for later ones.
#include <gtest/gtest.h>
#include <posembed/memory.h>
#include <posembed/rotary.h>
#include <torch/torch.h>

namespace {

constexpr int64_t mebibyte = int64_t{1} << 20;

/// float32, 64 MiB: malloc maps blocks of this size from the system.
torch::Tensor rotated(const torch::Tensor& query) { return posembed::RotaryEmbedding(64)->forward(query); }

class OutputMemory : public testing::Test {
 protected:
  void SetUp() override {
    posembed::set_cache_limit(512 * mebibyte);
    posembed::empty_cache();
  }
  torch::NoGradGuard no_grad;
  torch::Tensor query = torch::ones({1, 8192, 32, 64});
};

TEST_F(OutputMemory, FreedResultServesTheNext) {
  torch::Tensor first = rotated(query);
  const torch::Tensor values = first.slice(1, 5000, 5002).clone();
  const void* const address = first.const_data_ptr();
  first.reset();
  const torch::Tensor second = rotated(query);
  EXPECT_EQ(second.const_data_ptr(), address);
  EXPECT_TRUE(second.slice(1, 5000, 5002).equal(values));
  EXPECT_EQ(posembed::empty_cache(), 0);
}

TEST_F(OutputMemory, LimitHolds) {
  posembed::set_cache_limit(100 * mebibyte);
  {
    const torch::Tensor first = rotated(query), second = rotated(query);
    EXPECT_NE(first.const_data_ptr(), second.const_data_ptr());
  }
  EXPECT_EQ(posembed::set_cache_limit(0), 100 * mebibyte);
  rotated(query);
  EXPECT_EQ(posembed::empty_cache(), 0);
}

TEST_F(OutputMemory, NegativeLimitIsRefused) { EXPECT_THROW(posembed::set_cache_limit(-1), c10::ValueError); }

/// Freed when the process ends, after static objects that were made later. ctest gives each test a
/// process of its own, whose exit code counts.
torch::Tensor survivor;

TEST_F(OutputMemory, ResultMayOutliveStaticObjects) {
  survivor = rotated(query);
  EXPECT_TRUE(survivor.slice(1, 0, 1).equal(rotated(query.slice(1, 0, 1))));
}

}  // namespace
