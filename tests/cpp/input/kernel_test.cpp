// Compares the input kernels of every instruction set, and the source of the CUDA kernels, run on the CPU by
// tests/cpp/cuda_on_cpu, with plain loops in double; other forms of calls of the CUDA source with the CPU's kernels.
// Needs no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

// Renamed, because the library may contain the real launchers.
#define forward_cuda forward_cuda_on_cpu
#define backward_cuda backward_cuda_on_cpu
#define drop_cuda drop_cuda_on_cpu
#include "copies.h"
#include "input/input_cuda.cu"
#include "input/problems.h"
#include "sinusoidal/problems.h"

namespace posembed::input {
namespace {

struct Copy {
  const char* name;
  decltype(&baseline::forward) forward;
  decltype(&baseline::backward) backward;
  decltype(&baseline::add_parts) add_parts;
  decltype(&baseline::drop) drop;
};

std::vector<Copy> copies() {
  std::vector<Copy> all;
  POSEMBED_ADD_COPIES(all, isa::forward, isa::backward, isa::add_parts, isa::drop)
  return all;
}

// Launches take no range of tokens or elements.
void forward_source(const ForwardArguments& arguments, int64_t, int64_t end) {
  if (end == arguments.input.batch * arguments.input.seq) ASSERT_EQ(forward_cuda(arguments, nullptr), nullptr);
}

void drop_source(const DropoutArguments& arguments, int64_t, int64_t end) {
  if (end == arguments.count) ASSERT_EQ(drop_cuda(arguments, nullptr), nullptr);
}

/// The copies, and the source of the CUDA kernels of forward passes.
std::vector<Copy> forward_copies() {
  std::vector<Copy> all = copies();
  all.push_back({"cuda source", forward_source, nullptr, nullptr, drop_source});
  return all;
}

/// The results of forward, initialised to NaN.
template <typename T>
struct Output {
  using C = core::Compute<T>;

  explicit Output(const Case<T>& problem)
      : out(size_t(problem.tokens * problem.dim)), mean(size_t(problem.tokens), C(NAN)), rstd(mean) {
    for (T& value : out) core::store(static_cast<C>(NAN), &value);
  }
  ForwardArguments arguments(const Arguments& input) { return {input, out.data(), mean.data(), rstd.data()}; }

  std::vector<T> out;
  std::vector<C> mean, rstd;
};

/// The results of backward, initialised to NaN.
template <typename T>
struct Gradients {
  using C = core::Compute<T>;

  explicit Gradients(const Case<T>& problem)
      : sum(size_t(problem.tokens * problem.dim)),
        weight(size_t(problem.dim)),
        bias(weight),
        type(2 * weight.size()),
        partial(size_t(parts * 4 * partial_columns(problem.dim)), C(NAN)) {
    for (auto* values : {&sum, &weight, &bias, &type}) {
      for (T& value : *values) core::store(static_cast<C>(NAN), &value);
    }
  }

  BackwardArguments arguments(const Case<T>& problem, const Arguments& input, const Output<T>& from) {
    BackwardArguments arguments;
    arguments.input = input;
    arguments.gradient = problem.gradient.data();
    arguments.mean = problem.norm == Norm::layer ? from.mean.data() : nullptr;
    arguments.rstd = problem.norm == Norm::none ? nullptr : from.rstd.data();
    arguments.sum_gradient = sum.data();
    arguments.parts = parts;
    arguments.partial = partial.data();
    if (problem.norm != Norm::none) arguments.weight_gradient = weight.data();
    if (problem.norm == Norm::layer) arguments.bias_gradient = bias.data();
    if (input.type.data != nullptr) arguments.type_gradient = type.data();
    return arguments;
  }

