#include "pretrained/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "pretrained/bad_file.h"

namespace posembed::pretrained {
namespace {

[[noreturn]] void refuse(const char* action, const std::string& path, int error) {
  throw std::filesystem::filesystem_error(action, path, {error, std::generic_category()});
}

int64_t page_size() {
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

int open_for_reading(const std::string& path) {
  // The system would read the path only up to the zero.
  if (path.find('\0') != std::string::npos) refuse("open", path, EINVAL);
  // O_NONBLOCK: do not wait for a pipe, which is refused below.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse("open", path, errno);
  return descriptor;
}

/// A file's size; 0 with errno set if it is not a regular file.
int64_t size_of(int descriptor, int* error) {
  struct stat status {};
  *error = fstat(descriptor, &status) != 0 ? errno : 0;
  if (S_ISDIR(status.st_mode)) *error = EISDIR;
  if (*error == 0 && !S_ISREG(status.st_mode)) *error = EINVAL;
  return status.st_size;
}

void* map(int descriptor, int64_t begin, int64_t size, int protection) {
  return mmap(nullptr, static_cast<size_t>(size), protection, MAP_PRIVATE, descriptor, begin);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path), descriptor_(open_for_reading(path)) {
  int error = 0;
  size_ = size_of(descriptor_, &error);
  if (error == 0 && size_ > 0) {  // an empty file has no pages to map
    void* mapped = map(descriptor_, 0, size_, PROT_READ);
    if (mapped == MAP_FAILED) error = errno;
    data_ = static_cast<const char*>(mapped);
  }
  if (error == 0) return;
  ::close(descriptor_);
  refuse("map", path, error);
}

MappedFile::~MappedFile() {
  if (size_ > 0) munmap(const_cast<char*>(data_), static_cast<size_t>(size_));
  ::close(descriptor_);
}

void MappedFile::forget(int64_t begin, int64_t end) const {
  begin = (begin + page_size() - 1) / page_size() * page_size();
  end = end == size_ ? end : end / page_size() * page_size();
  if (begin >= end) return;
  madvise(const_cast<char*>(data_) + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

void MappedFile::read(int64_t begin, int64_t size, char* out) const {
  for (int64_t done = 0; done < size;) {
    const ssize_t count =
        pread(descriptor_, out + done, static_cast<size_t>(size - done), begin + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse("read", path_, errno);
    if (count == 0) fail(begin + done, "the file was shortened while it was read");
    done += count;
  }
}

std::shared_ptr<char> MappedFile::copy_on_write(int64_t begin, int64_t size) const {
  const int64_t lead = begin % page_size();  // maps begin at page boundaries
  const size_t length = static_cast<size_t>(size + lead);
  void* mapped = map(descriptor_, begin - lead, size + lead, PROT_READ | PROT_WRITE);
  if (mapped == MAP_FAILED) refuse("map", path_, errno);
  return {static_cast<char*>(mapped) + lead, [mapped, length](char*) { munmap(mapped, length); }};
}

}  // namespace posembed::pretrained
