// The CPU rotary kernel of every instruction set against the rotation in long double.
#include "rotary/kernel.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rotary/frequencies.h"

namespace posembed::rotary {
namespace {

using core::BFloat16;
using core::Float16;
using core::Scalar;

using Kernel = void (*)(const Arguments&, int64_t, int64_t);

struct Variant {
  const char* name;
  Kernel rotate;
};

/// The copies of the kernel that this processor can run.
std::vector<Variant> variants() {
  std::vector<Variant> result = {{"baseline", baseline::rotate}};
#if defined(POSEMBED_X86_VARIANTS)
  if (core::instruction_set() >= core::InstructionSet::avx2)
    result.push_back({"avx2", avx2::rotate});
  if (core::instruction_set() >= core::InstructionSet::avx512)
    result.push_back({"avx512", avx512::rotate});
#endif
  return result;
}

constexpr Scalar scalars[] = {Scalar::float32, Scalar::float64, Scalar::bfloat16, Scalar::float16};

double element(const void* data, Scalar scalar, int64_t place) {
  return core::visit_scalar(scalar, [&](auto tag) -> double {
    return core::load(static_cast<const typename decltype(tag)::type*>(data)[place]);
  });
}

void set_element(void* data, Scalar scalar, int64_t place, double value) {
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::store(static_cast<core::Compute<T>>(value), static_cast<T*>(data) + place);
  });
}

/// The distance of neighbouring numbers at `value`.
double ulp(Scalar scalar, double value) {
  const int digits = scalar == Scalar::bfloat16 ? 8 : scalar == Scalar::float16 ? 11 : 24;
  const int least = scalar == Scalar::bfloat16 ? -133 : scalar == Scalar::float16 ? -24 : -149;
  if (scalar == Scalar::float64) return std::ldexp(1.0, std::max(std::ilogb(value) - 52, -1074));
  return value == 0 ? std::ldexp(1.0, least)
                    : std::ldexp(1.0, std::max(std::ilogb(value) - digits + 1, least));
}

enum class Order { bshd, bhsd, sbhd };

struct Problem {
  Scalar scalar = Scalar::float32;
  int64_t batch = 2, seq = 5, heads[2] = {3, 2}, head_dim = 64, pairs = 32, start = 0;
  bool interleaved = false, reverse = false, in_place = false;
  double amplitude = 1.0;
  Order order = Order::bshd;
  int64_t padding = 0;  // elements between rows
  int64_t shift = 0;    // elements before the first row: misaligns every row
  int64_t offset = 0;
  std::vector<int64_t> positions;  // [batch, seq], or empty
  core::Index index = core::Index::int64;

  std::string text() const {
    return "scalar " + std::to_string(int(scalar)) + " heads " + std::to_string(heads[0]) + "+" +
           std::to_string(heads[1]) + " dim " + std::to_string(head_dim) + " pairs " +
           std::to_string(pairs) + " start " + std::to_string(start) + " interleaved " +
           std::to_string(interleaved) + " reverse " + std::to_string(reverse) + " in place " +
           std::to_string(in_place) + " order " + std::to_string(int(order)) + " shift " +
           std::to_string(shift);
  }
};

/// Owns what a Problem's arguments point to.
class Call {
 public:
  explicit Call(const Problem& problem, uint64_t seed = 5) : problem_(problem) {
    for (const auto& frequency : geometric_frequencies(1e4, 2 * problem.pairs)) {
      turns_.push_back(core::turn_from_radians(frequency));
    }
    arguments.scalar = problem.scalar;
    arguments.batch = problem.batch;
    arguments.seq = problem.seq;
    arguments.head_dim = problem.head_dim;
    arguments.pairs = problem.pairs;
    arguments.start = problem.start;
    arguments.interleaved = problem.interleaved;
    arguments.reverse = problem.reverse;
    arguments.amplitude = problem.amplitude;
    arguments.offset = problem.offset;
    arguments.turns = turns_.data();
    arguments.count = problem.heads[1] > 0 ? 2 : 1;
    set_positions();
    std::mt19937_64 random(seed);
    for (int64_t r = 0; r < arguments.count; ++r) set_rows(r, &random);
  }