  static constexpr int64_t parts = 3;
  std::vector<T> sum, weight, bias, type;
  std::vector<C> partial;
};

/// The cases of the CPU's test, rows with several vectors per thread, and rows too wide for the CUDA kernels.
template <typename T>
std::vector<Case<T>> gpu_cases() {
  std::vector<Case<T>> all = cases<T>();
  for (const int64_t dim : {264, 300, 302, 604, 1001, 2176, 4232, 4236, 8320}) {
    all.emplace_back(dim, Norm::layer, 0.4);
  }
  all.emplace_back(4232, Norm::rms, 0.0);
  return all;
}

/// Compares token rows and sinusoids at consecutive and given positions with the sinusoidal kernel.
template <typename T>
void expect_sinusoids(const Case<T>& problem, const sinusoidal::Sinusoid& sinusoid) {
  const std::vector<int32_t> positions = {5, -3, 0, 1000000, 7, 7, 7, -1, 1, 0};
  const auto size = static_cast<size_t>(problem.tokens * problem.dim);
  for (const bool placed : {false, true}) {
    for (const Copy& copy : copies()) {
      std::vector<T> plain(size), expected(size), out(size);
      ForwardArguments arguments;
      arguments.input = problem.arguments();
      arguments.input.type = arguments.input.position = Table{};
      arguments.out = plain.data();
      arguments.input.scale = 1.0;
      copy.forward(arguments, 0, problem.tokens);
      sinusoidal::Arguments add;
      add.sinusoid = sinusoid;
      add.in = plain.data();
      add.out = expected.data();
      add.scalar = scalar_of<T>();
      add.batch = problem.batch;
      add.seq = problem.seq;
      add.in_stride[0] = add.out_stride[0] = problem.seq * problem.dim;
      add.in_stride[1] = add.out_stride[1] = problem.dim;
      add.offset = 3;
      arguments.input.sinusoid = sinusoid;
      arguments.input.position.offset = 3;
      if (placed) {
        add.offset = 0;
        add.positions.data = positions.data();
        add.positions.index = core::Index::int32;
        add.position_stride[0] = problem.seq;
        add.position_stride[1] = 1;
        arguments.input.position.index = {positions.data(), core::Index::int32};
        arguments.input.position.index_stride[0] = problem.seq;
        arguments.input.position.index_stride[1] = 1;
      }
      sinusoidal::baseline::encode(add, 0, sinusoidal::encodings(add));
      arguments.out = out.data();
      copy.forward(arguments, 0, problem.tokens);
      ASSERT_EQ(std::memcmp(out.data(), expected.data(), size * sizeof(T)), 0)
          << copy.name << " dim " << problem.dim << " placed " << placed;
    }
  }
}

template <typename T>
class InputKernel : public testing::Test {};

TYPED_TEST_SUITE(InputKernel, Scalars);

TYPED_TEST(InputKernel, ForwardMatchesPlainLoops) {
  using T = TypeParam;
  for (const Case<T>& problem : gpu_cases<T>()) {
    std::vector<T> first;
    for (const Copy& copy : forward_copies()) {
      const int64_t dim = problem.dim;
      if (copy.forward == forward_source && !takes_cuda(problem.arguments())) continue;
      Output<T> result(problem);
      const auto& [out, mean, rstd] = result;
      const ForwardArguments arguments = result.arguments(problem.arguments());
      copy.forward(arguments, 0, 3);
      copy.forward(arguments, 3, problem.tokens);
      for (int64_t row = 0; row < problem.tokens; ++row) {
        const auto [x, scale] = problem.normalised(row);
        if (problem.norm != Norm::none) {
          EXPECT_NEAR(static_cast<double>(rstd[static_cast<size_t>(row)]), scale, 1e-4 * scale);
        }
        for (int64_t i = 0; i < dim; ++i) {
          const double bias = problem.norm == Norm::layer ? at(problem.bias, i) : 0;
          const double product = x[static_cast<size_t>(i)] * problem.weight_at(i);
          const double expected = (product + bias) * problem.factor(row, i);
          ASSERT_NEAR(at(out, row * dim + i), expected, 2 * tolerance<T>() * (std::abs(product) + std::abs(bias) + 1))
              << copy.name << " dim " << dim << " norm " << static_cast<int>(problem.norm) << " row " << row
              << " column " << i;
        }
      }
      if (first.empty()) first = out;
      if (copy.forward == forward_source) continue;  // its sums have another order
      EXPECT_EQ(std::memcmp(first.data(), out.data(), out.size() * sizeof(T)), 0)
          << copy.name << " differs from baseline, dim " << dim;
    }
  }
}

TYPED_TEST(InputKernel, BackwardMatchesPlainLoops) {
  using T = TypeParam;
  for (const Case<T>& problem : cases<T>()) {
    const int64_t dim = problem.dim;
    std::vector<double> weight(static_cast<size_t>(dim)), bias(weight), sum(static_cast<size_t>(problem.tokens * dim));
    for (int64_t row = 0; row < problem.tokens; ++row) {
      const auto [x, rstd] = problem.normalised(row);
      double mean = 0, projection = 0;
      std::vector<double> dy(static_cast<size_t>(dim));
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        const double g = at(problem.gradient, row * dim + i) * problem.factor(row, i);
        weight[at_i] += g * x[at_i];
        bias[at_i] += g;
        dy[at_i] = g * problem.weight_at(i);
        mean += dy[at_i] / static_cast<double>(dim);
        projection += dy[at_i] * x[at_i] / static_cast<double>(dim);
      }
      if (problem.norm != Norm::layer) mean = 0;
      if (problem.norm == Norm::none) projection = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const auto at_i = static_cast<size_t>(i);
        sum[static_cast<size_t>(row * dim) + at_i] = rstd * (dy[at_i] - mean - x[at_i] * projection);
      }
    }
    for (const Copy& copy : copies()) {
      Output<T> from(problem);
      Gradients<T> found(problem);
      copy.forward(from.arguments(problem.arguments()), 0, problem.tokens);
      std::vector<T> position_gradient(static_cast<size_t>(problem.seq * dim));
      BackwardArguments arguments = found.arguments(problem, problem.arguments(), from);
      arguments.position_gradient = position_gradient.data();
      copy.backward(arguments, 0, 2);
      copy.backward(arguments, 2, 3);
      const double unit = 30 * tolerance<T>();
      for (int64_t i = 0; i < problem.tokens * dim; ++i) {
        const double scale = dim == 1 ? 1e3 : 1;  // a single value's derivative is all cancellation
        ASSERT_NEAR(at(found.sum, i), sum[static_cast<size_t>(i)],
                    scale * unit * (std::abs(sum[static_cast<size_t>(i)]) + 1))
            << copy.name << " dim " << dim << " norm " << static_cast<int>(problem.norm) << " at " << i;
      }
      copy.add_parts(arguments, 0, 1);
      copy.add_parts(arguments, 1, 4);
      const auto scale = dim == 1 ? 1e3 * unit : 10 * unit;
      for (int64_t i = 0; i < dim; ++i) {
        std::vector<double> types(2), positions(static_cast<size_t>(problem.seq));
        for (int64_t row = 0; row < problem.tokens; ++row) {
          const double value = sum[static_cast<size_t>(row * dim + i)];
          types[static_cast<size_t>(row % 2)] += value;
          positions[static_cast<size_t>(row % problem.seq)] += value;
        }
        for (int64_t t = 0; t < 2; ++t) {
          const double expected = types[static_cast<size_t>(t)];
          ASSERT_NEAR(at(found.type, t * dim + i), expected, scale * (std::abs(expected) + 1))
              << copy.name << " type " << t << " column " << i;
        }
        for (int64_t p = 0; p < problem.seq; ++p) {
          const double expected = positions[static_cast<size_t>(p)];
          ASSERT_NEAR(at(position_gradient, p * dim + i), expected, scale * (std::abs(expected) + 1))
              << copy.name << " position " << p << " column " << i;
        }
      }
      if (problem.norm == Norm::none) continue;
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_NEAR(at(found.weight, i), weight[static_cast<size_t>(i)], unit * 10) << copy.name << " at " << i;
        if (problem.norm != Norm::layer) continue;
        ASSERT_NEAR(at(found.bias, i), bias[static_cast<size_t>(i)], unit * 10) << copy.name << " at " << i;
      }
    }
  }
}

