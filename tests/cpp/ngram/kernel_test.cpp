// Tests the n-gram kernels, of every instruction set and of CUDA's source run on the CPU by
// tests/cpp/cuda_on_cpu, against the definition in 128-bit arithmetic. Needs no GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <random>
#include <vector>

// Renamed, because the library may contain the real launcher.
#define hash_tokens_cuda hash_tokens_cuda_on_cpu
#include "copies.h"
#include "ngram/ngram_cuda.cu"

namespace posembed::ngram {
namespace {

constexpr int64_t smallest = std::numeric_limits<int64_t>::min();
constexpr int64_t largest = std::numeric_limits<int64_t>::max();

/// `number` modulo `divisor`, not negative.
int64_t remainder_of(int64_t number, int64_t divisor) {
  __extension__ using Wide = __int128;
  return static_cast<int64_t>(((Wide{number} % divisor) + divisor) % divisor);
}

std::vector<int64_t> edges(int64_t divisor, std::mt19937_64& random) {
  const auto any = static_cast<int64_t>(random());
  const int64_t multiple = any / divisor * divisor;
  return {any,          multiple, multiple - (multiple > smallest), multiple + (multiple < largest), 0, 1, -1, smallest,
          smallest + 1, largest};
}

TEST(NgramHash, RemaindersOfAllSizes) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const int64_t divisor = std::max<int64_t>(1, static_cast<int64_t>(random() >> 1 >> i % 63));
    for (const int64_t number : edges(divisor, random)) {
      ASSERT_EQ(floor_remainder(static_cast<uint64_t>(number), core::Divisor<int64_t>::of(divisor)),
                remainder_of(number, divisor))
          << number << " mod " << divisor;
    }
  }
}

struct Problem {
  int64_t batch, seq;
  std::vector<int32_t> sizes;
  int32_t heads;
  Rule rule = Rule::products;
  bool has_boundary = false, has_history = false;
  std::vector<int32_t> cu_seqlens = {};
  bool has_mask = false;
};

class Case {
 public:
  explicit Case(const Problem& problem) : random_(7) {
    a.batch = problem.batch;
    a.seq = problem.seq;
    a.num_sizes = static_cast<int32_t>(problem.sizes.size());
    a.heads = problem.heads;
    a.longest = problem.sizes.back();
    a.rule = problem.rule;
    a.has_boundary = problem.has_boundary;
    a.boundary = 3;
    a.padding = -5;
    std::copy(problem.sizes.begin(), problem.sizes.end(), a.sizes);
    const bool modular = a.rule == Rule::modular;  // its products fit in 64 bits
    for (uint64_t& multiplier : a.multipliers) multiplier = random_() >> (modular ? 47 : 0);
    for (int64_t column = 0; column < columns(); ++column) {
      const int64_t shift = modular ? 19 + 5 * column % 40 : 1 + 5 * column % 60;
      a.modulus[column] = static_cast<int64_t>(random_() >> shift) + 1;
      a.inverse[column] = core::Divisor<int64_t>::of(a.modulus[column]).inverse;
      a.offset[column] = column;
    }
    fill(ids_, problem.batch * problem.seq);
    a.ids = {ids_.data(), core::Index::int64};
    cu_seqlens_ = problem.cu_seqlens;
    if (!cu_seqlens_.empty()) {
      a.cu_seqlens = {cu_seqlens_.data(), core::Index::int32};
      a.documents = static_cast<int64_t>(cu_seqlens_.size()) - 1;
    }
    if (problem.has_mask) {
      mask_ = std::make_unique<bool[]>(ids_.size());
      for (size_t i = 0; i < ids_.size(); ++i) mask_[i] = random_() % 3 > 0;
      a.mask = mask_.get();
    }
    if (problem.has_history) {
      a.history_rows = a.batch * a.documents;
      fill(history_, a.history_rows * (a.longest - 1));
      a.history = {history_.data(), core::Index::int64};
    }
  }

  int64_t columns() const { return int64_t{a.num_sizes} * a.heads; }