  Arguments arguments;

  int64_t place(int64_t r, int64_t b, int64_t s, int64_t h) const {
    const int64_t* stride = arguments.rows[r].in_stride;
    return problem_.shift + b * stride[0] + s * stride[1] + h * stride[2];
  }

  int64_t position(int64_t b, int64_t s) const {
    return problem_.positions.empty()
               ? problem_.offset + s
               : problem_.positions[static_cast<size_t>(b * problem_.seq + s)];
  }

  std::vector<char>& input(int64_t r) { return in_[r]; }
  std::vector<char>& output(int64_t r) { return problem_.in_place ? in_[r] : out_[r]; }

  /// Runs the kernel and compares every element, those outside the rows included.
  void check(const Variant& variant) {
    const std::vector<char> before[2] = {in_[0], in_[1]}, blank[2] = {output(0), output(1)};
    const int64_t tokens = problem_.batch * problem_.seq, middle = tokens / 3;
    variant.rotate(arguments, 0, middle);
    variant.rotate(arguments, middle, tokens);
    for (int64_t r = 0; r < arguments.count; ++r) {
      std::vector<char> expected = blank[r];
      for (int64_t b = 0; b < problem_.batch; ++b)
        for (int64_t s = 0; s < problem_.seq; ++s)
          for (int64_t h = 0; h < problem_.heads[r]; ++h)
            check_row(variant, before[r].data(), output(r).data(), expected.data(),
                      place(r, b, s, h), position(b, s));
      ASSERT_EQ(memcmp(expected.data(), output(r).data(), expected.size()), 0)
          << variant.name << " wrote outside its rows: " << problem_.text();
      if (problem_.in_place) continue;
      ASSERT_EQ(in_[r], before[r]) << variant.name << " wrote its input";
    }
  }

 private:
  void set_positions() {
    if (problem_.positions.empty()) return;
    arguments.positions.type = problem_.index;
    if (problem_.index == core::Index::int32) {
      narrow_.assign(problem_.positions.begin(), problem_.positions.end());
      arguments.positions.data = narrow_.data();
    } else {
      arguments.positions.data = problem_.positions.data();
    }
    arguments.position_stride[0] = problem_.seq;
    arguments.position_stride[1] = 1;
  }

  void set_rows(int64_t r, std::mt19937_64* random) {
    Rows& rows = arguments.rows[r];
    rows.heads = problem_.heads[r];
    const int64_t row = problem_.head_dim + problem_.padding;
    const int64_t b = problem_.batch, s = problem_.seq, h = rows.heads;
    const int64_t strides[3][3] = {
        {s * h * row, h * row, row}, {h * s * row, row, s * row}, {h * row, b * h * row, row}};
    for (int i = 0; i < 3; ++i)
      rows.in_stride[i] = rows.out_stride[i] = strides[int(problem_.order)][i];
    const int64_t elements = problem_.shift + b * s * h * row;
    const int64_t size = core::size_of(problem_.scalar);
    in_[r].resize(static_cast<size_t>(elements * size));
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < elements; ++i)
      set_element(in_[r].data(), problem_.scalar, i, normal(*random));
    out_[r].assign(in_[r].size(), char(0xab));
    rows.in = in_[r].data() + problem_.shift * size;
    rows.out = output(r).data() + problem_.shift * size;
  }

  /// Checks the rotated window, and copies the row into `expected`, which then holds what may be
  /// there.
  void check_row(const Variant& variant, const char* before, const char* after, char* expected,
                 int64_t place, int64_t position) {
    const Scalar scalar = problem_.scalar;
    const auto size = static_cast<size_t>(core::size_of(scalar));
    const auto begin = static_cast<size_t>(place) * size;
    memcpy(expected + begin, before + begin, static_cast<size_t>(problem_.head_dim) * size);
    if (position == -1) return;
    memcpy(expected + begin + static_cast<size_t>(problem_.start) * size,
           after + begin + static_cast<size_t>(problem_.start) * size,
           static_cast<size_t>(2 * problem_.pairs) * size);
    for (int64_t i = 0; i < problem_.pairs; ++i) {
      const int64_t first = place + problem_.start + (problem_.interleaved ? 2 * i : i);
      const int64_t second = problem_.interleaved ? first + 1 : first + problem_.pairs;
      double sine, cosine;
      core::sincos_turn(core::phase(position, turns_[static_cast<size_t>(i)]), &sine, &cosine);
      const long double c = cosine * problem_.amplitude;
      const long double s = (problem_.reverse ? -sine : sine) * problem_.amplitude;
      const long double x = element(before, scalar, first), y = element(before, scalar, second);
      const double results[] = {static_cast<double>(x * c - y * s),
                                static_cast<double>(y * c + x * s)};
      const int64_t places[] = {first, second};
      const double length =
          std::hypot(static_cast<double>(x), static_cast<double>(y)) * problem_.amplitude;
      for (int k = 0; k < 2; ++k) {
        const double got = element(after, scalar, places[k]);
        const bool wide = scalar == Scalar::float64;
        double allowed = (wide ? 1e-15 : 2.5e-7) * length;
        if (scalar == Scalar::bfloat16 || scalar == Scalar::float16)
          allowed += 0.5 * ulp(scalar, results[k]);
        ASSERT_NEAR(got, results[k], allowed) << variant.name << ", pair " << i << ", position "
                                              << position << ", " << problem_.text();
      }
    }
  }

  Problem problem_;
  std::vector<core::Turn128> turns_;
  std::vector<int32_t> narrow_;
  std::vector<char> in_[2], out_[2];
};