/// A backward pass without destinations for its gradients.
template <typename T>
BackwardArguments in_three_parts(const Case<T>& problem, const std::vector<core::Compute<T>>& mean,
                                 const std::vector<core::Compute<T>>& rstd) {
  BackwardArguments arguments;
  arguments.input = problem.arguments();
  arguments.gradient = problem.gradient.data();
  arguments.mean = mean.data();
  arguments.rstd = rstd.data();
  arguments.parts = 3;
  return arguments;
}

/// Writes each token's row to its own address, or nowhere, as a sum of one term, which is never -0.
template <typename T>
void expect_rows_at_addresses(const Case<T>& problem, const Copy& copy) {
  const auto size = static_cast<size_t>(problem.tokens * problem.dim);
  std::vector<T> whole(size), memory(size + 64);
  void* aligned = memory.data();
  size_t space = memory.size() * sizeof(T);
  T* rows = static_cast<T*>(std::align(64, size * sizeof(T), aligned, space));
  std::vector<core::Compute<T>> mean(10, 0), rstd(10, 1);
  std::vector<void*> addresses;
  for (int64_t row = 0; row < problem.tokens; ++row) {
    addresses.push_back(row % 4 == 3 ? nullptr : rows + (problem.tokens - 1 - row) * problem.dim);
  }
  BackwardArguments arguments = in_three_parts(problem, mean, rstd);
  arguments.sum_gradient = whole.data();
  copy.backward(arguments, 0, 3);
  arguments.sum_gradient = nullptr;
  arguments.sum_rows = addresses.data();
  copy.backward(arguments, 0, 3);
  for (int64_t row = 0; row < problem.tokens; ++row) {
    for (int64_t i = 0; i < problem.dim; ++i) {
      const double expected = row % 4 == 3 ? 0 : at(whole, row * problem.dim + i);
      const auto found = static_cast<double>(core::load(rows[(problem.tokens - 1 - row) * problem.dim + i]));
      ASSERT_EQ(found, expected) << copy.name << " row " << row << " column " << i;
      ASSERT_FALSE(found == 0 && std::signbit(found)) << copy.name << " row " << row;
    }
  }
}

