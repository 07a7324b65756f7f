// Compares the rotary kernel of every instruction set, and the source of the CUDA kernel, run on
// the CPU by tests/cpp/cuda_on_cpu, with the rotation in long double; and the gradient of frequencies
// with the sum in long double. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

// Renamed, because the library may contain the real launchers.
#define rotate_cuda rotate_cuda_on_cpu
#define sum_moments_cuda sum_moments_cuda_on_cpu
#include "copies.h"
#include "rotary/call.h"
#include "rotary/problems.h"
#include "rotary/rotary_cuda.cu"

namespace posembed::rotary {
namespace {

using core::BFloat16;
using core::Float16;

/// The copies of the kernel that this processor can run.
std::vector<Variant> copies() {
  std::vector<Variant> result;
  POSEMBED_ADD_COPIES(result, isa::rotate)
  return result;
}

void rotate_all(const Arguments& arguments, int64_t, int64_t end) {
  if (end != arguments.batch * arguments.seq) return;  // launches take no range of tokens
  ASSERT_EQ(rotate_cuda(arguments, nullptr), nullptr);
}

constexpr Variant source{"cuda source", rotate_all};

std::vector<Variant> variants() {
  std::vector<Variant> result = copies();
  result.push_back(source);
  return result;
}

void check_all(const Problem& problem) {
  for (const Variant& variant : variants()) {
    Call call(problem);
    call.check(variant);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

void check_each(const std::vector<Problem>& problems) {
  for (const Problem& problem : problems) ASSERT_NO_FATAL_FAILURE(check_all(problem));
}

/// With and without rows that vectors of 16 bytes reach.
TEST(RotaryKernel, EverySizeOfWindow) {
  for (const Scalar scalar : scalars) {
    for (int64_t pairs = 0; pairs <= 70; ++pairs) {
      for (int bits = 0; bits < 8; ++bits) {
        const bool wide = (bits & 4) != 0;
        if (wide && pairs > 12 && pairs % 4 != 0) continue;
        Problem problem;
        problem.scalar = scalar;
        problem.pairs = pairs;
        problem.start = pairs % 3 == 0 ? 0 : wide ? 8 : pairs % 7;
        problem.head_dim = problem.start + 2 * pairs + (wide ? pairs % 2 == 0 ? 8 : 3 : pairs % 5);
        problem.interleaved = (bits & 1) != 0;
        problem.in_place = (bits & 2) != 0;
        problem.seq = wide ? 3 : 5;
        problem.offset = 131000;
        ASSERT_NO_FATAL_FAILURE(check_all(problem));
      }
    }
  }
}

TEST(RotaryKernel, AnAxisForEachPair) { check_each(an_axis_for_each_pair()); }

TEST(RotaryKernel, DocumentsRestartPositions) { check_each(restarting_documents()); }

TEST(RotaryKernel, CorruptDocumentsReadNothingOutside) {
  Problem problem;
  problem.batch = 1;
  problem.heads[1] = 0;
  problem.documents = {9, -4, 1000};
  for (const Variant& variant : variants()) {
    Call call(problem);
    core::DeviceError error = {};
    call.arguments.error = &error;
    variant.rotate(call.arguments, 0, problem.seq);
  }
}

TEST(RotaryKernel, LearnedFrequencies) { check_each(learned_frequencies()); }

TEST(RotaryKernel, FrequenciesThatAreNoNumbersGiveNan) {
  for (const Variant& variant : variants()) check_nan_frequencies(variant);
}

TEST(RotaryKernel, EachHeadTurnsByItsOwnFrequencies) {
  for (const Variant& variant : variants()) ASSERT_NO_FATAL_FAILURE(check_by_head(variant));
}

TEST(RotaryKernel, TangentsTurnByAQuarter) { check_each(tangents()); }

TEST(RotaryKernel, AmplitudesOfXPos) { check_each(decaying_pairs()); }

TEST(RotaryKernel, AmplitudesOfXPosBeyondTheLargestFloat) { check_each(decay_beyond_the_largest_float()); }

TEST(RotaryKernel, TurnsByTablesInSteps) {
  for (const Scalar scalar : scalars) {
    for (int bits = 0; bits < 8; ++bits) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = (bits & 1) != 0;
      problem.in_place = (bits & 2) != 0;
      problem.order = (bits & 4) != 0 ? Order::bhsd : Order::bshd;
      problem.pairs = bits % 3 == 0 ? 37 : 32;
      problem.start = 8;
      problem.head_dim = 2 * problem.pairs + 16;
      for (const ProductRounding rounding :
           {ProductRounding::none, ProductRounding::to_data_type, ProductRounding::fused}) {
        for (const Columns columns : {Columns::half, Columns::whole, Columns::whole_sines}) {
          problem.reverse = columns == Columns::whole;
          for (const Variant& variant : variants()) {
            if (rounding == ProductRounding::fused && variant.rotate != rotate_all) continue;
            for (const bool narrow : {false, true}) {
              ASSERT_NO_FATAL_FAILURE(check_in_steps(variant, problem, rounding, narrow, columns));
            }
          }
        }
      }
    }
  }
}

TEST(RotaryKernel, FractionalPositions) { check_each(fractional_positions()); }

TEST(RotaryKernel, AKeyThatIsTheWindowAlone) { check_each(keys_of_the_window_alone()); }

TEST(RotaryKernel, LargestWindow) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.pairs = max_pairs;
      problem.head_dim = 2 * max_pairs;
      problem.interleaved = interleaved;
      problem.seq = 2;
      ASSERT_NO_FATAL_FAILURE(check_all(problem));
    }
  }
}

