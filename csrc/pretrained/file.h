// Files and their formats, without torch. Files are read by system calls, not through a mapping: if
// another process truncates one, reading throws, whereas touching a mapping would end this process
// with SIGBUS.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/brief.h"
#include "core/scalar.h"

namespace posembed::pretrained {

// -------------------------------------------------------------------------------------------- utf8
// Validates UTF-8 by RFC 3629: rejects surrogates and overlong forms.

/// The length of the character at the start of `bytes`, or 0 if there is none.
inline size_t utf8_character(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(i < bytes.size() ? bytes[i] : 0); };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const uint8_t first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !continues(1)) return 0;
  if (first < 0xe0) return 2;
  if (first == 0xe0 && second < 0xa0) return 0;  // would fit in two bytes
  if (first == 0xed && second > 0x9f) return 0;  // surrogates
  if (first == 0xf0 && second < 0x90) return 0;  // would fit in three bytes
  if (first == 0xf4 && second > 0x8f) return 0;  // beyond U+10FFFF
  if (!continues(2)) return 0;
  if (first < 0xf0) return 3;
  return continues(3) ? 4 : 0;
}

/// The length of the longest prefix of `bytes` that is UTF-8.
inline size_t utf8_prefix(std::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const size_t length = utf8_character(bytes.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

/// The bytes with U+FFFD for each part that is not UTF-8, as in Python: a truncated character, or a
/// single byte.
inline std::string utf8_replaced(std::string_view bytes) {
  std::string text;
  while (true) {
    const size_t valid = utf8_prefix(bytes);
    text += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) return text;
    text += "\xef\xbf\xbd";
    size_t bad = std::min<size_t>(3, bytes.size());
    const auto begins_character = [&] {  // that two more bytes would complete
      return utf8_character(std::string(bytes.substr(0, bad)) + "\x80\x80") > bad;
    };
    while (bad > 1 && !begins_character()) --bad;
    bytes.remove_prefix(bad);
  }
}

// ---------------------------------------------------------------------------------------- bad file
// The exceptions that readers throw. They lack the file's path, which only the caller knows.

/// A malformed file: the byte at which the fault was found, and the reason.
struct BadFile : std::runtime_error {
  BadFile(int64_t offset, const std::string& reason) : std::runtime_error(reason), offset(offset) {}
  int64_t offset;
};

/// A row that cannot be read, although the file's other rows can.
struct BadRow : BadFile {
  using BadFile::BadFile;
};

/// Text of a file for a message: control characters and bytes that are not UTF-8 become question
/// marks.
inline std::string readable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  for (size_t at = utf8_prefix(text); at < text.size();) {
    text[at] = '?';
    at += utf8_prefix(std::string_view(text).substr(at));
  }
  return text;
}

/// A name from a file or a caller, for a message: readable, short and quoted.
inline std::string in_quotes(std::string_view name) {
  return "'" + readable(core::brief(name)) + "'";
}

/// A part of a message. Texts of run time may come from the file and are shortened.
template <typename Part>
decltype(auto) part_of_message(const Part& part) {
  if constexpr (std::is_same_v<Part, std::string> || std::is_same_v<Part, std::string_view>) {
    return core::brief(part);
  } else {
    return (part);
  }
}

/// Throws BadFile, or a type derived from it, with the concatenated parts.
template <typename Error = BadFile, typename... Parts>
[[noreturn]] void fail(int64_t offset, const Parts&... parts) {
  std::ostringstream reason;
  (reason << ... << part_of_message(parts));
  throw Error(offset, readable(reason.str()));
}

// -------------------------------------------------------------------------------------------- file

/// Tells whether two files are the same and unchanged.
struct Identity {
  uint64_t device, inode;
  int64_t size, seconds, nanoseconds;  // of the last change

  bool operator==(const Identity& other) const {
    return device == other.device && inode == other.inode && size == other.size &&
           seconds == other.seconds && nanoseconds == other.nanoseconds;
  }
};

/// An open file.
class File {
 public:
  /// Throws std::filesystem::filesystem_error if the path is not a readable regular file.
  explicit File(const std::string& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  /// The size when the file was opened.
  int64_t size() const { return identity_.size; }
  /// The identity when the file was opened.
  const Identity& identity() const { return identity_; }

  /// Copies [begin, begin + size) to `out`. Throws BadFile if the file has become shorter.
  void read(int64_t begin, int64_t size, char* out) const;

  /// As read() if the system holds all of it in memory; otherwise false, and `out` has any bytes.
  /// Where the system cannot tell, always false.
  bool read_cached(int64_t begin, int64_t size, char* out) const;

  /// Asks the system to load [begin, begin + size) into its memory, without waiting for it.
  void prefetch(int64_t begin, int64_t size) const;

  /// Tells the system that small parts will be read in any order, so that it reads no more.
  void read_at_random() const;

  /// The first bytes, at most `size`.
  std::string head(int64_t size) const;

  /// A private mapping of [begin, begin + size): a page is copied when first written, and the file
  /// never changes. The mapping may outlive this object. Throws BadFile if the file has become
  /// shorter; if it is truncated later, touching the mapping ends the process.
  std::shared_ptr<char> copy_on_write(int64_t begin, int64_t size) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  Identity identity_{};
};

/// The text of a file at fixed addresses, of which parts are in memory: those that were loaded and
/// not yet forgotten.
class FileText {
 public:
  explicit FileText(const File& file);
  ~FileText();
  FileText(const FileText&) = delete;
  FileText& operator=(const FileText&) = delete;

