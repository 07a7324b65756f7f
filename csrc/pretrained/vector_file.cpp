// VectorFile: chooses the format, fills rows of missing words, and adds the file's name to errors.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "pretrained/file.h"
#include "pretrained/safetensors.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

std::string message(const std::string& path, int64_t offset, const std::string& reason) {
  return path + ": byte " + std::to_string(offset) + ": " + reason;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::vector<std::string> words_met(const Vocabulary& vocabulary, uint8_t times) {
  std::vector<std::string> words;
  vocabulary.visit_met(times, [&](std::string_view word) { words.emplace_back(word); });
  return words;
}

Coverage coverage_of(const Vocabulary& vocabulary) {
  return {vocabulary.count_met(), words_met(vocabulary, 0), words_met(vocabulary, 2)};
}

/// Whether a file contains tensors, judged by its first bytes.
bool begins_as_tensors(const std::string& path) {
  const File file(path);
  return with_path(path, [&] { return is_safetensors(file.head(recognised_bytes), file.size()); });
}

/// Throws if the file lacks words; the message names the first few.
void check_none_is_missing(const Vocabulary& vocabulary, const std::string& path) {
  constexpr int64_t shown = 5;
  int64_t count = 0;
  std::string some;
  vocabulary.visit_met(0, [&](std::string_view word) {
    if (++count <= shown) some.append(count == 1 ? "" : ", ").append(in_quotes(word));
  });
  TORCH_CHECK_VALUE(count == 0, "vocabulary: ", count, " words have no row in ", readable(path),
                    ": ", some, count > shown ? ", ..." : "");
}

/// The mean of a power of the `count` rows that are not zeros, column by column. Sums in parts,
/// because a sum in float64 would copy the whole table.
torch::Tensor mean_of(const torch::Tensor& vectors, int64_t count, int power = 1) {
  constexpr int64_t part = 4096;
  torch::Tensor sum = torch::zeros({vectors.size(1)}, torch::kDouble);
  for (int64_t begin = 0; begin < vectors.size(0); begin += part) {
    const int64_t rows = std::min(part, vectors.size(0) - begin);
    sum += vectors.narrow(0, begin, rows).to(torch::kDouble).pow(power).sum(0);
  }
  return sum / static_cast<double>(count);
}

/// Fills the rows of words that the file lacks, by the rule `missing`.
void fill_missing(torch::Tensor& vectors, const Vocabulary& vocabulary, Missing missing,
                  const std::string& path) {
  if (missing == Missing::error) check_none_is_missing(vocabulary, path);
  const int64_t met = vocabulary.count_met();
  const bool is_random = missing == Missing::random;
  if (!(is_random || missing == Missing::mean) || met == vocabulary.size()) return;
  TORCH_CHECK_VALUE(met > 0, "vocabulary: none of its ", vocabulary.size(), " words has a row in ",
                    readable(path));
  const torch::Tensor mean = mean_of(vectors, met);
  torch::Tensor spread;
  if (is_random) spread = (mean_of(vectors, met, 2) - mean * mean).clamp_min(0).sqrt();
  for (int64_t i = 0; i < vocabulary.size(); ++i) {
    if (vocabulary.is_met(i)) continue;
    vectors[i].copy_(is_random ? mean + spread * torch::randn_like(mean) : mean);
  }
}

/// Words that the file lacks, and those whose rows are read instead.
using Substitutes = std::unordered_map<std::string, std::string>;

const std::string& instead(const Substitutes& others, const std::string& word) {
  const auto found = others.find(word);
  return found == others.end() ? word : found->second;
}

/// What the fallback gives for words that the file lacks, where the file has that.
Substitutes substitutes(const std::vector<std::string>& words, const Fallback& fallback,
                        const VectorFile& file, const Progress& progress) {
  if (!fallback) return {};
  Vocabulary every(words);
  std::unordered_map<std::string, int64_t> places;
  for (size_t i = 0; i < words.size(); ++i) places.emplace(words[i], static_cast<int64_t>(i));
  std::vector<std::string> given;
  for (const std::string& word : words) {
    given.push_back(word.empty() ? word : fallback(word));
    if (places.emplace(given.back(), every.size()).second) every.add(given.back());
  }
  file.look_up(every, progress);
  Substitutes others;
  for (size_t i = 0; i < words.size(); ++i) {
    const bool lacks = !words[i].empty() && !every.is_met(static_cast<int64_t>(i));
    if (lacks && every.is_met(places.at(given[i]))) others.emplace(words[i], given[i]);
  }
  return others;
}

/// The coverage of words from that of the words by which rows are read.
Coverage coverage_of(const std::vector<std::string>& words, const Substitutes& others,
                     Coverage found) {
  if (others.empty()) return found;
  const std::unordered_set<std::string> lost(found.missing.begin(), found.missing.end());
  Coverage coverage{0, {}, found.duplicate};
  for (const std::string& word : words) {
    if (word.empty()) continue;
    if (lost.count(instead(others, word)) == 0) {
      ++coverage.found;
    } else {
      coverage.missing.push_back(word);
    }
  }
  return coverage;
}

}  // namespace