TEST(RotaryKernel, LayoutsPositionsDirectionAmplitude) {
  for (const Scalar scalar : scalars) {
    for (const Order order : {Order::bshd, Order::bhsd, Order::sbhd}) {
      for (int bits = 0; bits < 16; ++bits) {
        Problem problem;
        problem.scalar = scalar;
        problem.order = order;
        problem.interleaved = (bits & 1) != 0;
        problem.reverse = (bits & 2) != 0;
        problem.in_place = (bits & 4) != 0;
        problem.index = (bits & 8) != 0 ? core::Index::int32 : core::Index::int64;
        problem.amplitude = 1.25;
        problem.padding = bits % 3 == 0 ? 16 : 3;
        problem.shift = bits % 3 == 0 ? bits % 4 : bits;
        problem.seq = 7;
        problem.positions = {0, 1, -1, 4095, 131071, 2147483647, -1, 5, -1, -1, -1, -1, 1048576, 3};
        ASSERT_NO_FATAL_FAILURE(check_all(problem));
      }
    }
  }
}

TEST(RotaryKernel, SizesZeroAndOne) {
  for (int bits = 0; bits < 81; ++bits) {
    Problem problem;
    problem.batch = bits % 3;
    problem.seq = bits / 3 % 3;
    problem.heads[0] = bits / 9 % 3;
    problem.heads[1] = bits / 27 % 3;
    ASSERT_NO_FATAL_FAILURE(check_all(problem));
  }
}

/// Rotates `problem`, by tables if `by_tables`, in place, to memory at the start of a cache line,
/// and to memory 16 bytes after one.
void check_streamed(Problem problem, bool by_tables) {
  problem.in_place = true;
  Call in_place(problem), call(problem);
  const rotary::Tables tables(problem, /*narrow=*/false, Columns::whole);
  if (by_tables) tables.apply(ProductRounding::to_data_type, &in_place.arguments);
  if (by_tables) tables.apply(ProductRounding::to_data_type, &call.arguments);
  baseline::rotate(in_place.arguments, 0, problem.batch * problem.seq);
  const size_t bytes = call.input(0).size();
  std::vector<char> memory(bytes + 128);
  for (const int64_t shift : {0, 16}) {
    char* out = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63) + shift;
    call.arguments.views[0].out = out;
    for (const Variant& variant : copies()) {
      memset(out, 0, bytes);
      variant.rotate(call.arguments, 0, problem.batch * problem.seq);
      ASSERT_EQ(memcmp(out, in_place.input(0).data(), bytes), 0)
          << variant.name << problem.text() << " shifted by " << shift;
    }
  }
}

