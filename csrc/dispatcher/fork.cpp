#include "dispatcher/fork.h"

#include <pthread.h>

#include <atomic>
#include <new>

namespace posembed::dispatcher {
namespace {

std::atomic<ForkMutex*> newest{nullptr};
thread_local ForkMutex* newest_at_fork = nullptr;  // another may be made before fork() returns

/// Shared, because readers change nothing: a fork never waits for them.
void lock_before_fork() {
  newest_at_fork = newest;
  for (ForkMutex* mutex = newest_at_fork; mutex != nullptr; mutex = mutex->next) {
    mutex->lock_shared();
  }
}

void unlock_in_parent() {
  for (ForkMutex* mutex = newest_at_fork; mutex != nullptr; mutex = mutex->next) {
    mutex->unlock_shared();
  }
}

/// New mutexes: those of the parent count readers that the child does not have.
void open_in_child() {
  for (ForkMutex* mutex = newest; mutex != nullptr; mutex = mutex->next) {
    new (static_cast<std::shared_mutex*>(mutex)) std::shared_mutex;
  }
}

const int registered = pthread_atfork(lock_before_fork, unlock_in_parent, open_in_child);

}  // namespace

ForkMutex::ForkMutex() : next(newest.load()) { newest = this; }

}  // namespace posembed::dispatcher