TYPED_TEST(InputKernel, WritesRowsWhereTheyBelong) {
  for (Case<TypeParam>& problem : cases<TypeParam>()) {
    for (size_t i = 0; i < problem.gradient.size(); i += 3) core::store(-0.0f, &problem.gradient[i]);
    for (const Copy& copy : copies()) {
      expect_rows_at_addresses(problem, copy);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(InputKernel, StreamsRowsWhereTheyBelong) {
  const Case<TypeParam> problem(int64_t{1} << 18, Norm::none, 0);
  for (const Copy& copy : copies()) expect_rows_at_addresses(problem, copy);
}

/// In unaligned memory, where non-temporal stores would fault, the bits are the same.
TYPED_TEST(InputKernel, StreamsPositionGradientsOnlyWhereTheyAreAligned) {
  using T = TypeParam;
  const Case<T> problem(int64_t{1} << 18, Norm::layer, 0);
  const auto size = static_cast<size_t>(problem.seq * problem.dim);
  std::vector<core::Compute<T>> mean(10, 0), rstd(10, 1);
  BackwardArguments arguments = in_three_parts(problem, mean, rstd);
  for (const Copy& copy : copies()) {
    std::vector<T> memory(size + 65);
    void* start = memory.data();
    size_t space = memory.size() * sizeof(T);
    T* aligned = static_cast<T*>(std::align(64, size * sizeof(T), start, space));
    arguments.position_gradient = aligned;
    copy.backward(arguments, 0, 3);
    const std::vector<T> streamed(aligned, aligned + size);
    arguments.position_gradient = aligned + 1;
    copy.backward(arguments, 0, 3);
    EXPECT_EQ(std::memcmp(aligned + 1, streamed.data(), size * sizeof(T)), 0) << copy.name;
  }
}

TYPED_TEST(InputKernel, WithoutNormAndDropoutTheGradientIsNotCopied) {
  using T = TypeParam;
  Case<T> problem(40, Norm::none, 0);
  for (const Copy& copy : copies()) {
    std::vector<T> positions(static_cast<size_t>(problem.seq * problem.dim));
    BackwardArguments arguments;
    arguments.input = problem.arguments();
    arguments.gradient = problem.gradient.data();
    arguments.position_gradient = positions.data();
    copy.backward(arguments, 0, 1);
    for (int64_t i = 0; i < problem.seq * problem.dim; ++i) {
      const double expected = at(problem.gradient, i) + at(problem.gradient, problem.seq * problem.dim + i);
      ASSERT_NEAR(at(positions, i), expected, tolerance<T>() * (std::abs(expected) + 1)) << copy.name;
    }
  }
}

/// The bits equal those of the sinusoidal kernel in every layout, with and without partial vectors.
TYPED_TEST(InputKernel, AddsSinusoidsAsTheSinusoidalKernelDoes) {
  using T = TypeParam;
  using sinusoidal::Preset;
  for (const int64_t dim : {1, 2, 30, 31, 64, 83, 130}) {
    for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
      for (const bool cos_first : {false, true}) {
        Case<T> problem(dim, Norm::none, 0);
        sinusoidal::Encoding encoding(preset, dim, 10000, 0, cos_first);
        encoding.sinusoid.scale = 0.5;
        encoding.sinusoid.first = cos_first ? 4 : 0;
        expect_sinusoids(problem, encoding.sinusoid);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(InputDropout, DependsOnTheElementAlone) {
  const int64_t seed = 42, count = 5000;
  std::vector<float> ones(count, 1.0f), whole(count), pieces(count);
  for (const Copy& copy : forward_copies()) {
    DropoutArguments arguments;
    arguments.x = ones.data();
    arguments.out = whole.data();
    arguments.count = count;
    arguments.probability = 0.25;
    arguments.seed = &seed;
    copy.drop(arguments, 0, count);
    arguments.out = pieces.data();
    for (const auto& [begin, end] : {std::pair(0, 1), {1, 1030}, {1030, 4999}, {4999, 5000}})
      copy.drop(arguments, begin, end);
    EXPECT_EQ(whole, pieces) << copy.name;
    double kept = 0;
    const core::Dropout dropout = core::make_dropout(0.25, 42);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(whole[static_cast<size_t>(i)], core::dropout_factor<float>(dropout, static_cast<uint64_t>(i)));
      kept += whole[static_cast<size_t>(i)] != 0;
    }
    EXPECT_NEAR(kept / count, 0.75, 0.03);  // five standard deviations
  }
}

// Known answers of Philox4x32-10 from its authors' Random123 test vectors (kat_vectors).
TEST(Philox, GivesTheAuthorsKnownAnswers) {
  const core::Random4 zeros = core::philox(0, 0);
  EXPECT_EQ(zeros.words[0], 0x6627e8d5u);
  EXPECT_EQ(zeros.words[1], 0xe169c58du);
  EXPECT_EQ(zeros.words[2], 0xbc57ac4cu);
  EXPECT_EQ(zeros.words[3], 0x9b00dbd8u);
}

// -------------------------------------------------------------------------------- the CUDA source

/// Sums over rows have a different order than on the CPU, so a tolerance is needed.
template <typename T>
void expect_same(const std::vector<T>& values, const std::vector<T>& expected, double tolerance, const char* what) {
  ASSERT_EQ(values.size(), expected.size());
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const double wanted = at(expected, i);
    ASSERT_NEAR(at(values, i), wanted, tolerance * (std::abs(wanted) + 1)) << what << " at " << i;
  }
}

/// The elements that dropout has dropped.
template <typename T>
void expect_same_zeros(const std::vector<T>& values, const std::vector<T>& expected) {
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    ASSERT_EQ(at(values, i) == 0, at(expected, i) == 0) << "at " << i;
  }
}

template <typename T>
void check_forward(const Case<T>& problem, const Arguments& input) {
  Output<T> cpu(problem), gpu(problem);
  forward_cpu(cpu.arguments(input), 0, problem.tokens);
  ASSERT_EQ(forward_cuda(gpu.arguments(input), nullptr), nullptr);
  // The mean of a single value is the value itself, so the difference is pure cancellation.
  expect_same(gpu.out, cpu.out, problem.dim == 1 ? 1e-2 : 4 * tolerance<T>(), "out");
  expect_same_zeros(gpu.out, cpu.out);
  if (problem.norm == Norm::none) return;
  expect_same(gpu.rstd, cpu.rstd, 4 * tolerance<core::Compute<T>>(), "rstd");
  if (problem.norm == Norm::layer) {
    expect_same(gpu.mean, cpu.mean, 4 * tolerance<core::Compute<T>>(), "mean");
  }
}

template <typename T>
void check_backward(const Case<T>& problem, const Arguments& input) {
  Output<T> from(problem);
  forward_cpu(from.arguments(input), 0, problem.tokens);
  Gradients<T> cpu(problem), gpu(problem);
  const BackwardArguments expected = cpu.arguments(problem, input, from);
  backward_cpu(expected, 0, expected.parts);
  add_parts_cpu(expected, 0, sums_of(expected));
  BackwardArguments arguments = gpu.arguments(problem, input, from);
  arguments.parts = parts_cuda(arguments);
  if (arguments.parts == 0) return;  // too wide, or with too many sums
  gpu.partial.assign(size_t(arguments.parts * 4 * partial_columns(problem.dim)), NAN);
  arguments.partial = gpu.partial.data();
  ASSERT_EQ(backward_cuda(arguments, nullptr), nullptr);
  const double unit = (problem.dim == 1 ? 1e3 : 20) * tolerance<T>();
  expect_same(gpu.sum, cpu.sum, unit, "sum");
  if (expected.type_gradient != nullptr) expect_same(gpu.type, cpu.type, unit, "type");
  if (problem.norm == Norm::none) return expect_same_zeros(gpu.sum, cpu.sum);
  expect_same(gpu.weight, cpu.weight, unit, "weight");
  if (problem.norm == Norm::layer) expect_same(gpu.bias, cpu.bias, unit, "bias");
}

/// More tokens than a small device has teams: 11 sequences of 6 tokens.
template <typename T>
Case<T> many_tokens(int64_t dim, Norm norm) {
  Case<T> problem(dim, norm, 0);
  problem.batch = 11;
  problem.seq = 6;
  problem.tokens = 66;
  for (int64_t i = 10; i < problem.tokens; ++i) {
    problem.ids.push_back(static_cast<int32_t>(i * 5 % 11));
    problem.types.push_back(i / 3 % 2);
  }
  problem.gradient = random_values<T>(problem.tokens * dim, 6);
  return problem;
}

TYPED_TEST(InputKernel, BackwardOfManyTokens) {
  for (const int64_t dim : {83, 300, 302, 512, 1024}) {
    const auto problem = many_tokens<TypeParam>(dim, Norm::layer);
    ASSERT_NO_FATAL_FAILURE(check_backward(problem, problem.arguments()));
  }
}

TYPED_TEST(InputKernel, Backward) {
  for (const Case<TypeParam>& problem : gpu_cases<TypeParam>()) {
    SCOPED_TRACE(testing::Message() << "dim " << problem.dim << " norm " << int(problem.norm));
    ASSERT_NO_FATAL_FAILURE(check_backward(problem, problem.arguments()));
  }
}

/// Tables that are not aligned to 16 bytes, rows with gaps, given positions.
TYPED_TEST(InputKernel, ViewsOfTables) {
  Case<TypeParam> problem(64, Norm::layer, 0.4);
  const std::vector<int64_t> positions = {1, 0, 5, -2, 3};
  for (const int64_t shift : {0, 1, 2, 4}) {
    for (const int64_t gap : {0, 8, 4, 2, 1}) {
      Arguments input = problem.arguments();
      problem.token = random_values<TypeParam>(11 * (64 + gap) + shift, 1);
      const auto* token = problem.token.data() + shift;
      input.token.data = token;
      input.token.stride = 64 + gap;
      input.position.index = {positions.data(), core::Index::int64};
      input.position.index_stride[1] = 1;
      input.position.offset = 0;
      ASSERT_NO_FATAL_FAILURE(check_forward(problem, input));
      ASSERT_NO_FATAL_FAILURE(check_backward(problem, input));
    }
  }
}

TYPED_TEST(InputKernel, Sinusoids) {
  using T = TypeParam;
  using C = core::Compute<T>;
  using sinusoidal::Preset;
  const std::vector<int32_t> positions = {5, -3, 0, 1000000, 7, 7, 7, -1, 1, 0};
  for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
    for (const int64_t dim : {1, 7, 64, 83}) {
      const Case<T> problem(dim, Norm::rms, 0.4);
      sinusoidal::Encoding encoding(preset, dim, 10000, 0, dim == 64);
      encoding.sinusoid.scale = 0.5;
      encoding.sinusoid.first = dim == 64 ? 0 : 4;
      Arguments input = problem.arguments();
      input.position = Table{};
      input.position.index = {positions.data(), core::Index::int32};
      input.position.index_stride[0] = problem.seq;
      input.position.index_stride[1] = 1;
      input.sinusoid = encoding.sinusoid;  // the CPU's
      std::vector<C> ready;
      sinusoidal::Arguments fill = sinusoidal::rows(encoding.sinusoid, problem.batch, problem.seq, ready);
      fill.positions.data = positions.data();
      fill.positions.index = core::Index::int32;
      fill.position_stride[0] = problem.seq;
      fill.position_stride[1] = 1;
      sinusoidal::encode_cpu(fill, 0, sinusoidal::encodings(fill));
      input.encoding = ready.data();  // CUDA's
      input.encoding_stride[0] = problem.seq * dim;
      input.encoding_stride[1] = dim;
      ASSERT_NO_FATAL_FAILURE(check_forward(problem, input));
      ASSERT_NO_FATAL_FAILURE(check_backward(problem, input));
    }
  }
}

/// Such rows are zeros and get no gradient; everything else is as it would be without them.
template <typename T>
void check_ids_outside(int64_t dim, Norm norm) {
  Case<T> problem(dim, norm, 0);
  problem.ids[3] = -1;
  problem.ids[4] = std::numeric_limits<int32_t>::max();
  problem.types[7] = 2;
  Output<T> out(problem);
  core::DeviceError error = {};
  Arguments input = problem.arguments();
  if (!takes_cuda(input)) return;  // in float64 the widest are too wide
  input.error = &error;
  ASSERT_EQ(forward_cuda(out.arguments(input), nullptr), nullptr);
  EXPECT_EQ(error.state, 2u);
  // Any of the three may come first.
  const bool is_type = error.index == 7;
  EXPECT_EQ(error.kind, core::ErrorKind::token_id);  // the problem names no other
  EXPECT_EQ(error.value, is_type ? problem.types[7] : problem.ids.at(size_t(error.index)));
  EXPECT_TRUE(is_type || error.index == 3 || error.index == 4);
  EXPECT_EQ(error.limit, is_type ? 2 : 11);
  Gradients<T> gradients(problem);
  ASSERT_EQ(backward_cuda(gradients.arguments(problem, input, out), nullptr), nullptr);
  const Case<T> valid(dim, norm, 0);
  Output<T> expected(valid);
  ASSERT_EQ(forward_cuda(expected.arguments(valid.arguments()), nullptr), nullptr);
  for (int64_t i = 0; i < problem.tokens * dim; ++i) {
    const bool outside = i / dim == 3 || i / dim == 4 || i / dim == 7;
    ASSERT_EQ(at(out.out, i), outside ? 0 : at(expected.out, i)) << i;
    ASSERT_EQ(at(gradients.sum, i) == 0, outside) << i;
  }
  for (int64_t i = 0; i < dim; ++i) ASSERT_TRUE(std::isfinite(at(gradients.weight, i)));
}

/// Covers teams that continue with other tokens after a bad one.
TYPED_TEST(InputKernel, IdsOutsideTheirTables) {
  const int usual = std::exchange(pretended_multiprocessors, 1);
  for (const int64_t dim : {64, 83, 300, 302, 512, 768, 2176}) {
    for (const Norm norm : {Norm::layer, Norm::rms}) {
      ASSERT_NO_FATAL_FAILURE(check_ids_outside<TypeParam>(dim, norm)) << dim;
    }
  }
  pretended_multiprocessors = usual;
}

/// As many parts as blocks run at once, but not more than there are tokens for.
TYPED_TEST(InputKernel, Parts) {
  for (const int64_t dim : {5, 64, 256, 300, 302, 768, 1024, 4096, 100000}) {
    Case<TypeParam> problem(dim, Norm::layer, 0);
    const Arguments input = problem.arguments();
    Output<TypeParam> from(problem);
    Gradients<TypeParam> gradients(problem);
    BackwardArguments arguments = gradients.arguments(problem, input, from);
    const int64_t few_parts = parts_cuda(arguments);
    if (few_parts == 0) {
      EXPECT_TRUE(!takes_cuda(input) || dim == 4096);  // whose sums are too many for shared memory
      continue;
    }
    EXPECT_GE(few_parts, 1);
    EXPECT_LE(few_parts, problem.tokens);
    arguments.input.batch = int64_t{1} << 30;
    const int64_t max_parts = parts_cuda(arguments);
    EXPECT_EQ(max_parts % pretended_multiprocessors, 0);
    const int usual = std::exchange(pretended_multiprocessors, 3 * pretended_multiprocessors);
    EXPECT_EQ(parts_cuda(arguments), 3 * max_parts) << dim;
    pretended_multiprocessors = usual;
    arguments.input.batch = 0;
    EXPECT_EQ(parts_cuda(arguments), 1);
  }
}

/// The warps that a multiprocessor of the pretended device (99 KiB of shared memory) holds.
TEST(InputGpuSource, BlocksFillAMultiprocessor) {
  Case<core::BFloat16> problem(768, Norm::layer, 0);
  Output<core::BFloat16> from(problem);
  Gradients<core::BFloat16> gradients(problem);
  BackwardArguments arguments = gradients.arguments(problem, problem.arguments(), from);
  const auto block = [&] { return block_for<core::BFloat16, 8>(arguments, warp_size, 3, true); };
  EXPECT_EQ(block().threads, 32);  // sums for weight, bias and two types
  EXPECT_EQ(block().resident, 5);
  arguments.type_gradient = nullptr;
  EXPECT_EQ(block().threads, 128);
  EXPECT_EQ(block().resident, 2);
  arguments.weight_gradient = nullptr;  // no sums: registers limit the blocks
  EXPECT_EQ(block().threads, 128);
  EXPECT_EQ(block().resident, 4);
}

// ---- the forward kernel ----

/// The same bits.
template <typename T>
void expect_equal(const Output<T>& found, const Output<T>& expected) {
  const auto same = [](const auto& a, const auto& b) {
    return memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
  };
  EXPECT_TRUE(same(found.out, expected.out));
  EXPECT_TRUE(same(found.mean, expected.mean));
  EXPECT_TRUE(same(found.rstd, expected.rstd));
}

/// Compares the call with the same call whose sequences have positions of their own and whose table of types has
/// `type_rows`.
template <typename T>
void check_forms(const Case<T>& problem, Arguments input, int64_t type_rows) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < problem.tokens; ++i) {
    positions.push_back(row_index(input.position, 0, i % problem.seq));
  }
  Arguments other = input;
  other.position.index = {positions.data(), core::Index::int64};
  other.position.index_stride[0] = problem.seq;
  other.type.rows = type_rows;
  Output<T> found(problem), expected(problem);
  core::DeviceError error = {}, expected_error = {};
  input.error = &error;
  other.error = &expected_error;
  ASSERT_EQ(forward_cuda(found.arguments(input), nullptr), nullptr);
  ASSERT_EQ(forward_cuda(expected.arguments(other), nullptr), nullptr);
  expect_equal(found, expected);
  EXPECT_EQ(error.state, expected_error.state);
}

