// A rotary kernel's arguments, their memory, and the expected rotation in long double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "rotary/rotary.h"

namespace posembed::rotary {

using core::Scalar;

using Kernel = void (*)(const Arguments&, int64_t, int64_t);

struct Variant {
  const char* name;
  Kernel rotate;
};

inline constexpr Scalar scalars[] = {Scalar::float32, Scalar::float64, Scalar::bfloat16, Scalar::float16};

inline double element(const void* data, Scalar scalar, int64_t index) {
  return core::visit_scalar(scalar, [&](auto tag) -> double {
    return core::load(static_cast<const typename decltype(tag)::type*>(data)[index]);
  });
}

inline void set_element(void* data, Scalar scalar, int64_t index, double value) {
  core::visit_scalar(scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    core::store(static_cast<core::Compute<T>>(value), static_cast<T*>(data) + index);
  });
}

/// The distance between neighbouring numbers at `value`.
inline double ulp(Scalar scalar, double value) {
  const int digits = scalar == Scalar::bfloat16 ? 8 : scalar == Scalar::float16 ? 11 : 24;
  const int min_exponent = scalar == Scalar::bfloat16 ? -133 : scalar == Scalar::float16 ? -24 : -149;
  if (scalar == Scalar::float64) return std::ldexp(1.0, std::max(std::ilogb(value) - 52, -1074));
  return value == 0 ? std::ldexp(1.0, min_exponent)
                    : std::ldexp(1.0, std::max(std::ilogb(value) - digits + 1, min_exponent));
}

/// Whether a token with these positions is not rotated.
inline bool leaves_token(const Arguments& arguments, const std::vector<core::Position>& positions) {
  return std::any_of(positions.begin(), positions.end(),
                     [&](const core::Position& position) { return leaves_token(arguments, position); });
}

/// Sine and cosine of a pair at a position.
inline void sincos_of(const Arguments& arguments, int64_t pair, const core::Position& position, double* sine,
                      double* cosine) {
  const core::Turn128 turn = arguments.wide_turns[pair];
  const int64_t whole = core::whole_turns(arguments.radians[pair].high, turn);
  core::sincos_turn(core::phase(position, turn, whole), sine, cosine);
}

/// Rotates the window of a row in float64, with a position for each axis.
inline void rotate_row(const Arguments& arguments, const std::vector<core::Position>& positions, double* row) {
  if (leaves_token(arguments, positions)) return;
  for (int64_t i = 0; i < arguments.pairs; ++i) {
    double* first = row + arguments.start + (arguments.interleaved ? 2 * i : i);
    double* second = arguments.interleaved ? first + 1 : first + arguments.pairs;
    double sine, cosine;
    sincos_of(arguments, i, positions[arguments.axes == 1 ? 0 : arguments.axis_of_pair[i]], &sine, &cosine);
    const double c = cosine * arguments.amplitude;
    const double s = (arguments.reverse ? -sine : sine) * arguments.amplitude;
    const double x = *first, y = *second;
    *first = x * c - y * s;
    *second = y * c + x * s;
  }
}

enum class Order { bshd, bhsd, sbhd };

struct Problem {
  Scalar scalar = Scalar::float32;
  int64_t batch = 2, seq = 5, heads[2] = {3, 2}, head_dim = 64, pairs = 32, start = 0;
  bool interleaved = false, reverse = false, in_place = false;
  bool window_only = false;  // the key's rows
  double amplitude = 1.0;
  double base = 1e4;
  double decay_base = 0.0;  // xPos: positions; 0: without
  double magnitude = 1.0;   // of the data
  Order order = Order::bshd;
  int64_t padding = 0;  // elements between rows
  int64_t shift = 0;    // elements before the first row: misaligns every row
  int64_t offset = 0;
  std::vector<int64_t> positions;  // [batch, seq], [axes, batch, seq], or empty
  std::vector<double> fractions;   // the same as float64, instead
  int64_t axes = 1;                // pairs alternate between them
  core::Index index = core::Index::int64;
  std::vector<int64_t> documents;  // cu_seqlens, or empty
  std::vector<float> frequencies;  // learned ones [pairs], or empty
  bool tangent = false;            // frequencies are their tangents