  /// By the definition: the tokens before in the document, then in the history.
  std::vector<int64_t> expected() const {
    std::vector<int64_t> ids;
    for (int64_t row = 0; row < a.batch; ++row) {
      for (int64_t at = 0; at < a.seq; ++at) {
        const std::vector<int64_t> tokens = tokens_at(row, at);
        for (int64_t column = 0; column < columns(); ++column) {
          ids.push_back(remainder_of(hash_of(tokens, column), a.modulus[column]) + a.offset[column]);
        }
      }
    }
    return ids;
  }

  IdsArguments a;

 private:
  void fill(std::vector<int64_t>& tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int64_t>(random_() % 6));
  }

  bool is_hidden(int64_t token) const { return mask_ != nullptr && !mask_[token]; }

  std::vector<int64_t> tokens_at(int64_t row, int64_t at) const {
    if (is_hidden(row * a.seq + at)) {
      return std::vector<int64_t>(static_cast<size_t>(a.longest), a.padding);
    }
    int64_t document = 0, begin = 0;
    for (size_t i = 1; i < cu_seqlens_.size(); ++i) {
      if (cu_seqlens_[i] <= at) document = static_cast<int64_t>(i), begin = cu_seqlens_[i];
    }
    std::vector<int64_t> text(static_cast<size_t>(a.longest - 1), a.padding);
    if (!history_.empty()) {
      const auto from = history_.begin() + (row * a.documents + document) * (a.longest - 1);
      text.assign(from, from + a.longest - 1);
    }
    for (int64_t i = row * a.seq + begin; i <= row * a.seq + at; ++i) {
      if (!is_hidden(i)) text.push_back(ids_[static_cast<size_t>(i)]);
    }
    if (a.has_boundary) {
      for (size_t end = text.size() - 1; end-- > 0;) {
        if (text[end] == a.boundary) {
          std::fill(text.begin(), text.begin() + static_cast<int64_t>(end) + 1, a.padding);
          break;
        }
      }
    }
    return {text.rbegin(), text.rbegin() + a.longest};
  }

  int64_t hash_of(const std::vector<int64_t>& tokens, int64_t column) const {
    if (a.rule == Rule::modular) return sum_of(tokens, column);
    uint64_t hash = 0, power = 1;
    for (int32_t back = 0; back < a.sizes[column / a.heads]; ++back) {
      const auto token = static_cast<uint64_t>(tokens[static_cast<size_t>(back)]);
      if (a.rule == Rule::products) hash ^= token * a.multipliers[back];
    }
    for (int32_t back = a.sizes[column / a.heads]; a.rule == Rule::rolling && back-- > 0;) {
      hash += static_cast<uint64_t>(tokens[static_cast<size_t>(back)]) * power;
      power *= a.multipliers[column % a.heads];
    }
    return static_cast<int64_t>(hash);
  }

  /// Each power modulo the column's number, in 128 bits.
  int64_t sum_of(const std::vector<int64_t>& tokens, int64_t column) const {
    const auto modulus = static_cast<__int128>(a.modulus[column]);
    __int128 sum = 0, power = 1;
    for (int32_t back = 0; back < a.sizes[column / a.heads]; ++back) {
      sum += tokens[static_cast<size_t>(back)] * power;
      power = power * static_cast<__int128>(a.multipliers[column % a.heads]) % modulus;
    }
    return static_cast<int64_t>(sum % modulus);
  }

  std::mt19937_64 random_;
  std::vector<int64_t> ids_, history_;
  std::vector<int32_t> cu_seqlens_;
  std::unique_ptr<bool[]> mask_;
};

