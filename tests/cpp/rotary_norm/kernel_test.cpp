// Compares the QK-norm kernels of every instruction set, and the source of the CUDA kernels run on
// the CPU by tests/cpp/cuda_on_cpu, with the formulas in float64.
#include <cuda_runtime.h>

// Renamed, because the library may contain the real launchers.
#define norm_and_rotate_cuda norm_and_rotate_cuda_on_cpu
#define backward_cuda backward_cuda_on_cpu
#include "copies.h"
#include "rotary/call.h"
#include "rotary_norm/rotary_norm_cuda.cu"

namespace posembed::rotary_norm {
namespace {

using core::Scalar;
using rotary::element;
using rotary::Problem;
using rotary::set_element;

struct Variant {
  const char* name;
  void (*forward)(const Arguments&, int64_t, int64_t);
  void (*backward)(const BackwardArguments&, int64_t, int64_t);
  void (*add_parts)(const BackwardArguments&, int64_t, int64_t);
};

void forward_on_gpu(const Arguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(norm_and_rotate_cuda(arguments, nullptr), nullptr);
}

void backward_on_gpu(const BackwardArguments& arguments, int64_t, int64_t) {
  ASSERT_EQ(backward_cuda(arguments, nullptr), nullptr);
}

std::vector<Variant> variants() {
  std::vector<Variant> result = {{"cuda source", forward_on_gpu, backward_on_gpu,
                                  [](const BackwardArguments&, int64_t, int64_t) {}}};  // the launch did it
  POSEMBED_ADD_COPIES(result, isa::norm_and_rotate, isa::backward, isa::add_parts)
  return result;
}

/// A problem's kernel arguments, weights and statistics, and the formulas in float64.
class Call {
 public:
  explicit Call(const Problem& problem) : problem_(problem), rotary_(problem) {
    arguments.rotation = rotary_.arguments;
    arguments.eps = 1e-3;
    arguments.weight_offset = 0.25;
    arguments.parameter_scalar = problem.scalar;
    const auto size = static_cast<size_t>(core::size_of(problem.scalar));
    for (int r = 0; r < 2; ++r) {
      const int64_t columns = std::max<int64_t>(1, problem.heads[r]) * problem.head_dim;
      weight_[r].resize(static_cast<size_t>(columns) * size);
      bias_[r].resize(static_cast<size_t>(columns) * size);
      for (int64_t i = 0; i < columns; ++i) {
        set_element(weight_[r].data(), problem.scalar, i, 0.5 + static_cast<double>(i % 7) / 8);
        set_element(bias_[r].data(), problem.scalar, i, static_cast<double>(i % 5) / 4 - 0.5);
      }
      arguments.weight[r] = weight_[r].data();
      rstd_[r].resize(static_cast<size_t>(problem.batch * problem.seq * problem.heads[r]) * 8);
      arguments.rstd[r] = rstd_[r].data();
    }
  }

  Arguments arguments;

  rotary::Call& rotary() { return rotary_; }
  const std::vector<char>& rstd(int64_t r) const { return rstd_[r]; }

  double weight(int64_t r, int64_t i) const {
    return element(weight_[r].data(), problem_.scalar, i) + arguments.weight_offset;
  }

  /// Makes the norm a LayerNorm with biases.
  void centre() {
    arguments.centred = true;
    for (int r = 0; r < 2; ++r) arguments.bias[r] = bias_[r].data();
  }

  /// What the norm makes of the rows of a token, [heads][head_dim].
  std::vector<std::vector<double>> normed(const std::vector<char>& memory, int64_t r, int64_t b, int64_t s) const {
    std::vector<std::vector<double>> rows;
    for (int64_t h = 0; h < problem_.heads[r]; ++h) rows.push_back(row(memory, rotary_.row_offset(r, b, s, h)));
    const int64_t dim = problem_.head_dim;
    const size_t together = arguments.all_heads ? rows.size() : 1;
    for (size_t first = 0; first < rows.size(); first += together) {
      double sum = 0, squares = 0;
      const auto count = double(together) * double(dim);
      for (size_t h = first; h < first + together; ++h)
        for (const double x : rows[h]) sum += x;
      const double mean = arguments.centred ? sum / count : 0;
      for (size_t h = first; h < first + together; ++h)
        for (const double x : rows[h]) squares += (x - mean) * (x - mean);
      const double rstd = 1 / std::sqrt(squares / count + arguments.eps);
      for (size_t h = first; h < first + together; ++h) {
        for (int64_t i = 0; i < dim; ++i) {
          const int64_t column = arguments.all_heads ? int64_t(h) * dim + i : i;
          double& x = rows[h][size_t(i)];
          x = (x - mean) * rstd * weight(r, column);
          if (arguments.centred) x += element(bias_[r].data(), problem_.scalar, column);
        }
      }
    }
    return rows;
  }

