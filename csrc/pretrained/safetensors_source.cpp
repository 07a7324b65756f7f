// Reads safetensors as tensors: views of a mapping of the file, or copies in another dtype, whole
// or by rows. In a sharded model, a file is open only while one of its tensors is read, because a
// model may have more files than a process may open.
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>

#include "posembed/memory.h"
#include "pretrained/file.h"
#include "pretrained/source.h"

namespace posembed::pretrained {
namespace {

/// Bytes that are read and converted at a time.
constexpr int64_t part_bytes = 4 << 20;

/// Names that a message lists.
constexpr size_t shown_names = 8;

const std::unordered_map<std::string, torch::Dtype> dtypes = {
    {"F32", torch::kFloat},
    {"F16", torch::kHalf},
    {"BF16", torch::kBFloat16},
    {"F64", torch::kDouble},
    {"I64", torch::kLong},
    {"I32", torch::kInt},
    {"I16", torch::kShort},
    {"I8", torch::kChar},
    {"U8", torch::kByte},
    {"BOOL", torch::kBool},
    {"U16", torch::kUInt16},
    {"U32", torch::kUInt32},
    {"U64", torch::kUInt64},
    {"C64", torch::kComplexFloat},
    {"F8_E4M3", torch::kFloat8_e4m3fn},
    {"F8_E5M2", torch::kFloat8_e5m2},
    {"F8_E8M0", torch::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", torch::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", torch::kFloat8_e5m2fnuz},
    {"F4", torch::kFloat4_e2m1fn_x2},
};

torch::Dtype dtype_of(const TensorEntry& entry) {
  const auto found = dtypes.find(entry.dtype);
  TORCH_CHECK_TYPE(found != dtypes.end(), "tensor ", in_quotes(entry.name),
                   ": torch has no dtype for ", entry.dtype);
  return found->second;
}

/// In torch's elements: one element holds two 4-bit numbers.
std::vector<int64_t> shape_of(const TensorEntry& entry) {
  std::vector<int64_t> shape = entry.shape;
  if (entry.dtype != "F4") return shape;
  TORCH_CHECK_TYPE(!shape.empty() && shape.back() % 2 == 0, "tensor ", in_quotes(entry.name),
                   ": torch has F4 in pairs only, the shape is ", torch::IntArrayRef(shape));
  shape.back() /= 2;
  return shape;
}

/// Whether a tensor can be a table of embeddings.
bool is_table(const TensorEntry& entry) {
  const bool is_floating = entry.dtype[0] == 'F' || entry.dtype == "BF16";
  return is_floating && entry.shape.size() == 2;
}

std::vector<TensorEntry> entries_of(const File& file) {
  const int64_t end = header_end(file.head(recognised_bytes), file.size());
  return read_header(file.head(end), file.size());
}

std::vector<ShardEntry> entries_of_index(const std::string& path) {
  const File file(path);
  if (file.size() > max_header) {
    fail(0, "an index of ", file.size(), " bytes; at most ", max_header, " are allowed");
  }
  return read_index(file.head(file.size()));
}

/// The tensors of a file, which need not stay open.
struct Header {
  explicit Header(const File& file)
      : identity(file.identity()),
        entries(with_path(file.path(), [&] { return entries_of(file); })) {
    for (const TensorEntry& entry : entries) by_name.emplace(entry.name, &entry);
  }

  Identity identity;
  std::vector<TensorEntry> entries;
  std::unordered_map<std::string, const TensorEntry*> by_name;
};

/// A tensor; to read its data, also the open file.
struct Found {
  void read(int64_t begin, int64_t size, char* out) const {
    with_path(file->path(), [&] { file->read(begin, size, out); });
  }

  std::shared_ptr<char> copy_on_write(int64_t begin, int64_t size) const {
    return with_path(file->path(), [&] { return file->copy_on_write(begin, size); });
  }