void check_all(const Problem& problem) {
  for (const Variant& variant : variants()) {
    Call call(problem);
    call.check(variant);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(RotaryKernel, EverySizeOfWindow) {
  for (const Scalar scalar : scalars) {
    for (int64_t pairs = 0; pairs <= 70; ++pairs) {
      for (const bool interleaved : {false, true}) {
        for (const bool in_place : {false, true}) {
          Problem problem;
          problem.scalar = scalar;
          problem.pairs = pairs;
          problem.start = pairs % 3 == 0 ? 0 : pairs % 7;
          problem.head_dim = problem.start + 2 * pairs + pairs % 5;
          problem.interleaved = interleaved;
          problem.in_place = in_place;
          problem.offset = 131000;
          ASSERT_NO_FATAL_FAILURE(check_all(problem));
        }
      }
    }
  }
}

TEST(RotaryKernel, LargestWindow) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.pairs = max_pairs;
      problem.head_dim = 2 * max_pairs;
      problem.interleaved = interleaved;
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
        problem.padding = 3;
        problem.shift = bits;
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

TEST(RotaryKernel, StreamedOutputsAreTheSame) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t shift : {0, 1}) {
        Problem problem;
        problem.scalar = scalar;
        problem.interleaved = interleaved;
        problem.heads[0] = 33;
        problem.heads[1] = 0;
        problem.seq = 1024;
        problem.head_dim = 128;
        problem.pairs = 64;
        problem.in_place = true;
        Call in_place(problem);
        for (const Variant& variant : variants()) {
          Call call(problem);
          const size_t bytes = call.input(0).size();
          std::vector<char> memory(bytes + 256);
          char* line =
              memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63) + shift * 64 / 4;
          call.arguments.rows[0].out = line;
          variant.rotate(call.arguments, 0, 2 * 1024);
          if (variant.rotate == baseline::rotate) variant.rotate(in_place.arguments, 0, 2 * 1024);
          ASSERT_EQ(memcmp(line, in_place.input(0).data(), bytes), 0)
              << variant.name << problem.text();
        }
      }
    }
  }
}

TEST(RotaryKernel, SameBitsOnEveryInstructionSet) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = interleaved;
      problem.in_place = true;
      problem.seq = 300;
      problem.head_dim = 200;
      problem.pairs = 99;
      problem.amplitude = 0.7;
      problem.offset = 1000000;
      std::vector<std::vector<char>> results;
      for (const Variant& variant : variants()) {
        Call call(problem);
        variant.rotate(call.arguments, 0, problem.batch * problem.seq);
        results.push_back(call.input(0));
        ASSERT_EQ(results.back(), results.front()) << variant.name << " " << problem.text();
      }
    }
  }
}