  /// Only loaded parts may be read.
  std::string_view whole() const { return {data_, static_cast<size_t>(file_.size())}; }

  /// Loads the file up to `end`, starting where the last call ended.
  void load_to(int64_t end);

  /// Releases the memory of [begin, end), which must not be read again.
  void forget(int64_t begin, int64_t end);

 private:
  const File& file_;
  char* data_ = nullptr;
  int64_t loaded_ = 0;
};

// ----------------------------------------------------------------------------------------- foreign
// Recognises other formats by their first bytes, so that an error can say what a file is and what
// to do.

/// Whether a file is an HTML page, such as an error page that a download saved.
inline bool is_html(std::string_view file) {
  const size_t begin = std::min(file.find_first_not_of("\xef\xbb\xbf \t\r\n"), file.size());
  std::string head(file.substr(begin, 9));
  std::transform(head.begin(), head.end(), head.begin(),
                 [](char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return head == "<!doctype" || head.substr(0, 5) == "<html" || head.substr(0, 5) == "<?xml";
}

/// Throws BadFile if the first bytes are those of another format.
inline void refuse_foreign(std::string_view file) {
  struct Signature {
    std::string_view bytes;
    const char* what;
  };
  constexpr Signature foreign[] = {
      {"\x1f\x8b", "a gzip archive: unpack it first"},
      {std::string_view("\xfd"
                        "7zXZ\0",
                        6),
       "an xz archive: unpack it first"},
      {"BZh", "a bzip2 archive: unpack it first"},
      {"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"},
      {"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"},
      {"PK\x03\x04",
       "a zip archive: unpack GloVe's download, or read a torch.save file by torch.load"},
      {"\x80\x02", "a pickle, which is not read because it can run code"},
      {"\x80\x04", "a pickle, which is not read because it can run code"},
      {"\x80\x05", "a pickle, which is not read because it can run code"},
      {"\x93NUMPY", "a NumPy array: read it with numpy.load"},
      {"\x89HDF\r\n\x1a\n", "an HDF5 file, which is not read"},
      {"PAR1", "a Parquet file, which is not read"},
      {"GGUF", "a GGUF model; Python's TokenEmbedding.from_file reads its token table"},
      {"version https://git-lfs", "a Git LFS pointer and not the file: run git lfs pull"},
      {"\xba\x16\x4f\x2f", "a fastText model: use its .vec file"},
  };
  if (is_html(file)) fail(0, "a web page and not the file: the download has gone wrong");
  for (const Signature& signature : foreign) {
    if (file.substr(0, signature.bytes.size()) == signature.bytes) fail(0, signature.what);
  }
}

// ------------------------------------------------------------------------------------- safetensors
// The length of a JSON header in eight bytes, the header, then the tensors' bytes without gaps.
// https://github.com/huggingface/safetensors

/// A tensor as the header describes it, checked against the file.
struct TensorEntry {
  std::string name;
  std::string dtype;  ///< in the format's words: "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t begin;        ///< of its data, in the file
  int64_t size;         ///< of its data, in bytes
  int64_t byte_offset;  ///< of its name's end in the file, for messages
};

/// A tensor's name and the file that contains it.
struct ShardEntry {
  std::string name;
  std::string file;
  int64_t byte_offset;  ///< in the index, for messages
};

/// Whether `head`, the first bytes of a file of `size` bytes, are those of a safetensors file.
bool is_safetensors(std::string_view head, int64_t size);

/// The end of the header, from the first `recognised_bytes` of a file. Throws BadFile.
int64_t header_end(std::string_view head, int64_t size);
constexpr int64_t recognised_bytes = 4096;

/// The tensors of a file of `size` bytes, in the header's order; `head` are its bytes up to
/// header_end(). Throws BadFile.
std::vector<TensorEntry> read_header(std::string_view head, int64_t size);

/// A text of the header's metadata; empty: it has none of this name. Throws BadFile.
std::string read_metadata(std::string_view head, const std::string& name);

/// The tensors of a sharded model, from its model.safetensors.index.json. Throws BadFile.
std::vector<ShardEntry> read_index(std::string_view file);

/// The maximum size in bytes of a header, set by the format, and of an index.
constexpr int64_t max_header = 100'000'000;

// ------------------------------------------------------------------------------------------- words
// Files of word vectors, read row by row without copies: word2vec binary and text, fastText .vec
// (word2vec text), GloVe text (the same without a header). Mikolov et al., arXiv:1301.3781;
// Pennington et al., "GloVe", 2014; Bojanowski et al., arXiv:1607.04606.

/// The format of a file, from its first bytes.
struct WordLayout {
  bool binary = false;  ///< float32 numbers instead of text
  int64_t rows = -1;    ///< -1: unknown, without a header
  int64_t dim = 0;      ///< numbers in a row
  int64_t begin = 0;    ///< offset of the first row
  bool tabbed = false;  ///< a TAB ends the word, whatever the word is made of
};

/// The layout of a file of `size` bytes, from its first `layout_bytes`. Throws BadFile for an
/// unknown format, and if the file is too short for its header.
WordLayout detect_layout(std::string_view head, int64_t size);

/// The maximum length in bytes of a line of text, or of a binary row's word; a longer one means
/// that the file has another format.
constexpr int64_t max_line = 1 << 22;
constexpr int64_t layout_bytes = max_line + 128;  // and a header

/// Makes a file's bytes up to `end` readable.
using Load = std::function<void(int64_t end)>;

/// A row as stored in the file.
struct Row {
  std::string_view word;
  std::string_view numbers;
  int64_t number = 0;  ///< in the file, from 1
};

/// Iterates over the rows of a file. Where the first row has a TAB after its word, the first TAB of
/// each row ends the word ("apollo 11"). Otherwise, a text row's numbers are its last `dim` parts,
/// and the rest is the word. It may contain spaces ("new york"), but the part after its last space
/// must not be a number: such a row is too wide.
class RowReader {
 public:
  /// `check_utf8`: throw BadRow for a word that is not UTF-8; otherwise replace its invalid bytes
  /// with U+FFFD. `load`: called before bytes of `file` are read, in the file's order.
  RowReader(std::string_view file, const WordLayout& layout, bool check_utf8, Load load)
      : file_(file),
        layout_(layout),
        check_utf8_(check_utf8),
        load_(std::move(load)),
        at_(layout.begin) {}

  /// The next row, or false at the end; its word is valid until the next call. Throws BadRow for a
  /// row that does not have `dim` numbers; the next call continues after it. Throws BadFile for
  /// more or fewer rows than the header says.
  bool next(Row& row);

  /// The number of the last row, from 1.
  int64_t row() const { return rows_read_; }

  /// The offset of the last row.
  int64_t begin() const { return begin_; }

  /// The beginning of the last row, for a message.
  std::string_view first_word() const;

  /// The offset of the next row.
  int64_t position() const { return at_; }

  /// Writes a row's numbers as `dim` values of type `scalar`; may be called from several threads.
  /// Throws BadRow if one is not a finite number of float32 (float64, if `scalar` is), and BadFile
  /// if such a number is not finite in a narrower `scalar`.
  void decode(const Row& row, core::Scalar scalar, void* out) const;

 private:
  std::string_view loaded() const { return file_.substr(0, static_cast<size_t>(loaded_)); }
  void load_to(int64_t end);
  /// The position where a search of loaded(), from a given position, finds something; npos at the
  /// end of the file.
  template <typename Search>
  size_t find(int64_t begin, const Search& search);
  bool at_end();
  void next_binary(Row& row);
  void next_text(Row& row);
  /// The begin and end of a line's word. Throws BadRow if the line does not have `dim` numbers.
  std::pair<size_t, size_t> word_before_tab(std::string_view line) const;
  std::pair<size_t, size_t> word_in(std::string_view line) const;
  [[noreturn]] void refuse_width(int64_t numbers) const;
  template <typename Error, typename Number>
  [[noreturn]] void refuse_range(const Row& row, std::string_view text, int64_t index,
                                 const Number& number, core::Scalar scalar) const;
  int64_t offset(std::string_view part) const { return part.data() - file_.data(); }
  template <typename Number, typename T>
  void parse(const Row& row, core::Scalar scalar, T* out) const;
  template <typename Number, typename T>
  void convert(const Row& row, core::Scalar scalar, T* out) const;

  std::string_view file_;
  WordLayout layout_;
  bool check_utf8_;
  Load load_;
  int64_t loaded_ = 0;
  int64_t at_;
  int64_t begin_ = 0;  // of the last row
  int64_t rows_read_ = 0;
  std::string replaced_;  // a word with U+FFFD
};

}  // namespace posembed::pretrained
