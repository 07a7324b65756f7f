// Tests files as C++ programs read them: views, rows of words, conversions, errors with the file's
// name.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "posembed/bag.h"
#include "posembed/pretrained.h"
#include "posembed/token.h"

namespace {

/// While positive, reads of this program are interrupted by turns, and give so many bytes at most.
size_t largest_read = 0;
std::atomic<int> reads = 0;

}  // namespace

/// Stands before the C library's in the search for symbols, also for libposembed.so.
extern "C" __attribute__((visibility("default"))) ssize_t pread(int descriptor, void* out, size_t size, off_t begin) {
  if (largest_read > 0) {
    if (++reads % 2 == 1) {
      errno = EINTR;
      return -1;
    }
    size = std::min(size, largest_read);
  }
  return syscall(SYS_pread64, descriptor, out, size, begin);
}

namespace posembed::pretrained {
namespace {

/// A temporary folder, removed after the test.
class VectorFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) / test->name();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ / name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  /// Writes the numbers 0, 1, 2, ... as the table "table", [rows, 2].
  std::string write_table(const std::string& name, int64_t rows) const {
    return write_numbers(name, 2 * rows,
                         R"({"table":{"dtype":"F32","shape":[)" + std::to_string(rows) + R"(,2],"data_offsets":[0,)" +
                             std::to_string(8 * rows) + "]}}");
  }

  /// Writes the numbers 0, 1, 2, ... behind a header of safetensors.
  std::string write_numbers(const std::string& name, int64_t count, const std::string& header) const {
    const uint64_t length = header.size();
    std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
    const torch::Tensor numbers = torch::arange(count, torch::kFloat);
    bytes += header;
    bytes.append(static_cast<const char*>(numbers.const_data_ptr()), numbers.nbytes());
    return write(name, bytes);
  }

 private:
  std::filesystem::path folder_;
};

torch::Tensor counted(int64_t rows) { return torch::arange(2 * rows, torch::kFloat).view({rows, 2}); }

TEST_F(VectorFiles, InterruptedAndShortReadsAreContinued) {
  const std::string path = write_table("model.safetensors", 50);
  const std::string words = write("words.txt", "the 1 2\ncat 3 4\n");
  largest_read = 13;
  reads = 0;
  const torch::Tensor table = open(path).tensor("table", torch::kDouble);
  const torch::Tensor rows = open(words).table();
  largest_read = 0;
  EXPECT_GT(reads, 2 * 400 / 13);  // those of the table went through the function above
  EXPECT_TRUE(torch::equal(table, counted(50).to(torch::kDouble)));
  EXPECT_TRUE(torch::equal(rows, torch::tensor({{1.0f, 2.0f}, {3.0f, 4.0f}})));
}

TEST_F(VectorFiles, RowsForWords) {
  const VectorFile file = open(write("tiny.txt", "the 1 2\ncat 3 4\nthe 5 6\ndog 7 8\n"));
  const Rows rows = file.rows({"dog", "", "the", "emu"});
  EXPECT_TRUE(torch::equal(rows.vectors, torch::tensor({{7., 8.}, {4., 5.}, {1., 2.}, {4., 5.}}, torch::kFloat)));
  EXPECT_EQ(rows.coverage.found, 2);
  EXPECT_EQ(rows.coverage.missing, std::vector<std::string>{"emu"});
  EXPECT_EQ(rows.coverage.duplicate, std::vector<std::string>{"the"});
  EXPECT_EQ(file.coverage({"cat"}).found, 1);
  EXPECT_EQ(file.words(), (std::vector<std::string>{"the", "cat", "the", "dog"}));
  EXPECT_THROW(file.rows({"emu"}), c10::ValueError);
  EXPECT_THROW(file.rows({"cat", "cat"}), c10::ValueError);
  EXPECT_THROW(file.rows({"cat", "emu"}, ReadOptions().missing(Missing::error)), c10::ValueError);
  EXPECT_THROW(file.rows({"cat"}, ReadOptions().dtype(torch::kLong)), c10::TypeError);
  const auto random = file.rows({"x", "the", "y", "dog"}, ReadOptions().missing(Missing::random));
  EXPECT_TRUE(torch::equal(random.vectors[1], torch::tensor({1., 2.}, torch::kFloat)));
  EXPECT_FALSE(torch::equal(random.vectors[0], random.vectors[2]));
}