  std::string text() const {
    return "scalar " + std::to_string(int(scalar)) + " heads " + std::to_string(heads[0]) + "+" +
           std::to_string(heads[1]) + " dim " + std::to_string(head_dim) + " pairs " + std::to_string(pairs) +
           " start " + std::to_string(start) + " window only " + std::to_string(window_only) + " interleaved " +
           std::to_string(interleaved) + " reverse " + std::to_string(reverse) + " in place " +
           std::to_string(in_place) + " order " + std::to_string(int(order)) + " shift " + std::to_string(shift);
  }
};

/// Owns the memory that a Problem's arguments point to.
class Call {
 public:
  explicit Call(const Problem& problem, uint64_t seed = 5) : problem_(problem) {
    if (problem.frequencies.empty()) {
      radians_ = geometric_frequencies(problem.base, 2 * problem.pairs);
    } else {
      arguments.frequencies = {problem.frequencies.data(), Scalar::float32};
      radians_.assign(problem.frequencies.begin(), problem.frequencies.end());
    }
    for (const core::DoubleDouble& frequency : radians_) {
      wide_turns_.push_back(core::turn_from_radians(frequency));
      turns_.push_back(core::round_to_turn64(wide_turns_.back()));
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
    arguments.tangent = problem.tangent;
    arguments.turns = turns_.data();
    arguments.wide_turns = wide_turns_.data();
    arguments.radians = radians_.data();
    arguments.count = problem.heads[1] > 0 ? 2 : 1;
    set_positions();
    set_documents();
    set_axes();
    set_decay();
    std::mt19937_64 random(seed);
    for (int64_t r = 0; r < arguments.count; ++r) set_rows(r, &random);
  }

  Arguments arguments;

  int64_t row_offset(int64_t r, int64_t b, int64_t s, int64_t h) const {
    const int64_t* stride = arguments.views[r].in_stride;
    return problem_.shift + b * stride[0] + s * stride[1] + h * stride[2];
  }

  core::Position position(int64_t axis, int64_t b, int64_t s) const {
    const auto index = static_cast<size_t>((axis * problem_.batch + b) * problem_.seq + s);
    if (!problem_.fractions.empty()) return core::split(problem_.fractions[index]);
    if (!problem_.positions.empty()) return {problem_.positions[index], 0, 1.0};
    int64_t start = 0;
    for (const int64_t document : problem_.documents) {
      if (document <= s) start = document;
    }
    return {problem_.offset + s - start, 0, 1.0};
  }

  /// A token's position on each axis.
  std::vector<core::Position> positions(int64_t b, int64_t s) const {
    std::vector<core::Position> result;
    for (int64_t axis = 0; axis < problem_.axes; ++axis) result.push_back(position(axis, b, s));
    return result;
  }

  std::vector<char>& input(int64_t r) { return in_[r]; }
  std::vector<char>& output(int64_t r) { return problem_.in_place ? in_[r] : out_[r]; }

  /// Runs the kernel and compares every element, including those outside the rows.
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
            check_row(variant, r, before[r].data(), output(r).data(), expected.data(), row_offset(r, b, s, h),
                      positions(b, s));
      ASSERT_TRUE(expected == output(r)) << variant.name << " wrote outside its rows: " << problem_.text();
      if (problem_.in_place) continue;
      ASSERT_EQ(in_[r], before[r]) << variant.name << " wrote its input";
    }
  }

 private:
  void set_positions() {
    arguments.position_stride[0] = problem_.seq;
    arguments.position_stride[1] = 1;
    if (!problem_.fractions.empty()) {
      arguments.positions.data = problem_.fractions.data();
      arguments.positions.floating = true;
      arguments.positions.scalar = Scalar::float64;
    }
    if (problem_.positions.empty()) return;
    arguments.positions.index = problem_.index;
    if (problem_.index == core::Index::int32) {
      narrow_.assign(problem_.positions.begin(), problem_.positions.end());
      arguments.positions.data = narrow_.data();
    } else {
      arguments.positions.data = problem_.positions.data();
    }
  }

  void set_documents() {
    if (problem_.documents.empty()) return;
    arguments.documents.starts = {problem_.documents.data(), core::Index::int64};
    arguments.documents.count = static_cast<int64_t>(problem_.documents.size()) - 1;
  }

  void set_axes() {
    arguments.axes = problem_.axes;
    arguments.position_stride[2] = problem_.batch * problem_.seq;
    for (int64_t i = 0; i < problem_.pairs; ++i) {
      axis_of_pair_.push_back(static_cast<uint8_t>(i % problem_.axes));
    }
    arguments.axis_of_pair = axis_of_pair_.data();
  }

  void set_decay() {
    if (problem_.decay_base == 0.0) return;
    for (int64_t i = 0; i < problem_.pairs; ++i) {
      const double part = static_cast<double>(i) / static_cast<double>(problem_.pairs);
      decay_.push_back(std::log2((part + 0.4) / 1.4) / problem_.decay_base);
    }
    arguments.decay = decay_.data();
    arguments.decay_center = 2.5;
    arguments.decay_sign = problem_.reverse ? -1.0 : 1.0;
  }

  /// The factor of a pair of tensor `r`.
  long double amplitude(int64_t r, int64_t pair, const core::Position& position) const {
    if (decay_.empty()) return problem_.amplitude;
    const long double distance = static_cast<long double>(core::to_double(position)) - arguments.decay_center;
    const double sign = r == 0 ? arguments.decay_sign : -arguments.decay_sign;
    return problem_.amplitude * std::exp2(sign * distance * decay_[static_cast<size_t>(pair)]);
  }

  void set_rows(int64_t r, std::mt19937_64* random) {
    HeadView& view = arguments.views[r];
    view.heads = problem_.heads[r];
    view.window_only = r == 1 && problem_.window_only;
    const int64_t row = row_dim(arguments, view) + problem_.padding;
    const int64_t b = problem_.batch, s = problem_.seq, h = view.heads;
    const int64_t strides[3][3] = {
        {s * h * row, h * row, row}, {h * s * row, row, s * row}, {h * row, b * h * row, row}};
    for (int i = 0; i < 3; ++i) view.in_stride[i] = view.out_stride[i] = strides[int(problem_.order)][i];
    const int64_t elements = problem_.shift + b * s * h * row;
    const int64_t size = core::size_of(problem_.scalar);
    in_[r].resize(static_cast<size_t>(elements * size));
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < elements; ++i)
      set_element(in_[r].data(), problem_.scalar, i, problem_.magnitude * normal(*random));
    out_[r].assign(in_[r].size(), char(0xab));
    view.in = in_[r].data() + problem_.shift * size;
    view.out = output(r).data() + problem_.shift * size;
  }

  /// Checks the rotated window and copies the row into `expected`, so that a later comparison
  /// accepts it.
  void check_row(const Variant& variant, int64_t r, const char* before, const char* after, char* expected,
                 int64_t offset, const std::vector<core::Position>& positions) {
    const Scalar scalar = problem_.scalar;
    const HeadView& view = arguments.views[r];
    const int64_t start = window_start(arguments, view);
    const auto size = static_cast<size_t>(core::size_of(scalar));
    const auto begin = static_cast<size_t>(offset) * size;
    if (row_dim(arguments, view) == 0) return;
    if (!problem_.tangent) {
      memcpy(expected + begin, before + begin, static_cast<size_t>(row_dim(arguments, view)) * size);
    }
    if (leaves_token(arguments, positions)) return;
    memcpy(expected + begin + static_cast<size_t>(start) * size, after + begin + static_cast<size_t>(start) * size,
           static_cast<size_t>(2 * problem_.pairs) * size);
    for (int64_t i = 0; i < problem_.pairs; ++i) {
      const int64_t first = offset + start + (problem_.interleaved ? 2 * i : i);
      const int64_t second = problem_.interleaved ? first + 1 : first + problem_.pairs;
      const core::Position& position = positions[axis_of_pair_[static_cast<size_t>(i)]];
      double sine, cosine;
      sincos_of(arguments, i, position, &sine, &cosine);
      const long double size_of_pair = amplitude(r, i, position);
      if (problem_.tangent) {
        sine = core::to_double(position) * problem_.frequencies[static_cast<size_t>(i)];
        cosine = 0;
      }
      const long double c = cosine * size_of_pair;
      const long double s = (problem_.reverse ? -sine : sine) * size_of_pair;
      const long double x = element(before, scalar, first), y = element(before, scalar, second);
      const double results[] = {static_cast<double>(x * c - y * s), static_cast<double>(y * c + x * s)};
      const int64_t indices[] = {first, second};
      const double length = static_cast<double>(std::hypot(x, y) * (problem_.tangent ? std::fabs(sine) : size_of_pair));
      for (int k = 0; k < 2; ++k) {
        const double got = element(after, scalar, indices[k]);
        const bool wide = scalar == Scalar::float64;
        double allowed = (wide ? decay_.empty() ? 1e-15 : 1e-13 : 2.5e-7) * length;
        if (scalar == Scalar::bfloat16 || scalar == Scalar::float16) allowed += 0.5 * ulp(scalar, results[k]);
        ASSERT_NEAR(got, results[k], allowed)
            << variant.name << ", pair " << i << ", position " << core::to_double(position) << ", " << problem_.text();
      }
    }
  }

  Problem problem_;
  std::vector<core::DoubleDouble> radians_;
  std::vector<core::Turn64> turns_;
  std::vector<core::Turn128> wide_turns_;
  std::vector<uint8_t> axis_of_pair_;
  std::vector<double> decay_;
  std::vector<int32_t> narrow_;
  std::vector<char> in_[2], out_[2];
};

