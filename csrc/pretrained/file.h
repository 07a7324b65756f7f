// A file that is read by system calls, not through a mapping: if another process truncates it,
// reading throws, whereas touching a mapping would end this process with SIGBUS.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace posembed::pretrained {

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

}  // namespace posembed::pretrained
