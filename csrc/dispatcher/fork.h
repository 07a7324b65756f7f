// Locks, and values made once, in a process that forks. A child copies every lock as it is, and the
// thread that held one does not exist in the child.
#pragma once

#include <atomic>
#include <memory>
#include <shared_mutex>

namespace posembed::dispatcher {

// A function-local static and std::call_once take a lock, which stays locked in a child that
// another thread forks meanwhile: values are made at their first use without one.

/// Threads that come at the same time each make a value; the first one is kept. Never destroyed:
/// static objects of it need no guard.
template <typename Value>
class FirstUse {
 public:
  template <typename Make>
  const Value& get(const Make& make) const {
    if (const Value* found = value_.load(std::memory_order_acquire)) return *found;
    auto made = std::make_unique<const Value>(make());
    const Value* before = nullptr;
    if (value_.compare_exchange_strong(before, made.get())) return *made.release();
    return *before;
  }

 protected:
  mutable std::atomic<const Value*> value_{nullptr};
};

/// The same for a member of an object, with which it is destroyed.
template <typename Value>
class FirstUseMember : public FirstUse<Value> {
 public:
  FirstUseMember() = default;
  ~FirstUseMember() { delete this->value_.load(); }
  FirstUseMember(const FirstUseMember&) = delete;
  FirstUseMember& operator=(const FirstUseMember&) = delete;
};

// fork() waits until no thread writes under these locks, and opens them in the child
// (pthread_atfork), which keeps what they protect.

/// A shared mutex of an object that is made while the library is loaded and never destroyed. A
/// thread that holds one calls no code that may fork or lock another.
class ForkMutex : public std::shared_mutex {
 public:
  ForkMutex();

  ForkMutex* const next;  // made before; null for the first
};

}  // namespace posembed::dispatcher