TEST(RotaryKernel, InverseUndoesForward) {
  Problem problem;
  problem.scalar = Scalar::float64;
  problem.in_place = true;
  problem.offset = 2147483000;
  for (const Variant& variant : variants()) {
    Call call(problem);
    const std::vector<char> before = call.input(0);
    variant.rotate(call.arguments, 0, 10);
    ASSERT_NE(call.input(0), before);
    call.arguments.reverse = true;
    variant.rotate(call.arguments, 0, 10);
    for (size_t i = 0; i < before.size() / sizeof(double); ++i) {
      const auto place = static_cast<int64_t>(i);
      ASSERT_NEAR(element(call.input(0).data(), problem.scalar, place),
                  element(before.data(), problem.scalar, place), 1e-14);
    }
  }
}

/// Puts `first` and `second` into pair 0 of every row and returns what pair 0 of the first row
/// becomes.
std::pair<double, double> rotate_special(const Variant& variant, Scalar scalar, bool interleaved,
                                         double first, double second, int64_t position) {
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
  // Both members run through all patterns; at position 0 a finite pair stays as it is, denormals
  // and -0 included.
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

/// Memory whose last byte lies before, and whose first byte after, a page that may not be touched.
class GuardedPages {
 public:
  explicit GuardedPages(size_t bytes)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), bytes_(bytes) {
    inner_ = (bytes + page_ - 1) / page_ * page_;
    base_ = static_cast<char*>(
        mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + page_, inner_, PROT_READ | PROT_WRITE);
  }
  ~GuardedPages() { munmap(base_, inner_ + 2 * page_); }
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  void* at_front() { return base_ + page_; }
  void* at_back() { return base_ + page_ + inner_ - bytes_; }

 private:
  size_t page_, bytes_, inner_;
  char* base_;
};

TEST(RotaryKernel, TouchesNoByteBesideItsRows) {
  for (const Variant& variant : variants()) {
    for (const Scalar scalar : scalars) {
      for (int64_t pairs = 1; pairs <= 80; ++pairs) {
        for (const bool interleaved : {false, true}) {
          Problem problem;
          problem.scalar = scalar;
          problem.pairs = pairs;
          problem.head_dim = 2 * pairs;
          problem.interleaved = interleaved;
          problem.batch = 1;
          problem.seq = 3;
          problem.heads[1] = 0;
          Call call(problem);
          const size_t bytes = call.input(0).size();
          GuardedPages source(bytes), target(bytes);
          const auto rotated = [&](const void* in, void* out) {
            memcpy(const_cast<void*>(in), call.input(0).data(), bytes);
            call.arguments.rows[0].in = in;
            call.arguments.rows[0].out = out;
            variant.rotate(call.arguments, 0, 3);
            const char* result = static_cast<char*>(out);
            return std::vector<char>(result, result + bytes);
          };
          ASSERT_EQ(rotated(source.at_front(), target.at_front()),
                    rotated(source.at_back(), target.at_back()));
        }
      }
    }
  }
}

TEST(RotaryKernel, RowsSpreadOverMoreThanFourGigabytes) {
  // Address space only: two tokens whose rows lie 2^31 + 64 elements apart.
  const int64_t stride = (int64_t{1} << 31) + 64;
  const size_t bytes = static_cast<size_t>(stride + 64) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  auto* values = static_cast<float*>(memory);
  for (const Variant& variant : variants()) {
    Problem problem;
    problem.batch = 1;
    problem.seq = 2;
    problem.heads[0] = 1;
    problem.heads[1] = 0;
    Call call(problem);
    Rows& rows = call.arguments.rows[0];
    rows.in = rows.out = memory;
    rows.in_stride[1] = rows.out_stride[1] = stride;
    values[stride] = 1.0f;
    values[stride + 32] = 0.0f;
    variant.rotate(call.arguments, 0, 2);
    EXPECT_NEAR(values[stride], std::cos(1.0), 1e-7) << variant.name;
    EXPECT_NEAR(values[stride + 32], std::sin(1.0), 1e-7) << variant.name;
  }
  munmap(memory, bytes);
}

}  // namespace
}  // namespace posembed::rotary
