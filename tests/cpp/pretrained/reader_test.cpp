// Tests the readers on bytes in memory: results, errors and their offsets. scripts/fuzz_readers.py
// damages them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "pretrained/file.h"

namespace posembed::pretrained {
namespace {

std::string bytes_of(uint64_t number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::string safetensors(const std::string& header, size_t data_bytes) {
  return bytes_of(header.size()) + header + std::string(data_bytes, '\1');
}

std::string two_tensors() {
  return safetensors(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},)"
                     R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}} )",
                     28);
}

std::string row(const std::string& word, const std::vector<float>& numbers, const char* end = "\n") {
  std::string bytes = word + ' ';
  const char* data = reinterpret_cast<const char*>(numbers.data());
  return bytes.append(data, numbers.size() * sizeof(float)) + end;
}

const std::vector<float> three = {0.5f, -1.25f, 3e-5f};

std::string binary_words() { return "2 3\n" + row("the", three) + row("k\xc3\xb6nig", three, ""); }

std::string text_words() { return "3 2\nthe 0.5 -1.25 \nnew york 1e-3 +2\nat a@b.c 3 4\n"; }

std::string glove_words() { return "the 0.5 -1.25\n. . . 1 2\r\nat a@b.c .5 5."; }

std::vector<TensorEntry> header_of(std::string_view file) {
  const auto size = static_cast<int64_t>(file.size());
  const int64_t end = header_end(file.substr(0, recognised_bytes), size);
  return read_header(file.substr(0, static_cast<size_t>(end)), size);
}

WordLayout layout_of(std::string_view file) {
  return detect_layout(file.substr(0, layout_bytes), static_cast<int64_t>(file.size()));
}

RowReader rows_of(std::string_view file) {
  return {file, layout_of(file), /*check_utf8=*/true, [](int64_t) {}};
}

struct Words {
  std::vector<std::string> words;
  std::vector<std::vector<float>> vectors;
};

/// Decodes every row into a buffer of exactly its size.
Words read_words(const std::string& file) {
  const WordLayout layout = layout_of(file);
  RowReader reader = rows_of(file);
  Words result;
  for (Row found; reader.next(found);) {
    result.words.emplace_back(found.word);
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(layout.dim)]);
    reader.decode(found, core::Scalar::float32, numbers.get());
    result.vectors.emplace_back(numbers.get(), numbers.get() + layout.dim);
  }
  return result;
}

