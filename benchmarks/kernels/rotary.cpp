// The rotary kernel alone, beside what memory allows. In every round the limits and the kernel run
// in turn on the same buffers, so that a noisy neighbour hits all of them; each is judged by its
// best round.
//
//   rotary_benchmark [--benchmark_filter=in_place]    POSEMBED_INSTRUCTION_SET=avx2 for a narrower
//   one
#include "rotary/rotary.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/bandwidth_limits.h"
#include "kernels/cases.h"
#include "kernels/team.h"
#include "rotary/rotary.h"

namespace posembed::benchmarks {
namespace {

using rotary::Arguments;
using rotary::HeadView;

constexpr int64_t head_dim = 128, query_heads = 32, key_heads = 8;

struct Case {
  core::Scalar scalar;
  bool interleaved, in_place, cold;
  int threads;
  int64_t batch, seq;

  int64_t tokens() const { return batch * seq; }
  std::string name() const {
    std::string text = in_place ? "in_place/" : "out_of_place/";
    text += scalar == core::Scalar::bfloat16  ? "bf16/"
            : scalar == core::Scalar::float16 ? "fp16/"
                                              : "fp32/";
    text += interleaved ? "interleaved/" : "half_split/";
    text += cold ? "cold/" : "warm/";
    return text + std::to_string(tokens()) + "_tokens/" + std::to_string(threads) + "_threads";
  }
};

/// Query and key with everything that a call needs, in as many copies as the case rotates through.
class Workload {
 public:
  explicit Workload(const Case& c) : case_(c), team_(c.threads) {
    for (const auto& frequency : rotary::geometric_frequencies(1e4, head_dim)) {
      turns_.push_back(core::round_to_turn64(core::turn_from_radians(frequency)));
    }
    const int copies_wanted = c.cold ? 6 : 1;
    for (int i = 0; i < copies_wanted; ++i) {
      in_.push_back(std::make_unique<Buffer>(bytes()));
      if (!c.in_place) out_.push_back(std::make_unique<Buffer>(bytes()));
    }
  }

  /// Bytes of query and key together.
  size_t bytes() const {
    return static_cast<size_t>(case_.tokens() * (query_heads + key_heads) * head_dim *
                               core::size_of(case_.scalar));
  }

  Arguments next_arguments() {
    const size_t turn = next();
    Arguments arguments;
    arguments.count = 2;
    arguments.scalar = case_.scalar;
    arguments.batch = case_.batch;
    arguments.seq = case_.seq;
    arguments.head_dim = head_dim;
    arguments.pairs = head_dim / 2;
    arguments.interleaved = case_.interleaved;
    arguments.turns = turns_.data();
    arguments.offset = 1000;
    int64_t begin = 0;
    for (int r = 0; r < 2; ++r) {
      HeadView& view = arguments.views[r];
      view.heads = r == 0 ? query_heads : key_heads;
      view.in = in_[turn]->data() + begin;
      view.out = (case_.in_place ? in_ : out_)[turn]->data() + begin;
      const int64_t strides[] = {case_.seq * view.heads * head_dim, view.heads * head_dim,
                                 head_dim};
      std::copy(strides, strides + 3, view.in_stride);
      std::copy(strides, strides + 3, view.out_stride);
      begin += case_.tokens() * view.heads * head_dim * core::size_of(case_.scalar);
    }
    return arguments;
  }

  double rotate() {
    const Arguments arguments = next_arguments();
    return team_.run([&](int member, int size) {
      const int64_t tokens = case_.tokens();
      rotary::rotate_cpu(arguments, tokens * member / size, tokens * (member + 1) / size);
    });
  }

  double copy(Copy run) {
    const size_t turn = next();
    return share([&](size_t begin, size_t length) {
      run(in_[turn]->data() + begin, out_[turn]->data() + begin, length);
    });
  }

  double update(Update run) {
    const size_t turn = next();
    return share([&](size_t begin, size_t length) { run(in_[turn]->data() + begin, length); });
  }

 private:
  size_t next() { return turn_ = (turn_ + 1) % in_.size(); }

  double share(const std::function<void(size_t, size_t)>& work) {
    constexpr size_t unit = 16384;
    const size_t units = bytes() / unit;
    return team_.run([&](int member, int size) {
      const auto m = static_cast<size_t>(member), s = static_cast<size_t>(size);
      const size_t begin = units * m / s, end = units * (m + 1) / s;
      work(begin * unit, (end - begin) * unit);
    });
  }

  Case case_;
  Team team_;
  std::vector<core::Turn64> turns_;
  std::vector<std::unique_ptr<Buffer>> in_, out_;
  size_t turn_ = 0;
};

void measure(benchmark::State& state, const Case& c) {
  Workload workload(c);
  const auto limits = [&] {
    double best = std::numeric_limits<double>::infinity();
    if (c.in_place) {
      for (const auto& update : updates()) best = std::min(best, workload.update(update.run));
    } else {
      for (const auto& copy : copies()) best = std::min(best, workload.copy(copy.run));
    }
    return best;
  };
  double limit = std::numeric_limits<double>::infinity(), kernel = limit;
  for (auto _ : state) {
    limit = std::min(limit, limits());
    if (!c.cold) workload.rotate();  // the limits left other lines in the caches
    // Twice, because the several limits have several chances of a quiet moment.
    const double time = std::min(workload.rotate(), workload.rotate());
    kernel = std::min(kernel, time);
    state.SetIterationTime(time);
  }
  const double gigabytes = 2e-9 * static_cast<double>(workload.bytes());
  state.counters["GB/s"] = gigabytes / kernel;
  state.counters["limit GB/s"] = gigabytes / limit;
  state.counters["ratio"] = limit / kernel;
}

/// One token in the L1 cache, with many calls per reading of the clock.
void measure_one_token(benchmark::State& state, const Case& c) {
  Workload workload(c);
  const Arguments arguments = workload.next_arguments();
  constexpr int calls = 1000;
  double best = std::numeric_limits<double>::infinity();
  for (auto _ : state) {
    const double start = thread_seconds();
    for (int i = 0; i < calls; ++i) rotary::rotate_cpu(arguments, 0, 1);
    const double time = thread_seconds() - start;
    best = std::min(best, time / calls);
    state.SetIterationTime(time / calls);
  }
  state.counters["best ns"] = 1e9 * best;
}

}  // namespace

void register_cases() {
  using core::Scalar;
  for (const Scalar scalar : {Scalar::bfloat16, Scalar::float32}) {
    for (const bool interleaved : {false, true}) {
      for (const bool in_place : {true, false}) {
        for (const bool cold : {false, true}) {
          for (const int threads : {1, 2}) {
            const Case c{scalar, interleaved, in_place, cold, threads, 4, 2048};
            benchmark::RegisterBenchmark(c.name().c_str(), measure, c)
                ->UseManualTime()
                ->Iterations(24);
          }
        }
        const Case token{scalar, interleaved, in_place, false, 1, 1, 1};
        benchmark::RegisterBenchmark(token.name().c_str(), measure_one_token, token)
            ->UseManualTime()
            ->Iterations(50);
      }
    }
  }
}

}  // namespace posembed::benchmarks
