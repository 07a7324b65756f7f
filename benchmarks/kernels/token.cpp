// The token kernels alone, beside what memory allows: the gather beside the fastest copy of as many
// bytes as it reads and writes, the dense gradient beside the fastest fill of the table, its rows
// beside a copy. In every round the limits and the kernel run in turn, so that a noisy neighbour
// hits all of them; each is judged by its best round.
//
//   token_benchmark [--benchmark_filter=gather]    POSEMBED_INSTRUCTION_SET=avx2 for a narrower one
#include "token/token.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/bandwidth_limits.h"
#include "kernels/cases.h"
#include "kernels/team.h"

namespace posembed::benchmarks {
namespace {

using core::Scalar;

constexpr int64_t count = 8192;  // ids

enum class Kernel { gather, dense, rows };

struct Case {
  Kernel kernel;
  Scalar scalar;
  int64_t rows, row_bytes;
  bool zipf;  // ids as frequent as words: the n-th with probability 1/n
  int threads;

  int64_t dim() const { return row_bytes / core::size_of(scalar); }
  std::string name() const {
    const char* names[] = {"gather", "dense", "rows"};
    std::string text = names[static_cast<int>(kernel)];
    text += scalar == Scalar::bfloat16 ? "/bf16/" : "/fp32/";
    text += std::to_string(rows) + "x" + std::to_string(dim()) + (zipf ? "/zipf/" : "/uniform/");
    return text + std::to_string(threads) + "_threads";
  }
};

std::vector<int64_t> make_ids(const Case& c, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::vector<double> weights(static_cast<size_t>(c.rows), 1.0);
  for (size_t i = 0; c.zipf && i < weights.size(); ++i)
    weights[i] = 1.0 / static_cast<double>(i + 1);
  std::discrete_distribution<int64_t> distribution(weights.begin(), weights.end());
  std::vector<int64_t> ids(count);
  for (int64_t& id : ids) id = distribution(generator);
  return ids;
}

/// Ids, a table and as many batches of rows as it takes for none to stay in a cache.
class Workload {
 public:
  explicit Workload(const Case& c)
      : case_(c), team_(c.threads), table_(static_cast<size_t>(c.rows * c.row_bytes)) {
    for (unsigned i = 0; i < 4; ++i) {
      batches_.push_back(std::make_unique<Buffer>(batch_bytes()));
      ids_.push_back(make_ids(c, i + 1));
    }
  }

  /// The minimum number of bytes that are read and written.
  double traffic() const {
    const auto batch = static_cast<double>(batch_bytes());
    return case_.kernel == Kernel::dense ? batch + static_cast<double>(table_bytes()) : 2 * batch;
  }

  double run() {
    turn_ = (turn_ + 1) % batches_.size();
    if (case_.kernel == Kernel::gather) return gather();
    sort();
    return case_.kernel == Kernel::dense ? fill() : sum();
  }

  double limit() {
    double best = std::numeric_limits<double>::infinity();
    if (case_.kernel == Kernel::dense) {
      for (const auto& named : fills()) {
        best = std::min(best, share(table_bytes(), [&](size_t begin, size_t length) {
                          named.run(table_.data() + begin, length);
                        }));
      }
      return best;
    }
    for (const auto& named : copies()) {
      turn_ = (turn_ + 1) % batches_.size();
      best = std::min(best, share(batch_bytes(), [&](size_t begin, size_t length) {
                        const char* in = batches_[(turn_ + 2) % batches_.size()]->data() + begin;
                        named.run(in, batches_[turn_]->data() + begin, length);
                      }));
    }
    return best;
  }

 private:
  size_t table_bytes() const { return static_cast<size_t>(case_.rows * case_.row_bytes); }
  size_t batch_bytes() const { return static_cast<size_t>(count * case_.row_bytes); }

