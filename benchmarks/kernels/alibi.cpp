// The ALiBi kernels alone, beside what memory allows. In every round the limits and the kernel run
// in turn on the same buffers, so that a noisy neighbour hits all of them; each is judged by its
// best round.
//
//   alibi_benchmark [--benchmark_filter=softmax]
//   POSEMBED_INSTRUCTION_SET=avx2 takes a narrower instruction set.
#include "alibi/alibi.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bandwidth_limits.h"
#include "kernels/cases.h"
#include "kernels/team.h"

namespace posembed::benchmarks {
namespace {

constexpr int64_t heads = 32, length = 2048;

enum class Kernel { fill, add, softmax, reduce };

struct Case {
  Kernel kernel;
  core::Scalar scalar;
  bool causal;
  int threads;

  std::string name() const {
    const char* names[] = {"fill", "add", "softmax", "reduce"};
    std::string text = names[static_cast<int>(kernel)];
    text += scalar == core::Scalar::bfloat16 ? "/bf16" : "/fp32";
    text += causal ? "/causal/" : "/symmetric/";
    return text + std::to_string(threads) + "_threads";
  }
};

/// Scores [1, heads, length, length], processed in place, and the kernels' arguments for them.
class Workload {
 public:
  explicit Workload(const Case& c)
      : case_(c), team_(c.threads), scores_(bytes()), partial_(heads * length) {
    for (int64_t head = 0; head < heads; ++head) {
      slopes_.push_back(std::exp2(-8.0f * static_cast<float>(head + 1) / heads));
    }
  }

  size_t bytes() const {
    return static_cast<size_t>(heads * length * length * core::size_of(case_.scalar));
  }

  /// The minimum traffic of the kernel: each pass over the bytes, reading or writing.
  double traffic() const {
    const bool both = case_.kernel == Kernel::add || case_.kernel == Kernel::softmax;
    return (both ? 2.0 : 1.0) * static_cast<double>(bytes());
  }

  double run() {
    return team_.run([this](int member, int size) {
      const int64_t rows = heads * length;
      run_rows(rows * member / size, rows * (member + 1) / size);
    });
  }

  /// The fastest fill, or the fastest update in place.
  double limit() {
    double best = std::numeric_limits<double>::infinity();
    if (case_.kernel == Kernel::fill) {
      for (const auto& fill : fills()) best = std::min(best, share(fill.run));
    } else {
      for (const auto& update : updates()) best = std::min(best, share(update.run));
    }
    return best;
  }

 private:
  void run_rows(int64_t begin, int64_t end) {
    alibi::Distances distances;
    distances.queries = distances.keys = length;
    distances.causal = case_.causal;
    const alibi::Slopes slopes{slopes_.data(), core::Scalar::float32, heads, 1};
    const alibi::Matrices matrices{scores_.data(), {0, length * length, length}};
    if (case_.kernel == Kernel::fill) {
      alibi::fill_cpu({slopes, distances, case_.scalar, 1, matrices}, begin, end);
    } else if (case_.kernel == Kernel::reduce) {
      alibi::SlopeGradient gradient;
      gradient.heads = heads;
      gradient.partial = partial_.data();
      alibi::reduce_cpu({distances, case_.scalar, 1, matrices, gradient}, begin, end);
    } else {
      const alibi::ScoreArguments scores{slopes, distances, case_.scalar, 1,
                                         0.125,  matrices,  matrices};
      (case_.kernel == Kernel::add ? alibi::add_cpu : alibi::softmax_cpu)(scores, begin, end);
    }
  }

  double share(void (*work)(void*, size_t)) {
    return team_.run([&](int member, int size) {
      const size_t part = bytes() / static_cast<size_t>(size);
      work(scores_.data() + part * static_cast<size_t>(member), part);
    });
  }

  Case case_;
  Team team_;
  Buffer scores_;
  std::vector<float> slopes_;
  std::vector<double> partial_;
};

void measure(benchmark::State& state, const Case& c) {
  Workload workload(c);
  double limit = std::numeric_limits<double>::infinity(), kernel = limit;
  for (auto _ : state) {
    limit = std::min(limit, workload.limit());
    const double time = workload.run();
    kernel = std::min(kernel, time);
    state.SetIterationTime(time);
  }
  state.counters["GB/s"] = 1e-9 * workload.traffic() / kernel;
  state.counters["limit GB/s"] = 1e-9 * workload.traffic() / limit;
  state.counters["limit ms"] = 1e3 * limit;
  state.counters["best ms"] = 1e3 * kernel;
  state.counters["ratio"] = limit / kernel;
}

}  // namespace

void register_cases() {
  for (const Kernel kernel : {Kernel::fill, Kernel::add, Kernel::softmax, Kernel::reduce}) {
    for (const auto scalar : {core::Scalar::bfloat16, core::Scalar::float32}) {
      for (const bool causal : {true, false}) {
        for (const int threads : {1, 2}) {
          const Case c{kernel, scalar, causal, threads};
          benchmark::RegisterBenchmark(c.name().c_str(), measure, c)
              ->UseManualTime()
              ->Iterations(10);
        }
      }
    }
  }
}

}  // namespace posembed::benchmarks