/// `value` after storage as `scalar`.
inline double kept(Scalar scalar, double value) {
  double memory;
  set_element(&memory, scalar, 0, value);
  return element(&memory, scalar, 0);
}

/// What tables have for each pair: one value; two, of which some differ at every third token; or
/// the same where only sines differ. At some of these tokens only the last pair has two values.
enum class Columns { half, whole, whole_sines };

/// Where tables [batch, seq, width] have the values of a pair.
struct TablePlaces {
  int64_t seq, width, step, second;  // step: from pair to pair; second: to a pair's other value

  TablePlaces(const Problem& problem, bool whole)
      : seq(problem.seq),
        width(whole ? 2 * problem.pairs : problem.pairs),
        step(whole && problem.interleaved ? 2 : 1),
        second(whole ? (problem.interleaved ? 1 : problem.pairs) : 0) {}

  size_t size(const Problem& problem) const { return static_cast<size_t>(problem.batch * problem.seq * width); }

  /// The place of a pair's first value.
  int64_t place(int64_t token, int64_t pair) const { return token * width + pair * step; }

  void give_to(Arguments* arguments) const {
    arguments->table_stride[0] = seq * width;
    arguments->table_stride[1] = width;
    arguments->table_stride[2] = step;
    arguments->table_second = second;
  }
};

