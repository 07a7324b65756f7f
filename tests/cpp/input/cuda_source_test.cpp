// Compares the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu, with the CPU
// kernels: vectors of every width, rows that are kept or read again, the same dropout mask and
// statistics, and ids outside their tables. Needs no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

// Renamed, because the library may contain the real launchers.
#define forward_cuda forward_cuda_on_cpu
#define backward_cuda backward_cuda_on_cpu
#define drop_cuda drop_cuda_on_cpu
#include "input/input_cuda.cu"
#include "input/problems.h"
#include "sinusoidal/problems.h"

namespace posembed::input {
namespace {

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

/// The cases of the CPU's test, rows with several vectors per thread, and rows too wide to be kept.
template <typename T>
std::vector<Case<T>> gpu_cases() {
  std::vector<Case<T>> all = cases<T>();
  for (const int64_t dim : {264, 300, 302, 604, 1001, 2176, 4232, 4236, 8320}) {
    all.emplace_back(dim, Norm::layer, 0.4);
  }
  all.emplace_back(4232, Norm::rms, 0.0);
  return all;
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

template <typename T>
class InputGpuSource : public testing::Test {};

TYPED_TEST_SUITE(InputGpuSource, Scalars);

TYPED_TEST(InputGpuSource, Forward) {
  for (const Case<TypeParam>& problem : gpu_cases<TypeParam>()) {
    SCOPED_TRACE(testing::Message() << "dim " << problem.dim << " norm " << int(problem.norm));
    ASSERT_NO_FATAL_FAILURE(check_forward(problem, problem.arguments()));
  }
}

TYPED_TEST(InputGpuSource, BackwardOfManyTokens) {
  for (const int64_t dim : {83, 300, 302, 512, 1024}) {
    const auto problem = many_tokens<TypeParam>(dim, Norm::layer);
    ASSERT_NO_FATAL_FAILURE(check_backward(problem, problem.arguments()));
  }
}

TYPED_TEST(InputGpuSource, Backward) {
  for (const Case<TypeParam>& problem : gpu_cases<TypeParam>()) {
    SCOPED_TRACE(testing::Message() << "dim " << problem.dim << " norm " << int(problem.norm));
    ASSERT_NO_FATAL_FAILURE(check_backward(problem, problem.arguments()));
  }
}

/// Tables that are not aligned to 16 bytes, rows with gaps, given positions.
TYPED_TEST(InputGpuSource, ViewsOfTables) {
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

TYPED_TEST(InputGpuSource, TokensWithoutTypesAreOfType0) {
  using T = TypeParam;
  Case<T> problem(64, Norm::layer, 0);
  std::fill(problem.types.begin(), problem.types.end(), 0);
  Output<T> expected(problem), found(problem);
  Arguments input = problem.arguments();
  ASSERT_EQ(forward_cuda(expected.arguments(input), nullptr), nullptr);
  input.type.index = {};
  input.type.index_stride[0] = input.type.index_stride[1] = 0;
  ASSERT_EQ(forward_cuda(found.arguments(input), nullptr), nullptr);
  expect_same(found.out, expected.out, 4 * tolerance<T>(), "out");
  ASSERT_NO_FATAL_FAILURE(check_backward(problem, input));
}

TYPED_TEST(InputGpuSource, Sinusoids) {
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
TYPED_TEST(InputGpuSource, IdsOutsideTheirTables) {
  const int usual = std::exchange(pretended_multiprocessors, 1);
  for (const int64_t dim : {64, 83, 300, 302, 512, 768, 2176}) {
    for (const Norm norm : {Norm::layer, Norm::rms}) {
      ASSERT_NO_FATAL_FAILURE(check_ids_outside<TypeParam>(dim, norm)) << dim;
    }
  }
  pretended_multiprocessors = usual;
}

/// As many parts as blocks run at once, but not more than there are tokens for.
TYPED_TEST(InputGpuSource, Parts) {
  for (const int64_t dim : {5, 64, 256, 300, 302, 768, 1024, 4096, 100000}) {
    Case<TypeParam> problem(dim, Norm::layer, 0);
    const Arguments input = problem.arguments();
    Output<TypeParam> from(problem);
    Gradients<TypeParam> gradients(problem);
    BackwardArguments arguments = gradients.arguments(problem, input, from);
    const int64_t few_parts = parts_cuda(arguments);
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

// ---- the usual forward kernel ----

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

/// Compares the call with the same call whose sequences have positions of their own, which
/// forward_kernel() takes.
template <typename T>
void check_usual(const Case<T>& problem, Arguments input) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < problem.tokens; ++i) {
    positions.push_back(row_index(input.position, 0, i % problem.seq));
  }
  Arguments other = input;
  other.position.index = {positions.data(), core::Index::int64};
  other.position.index_stride[0] = problem.seq;
  ASSERT_TRUE(is_usual<T>(input, problem.dim));
  ASSERT_FALSE(is_usual<T>(other, problem.dim));
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
class InputUsualGpuSource : public testing::Test {
 protected:
  void SetUp() override { std::swap(usual_, pretended_multiprocessors); }
  void TearDown() override { std::swap(usual_, pretended_multiprocessors); }

 private:
  int usual_ = 1;
};

TYPED_TEST_SUITE(InputUsualGpuSource, Scalars);

TYPED_TEST(InputUsualGpuSource, BitsOfTheGeneralKernel) {
  for (const int64_t dim : widths<TypeParam>()) {
    for (const Norm norm : {Norm::none, Norm::layer, Norm::rms}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << " norm " << int(norm));
      Case<TypeParam> problem = many_tokens<TypeParam>(dim, norm);
      Arguments input = problem.arguments();
      if (type_bytes<TypeParam>(input, dim) <= max_type_bytes) {
        ASSERT_NO_FATAL_FAILURE(check_usual(problem, input));
      }
      input.type.index = {};
      input.type.index_stride[0] = input.type.index_stride[1] = 0;
      if (type_bytes<TypeParam>(input, dim) > max_type_bytes) input.type = {};
      ASSERT_NO_FATAL_FAILURE(check_usual(problem, input));
      input.type = {};
      input.scale = 1;
      input.norm_bias = nullptr;
      ASSERT_NO_FATAL_FAILURE(check_usual(problem, input));
    }
  }
}

TYPED_TEST(InputUsualGpuSource, SharedPositionsAndIdsOfBothWidths) {
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
  check_usual(problem, input);
}

/// Compares a sinusoid that the kernel computes with one that is given to forward_kernel().
TYPED_TEST(InputUsualGpuSource, Sinusoids) {
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
        ASSERT_FALSE(is_usual<T>(other, dim));
        Output<T> found(problem), expected(problem);
        ASSERT_EQ(forward_cuda(found.arguments(input), nullptr), nullptr);
        ASSERT_EQ(forward_cuda(expected.arguments(other), nullptr), nullptr);
        expect_equal(found, expected);
      }
    }
  }
}

/// Rows of zeros; the rows of the tokens after them are as they would be otherwise.
TYPED_TEST(InputUsualGpuSource, IndicesOutsideTheirTables) {
  std::vector<int32_t> positions = {3, -2, 7, 0, -3, 5};
  for (const int64_t dim : widths<TypeParam>()) {
    Case<TypeParam> problem = many_tokens<TypeParam>(dim, Norm::layer);
    for (const size_t token : {0, 3, 4, 40, 65}) problem.ids[token] = token % 2 == 0 ? -1 : 11;
    Arguments input = problem.arguments();
    if (type_bytes<TypeParam>(input, dim) > max_type_bytes) {
      input.type = {};
    }
    problem.types[10] = 2;
    problem.types[64] = std::numeric_limits<int64_t>::min();
    ASSERT_NO_FATAL_FAILURE(check_usual(problem, input));
    input.position.index = {positions.data(), core::Index::int32};
    input.position.index_stride[0] = 0;
    ASSERT_NO_FATAL_FAILURE(check_usual(problem, input));
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

TYPED_TEST(InputGpuSource, DropoutAlone) {
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