  /// Calls function(r, offset of the row, positions of its token) for every row.
  template <typename Function>
  void for_rows(const Function& function) {
    for (int64_t r = 0; r < arguments.rotation.count; ++r)
      for (int64_t b = 0; b < problem_.batch; ++b)
        for (int64_t s = 0; s < problem_.seq; ++s)
          for (int64_t h = 0; h < problem_.heads[r]; ++h)
            function(r, rotary_.row_offset(r, b, s, h), rotary_.positions(b, s));
  }

  std::vector<double> row(const std::vector<char>& memory, int64_t offset) const {
    std::vector<double> result;
    for (int64_t i = 0; i < problem_.head_dim; ++i)
      result.push_back(element(memory.data(), problem_.scalar, offset + i));
    return result;
  }

  /// The row divided by its root mean square, and 1 / that.
  double norm(std::vector<double>* row) const {
    double squares = 0;
    for (const double x : *row) squares += x * x;
    const double rstd = 1 / std::sqrt(squares / double(problem_.head_dim) + arguments.eps);
    for (double& x : *row) x *= rstd;
    return rstd;
  }

  /// Compares a row with the expected one; `scale` is the size of its numbers.
  void compare(const char* name, const std::vector<char>& memory, int64_t offset, const std::vector<double>& expected,
               double scale) const {
    const bool wide = problem_.scalar == Scalar::float64;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double allowed =
          (wide ? 4e-15 : 2e-6) * scale + (wide ? 0.0 : 0.5 * rotary::ulp(problem_.scalar, expected[i]));
      ASSERT_NEAR(element(memory.data(), problem_.scalar, offset + int64_t(i)), expected[i], allowed)
          << name << ", column " << i << ", " << problem_.text();
    }
  }

 private:
  Problem problem_;
  rotary::Call rotary_;
  std::vector<char> weight_[2], bias_[2], rstd_[2];
};

/// Cosines and sines of the pairs of every token or, if `apart`, for every other token of the
/// components of the pairs.
struct Tables : rotary::TablePlaces {
  Tables(const Problem& problem, bool apart) : TablePlaces(problem, apart), cosines(size(problem)), sines(cosines) {
    for (int64_t token = 0; token < problem.batch * problem.seq; ++token)
      for (int64_t i = 0; i < problem.pairs; ++i) {
        const double number = double(token * problem.pairs + i), more = token % 2 == 1 ? 0.1 : 0.0;
        set(place(token, i), 0.37 * number);
        set(place(token, i) + second, 0.37 * number + (apart ? more : 0.0));
      }
  }

  void set(int64_t at, double angle) {
    cosines[static_cast<size_t>(at)] = static_cast<float>(std::cos(angle));
    sines[static_cast<size_t>(at)] = static_cast<float>(std::sin(angle));
  }

  void apply(rotary::Arguments* arguments) const {
    arguments->cosines = cosines.data();
    arguments->sines = sines.data();
    give_to(arguments);
    arguments->reverse = false;
  }

  void rotate(const Problem& problem, int64_t token, double* row) const {
    for (int64_t i = 0; i < problem.pairs; ++i) {
      double* const first = row + problem.start + (problem.interleaved ? 2 * i : i);
      double* const second = problem.interleaved ? first + 1 : first + problem.pairs;
      const auto at = static_cast<size_t>(place(token, i));
      const size_t other = at + static_cast<size_t>(this->second);
      const double x = *first, y = *second;
      *first = x * cosines[at] - y * sines[at];
      *second = y * cosines[other] + x * sines[other];
    }
  }

