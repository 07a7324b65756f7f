// Compares the ALiBi kernels with plain loops in double precision: the CPU kernels of every
// instruction set, and the source of the CUDA kernels, run on the CPU by tests/cpp/cuda_on_cpu.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define fill_cuda fill_cuda_on_cpu
#define add_cuda add_cuda_on_cpu
#define softmax_cuda softmax_cuda_on_cpu
#define softmax_backward_cuda softmax_backward_cuda_on_cpu
#define reduce_cuda reduce_cuda_on_cpu
#include "alibi/alibi.h"
#include "alibi/alibi_cuda.cu"
#include "values.h"

namespace posembed::alibi {
namespace {

using core::Compute;

/// Launches take no range of rows, so the launch runs with the last range.
template <auto launch>
struct CudaSource;

template <typename Arguments, const char* (*launch)(const Arguments&, core::CudaStream)>
struct CudaSource<launch> {
  static void run(const Arguments& arguments, int64_t, int64_t end) {
    if (end != arguments.batch * arguments.slopes.heads * arguments.distances.queries) return;
    ASSERT_EQ(launch(arguments, nullptr), nullptr);
  }
};

template <typename Kernel>
using Copies = std::vector<std::pair<const char*, Kernel*>>;

constexpr const char* source_name = "cuda source";

/// The copies of a kernel that this processor can run.
template <typename Kernel>
Copies<Kernel> copies(Kernel* baseline, Kernel* avx2, Kernel* avx512, Kernel* source) {
  Copies<Kernel> result{{"baseline", baseline}, {source_name, source}};
  const auto set = core::instruction_set();
  if (set >= core::InstructionSet::avx2) result.emplace_back("avx2", avx2);
  if (set >= core::InstructionSet::avx512) result.emplace_back("avx512", avx512);
  return result;
}

#define POSEMBED_COPIES(kernel) copies(baseline::kernel, avx2::kernel, avx512::kernel, CudaSource<kernel##_cuda>::run)

constexpr double infinity = std::numeric_limits<double>::infinity();

double position(const core::IndexView& view, int64_t index) { return static_cast<double>(core::read(view, index)); }

/// Query position - key position; NaN if the key is hidden from the query.
double expected_distance(const Distances& distances, int64_t batch, int64_t row, int64_t key) {
  const double query = distances.query_positions.data == nullptr
                           ? static_cast<double>(distances.offset + row)
                           : position(distances.query_positions, batch * distances.query_stride + row);
  const double at = distances.key_positions.data == nullptr
                        ? static_cast<double>(key)
                        : position(distances.key_positions, batch * distances.key_stride + key);
  bool seen = !distances.causal || at <= query;
  if (distances.mask != nullptr) seen &= distances.mask[batch * distances.mask_stride + key];
  for (int64_t document = 0; document < distances.documents; ++document) {
    const int64_t begin = core::read(distances.cu_seqlens, document);
    const int64_t end = core::read(distances.cu_seqlens, document + 1);
    const auto inside = [&](int64_t index) { return index >= begin && index < end; };
    seen &= inside(distances.offset + row) == inside(key);
  }
  return seen ? query - at : std::nan("");
}

double expected_bias(double before, double after, const Distances& distances, int64_t row, int64_t key,
                     int64_t batch = 0) {
  const double distance = expected_distance(distances, batch, row, key);
  if (std::isnan(distance)) return distances.apply_mask ? -infinity : 0.0;
  return distance >= 0 ? -before * distance : after * distance;
}

/// `value` after storage in T: rounded to the compute type, then to T.
template <typename T>
Compute<T> rounded(double value) {
  T stored;
  core::store(static_cast<Compute<T>>(value), &stored);
  return core::load(stored);
}

struct Case {
  int64_t queries, keys, offset;
  bool causal, apply_mask;
};

Distances distances_of(const Case& c) {
  Distances distances;
  distances.queries = c.queries;
  distances.keys = c.keys;
  distances.offset = c.offset;
  distances.causal = c.causal;
  distances.apply_mask = c.apply_mask;
  return distances;
}

const Case cases[] = {
    {1, 1, 0, true, true},      {1, 7, 6, true, true},       {5, 3, -2, true, true},       {33, 1025, 992, true, true},
    {64, 65, 1, false, true},   {7, 4100, 100, false, true}, {40, 40, 0, true, false},     {3, 5, 1 << 19, true, true},
    {3, 9, -20, false, true},   {2, 0, 0, true, true},       {2, 31, 100000, false, true}, {601, 9, -300, true, true},
    {300, 70, -9, false, true},
};

const std::vector<float> two_sided = {0.5f, 0.25f, 0.7071f, 1.0f, 0.3f, 0.0625f};  // [2, 3]

template <typename T>
class ALiBiKernel : public ::testing::Test {};

using Types = ::testing::Types<float, double, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(ALiBiKernel, Types);

TYPED_TEST(ALiBiKernel, FillsEveryRowInAnySplit) {
  using T = TypeParam;
  for (const Case& c : cases) {
    const int64_t guard = c.causal ? 1 : 16;  // with and without 16-byte accesses
    for (const auto& [name, fill] : POSEMBED_COPIES(fill)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      FillArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, 3, 2};
      arguments.distances = distances_of(c);
      arguments.scalar = scalar_of<T>();
      arguments.batch = 1;
      const int64_t rows = 3 * c.queries;
      std::vector<T> out(static_cast<size_t>(rows * c.keys + 2 * guard));
      core::store(Compute<T>(42), &out.front());
      core::store(Compute<T>(42), &out.back());
      arguments.out = {out.data() + guard, {0, c.queries * c.keys, c.keys}};
      const int64_t split = rows / 3 + 1;
      fill(arguments, 0, split);
      fill(arguments, split, rows);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = row / c.queries;
        const double before = two_sided[head], after = two_sided[3 + head];
        for (int64_t key = 0; key < c.keys; ++key) {
          const auto want = rounded<T>(expected_bias(before, after, arguments.distances, row % c.queries, key));
          const auto have = core::load(out[guard + row * c.keys + key]);
          ASSERT_EQ(have, want) << "row " << row << " key " << key;
        }
      }
      EXPECT_EQ(core::load(out.front()), 42);
      EXPECT_EQ(core::load(out.back()), 42);
    }
  }
}

