// Values that are made at their first use, without a lock: a function-local static and
// std::call_once take one, which stays locked in a child that another thread forks meanwhile.
#pragma once

#include <atomic>
#include <memory>

namespace posembed::dispatcher {

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

}  // namespace posembed::dispatcher