template <typename Read>
BadFile refusal(const Read& read) {
  try {
    read();
  } catch (const BadFile& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return {0, ""};
}

TEST(Safetensors, ReadsWhatTheHeaderSays) {
  const std::string file = two_tensors();
  ASSERT_TRUE(is_safetensors(file, static_cast<int64_t>(file.size())));
  const std::vector<TensorEntry> entries = header_of(file);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].name, "b");
  EXPECT_EQ(entries[0].dtype, "F32");
  EXPECT_EQ(entries[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(entries[0].begin, static_cast<int64_t>(file.size()) - 24);
  EXPECT_EQ(entries[0].size, 24);
  EXPECT_EQ(entries[1].name, "a");
  EXPECT_TRUE(header_of(safetensors("{}", 0)).empty());
}

TEST(Safetensors, ReadsAnIndexWhoseShardsLieBesideIt) {
  const std::vector<ShardEntry> entries =
      read_index(R"({"metadata":{"total_size":1},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[1].file, "2.safetensors");
  for (const char* text : {R"({"weight_map":{"a":"../1"}})", R"({"weight_map":{"a":1}})", R"({"weight_map":[]})",
                           R"({})", R"([1])", R"({"weight_map":{"a":"")"}) {
    EXPECT_THROW(read_index(text), BadFile) << text;
  }
}

TEST(WordFile, TellsFormatsApart) {
  const WordLayout binary = layout_of(binary_words());
  EXPECT_TRUE(binary.binary);
  EXPECT_EQ(binary.rows, 2);
  EXPECT_EQ(binary.dim, 3);
  const WordLayout text = layout_of(text_words());
  EXPECT_FALSE(text.binary);
  EXPECT_EQ(text.dim, 2);
  const WordLayout glove = layout_of(glove_words());
  EXPECT_EQ(glove.rows, -1);
  EXPECT_EQ(glove.dim, 2);
  EXPECT_EQ(layout_of("0 5\n").rows, 0);
  const std::string numbers = " 0.125 0.25\n";
  for (const char* word : {"\x1f", "caf\xe9", "\xe6\x97\xa5"}) {
    EXPECT_FALSE(layout_of("2 2\na" + numbers + word + numbers).binary) << word;
    EXPECT_FALSE(layout_of("2 2\n" + (word + numbers) + 'a' + numbers).binary) << word;
  }
  for (const char* end : {"\n", ""}) {
    const std::vector<float> tenths = {0.1f, 0.7f, -0.3f};  // no zero among their bytes
    EXPECT_TRUE(layout_of("2 3\n" + row("7", tenths, end) + row("8", tenths, end)).binary);
  }
}

TEST(WordFile, ReadsRows) {
  const Words binary = read_words(binary_words());
  EXPECT_EQ(binary.words, (std::vector<std::string>{"the", "k\xc3\xb6nig"}));
  EXPECT_EQ(binary.vectors[1], three);
  const Words text = read_words(text_words());
  EXPECT_EQ(text.words, (std::vector<std::string>{"the", "new york", "at a@b.c"}));
  EXPECT_EQ(text.vectors[1], (std::vector<float>{1e-3f, 2.0f}));
  const Words glove = read_words(glove_words());
  EXPECT_EQ(glove.words, (std::vector<std::string>{"the", ". . .", "at a@b.c"}));
  EXPECT_EQ(glove.vectors[2], (std::vector<float>{0.5f, 5.0f}));
}

TEST(WordFile, TakesATabForTheEndOfAWordWhereTheFirstRowHasOne) {
  for (const char* header : {"", "2 2\n"}) {
    const Words words = read_words(std::string(header) + "apollo 11\t1 2\n7\t3\t4\n");
    EXPECT_EQ(words.words, (std::vector<std::string>{"apollo 11", "7"}));
    EXPECT_EQ(words.vectors[1], (std::vector<float>{3.0f, 4.0f}));
  }
}

TEST(WordFile, GoesOnBehindABadRow) {
  const std::string file = "a 1 2\nb 1\n\nc 3 4\n";
  RowReader reader = rows_of(file);
  Row found;
  ASSERT_TRUE(reader.next(found));
  EXPECT_THROW(reader.next(found), BadRow);
  EXPECT_EQ(reader.row(), 2);
  EXPECT_EQ(reader.begin(), 6);
  EXPECT_EQ(reader.first_word(), "b");
  EXPECT_THROW(reader.next(found), BadRow);
  ASSERT_TRUE(reader.next(found));
  EXPECT_EQ(found.word, "c");
  EXPECT_FALSE(reader.next(found));
}

TEST(WordFile, RoundsOnceAndTakesNumbersNearZero) {
  const Words words =
      read_words("a 0.1 1e-46 -1e-400 1e-40 340282346638528859811704183484516925440 1e-5000 +0." +
                 std::string(6000, '0') + "1 -12e-99999999999999999999 " + std::string(6000, '1') + "e-6000\n");
  EXPECT_EQ(words.vectors[0], (std::vector<float>{0.1f, 0.0f, -0.0f, 1e-40f, std::numeric_limits<float>::max(), 0.0f,
                                                  0.0f, -0.0f, 0.11111111f}));
}

TEST(WordFile, DecodesToEveryType) {
  const std::string file = "a 1.00390625 -2\n";  // half way between two bfloat16
  RowReader reader = rows_of(file);
  Row found;
  ASSERT_TRUE(reader.next(found));
  double wide[2];
  reader.decode(found, core::Scalar::float64, wide);
  EXPECT_EQ(wide[0], 1.00390625);
  core::BFloat16 narrow[2];
  reader.decode(found, core::Scalar::bfloat16, narrow);
  EXPECT_EQ(core::load(narrow[0]), 1.0f);
  core::Float16 half[2];
  reader.decode(found, core::Scalar::float16, half);
  EXPECT_EQ(core::load(half[0]), 1.00390625f);
}

/// A file of the corpus that is refused: tests/python/pretrained/test_pretrained.py has them, too.
struct Refused {
  std::string name;
  int64_t offset = 0;
  std::string reason;
};

std::string contents(const std::string& name) {
  std::ifstream file(POSEMBED_CORPUS "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Refused> refused() {
  std::istringstream lines(contents("refused.tsv"));
  std::vector<Refused> found;
  Refused row;
  std::string offset;
  while (std::getline(lines, row.name, '\t') && std::getline(lines, offset, '\t') && std::getline(lines, row.reason)) {
    row.offset = std::stoll(offset);
    found.push_back(row);
  }
  return found;
}

class Corpus : public testing::TestWithParam<Refused> {};

TEST_P(Corpus, IsRefusedSayingWhereAndWhy) {
  const std::string file = contents(GetParam().name);
  const BadFile error = refusal([&] { GetParam().name[0] == 's' ? void(header_of(file)) : void(read_words(file)); });
  EXPECT_EQ(error.offset, GetParam().offset) << error.what();
  EXPECT_NE(std::string(error.what()).find(GetParam().reason), std::string::npos) << error.what();
}

INSTANTIATE_TEST_SUITE_P(Files, Corpus, testing::ValuesIn(refused()), [](const auto& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST(Utf8, IsThatOfTheStandard) {
  for (const char* valid : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                            "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(utf8_prefix(valid), std::strlen(valid)) << valid;
  }
  for (const char* invalid :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80", "\xc2", "\xe1\x80", "\xf1\x80\x80", "\xc2 ", "\xe1\x80 "}) {
    EXPECT_EQ(utf8_prefix(std::string("ok") + invalid), 2u) << invalid;
  }
}

}  // namespace
}  // namespace posembed::pretrained