TEST(RotaryKernel, StreamedOutputsAreTheSame) {
  struct Case {
    Order order;
    int64_t pairs, start;
    double decay_base = 0.0;
    bool by_tables = false;
    int64_t head_dim = 128;
  };
  const Case cases[] = {
      {Order::bshd, 64, 0},      {Order::bshd, 32, 64},           {Order::bshd, 9, 3},
      {Order::bhsd, 16, 0},      {Order::bshd, 16, 32},           {Order::bshd, 48, 32},
      {Order::bshd, 64, 0, 512}, {Order::bshd, 64, 0, 0.0, true}, {Order::bshd, 40, 0, 0.0, false, 80}};
  for (const Scalar scalar : scalars) {
    for (const auto& [order, pairs, start, decay_base, by_tables, head_dim] : cases) {
      for (const bool interleaved : {false, true}) {
        Problem problem;
        problem.scalar = scalar;
        problem.order = order;
        problem.interleaved = interleaved;
        problem.heads[0] = 17;
        problem.heads[1] = 0;
        // 8.5 MiB in all: just past the threshold
        problem.seq = 2048 * 128 / head_dim / core::size_of(scalar);
        problem.head_dim = head_dim;
        problem.pairs = pairs;
        problem.start = start;
        problem.decay_base = decay_base;
        problem.positions.resize(static_cast<size_t>(2 * problem.seq));
        std::iota(problem.positions.begin(), problem.positions.end(), 0);
        problem.positions[3] = -1;
        ASSERT_NO_FATAL_FAILURE(check_streamed(problem, by_tables));
      }
    }
  }
}

/// The same positions for every sequence of the batch.
Problem with_common_positions(Problem problem) {
  for (int64_t token = 0; token < problem.batch * problem.seq; ++token) {
    const int64_t seq = token % problem.seq;
    problem.positions.push_back(seq % 7 == 3 ? -1 : 131000 + 3 * seq);
  }
  return problem;
}

/// Rotates `problem` with one row of positions for all sequences and with a row for each.
void check_common_positions(const Problem& problem) {
  Call apart(problem);
  const int64_t tokens = problem.batch * problem.seq;
  baseline::rotate(apart.arguments, 0, tokens);
  for (const Variant& variant : copies()) {
    Call together(problem);
    together.arguments.position_stride[0] = 0;
    int64_t begin = 0;
    for (const int64_t end : {int64_t{1}, 2 * problem.seq + 19, tokens}) {
      variant.rotate(together.arguments, begin, end);
      begin = end;
    }
    for (int64_t r = 0; r < together.arguments.count; ++r) {
      ASSERT_EQ(together.output(r), apart.output(r)) << variant.name << ", " << problem.text();
    }
  }
}

TEST(RotaryKernel, UnrotatedTokensUnderTablesByComponent) {
  for (const Variant& variant : variants()) check_tables_by_component(variant);
}

TEST(RotaryKernel, SequencesAtTheSamePositionsShareAngles) {
  for (const Scalar scalar : scalars) {
    for (const Order order : {Order::bshd, Order::bhsd, Order::sbhd}) {
      for (const bool in_place : {false, true}) {
        Problem problem;
        problem.scalar = scalar;
        problem.order = order;
        problem.in_place = in_place;
        problem.batch = 5;
        problem.seq = 39;
        problem.padding = 2;
        ASSERT_NO_FATAL_FAILURE(check_common_positions(with_common_positions(problem)));
      }
    }
  }
}

TEST(RotaryKernel, SequencesShareAnglesBeyondTheCaches) {
  for (const Scalar scalar : scalars) {
    for (const bool in_place : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.in_place = in_place;
      problem.batch = 3;
      problem.heads[0] = 1;
      problem.heads[1] = 0;
      problem.head_dim = 128 / core::size_of(scalar);
      problem.pairs = problem.head_dim / 2;
      problem.seq = 22500;  // 8.2 MiB in all: just past the threshold
      // malloc's large blocks begin 16 bytes after the start of a page; rows at the start of a
      // cache line are streamed.
      problem.shift = 48 / core::size_of(scalar);
      ASSERT_NO_FATAL_FAILURE(check_common_positions(with_common_positions(problem)));
    }
  }
}

TEST(RotaryKernel, SameBitsOnEveryInstructionSetAndOnGpus) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t pairs : {32, 99}) {
        Problem problem;
        problem.scalar = scalar;
        problem.interleaved = interleaved;
        problem.in_place = true;
        problem.seq = 3 * pairs;
        problem.head_dim = pairs == 99 ? 200 : 64;
        problem.pairs = pairs;
        problem.amplitude = 0.7;
        problem.offset = 1000000;
        problem.decay_base = interleaved ? 1e5 : 0.0;
        Call first(problem);
        baseline::rotate(first.arguments, 0, problem.batch * problem.seq);
        for (const Variant& variant : variants()) {
          Call call(problem);
          variant.rotate(call.arguments, 0, problem.batch * problem.seq);
          for (int r = 0; r < 2; ++r) {
            ASSERT_EQ(call.input(r), first.input(r)) << variant.name << " " << problem.text();
          }
        }
      }
    }
  }
}

