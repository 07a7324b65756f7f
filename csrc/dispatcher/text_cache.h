// Operators receive specifications as text at every call; this cache parses each text once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

#include "dispatcher/fork.h"

namespace posembed::dispatcher {

/// Maps a text to Value(text), made at the first request. Keeps the `limit` most recently used
/// texts: a specification that depends on a length has a new text for every length. Make it while
/// the library is loaded and never destroy it, as ForkMutex asks.
template <typename Value, size_t limit = 256>
class TextCache {
 public:
  using Pointer = std::shared_ptr<const Value>;

  Pointer find(std::string_view text) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = entries_.find(text);
      if (found != entries_.end()) {
        found->second.used.store(now(), std::memory_order_relaxed);
        return found->second.value;
      }
    }
    auto value = std::make_shared<const Value>(text);  // without the lock: parsing is slow
    const std::unique_lock lock(mutex_);
    if (entries_.size() == limit) entries_.erase(least_recent());
    return entries_.try_emplace(std::string(text), std::move(value), now()).first->second.value;
  }

 private:
  struct Entry {
    Entry(Pointer value, uint64_t used) : value(std::move(value)), used(used) {}
    Pointer value;
    std::atomic<uint64_t> used;
  };

  uint64_t now() { return clock_.fetch_add(1, std::memory_order_relaxed); }

  auto least_recent() const {
    return std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    });
  }

  ForkMutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::atomic<uint64_t> clock_ = 0;
};

}  // namespace posembed::dispatcher
