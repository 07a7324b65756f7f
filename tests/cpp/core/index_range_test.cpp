// Tests the search for an index outside a range.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/index.h"

namespace posembed::core {
namespace {

TEST(IndexRange, FindsTheFirstValueOutside) {
  std::vector<int64_t> ids(2000, 5);
  const IndexView view{ids.data(), Index::int64};
  EXPECT_EQ(find_outside(view, 2000, 0, 6), -1);
  EXPECT_EQ(find_outside(view, 2000, 0, 5), 0);
  EXPECT_EQ(find_outside(view, 2000, 6, 9), 0);
  EXPECT_EQ(find_outside(view, 0, 0, 0), -1);
  for (const int64_t bad : {int64_t{-1}, int64_t{6}, std::numeric_limits<int64_t>::min(),
                            std::numeric_limits<int64_t>::max(), (int64_t{1} << 32) + 5}) {
    for (const size_t index : {size_t{0}, size_t{511}, size_t{512}, size_t{1999}}) {
      ids[index] = bad;
      EXPECT_EQ(find_outside(view, 2000, 0, 6), static_cast<int64_t>(index)) << bad;
      ids[index] = 5;
    }
  }
  ids[700] = -2;
  EXPECT_EQ(find_outside(view, 2000, -2, 6), -1);
  EXPECT_EQ(find_outside(view, 2000, -1, 6), 700);
}

}  // namespace
}  // namespace posembed::core
