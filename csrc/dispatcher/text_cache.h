// Operators receive specifications as text at every call; this cache parses each text once.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>

namespace posembed::dispatcher {

/// Maps a text to Value(text), made at the first request. Entries are never removed, so references
/// to them stay valid.
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
    Value value(text);  // without the lock, because parsing is slow and may throw
    const std::unique_lock lock(mutex_);
    return *entries_.try_emplace(std::string(text), std::move(value)).first;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, const Value, std::less<>> entries_;
};

}  // namespace posembed::dispatcher