/// Every number of vectors per thread, and of warps per row; rows that fill their threads' vectors,
/// and others; vectors of 16 and of 8 bytes.
template <typename T>
std::vector<int64_t> widths() {
  const int64_t width = core::vector_width<T>, row = width * core::warp_size;
  return {2 * row, 3 * row,         4 * row,         6 * row,         8 * row, 16 * row,
          width,   2 * row - width, 3 * row - width, 4 * row - width, 300,     5 * row + width};
}

template <typename T>
class InputForwardGpuSource : public testing::Test {
 protected:
  void SetUp() override { std::swap(usual_, pretended_multiprocessors); }
  void TearDown() override { std::swap(usual_, pretended_multiprocessors); }

 private:
  int usual_ = 1;
};

TYPED_TEST_SUITE(InputForwardGpuSource, Scalars);

TYPED_TEST(InputForwardGpuSource, WhatTokensShareChangesNoBits) {
  for (const int64_t dim : widths<TypeParam>()) {
    for (const Norm norm : {Norm::none, Norm::layer, Norm::rms}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " norm " << int(norm));
      Case<TypeParam> problem = many_tokens<TypeParam>(dim, norm);
      Arguments input = problem.arguments();
      ASSERT_NO_FATAL_FAILURE(check_forms(problem, input, max_type_bytes));
      input.type.index = {};
      input.type.index_stride[0] = input.type.index_stride[1] = 0;
      input.dropout = 0.4;
      input.seed = &problem.seed;
      ASSERT_NO_FATAL_FAILURE(check_forms(problem, input, max_type_bytes));
      input.type = {};
      input.scale = 1;
      input.norm_bias = nullptr;
      ASSERT_NO_FATAL_FAILURE(check_forms(problem, input, max_type_bytes));
    }
  }
}