  double gather() {
    token::GatherArguments arguments;
    arguments.weight = table_.data();
    arguments.out = batches_[turn_]->data();
    arguments.scalar = case_.scalar;
    arguments.rows = case_.rows;
    arguments.embedding_dim = arguments.weight_stride = case_.dim();
    arguments.ids = {ids_[turn_].data(), core::Index::int64};
    arguments.count = count;
    return team_.run([&](int member, int size) {
      token::gather_cpu(arguments, count * member / size, count * (member + 1) / size);
    });
  }

  void sort() {
    token::GroupArguments arguments;
    arguments.ids = {ids_[turn_].data(), core::Index::int64};
    arguments.count = count;
    arguments.num_embeddings = case_.rows;
    arguments.entries = entries_.data();
    arguments.scratch = scratch_.data();
    arguments.starts = starts_.data();
    arguments.groups = &groups_;
    token::group_cpu(arguments);
  }

  token::SumArguments sums() {
    token::SumArguments arguments;
    arguments.gradient = batches_[turn_]->data();
    arguments.out = table_.data();
    arguments.dense = case_.kernel == Kernel::dense;
    arguments.streaming = true;
    arguments.scalar = case_.scalar;
    arguments.embedding_dim = case_.dim();
    arguments.entries = entries_.data();
    arguments.starts = starts_.data();
    return arguments;
  }

  double fill() {
    const token::FillArguments arguments{sums(), case_.rows, groups_};
    const int64_t steps = case_.rows + count;
    return team_.run([&](int member, int size) {
      token::fill_table_cpu(arguments, steps * member / size, steps * (member + 1) / size);
    });
  }

  double sum() {
    const token::SumArguments arguments = sums();
    const auto end = starts_.begin() + groups_ + 1;
    const auto group_at = [&](int64_t entry) {
      return std::lower_bound(starts_.begin(), end, entry) - starts_.begin();
    };
    return team_.run([&](int member, int size) {
      token::sum_groups_cpu(arguments, group_at(count * member / size),
                            group_at(count * (member + 1) / size));
    });
  }

  double share(size_t bytes, const std::function<void(size_t, size_t)>& work) {
    constexpr size_t unit = 16384;
    const size_t units = bytes / unit;
    return team_.run([&](int member, int size) {
      const auto m = static_cast<size_t>(member), s = static_cast<size_t>(size);
      const size_t begin = units * m / s, end = units * (m + 1) / s;
      work(begin * unit, (end - begin) * unit);
    });
  }

  Case case_;
  Team team_;
  Buffer table_;
  std::vector<std::unique_ptr<Buffer>> batches_;
  std::vector<std::vector<int64_t>> ids_;
  std::vector<uint64_t> entries_ = std::vector<uint64_t>(count);
  std::vector<uint64_t> scratch_ = std::vector<uint64_t>(count);
  std::vector<int64_t> starts_ = std::vector<int64_t>(count + 1);
  int64_t groups_ = 0;
  size_t turn_ = 0;
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
  state.counters["limit ms"] = 1e3 * limit;
  state.counters["best ms"] = 1e3 * kernel;
  state.counters["ratio"] = limit / kernel;
}

void register_case(const Case& c) {
  benchmark::RegisterBenchmark(c.name().c_str(), measure, c)->UseManualTime()->Iterations(12);
}

}  // namespace

void register_cases() {
  for (const Scalar scalar : {Scalar::float32, Scalar::bfloat16}) {
    for (const int threads : {1, 2}) {
      const int64_t bytes = 768 * core::size_of(scalar);
      register_case({Kernel::gather, scalar, 128256, 8192, false, threads});
      register_case({Kernel::gather, scalar, 50257, bytes, false, threads});
      for (const Kernel kernel : {Kernel::dense, Kernel::rows}) {
        for (const bool zipf : {false, true}) {
          register_case({kernel, scalar, 50257, bytes, zipf, threads});
        }
      }
    }
  }
}

}  // namespace posembed::benchmarks