TYPED_TEST(ALiBiKernel, AddsToStridedScoresInPlace) {
  using T = TypeParam;
  constexpr int64_t batch = 2, heads = 3;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (const Case& c : cases) {
    const int64_t padding = c.causal ? 5 : 8;
    for (const auto& [name, add] : POSEMBED_COPIES(add)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      ScoreArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, heads, 2};
      arguments.distances = distances_of(c);
      arguments.scalar = scalar_of<T>();
      arguments.batch = batch;
      // Heads are outermost and rows have gaps, so only the last dimension is contiguous.
      const int64_t row = c.keys + padding;
      const int64_t strides[3] = {c.queries * row, batch * c.queries * row, row};
      std::copy_n(strides, 3, arguments.in.stride);
      arguments.scale = 0.5;
      std::vector<T> scores(static_cast<size_t>(batch * heads * c.queries * row));
      for (T& score : scores) core::store(Compute<T>(uniform(random)), &score);
      const std::vector<T> before = scores;
      arguments.in.data = scores.data();
      arguments.out = arguments.in;
      add(arguments, 0, 4);
      add(arguments, 4, batch * heads * c.queries);
      for (int64_t index = 0; index < static_cast<int64_t>(scores.size()); ++index) {
        const int64_t key = index % row, query = index / row % c.queries;
        const int64_t head = index / strides[1];
        long double want = core::load(before[index]);  // exact: the kernels round only the sum
        if (key < c.keys) {
          want = want / 2 + expected_bias(two_sided[head], two_sided[heads + head], arguments.distances, query, key);
        }
        ASSERT_EQ(core::load(scores[index]), rounded<T>(static_cast<Compute<T>>(want))) << "index " << index;
      }
    }
  }
}

