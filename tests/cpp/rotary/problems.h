// Test problems for every form of the rotary kernel: the CPU kernel and the CUDA source.
#pragma once

#include <cmath>
#include <vector>

#include "rotary/call.h"

namespace posembed::rotary {

/// Makes a problem of 29 pairs for every dtype and both pairings; `change(problem)` sets the rest.
template <typename Change>
std::vector<Problem> in_every_form(const Change& change) {
  std::vector<Problem> problems;
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = interleaved;
      problem.pairs = 29;
      change(problem);
      problems.push_back(problem);
    }
  }
  return problems;
}

/// Tokens that are not rotated keep their values, also under tables that have a value for each
/// component of a pair, which rotate all heads of a token at once.
inline void check_tables_by_component(const Variant& variant) {
  for (Problem problem : in_every_form([](Problem& problem) { problem.head_dim = 72; })) {
    const int64_t tokens = problem.batch * problem.seq, width = 2 * problem.pairs;
    problem.positions.assign(static_cast<size_t>(tokens), -1);
    Call call(problem);
    std::vector<float> table;
    for (int64_t i = 0; i < tokens * width; ++i) table.push_back(0.001f * static_cast<float>(i));
    Arguments& arguments = call.arguments;
    arguments.cosines = arguments.sines = table.data();
    arguments.table_scalar = Scalar::float32;
    arguments.table_stride[0] = problem.seq * width;
    arguments.table_stride[1] = width;
    arguments.table_stride[2] = 1;
    arguments.table_second = problem.pairs;
    variant.rotate(arguments, 0, tokens);
    for (int64_t r = 0; r < arguments.count; ++r) {
      EXPECT_EQ(call.output(r), call.input(r)) << variant.name << ", " << problem.text();
    }
  }
}

inline std::vector<Problem> an_axis_for_each_pair() {
  return in_every_form([](Problem& problem) {
    problem.seq = 3;
    problem.axes = 3;
    problem.positions = {0, 131071, -1, 7, 5, 1, 9, 8, 3, 7, -1, 2, 6, 2147483647, 5, 4, 3, 2};
  });
}

inline std::vector<Problem> restarting_documents() {
  std::vector<Problem> problems;
  for (const Order order : {Order::bshd, Order::bhsd}) {
    Problem problem;
    problem.batch = 1;
    problem.seq = 23;
    problem.order = order;
    problem.offset = 100000;
    problem.documents = {0, 0, 1, 8, 8, 22, 23, 23};
    problems.push_back(problem);
  }
  return problems;
}

inline std::vector<Problem> learned_frequencies() {
  return in_every_form([](Problem& problem) {
    problem.offset = 1000000;
    problem.amplitude = 1.25;
    for (int i = 0; i < 29; ++i) problem.frequencies.push_back(std::exp(3.0f - float(i)));
    problem.frequencies[3] *= -1;
  });
}

/// Fractional and negative positions, with frequencies of several turns and of minus one.
inline std::vector<Problem> fractional_positions() {
  const std::vector<double> fractions = {0.5, -0.25, 1e-3, 131071.75, -1, 2147483646.5, -7, 1.0 / 3, 2, 0};
  std::vector<Problem> problems = in_every_form([&](Problem& problem) {
    problem.fractions = fractions;
    problem.base = 0.01;
    problem.start = 3;
    problem.in_place = problem.interleaved;
  });
  for (Problem& problem : in_every_form([&](Problem& problem) {
         problem.fractions = fractions;
         for (int i = 0; i < 29; ++i) problem.frequencies.push_back(0.75f * float(i - 4));
       })) {
    problems.push_back(problem);
  }
  for (Problem& problem : in_every_form([&](Problem& problem) {
         problem.seq = 1;
         problem.axes = 4;
         problem.fractions = {0.5, -0.25, 1e-3, 11.75, -1, 6.5, -7, 1.0 / 3};
         problem.decay_base = 2048;
       })) {
    problems.push_back(problem);
  }
  return problems;
}

inline std::vector<Problem> tangents() {
  return in_every_form([](Problem& problem) {
    problem.tangent = true;
    problem.reverse = problem.interleaved;
    problem.seq = 3;
    problem.axes = 3;
    problem.positions = {0, 71, -1, 7, 5, 1, 9, 8, 3, 7, -1, 2, 6, 47, 5, 4, 3, 2};
    for (int i = 0; i < 29; ++i) problem.frequencies.push_back(0.1f * float(i - 10));
  });
}

inline std::vector<Problem> decaying_pairs() {
  std::vector<Problem> problems;
  for (const Scalar scalar : scalars) {
    for (int bits = 0; bits < 16; ++bits) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = (bits & 1) != 0;
      problem.reverse = (bits & 2) != 0;
      problem.in_place = (bits & 4) != 0;
      problem.order = (bits & 8) != 0 ? Order::bhsd : Order::bshd;
      problem.pairs = 27 + bits;
      problem.head_dim = 2 * problem.pairs + 3;
      problem.seq = 7;
      problem.decay_base = 2048;
      problem.positions = {0, 1, -1, 2, 3, 511, 8191, 4, 100, 7, -1, 9, 4096, 5};
      problems.push_back(problem);
    }
  }
  return problems;
}

