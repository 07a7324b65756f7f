// Specifications arrive as text with every call of an operator, and are parsed once per process.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

namespace posembed::dispatcher {

/// A Value for each text that it was made of: Value(text) at the first request. Entries are never
/// removed, so references to them stay valid.
template <typename Value>
class TextCache {
 public:
  using Entry = std::pair<const std::string, const Value>;

  const Entry& find(std::string_view text) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = entries_.find(text);
      if (found != entries_.end()) return *found;
    }
    Value value(text);  // without the lock: parsing is slow, and may throw
    const std::unique_lock lock(mutex_);
    return *entries_.try_emplace(std::string(text), std::move(value)).first;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, const Value, std::less<>> entries_;
};

}  // namespace posembed::dispatcher
