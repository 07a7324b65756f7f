// A memory-mapped file, whose pages are read when touched and released on request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace posembed::pretrained {

/// An open file, mapped for reading. If another process shortens the file, reading bytes() ends
/// this process with SIGBUS, as with every mapped file; read() throws instead.
class MappedFile {
 public:
  /// Throws std::filesystem::filesystem_error if the path is not a readable file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  std::string_view bytes() const { return {data_, static_cast<size_t>(size_)}; }

  /// Releases the memory of [begin, end), which is read again when next touched.
  void forget(int64_t begin, int64_t end) const;

  /// Copies [begin, begin + size) to `out` without touching the map.
  void read(int64_t begin, int64_t size, char* out) const;

  /// A private mapping of [begin, begin + size): a page is copied when first written, and the file
  /// never changes. The mapping may outlive this object.
  std::shared_ptr<char> copy_on_write(int64_t begin, int64_t size) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  const char* data_ = nullptr;
};

}  // namespace posembed::pretrained