TYPED_TEST(ALiBiKernel, ReducesToTheSameBitsOnEveryInstructionSet) {
  using T = TypeParam;
  constexpr int64_t batch = 2, heads = 3;
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const Case& c : cases) {
    const int64_t plane = c.queries * c.keys;
    std::vector<T> grad(static_cast<size_t>(batch * heads * plane));
    for (T& value : grad) core::store(Compute<T>(uniform(random)), &value);
    ReduceArguments arguments;
    arguments.distances = distances_of(c);
    arguments.scalar = scalar_of<T>();
    arguments.batch = batch;
    arguments.grad = {grad.data(), {heads * plane, plane, c.keys}};
    const int64_t rows = batch * heads * c.queries;
    std::vector<double> partial(static_cast<size_t>(2 * rows));
    arguments.slopes.sides = 2;
    arguments.slopes.heads = heads;
    arguments.slopes.partial = partial.data();
    arguments.slopes.scalar = core::Scalar::float64;
    std::vector<double> want(2 * heads, 0.0);
    double size = 0;
    for (int64_t index = 0; index < batch * heads * plane; ++index) {
      const int64_t key = index % c.keys, query = index / c.keys % c.queries;
      const int64_t head = index / plane % heads;
      const auto distance = static_cast<double>(key - query - c.offset);
      const double product = distance * core::load(grad[index]);
      size += std::abs(product);
      if (distance <= 0) want[head] += product;
      if (distance > 0 && !c.causal) want[heads + head] -= product;
    }
    std::vector<double> first;
    for (const auto& [name, reduce] : POSEMBED_COPIES(reduce)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      std::vector<double> out(2 * heads, 42.0);
      arguments.slopes.out = out.data();
      reduce(arguments, 0, 1);
      reduce(arguments, 1, rows);
      if (name != source_name) reduce_heads_cpu(arguments.slopes, batch, c.queries);
      for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], want[i], 1e-14 * size);
      if (name == source_name) continue;
      if (first.empty()) first = out;
      EXPECT_EQ(out, first);
    }
  }
}

/// Scores of two batches and three heads, with every option that hides or moves keys.
struct Placed {
  static constexpr int64_t batch = 2, heads = 3;

  /// `shift`: added to every position.
  explicit Placed(int64_t keys, int32_t shift = 0, int32_t queries = 5)
      : keys(keys),
        queries(queries),
        rows(batch * heads * queries),
        boundaries{0, 4, 18, static_cast<int32_t>(keys)},
        mask(new bool[batch * keys]) {
    for (int32_t i = 0; i < queries; ++i) query_positions.push_back(i * 8 % 13 + shift);
    for (int64_t i = 0; i < batch * keys; ++i) {
      key_positions.push_back(i * 7 % 23 - 4 + shift);
      mask[i] = i % 5 != 2 && (i < keys || i >= keys + 9);  // the second batch has padding
    }
  }

  Distances distances(bool causal, bool apply_mask) const {
    Distances result;
    result.queries = queries;
    result.keys = keys;
    result.offset = 16;
    result.causal = causal;
    result.apply_mask = apply_mask;
    result.query_positions = {query_positions.data(), core::Index::int32};
    result.key_positions = {key_positions.data(), core::Index::int64};
    result.key_stride = keys;
    result.cu_seqlens = {boundaries.data(), core::Index::int32};
    result.documents = 3;
    result.mask = mask.get();
    result.mask_stride = keys;
    return result;
  }

  size_t count() const { return static_cast<size_t>(rows * keys); }

  Matrices matrices(void* data) const { return {data, {heads * queries * keys, queries * keys, keys}}; }