TEST_F(VectorFiles, OtherWordsForThoseThatAreMissing) {
  const VectorFile file = open(write("tiny.txt", "the 1 2\ncat 3 4\nThe 5 6\n"));
  const posembed::pretrained::Fallback lower = [](std::string word) {
    std::transform(word.begin(), word.end(), word.begin(), ::tolower);
    return word;
  };
  const std::vector<std::string> words = {"CAT", "cat", "", "The", "EMU", "Cat"};
  const auto options = ReadOptions().missing(Missing::zero).fallback(lower);
  const Rows rows = file.rows(words, options);
  EXPECT_TRUE(torch::equal(rows.vectors,
                           torch::tensor({{3., 4.}, {3., 4.}, {0., 0.}, {5., 6.}, {0., 0.}, {3., 4.}}, torch::kFloat)));
  EXPECT_EQ(rows.coverage.found, 4);
  EXPECT_EQ(rows.coverage.missing, std::vector<std::string>{"EMU"});
  const auto coverage = file.coverage(words, nullptr, lower);
  EXPECT_EQ(coverage.found, 4);
  EXPECT_EQ(coverage.missing, std::vector<std::string>{"EMU"});
  EXPECT_THROW(file.rows({"CAT", "CAT"}, options), c10::ValueError);
  Vocabulary vocabulary(words);
  EXPECT_THROW(file.rows(vocabulary, options), c10::ValueError);
  EXPECT_THROW(TokenEmbedding::from_file(file.path(), std::nullopt, options), c10::ValueError);
}

TEST_F(VectorFiles, ErrorsNameFilePlaceAndReason) {
  const std::string path = write("bad.vec", "2 2\na 1 2\nb 1 nan\n");
  const VectorFile file = open(path);
  try {
    file.table();
    FAIL() << "nan was taken";
  } catch (const FileFormatError& error) {
    EXPECT_EQ(error.path(), path);
    EXPECT_EQ(error.offset(), 14);
    EXPECT_EQ(error.reason(), "expected a finite number, got 'nan' (on_bad_row 'skip' leaves such rows out)");
    EXPECT_EQ(std::string(error.what_without_backtrace()), path + ": byte 14: " + error.reason());
  }
  EXPECT_THROW(file.table(), c10::ValueError);
  EXPECT_THROW(open(path + ".gone"), std::filesystem::filesystem_error);
  EXPECT_THROW(open(std::filesystem::path(path).parent_path()), std::filesystem::filesystem_error);
}

TEST(Vocabulary, KnowsNoWordBeforeItIsIndexed) {
  pretrained::Vocabulary vocabulary;
  vocabulary.add("king");
  EXPECT_EQ(vocabulary.meet("king"), -1);
  EXPECT_FALSE(vocabulary.is_met(0));
  vocabulary.index();
  EXPECT_EQ(vocabulary.meet("king"), 0);
  EXPECT_TRUE(vocabulary.is_met(0));
  EXPECT_FALSE(vocabulary.is_met(-1) || vocabulary.is_met(1));
}

TEST_F(VectorFiles, BecomeTokenEmbeddings) {
  const std::string path = write("tiny.txt", "the 1 2\ncat 3 4\n");
  auto token = TokenEmbedding::from_file(path, {{"cat", "the"}});
  EXPECT_TRUE(torch::equal(token->forward(torch::tensor({0})), torch::tensor({{3.f, 4.f}})));
  EXPECT_FALSE(token->weight.requires_grad());
  const auto all = TokenEmbedding::from_file(path, std::nullopt, ReadOptions().dtype(torch::kHalf),
                                             /*freeze=*/false, TokenOptions(0, 0).padding_idx(1));
  EXPECT_EQ(all->weight.scalar_type(), torch::kHalf);
  EXPECT_EQ(all->options.padding_idx(), 1);
  EXPECT_TRUE(all->weight.requires_grad());
}