std::vector<Problem> problems() {
  return {
      {1, 1, {2, 3}, 8},
      {3, 7, {2, 3}, 8, Rule::products, true},
      {2, 9, {2, 3, 4}, 5, Rule::products, true, true},
      {1, 40, {1}, 1},
      {2, 5, {1, 4}, 3, Rule::products, false, true},
      {2, 11, {3, 4, 5, 6, 7, 8}, 2, Rule::rolling, false, false},
      {1, 12, {2, 5}, 7, Rule::rolling, true, true, {0, 5, 5, 6, 12}},
      {2, 12, {2, 3}, 64, Rule::products, true, true, {0, 1, 12}},
      {2, 0, {2}, 1},
      // Longer than the pieces of 256 tokens that the CPU's kernels hash together.
      {2, 700, {2, 3}, 8, Rule::products, true, true},
      {1, 600, {2, 3, 4}, 2, Rule::rolling, false, true, {0, 255, 257, 600}},
      {3, 300, {2, 3}, 4, Rule::products, true, true, {}, true},
      {2, 21, {3, 5}, 2, Rule::rolling, false, false, {}, true},
      {2, 12, {2, 4}, 3, Rule::products, true, true, {0, 5, 5, 6, 12}, true},
      {2, 9, {1, 2, 4}, 5, Rule::modular, true, true},
      {1, 600, {2, 3, 4}, 9, Rule::modular, true, true, {0, 255, 257, 600}},
      {2, 21, {3, 5}, 2, Rule::modular, false, false, {}, true},
  };
}

struct Variant {
  const char* name;
  void (*hash)(const IdsArguments&, int64_t, int64_t);
};

void hash_on_gpu(const IdsArguments& arguments, int64_t begin, int64_t) {
  if (begin == 0) {  // all tokens at once
    ASSERT_EQ(hash_tokens_cuda(arguments, nullptr), nullptr);
  }
}

std::vector<Variant> variants() {
  std::vector<Variant> result;
  POSEMBED_ADD_COPIES(result, isa::hash_tokens)
  result.push_back({"cuda source", hash_on_gpu});
  return result;
}

TEST(NgramKernel, GivesTheDefinition) {
  for (const Problem& problem : problems()) {
    Case test(problem);
    const std::vector<int64_t> expected = test.expected();
    for (const Variant& variant : variants()) {
      for (const int64_t parts : {1, 4}) {
        std::vector<int64_t> out(expected.size() + 8, -77);  // the last are guards
        test.a.out = out.data();
        const int64_t count = problem.batch * problem.seq;
        for (int64_t part = 0; part < parts; ++part) {
          variant.hash(test.a, count * part / parts, count * (part + 1) / parts);
        }
        EXPECT_EQ(std::vector<int64_t>(out.end() - 8, out.end()), std::vector<int64_t>(8, -77));
        out.resize(expected.size());
        EXPECT_EQ(out, expected) << variant.name << ", sizes to " << test.a.longest << ", heads " << problem.heads;
      }
    }
  }
}

/// A rolling hash of one token is the token, so that any number reaches every column.
TEST(NgramKernel, RemaindersOfAllSizes) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) {
    Case test({1, 10, {1}, 13, Rule::rolling});
    std::vector<int64_t> ids = edges(test.a.modulus[i % 13], random), out(130);
    test.a.ids.data = ids.data();
    test.a.out = out.data();
    hash_tokens_cpu(test.a, 0, 10);
    for (size_t at = 0; at < out.size(); ++at) {
      ASSERT_EQ(out[at] - test.a.offset[at % 13], remainder_of(ids[at / 13], test.a.modulus[at % 13]))
          << ids[at / 13] << " mod " << test.a.modulus[at % 13];
    }
  }
}

TEST(NgramKernel, StaysInsideForAnyBoundaries) {
  Case test({1, 6, {2, 3}, 2, Rule::products, false, true, {0, 2, 6}});
  const int32_t wrong[] = {9, -4, 100};
  test.a.cu_seqlens.data = wrong;
  std::vector<int64_t> out(24);
  test.a.out = out.data();
  EXPECT_EQ(hash_tokens_cuda(test.a, nullptr), nullptr);
  hash_tokens_cpu(test.a, 0, 6);
  for (const int64_t id : out) EXPECT_GE(id, 0);
}

}  // namespace
}  // namespace posembed::ngram