  int64_t keys, queries, rows;
  std::vector<int32_t> query_positions;
  std::vector<int64_t> key_positions;
  std::vector<int32_t> boundaries;
  std::unique_ptr<bool[]> mask;
};

/// Rows of every width of vectors, and positions whose differences float32 does not hold.
std::vector<Placed> placed_rows() {
  std::vector<Placed> result;
  for (const int64_t keys : {37, 38, 36, 40}) result.emplace_back(keys);
  result.emplace_back(40, 1 << 24);
  result.emplace_back(40, 0, 131);  // a block processes rows of two heads
  return result;
}

template <typename T>
std::vector<T> random_numbers(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-2, 2);
  std::vector<T> numbers(count);
  for (T& number : numbers) core::store(Compute<T>(uniform(random)), &number);
  return numbers;
}

/// softmax of a row in double precision; zeros if all keys are hidden.
std::vector<double> expected_softmax(const std::vector<double>& scores) {
  const double max_score = *std::max_element(scores.begin(), scores.end());
  std::vector<double> weights(scores.size(), 0.0);
  if (max_score == -infinity) return weights;
  double sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) sum += weights[i] = std::exp(scores[i] - max_score);
  for (double& weight : weights) weight /= sum;
  return weights;
}

template <typename T>
constexpr double tolerance = std::is_same_v<T, double>  ? 1e-15
                             : std::is_same_v<T, float> ? 4e-7
                                                        : (std::is_same_v<T, core::BFloat16> ? 1.0 / 256 : 1.0 / 2048);

TYPED_TEST(ALiBiKernel, BiasesAndWeightsOfMovedAndHiddenKeys) {
  using T = TypeParam;
  for (const Placed& placed : placed_rows()) {
    const std::vector<T> scores = random_numbers<T>(placed.count(), 3);
    for (const int options : {0, 1, 2, 3}) {
      const bool causal = options % 2 == 0, apply_mask = options < 2;
      ScoreArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, 3, 2};
      arguments.distances = placed.distances(causal, apply_mask);
      arguments.scalar = scalar_of<T>();
      arguments.batch = Placed::batch;
      arguments.scale = 0.25;
      arguments.in = placed.matrices(const_cast<T*>(scores.data()));
      std::vector<T> sums(scores.size()), weights(scores.size());
      arguments.out = placed.matrices(sums.data());
      add_cpu(arguments, 0, placed.rows);
      std::vector<T> biases(scores.size()), of_cuda(scores.size());
      const auto expect_same_bits = [&](const std::vector<T>& want) {
        EXPECT_EQ(memcmp(of_cuda.data(), want.data(), want.size() * sizeof(T)), 0)
            << "causal " << causal << " apply_mask " << apply_mask << " keys " << placed.keys;
      };
      arguments.out = placed.matrices(of_cuda.data());
      ASSERT_EQ(add_cuda(arguments, nullptr), nullptr);
      expect_same_bits(sums);
      FillArguments bias{arguments.slopes, arguments.distances, arguments.scalar, Placed::batch,
                         placed.matrices(biases.data())};
      fill_cpu(bias, 0, placed.rows);
      bias.out = arguments.out;
      ASSERT_EQ(fill_cuda(bias, nullptr), nullptr);
      expect_same_bits(biases);
      for (const auto& [name, softmax] : POSEMBED_COPIES(softmax)) {
        SCOPED_TRACE(testing::Message() << name << " causal " << causal << " apply_mask " << apply_mask << " keys "
                                        << placed.keys);
        arguments.out = placed.matrices(weights.data());
        softmax(arguments, 0, 7);
        softmax(arguments, 7, placed.rows);
        for (int64_t row = 0; row < placed.rows; ++row) {
          const int64_t batch = row / (3 * placed.queries), head = row / placed.queries % 3;
          std::vector<double> biased;
          for (int64_t key = 0; key < placed.keys; ++key) {
            const double bias = expected_bias(two_sided[head], two_sided[3 + head], arguments.distances,
                                              row % placed.queries, key, batch);
            biased.push_back(0.25 * core::load(scores[row * placed.keys + key]) + bias);
            const double sum = core::load(sums[row * placed.keys + key]);
            if (std::isfinite(biased.back())) {
              ASSERT_NEAR(sum, biased.back(), tolerance<T> * 16) << "row " << row << " key " << key;
            } else {
              ASSERT_EQ(sum, biased.back());
            }
          }
          const std::vector<double> want = expected_softmax(biased);
          for (int64_t key = 0; key < placed.keys; ++key) {
            const double have = core::load(weights[row * placed.keys + key]);
            ASSERT_NEAR(have, want[key], tolerance<T>) << "row " << row << " key " << key;
          }
        }
      }
    }
  }
}