/// Tables of cosines and sines that are not those of any angle.
struct Tables : TablePlaces {
  std::vector<float> cosines, sines;
  std::vector<core::BFloat16> narrow_cosines, narrow_sines;  // the same numbers, if `narrow`

  explicit Tables(const Problem& problem, bool narrow = false, Columns columns = Columns::half)
      : TablePlaces(problem, columns != Columns::half), cosines(size(problem)), sines(cosines) {
    for (int64_t token = 0; token < problem.batch * problem.seq; ++token)
      for (int64_t i = 0; i < problem.pairs; ++i) {
        const int64_t number = token * problem.pairs + i, at = place(token, i);
        const bool last = i == problem.pairs - 1;
        const bool apart = token % 3 == 1 && (last || (token % 2 == 0 && i % 5 == 2));
        const bool apart_cosine = apart && columns == Columns::whole;
        set(at, number, number);
        set(at + second, number + (apart_cosine ? 100 : 0), number + (apart ? 100 : 0));
      }
    if (narrow) narrow_cosines = narrowed(&cosines), narrow_sines = narrowed(&sines);
  }

  void set(int64_t at, int64_t cosine, int64_t sine) {
    cosines[static_cast<size_t>(at)] = std::sin(static_cast<float>(3 * cosine + 1));
    sines[static_cast<size_t>(at)] = std::sin(static_cast<float>(7 * sine + 2));
  }

