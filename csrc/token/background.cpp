#include "token/background.h"

#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace posembed::token {
namespace {

constexpr int most_workers = 2;
constexpr size_t most_waiting = 1024;

/// The threads of one process. Never destroyed, as they outlive main().
class Pool {
 public:
  Pool() {
    sem_init(&waiting_, /*pshared=*/0, 0);
    try {
      for (; workers < most_workers; ++workers) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {  // fewer threads, which keep this object
    }
  }

  void add(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.size() == most_waiting) return;
      tasks_.push_back(std::move(task));
    }
    sem_post(&waiting_);
  }

  const pid_t process = getpid();
  int workers = 0;

 private:
  [[noreturn]] void work() {
    for (;;) {
      std::function<void()> task;
      {
        while (sem_wait(&waiting_) != 0) {  // a signal
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  // Not std::condition_variable, whose wait() has a newer symbol than wheels may need.
  sem_t waiting_;  // counts the tasks
  std::deque<std::function<void()>> tasks_;
};

std::atomic<Pool*> current{nullptr};

}  // namespace

void run_in_background(std::function<void()> task) {
  Pool* pool = current.load(std::memory_order_acquire);
  if (pool == nullptr || pool->process != getpid()) {
    // After a fork the parent's threads do not exist, and its lock may be closed.
    Pool* const made = new Pool;
    if (made->workers == 0) {  // the next call tries again
      delete made;
      return task();
    }
    if (current.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) pool = made;
    // Otherwise another thread was first, and the threads of `made` sleep for good.
  }
  pool->add(std::move(task));
}

}  // namespace posembed::token