TYPED_TEST(InputForwardGpuSource, SharedPositionsAndIdsOfBothWidths) {
  const std::vector<int32_t> positions = {3, -2, 0, 0, 6, 5};
  const int64_t dim = widths<TypeParam>()[1];
  Case<TypeParam> problem = many_tokens<TypeParam>(dim, Norm::layer);
  const std::vector<int64_t> ids(problem.ids.begin(), problem.ids.end());
  const std::vector<int32_t> types(problem.types.begin(), problem.types.end());
  Arguments input = problem.arguments();
  input.token.index = {ids.data(), core::Index::int64};
  input.type.index = {types.data(), core::Index::int32};
  input.position.index = {positions.data(), core::Index::int32};
  input.position.index_stride[0] = 0;
  check_forms(problem, input, 2);
}

TYPED_TEST(InputForwardGpuSource, PositionsOfEachToken) {
  for (const int64_t dim : {widths<TypeParam>()[1], int64_t{300}}) {
    const Case<TypeParam> problem = many_tokens<TypeParam>(dim, Norm::layer);
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < problem.tokens; ++i) positions.push_back(i * 5 % 9 - 2);
    Arguments input = problem.arguments();
    input.position.index = {positions.data(), core::Index::int64};
    input.position.index_stride[0] = problem.seq;
    ASSERT_NO_FATAL_FAILURE(check_forward(problem, input));
    ASSERT_NO_FATAL_FAILURE(check_backward(problem, input));
  }
}

