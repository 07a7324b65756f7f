// Files of vectors as classes of torch for posembed._files: a library without Python serves every
// version of it. Words pass as one text with the characters of each word, paths as text with a
// character for each byte, because they need not be UTF-8.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "dispatcher/checks.h"
#include "dispatcher/tensors.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

bool continues_character(char byte) { return (byte & 0xc0) == 0x80; }

/// Text with a character for each byte, from U+0000 to U+00FF.
std::string text_of_path(const std::string& path) {
  std::string text;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) text += static_cast<char>(0xc0 | byte >> 6);
    text += byte < 0x80 ? c : static_cast<char>(0x80 | (byte & 0x3f));
  }
  return text;
}

/// A text of words, and the characters of each.
struct PackedWords {
  void add(std::string_view word) {
    text += word;
    characters.push_back(static_cast<int64_t>(word.size()) -
                         std::count_if(word.begin(), word.end(), continues_character));
  }

  template <typename Visit>
  void visit(const Visit& visit) const {
    size_t end = 0;
    for (const int64_t count : characters) {
      const size_t begin = end;
      for (int64_t i = 0; i < count && end < text.size(); ++i) {
        do ++end;
        while (end < text.size() && continues_character(text[end]));
      }
      visit(std::string_view(text).substr(begin, end - begin));
    }
  }

  std::string text;
  std::vector<int64_t> characters;
};

/// An operator that Python implements; none in a program without Python.
std::optional<c10::OperatorHandle> operator_in_python(const char* name) {
  return c10::Dispatcher::singleton().findSchema({name, ""});
}

}  // namespace

std::string path_of_text(const std::string& text) {
  std::string path;
  for (const char c : text) {  // a second byte brings six bits, its first the two above them
    if (!continues_character(c)) {
      path += c;
    } else {
      path.back() = static_cast<char>((path.back() & 3) << 6 | (c & 0x3f));
    }
  }
  return path;
}

void raise_in_python(const std::exception& thrown) {
  const auto raise = operator_in_python("posembed_python::file_error");
  if (!raise.has_value()) return;
  torch::jit::Stack stack;
  if (const auto* error = dynamic_cast<const FileFormatError*>(&thrown)) {
    stack = {text_of_path(error->path()), error->offset(), error->reason(), 0};
  } else if (const auto* error = dynamic_cast<const std::filesystem::filesystem_error*>(&thrown)) {
    const bool is_no_file = error->code() == std::errc::invalid_argument;
    const std::string hint = is_no_file ? ": expected the path of a regular file" : "";
    stack = {text_of_path(error->path1().string()), 0, error->code().message() + hint,
             error->code().value()};
  } else {
    return;
  }
  raise->callBoxed(&stack);
}

Progress progress_in_python(int64_t bar) {
  const auto tell = operator_in_python("posembed_python::progress");
  if (!tell.has_value()) return nullptr;
  return [bar, tell](int64_t done, int64_t total) {
    torch::jit::Stack stack{bar, done, total};
    tell->callBoxed(&stack);
  };
}

Missing missing_of(const std::string& text) {
  return static_cast<Missing>(
      dispatcher::index_of(text, "missing", {"mean", "zero", "random", "error"}));
}

OnBadRow on_bad_row_of(const std::string& text) {
  return static_cast<OnBadRow>(dispatcher::index_of(text, "on_bad_row", {"raise", "skip"}));
}

namespace {

/// Words whose rows are wanted.
struct WantedWords : torch::CustomClassHolder {
  WantedWords(int64_t words, int64_t bytes)
      : vocabulary(static_cast<size_t>(words), static_cast<size_t>(bytes)) {}

  void add(std::string text, std::vector<int64_t> characters) {
    PackedWords{std::move(text), std::move(characters)}.visit(
        [&](std::string_view word) { vocabulary.add(word); });
  }

  /// Those that were met `times` times.
  std::tuple<std::string, std::vector<int64_t>> met(int64_t times) const {
    PackedWords words;
    vocabulary.visit_met(static_cast<uint8_t>(times),
                         [&](std::string_view word) { words.add(word); });
    return {std::move(words.text), std::move(words.characters)};
  }

  int64_t count_met() const { return vocabulary.count_met(); }

