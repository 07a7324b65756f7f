// Compares the gradient of rotary frequencies, from the kernel of every instruction set and the
// source of the CUDA kernel run on the CPU, with the sum in long double.
#include <cuda_runtime.h>

// Renamed, because the library may contain the real launcher.
#define sum_moments_cuda sum_moments_cuda_on_cpu
#include "copies.h"
#include "rotary/call.h"
#include "rotary/rotary_backward_cuda.cu"

namespace posembed::rotary {
namespace {

struct Copy {
  const char* name;
  void (*sum)(const Arguments&, double*, int64_t, int64_t);
};

std::vector<Copy> copies() {
  std::vector<Copy> result;
  POSEMBED_ADD_COPIES(result, isa::sum_moments)
  return result;
}

std::vector<double> totals(const Arguments& call, const std::vector<double>& sums) {
  std::vector<double> result;
  for (int64_t i = 0; i < call.pairs; ++i) {
    result.push_back(total_of(sums.data(), chunks_of(call.batch * call.seq), call.pairs, i));
  }
  return result;
}

std::vector<double> room_for_sums(const Arguments& call) {
  return std::vector<double>(static_cast<size_t>(chunks_of(call.batch * call.seq) * call.pairs));
}

/// A pair's sum, and the sum of its terms' magnitudes, to which rounding errors are proportional.
struct Expected {
  long double sum = 0, size = 0;
};

std::vector<Expected> reference(const Problem& problem, Call& call) {
  std::vector<Expected> result(static_cast<size_t>(problem.pairs));
  for (int64_t b = 0; b < problem.batch; ++b)
    for (int64_t s = 0; s < problem.seq; ++s) {
      const std::vector<core::Position> positions = call.positions(b, s);
      if (leaves_token(call.arguments, positions)) continue;
      for (int64_t h = 0; h < problem.heads[0]; ++h)
        for (int64_t i = 0; i < problem.pairs; ++i) {
          const auto value = [&](int64_t r, int64_t member) -> long double {
            const int64_t component = problem.interleaved ? 2 * i + member : i + member * problem.pairs;
            return element(call.input(r).data(), problem.scalar,
                           call.row_offset(r, b, s, h) + problem.start + component);
          };
          const long double position = core::to_double(positions[static_cast<size_t>(i % problem.axes)]);
          const long double up = value(1, 1) * value(0, 0), down = value(1, 0) * value(0, 1);
          Expected& expected = result[static_cast<size_t>(i)];
          expected.sum += (problem.reverse ? -position : position) * (up - down);
          expected.size += std::fabs(position) * (std::fabs(up) + std::fabs(down));
        }
    }
  return result;
}

void compare(const Problem& problem, const std::vector<Expected>& expected, const std::vector<double>& found,
             double one_rounding) {
  // Each term is rounded once per head; tokens are added in double.
  const double allowed = one_rounding * static_cast<double>(problem.heads[0] + 2);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(found[i], static_cast<double>(expected[i].sum), allowed * static_cast<double>(expected[i].size))
        << "pair " << i << ", " << problem.text();
  }
}

/// Checks that every variant gives the same bits for any division of chunks among threads.
void check(const Problem& problem) {
  Call call(problem);
  const Arguments& arguments = call.arguments;
  const std::vector<Expected> expected = reference(problem, call);
  const double one_rounding = problem.scalar == Scalar::float64 ? 0x1p-52 : 0x1p-23;
  const int64_t chunks = chunks_of(arguments.batch * arguments.seq);
  std::vector<double> first;
  for (const auto& [name, sum] : copies()) {
    std::vector<double> sums = room_for_sums(arguments);
    sum(arguments, sums.data(), chunks / 2, chunks);
    sum(arguments, sums.data(), 0, chunks / 2);
    const std::vector<double> found = totals(arguments, sums);
    ASSERT_NO_FATAL_FAILURE(compare(problem, expected, found, one_rounding));
    if (first.empty()) first = found;
    ASSERT_EQ(found, first) << name << ", " << problem.text();
  }
  std::vector<double> sums = room_for_sums(arguments), found(static_cast<size_t>(problem.pairs));
  ASSERT_EQ(sum_moments_cuda(arguments, sums.data(), found.data(), Scalar::float64, nullptr), nullptr);
  ASSERT_NO_FATAL_FAILURE(compare(problem, expected, found, one_rounding));
}

TEST(RotaryFrequencyGradient, EverySizeOfWindow) {
  for (const Scalar scalar : scalars) {
    for (int64_t pairs = 0; pairs <= 70; pairs += pairs < 12 ? 1 : 7) {
      for (const bool interleaved : {false, true}) {
        Problem problem;
        problem.scalar = scalar;
        problem.pairs = pairs;
        problem.start = pairs % 3;
        problem.head_dim = problem.start + 2 * pairs + pairs % 5;
        problem.interleaved = interleaved;
        problem.heads[1] = problem.heads[0];
        problem.reverse = pairs % 2 == 1;
        problem.seq = 3;
        problem.offset = 1000;
        ASSERT_NO_FATAL_FAILURE(check(problem));
      }
    }
  }
}

TEST(RotaryFrequencyGradient, LayoutsAndPositions) {
  for (const Order order : {Order::bshd, Order::bhsd, Order::sbhd}) {
    Problem problem;
    problem.order = order;
    problem.heads[1] = problem.heads[0];
    problem.padding = 3;
    problem.seq = 4;
    problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3};
    ASSERT_NO_FATAL_FAILURE(check(problem));
  }
}

TEST(RotaryFrequencyGradient, AnAxisForEachPair) {
  Problem problem;
  problem.heads[1] = problem.heads[0];
  problem.pairs = 29;
  problem.seq = 3;
  problem.axes = 3;
  problem.positions = {0, 131071, -1, 7, 5, 1, 9, 8, 3, 7, -1, 2, 6, 2147483647, 5, 4, 3, 2};
  ASSERT_NO_FATAL_FAILURE(check(problem));
}

TEST(RotaryFrequencyGradient, FractionalPositions) {
  Problem problem;
  problem.heads[1] = problem.heads[0];
  problem.fractions = {0.5, -0.25, 1e-3, 131071.75, -1, 1e6 + 0.1, -7, 1.0 / 3, 2, 0};
  ASSERT_NO_FATAL_FAILURE(check(problem));
}

TEST(RotaryFrequencyGradient, DocumentsAndManyChunks) {
  Problem problem;
  problem.batch = 1;
  problem.seq = 9000;  // more than the largest number of chunks of the smallest size
  problem.heads[0] = problem.heads[1] = 2;
  problem.head_dim = 8;
  problem.pairs = 4;
  problem.documents = {0, 17, 17, 4096, 9000};
  ASSERT_GT(tokens_of_chunk(problem.seq), tokens_of_chunk(1));
  ASSERT_NO_FATAL_FAILURE(check(problem));
}

TEST(RotaryFrequencyGradient, LargestWindow) {
  Problem problem;
  problem.heads[1] = problem.heads[0];
  problem.pairs = max_pairs;
  problem.head_dim = 2 * max_pairs;
  ASSERT_NO_FATAL_FAILURE(check(problem));
}

TEST(RotaryFrequencyGradient, NothingToSum) {
  for (const int64_t batch : {0, 2}) {
    Problem problem;
    problem.batch = batch;
    problem.seq = batch == 0 ? 3 : 0;
    problem.heads[1] = problem.heads[0];
    ASSERT_NO_FATAL_FAILURE(check(problem));
  }
}

}  // namespace
}  // namespace posembed::rotary
