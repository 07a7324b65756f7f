#include "core/instruction_set.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace posembed::core {
namespace {

/// The instruction set that a fresh process chooses when POSEMBED_INSTRUCTION_SET is `value`. The
/// choice is made once per process, so a child answers by its exit status.
int chosen_under(const char* value, const char* said = "") {
  int chosen = -1;
  const auto choose = [&] {
    setenv("POSEMBED_INSTRUCTION_SET", value, 1);
    std::exit(static_cast<int>(instruction_set()));
  };
  EXPECT_EXIT(
      choose(), [&](int status) { return WIFEXITED(status) && (chosen = WEXITSTATUS(status)) >= 0; }, said);
  return chosen;
}

TEST(InstructionSet, EnvironmentLowersIt) {
  EXPECT_EQ(chosen_under("baseline"), static_cast<int>(InstructionSet::baseline));
}

TEST(InstructionSet, EnvironmentNeverRaisesItAboveTheProcessor) {
  EXPECT_LE(chosen_under("avx2"), chosen_under("avx512"));
}

TEST(InstructionSet, UnknownNamesAreSaidAndLeaveIt) {
  const char* said = "expected one of those built .*, got 'AVX2'";
  EXPECT_EQ(chosen_under("AVX2", said), chosen_under("avx512"));
}

TEST(InstructionSet, HasAName) {
  EXPECT_STREQ(name(InstructionSet::baseline), "baseline");
  EXPECT_STREQ(name(InstructionSet::avx2), "avx2");
  EXPECT_STREQ(name(InstructionSet::avx512), "avx512");
}

}  // namespace
}  // namespace posembed::core
