// Tables from a source: rows in the order of token ids, numbers in another dtype, and the state of
// modules.
#include "pretrained/source.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/brief.h"
#include "dispatcher/tensors.h"
#include "posembed/pretrained.h"
#include "pretrained/file.h"

namespace posembed::pretrained {
namespace {

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The table's rows in the order of token ids.
torch::Tensor mapped(const torch::Tensor& rows, const std::string& table,
                     const torch::Tensor& mapping) {
  const bool fits = mapping.numel() == 0 || (mapping.min().item<int64_t>() >= 0 &&
                                             mapping.max().item<int64_t>() < rows.size(0));
  TORCH_CHECK_VALUE(fits, "mapping: expected rows of '", table, "', which has ", rows.size(0));
  return rows.index_select(0, mapping);
}

/// The rows times the weights of their tokens, rounded once.
torch::Tensor weighted(const torch::Tensor& rows, const torch::Tensor& weights) {
  TORCH_CHECK_VALUE(weights.size(0) == rows.size(0), "weights: expected ", rows.size(0),
                    ", one for each token, got ", weights.size(0));
  const torch::Dtype own = rows.is_floating_point() ? rows.scalar_type() : torch::kFloat;
  return (rows.to(torch::kDouble) * weights.unsqueeze(1)).to(own);
}

torch::Tensor in_dtype(const torch::Tensor& rows, std::optional<torch::Dtype> dtype,
                       const std::string& path, const std::string& table) {
  if (dtype.value_or(rows.scalar_type()) == rows.scalar_type()) return rows;
  torch::Tensor result = at::empty_like(rows, rows.options().dtype(*dtype));
  if (const std::optional<Lost> lost = convert(rows, result)) {
    const std::string name(c10::getDtypeNames(*dtype).first);
    with_path(path, [&] {
      fail(0, table, ": expected a number that is finite in ", name, ", got ", lost->number);
    });
  }
  return result;
}

}  // namespace

std::optional<torch::Tensor> token_rows(const VectorFile& file, const ReadOptions& options,
                                        bool by_word) {
  const std::vector<std::string> names = file.names();
  const std::string table = has(names, "embeddings") ? "embeddings" : "embedding.weight";
  const bool is_asked_for = options.tensor().empty() || options.tensor() == table;
  if (!has(names, table.c_str()) || !is_asked_for) return std::nullopt;
  const auto beside = [&](const char* name, torch::Dtype dtype) {
    const bool is_list = has(names, name) && file.shape(name).size() == 1;
    return is_list ? file.tensor(name, dtype, nullptr, true) : torch::Tensor();
  };
  const torch::Tensor mapping = beside("mapping", torch::kLong);
  const torch::Tensor weights = beside("weights", torch::kDouble);
  if (!mapping.defined() && !weights.defined()) return std::nullopt;
  if (by_word) {
    TORCH_CHECK_VALUE(!weights.defined() || weights.eq(1).all().item<bool>(),
                      "words: expected none for a file with weights by token id, 'weights'");
    return std::nullopt;
  }
  torch::Tensor rows = file.table(ReadOptions().tensor(table).progress(options.progress()));
  if (mapping.defined()) rows = mapped(rows, table, mapping);
  if (weights.defined()) rows = weighted(rows, weights);
  return in_dtype(rows, options.dtype(), file.path(), table);
}

torch::Tensor table_from_file(const std::string& path,
                              const std::optional<std::vector<std::string>>& vocabulary,
                              const ReadOptions& read, const OpenOptions& open) {
  TORCH_CHECK_VALUE(vocabulary.has_value() || !read.fallback(),
                    "fallback: expected none without a vocabulary");
  const VectorFile file = pretrained::open(path, open);
  const std::optional<torch::Tensor> by_id = token_rows(file, read, vocabulary.has_value());
  const torch::Tensor table = by_id.has_value()        ? *by_id
                              : vocabulary.has_value() ? file.rows(*vocabulary, read).vectors
                                                       : file.table(read);
  if (const int64_t skipped = file.skipped().count; skipped > 0) {
    TORCH_WARN(path, ": skipped ", skipped, " rows that cannot be read, the first of them row ",
               file.skipped().rows[0].row, ": ", file.skipped().rows[0].reason);
  }
  return table;
}

namespace {

// --------------------------------------------------------------------------------------- narrowing

/// The largest finite number of a floating dtype; a bound for numbers of another dtype.
double largest(torch::Dtype dtype) {
  switch (dtype) {
    case torch::kDouble:
      return std::numeric_limits<double>::max();
    case torch::kFloat:
    case torch::kComplexFloat:
      return std::numeric_limits<float>::max();
    case torch::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    case torch::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case torch::kFloat8_e4m3fn:
      return std::numeric_limits<c10::Float8_e4m3fn>::max();
    case torch::kFloat8_e4m3fnuz:
      return std::numeric_limits<c10::Float8_e4m3fnuz>::max();
    case torch::kFloat8_e5m2:
      return std::numeric_limits<c10::Float8_e5m2>::max();
    case torch::kFloat8_e5m2fnuz:
      return std::numeric_limits<c10::Float8_e5m2fnuz>::max();
    case torch::kFloat8_e8m0fnu:
      return std::ldexp(1.0, 127);
    default:
      return std::ldexp(1.0, 8 * static_cast<int>(c10::elementSize(dtype)));
  }
}

/// Real numbers of a dtype that torch can compare.
torch::Tensor comparable(const torch::Tensor& numbers) {
  if (numbers.is_complex()) return at::real(numbers);
  const torch::Dtype dtype = numbers.scalar_type();
  if (c10::isFloat8Type(dtype)) return numbers.to(torch::kFloat);
  return c10::isBarebonesUnsignedType(dtype) ? numbers.to(torch::kDouble) : numbers;
}

/// Whether no number is larger than `limit`. One pass, and false if there is a NaN.
bool are_within(const torch::Tensor& numbers, double limit) {
  const auto [low, high] = at::aminmax(numbers);
  return -limit <= low.item<double>() && high.item<double>() <= limit;
}

}  // namespace

std::optional<Lost> convert(const torch::Tensor& from, torch::Tensor to) {
  to.copy_(from);
  const torch::Dtype dtype = to.scalar_type();
  const bool may_overflow =
      c10::isFloatingType(dtype) && largest(from.scalar_type()) > largest(dtype);
  if (!may_overflow || from.numel() == 0) return std::nullopt;
  const torch::Tensor numbers = comparable(from);
  if (are_within(numbers, largest(dtype))) return std::nullopt;
  const torch::Tensor lost =
      at::isfinite(numbers).logical_and_(at::isfinite(comparable(to)).logical_not_()).flatten();
  if (!lost.any().item<bool>()) return std::nullopt;
  const auto index = lost.nonzero()[0].item<int64_t>();
  return Lost{index, numbers.flatten()[index].to(torch::kDouble).item<double>()};
}

namespace {

// ------------------------------------------------------------------------------------ module state
// load_state: fills a module's parameters and buffers from a file, by name.

/// A parameter or buffer, the names of its parts in the file, and what is copied to it.
struct Target {
  std::string name;
  torch::Tensor tensor;
  std::vector<std::string> parts;
  torch::Tensor given = {};
};

std::vector<Target> targets_of(const torch::nn::Module& module, const LoadOptions& options) {
  TORCH_CHECK_VALUE(!options.name_in_file() || !options.names_in_file(),
                    "names_in_file: expected none beside name_in_file");
  const auto parts_of = [&](const std::string& name) -> std::vector<std::string> {
    if (options.names_in_file()) return options.names_in_file()(name);
    return {options.name_in_file() ? options.name_in_file()(name) : name};
  };
  std::vector<Target> targets;
  const auto add = [&](const auto& named) {
    for (const auto& item : named) {
      targets.push_back({item.key(), item.value(), parts_of(item.key())});
      TORCH_CHECK_VALUE(!targets.back().parts.empty(), "names_in_file: expected names for ",
                        in_quotes(item.key()), ", got none");
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return targets;
}

/// The parts joined and transformed. One part is a view of the mapped file.
torch::Tensor given_for(const Target& target, const VectorFile& file, const LoadOptions& options) {
  std::vector<torch::Tensor> parts;
  for (const std::string& part : target.parts) parts.push_back(file.tensor(part));
  const torch::Tensor joined = parts.size() == 1 ? parts[0] : at::cat(parts);
  return options.transform() ? options.transform()(target.name, joined) : joined;
}

/// Numbers are converted among floats and among integers of more than a byte; codes never.
bool converts(torch::Dtype from, torch::Dtype to) {
  const auto is_number = [](torch::Dtype type) {
    return c10::elementSize(type) > 1 && !c10::isComplexType(type);
  };
  return from == to ||
         (is_number(from) && is_number(to) && c10::isFloatingType(from) == c10::isFloatingType(to));
}

/// The first few names, for a message.
std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t shown = 5;
  std::ostringstream text;
  for (size_t i = 0; i < names.size() && i < shown; ++i) {
    text << (i == 0 ? "" : ", ") << in_quotes(names[i]);
  }
  if (names.size() > shown) text << " and " << names.size() - shown << " more";
  return text.str();
}

/// The names of a target, for a message: the file's, and the module's where it is another.
std::string names_of(const Target& target) {
  const bool is_same = target.parts.size() == 1 && target.parts[0] == target.name;
  return is_same ? target.name : target.name + " (" + some_of(target.parts) + ")";
}

void check_fits(const Target& target, const std::string& path) {
  TORCH_CHECK_VALUE(target.given.defined() && target.tensor.sizes() == target.given.sizes(),
                    names_of(target), ": expected ", target.tensor.sizes(), ", got ",
                    target.given.defined() ? c10::str(target.given.sizes()) : "no tensor", " in ",
                    readable(path));
  const torch::Dtype from = target.given.scalar_type(), to = target.tensor.scalar_type();
  TORCH_CHECK_TYPE(converts(from, to), names_of(target), ": expected ", dispatcher::dtype_name(to),
                   ", got ", dispatcher::dtype_name(from), " in ", readable(path),
                   ", which are not converted");
}

void check_all_match(const Unmatched& unmatched, const std::string& path) {
  TORCH_CHECK_VALUE(unmatched.missing.empty(), "module: ", readable(path), " has no ",
                    some_of(unmatched.missing), "; strict(false) leaves them as they are");
  TORCH_CHECK_VALUE(unmatched.unexpected.empty(), "module: has no parameter or buffer for ",
                    some_of(unmatched.unexpected), " of ", readable(path),
                    "; strict(false) leaves them out");
}

}  // namespace

Unmatched load_state(torch::nn::Module& module, const VectorFile& file,
                     const LoadOptions& options) {
  const std::vector<std::string> names = file.names();
  const std::unordered_set<std::string> known(names.begin(), names.end());
  std::unordered_set<std::string> read;
  std::vector<Target> found;
  Unmatched unmatched;
  for (Target& target : targets_of(module, options)) {
    const size_t before = unmatched.missing.size();
    for (const std::string& part : target.parts) {
      if (known.count(part) == 0) unmatched.missing.push_back(part);
    }
    if (unmatched.missing.size() > before) continue;
    target.given = given_for(target, file, options);
    check_fits(target, file.path());
    read.insert(target.parts.begin(), target.parts.end());
    found.push_back(std::move(target));
  }
  for (const std::string& name : names) {
    if (read.count(name) == 0) unmatched.unexpected.push_back(name);
  }
  if (options.strict()) check_all_match(unmatched, file.path());
  TORCH_CHECK_VALUE(!found.empty() || unmatched.missing.empty() || names.empty(),
                    "module: ", readable(file.path()), " has none of its names, such as ",
                    some_of(unmatched.missing), ", but ", some_of(unmatched.unexpected),
                    "; name_in_file() says how a name is written there");
  const torch::NoGradGuard no_grad;
  for (Target& target : found) {
    target.tensor.copy_(
        in_dtype(target.given, target.tensor.scalar_type(), file.path(), target.parts[0]));
  }
  return unmatched;
}

namespace {

// ------------------------------------------------------------------------------------- vector file
// VectorFile: chooses the format, fills rows of missing words, and adds the file's name to errors.

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
  constexpr const char* names[] = {"safetensors", "word2vec-binary", "word2vec-text", "glove"};
  return names[static_cast<size_t>(format)];
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