TYPED_TEST(ALiBiKernel, SoftmaxOfPlainRowsInPlace) {
  using T = TypeParam;
  for (const Case& c : cases) {
    for (const auto& [name, softmax] : POSEMBED_COPIES(softmax)) {
      SCOPED_TRACE(testing::Message() << name << " queries " << c.queries << " keys " << c.keys);
      const std::vector<T> before = random_numbers<T>(3 * c.queries * c.keys, 4);
      std::vector<T> scores = before;
      ScoreArguments arguments;
      arguments.slopes = {two_sided.data(), core::Scalar::float32, 3, 2};
      arguments.distances = distances_of(c);
      arguments.scalar = scalar_of<T>();
      arguments.batch = 1;
      arguments.scale = 2;
      arguments.in = {scores.data(), {0, c.queries * c.keys, c.keys}};
      arguments.out = arguments.in;
      softmax(arguments, 0, 3 * c.queries);
      for (int64_t row = 0; row < 3 * c.queries && c.keys > 0; ++row) {
        const int64_t head = row / c.queries;
        std::vector<double> biased;
        for (int64_t key = 0; key < c.keys; ++key) {
          biased.push_back(
              2.0 * core::load(before[row * c.keys + key]) +
              expected_bias(two_sided[head], two_sided[3 + head], arguments.distances, row % c.queries, key));
        }
        const std::vector<double> want = expected_softmax(biased);
        double largest = 0;  // float32 rounds biased scores, and exp makes that relative
        for (const double score : biased) {
          if (std::isfinite(score)) largest = std::max(largest, std::abs(score));
        }
        const double rounding = std::is_same_v<T, double> ? 1e-16 : 6e-8;
        for (int64_t key = 0; key < c.keys; ++key) {
          ASSERT_NEAR(core::load(scores[row * c.keys + key]), want[key],
                      tolerance<T> + 2 * rounding * largest * want[key])
              << "row " << row << " key " << key;
        }
      }
    }
  }
}

/// Rows that are too long for the CUDA kernels to keep in registers, or whole between their passes.
TYPED_TEST(ALiBiKernel, SoftmaxOfLongRows) {
  using T = TypeParam;
  constexpr int64_t keys = 21000;
  const std::vector<T> scores = random_numbers<T>(keys, 7);
  const float slope = 0.001f;
  std::vector<double> biased;
  for (int64_t key = 0; key < keys; ++key) {
    biased.push_back(core::load(scores[key]) + 0.001f * static_cast<double>(key - keys + 1));
  }
  const std::vector<double> want = expected_softmax(biased);
  for (const auto& [name, softmax] : POSEMBED_COPIES(softmax)) {
    std::vector<T> weights(keys);
    ScoreArguments arguments;
    arguments.slopes = {&slope, core::Scalar::float32, 1, 1};
    arguments.distances = distances_of({1, keys, keys - 1, true, true});
    arguments.scalar = scalar_of<T>();
    arguments.batch = 1;
    arguments.in = {const_cast<T*>(scores.data()), {keys, keys, keys}};
    arguments.out = {weights.data(), {keys, keys, keys}};
    softmax(arguments, 0, 1);
    for (int64_t key = 0; key < keys; ++key) {
      ASSERT_NEAR(core::load(weights[key]), want[key], tolerance<T> * 1e-2) << name << " " << key;
    }
  }
}