/// Rotates `first` and `second` as pair 0 of every row and returns pair 0 of the first row.
std::pair<double, double> rotate_special(const Variant& variant, Scalar scalar, bool interleaved, double first,
                                         double second, int64_t position) {
  Problem problem;
  problem.scalar = scalar;
  problem.interleaved = interleaved;
  problem.in_place = true;
  problem.batch = problem.seq = 1;
  problem.pairs = 32;
  problem.offset = position;
  Call call(problem);
  void* data = call.input(0).data();
  const int64_t partner = interleaved ? 1 : problem.pairs;
  set_element(data, scalar, 0, first);
  set_element(data, scalar, partner, second);
  variant.rotate(call.arguments, 0, 1);
  for (int64_t i = 1; i < problem.head_dim; ++i) {
    EXPECT_TRUE(i == partner || std::isfinite(element(data, scalar, i))) << "neighbour " << i;
  }
  return {element(data, scalar, 0), element(data, scalar, partner)};
}

TEST(RotaryKernel, NanAndInfinityStayInTheirPair) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Variant& variant : variants()) {
    for (const Scalar scalar : scalars) {
      for (const bool interleaved : {false, true}) {
        const auto result = rotate_special(variant, scalar, interleaved, nan, 1.0, 3);
        EXPECT_TRUE(std::isnan(result.first) && std::isnan(result.second)) << variant.name;
        // cos(1), sin(1) > 0: an infinite first member makes both results infinite and positive.
        const auto infinite = rotate_special(variant, scalar, interleaved, infinity, 1.0, 1);
        EXPECT_EQ(infinite.first, infinity) << variant.name;
        EXPECT_EQ(infinite.second, infinity) << variant.name;
        const auto both = rotate_special(variant, scalar, interleaved, infinity, infinity, 1);
        EXPECT_TRUE(std::isnan(both.first)) << variant.name;
      }
    }
  }
}

TEST(RotaryKernel, EveryBitPatternOfBFloat16) {
  // Both members take all bit patterns; at position 0 a finite pair does not change, including
  // denormals and -0.
  for (const Variant& variant : variants()) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = Scalar::bfloat16;
      problem.interleaved = interleaved;
      problem.in_place = true;
      problem.batch = 1;
      problem.seq = 1024;
      problem.heads[0] = 1;
      problem.heads[1] = 0;
      problem.positions.assign(1024, 0);
      Call call(problem);
      auto* bits = reinterpret_cast<uint16_t*>(call.input(0).data());
      for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
      variant.rotate(call.arguments, 0, 1024);
      for (int i = 0; i < 65536; ++i) {
        const int partner = interleaved ? i ^ 1 : i ^ 32;
        const bool finite = (i & 0x7f80) != 0x7f80 && (partner & 0x7f80) != 0x7f80;
        const bool zero = (i & 0x7fff) == 0;  // x + 0 * y may turn -0 into 0
        ASSERT_TRUE(!finite || zero || bits[i] == i) << variant.name << " " << i;
        const float value = core::load(BFloat16{bits[i]});
        const bool nan = (i & 0x7fff) > 0x7f80 || (partner & 0x7fff) >= 0x7f80;
        ASSERT_TRUE(!nan || std::isnan(value)) << variant.name << " " << i;
      }
    }
  }
}

TEST(RotaryKernel, TiesRoundToEvenWhereverTheyStand) {
  // 1.5 times (1 + 3/128) lies halfway between two bfloat16 numbers; all others are exact.
  constexpr float tie = 1.0f + 3.0f / 128, even = 1.5f + 4.0f / 128;
  for (const Variant& variant : variants()) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t pairs : {8, 16, 40, 64, 99}) {
        Problem problem;
        problem.scalar = Scalar::bfloat16;
        problem.interleaved = interleaved;
        problem.in_place = true;
        problem.batch = 1;
        problem.seq = problem.head_dim = 2 * pairs;
        problem.pairs = pairs;
        problem.heads[0] = 1;
        problem.heads[1] = 0;
        problem.amplitude = 1.5;
        problem.positions.assign(static_cast<size_t>(problem.seq), 0);
        Call call(problem);
        void* data = call.input(0).data();
        const int64_t size = problem.head_dim;
        for (int64_t i = 0; i < size * size; ++i) {
          set_element(data, problem.scalar, i, i / size == i % size ? tie : 1.0f);
        }
        variant.rotate(call.arguments, 0, problem.seq);
        for (int64_t i = 0; i < size * size; ++i) {
          ASSERT_EQ(element(data, problem.scalar, i), i / size == i % size ? even : 1.5f)
              << variant.name << problem.text() << " row " << i / size << " column " << i % size;
        }
      }
    }
  }
}

