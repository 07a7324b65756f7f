// Tests the step's kernels: every instruction set gives the same bits, and the CUDA source, run on
// the CPU by tests/cpp/cuda_on_cpu, gives them too, but for the order of a row's sum of squares.
// Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define step_cuda step_cuda_on_cpu
#include "copies.h"
#include "optim/optim_cuda.cu"

namespace posembed::optim {
namespace {

constexpr int64_t rows = 9;
const std::vector<int32_t> ids = {0, 3, 4, 8};

/// What a step reads and writes, as bytes; two states are equal if all bytes are.
struct State {
  std::vector<char> weight, gradient, first, second, owed;
  std::vector<int16_t> remainder;

  bool operator==(const State& other) const {
    return weight == other.weight && first == other.first && second == other.second && remainder == other.remainder;
  }
};

struct Problem {
  core::Scalar scalar;
  int64_t dim;
  bool has_first;
  Second second;
  Store store = Store::nearest;
  bool wide = false;
};

std::vector<char> numbers(int64_t count, core::Scalar scalar, bool positive = false) {
  std::mt19937 generator(static_cast<unsigned>(count + positive));
  std::normal_distribution<float> normal;
  std::vector<char> bytes(static_cast<size_t>(count * core::size_of(scalar)));
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* values = reinterpret_cast<T*>(bytes.data());
    for (int64_t i = 0; i < count; ++i) {
      const float value = normal(generator);
      core::store(static_cast<Compute<T>>(positive ? std::abs(value) : value), values + i);
    }
  });
  return bytes;
}

State state_of(const Problem& p) {
  const auto compute = p.scalar == core::Scalar::float64 ? core::Scalar::float64 : core::Scalar::float32;
  const auto count = static_cast<int64_t>(ids.size());
  return {numbers(rows * p.dim, p.scalar),
          numbers(count * p.dim + 1, p.wide ? core::Scalar::float32 : p.scalar),
          numbers(rows * p.dim + 2, compute),
          numbers(rows * p.dim + 3, compute, /*positive=*/true),
          numbers(count * 3, compute, /*positive=*/true),
          std::vector<int16_t>(static_cast<size_t>(rows * p.dim), 77)};
}

Arguments arguments_of(const Problem& p, State* state) {
  Arguments a;
  a.weight = state->weight.data();
  a.scalar = p.scalar;
  a.rows = rows;
  a.dim = a.weight_stride = a.gradient_stride = p.dim;
  a.ids = {ids.data(), core::Index::int32};
  a.gradient = state->gradient.data();
  a.wide_gradient = p.wide;
  a.count = static_cast<int64_t>(ids.size());
  if (p.has_first) a.first = state->first.data();
  if (p.second != Second::none) a.second = state->second.data();
  a.second_of_rows = p.second == Second::row;
  a.owed = state->owed.data();
  a.numbers = {-0.5, 0.9, 0.1, 0.8, 0.2, 1.5, 1e-8, 0.3, 0.97};
  a.store = p.store;
  if (p.store == Store::remainder) a.remainder = state->remainder.data();
  a.key = 5;
  a.first_row = 2;
  return a;
}

/// The largest distance between two lists of numbers in float32 or bfloat16.
double distance(const std::vector<char>& left, const std::vector<char>& right, core::Scalar type) {
  double most = 0;
  const auto count = static_cast<int64_t>(left.size()) / core::size_of(type);
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::abs(core::read_floating<double>(left.data(), type, i) -
                                   core::read_floating<double>(right.data(), type, i)));
  }
  return most;
}

void check(const Problem& p) {
  struct Copy {
    const char* name;
    void (*function)(const Arguments&, int64_t, int64_t);
  };
  std::vector<Copy> copies;
  POSEMBED_ADD_COPIES(copies, isa::step)
  const auto count = static_cast<int64_t>(ids.size());
  State expected = state_of(p);
  step_cpu(arguments_of(p, &expected), 0, count);
  for (const Copy& copy : copies) {
    State found = state_of(p);
    const Arguments arguments = arguments_of(p, &found);
    for (int64_t row = count; row-- > 0;) copy.function(arguments, row, row + 1);
    ASSERT_TRUE(found == expected) << copy.name << ", dim " << p.dim;
  }
  State found = state_of(p);
  ASSERT_EQ(step_cuda(arguments_of(p, &found), nullptr), nullptr);
  if (p.second != Second::row) {
    ASSERT_TRUE(found == expected) << "CUDA, dim " << p.dim;
  } else {
    const double ulp = p.scalar == core::Scalar::bfloat16 ? 0x1p-6 : 1e-5;
    ASSERT_LE(distance(found.weight, expected.weight, p.scalar), ulp) << "CUDA, dim " << p.dim;
  }
}

TEST(StepKernels, GiveTheSameBits) {
  const core::Scalar scalars[] = {core::Scalar::float32, core::Scalar::float64, core::Scalar::bfloat16};
  for (const auto scalar : scalars) {
    for (const int64_t dim : {1, 7, 8, 33, 130, 256, 300}) {
      for (const bool has_first : {false, true}) {
        for (const auto second : {Second::none, Second::row, Second::element}) {
          ASSERT_NO_FATAL_FAILURE(check({scalar, dim, has_first, second}));
        }
      }
    }
  }
}

TEST(StepKernels, RoundBfloat16InTheSameWay) {
  for (const int64_t dim : {1, 7, 9, 130, 300}) {
    for (const bool wide : {false, true}) {
      for (const auto store : {Store::nearest, Store::stochastic, Store::remainder}) {
        ASSERT_NO_FATAL_FAILURE(check({core::Scalar::bfloat16, dim, true, Second::element, store, wide}));
      }
    }
  }
}

TEST(StepKernels, LeaveOutRowsThatAreOutsideOrNotInOrder) {
  const Problem p{core::Scalar::float32, 40, false, Second::none};
  for (const std::vector<int32_t>& wrong :
       std::vector<std::vector<int32_t>>{{0, 3, 4, 9}, {-1, 3, 4, 8}, {0, 3, 3, 8}, {0, 3, 1, 8}}) {
    State state = state_of(p);
    const State before = state;
    Arguments arguments = arguments_of(p, &state);
    core::DeviceError error = {};
    arguments.ids.data = wrong.data();
    arguments.error = &error;
    ASSERT_EQ(step_cuda(arguments, nullptr), nullptr);
    EXPECT_EQ(error.state, 2u);
    int64_t changed = 0;
    for (size_t row = 0; row < rows; ++row) {
      const size_t bytes = static_cast<size_t>(p.dim) * sizeof(float);
      changed += memcmp(state.weight.data() + row * bytes, before.weight.data() + row * bytes, bytes) != 0;
    }
    EXPECT_EQ(changed, 3);
  }
}

}  // namespace
}  // namespace posembed::optim