TEST(ALiBiGpuSource, RecordsDistancesOfMoreThan31BitsAndHidesTheirKeys) {
  const float slope = 1.0f;
  const int64_t far = int64_t{1} << 31;
  const int64_t key_positions[] = {0, far, 5, -far};
  std::vector<float> out(4, 42.0f);
  core::DeviceError error = {};
  FillArguments arguments;
  arguments.slopes = {&slope, core::Scalar::float32, 1, 1};
  arguments.distances = distances_of({1, 4, 0, false, true});
  arguments.distances.key_positions = {key_positions, core::Index::int64};
  arguments.distances.error = &error;
  arguments.out = {out.data(), {4, 4, 4}};
  ASSERT_EQ(fill_cuda(arguments, nullptr), nullptr);
  EXPECT_EQ(out, (std::vector<float>{0, -INFINITY, -5, -INFINITY}));
  EXPECT_EQ(error.kind, core::ErrorKind::distance);
  EXPECT_EQ(error.value, far);
  EXPECT_EQ(error.index, 1);
}

const Case rows_in_registers[] = {
    {5, 8, 3, true, true},        {3, 40, 0, true, true},      {4, 44, 37, true, true},
    {3, 300, 200, true, true},    {9, 1024, 100, true, true},  {2, 1030, 1026, true, true},
    {2, 2056, 2000, false, true}, {2, 4098, 4000, true, true}, {2, 8192, 5000, false, true},
    {3, 64, -2, true, true},      {3, 64, 30, true, false},    {601, 8, 0, true, true},
};

/// Matrices of scores, weights or gradients: two batches of two heads. `shift`: elements before them.
template <typename T>
struct Rows {
  Rows(const Distances& distances, unsigned seed, int64_t shift)
      : count(4 * distances.queries * distances.keys),
        plane(distances.queries * distances.keys),
        keys(distances.keys),
        memory(random_numbers<T>(count + shift, seed)),
        data(memory.data() + shift) {}

  Matrices matrices() { return {data, {2 * plane, plane, keys}}; }

  int64_t count, plane, keys;
  std::vector<T> memory;
  T* data;
};