TEST(RotaryKernel, RowsSpreadOverMoreThanFourGigabytes) {
  // Reserves only address space: the rows of two tokens are 2^31 + 64 elements apart.
  const int64_t stride = (int64_t{1} << 31) + 64;
  const size_t bytes = static_cast<size_t>(stride + 64) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  auto* values = static_cast<float*>(memory);
  for (const Variant& variant : variants()) {
    Problem problem;
    problem.batch = 1;
    problem.seq = 2;
    problem.heads[0] = 1;
    problem.heads[1] = 0;
    Call call(problem);
    HeadView& view = call.arguments.views[0];
    view.in = view.out = memory;
    view.in_stride[1] = view.out_stride[1] = stride;
    values[stride] = 1.0f;
    values[stride + 32] = 0.0f;
    variant.rotate(call.arguments, 0, 2);
    EXPECT_NEAR(values[stride], std::cos(1.0), 1e-7) << variant.name;
    EXPECT_NEAR(values[stride + 32], std::sin(1.0), 1e-7) << variant.name;
  }
  munmap(memory, bytes);
}

/// More heads than a block copies at a time, into rows with another distance than those it reads.
TEST(RotaryGpuSource, ComponentsOutsideTheWindowOfManyHeads) {
  for (const Scalar scalar : scalars) {
    Problem problem;
    problem.scalar = scalar;
    problem.heads[0] = 130;
    problem.heads[1] = 9;
    problem.pairs = 16;
    problem.start = 64;
    problem.head_dim = 192;
    problem.seq = 3;
    problem.padding = 8;
    Call cpu(problem), gpu(problem);
    const int64_t tokens = problem.batch * problem.seq;
    const auto row_bytes = static_cast<size_t>(problem.head_dim * core::size_of(scalar));
    std::vector<char> out[2];
    for (int r = 0; r < 2; ++r) {
      HeadView& view = gpu.arguments.views[r];
      out[r].resize(static_cast<size_t>(tokens * view.heads) * row_bytes);
      view.out = out[r].data();
      view.out_stride[2] = problem.head_dim;
      view.out_stride[1] = view.heads * problem.head_dim;
      view.out_stride[0] = problem.seq * view.out_stride[1];
    }
    rotate_cpu(cpu.arguments, 0, tokens);
    rotate_all(gpu.arguments, 0, tokens);
    for (int r = 0; r < 2; ++r) {
      const HeadView& view = cpu.arguments.views[r];
      for (int64_t row = 0; row < tokens * view.heads; ++row) {
        const int64_t token = row / view.heads;
        const int64_t element = token / problem.seq * view.out_stride[0] + token % problem.seq * view.out_stride[1] +
                                row % view.heads * view.out_stride[2];
        const char* expected = static_cast<const char*>(view.out) + element * core::size_of(scalar);
        ASSERT_EQ(memcmp(out[r].data() + static_cast<size_t>(row) * row_bytes, expected, row_bytes), 0)
            << problem.text() << " row " << row;
      }
    }
  }
}

TEST(RotaryGpuSource, HeadsOverBlocksAndPasses) {
  for (const int multiprocessors : {0, 1, 4, 132}) {
    pretended_multiprocessors = multiprocessors;
    for (const Scalar scalar : scalars) {
      for (const int64_t heads : {1, 3, 8, 40, 130}) {
        Problem problem;
        problem.scalar = scalar;
        problem.heads[0] = heads;
        problem.heads[1] = heads / 4;
        problem.batch = 1;
        problem.seq = heads > 8 ? 2 : 9;
        problem.in_place = heads % 2 == 0;
        ASSERT_NO_FATAL_FAILURE(Call(problem).check(source));
      }
    }
  }
  pretended_multiprocessors = 4;
}

