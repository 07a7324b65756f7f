#include "pretrained/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

namespace posembed::pretrained {
namespace {

[[noreturn]] void refuse(const char* action, const std::string& path, int error) {
  throw std::filesystem::filesystem_error(action, path, {error, std::generic_category()});
}

[[noreturn]] void refuse_shortened(int64_t end) {
  fail(end, "the file was shortened while it was read");
}

const int64_t page_size = sysconf(_SC_PAGESIZE);

int open_for_reading(const std::string& path) {
  // The system would read the path only up to the zero.
  if (path.find('\0') != std::string::npos) refuse("open", path, EINVAL);
  // O_NONBLOCK: do not wait for a pipe, which is refused below.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse("open", path, errno);
  return descriptor;
}

/// A file's identity; sets `error` if it is not a regular file.
Identity identity_of(int descriptor, int* error) {
  struct stat status {};
  *error = fstat(descriptor, &status) != 0 ? errno : 0;
  if (S_ISDIR(status.st_mode)) *error = EISDIR;
  if (*error == 0 && !S_ISREG(status.st_mode)) *error = EINVAL;
  const timespec& changed = status.st_mtim;
  return {status.st_dev, status.st_ino, status.st_size, changed.tv_sec, changed.tv_nsec};
}

}  // namespace

File::File(const std::string& path) : path_(path), descriptor_(open_for_reading(path)) {
  int error = 0;
  identity_ = identity_of(descriptor_, &error);
  if (error == 0) return;
  ::close(descriptor_);
  refuse("read", path, error);
}

File::~File() { ::close(descriptor_); }

void File::read(int64_t begin, int64_t size, char* out) const {
  for (int64_t done = 0; done < size;) {
    const ssize_t count =
        pread(descriptor_, out + done, static_cast<size_t>(size - done), begin + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse("read", path_, errno);
    if (count == 0) refuse_shortened(begin + done);
    done += count;
  }
}

bool File::read_cached(int64_t begin, int64_t size, char* out) const {
#ifdef RWF_NOWAIT
  const iovec target{out, static_cast<size_t>(size)};
  return preadv2(descriptor_, &target, 1, begin, RWF_NOWAIT) == size;
#else
  (void)begin, (void)size, (void)out;
  return false;
#endif
}

void File::prefetch(int64_t begin, int64_t size) const {
  posix_fadvise(descriptor_, begin, size, POSIX_FADV_WILLNEED);
}

void File::read_at_random() const { posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM); }

std::string File::head(int64_t size) const {
  std::string text(static_cast<size_t>(std::min(size, this->size())), '\0');
  read(0, static_cast<int64_t>(text.size()), text.data());
  return text;
}

std::shared_ptr<char> File::copy_on_write(int64_t begin, int64_t size) const {
  int error = 0;
  const int64_t now = identity_of(descriptor_, &error).size;
  if (error == 0 && now < begin + size) refuse_shortened(now);
  const int64_t lead = begin % page_size;  // maps begin at page boundaries
  const size_t length = static_cast<size_t>(size + lead);
  void* mapped =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor_, begin - lead);
  if (mapped == MAP_FAILED) refuse("map", path_, errno);
  return {static_cast<char*>(mapped) + lead, [mapped, length](char*) { munmap(mapped, length); }};
}

FileText::FileText(const File& file) : file_(file) {
  if (file.size() == 0) return;  // an empty file has no pages
  // Addresses only: a page takes memory when it is loaded.
  void* mapped = mmap(nullptr, static_cast<size_t>(file.size()), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) refuse("map", file.path(), errno);
  data_ = static_cast<char*>(mapped);
}

FileText::~FileText() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(file_.size()));
}

void FileText::load_to(int64_t end) {
  if (end <= loaded_) return;
  file_.read(loaded_, end - loaded_, data_ + loaded_);
  loaded_ = end;
}

void FileText::forget(int64_t begin, int64_t end) {
  begin = begin / page_size * page_size;
  end = end == file_.size() ? end : end / page_size * page_size;
  if (begin >= end) return;
  madvise(data_ + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

}  // namespace posembed::pretrained