/// The kernels for rows in registers give what the general ones give: equal bits are not expected,
/// because sums are in another order and results of 16 bits use a faster exp. `shift`: results begin
/// so many elements after a boundary at which scores and gradients begin.
template <typename T>
void expect_general_results(const Distances& distances, int64_t shift = 0) {
  Rows<T> scores(distances, 8, 0), weights(distances, 0, shift), expected(distances, 0, shift),
      again(distances, 0, shift);
  for (int64_t index = 0; index < scores.count; ++index) {
    const int64_t batch = index / (2 * scores.plane), query = index % scores.plane / scores.keys;
    if (distances.apply_mask && std::isnan(expected_distance(distances, batch, query, index % scores.keys))) {
      core::store(std::numeric_limits<Compute<T>>::quiet_NaN(), &scores.data[index]);
    }
  }
  ScoreArguments arguments{{two_sided.data(), core::Scalar::float32, 2, 2},
                           distances,
                           scalar_of<T>(),
                           /*batch=*/2,
                           /*scale=*/2,
                           scores.matrices(),
                           expected.matrices()};
  ASSERT_EQ(launch_general_softmax<T>(arguments, nullptr), nullptr);
  arguments.out = weights.matrices();
  ASSERT_EQ(softmax_cuda(arguments, nullptr), nullptr);
  const double rounding = 2 * tolerance<T>;
  const double denormal = std::is_same_v<T, core::Float16> ? std::ldexp(1.0, -24) : 1e-9;
  for (int64_t i = 0; i < scores.count; ++i) {
    const double want = core::load(expected.data[i]);
    ASSERT_NEAR(core::load(weights.data[i]), want, rounding * std::abs(want) + denormal) << i;
  }
  arguments.out = again.matrices();
  ASSERT_EQ(softmax_cuda(arguments, nullptr), nullptr);
  EXPECT_EQ(memcmp(again.data, weights.data, scores.count * sizeof(T)), 0);

  Rows<T> grad(distances, 9, 0);
  for (int64_t i = 0; i < scores.count; ++i) {
    // Hidden keys may hold NaN.
    const bool is_hidden = core::load(scores.data[i]) != core::load(scores.data[i]);
    if (is_hidden) grad.data[i] = scores.data[i];
  }
  SoftmaxBackwardArguments backward;
  backward.distances = distances;
  backward.scalar = scalar_of<T>();
  backward.batch = 2;
  backward.scale = 0.5;
  backward.grad = grad.matrices();
  backward.weights = weights.matrices();
  backward.slopes.sides = 0;
  backward.slopes.heads = 2;
  backward.out = expected.matrices();
  ASSERT_EQ(launch_general_softmax_backward<T>(backward, nullptr), nullptr);
  backward.out = again.matrices();
  ASSERT_EQ(softmax_backward_cuda(backward, nullptr), nullptr);
  // grad - mean may cancel, and then the order of the mean's sum shows.
  for (int64_t i = 0; i < scores.count; ++i) {
    const double weight = core::load(weights.data[i]), want = core::load(expected.data[i]);
    ASSERT_NEAR(core::load(again.data[i]), want,
                rounding * std::abs(want) + 4 * tolerance<float> * std::abs(weight) + denormal)
        << i;
  }
}

TYPED_TEST(ALiBiKernel, PlainRowsInRegistersAgreeWithTheGeneralKernels) {
  for (const Case& c : rows_in_registers) {
    SCOPED_TRACE(testing::Message() << "queries " << c.queries << " keys " << c.keys);
    expect_general_results<TypeParam>(distances_of(c));
  }
}

TYPED_TEST(ALiBiKernel, RowsThatBeginElsewhereThanTheirResultsAgreeWithTheGeneralKernels) {
  const Placed placed(301);
  Distances masked = placed.distances(/*causal=*/false, /*apply_mask=*/true);
  masked.query_positions = masked.key_positions = {};
  for (const int64_t shift : {1, 4, 7}) {
    SCOPED_TRACE(testing::Message() << "shift " << shift);
    expect_general_results<TypeParam>(masked, shift);
    expect_general_results<TypeParam>(distances_of({3, 300, 200, true, true}), shift);
  }
}

TYPED_TEST(ALiBiKernel, PlacedRowsInRegistersAgreeWithTheGeneralKernels) {
  std::vector<Placed> cases = placed_rows();
  for (const int64_t keys : {300, 1032, 8192}) cases.emplace_back(keys);
  for (const Placed& placed : cases) {
    for (const int options : {0, 1, 2, 3}) {
      if (placed.keys == 8192 && options > 0) continue;
      SCOPED_TRACE(testing::Message() << "keys " << placed.keys << " options " << options);
      Distances distances = placed.distances(options % 2 == 0, options < 2);
      if (placed.keys > 40) distances.documents = 0;  // of which one would be long
      expect_general_results<TypeParam>(distances);
    }
  }
}