StoredTable Source::stored(const std::string&) const {
  TORCH_CHECK_VALUE(false, "path: expected safetensors, whose rows can be read one by one, got ",
                    readable(path()), ", which is ", name(format()));
}

void Vocabulary::refuse_twice(std::string_view word) {
  TORCH_CHECK_VALUE(false, "vocabulary: expected each word once, got ", in_quotes(word), " twice");
}

FileFormatError::FileFormatError(std::string path, int64_t offset, std::string reason)
    : c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                      message(path, offset, reason)),
      path_(std::move(path)),
      offset_(offset),
      reason_(std::move(reason)) {}

const char* name(Format format) {
  switch (format) {
    case Format::safetensors:
      return "safetensors";
    case Format::word2vec_binary:
      return "word2vec-binary";
    case Format::word2vec_text:
      return "word2vec-text";
    default:
      return "glove";
  }
}

std::shared_ptr<const Source> open_source(const std::string& path, const OpenOptions& options) {
  const bool is_index = ends_with(path, ".json");
  const bool is_tensors = is_index || ends_with(path, ".safetensors") || begins_as_tensors(path);
  return is_tensors ? open_safetensors(path, is_index, options) : open_words(path, options);
}

VectorFile open(const std::string& path, const OpenOptions& options) {
  return VectorFile(open_source(path, options));
}

const std::string& VectorFile::path() const { return source_->path(); }
Format VectorFile::format() const { return source_->format(); }
std::vector<std::string> VectorFile::names() const { return source_->names(); }
torch::Dtype VectorFile::dtype(const std::string& name) const { return source_->dtype(name); }
std::vector<std::string> VectorFile::words() const { return source_->words(); }
Skipped VectorFile::skipped() const { return source_->skipped(); }

std::vector<int64_t> VectorFile::shape(const std::string& name) const {
  return source_->shape(name);
}

torch::Tensor VectorFile::tensor(const std::string& name, std::optional<torch::Dtype> dtype,
                                 const Progress& progress, bool copy) const {
  return source_->tensor(name, dtype.has_value() ? *dtype : source_->dtype(name), progress, copy);
}

torch::Tensor VectorFile::table(const ReadOptions& options) const {
  return source_->table(options);
}

Rows VectorFile::rows(const std::vector<std::string>& words, const ReadOptions& options) const {
  const Substitutes others = substitutes(words, options.fallback(), *this, options.progress());
  ReadOptions inner = options;
  inner.fallback(nullptr);
  if (others.empty()) {
    Vocabulary vocabulary(words);
    const torch::Tensor vectors = rows(vocabulary, inner);
    return {vectors, coverage_of(vocabulary)};
  }
  std::unordered_map<std::string_view, int64_t> places;
  std::vector<int64_t> place_of_word;
  Vocabulary vocabulary;
  for (const std::string& word : words) {
    const std::string& read = instead(others, word);
    const auto [place, is_new] = places.emplace(read, vocabulary.size());
    if (is_new) vocabulary.add(read);
    place_of_word.push_back(place->second);
  }
  const torch::Tensor vectors = rows(vocabulary, inner);
  return {vectors.index_select(0, torch::tensor(place_of_word)),
          coverage_of(words, others, coverage_of(vocabulary))};
}

Coverage VectorFile::coverage(const std::vector<std::string>& words, const Progress& progress,
                              const Fallback& fallback) const {
  const Substitutes others = substitutes(words, fallback, *this, progress);
  Vocabulary vocabulary;
  std::unordered_set<std::string_view> seen;
  for (const std::string& word : words) {
    const std::string& read = instead(others, word);
    if (others.empty() || seen.insert(read).second) vocabulary.add(read);
  }
  look_up(vocabulary, progress);
  return coverage_of(words, others, coverage_of(vocabulary));
}

torch::Tensor VectorFile::rows(Vocabulary& vocabulary, const ReadOptions& options) const {
  TORCH_CHECK_VALUE(!options.fallback(), "fallback: expected none with a Vocabulary");
  vocabulary.index();
  torch::Tensor vectors = source_->read_rows(vocabulary, options);
  fill_missing(vectors, vocabulary, options.missing(), path());
  return vectors;
}

void VectorFile::look_up(Vocabulary& vocabulary, const Progress& progress) const {
  vocabulary.index();
  source_->look_up(vocabulary, progress);
}

}  // namespace posembed::pretrained