/// Compares a sinusoid that the kernel computes with one that is given.
TYPED_TEST(InputForwardGpuSource, Sinusoids) {
  using T = TypeParam;
  using sinusoidal::Preset;
  const std::vector<int64_t> positions = {5, -1, 0, 1000000, -3, 7};
  for (const Preset preset : {Preset::vaswani, Preset::marian, Preset::tensor2tensor}) {
    for (const int64_t dim : widths<T>()) {
      for (const bool counted : {false, true}) {
        const Norm norm = counted ? Norm::none : Norm::layer;
        const Case<T> problem = many_tokens<T>(dim, norm);
        sinusoidal::Encoding encoding(preset, dim, 10000, 0, counted);
        encoding.sinusoid.scale = 0.5;
        encoding.sinusoid.first = counted ? 0 : 4;
        Arguments input = problem.arguments();
        input.type = {};
        input.position = Table{};
        input.position.offset = 1000;
        if (!counted) input.position.index = {positions.data(), core::Index::int64};
        input.sinusoid = encoding.sinusoid;
        const bool fits = dim <= 4 * core::vector_width<T> * core::warp_size;
        constexpr int64_t width = core::vector_width<T>, row = width * core::warp_size;
        const bool expected_to_compute =
            fits && width > 1 && dim > row && dim % row == 0 && encoding.sinusoid.layout.filled == dim;
        ASSERT_EQ(computes_sinusoid_cuda(input), expected_to_compute) << dim;
        if (!expected_to_compute) continue;
        Arguments other = input;
        other.sinusoid = {};
        std::vector<core::Compute<T>> ready;
        sinusoidal::Arguments fill = sinusoidal::rows(encoding.sinusoid, 1, problem.seq, ready);
        if (!counted) fill.positions.data = positions.data();
        fill.position_stride[1] = 1;
        fill.offset = 1000;
        sinusoidal::encode_cpu(fill, 0, sinusoidal::encodings(fill));
        other.encoding = ready.data();
        other.encoding_stride[1] = dim;
        Output<T> found(problem), expected(problem);
        ASSERT_EQ(forward_cuda(found.arguments(input), nullptr), nullptr);
        ASSERT_EQ(forward_cuda(expected.arguments(other), nullptr), nullptr);
        expect_equal(found, expected);
      }
    }
  }
}

