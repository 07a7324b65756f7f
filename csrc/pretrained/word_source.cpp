// Reads word vectors as tensors. One thread finds the rows and all threads decode numbers, the slow
// part. Releases pages that have been read.
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>

#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "posembed/memory.h"
#include "pretrained/file.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

constexpr const char* table_name = "vectors";

void check_name(const std::string& name) {
  TORCH_CHECK_VALUE(name.empty() || name == table_name, "tensor: expected '", table_name,
                    "', the only one of a file of words, got ", in_quotes(name));
}

/// Rows to decode, each with its destination.
class Batch {
 public:
  Batch(FileText& file, const RowReader& reader, torch::Tensor& out, const Progress& progress)
      : file_(file), reader_(reader), out_(out), progress_(progress), begin_(reader.position()) {}

  void add(const Row& row, int64_t index) { rows_.push_back({row, index}); }

  /// Whether to decode now: enough rows keep all threads busy, few keep memory small.
  bool is_full() const {
    constexpr int64_t max_bytes = 8 << 20;
    constexpr size_t max_rows = 1 << 16;
    return reader_.position() - begin_ >= max_bytes || rows_.size() >= max_rows;
  }

  void finish() {
    decode();
    rows_.clear();
    file_.forget(begin_, reader_.position());
    begin_ = reader_.position();
    if (progress_) progress_(begin_, static_cast<int64_t>(file_.whole().size()));
  }

 private:
  struct Placed {
    Row row;
    int64_t index;  // of its row in `out`
  };

  void decode_some(int64_t begin, int64_t end) {
    const core::Scalar scalar = dispatcher::scalar_of(out_);
    const int64_t row_bytes = out_.size(1) * out_.element_size();
    char* const data = static_cast<char*>(out_.mutable_data_ptr());
    for (int64_t i = begin; i < end; ++i) {
      const Placed& placed = rows_[static_cast<size_t>(i)];
      reader_.decode(placed.row, scalar, data + placed.index * row_bytes);
    }
  }

  void decode() {
    if (rows_.empty()) return;
    std::mutex mutex;
    std::exception_ptr first;  // in the file's order, whichever thread met it
    int64_t first_offset = std::numeric_limits<int64_t>::max();
    const auto decode_and_note = [&](int64_t begin, int64_t end) {
      try {
        decode_some(begin, end);
      } catch (const BadFile& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (error.offset >= first_offset) return;
        first = std::current_exception();
        first_offset = error.offset;
      }
    };
    // Decoding a number takes as long as other work on 64 bytes.
    const int64_t row_cost = 64 * out_.size(1);
    dispatcher::parallel_for(static_cast<int64_t>(rows_.size()), row_cost, decode_and_note);
    if (first) std::rethrow_exception(first);
  }

  FileText& file_;
  const RowReader& reader_;
  torch::Tensor& out_;
  const Progress& progress_;
  int64_t begin_;
  std::vector<Placed> rows_;
};

/// The rows of a file that can be read, and those that cannot.
struct Survey {
  int64_t rows = 0;
  std::vector<int64_t> bad;  // numbers, ascending
  std::vector<SkippedRow> named;
};

class WordSource : public Source {
 public:
  WordSource(const std::string& path, const OpenOptions& options)
      : file_(path),
        layout_(
            with_path(path, [&] { return detect_layout(file_.head(layout_bytes), file_.size()); })),
        check_utf8_(options.check_utf8()),
        skips_(options.on_bad_row() == OnBadRow::skip) {
    TORCH_CHECK_VALUE(options.words().empty(), "words: expected none, ", readable(path),
                      " has its own");
  }

  const std::string& path() const override { return file_.path(); }

  Format format() const override {
    if (layout_.rows < 0) return Format::glove;
    return layout_.binary ? Format::word2vec_binary : Format::word2vec_text;
  }

  std::vector<std::string> names() const override { return {table_name}; }

  std::vector<int64_t> shape(const std::string& name) const override {
    check_name(name);
    return {row_count(), layout_.dim};
  }

  torch::Dtype dtype(const std::string& name) const override {
    check_name(name);
    return torch::kFloat;
  }

  torch::Tensor tensor(const std::string& name, torch::Dtype dtype, const Progress& progress,
                       bool /*to_copy*/) const override {
    return table(ReadOptions().tensor(name).dtype(dtype).progress(progress));
  }

  torch::Tensor table(const ReadOptions& options) const override {
    torch::Tensor result = make_result(row_count(), options);
    int64_t index = 0;
    read(options.progress(), &result, [&](const Row&) { return index++; });
    return result;
  }

