// Proof of the exactness of angles: sine and cosine of every position up to 2^24, and of 10^8
// points per base beyond, up to 2^31 - 1, against quadruple precision. Blocks of neighbouring
// positions start at a value from libquadmath (113 bits) and walk on by rotation in long double,
// which over a block costs less than 10^-15, a hundred millionth of what is measured.
//
//   exactness [threads] [results.md]
#include <quadmath.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/turn.h"
#include "rotary/rotary.h"

namespace {

using posembed::core::Turn128;
using posembed::core::Turn64;

constexpr int64_t head_dim = 128;
constexpr int64_t last_position = (int64_t{1} << 31) - 1;
constexpr double bases[] = {1e4, 5e5, 1e6, 1e7};

/// sin and cos of the angle at `position`, and of the angle from one position to the next.
struct Reference {
  long double sine, cosine, step_sine, step_cosine;

  Reference(__float128 frequency, int64_t position) {
    split(fmodq(frequency * static_cast<__float128>(position), 2 * M_PIq), &sine, &cosine);
    split(frequency, &step_sine, &step_cosine);
  }

  void advance() {
    const long double s = sine * step_cosine + cosine * step_sine;
    cosine = cosine * step_cosine - sine * step_sine;
    sine = s;
  }

 private:
  static void split(__float128 angle, long double* s, long double* c) {
    __float128 wide_sine, wide_cosine;
    sincosq(angle, &wide_sine, &wide_cosine);
    *s = static_cast<long double>(wide_sine);
    *c = static_cast<long double>(wide_cosine);
  }
};

/// The largest error over `count` positions from `begin` on.
template <typename Float, typename Turn>
double worst_of_block(__float128 frequency, Turn turn, int64_t begin, int64_t count) {
  Reference reference(frequency, begin);
  long double worst = 0;
  for (int64_t position = begin; position < begin + count; ++position, reference.advance()) {
    Float sine, cosine;
    posembed::core::sincos_turn(posembed::core::phase(position, turn), &sine, &cosine);
    worst =
        std::max({worst, std::fabs(sine - reference.sine), std::fabs(cosine - reference.cosine)});
  }
  return static_cast<double>(worst);
}

/// Which blocks of positions one line of the table covers.
struct Range {
  const char* name;
  bool random;  // blocks anywhere in [begin, end) instead of all of them
  int64_t begin, end, block, points;
};

template <typename Float, typename Turn>
double worst_of_pair(__float128 frequency, Turn turn, const Range& range, int64_t pair) {
  std::mt19937_64 random(static_cast<uint64_t>(pair));
  const int64_t per_pair = range.points / (head_dim / 2);
  std::uniform_int_distribution<int64_t> anywhere(range.begin, range.end - range.block);
  double worst = 0;
  for (int64_t done = 0; done < per_pair; done += range.block) {
    const int64_t begin = range.random ? anywhere(random) : range.begin + done;
    worst = std::max(worst, worst_of_block<Float>(frequency, turn, begin, range.block));
  }
  return worst;
}

/// The largest error over all pairs, which the threads share.
template <typename Float>
double worst_of_base(double base, const Range& range, int threads) {
  const auto frequencies = posembed::rotary::geometric_frequencies(base, head_dim);
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  double worst = 0;
  const auto work = [&] {
    for (int64_t pair = next++; pair < head_dim / 2; pair = next++) {
      const __float128 exponent = static_cast<__float128>(-2 * pair) / head_dim;
      const __float128 frequency = powq(static_cast<__float128>(base), exponent);
      const Turn128 turn =
          posembed::core::turn_from_radians(frequencies[static_cast<size_t>(pair)]);
      double found;
      if constexpr (sizeof(Float) == sizeof(double)) {
        found = worst_of_pair<double>(frequency, turn, range, pair);
      } else {
        found = worst_of_pair<float>(frequency, posembed::core::round_to_turn64(turn), range, pair);
      }
      const std::lock_guard<std::mutex> lock(mutex);
      worst = std::max(worst, found);
    }
  };
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(work);
  work();
  for (std::thread& thread : team) thread.join();
  return worst;
}

std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", value);
  return text;
}

template <typename Float>
bool report(FILE* table, const char* dtype, const Range& range, double limit, int threads) {
  std::string line = std::string("| ") + dtype + " | " + range.name + " | " +
                     scientific(static_cast<double>(range.points)) + " | " + scientific(limit) +
                     " |";
  bool within = true;
  for (const double base : bases) {
    const double worst = worst_of_base<Float>(base, range, threads);
    within = within && worst <= limit;
    line += " " + scientific(worst) + " |";
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
  if (table != nullptr) std::fprintf(table, "%s\n", line.c_str());
  return within;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads =
      argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  FILE* table = argc > 2 ? std::fopen(argv[2], "w") : nullptr;
  const char* head =
      "# Exactness of angles\n\n"
      "Largest absolute error of sine and cosine against quadruple precision, head_dim 128, "
      "written by\n"
      "`benchmarks/exactness`. A point is one position and one of the 64 frequencies.\n\n"
      "| data | positions | points per base | allowed | base 1e4 | base 5e5 | base 1e6 | base 1e7 "
      "|\n"
      "|---|---|---|---|---|---|---|---|\n";
  std::printf("%s", head);
  if (table != nullptr) std::fprintf(table, "%s", head);

  constexpr int64_t pairs = head_dim / 2, exhaustive = int64_t{1} << 24, wide = int64_t{1} << 20;
  const Range all{"every one to 2^24", false, 0, exhaustive, 4096, exhaustive * pairs};
  const Range beyond{"random, 2^24 to 2^31 - 1", true, exhaustive,
                     last_position + 1,          64,   100'000'000};
  const Range all_wide{"every one to 2^20", false, 0, wide, 64, wide * pairs};
  const Range beyond_wide{"random, 2^20 to 2^31 - 1", true, wide,
                          last_position + 1,          64,   20'000'000};
  bool within = report<double>(table, "float64", all_wide, 1e-15, threads);
  within = report<double>(table, "float64", beyond_wide, 1e-13, threads) && within;
  within = report<float>(table, "float32, bfloat16, float16", beyond, 1.5e-7, threads) && within;
  within = report<float>(table, "float32, bfloat16, float16", all, 1.5e-7, threads) && within;
  if (table != nullptr) std::fclose(table);
  std::printf("%s\n", within ? "within the limits" : "NOT within the limits");
  return within ? 0 : 1;
}