/// Rows of zeros; the rows of the tokens after them are as they would be otherwise.
TYPED_TEST(InputForwardGpuSource, IndicesOutsideTheirTables) {
  std::vector<int32_t> positions = {3, -2, 7, 0, -3, 5};
  for (const int64_t dim : widths<TypeParam>()) {
    Case<TypeParam> problem = many_tokens<TypeParam>(dim, Norm::layer);
    for (const size_t token : {0, 3, 4, 40, 65}) problem.ids[token] = token % 2 == 0 ? -1 : 11;
    Arguments input = problem.arguments();
    problem.types[10] = 2;
    problem.types[64] = std::numeric_limits<int64_t>::min();
    ASSERT_NO_FATAL_FAILURE(check_forms(problem, input, 2));
    input.position.index = {positions.data(), core::Index::int32};
    input.position.index_stride[0] = 0;
    ASSERT_NO_FATAL_FAILURE(check_forms(problem, input, 2));
  }
}

TEST(InputGpuSource, Nothing) {
  Case<float> problem(64, Norm::layer, 0.4);
  Output<float> out(problem);
  for (int64_t Arguments::*size : {&Arguments::batch, &Arguments::seq, &Arguments::embedding_dim}) {
    Arguments input = problem.arguments();
    input.*size = 0;
    ASSERT_EQ(forward_cuda(out.arguments(input), nullptr), nullptr);
    Gradients<float> gradients(problem);
    ASSERT_EQ(backward_cuda(gradients.arguments(problem, input, out), nullptr), nullptr);
    // Without tokens the gradient is 0; without columns it is not written.
    EXPECT_EQ(gradients.weight[0] == 0, input.embedding_dim > 0);
  }
  EXPECT_TRUE(std::isnan(out.out[0]));
}

TYPED_TEST(InputKernel, DropoutAlone) {
  using T = TypeParam;
  const int64_t seed = 42;
  for (const int64_t count : {0, 1, 7, 64, 5000}) {
    const auto x = random_values<T>(count + 1, 3);
    for (const int64_t shift : {0, 1}) {
      for (const int64_t first : {0, 3, 8}) {
        for (const double probability : {0.0, 0.25, 1.0}) {
          std::vector<T> expected = x, out = x;
          DropoutArguments arguments{
              x.data() + shift, expected.data() + shift, scalar_of<T>(), count, probability, &seed, first};
          drop_cpu(arguments, 0, count);
          arguments.x = arguments.out = out.data() + shift;
          ASSERT_EQ(drop_cuda(arguments, nullptr), nullptr);
          ASSERT_EQ(memcmp(out.data(), expected.data(), out.size() * sizeof(T)), 0)
              << "count " << count << " shift " << shift << " first " << first << " probability " << probability;
        }
      }
    }
  }
}

}  // namespace
}  // namespace posembed::input
