// Tests the source of the CUDA kernel, run on the CPU by tests/cpp/cuda_on_cpu: results with and
// without 16-byte accesses and with heads divided among several blocks, and reports of bad
// positions. Needs no GPU.
#include <cuda_runtime.h>

// Renamed, because the library may contain the real launcher.
#define rotate_cuda rotate_cuda_on_cpu
#include "rotary/call.h"
#include "rotary/problems.h"
#include "rotary/rotary_cuda.cu"

namespace posembed::rotary {
namespace {

void rotate_all(const Arguments& arguments, int64_t, int64_t end) {
  if (end != arguments.batch * arguments.seq) return;  // launches take no range of tokens
  ASSERT_EQ(rotate_cuda(arguments, nullptr), nullptr);
}

constexpr Variant source{"cuda source", rotate_all};

void check(const Problem& problem) { Call(problem).check(source); }

void check_each(const std::vector<Problem>& problems) {
  for (const Problem& problem : problems) ASSERT_NO_FATAL_FAILURE(check(problem));
}

TEST(RotaryGpuSource, UnrotatedTokensUnderTablesByComponent) { check_tables_by_component(source); }

TEST(RotaryGpuSource, EverySizeOfWindow) {
  for (const Scalar scalar : scalars) {
    for (int64_t pairs = 0; pairs <= 70; pairs += pairs < 12 ? 1 : 4) {
      for (int bits = 0; bits < 4; ++bits) {
        Problem problem;
        problem.scalar = scalar;
        problem.pairs = pairs;
        problem.start = pairs % 3 == 0 ? 0 : 8;
        problem.head_dim = problem.start + 2 * pairs + (pairs % 2 == 0 ? 8 : 3);
        problem.interleaved = (bits & 1) != 0;
        problem.in_place = (bits & 2) != 0;
        problem.seq = 3;
        ASSERT_NO_FATAL_FAILURE(check(problem));
      }
    }
  }
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
        ASSERT_NO_FATAL_FAILURE(check(problem));
      }
    }
  }
  pretended_multiprocessors = 4;
}

TEST(RotaryGpuSource, LayoutsPositionsDirectionAmplitude) {
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
        problem.shift = bits % 4;
        problem.seq = 4;
        problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3};
        ASSERT_NO_FATAL_FAILURE(check(problem));
      }
    }
  }
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
      ASSERT_NO_FATAL_FAILURE(check(problem));
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

TEST(RotaryGpuSource, AnAxisForEachPair) { check_each(an_axis_for_each_pair()); }

TEST(RotaryGpuSource, DocumentsRestartPositions) { check_each(restarting_documents()); }

TEST(RotaryGpuSource, CorruptDocumentsReadNothingOutside) {
  Problem problem;
  problem.batch = 1;
  problem.heads[1] = 0;
  problem.documents = {9, -4, 1000};
  Call call(problem);
  core::DeviceError error = {};
  call.arguments.error = &error;
  rotate_all(call.arguments, 0, call.arguments.batch * call.arguments.seq);
}

TEST(RotaryGpuSource, LearnedFrequencies) { check_each(learned_frequencies()); }

TEST(RotaryGpuSource, FrequenciesThatAreNoNumbersGiveNan) { check_nan_frequencies(source); }

TEST(RotaryGpuSource, EachHeadTurnsByItsOwnFrequencies) { check_by_head(source); }

TEST(RotaryGpuSource, TangentsTurnByAQuarter) { check_each(tangents()); }

TEST(RotaryGpuSource, AmplitudesOfXPos) { check_each(decaying_pairs()); }

TEST(RotaryGpuSource, AmplitudesOfXPosBeyondTheLargestFloat) { check_each(decay_beyond_the_largest_float()); }

TEST(RotaryGpuSource, TurnsByTablesInSteps) {
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
          ASSERT_NO_FATAL_FAILURE(check_in_steps(source, problem, rounding, false, columns));
          ASSERT_NO_FATAL_FAILURE(check_in_steps(source, problem, rounding, true, columns));
        }
      }
    }
  }
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

TEST(RotaryGpuSource, FractionalPositions) { check_each(fractional_positions()); }

TEST(RotaryGpuSource, AKeyThatIsTheWindowAlone) { check_each(keys_of_the_window_alone()); }

TEST(RotaryGpuSource, LargestWindow) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.pairs = max_pairs;
      problem.head_dim = 2 * max_pairs;
      problem.interleaved = interleaved;
      problem.seq = 2;
      ASSERT_NO_FATAL_FAILURE(check(problem));
    }
  }
}

TEST(RotaryGpuSource, SameBitsAsTheCpu) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = interleaved;
      problem.in_place = true;
      problem.offset = 1000000;
      problem.amplitude = 0.7;
      problem.decay_base = interleaved ? 1e5 : 0.0;
      Call cpu(problem), gpu(problem);
      rotate_cpu(cpu.arguments, 0, problem.batch * problem.seq);
      rotate_all(gpu.arguments, 0, problem.batch * problem.seq);
      ASSERT_EQ(cpu.input(0), gpu.input(0)) << problem.text();
      ASSERT_EQ(cpu.input(1), gpu.input(1)) << problem.text();
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

}  // namespace
}  // namespace posembed::rotary
