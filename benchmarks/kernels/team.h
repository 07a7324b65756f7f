// Threads, clock and memory of kernel measurements.
#pragma once

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace posembed::benchmarks {

/// Seconds that the calling thread has run. Unlike the wall clock, it excludes the time that other
/// programs took.
inline double thread_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Threads that spin while they wait, so that starting them does not blur a measurement.
class Team {
 public:
  explicit Team(int size) : size_(size), time_(static_cast<size_t>(size)) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    stop_ = true;
    ++round_;
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Runs work(member, size) on every member; returns the longest time that one of them took.
  double run(const std::function<void(int, int)>& work) {
    work_ = &work;
    left_ = size_ - 1;
    ++round_;
    take_part(0);
    while (left_ > 0) {
    }
    return *std::max_element(time_.begin(), time_.end());
  }

 private:
  void serve(int member) {
    for (int seen = 0;;) {
      while (round_ == seen) {
      }
      ++seen;
      if (stop_) return;
      take_part(member);
      --left_;
    }
  }

  void take_part(int member) {
    const double start = thread_seconds();
    (*work_)(member, size_);
    time_[static_cast<size_t>(member)] = thread_seconds() - start;
  }

  int size_;
  std::vector<double> time_;
  std::vector<std::thread> threads_;
  std::atomic<int> round_{0}, left_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int, int)>* work_ = nullptr;
};

/// Memory filled with ordinary numbers, in huge pages if the system has them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_((bytes + huge - 1) / huge * huge) {
    data_ = std::aligned_alloc(huge, bytes_);
    madvise(data_, bytes_, MADV_HUGEPAGE);
    memset(data_, 0x3f, bytes_);  // 0.75 in every type: denormals would be slow
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  static constexpr size_t huge = size_t{2} << 20;
  size_t bytes_;
  void* data_;
};

}  // namespace posembed::benchmarks