  Vocabulary vocabulary;
};

using Words = c10::intrusive_ptr<WantedWords>;

/// A file for Python.
class OpenFile : public torch::CustomClassHolder {
 public:
  OpenFile(const std::string& path, std::string words, std::vector<int64_t> characters,
           bool check_utf8, const std::string& on_bad_row) {
    std::vector<std::string> each;
    PackedWords{std::move(words), std::move(characters)}.visit(
        [&](std::string_view word) { each.emplace_back(word); });
    const auto options = OpenOptions()
                             .words(std::move(each))
                             .check_utf8(check_utf8)
                             .on_bad_row(on_bad_row_of(on_bad_row));
    source_ = with_python_errors([&] { return open_source(path_of_text(path), options); });
  }

  std::string format() const { return name(source_->format()); }
  std::vector<std::string> names() const { return source_->names(); }

  std::vector<int64_t> shape(const std::string& name) const {
    return with_python_errors([&] { return source_->shape(name); });
  }

  /// "float32"
  std::string dtype(const std::string& name) const {
    return dispatcher::dtype_name(with_python_errors([&] { return source_->dtype(name); }));
  }

  std::tuple<std::string, std::vector<int64_t>> words() const {
    PackedWords words;
    with_python_errors([&] {
      for (const std::string& word : source_->words()) words.add(word);
    });
    return {std::move(words.text), std::move(words.characters)};
  }

  /// JSON: the number of rows, and the first of them.
  std::string skipped() const {
    const Skipped skipped = with_python_errors([&] { return source_->skipped(); });
    auto rows = nlohmann::json::array();
    for (const SkippedRow& each : skipped.rows) {
      rows.push_back({each.row, each.offset, each.word, each.reason});
    }
    return nlohmann::json{skipped.count, rows}.dump();
  }

  torch::Tensor tensor(const std::string& name, std::optional<torch::Dtype> dtype, bool copy,
                       int64_t bar) const {
    const auto read = [&] { return file().tensor(name, dtype, progress_in_python(bar), copy); };
    return with_python_errors(read);
  }

  torch::Tensor table(const std::string& tensor, std::optional<torch::Dtype> dtype,
                      int64_t bar) const {
    return with_python_errors([&] { return source_->table(options(tensor, dtype, bar)); });
  }

  std::optional<torch::Tensor> token_rows(const std::string& tensor,
                                          std::optional<torch::Dtype> dtype, bool by_word) const {
    return with_python_errors(
        [&] { return pretrained::token_rows(file(), options(tensor, dtype, 0), by_word); });
  }

  torch::Tensor rows(const Words& words, const std::string& tensor,
                     std::optional<torch::Dtype> dtype, const std::string& missing,
                     int64_t bar) const {
    const ReadOptions read = options(tensor, dtype, bar).missing(missing_of(missing));
    return with_python_errors([&] { return file().rows(words->vocabulary, read); });
  }

  void look_up(const Words& words, int64_t bar) const {
    with_python_errors([&] { file().look_up(words->vocabulary, progress_in_python(bar)); });
  }

  /// JSON of StoredCodes; empty: none.
  std::string codes(const std::string& tensor) const {
    const auto found = with_python_errors([&] { return source_->codes(tensor); });
    if (!found.has_value()) return "";
    return nlohmann::json{found->format, found->read, found->table, found->parts, found->metadata}
        .dump();
  }

  static std::string table_formats() { return table_formats_text(); }

 private:
  static ReadOptions options(const std::string& tensor, std::optional<torch::Dtype> dtype,
                             int64_t bar) {
    return ReadOptions().tensor(tensor).dtype(dtype).progress(progress_in_python(bar));
  }

  VectorFile file() const { return VectorFile(source_); }

  std::shared_ptr<const Source> source_;
};

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  m.class_<WantedWords>("Words")
      .def(torch::init<int64_t, int64_t>())
      .def("add", &WantedWords::add)
      .def("met", &WantedWords::met)
      .def("count_met", &WantedWords::count_met);
  m.class_<OpenFile>("VectorFile")
      .def(torch::init<const std::string&, std::string, std::vector<int64_t>, bool,
                       const std::string&>())
      .def("format", &OpenFile::format)
      .def("names", &OpenFile::names)
      .def("shape", &OpenFile::shape)
      .def("dtype", &OpenFile::dtype)
      .def("words", &OpenFile::words)
      .def("skipped", &OpenFile::skipped)
      .def("tensor", &OpenFile::tensor)
      .def("table", &OpenFile::table)
      .def("token_rows", &OpenFile::token_rows)
      .def("rows", &OpenFile::rows)
      .def("look_up", &OpenFile::look_up)
      .def("codes", &OpenFile::codes)
      .def_static("table_formats", &OpenFile::table_formats);
}

}  // namespace
}  // namespace posembed::pretrained