TEST_F(VectorFiles, BecomeBags) {
  const std::string path = write("tiny.txt", "the 1 2\ncat 3 4\nbad 5\n");
  EXPECT_THROW(TokenBag::from_file(path), posembed::pretrained::FileFormatError);
  const auto bag = TokenBag::from_file(path, {{"cat", "the", "x"}}, ReadOptions().missing(Missing::zero), true,
                                       TokenBagOptions(0, 0).mode(posembed::BagMode::mean),
                                       OpenOptions().on_bad_row(OnBadRow::skip));
  EXPECT_FALSE(bag->weight.requires_grad());
  EXPECT_TRUE(torch::equal(bag->weight, torch::tensor({{3.f, 4.f}, {1.f, 2.f}, {0.f, 0.f}})));
  EXPECT_EQ(bag->options.mode(), posembed::BagMode::mean);
  const auto whole = TokenBag::from_file(write("two.txt", "the 1 2\ncat 3 4\n"));
  EXPECT_TRUE(torch::equal(whole->weight, torch::tensor({{1.f, 2.f}, {3.f, 4.f}})));
}

/// A layer whose weight fits the file of write_table(name, 3).
torch::nn::Linear layer(bool bias) { return torch::nn::Linear(torch::nn::LinearOptions(2, 3).bias(bias)); }

TEST_F(VectorFiles, LoadsTheStateOfAModuleByName) {
  const VectorFile file = open(write_table("model.safetensors", 3));
  const auto as_table = [](const std::string& name) { return name == "weight" ? "table" : name; };
  torch::nn::Linear linear = layer(/*bias=*/false);
  linear->to(torch::kBFloat16);
  load_state(*linear, file, LoadOptions().name_in_file(as_table));
  EXPECT_TRUE(torch::equal(linear->weight, counted(3).to(torch::kBFloat16)));
  EXPECT_TRUE(linear->weight.requires_grad());
}

TEST_F(VectorFiles, LoadsBuffersAndRefusesTensorsForWhichThereIsNone) {
  const VectorFile file = open(write_table("model.safetensors", 3));
  struct Tables : torch::nn::Module {
    torch::Tensor table = register_buffer("table", torch::zeros({3, 2}));
  };
  Tables tables;
  load_state(tables, file);
  EXPECT_TRUE(torch::equal(tables.table, counted(3)));
  torch::nn::Module empty;
  EXPECT_THROW(load_state(empty, file), c10::ValueError);
}

TEST_F(VectorFiles, LoadsCodesAsTheyAreOrNot) {
  const std::string header = R"({"codes":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})";
  const uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
  bytes += header;
  bytes.append("\x01\xff\x02\x7f", 4);
  const VectorFile file = open(write("codes.safetensors", bytes));
  struct Table : torch::nn::Module {
    explicit Table(torch::Dtype dtype) : codes(register_buffer("codes", torch::zeros({4}, torch::kFloat).to(dtype))) {}
    torch::Tensor codes;
  };
  for (const auto dtype : {torch::kFloat8_e4m3fn, torch::kByte, torch::kFloat, torch::kLong}) {
    Table table(dtype);
    EXPECT_THROW(load_state(table, file), c10::TypeError);
    EXPECT_EQ(table.codes.to(torch::kFloat).abs().sum().item<float>(), 0);
  }
  Table table(torch::kChar);
  load_state(table, file);
  EXPECT_TRUE(torch::equal(table.codes, torch::tensor({1, -1, 2, 127}, torch::kChar)));
}

TEST_F(VectorFiles, LoadsNothingUnlessAllNamesAndShapesFit) {
  const VectorFile file = open(write_table("model.safetensors", 3));
  const auto as_table = [](const std::string& name) { return name == "weight" ? "table" : name; };
  torch::nn::Linear linear = layer(/*bias=*/true), wide(4, 3);
  const torch::Tensor before = linear->weight.clone();
  EXPECT_THROW(load_state(*linear, file, LoadOptions().name_in_file(as_table)), c10::ValueError);
  EXPECT_THROW(load_state(*layer(false), file), c10::ValueError);
  EXPECT_THROW(load_state(*wide, file, LoadOptions().name_in_file(as_table).strict(false)), c10::ValueError);
  EXPECT_TRUE(torch::equal(linear->weight, before));
  const Unmatched unmatched = load_state(*linear, file, LoadOptions().name_in_file(as_table).strict(false));
  EXPECT_EQ(unmatched.missing, std::vector<std::string>{"bias"});
  EXPECT_TRUE(unmatched.unexpected.empty());
  EXPECT_TRUE(torch::equal(linear->weight, counted(3)));
  EXPECT_THROW(load_state(*linear, file, LoadOptions().strict(false)), c10::ValueError);
}