/// So few tokens that every thread computes the angles of its own pairs.
TEST(RotaryGpuSource, FewTokens) {
  pretended_multiprocessors = 132;
  for (const Scalar scalar : scalars) {
    for (int bits = 0; bits < 16; ++bits) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = (bits & 1) != 0;
      problem.reverse = (bits & 2) != 0;
      problem.in_place = (bits & 4) != 0;
      problem.order = (bits & 8) != 0 ? Order::bhsd : Order::bshd;
      problem.pairs = bits % 3 == 0 ? 64 : 16;
      problem.start = bits % 5 == 0 ? 8 : 0;
      problem.head_dim = problem.start + 2 * problem.pairs + (bits % 2 == 0 ? 16 : 0);
      problem.heads[0] = 2 * bits + 1;
      problem.heads[1] = bits % 4;
      problem.amplitude = 1.25;
      problem.padding = 8;
      problem.axes = bits % 7 == 0 ? 2 : 1;
      problem.seq = 3;
      problem.positions = {0, 131071, -1, 2147483647, 5, 7, 1048576, 3, -1, 8, 2, 9};
      ASSERT_NO_FATAL_FAILURE(Call(problem).check(source));
      problem.axes = 1;
      problem.positions.clear();
      problem.offset = 1000000;
      if (problem.order == Order::bshd) problem.documents = {0, 1, 3};
      Call cpu(problem), gpu(problem);
      rotate_cpu(cpu.arguments, 0, problem.batch * problem.seq);
      rotate_all(gpu.arguments, 0, problem.batch * problem.seq);
      ASSERT_EQ(cpu.output(0), gpu.output(0)) << problem.text();
      ASSERT_EQ(cpu.output(1), gpu.output(1)) << problem.text();
    }
  }
  pretended_multiprocessors = 4;
}

/// Zeros of both signs, infinity, NaN, and numbers whose sums overflow or are denormal.
TEST(RotaryGpuSource, TablesInBfloat16TurnSpecialNumbersLikeTablesInFloat32) {
  const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 3.3e38, -3.3e38, 1e-38, 1e-37, 1};
  for (int bits = 0; bits < 4; ++bits) {
    Problem problem;
    problem.scalar = Scalar::bfloat16;
    problem.interleaved = (bits & 1) != 0;
    problem.reverse = (bits & 2) != 0;
    Call narrow(problem), wide(problem);
    rotary::Tables tables(problem, /*narrow=*/true);
    tables.apply(ProductRounding::to_data_type, &narrow.arguments);
    std::vector<char>& rows = narrow.input(0);
    for (int64_t i = 0; i < int64_t(rows.size() / 2); ++i) {
      set_element(rows.data(), problem.scalar, i, special[i * i % 101 % 10]);
    }
    wide.input(0) = rows;
    rotate_all(narrow.arguments, 0, 10);
    tables.narrow_cosines.clear();
    tables.apply(ProductRounding::to_data_type, &wide.arguments);
    rotate_all(wide.arguments, 0, 10);
    for (int64_t i = 0; i < int64_t(rows.size() / 2); ++i) {
      const double expected = element(wide.output(0).data(), problem.scalar, i);
      const double found = element(narrow.output(0).data(), problem.scalar, i);
      ASSERT_TRUE(std::isnan(expected) ? std::isnan(found) : found == expected) << problem.text();
      ASSERT_EQ(std::signbit(expected) && !std::isnan(expected), std::signbit(found) && !std::isnan(found));
    }
  }
}

TEST(RotaryGpuSource, RecordsABadPositionAndLeavesItsToken) {
  Problem problem;
  problem.batch = 1;
  problem.seq = 4;
  problem.positions = {7, -2, 3, -9};
  Call call(problem);
  core::DeviceError error = {};
  call.arguments.error = &error;
  rotate_all(call.arguments, 0, 4);
  EXPECT_EQ(error.state, 2u);
  EXPECT_EQ(error.kind, core::ErrorKind::position);
  EXPECT_TRUE(error.index == 1 || error.index == 3);
  EXPECT_EQ(error.value, error.index == 1 ? -2 : -9);
  const auto bytes = static_cast<size_t>(problem.heads[0] * problem.head_dim) * sizeof(float);
  EXPECT_EQ(memcmp(call.output(0).data() + bytes, call.input(0).data() + bytes, bytes), 0);
  EXPECT_NE(memcmp(call.output(0).data(), call.input(0).data(), bytes), 0);
}

// ---- the gradient of frequencies ----

/// The sum of moments of an instruction set.
struct Sum {
  const char* name;
  void (*sum)(const Arguments&, double*, int64_t, int64_t);
};

std::vector<Sum> sums_of_moments() {
  std::vector<Sum> result;
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
  for (const auto& [name, sum] : sums_of_moments()) {
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