  std::shared_ptr<const Header> header;
  const TensorEntry* entry = nullptr;
  std::shared_ptr<const File> file;
};

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

/// Throws BadFile if the index names a file that does not exist.
std::shared_ptr<const File> open_shard(const std::string& index, const ShardEntry& entry) {
  try {
    return std::make_shared<File>(folder_of(index) + entry.file);
  } catch (const std::filesystem::filesystem_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) throw;
    fail(entry.byte_offset, "tensor '", entry.name, "': shard '", entry.file,
         "': ", error.code().message());
  }
}

class TensorSource : public Source {
 public:
  TensorSource(const std::string& path, bool is_index, const OpenOptions& options)
      : path_(path), words_(options.words()) {
    TORCH_CHECK_VALUE(options.on_bad_row() == OnBadRow::raise,
                      "on_bad_row: expected 'raise' for safetensors, which ", readable(path),
                      " is");
    if (is_index) {
      with_path(path, [&] {
        for (ShardEntry& entry : entries_of_index(path)) add(std::move(entry));
      });
    } else {
      file_ = std::make_shared<File>(path);
      headers_[path] = std::make_shared<Header>(*file_);
      for (const TensorEntry& entry : headers_[path]->entries)
        add({entry.name, path, entry.byte_offset});
    }
  }

  const std::string& path() const override { return path_; }
  Format format() const override { return Format::safetensors; }
  std::vector<std::string> names() const override { return names_; }

  std::vector<int64_t> shape(const std::string& name) const override {
    return shape_of(*find(name).entry);
  }

  torch::Dtype dtype(const std::string& name) const override { return dtype_of(*find(name).entry); }

  torch::Tensor tensor(const std::string& name, torch::Dtype dtype, const Progress& progress,
                       bool to_copy) const override {
    const Found found = find(name, /*to_read=*/true);
    const auto alignment = static_cast<int64_t>(c10::elementSize(dtype));
    const bool is_viewable = !to_copy && dtype == dtype_of(*found.entry) && found.entry->size > 0 &&
                             found.entry->begin % alignment == 0;
    return is_viewable ? view(found) : copy(found, dtype, progress);
  }

  torch::Tensor table(const ReadOptions& options) const override {
    const Found found = find_table(options.tensor());
    check_words_fit(found);
    const Scales scales = scales_of(found);
    if (!scales.defined() || found.entry->size == 0) {
      const torch::Dtype stored = scales.defined() ? torch::kFloat : dtype_of(*found.entry);
      return copy(found, options.dtype().value_or(stored), options.progress());
    }
    std::vector<int64_t> every(static_cast<size_t>(found.entry->shape[0]));
    std::iota(every.begin(), every.end(), 0);
    return copy_rows(found, scales, every, options);
  }

  StoredTable stored(const std::string& tensor) const override {
    const Found found = find_table(tensor);
    std::string name;
    const Scales scales = pretrained::scales_without_values(*found.entry, neighbours(), &name);
    StoredTable stored{place_of(found), std::nullopt, {}, scales.block_rows, scales.block_columns};
    if (name.empty()) return stored;
    const Found beside = find(name, /*to_read=*/true);
    if (scales.block_rows == 1) {
      stored.scale_rows = place_of(beside);
    } else {
      stored.scales = copy(beside, torch::kFloat, nullptr).reshape({-1, columns_of(beside)});
    }
    return stored;
  }

  std::optional<StoredCodes> codes(const std::string& tensor) const override {
    const Found found = find_table(tensor);
    const CodedTable coded = coded_table(*found.entry, neighbours().entry);
    if (coded.format == nullptr) return std::nullopt;
    const std::string metadata = with_path(found.file->path(), [&] {
      const File& file = *found.file;
      const int64_t end = header_end(file.head(recognised_bytes), file.size());
      return read_metadata(file.head(end), coded.module + ".weight");
    });
    return StoredCodes{coded.format->name, coded.format->read, found.entry->name, coded.parts,
                       metadata};
  }

  std::vector<std::string> words() const override { return checked_words(); }

  void look_up(Vocabulary& vocabulary, const Progress&) const override {
    for (const std::string& word : checked_words()) vocabulary.meet(word);
  }