  std::vector<std::string> words() const override {
    std::vector<std::string> result;
    read(nullptr, nullptr, [&](const Row& row) {
      result.emplace_back(row.word);
      return -1;
    });
    return result;
  }

  Skipped skipped() const override {
    return {static_cast<int64_t>(survey().bad.size()), survey().named};
  }

  void look_up(Vocabulary& vocabulary, const Progress& progress) const override {
    read(progress, nullptr, [&](const Row& row) {
      vocabulary.meet(row.word);
      return -1;
    });
  }

  torch::Tensor read_rows(Vocabulary& vocabulary, const ReadOptions& options) const override {
    torch::Tensor result = make_result(vocabulary.size(), options).zero_();
    read(options.progress(), &result, [&](const Row& row) { return vocabulary.meet(row.word); });
    return result;
  }

 private:
  torch::Tensor make_result(int64_t rows, const ReadOptions& options) const {
    check_name(options.tensor());
    torch::Tensor result =
        torch::empty({rows, layout_.dim}, options.dtype().value_or(torch::kFloat));
    dispatcher::check_floating(result, "dtype");
    prefer_huge_pages(result);
    return result;
  }

  RowReader reader(FileText& text) const {
    WordLayout layout = layout_;
    // A row with a line break in it takes two lines.
    if (skips_ && !layout.binary) layout.rows = -1;
    return RowReader(text.whole(), layout, check_utf8_, [&](int64_t end) { text.load_to(end); });
  }

  /// The rows that cannot be read, requested or not; empty if such a row is an error.
  const Survey& survey() const {
    if (!skips_) return survey_;
    std::call_once(surveyed_, [&] { with_path(path(), [&] { survey_ = read_all(); }); });
    return survey_;
  }

  Survey read_all() const {
    constexpr int64_t part = 8 << 20;
    constexpr size_t max_named = 100;
    Survey result;
    std::vector<float> numbers(static_cast<size_t>(layout_.dim));
    FileText text(file_);
    RowReader rows = reader(text);
    int64_t forgotten = rows.position();
    for (Row row;;) {
      try {
        if (!rows.next(row)) return result;
        rows.decode(row, core::Scalar::float32, numbers.data());
        ++result.rows;
      } catch (const BadRow& error) {
        result.bad.push_back(rows.row());
        if (result.named.size() < max_named) {
          const std::string word = readable(std::string(rows.first_word()));
          result.named.push_back({rows.row(), error.offset, word, error.what()});
        }
      }
      if (rows.position() - forgotten < part) continue;
      text.forget(forgotten, rows.position());
      forgotten = rows.position();
    }
  }

  /// The next row that can be read. `passed` counts the rows of `bad` that have been passed.
  bool next_good(RowReader& rows, Row& row, const std::vector<int64_t>& bad, size_t& passed) const {
    while (true) {
      try {
        if (!rows.next(row)) return false;
      } catch (const BadRow&) {
        if (!skips_) throw;
      }
      if (passed == bad.size() || bad[passed] != rows.row()) return true;
      ++passed;
    }
  }

  /// Reads all rows. `index_of` gives the row of `out` for each row, or -1.
  template <typename IndexOf>
  void read(const Progress& progress, torch::Tensor* out, const IndexOf& index_of) const {
    const std::vector<int64_t>& bad = survey().bad;
    size_t passed = 0;
    with_path(path(), [&] {
      FileText text(file_);
      RowReader rows = reader(text);
      torch::Tensor none;
      Batch batch(text, rows, out == nullptr ? none : *out, progress);
      for (Row row; next_good(rows, row, bad, passed);) {
        const int64_t index = index_of(row);
        if (index >= 0) batch.add(row, index);
        if (batch.is_full()) batch.finish();
      }
      batch.finish();
    });
  }

  /// The number of rows. Without a header, lines are counted once.
  int64_t row_count() const {
    if (skips_) return survey().rows;
    if (layout_.rows >= 0) return layout_.rows;
    std::call_once(counted_, [&] {
      row_count_ = 0;  // an earlier attempt may have failed
      read(nullptr, nullptr, [&](const Row&) {
        ++row_count_;
        return -1;
      });
    });
    return row_count_;
  }

  File file_;
  WordLayout layout_;
  bool check_utf8_;
  bool skips_;  // rows that cannot be read
  mutable std::once_flag surveyed_;
  mutable Survey survey_;
  mutable std::once_flag counted_;
  mutable int64_t row_count_ = 0;
};

}  // namespace

std::shared_ptr<const Source> open_words(const std::string& path, const OpenOptions& options) {
  return std::make_shared<WordSource>(path, options);
}

}  // namespace posembed::pretrained