/// Two parts of a packed projection, or one transposed table.
struct Parts : torch::nn::Module {
  torch::Tensor first = register_parameter("first", torch::zeros({2, 2}));
  torch::Tensor second = register_parameter("second", torch::zeros({1, 2}));
};

TEST_F(VectorFiles, LoadsTransposedAndSplitTensors) {
  const VectorFile file = open(write_table("model.safetensors", 3));
  const auto as_table = [](const std::string&) { return "table"; };
  const auto part = [](const std::string& name, const torch::Tensor& tensor) {
    return name == "first" ? tensor.slice(0, 0, 2).t() : tensor.slice(0, 2);
  };
  Parts parts;
  load_state(parts, file, LoadOptions().name_in_file(as_table).transform(part));
  EXPECT_TRUE(torch::equal(parts.first, torch::tensor({{0.f, 2.f}, {1.f, 3.f}})));
  EXPECT_TRUE(torch::equal(parts.second, torch::tensor({{4.f, 5.f}})));
  EXPECT_TRUE(torch::equal(file.tensor("table"), counted(3)));
}

TEST_F(VectorFiles, LoadsJoinedTensors) {
  const VectorFile file = open(write_numbers("model.safetensors", 6,
                                             R"({"b":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},)"
                                             R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})"));
  torch::nn::Linear joined = layer(/*bias=*/false);
  const auto names = [](const std::string&) { return std::vector<std::string>{"a", "b"}; };
  load_state(*joined, file, LoadOptions().names_in_file(names));
  EXPECT_TRUE(torch::equal(joined->weight, counted(3)));
  const auto lost = [](const std::string&) { return std::vector<std::string>{"a", "other"}; };
  const auto none = [](const std::string&) { return std::vector<std::string>(); };
  EXPECT_THROW(load_state(*joined, file, LoadOptions().names_in_file(lost)), c10::ValueError);
  EXPECT_THROW(load_state(*joined, file, LoadOptions().names_in_file(none)), c10::ValueError);
  const auto both = LoadOptions().names_in_file(names).name_in_file([](const std::string& name) { return name; });
  EXPECT_THROW(load_state(*joined, file, both), c10::ValueError);
}

TEST_F(VectorFiles, ChecksWhatATransformGives) {
  const VectorFile file = open(write_table("model.safetensors", 3));
  torch::nn::Linear linear = layer(/*bias=*/false);
  const torch::Tensor before = linear->weight.clone();
  const auto load = [&](const std::function<torch::Tensor(torch::Tensor)>& change) {
    load_state(*linear, file,
               LoadOptions()
                   .name_in_file([](const std::string&) { return "table"; })
                   .transform([&](const std::string& name, const torch::Tensor& tensor) {
                     EXPECT_EQ(name, "weight");
                     return change(tensor);
                   }));
  };
  EXPECT_THROW(load([](const auto& x) { return x.t(); }), c10::ValueError);
  EXPECT_THROW(load([](const auto&) { return torch::Tensor(); }), c10::ValueError);
  EXPECT_THROW(load([](const auto& x) { return x.to(torch::kLong); }), c10::TypeError);
  EXPECT_TRUE(torch::equal(linear->weight, before));
  linear->to(torch::kHalf);
  EXPECT_THROW(load([](const auto& x) { return x + 1e6; }), FileFormatError);
  load([](const auto& x) { return x.to(torch::kDouble) + 1; });
  EXPECT_TRUE(torch::equal(linear->weight, (counted(3) + 1).to(torch::kHalf)));
}

}  // namespace
}  // namespace posembed::pretrained