  /// Rounds the numbers to bfloat16 and returns them.
  static std::vector<core::BFloat16> narrowed(std::vector<float>* numbers) {
    std::vector<core::BFloat16> result(numbers->size());
    for (size_t i = 0; i < result.size(); ++i) {
      core::store((*numbers)[i], &result[i]);
      (*numbers)[i] = core::load(result[i]);
    }
    return result;
  }

  /// Makes a call of the problem rotate by the tables.
  void apply(ProductRounding rounding, Arguments* arguments) const {
    const bool narrow = !narrow_cosines.empty();
    arguments->cosines = narrow ? static_cast<const void*>(narrow_cosines.data()) : cosines.data();
    arguments->sines = narrow ? static_cast<const void*>(narrow_sines.data()) : sines.data();
    arguments->table_scalar = narrow ? Scalar::bfloat16 : Scalar::float32;
    give_to(arguments);
    arguments->product_rounding = rounding;
  }
};

/// Rotates by tables and compares every bit with the same steps in plain code.
inline void check_in_steps(const Variant& variant, const Problem& problem, ProductRounding rounding,
                           bool narrow = false, Columns columns = Columns::half) {
  Call call(problem);
  const int64_t tokens = problem.batch * problem.seq;
  const Tables tables(problem, narrow, columns);
  tables.apply(rounding, &call.arguments);
  const std::vector<char> before[2] = {call.input(0), call.input(1)};
  variant.rotate(call.arguments, 0, tokens);
  const Scalar scalar = problem.scalar;
  const bool wide = scalar == Scalar::float64, fused = rounding == ProductRounding::fused;
  const Scalar steps = wide || rounding == ProductRounding::to_data_type ? scalar : Scalar::float32;
  // A fused product is not rounded; a product of float32 numbers is exact in double.
  const auto sum_of = [&](double a, double b, double c, double d) {
    if (!fused) return kept(steps, kept(steps, a * b) + kept(steps, c * d));
    return wide ? std::fma(a, b, c * d) : double{std::fma(float(a), float(b), float(c * d))};
  };
  for (int64_t r = 0; r < call.arguments.count; ++r)
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t h = 0; h < problem.heads[r]; ++h)
        for (int64_t i = 0; i < problem.pairs; ++i) {
          const int64_t row = call.row_offset(r, token / problem.seq, token % problem.seq, h);
          const int64_t first = row + problem.start + (problem.interleaved ? 2 * i : i);
          const int64_t second = problem.interleaved ? first + 1 : first + problem.pairs;
          const auto at = static_cast<size_t>(tables.place(token, i));
          const size_t other = at + static_cast<size_t>(tables.second);
          double sines[] = {tables.sines[at], tables.sines[other]};
          if (problem.reverse) sines[0] = -tables.sines[other], sines[1] = -tables.sines[at];
          const double x = element(before[r].data(), scalar, first);
          const double y = element(before[r].data(), scalar, second);
          const double difference = sum_of(x, tables.cosines[at], -y, sines[0]);
          const double sum = sum_of(x, sines[1], y, tables.cosines[other]);
          ASSERT_EQ(element(call.output(r).data(), scalar, first), kept(scalar, difference))
              << variant.name << " " << problem.text();
          ASSERT_EQ(element(call.output(r).data(), scalar, second), kept(scalar, sum))
              << variant.name << " " << problem.text();
        }
}

}  // namespace posembed::rotary
