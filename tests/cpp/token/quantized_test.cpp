// Tests the gather of codes, in every instruction set and in CUDA's source run on the CPU by
// tests/cpp/cuda_on_cpu, against its definition in double. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define gather_codes_cuda gather_codes_cuda_on_cpu
#include "copies.h"
#include "token/token_quantized_cuda.cu"

namespace posembed::token {
namespace {

/// The number of an e4m3fn code, by its definition.
double float8_number(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

double number_of_code(Code code, const uint8_t* row, int64_t column) {
  if (code == Code::int8) return static_cast<int8_t>(row[column]);
  if (code == Code::uint4) return row[column / 2] >> 4 * (column % 2) & 15;
  return float8_number(row[column]);
}

struct Problem {
  Code code;
  int64_t dim, padding, block_rows, block_columns;
  bool exponents, biases;
  double factor;
};

constexpr int64_t rows = 37;

struct Variant {
  const char* name;
  void (*gather)(const QuantizedArguments&, int64_t, int64_t);
};

void gather_on_gpu(const QuantizedArguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(gather_codes_cuda(arguments, nullptr), nullptr);
}

std::vector<Variant> variants() {
  std::vector<Variant> result;
  POSEMBED_ADD_COPIES(result, isa::gather_codes)
  result.push_back({"cuda source", gather_on_gpu});
  return result;
}

std::vector<Problem> problems() {
  std::vector<Problem> result;
  for (const Code code : {Code::float8, Code::int8, Code::uint4}) {
    for (const int64_t dim : {1040, 256, 96, 70, 2}) {
      for (const bool biases : {false, true}) {
        result.push_back({code, dim, 8, 1, dim, false, biases, 1.0});
        result.push_back({code, dim, 3, 1, 32, true, biases, 16.0});
        result.push_back({code, dim, 0, 16, 10, false, biases, 1.0});
      }
    }
  }
  return result;
}

template <typename T>
void expect_numbers(const Problem& problem) {
  using C = core::Compute<T>;
  std::mt19937 random(static_cast<unsigned>(problem.dim));
  QuantizedArguments a;
  a.code = problem.code;
  a.embedding_dim = problem.dim;
  a.rows = rows;
  a.row_bytes = (problem.code == Code::uint4 ? problem.dim / 2 : problem.dim) + problem.padding;
  a.block_rows = problem.block_rows;
  a.block_columns = problem.block_columns;
  a.has_exponents = problem.exponents;
  a.factor = problem.factor;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * a.row_bytes));
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
  a.codes = codes.data();
  const int64_t blocks = (problem.dim + problem.block_columns - 1) / problem.block_columns;
  const int64_t scale_count = (rows + problem.block_rows - 1) / problem.block_rows * blocks;
  std::vector<float> scales, biases;
  std::vector<uint8_t> exponents;
  std::uniform_real_distribution<float> unit(0.5f, 1.5f);
  for (int64_t i = 0; i < scale_count; ++i) {
    exponents.push_back(static_cast<uint8_t>(110 + random() % 30));
    scales.push_back(problem.exponents ? std::ldexp(1.0f, exponents.back() - 127) : unit(random));
    biases.push_back(unit(random) - 3);
  }
  a.scales = problem.exponents ? static_cast<const void*>(exponents.data()) : scales.data();
  a.biases = problem.biases ? biases.data() : nullptr;
  std::vector<int32_t> ids;
  for (int i = 0; i < 41; ++i) ids.push_back(static_cast<int32_t>(random() % rows));
  a.ids = {ids.data(), core::Index::int32};
  a.count = 41;
  a.scalar = std::is_same_v<T, double>           ? core::Scalar::float64
             : std::is_same_v<T, core::BFloat16> ? core::Scalar::bfloat16
             : std::is_same_v<T, core::Float16>  ? core::Scalar::float16
                                                 : core::Scalar::float32;
  for (const Variant& variant : variants()) {
    std::vector<T> out(static_cast<size_t>(a.count * a.embedding_dim));
    a.out = out.data();
    variant.gather(a, 0, a.count);
    for (int64_t index = 0; index < a.count; ++index) {
      const int64_t row = ids[static_cast<size_t>(index)];
      for (int64_t column = 0; column < problem.dim; ++column) {
        const auto block = static_cast<size_t>(row / problem.block_rows * blocks + column / problem.block_columns);
        const double number = number_of_code(problem.code, a.codes + row * a.row_bytes, column);
        const double exact = number * scales[block] + (problem.biases ? biases[block] : 0.0);
        // float32 is rounded once, then once to T.
        T expected;
        core::store(static_cast<C>(static_cast<C>(exact) * static_cast<C>(problem.factor)), &expected);
        const C wanted = core::load(expected);
        const C found = core::load(out[static_cast<size_t>(index * problem.dim + column)]);
        ASSERT_TRUE(found == wanted || (std::isnan(found) && std::isnan(number)))
            << variant.name << ", code " << static_cast<int>(problem.code) << ", dim " << problem.dim << ", block "
            << problem.block_columns << ": row " << row << ", column " << column << ": " << found << " is not "
            << wanted;
      }
    }
  }
}

TEST(QuantizedGather, GivesTheNumbers) {
  for (const Problem& problem : problems()) {
    ASSERT_NO_FATAL_FAILURE(expect_numbers<float>(problem));
    ASSERT_NO_FATAL_FAILURE(expect_numbers<core::BFloat16>(problem));
    ASSERT_NO_FATAL_FAILURE(expect_numbers<core::Float16>(problem));
    ASSERT_NO_FATAL_FAILURE(expect_numbers<double>(problem));
  }
}

TEST(QuantizedGather, ExponentsAreAllPowersOfTwo) {
  for (const uint32_t exponent : {0u, 1u, 127u, 254u, 255u}) {
    const uint8_t code = 0x38, byte = static_cast<uint8_t>(exponent);  // the number 1
    const int32_t id = 0;
    float out = 0;
    QuantizedArguments a;
    a.codes = &code;
    a.scales = &byte;
    a.has_exponents = true;
    a.out = &out;
    a.rows = a.embedding_dim = a.row_bytes = a.block_columns = a.count = 1;
    a.ids = {&id, core::Index::int32};
    gather_codes_cpu(a, 0, 1);
    if (exponent == 255) {
      EXPECT_TRUE(std::isnan(out));
    } else {
      EXPECT_EQ(out, std::ldexp(1.0f, static_cast<int>(exponent) - 127));
    }
  }
}

TEST(QuantizedGather, CudaWritesZerosForAnIdOutside) {
  const uint8_t codes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const float scale = 1;
  const int32_t ids[2] = {-1, 5};
  float out[16];
  std::fill(std::begin(out), std::end(out), 7.0f);
  QuantizedArguments a;
  a.codes = codes;
  a.scales = &scale;
  a.out = out;
  a.rows = 1;
  a.embedding_dim = a.row_bytes = a.block_columns = 8;
  a.count = 2;
  a.ids = {ids, core::Index::int32};
  ASSERT_EQ(gather_codes_cuda(a, nullptr), nullptr);
  for (const float value : out) EXPECT_EQ(value, 0.0f);
}

}  // namespace
}  // namespace posembed::token
