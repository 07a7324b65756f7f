// Compares overlap checks of strided memory with the sets of all addresses.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "core/memory.h"

namespace posembed::core {
namespace {

struct Block {
  int64_t address = 0, item_size = 4;
  std::vector<int64_t> size, stride;

  StridedMemory memory() const {
    return {static_cast<uintptr_t>(address), item_size, size.data(), stride.data(), static_cast<int64_t>(size.size())};
  }

  /// The address of every index; indices that share an address repeat it.
  std::vector<int64_t> addresses() const {
    std::vector<int64_t> result = {address};
    for (size_t i = 0; i < size.size(); ++i) {
      std::vector<int64_t> longer;
      for (const int64_t begin : result)
        for (int64_t index = 0; index < size[i]; ++index) longer.push_back(begin + index * stride[i] * item_size);
      result = longer;
    }
    return result;
  }

  std::set<int64_t> bytes() const {
    std::set<int64_t> result;
    for (const int64_t begin : addresses())
      for (int64_t i = 0; i < item_size; ++i) result.insert(begin + i);
    return result;
  }
};

Block random_block(std::mt19937* random) {
  const auto pick = [&](int min, int max) { return std::uniform_int_distribution<int64_t>(min, max)(*random); };
  Block block;
  block.item_size = int64_t{1} << pick(0, 3);
  block.address = 10000 + pick(0, 60) * (pick(0, 3) == 0 ? 1 : 4);
  for (int64_t rank = pick(0, 4); rank > 0; --rank) {
    block.size.push_back(pick(0, 9) == 0 ? 0 : pick(1, 4));
    block.stride.push_back(pick(0, 30));
  }
  return block;
}

TEST(MemoryOverlap, OfTwoBlocksAgainstAllAddresses) {
  std::mt19937 random(1);
  int overlapping = 0;
  for (int i = 0; i < 20000; ++i) {
    const Block a = random_block(&random), b = random_block(&random);
    std::set<int64_t> bytes = a.bytes();
    bool expected = false;
    for (const int64_t byte : b.bytes()) expected = expected || bytes.count(byte) > 0;
    ASSERT_EQ(overlap(a.memory(), b.memory()), expected) << "case " << i;
    ASSERT_EQ(overlap(b.memory(), a.memory()), expected) << "case " << i;
    overlapping += expected ? 1 : 0;
  }
  EXPECT_GT(overlapping, 2000);
  EXPECT_LT(overlapping, 18000);
}

TEST(MemoryOverlap, OfABlockWithItselfAgainstAllAddresses) {
  std::mt19937 random(2);
  int overlapping = 0;
  for (int i = 0; i < 20000; ++i) {
    const Block block = random_block(&random);
    const std::vector<int64_t> all = block.addresses();
    const bool expected = std::set<int64_t>(all.begin(), all.end()).size() < all.size();
    ASSERT_EQ(overlaps_itself(block.memory()), expected) << "case " << i;
    overlapping += expected ? 1 : 0;
  }
  EXPECT_GT(overlapping, 2000);
  EXPECT_LT(overlapping, 18000);
}

TEST(MemoryOverlap, QueryAndKeyOfOnePackedTensor) {
  const std::vector<int64_t> stride = {8192 * 48 * 128, 48 * 128, 128, 1};
  const Block query{0, 2, {4, 8192, 32, 128}, stride};
  EXPECT_FALSE(overlap(query.memory(), Block{32 * 128 * 2, 2, {4, 8192, 8, 128}, stride}.memory()));
  EXPECT_TRUE(overlap(query.memory(), Block{31 * 128 * 2, 2, {4, 8192, 8, 128}, stride}.memory()));
  EXPECT_FALSE(overlaps_itself(query.memory()));
}

TEST(MemoryOverlap, OddStridesEndInTime) {
  // Even and odd addresses: the common divisor decides, not the number of candidates.
  const std::vector<int64_t> size = {100000, 100000, 100000};
  const Block a{0, 4, size, {6, 10, 14}}, b{4, 4, size, {22, 26, 34}};
  EXPECT_FALSE(overlap(a.memory(), b.memory()));
}

}  // namespace
}  // namespace posembed::core