inline std::vector<Problem> decay_beyond_the_largest_float() {
  std::vector<Problem> problems;
  // 2^-90 times up to 2^180: the result is finite, the amplitude is not.
  Problem problem;
  problem.magnitude = 0x1p-90;
  problem.decay_base = 1.0;
  problem.batch = 1;
  problem.seq = 1;
  problem.heads[0] = 0;  // keys grow
  problem.offset = 102;
  problems.push_back(problem);
  problem.scalar = Scalar::float64;
  problem.heads[0] = 2;
  problem.offset = 550;
  problem.magnitude = 0x1p-10;
  problems.push_back(problem);
  return problems;
}

inline std::vector<Problem> keys_of_the_window_alone() {
  std::vector<Problem> problems;
  for (const Scalar scalar : scalars) {
    for (int bits = 0; bits < 8; ++bits) {
      Problem problem;
      problem.scalar = scalar;
      problem.window_only = true;
      problem.heads[1] = 1;
      problem.head_dim = 48;
      problem.start = (bits & 4) != 0 ? 16 : 13;
      problem.pairs = 16;
      problem.interleaved = (bits & 1) != 0;
      problem.in_place = (bits & 2) != 0;
      problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3, 2, 1};
      problems.push_back(problem);
    }
  }
  return problems;
}

/// Runs a kernel with frequencies [heads, pairs].
inline void rotate_by_head(const Variant& variant, const std::vector<float>& frequencies, Call* call) {
  call->arguments.frequencies = {frequencies.data(), Scalar::float32, call->arguments.pairs};
  variant.rotate(call->arguments, 0, call->arguments.batch * call->arguments.seq);
}

/// Checks that every head has the bits of a call with its frequencies alone, and that equal
/// frequencies on two axes rotate by the sum of their positions.
inline void check_by_head(const Variant& variant) {
  for (Problem& problem : in_every_form([](Problem& problem) {
         problem.heads[1] = problem.heads[0];
         problem.reverse = problem.interleaved;
         problem.amplitude = 1.25;
         problem.seq = 11;  // more than a tile of tokens
         for (int64_t i = 0; i < 22; ++i) problem.positions.push_back(i % 5 == 3 ? -1 : 1000 * i);
       })) {
    std::vector<float> frequencies;
    for (int64_t i = 0; i < problem.heads[0] * problem.pairs; ++i) {
      frequencies.push_back(std::exp(2.0f - 0.1f * static_cast<float>(i)));
    }
    Call together(problem);
    rotate_by_head(variant, frequencies, &together);
    const int64_t row = problem.head_dim * core::size_of(problem.scalar);
    for (int64_t h = 0; h < problem.heads[0]; ++h) {
      Call alone(problem);
      alone.arguments.frequencies = {frequencies.data() + h * problem.pairs, Scalar::float32};
      variant.rotate(alone.arguments, 0, problem.batch * problem.seq);
      for (int64_t r = 0; r < 2; ++r) {
        for (int64_t token = 0; token < problem.batch * problem.seq; ++token) {
          const int64_t at = (token * problem.heads[0] + h) * row;
          ASSERT_EQ(memcmp(together.output(r).data() + at, alone.output(r).data() + at, static_cast<size_t>(row)), 0)
              << variant.name << ", head " << h << ", token " << token << ", " << problem.text();
        }
      }
    }
    std::vector<int64_t> places(44);
    for (size_t i = 0; i < 22; ++i) {
      const int64_t sum = problem.positions[i];
      places[i] = sum < 0 ? -1 : sum / 3;
      places[22 + i] = sum < 0 ? -1 : sum - sum / 3;
    }
    std::vector<float> twice = frequencies;
    twice.insert(twice.end(), frequencies.begin(), frequencies.end());
    Call mixed(problem);
    mixed.arguments.positions.data = places.data();
    mixed.arguments.axes = 2;
    mixed.arguments.axis_of_pair = nullptr;
    mixed.arguments.frequencies.axis_stride = static_cast<int64_t>(frequencies.size());
    mixed.arguments.frequencies.data = twice.data();
    mixed.arguments.frequencies.head_stride = problem.pairs;
    variant.rotate(mixed.arguments, 0, problem.batch * problem.seq);
    ASSERT_EQ(mixed.output(0), together.output(0)) << variant.name << ", " << problem.text();
    ASSERT_EQ(mixed.output(1), together.output(1)) << variant.name << ", " << problem.text();
  }
}

/// Checks that NaN frequencies give NaN.
inline void check_nan_frequencies(const Variant& variant) {
  for (const Scalar scalar : scalars) {
    for (const bool interleaved : {false, true}) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = interleaved;
      problem.pairs = 3;
      problem.frequencies = {NAN, 1.0f, INFINITY};
      Call call(problem);
      variant.rotate(call.arguments, 0, call.arguments.batch * call.arguments.seq);
      for (int64_t i = 0; i < 6; ++i) {
        const int64_t pair = interleaved ? i / 2 : i % 3;
        const double result = element(call.output(0).data(), scalar, call.row_offset(0, 1, 2, 1) + i);
        EXPECT_EQ(std::isnan(result), pair != 1) << variant.name << ", component " << i;
      }
    }
  }
}

}  // namespace posembed::rotary