  std::vector<float> cosines, sines;
};

void check_forward(const Problem& problem) {
  for (const Variant& variant : variants()) {
    Call call(problem);
    const std::vector<char> before[2] = {call.rotary().input(0), call.rotary().input(1)};
    const int64_t tokens = problem.batch * problem.seq;
    variant.forward(call.arguments, 0, tokens);
    call.for_rows([&](int64_t r, int64_t offset, const std::vector<core::Position>& positions) {
      std::vector<double> row = call.row(before[r], offset);
      call.norm(&row);
      for (int64_t i = 0; i < problem.head_dim; ++i) row[size_t(i)] *= call.weight(r, i);
      rotate_row(call.arguments.rotation, positions, row.data());
      call.compare(variant.name, call.rotary().output(r), offset, row, 8.0);
    });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

/// Checks LayerNorm, norms over all heads and rotations by tables.
void check_general(const Problem& problem, bool centred, bool all_heads, bool by_tables) {
  const Tables tables(problem, /*apart=*/centred);
  for (const Variant& variant : variants()) {
    Call call(problem);
    if (centred) call.centre();
    call.arguments.all_heads = all_heads;
    if (by_tables) tables.apply(&call.arguments.rotation);
    const std::vector<char> before[2] = {call.rotary().input(0), call.rotary().input(1)};
    variant.forward(call.arguments, 0, problem.batch * problem.seq);
    for (int64_t r = 0; r < call.arguments.rotation.count; ++r) {
      for (int64_t token = 0; token < problem.batch * problem.seq; ++token) {
        const int64_t b = token / problem.seq, s = token % problem.seq;
        auto rows = call.normed(before[r], r, b, s);
        for (size_t h = 0; h < rows.size(); ++h) {
          if (by_tables) {
            tables.rotate(problem, token, rows[h].data());
          } else {
            rotate_row(call.arguments.rotation, call.rotary().positions(b, s), rows[h].data());
          }
          const int64_t offset = call.rotary().row_offset(r, b, s, int64_t(h));
          call.compare(variant.name, call.rotary().output(r), offset, rows[h], 12.0);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

/// Checks the gradients of rows and weights. The input memory of `call` has the results' gradients,
/// `normed` the rows.
void check_backward(const Problem& problem) {
  for (const Variant& variant : variants()) {
    Call forward(problem), call(problem);
    const std::vector<char> normed[2] = {forward.rotary().input(0), forward.rotary().input(1)};
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    for (int64_t r = 0; r < 2; ++r) {
      std::vector<char>& gradient = call.rotary().input(r);
      const int64_t elements = int64_t(gradient.size()) / core::size_of(problem.scalar);
      for (int64_t i = 0; i < elements; ++i) set_element(gradient.data(), problem.scalar, i, normal(random));
    }
    const int64_t tokens = problem.batch * problem.seq, dim = problem.head_dim;
    variant.forward(forward.arguments, 0, tokens);
    BackwardArguments arguments;
    arguments.forward = call.arguments;
    arguments.forward.rotation.reverse = !problem.reverse;
    arguments.parts = std::min<int64_t>(tokens, 3);
    const auto size = static_cast<size_t>(core::size_of(problem.scalar));
    std::vector<char> partial(static_cast<size_t>(arguments.parts * 2 * dim) * 8),
        weights[2] = {std::vector<char>(static_cast<size_t>(dim) * size),
                      std::vector<char>(static_cast<size_t>(dim) * size)};
    arguments.partial = partial.data();
    for (int r = 0; r < 2; ++r) {
      arguments.forward.rstd[r] = forward.arguments.rstd[r];
      arguments.normed[r] = forward.rotary().arguments.views[r];
      arguments.weight_gradient[r] = weights[r].data();
    }
    variant.backward(arguments, 0, arguments.parts);
    variant.add_parts(arguments, 0, 2 * dim);

    std::vector<double> expected[2] = {std::vector<double>(size_t(dim)), std::vector<double>(size_t(dim))};
    call.for_rows([&](int64_t r, int64_t offset, const std::vector<core::Position>& positions) {
      std::vector<double> x = call.row(normed[r], offset);
      const double rstd = call.norm(&x);
      std::vector<double> gradient = call.row(call.rotary().input(r), offset);
      rotate_row(arguments.forward.rotation, positions, gradient.data());
      double projection = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        expected[r][i] += gradient[i] * x[i];
        gradient[i] *= call.weight(r, int64_t(i));
        projection += gradient[i] * x[i] / double(dim);
      }
      for (size_t i = 0; i < x.size(); ++i) gradient[i] = rstd * (gradient[i] - x[i] * projection);
      call.compare(variant.name, call.rotary().output(r), offset, gradient, 32.0);
    });
    for (int64_t r = 0; r < 2; ++r) {
      if (problem.heads[r] > 0) call.compare(variant.name, weights[r], 0, expected[r], 64.0);
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

/// Windows for which kernels have special code.
void add_whole_blocks(Scalar scalar, std::vector<Problem>* problems) {
  for (const bool interleaved : {false, true}) {
    Problem problem;
    problem.scalar = scalar;
    problem.interleaved = interleaved;
    problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3, 2, 1};
    for (const int pairs : {32, 64, 128}) {
      problem.pairs = pairs;
      problem.head_dim = 2 * problem.pairs;
      problems->push_back(problem);
    }
    problem.start = problem.pairs = 32;
    problem.head_dim = 140;
    problems->push_back(problem);
  }
}

std::vector<Problem> problems() {
  std::vector<Problem> result;
  for (const Scalar scalar : rotary::scalars) {
    for (int bits = 0; bits < 8; ++bits) {
      Problem problem;
      problem.scalar = scalar;
      problem.interleaved = (bits & 1) != 0;
      problem.pairs = (bits & 2) != 0 ? 16 : 13;  // whole vectors, and single pairs
      problem.start = (bits & 2) != 0 ? 16 : 3;
      problem.head_dim = (bits & 4) != 0 ? 96 : 48;
      problem.order = (bits & 4) != 0 ? rotary::Order::bhsd : rotary::Order::sbhd;
      problem.heads[0] = 5;
      problem.amplitude = 1.25;
      problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3, 2, 1};
      result.push_back(problem);
    }
    Problem largest;
    largest.scalar = scalar;
    largest.batch = 1;
    largest.seq = 2;
    largest.head_dim = max_head_dim;
    largest.pairs = rotary::max_pairs;
    result.push_back(largest);
    add_whole_blocks(scalar, &result);
    Problem unrotated;
    unrotated.scalar = scalar;
    unrotated.pairs = 0;
    unrotated.heads[0] = 40;
    result.push_back(unrotated);
    Problem axes;
    axes.scalar = scalar;
    axes.seq = 3;
    axes.axes = 3;
    axes.positions = {0, 131071, -1, 7, 5, 1, 9, 8, 3, 7, -1, 2, 6, 2147483647, 5, 4, 3, 2};
    result.push_back(axes);
    Problem fractional;
    fractional.scalar = scalar;
    fractional.fractions = {0.5, -0.25, 1e-3, 131071.75, -1, 1e6 + 0.1, -7, 1.0 / 3, 2, 0};
    result.push_back(fractional);
  }
  return result;
}

TEST(RotaryNormKernel, Forward) {
  for (const Problem& problem : problems()) ASSERT_NO_FATAL_FAILURE(check_forward(problem));
}

TEST(RotaryNormKernel, General) {
  for (Problem problem : problems()) {
    for (int bits = 1; bits < 8; ++bits) {
      const bool by_tables = (bits & 4) != 0;
      if (by_tables && (problem.axes > 1 || !problem.fractions.empty())) continue;
      problem.in_place = bits % 3 == 0;
      if (by_tables) problem.positions.clear();
      ASSERT_NO_FATAL_FAILURE(check_general(problem, (bits & 1) != 0, (bits & 2) != 0, by_tables));
    }
  }
}

/// Weights of 16-bit data in float32, and none.
TEST(RotaryNormKernel, OtherWeights) {
  for (const Scalar scalar : {Scalar::bfloat16, Scalar::float16}) {
    for (const int64_t pairs : {32, 13}) {
      Problem problem;
      problem.scalar = scalar;
      problem.pairs = pairs;
      const std::vector<float> halves(size_t(problem.head_dim), 0.5f);
      for (const Variant& variant : variants()) {
        Call wide(problem), none(problem);
        wide.arguments.parameter_scalar = Scalar::float32;
        for (int r = 0; r < 2; ++r) {
          wide.arguments.weight[r] = halves.data();
          none.arguments.weight[r] = nullptr;
        }
        wide.arguments.weight_offset = 0.5;
        variant.forward(wide.arguments, 0, problem.batch * problem.seq);
        variant.forward(none.arguments, 0, problem.batch * problem.seq);
        for (int r = 0; r < 2; ++r) {
          EXPECT_EQ(wide.rotary().output(r), none.rotary().output(r)) << variant.name;
          EXPECT_EQ(wide.rstd(r), none.rstd(r)) << variant.name;
        }
      }
    }
  }
}

TEST(RotaryNormKernel, ForwardInPlace) {
  for (Problem problem : problems()) {
    problem.in_place = true;
    ASSERT_NO_FATAL_FAILURE(check_forward(problem));
  }
}

TEST(RotaryNormKernel, HeadsOverBlocks) {
  for (const int multiprocessors : {0, 1, 132}) {
    pretended_multiprocessors = multiprocessors;
    Problem problem;
    problem.heads[0] = 70;
    problem.heads[1] = 9;
    ASSERT_NO_FATAL_FAILURE(check_forward(problem));
  }
  pretended_multiprocessors = 4;
}

/// The rows and statistics of a call with the kernel for any heads.
template <typename T, bool interleaved>
void norm_by_the_generic_kernel(Call* call) {
  const Forward forward{call->arguments};
  ASSERT_EQ((forward.launch<T, 16 / sizeof(T), interleaved, 128>(nullptr)), nullptr);
}

template <typename T>
void check_whole_heads(const Problem& problem) {
  Call generic(problem), whole(problem);
  const auto norm = problem.interleaved ? norm_by_the_generic_kernel<T, true> : norm_by_the_generic_kernel<T, false>;
  ASSERT_NO_FATAL_FAILURE(norm(&generic));
  ASSERT_EQ(norm_and_rotate_cuda(whole.arguments, nullptr), nullptr);
  for (int64_t r = 0; r < whole.arguments.rotation.count; ++r) {
    ASSERT_EQ(generic.rstd(r), whole.rstd(r)) << problem.text();
  }
  whole.for_rows([&](int64_t r, int64_t first, const std::vector<core::Position>& positions) {
    const bool leaves = rotary::leaves_token(whole.arguments.rotation, positions);
    for (int64_t i = first; i < first + problem.head_dim; ++i) {
      const double expected = element(generic.rotary().output(r).data(), problem.scalar, i);
      const double allowed = leaves ? 0.0 : rotary::ulp(problem.scalar, expected) + 2e-6;
      ASSERT_NEAR(element(whole.rotary().output(r).data(), problem.scalar, i), expected, allowed) << problem.text();
    }
  });
}

/// The rows are those of the kernel for any heads but for one rounding, and have the same bits
/// where tokens are not rotated.
TEST(RotaryNormGpuSource, WholeHeads) {
  for (const int multiprocessors : {1, 4, 132}) {
    pretended_multiprocessors = multiprocessors;
    for (int bits = 0; bits < 24; ++bits) {
      Problem problem;
      problem.scalar = bits < 8 ? Scalar::bfloat16 : bits < 16 ? Scalar::float16 : Scalar::float32;
      problem.interleaved = (bits & 2) != 0;
      problem.order = (bits & 4) != 0 ? rotary::Order::bhsd : rotary::Order::sbhd;
      problem.in_place = (bits & 1) != 0;
      problem.pairs = int64_t{32} << bits % 3;
      problem.head_dim = 2 * problem.pairs;
      problem.padding = 8;
      problem.positions = {0, 131071, -1, 2147483647, -1, 5, 1048576, 3, 2, 1};
      for (const int64_t heads : {1, 7, 33}) {
        problem.heads[0] = heads;
        problem.heads[1] = bits % 5 + 1;
        const auto check = bits < 8    ? check_whole_heads<core::BFloat16>
                           : bits < 16 ? check_whole_heads<core::Float16>
                                       : check_whole_heads<float>;
        ASSERT_NO_FATAL_FAILURE(check(problem));
      }
    }
  }
  pretended_multiprocessors = 4;
}

TEST(RotaryNormKernel, Backward) {
  for (const Problem& problem : problems()) ASSERT_NO_FATAL_FAILURE(check_backward(problem));
}

}  // namespace
}  // namespace posembed::rotary_norm
