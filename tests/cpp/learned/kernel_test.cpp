// Compares the learned-position kernels with plain loops, on every instruction set of the
// processor.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "copies.h"
#include "learned/learned.h"
#include "values.h"

namespace posembed::learned {
namespace {

using core::Scalar;

struct Copy {
  const char* name;
  decltype(&baseline::add) add;
  decltype(&baseline::sum_batch) sum_batch;
};

std::vector<Copy> copies() {
  std::vector<Copy> all;
  POSEMBED_ADD_COPIES(all, isa::add, isa::sum_batch)
  return all;
}

template <typename T>
double rounded(double value) {
  T result;
  core::store(static_cast<core::Compute<T>>(value), &result);
  return static_cast<double>(core::load(result));
}

template <typename T>
class LearnedKernel : public testing::Test {};

using Scalars = testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(LearnedKernel, Scalars);

TYPED_TEST(LearnedKernel, AddsConsecutiveRowsToAnyStrides) {
  using T = TypeParam;
  const int64_t batch = 3, seq = 5, rows = 12;
  for (const int64_t dim : {1, 33, 64}) {
    const auto x = random_values<T>(batch * seq * (dim + 1), 1);  // stored [seq, batch, dim + 1]
    const auto weight = random_values<T>(rows * dim, 2);
    for (const Copy& copy : copies()) {
      std::vector<T> out(static_cast<size_t>(batch * seq * dim));
      AddArguments arguments;
      arguments.x = x.data();
      arguments.weight = weight.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.batch = batch;
      arguments.seq = seq;
      arguments.embedding_dim = arguments.weight_stride = dim;
      arguments.x_stride[0] = dim + 1;
      arguments.x_stride[1] = batch * (dim + 1);
      arguments.rows = rows;
      arguments.offset = 4;
      arguments.first_row = 2;
      copy.add(arguments, 0, 7);
      copy.add(arguments, 7, batch * seq);
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t s = 0; s < seq; ++s) {
          for (int64_t i = 0; i < dim; ++i) {
            const double expected = at(x, (s * batch + b) * (dim + 1) + i) + at(weight, (s + 6) * dim + i);
            ASSERT_EQ(at(out, (b * seq + s) * dim + i), rounded<T>(expected))
                << copy.name << " " << b << " " << s << " " << i;
          }
        }
      }
    }
  }
}

TYPED_TEST(LearnedKernel, AddsRowsOfGivenPositions) {
  using T = TypeParam;
  const int64_t batch = 2, seq = 3, rows = 9, dim = 40;
  const auto x = random_values<T>(batch * seq * dim, 3);
  const auto weight = random_values<T>(rows * dim, 4);
  const std::vector<int32_t> positions{6, 0, -2, 1, 1, 5};  // -2 with first_row 2: the table's first row
  for (const bool shared : {true, false}) {
    for (const Copy& copy : copies()) {
      std::vector<T> out(x.size());
      AddArguments arguments;
      arguments.x = x.data();
      arguments.weight = weight.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.batch = batch;
      arguments.seq = seq;
      arguments.embedding_dim = arguments.weight_stride = dim;
      arguments.x_stride[0] = seq * dim;
      arguments.x_stride[1] = dim;
      arguments.rows = rows;
      arguments.positions = {positions.data(), core::Index::int32};
      arguments.position_stride[0] = shared ? 0 : seq;
      arguments.position_stride[1] = 1;
      arguments.first_row = 2;
      copy.add(arguments, 0, batch * seq);
      for (int64_t token = 0; token < batch * seq; ++token) {
        const int64_t row = positions[static_cast<size_t>(shared ? token % seq : token)] + 2;
        for (int64_t i = 0; i < dim; ++i) {
          ASSERT_EQ(at(out, token * dim + i), rounded<T>(at(x, token * dim + i) + at(weight, row * dim + i)))
              << copy.name << " token " << token;
        }
      }
    }
  }
}

TYPED_TEST(LearnedKernel, SumsOverTheBatch) {
  using T = TypeParam;
  const int64_t batch = 300, seq = 3;
  for (const int64_t dim : {1, 11, 50}) {
    const std::vector<T> ones = [&] {
      std::vector<T> values(static_cast<size_t>(batch * seq * dim));
      for (T& value : values) core::store(core::Compute<T>(1), &value);
      return values;
    }();
    for (const Copy& copy : copies()) {
      std::vector<T> out(static_cast<size_t>(seq * dim));
      SumArguments arguments;
      arguments.gradient = ones.data();
      arguments.out = out.data();
      arguments.scalar = scalar_of<T>();
      arguments.batch = batch;
      arguments.seq = seq;
      arguments.embedding_dim = dim;
      copy.sum_batch(arguments, 0, 1);
      copy.sum_batch(arguments, 1, seq);
      // 300 is exact in every type, but a sum of ones in bfloat16 would stop at 256.
      for (int64_t i = 0; i < seq * dim; ++i) ASSERT_EQ(at(out, i), 300.0) << copy.name << " at " << i;
    }
  }
}

}  // namespace
}  // namespace posembed::learned