  torch::Tensor read_rows(Vocabulary& vocabulary, const ReadOptions& options) const override {
    const Found found = find_table(options.tensor());
    check_words_fit(found);
    const auto count = static_cast<int64_t>(checked_words().size());
    std::vector<int64_t> row_of(static_cast<size_t>(vocabulary.size()), -1);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t index = vocabulary.meet(words_[static_cast<size_t>(row)]);
      if (index >= 0) row_of[static_cast<size_t>(index)] = row;
    }
    return copy_rows(found, scales_of(found), row_of, options);
  }

 private:
  void add(ShardEntry entry) {
    names_.push_back(entry.name);
    entries_.emplace(entry.name, std::move(entry));
  }

  /// Looks up a tensor; `to_read`: to read its data.
  Found find(const std::string& name, bool to_read = false) const {
    const auto found = entries_.find(name);
    TORCH_CHECK_VALUE(found != entries_.end(), "tensor: ", readable(path_), " has none named ",
                      in_quotes(name), "; its tables are: ", tables(true));
    return with_path(path_, [&] { return find_in_shard(found->second, to_read); });
  }

  /// Reads the header of a shard at its first use, and again if the file was changed since then.
  Found find_in_shard(const ShardEntry& entry, bool to_read) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<const Header>& header = headers_[entry.file];
    std::shared_ptr<const File> file = file_;
    if (!file && (to_read || !header)) file = open_shard(path_, entry);
    if (!header || (file && !(header->identity == file->identity()))) {
      header = std::make_shared<Header>(*file);
    }
    const auto found = header->by_name.find(entry.name);
    if (found != header->by_name.end()) return {header, found->second, std::move(file)};
    fail(entry.byte_offset, "tensor '", entry.name, "' is not in its shard '", entry.file, "'");
  }

  Found find_table(const std::string& given) const {
    if (given.empty()) return find_table(only_table());
    const EntryOf entry_of = neighbours().entry;
    const std::string own = entries_.count(given) > 0 ? "" : codes_of_module(given, entry_of);
    const std::string& name = own.empty() ? given : own;
    Found found = find(name, /*to_read=*/true);
    TORCH_CHECK_VALUE(found.entry->shape.size() == 2, "tensor: expected a table, ", in_quotes(name),
                      " has the shape ", torch::IntArrayRef(found.entry->shape));
    const auto codes = codes_that_need(name, entry_of);
    TORCH_CHECK_VALUE(!codes.has_value(), "tensor: expected a table, ", in_quotes(name),
                      " belongs to the codes of ", in_quotes(codes.value_or("")));
    return found;
  }

  /// The name of the only table, of numbers or of codes.
  std::string only_table() const {
    std::vector<std::string> candidates;
    std::set<std::string> parts;  // which may be tables themselves
    for (const std::string& each : names_) {
      const Found known = find(each);
      const CodedTable coded = coded_table(*known.entry, neighbours().entry);
      for (const auto& [role, name] : coded.parts) parts.insert(name);
      const bool is_code = coded.format != nullptr && known.entry->shape.size() == 2;
      const bool is_number = is_table(*known.entry) && !is_named_as_part(each);
      if (is_code || is_number) candidates.push_back(each);
    }
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [&](const std::string& each) { return parts.count(each) > 0; }),
                     candidates.end());
    TORCH_CHECK_VALUE(!candidates.empty(), "tensor: expected a name, as ", readable(path_),
                      " has no table of floating-point numbers; others are: ", tables(false));
    TORCH_CHECK_VALUE(candidates.size() == 1, "tensor: expected the name of one of the ",
                      candidates.size(), " tables in ", readable(path_), ": ", listed(candidates));
    return candidates[0];
  }

  void check_words_fit(const Found& found) const {
    const int64_t rows = shape_of(*found.entry)[0];
    TORCH_CHECK_VALUE(static_cast<int64_t>(words_.size()) <= rows, "words: expected at most the ",
                      rows, " rows of tensor ", in_quotes(found.entry->name), ", got ",
                      words_.size());
  }

  Scales scales_of(const Found& found) const {
    return pretrained::scales_of(*found.entry, neighbours());
  }

  Neighbours neighbours() const {
    const auto entry = [this](const std::string& name) {
      return entries_.count(name) > 0 ? std::optional<TensorEntry>(*find(name).entry)
                                      : std::nullopt;
    };
    const auto read = [this](const std::string& name) {
      return tensor(name, dtype(name), nullptr, /*to_copy=*/true);
    };
    return {entry, read};
  }

  /// The first few names of tables, for a message; if they are not floating, with their dtypes.
  std::string tables(bool floating) const {
    std::vector<std::string> found, dtypes;
    for (const std::string& each : names_) {
      const Found known = find(each);
      const TensorEntry& entry = *known.entry;
      if (entry.shape.size() != 2 || is_table(entry) != floating) continue;
      found.push_back(each);
      if (!floating) dtypes.push_back(" of " + entry.dtype);
      if (found.size() > shown_names) break;
    }
    return listed(found, dtypes);
  }

  static std::string listed(const std::vector<std::string>& names,
                            const std::vector<std::string>& ends = {}) {
    std::string text;
    for (size_t i = 0; i < std::min(names.size(), shown_names); ++i) {
      text += (i == 0 ? "" : ", ") + in_quotes(names[i]) + (ends.empty() ? "" : ends[i]);
    }
    return names.empty() ? "none" : text + (names.size() > shown_names ? ", ..." : "");
  }

  const std::vector<std::string>& checked_words() const {
    TORCH_CHECK_VALUE(!words_.empty(), "words: ", readable(path_),
                      " has none; give the word of each row as words");
    return words_;
  }

  /// Those of a table or, for a column of scales, 1.
  static int64_t columns_of(const Found& found) {
    const std::vector<int64_t> shape = shape_of(*found.entry);
    return shape.size() == 2 ? shape[1] : 1;
  }

  static Place place_of(const Found& found) {
    const TensorEntry& entry = *found.entry;
    const std::vector<int64_t> shape = shape_of(entry);
    return {found.file, entry.begin, shape.empty() ? 1 : shape[0], columns_of(found),
            dtype_of(entry)};
  }

  static torch::Tensor view(const Found& found) {
    const TensorEntry& entry = *found.entry;
    std::shared_ptr<char> memory = found.copy_on_write(entry.begin, entry.size);
    void* const data = memory.get();
    const auto keep = [memory = std::move(memory)](void*) {};  // unmapped with the last tensor
    return at::from_blob(data, shape_of(entry), keep, torch::dtype(dtype_of(entry)));
  }

  /// Throws for formats that torch can store but not convert.
  static void check_conversion(const TensorEntry& entry, torch::Dtype dtype) {
    TORCH_CHECK_TYPE(dtype == dtype_of(entry) || entry.dtype != "F4", "dtype: tensor ",
                     in_quotes(entry.name), ": torch does not convert F4 to ", dtype);
  }

  /// Converts a part of a tensor; `index_of` gives the index in the tensor of each of its numbers.
  template <typename IndexOf>
  static void convert_part(const Found& found, const torch::Tensor& from, const torch::Tensor& to,
                           const IndexOf& index_of) {
    const std::optional<Lost> lost = convert(from, to);
    if (!lost.has_value()) return;
    const TensorEntry& entry = *found.entry;
    const int64_t index = index_of(lost->index);
    const std::vector<int64_t> shape = shape_of(entry);
    std::string indices;
    int64_t rest = index;
    for (size_t dim = shape.size(); dim-- > 0; rest /= shape[dim]) {
      indices.insert(0, std::to_string(rest % shape[dim]) + (indices.empty() ? "" : ", "));
    }
    with_path(found.file->path(), [&] {
      const auto element = static_cast<int64_t>(c10::elementSize(dtype_of(entry)));
      fail(entry.begin + index * element, "tensor ", in_quotes(entry.name), " at [", indices,
           "]: expected a number that is finite in ", c10::getDtypeNames(to.scalar_type()).first,
           ", got ", lost->number);
    });
  }

  /// Copies in parts, so that memory holds neither the whole file nor a copy in its dtype in
  /// addition to the result.
  static torch::Tensor copy(const Found& found, torch::Dtype dtype, const Progress& progress) {
    const TensorEntry& entry = *found.entry;
    check_conversion(entry, dtype);
    torch::Tensor result = torch::empty(shape_of(entry), dtype);
    prefer_huge_pages(result);
    const auto element = static_cast<int64_t>(c10::elementSize(dtype_of(entry)));
    const int64_t size = entry.size / element;
    const bool is_same = dtype == dtype_of(entry);
    torch::Tensor part =
        torch::empty({is_same ? 0 : std::min(part_bytes / element, size)}, dtype_of(entry));
    for (int64_t begin = 0; begin < size; begin += part_bytes / element) {
      const int64_t count = std::min(part_bytes / element, size - begin);
      char* const to = is_same ? bytes_of(result) + begin * element : bytes_of(part);
      found.read(entry.begin + begin * element, count * element, to);
      if (!is_same) {
        convert_part(found, part.narrow(0, 0, count), result.view(-1).narrow(0, begin, count),
                     [&](int64_t i) { return begin + i; });
      }
      if (progress) progress((begin + count) * element, entry.size);
    }
    return result;
  }

  /// Row row_of[i] of the table for each i; zeros for -1.
  static torch::Tensor copy_rows(const Found& found, const Scales& scales,
                                 const std::vector<int64_t>& row_of, const ReadOptions& options) {
    const TensorEntry& entry = *found.entry;
    const torch::Dtype stored = dtype_of(entry),
                       dtype = options.dtype().value_or(scales.defined() ? torch::kFloat : stored);
    check_conversion(entry, dtype);
    const bool is_same = dtype == stored && !scales.defined();
    const int64_t columns = shape_of(entry)[1];
    const int64_t row_bytes = columns * static_cast<int64_t>(c10::elementSize(stored));
    const auto rows = static_cast<int64_t>(row_of.size());
    torch::Tensor result = torch::empty({rows, columns}, dtype);
    prefer_huge_pages(result);
    const int64_t part_rows = std::max<int64_t>(1, part_bytes / std::max<int64_t>(1, row_bytes));
    torch::Tensor part = torch::empty({is_same ? 0 : std::min(rows, part_rows), columns}, stored);
    for (int64_t begin = 0; begin < rows; begin += part_rows) {
      const int64_t count = std::min(part_rows, rows - begin);
      char* const to = is_same ? bytes_of(result) + begin * row_bytes : bytes_of(part);
      std::memset(to, 0, static_cast<size_t>(count * row_bytes));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = row_of[static_cast<size_t>(begin + i)];
        if (row < 0) continue;
        found.read(entry.begin + row * row_bytes, row_bytes, to + i * row_bytes);
      }
      if (!is_same) {
        torch::Tensor numbers = part.narrow(0, 0, count);
        if (scales.defined()) {
          numbers =
              scales.applied(numbers, {row_of.begin() + begin, row_of.begin() + begin + count});
        }
        convert_part(found, numbers, result.narrow(0, begin, count), [&](int64_t i) {
          return row_of[static_cast<size_t>(begin + i / columns)] * columns + i % columns;
        });
      }
      if (options.progress()) options.progress()((begin + count) * row_bytes, rows * row_bytes);
    }
    return result;
  }

  static char* bytes_of(torch::Tensor& tensor) {
    return static_cast<char*>(tensor.mutable_data_ptr());
  }

  std::string path_;
  std::vector<std::string> words_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, ShardEntry> entries_;
  std::shared_ptr<const File> file_;  // if it is the only one
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const Header>> headers_;  // of files by their names
};

}  // namespace

std::shared_ptr<const Source> open_safetensors(const std::string& path, bool is_index,
                                               const OpenOptions& options) {
  return std::make_shared<TensorSource>(path, is_index, options);
}

}  // namespace posembed::pretrained