TYPED_TEST(ALiBiKernel, GradientsThroughSoftmax) {
  using T = TypeParam;
  const Placed placed(37);
  const size_t count = placed.count();
  for (const bool plain : {true, false}) {
    std::vector<T> grad = random_numbers<T>(count, 5);
    SoftmaxBackwardArguments arguments;
    arguments.distances = placed.distances(/*causal=*/false, /*apply_mask=*/true);
    if (plain) arguments.distances = distances_of({placed.queries, placed.keys, 16, false, true});
    arguments.scalar = scalar_of<T>();
    arguments.batch = Placed::batch;
    arguments.scale = 0.5;
    arguments.grad = placed.matrices(grad.data());
    std::vector<T> weights = random_numbers<T>(count, 6);
    for (int64_t index = 0; index < static_cast<int64_t>(count); ++index) {
      const int64_t row = index / placed.keys;
      const double distance =
          expected_distance(arguments.distances, row / (3 * placed.queries), row % placed.queries, index % placed.keys);
      if (!std::isnan(distance)) continue;
      weights[index] = T{};  // as softmax gives them
      core::store(std::numeric_limits<Compute<T>>::quiet_NaN(), &grad[index]);
    }
    std::vector<double> partial(2 * placed.rows), slopes(6), want_slopes(6, 0.0);
    arguments.slopes = {2, 3, partial.data(), slopes.data(), core::Scalar::float64};
    for (const auto& [name, softmax_backward] : POSEMBED_COPIES(softmax_backward)) {
      SCOPED_TRACE(testing::Message() << name << " plain " << plain);
      std::vector<T> out(count);
      arguments.weights = placed.matrices(weights.data());
      arguments.out = placed.matrices(out.data());
      softmax_backward(arguments, 0, 4);
      softmax_backward(arguments, 4, placed.rows);
      if (name != source_name) {
        reduce_heads_cpu(arguments.slopes, Placed::batch, placed.queries);
      }
      want_slopes.assign(6, 0.0);
      for (int64_t row = 0; row < placed.rows; ++row) {
        const int64_t batch = row / (3 * placed.queries), head = row / placed.queries % 3;
        double dot = 0;
        const auto at = [&](const std::vector<T>& numbers, int64_t key) {
          return static_cast<double>(core::load(numbers[row * placed.keys + key]));
        };
        const auto distance = [&](int64_t key) {
          return expected_distance(arguments.distances, batch, row % placed.queries, key);
        };
        for (int64_t key = 0; key < placed.keys; ++key) {
          if (!std::isnan(distance(key))) dot += at(grad, key) * at(weights, key);
        }
        for (int64_t key = 0; key < placed.keys; ++key) {
          if (std::isnan(distance(key))) {
            ASSERT_EQ(at(out, key), 0.0) << "row " << row;
            continue;
          }
          const double change = at(weights, key) * (at(grad, key) - dot);
          ASSERT_NEAR(at(out, key), 0.5 * change, tolerance<T> * 100) << "row " << row;
          want_slopes[(distance(key) < 0 ? 3 : 0) + head] +=
              distance(key) < 0 ? change * distance(key) : -change * distance(key);
        }
      }
      for (size_t i = 0; i < slopes.size(); ++i) {
        EXPECT_NEAR(slopes[i], want_slopes[i], (std::is_same_v<T, double> ? 1e-9 : 0.05)) << i;
      }
    }
  }
}

TEST(ALiBiSlopes, AreCorrectlyRounded) {
  for (const auto kind : {SlopeKind::paper, SlopeKind::geometric}) {
    for (int64_t heads = 1; heads <= 256; ++heads) {
      for (int64_t head = 0; head < heads; ++head) {
        int64_t power = 1;
        while (2 * power <= heads) power *= 2;
        long double exponent = -8.0L * (head + 1) / heads;
        if (kind == SlopeKind::paper) {
          exponent = head < power ? -8.0L * (head + 1) / power : -8.0L * (2 * (head - power) + 1) / (2 * power);
        }
        ASSERT_EQ(slope(kind, 8.0, heads, head), static_cast<float>(std::exp2(exponent)))
            << heads << " heads, head " << head;
      }
    }
  }
}

}  // namespace
}  // namespace posembed::alibi
